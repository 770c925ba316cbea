r"""Live video: chunk after chunk, all noise levels of different chunks in flight over the launched processes.

    torchrun --nproc-per-node 2 recipes/stream_video.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dtype bfloat16 \
        --prompt "waves at night" --height 480 --width 832 --num-frames 320 --output waves.mp4

From a prompt alone, or with --video from a file (or --camera from a camera), whose frames are changed to show the prompt:
--motion lets fast scenes get less noise. Shows frames per second, time to the first frame, latency, missed deadlines and how
busy each stage is while it runs, and writes the video as it comes. With --target-fps the noise levels are chosen by what
this machine was measured to take; it says so when none will do.

The model should be a causal one (StreamDiffusionV2, CausVid, Self-Forcing in diffusers format); any Wan text-to-video model
runs, but one that was trained on whole clips with bidirectional attention loses the thread after its first chunks. The
embedded model has a causal transformer, trained for four levels in three minutes:

    torchrun --nproc-per-node 2 recipes/stream_video.py --model recipes/tiny_wan --transformer recipes/tiny_wan_causal \
        --height 96 --width 96 --fps 12 --levels 1,0.9,0.75,0.5 --prompt "a red circle moves right" --num-frames 49 \
        --output circle.mp4
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import base_parser, check_output, run

from dit_pipelining.config_checks import check_positive
from dit_pipelining.config_sources import stream_settings
from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.consumer import DROPS
from dit_pipelining.stream.goals import StreamGoals, load_goals
from dit_pipelining.stream.spec import POLICIES, StreamSpec, fewer_levels


def main() -> None:
    args = flags().parse_args()
    check_output(args.output, (".mp4",))
    changes = prompt_changes(args.prompt_at)
    goals = goals_of(args)
    spec = spec_of(args, goals)
    check_video(args.video)
    if args.num_frames is not None:
        check_positive("--num-frames", args.num_frames)
    size = sizes(args)
    from stream_running import run_stream  # torch and diffusers, which take seconds to import

    run_stream(args, spec, goals, changes, size)


def flags() -> argparse.ArgumentParser:
    parser = base_parser(__doc__ or "")
    parser.add_argument("--prompt", required=True)
    parser.add_argument(
        "--transformer", type=Path, help="folder of another transformer than the pipeline's, a causal one"
    )
    parser.add_argument(
        "--prompt-at", nargs="*", default=[], metavar="CHUNK:PROMPT", help="another prompt from a chunk on"
    )
    parser.add_argument("--video", type=Path, help="a file whose frames are changed")
    parser.add_argument("--camera", metavar="NAME", help="a camera as imageio names it, for example '<video0>'")
    parser.add_argument("--num-frames", type=int, help="where to stop; default: 81, with a video its end")
    parser.add_argument("--fps", type=float, default=16, help="at which the video is shown: the deadline of each frame")
    parser.add_argument("--levels", default="1,0.9375,0.8333,0.625", help="noise levels, falling")
    parser.add_argument(
        "--frames-per-chunk",
        type=int,
        nargs="+",
        default=[1],
        help="latent frames; each is four frames of video. Several: chosen by measuring, with --target-fps",
    )
    parser.add_argument("--window", type=int, help="latent frames that a chunk sees before its own; default: 6 chunks")
    parser.add_argument("--sinks", type=int, default=0, help="latent frames of the beginning that every chunk sees")
    parser.add_argument("--policy", choices=POLICIES, default="level", help="whose keys and values a chunk sees")
    parser.add_argument("--noise-scale", type=float, help="noise of the first level, with a video")
    parser.add_argument("--motion", action="store_true", help="let what moves choose the noise scale")
    parser.add_argument("--target-fps", type=float, help="choose the number of levels by measuring")
    parser.add_argument(
        "--adaptive-steps", action="store_true", help="also give up levels where the rate is missed, and take them back"
    )
    parser.add_argument("--max-latency", type=float, help="seconds, with --target-fps")
    parser.add_argument("--queue", type=int, default=8, help="chunks that may wait to be written")
    parser.add_argument("--drop", choices=DROPS, default="none", help="which chunk goes when more wait")
    parser.add_argument("--output", type=Path, default=Path("stream.mp4"))
    return parser


def goals_of(args: argparse.Namespace) -> StreamGoals:
    """What the flags say, else the environment and the file of --config."""
    goals = load_goals(args.config)
    if args.target_fps is not None:
        goals = replace(goals, target_fps=args.target_fps)
    if args.adaptive_steps:
        if goals.target_fps is None:
            raise ConfigError("--adaptive-steps needs --target-fps: something to adapt to.")
        goals = replace(goals, adaptive_steps=True)
    if len(args.frames_per_chunk) > 1 and args.target_fps is None and not goals.adaptive_steps:
        raise ConfigError("--frames-per-chunk: several are a choice for --target-fps; give one.")
    return goals


def spec_of(args: argparse.Namespace, goals: StreamGoals) -> StreamSpec:
    try:
        levels = tuple(float(level) for level in args.levels.split(","))
    except ValueError:
        raise ConfigError(
            f"--levels {args.levels}: expected numbers with commas between, such as 1,0.75,0.5."
        ) from None
    if goals.stream_batch_steps is not None:
        if goals.stream_batch_steps > len(levels):
            _, told = stream_settings(args.config)["stream_batch_steps"]
            raise ConfigError(f"{told}: name as many noise levels with --levels; {args.levels} are {len(levels)}.")
        levels = fewer_levels(levels, goals.stream_batch_steps)
    for frames in args.frames_per_chunk:
        check_positive("--frames-per-chunk", frames)
    frames = args.frames_per_chunk[0]
    return StreamSpec(
        levels=levels,
        frames_per_chunk=frames,
        window=6 * frames if args.window is None else args.window,
        sinks=args.sinks,
        policy=args.policy,
        guidance_scale=1.0 if args.guidance_scale is None else args.guidance_scale,
    )


def sizes(args: argparse.Namespace) -> dict[str, Any]:
    if args.height is None or args.width is None:
        raise ConfigError("--height and --width are needed: the stages are cut for one size.")
    return dict(
        height=args.height, width=args.width, prompt=args.prompt, negative_prompt=args.negative_prompt, seed=args.seed
    )


def prompt_changes(texts: list[str]) -> dict[int, str]:
    changes = {}
    for text in texts:
        chunk, _, prompt = text.partition(":")
        if not chunk.isdigit() or not prompt:
            raise ConfigError(f"--prompt-at {text!r}: expected a chunk's number, a colon and a prompt.")
        changes[int(chunk)] = prompt
    return changes


def check_video(path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise ConfigError(f"--video {path}: there is no such file.")


if __name__ == "__main__":
    run(main)
