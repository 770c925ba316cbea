"""What the recipes share: their flags, how they load a pipeline, and where results go.

Torch and diffusers take seconds to import. Functions that need them import them, so that `--help` and a wrong flag are answered
at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from contact_sheet import contact_sheet

import dit_pipelining
from dit_pipelining.config import SCHEDULES, ULYSSES_MODES, ParallelConfig
from dit_pipelining.config_checks import integer_in
from dit_pipelining.config_sources import load_config
from dit_pipelining.errors import USER_ERRORS, ConfigError, RemoteRankError
from partitioners import PARTITIONERS

if TYPE_CHECKING:
    import torch
    from PIL import Image

DTYPES = ("bfloat16", "float16", "float32")


def parser(description: str, output: str) -> argparse.ArgumentParser:
    """Flags of the recipes that take prompts from the command line. Those left out mean the model's own defaults."""
    flags = base_parser(description)
    flags.add_argument("--prompt", required=True, nargs="+", help="one prompt, or several that run as microbatches")
    flags.add_argument("--output", type=Path, default=Path(output), help="several prompts add -0, -1, ... to the name")
    flags.add_argument(
        "--schedule", choices=SCHEDULES, help="default: gpipe for several prompts on one line of stages, else rolling"
    )
    flags.add_argument(
        "--microbatches", type=int, help="parts a batch is cut into along the stages; default: one per prompt"
    )
    return flags


def base_parser(description: str) -> argparse.ArgumentParser:
    """Flags of all recipes: the model, what it makes, and how it is spread over the processes."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", required=True, help="a diffusers pipeline's folder, or a hub id")
    flags.add_argument("--negative-prompt")
    flags.add_argument("--width", type=int)
    flags.add_argument("--height", type=int)
    flags.add_argument("--num-inference-steps", type=int)
    flags.add_argument(
        "--guidance-scale", "--cfg-scale", type=float, metavar="SCALE", help="of classifier-free guidance"
    )
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as diffusers loads them")
    flags.add_argument("--variant", help="of the checkpoint's files, for example fp16")
    flags.add_argument("--config", type=Path, metavar="FILE", help="fields of ParallelConfig as YAML; flags beat it")
    flags.add_argument("--pipeline-parallel-size", type=int, metavar="STAGES", help="default: all launched processes")
    flags.add_argument("--cfg-parallel-size", type=int, metavar="REPLICAS")
    flags.add_argument("--ulysses-degree", "--usp", type=int, metavar="RANKS", help="that exchange heads for tokens")
    flags.add_argument("--ring-degree", type=int, metavar="RANKS", help="that gather each other's keys and values")
    flags.add_argument("--ulysses-mode", choices=ULYSSES_MODES, help="anything: any number of tokens; default: strict")
    flags.add_argument(
        "--vae-patch-parallel-size", type=int, metavar="RANKS", help="ranks that compute the VAE's tiles together"
    )
    flags.add_argument("--text-encoder-tp-size", type=int, metavar="RANKS", help="over which text encoders are split")
    flags.add_argument("--vae-use-tiling", action="store_true", help="let the VAE work tile by tile")
    flags.add_argument("--partitioner", choices=sorted(PARTITIONERS), help="default: balanced")
    flags.add_argument("--partition", help="blocks per stage, for example 8,12,12,8")
    flags.add_argument(
        "--tensor-parallel-size", type=int, metavar="RANKS", help="over which each block's heads are split"
    )
    flags.add_argument("--use-hsdp", action="store_true", default=None, help="keep weights sharded between replicas")
    flags.add_argument("--hsdp-shard-size", type=int, metavar="RANKS", help="default: all that hold the same stage")
    flags.add_argument("--ranks", help="what the ranks are, for example rtx4090,rtx3090 or 24GB*2,16GB")
    return flags


def video_flags(flags: argparse.ArgumentParser) -> None:
    """Flags of what is made of frames."""
    flags.add_argument("--num-frames", type=int)
    flags.add_argument("--fps", type=int, default=16, help="of the file; the model does not know it")
    flags.add_argument("--contact-sheet", action="store_true", help="also save the frames side by side, as PNG")


def load(args: argparse.Namespace, **options: Any) -> Any:
    """The pipeline over the ranks of this launch, for the flags of `parser`; options as for `load_pipeline`."""
    several = len(args.prompt) > 1
    defaults: dict[str, Any] = {"microbatches": len(args.prompt)}
    if several and parallel_config(args).cfg_parallel_size == 1:
        defaults["schedule"] = "gpipe"
    config = parallel_config(args, defaults, schedule=args.schedule, microbatches=args.microbatches)
    return load_with(args, config, **options)


def parallel_config(args: argparse.Namespace, defaults: Mapping[str, Any] | None = None, **more: Any) -> ParallelConfig:
    """What the flags, the environment and the file of --config say about the ranks, in this order; else the defaults."""
    return load_config(
        args.config,
        defaults={"strategy": "auto", **(defaults or {})},
        pipeline_parallel_size=args.pipeline_parallel_size,
        cfg_parallel_size=args.cfg_parallel_size,
        ulysses_degree=args.ulysses_degree,
        ring_degree=args.ring_degree,
        ulysses_mode=args.ulysses_mode,
        vae_patch_parallel_size=args.vae_patch_parallel_size,
        text_encoder_tp_size=args.text_encoder_tp_size,
        partitioner=args.partitioner,
        partition=args.partition,
        tensor_parallel_size=args.tensor_parallel_size,
        use_hsdp=args.use_hsdp,
        hsdp_shard_size=args.hsdp_shard_size,
        ranks=args.ranks,
        **more,
    )


def load_with(args: argparse.Namespace, config: ParallelConfig, **options: Any) -> Any:
    """The pipeline that the flags name, spread as the configuration says."""
    pipeline = dit_pipelining.load_pipeline(args.model, config, dtype=dtype_of(args), variant=args.variant, **options)
    if args.vae_use_tiling:
        vae = getattr(pipeline, "vae", None)
        if not hasattr(vae, "tiled_decode"):
            raise ConfigError(f"--vae-use-tiling: {type(vae).__name__}, this pipeline's VAE, cannot work tile by tile.")
        vae.enable_tiling()
    return pipeline


def dtype_of(args: argparse.Namespace) -> torch.dtype | None:
    """What --dtype names; None: as diffusers loads them."""
    import torch

    return getattr(torch, args.dtype) if args.dtype else None


def run(recipe: Callable[[], None]) -> None:
    """Run a recipe; what a user can mend, or what another rank failed by, is told by the first rank, without a traceback.

    A ValueError is what diffusers' pipelines refuse arguments by; the line that raised it is told with it.
    """
    try:
        recipe()
    except (*USER_ERRORS, RemoteRankError, ValueError) as error:
        known = isinstance(error, (*USER_ERRORS, RemoteRankError))
        place = "" if known else " ({0.filename}:{0.lineno})".format(traceback.extract_tb(error.__traceback__)[-1])
        if is_main_rank():
            print(f"{type(error).__name__}: {error}{place}", file=sys.stderr)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            _tell_torchrun(error)
        raise SystemExit(1) from None
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _tell_torchrun(error: Exception) -> None:
    """Put the error into the report that torchrun ends with, which would else advise to enable tracebacks."""
    from torch.distributed.elastic.multiprocessing.errors import record

    def fail() -> None:
        raise error.with_traceback(None)

    with suppress(type(error)):
        record(fail)()


def check_output(path: Path, suffixes: tuple[str, ...]) -> None:
    """Refuse an output that could not be written, before anything is generated."""
    if path.suffix not in suffixes or path.is_dir():
        raise ConfigError(f"--output {path}: expected a file that ends in {' or '.join(suffixes)}.")
    path.parent.mkdir(parents=True, exist_ok=True)


def call_arguments(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The arguments of the pipeline's call, without the flags that were left out."""
    prompts = args.prompt
    call: dict[str, Any] = {"prompt": prompts if len(prompts) > 1 else prompts[0]}
    if args.negative_prompt is not None:
        call["negative_prompt"] = [args.negative_prompt] * len(prompts) if len(prompts) > 1 else args.negative_prompt
    given = {name: getattr(args, name) for name in names}
    call.update({name: value for name, value in given.items() if value is not None})
    # One generator per prompt, so that each gets the noise it would get alone.
    generators = [seeded(args.seed + i) for i in range(len(prompts))]
    call["generator"] = generators if len(prompts) > 1 else generators[0]
    return call


