"""Measures how well videos of the tiny model follow their prompts, over attribute combinations that training never showed.

Every prompt names objects, colours, motions and a background; plain image processing reads them back from the video
(`tiny_world_measure.py`). For comparison the same measure is taken without guidance, with an empty prompt, on videos drawn
by the world itself and on those after a trip through the VAE.

    python recipes/evaluate_tiny_wan.py --model recipes/tiny_wan --prompts 96
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from contact_sheet import contact_sheet
from diffusers import UniPCMultistepScheduler, WanPipeline
from tiny_world import HEIGHT, NUM_FRAMES, WIDTH, Scene, held_out_scenes
from tiny_world_measure import score
from tiny_world_render import render

GROUPS = ("new colour and shape", "new shape and motion", "two objects")
ATTRIBUTES = ("color", "shape", "motion", "background")


def generate(
    pipe: WanPipeline, prompts: list[str], steps: int, guidance: float, seed: int, batch: int, progress: str
) -> np.ndarray:
    """Videos (prompts, frames, height, width, 3) in [0, 1]; each prompt has its own seed, whatever the batch size.

    Args:
        pipe: The pipeline.
        prompts: What to generate.
        steps: Denoising steps.
        guidance: Guidance scale; 1 is no guidance.
        seed: Seed of the first prompt; the next has the next seed.
        batch: Prompts per call.
        progress: Words in front of the progress bar.
    """
    videos = []
    pipe.set_progress_bar_config(desc=progress, mininterval=5.0, leave=False)
    for start in range(0, len(prompts), batch):
        chunk = prompts[start : start + batch]
        generators = [torch.Generator("cpu").manual_seed(seed + start + index) for index in range(len(chunk))]
        output = pipe(
            prompt=chunk,
            height=HEIGHT,
            width=WIDTH,
            num_frames=NUM_FRAMES,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generators,
            output_type="np",
        )
        videos.append(output.frames)
    return np.concatenate(videos)


def _score_one(pair: tuple[Scene, np.ndarray]) -> dict[str, float]:
    torch.set_num_threads(1)
    return score(*pair)


def adherence(scenes: Sequence[Scene], videos: np.ndarray, workers: int) -> dict[str, dict[str, float]]:
    """Mean score per attribute: over all scenes ("all") and for each group of held-out scenes.

    Args:
        scenes: What was asked for, in the order of `held_out_scenes`.
        videos: What was made, (scenes, frames, height, width, 3) in [0, 1].
        workers: Processes to measure with.
    """
    pairs = list(zip(scenes, videos, strict=True))
    if workers > 1:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as executor:
            scores = list(executor.map(_score_one, pairs, chunksize=4))
    else:
        scores = [_score_one(pair) for pair in pairs]
    groups = {"all": scores} | {name: scores[index :: len(GROUPS)] for index, name in enumerate(GROUPS)}
    return {
        name: {attribute: float(np.mean([s[attribute] for s in members])) for attribute in ATTRIBUTES}
        for name, members in groups.items()
        if members
    }


def world_videos(scenes: Sequence[Scene], seed: int) -> torch.Tensor:
    """The scenes as the world draws them, (scenes, 3, frames, height, width) in [-1, 1]."""
    return render(scenes, NUM_FRAMES, HEIGHT, torch.Generator().manual_seed(seed))[0]


def as_frames(videos: torch.Tensor) -> np.ndarray:
    """(videos, 3, frames, height, width) in [-1, 1] as (videos, frames, height, width, 3) in [0, 1]."""
    return (videos.float().cpu().permute(0, 2, 3, 4, 1).numpy() / 2 + 0.5).clip(0, 1)


@torch.no_grad()
def through_vae(pipe: WanPipeline, videos: torch.Tensor, batch: int) -> torch.Tensor:
    """The videos after `encode` and `decode`."""
    parts = [pipe.vae.decode(pipe.vae.encode(p).latent_dist.mode()).sample for p in videos.to(pipe.device).split(batch)]
    return torch.cat(parts).cpu()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("recipes/tiny_wan"))
    parser.add_argument("--prompts", type=int, default=96, help="held-out scenes to ask for")
    parser.add_argument("--steps", type=int, nargs="+", default=[25], help="denoising steps; several are compared")
    parser.add_argument(
        "--guidance", type=float, nargs="+", default=[6.0, 1.0], help="guidance scales; several are compared"
    )
    parser.add_argument(
        "--flow-shift", type=float, nargs="+", help="flow shifts of the scheduler; several are compared"
    )
    parser.add_argument("--no-controls", action="store_true", help="leave out empty prompts, the world and the VAE")
    parser.add_argument("--batch", type=int, default=8, help="prompts per call of the pipeline")
    parser.add_argument("--workers", type=int, default=1, help="processes that measure")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--sheet", type=Path, help="write frames of the first twelve videos of the first setting here")
    options = parser.parse_args(arguments)
    pipe = WanPipeline.from_pretrained(options.model).to(options.device)
    scenes = held_out_scenes(options.prompts)
    prompts = [scene.prompt for scene in scenes]
    results: dict[str, dict[str, dict[str, float]]] = {}

    def report(name: str, videos: np.ndarray, seconds: float | None = None) -> None:
        results[name] = adherence(scenes, videos, options.workers)
        took = "" if seconds is None else f"  ({seconds / len(videos):.2f} s per video)"
        for group, figures in results[name].items():
            values = "  ".join(f"{attribute} {figures[attribute]:6.1%}" for attribute in ATTRIBUTES)
            print(
                f"{name if group == 'all' else '  ' + group:44s} {values}{took if group == 'all' else ''}", flush=True
            )

    shifts = options.flow_shift or [pipe.scheduler.config.flow_shift]
    for shift in shifts:
        pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=shift)
        for steps in options.steps:
            for guidance in options.guidance:
                name = f"guidance {guidance:g}, {steps} steps, shift {shift:g}"
                started = time.perf_counter()
                videos = generate(pipe, prompts, steps, guidance, options.seed, options.batch, name)
                report(name, videos, time.perf_counter() - started)
                if options.sheet and len(results) == 1:
                    frames = videos[:12, :: (NUM_FRAMES - 1) // 6]
                    contact_sheet(frames.reshape(-1, HEIGHT, WIDTH, 3), options.sheet, columns=7)
    if not options.no_controls:
        empty = generate(pipe, [""] * len(scenes), options.steps[0], 1.0, options.seed, options.batch, "empty prompt")
        report("empty prompt", empty)
        world = world_videos(scenes, options.seed)
        report("drawn by the world", as_frames(world))
        report("drawn by the world, through the VAE", as_frames(through_vae(pipe, world, options.batch)))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
