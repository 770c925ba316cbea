"""Host memory of each rank over a long denoising loop with several requests in flight.

    OMP_NUM_THREADS=1 python recipes/benchmarks/memory.py [--json FILE] [--steps 500]

The embedded Wan on two gloo ranks, four guided requests of 500 steps each by `generate`: 4,000 calls of the transformer,
each with its inputs, a result that is broadcast, deferred operations on it, and an entry in the queue of the stage. None of
it may outlive its step. After each step of the first request every rank notes its anonymous resident memory (RssAnon).

Target: after the first 20 steps no rank has more than 2% above what it had then. A kilobyte that stays per call would be
about 1%.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loading import rss_anon
from ranks import on_ranks
from reporting import show, write

MODEL = Path(__file__).resolve().parents[1] / "tiny_wan"
STAGES = 2
WARM_UP_STEPS = 20
LARGEST_GROWTH = 0.02


def run(requests: int, steps: int, pixels: int, frames: int) -> list[int]:
    """RssAnon of this rank in bytes after each step of the first request."""
    import torch

    from dit_pipelining.api import ParallelConfig, generate, load_pipeline

    pipeline = load_pipeline(MODEL, ParallelConfig(pipeline_parallel_size=STAGES))
    memory: list[int] = []

    def note(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        memory.append(rss_anon())
        return tensors

    calls: list[dict[str, Any]] = [
        dict(
            prompt=f"a red circle moves {direction}",
            height=pixels,
            width=pixels,
            num_frames=frames,
            num_inference_steps=steps,
            guidance_scale=6.0,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        )
        for seed, direction in enumerate((["left", "right", "up", "down"] * requests)[:requests])
    ]
    calls[0]["callback_on_step_end"] = note
    generate(pipeline, calls)
    return memory


def growth(memory: Sequence[int]) -> dict[str, float]:
    """How much memory rises after the first steps: its peak, as a share, and its trend, in bytes per step."""
    base, later = memory[WARM_UP_STEPS - 1], memory[WARM_UP_STEPS:]
    trend = statistics.linear_regression(range(len(later)), later).slope
    return {"after_warm_up": base, "peak": max(later), "growth": max(later) / base - 1, "bytes_per_step": trend}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--pixels", type=int, default=48)
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=1200, help="seconds")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    if args.steps < 2 * WARM_UP_STEPS:
        parser.error(f"--steps {args.steps}: at least {2 * WARM_UP_STEPS}, since the first {WARM_UP_STEPS} warm up")
    size = (args.requests, args.steps, args.pixels, args.frames)
    ranks = on_ranks(STAGES, run, *size, timeout=args.timeout)
    figures = [growth(memory) for memory in ranks]
    marks = [step for step in (1, WARM_UP_STEPS, 100) if step < args.steps] + [args.steps]
    rows = [
        {
            "rank": str(rank),
            **{f"step {mark}": f"{memory[mark - 1] / 2**20:.1f}" for mark in marks},
            "growth": f"{figure['growth']:.2%}",
            "bytes/step": f"{figure['bytes_per_step']:.0f}",
        }
        for rank, (memory, figure) in enumerate(zip(ranks, figures, strict=True))
    ]
    show(f"RssAnon in MiB, {args.requests} requests of {args.steps} steps on {STAGES} ranks", rows)
    met = all(figure["growth"] <= LARGEST_GROWTH for figure in figures)
    about = dict(requests=args.requests, steps=args.steps, pixels=args.pixels, frames=args.frames)
    write(args.json, {**about, "ranks": figures, "every_tenth_step": [m[::10] for m in ranks], "target_met": met})
    if not met:
        raise SystemExit(f"memory grew by more than {LARGEST_GROWTH:.0%}")


if __name__ == "__main__":
    main()