def seeded(seed: int) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(seed)


def is_main_rank() -> bool:
    """Whether this is the launch's first process, or the only one."""
    return integer_in(os.environ, "RANK", 0) == 0


def report(pipeline: Any) -> None:
    """Say how the pipeline is spread over the ranks."""
    from dit_pipelining.runtime.report import print_split

    print_split(pipeline)


def numbered(path: Path, index: int, count: int) -> Path:
    """`out.mp4` for one result, `out-0.mp4`, `out-1.mp4` for several."""
    return path if count == 1 else path.with_stem(f"{path.stem}-{index}")


def save_videos(pipeline: Any, videos: Sequence[np.ndarray], args: argparse.Namespace) -> None:
    """On the first rank: say how the pipeline was split, write the videos, and say where they are."""
    if not is_main_rank():
        return
    report(pipeline)
    for i, frames in enumerate(videos):
        path = save_video(frames, numbered(args.output, i, len(videos)), args.fps)
        print(f"video: {path}")
        if args.contact_sheet:
            print(f"frames: {contact_sheet(frames, path.with_suffix('.png'), scale=2)}")


def save_images(pipeline: Any, images: Sequence[Image.Image], args: argparse.Namespace) -> None:
    """On the first rank: say how the pipeline was split, write the images, and say where they are."""
    if not is_main_rank():
        return
    report(pipeline)
    for i, image in enumerate(images):
        path = numbered(args.output, i, len(images))
        image.save(path)
        print(f"image: {path}")


def save_video(frames: np.ndarray, path: Path, fps: int) -> Path:
    """Write frames (frames, height, width, 3) with values in [0, 1]; a GIF where there is no encoder for mp4.

    Returns:
        where the video is.
    """
    from diffusers.utils import export_to_gif, export_to_video

    images = list(frames)
    if path.suffix != ".gif":
        try:
            export_to_video(images, str(path), fps=fps)
            return path
        except ImportError as error:
            path = path.with_suffix(".gif")
            print(f"no video encoder ({error}); writing {path} instead")
    from PIL import Image

    export_to_gif([Image.fromarray((frame * 255).round().astype("uint8")) for frame in images], str(path), fps=fps)
    return path
