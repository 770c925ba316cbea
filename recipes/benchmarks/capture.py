"""Capture a transformer and cut it into stages, without weights, against `torch.distributed.pipelining.pipeline()`.

Both get the same model without weights and cut at the same blocks. Each run has its own process; the two take turns.

By counting: torch exports every operation of every block (Wan 14B: 40 blocks of about 100 operations), this project one
call per block and about 100 operations of glue. Each block still runs once on tensors without data to learn its shapes,
which is what is left of the time. Target: a third of torch's time, and 1.5 GB at the peak, imports included.

Seen (AMD EPYC, 1 thread, torch 2.13.0, a machine shared with other work): Wan 1.6 s against 13.0 s, FLUX 3.2 s against
24.2 s; 0.42 GB against 0.6 GB at the peak.

    python recipes/benchmarks/capture.py --json recipes/benchmarks/results/capture.json
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from reporting import show, spread, write
from torch import nn

from partitioners import ModelCosts, RankSpec, uniform

LARGEST_SHARE_OF_TIME = 1 / 3
LARGEST_PEAK = 1.5e9


@dataclass(frozen=True)
class Subject:
    """A model to capture: how it is built, what it is called with, and the names of its blocks."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    blocks: tuple[str, ...]


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel()  # the defaults are Wan 2.1's 14B


def wan_inputs() -> dict[str, Any]:
    """720p: latents of 90 x 160; 81 frames: 21 latent frames."""
    return dict(
        hidden_states=empty(1, 16, 21, 90, 160),
        timestep=empty(1, dtype=torch.int64),
        encoder_hidden_states=empty(1, 512, 4096),
        return_dict=False,
    )


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(guidance_embeds=True)  # the defaults are FLUX.1-dev's


def flux_inputs() -> dict[str, Any]:
    """1024 x 1024 pixels: 64 x 64 tokens."""
    return dict(
        hidden_states=empty(1, 4096, 64),
        encoder_hidden_states=empty(1, 512, 4096),
        pooled_projections=empty(1, 768),
        timestep=empty(1),
        guidance=empty(1),
        img_ids=empty(4096, 3),
        txt_ids=empty(512, 3),
        return_dict=False,
    )


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


SUBJECTS = {
    "wan-14b-720p": Subject(wan, wan_inputs, tuple(f"blocks.{i}" for i in range(40))),
    "flux.1-dev-1024": Subject(
        flux,
        flux_inputs,
        (*(f"transformer_blocks.{i}" for i in range(19)), *(f"single_transformer_blocks.{i}" for i in range(38))),
    ),
}


def run_ours(subject: Subject, num_stages: int) -> dict[str, float]:
    from accelerate import init_empty_weights

    from dit_pipelining.api import split_model

    with init_empty_weights(include_buffers=False):
        model = subject.build()
    before = peak_bytes()
    start = time.perf_counter()
    split = split_model(model, num_stages, subject.inputs(), partitioner="uniform")
    seconds = time.perf_counter() - start
    called = tuple(str(node.target) for node in split.graph.blocks)
    assert called == subject.blocks, "the blocks of the two sides are not the same"
    return {"seconds": seconds, "peak_bytes": peak_bytes(), "peak_bytes_before": before}


def run_torch(subject: Subject, num_stages: int) -> dict[str, float]:
    from torch.distributed.pipelining import SplitPoint, pipeline

    with torch.device("meta"):
        model = subject.build()
    partition = uniform(ModelCosts.uniform(len(subject.blocks)), [RankSpec()] * num_stages)
    spec = {subject.blocks[start]: SplitPoint.BEGINNING for start, _ in partition.ranges[1:]}
    before = peak_bytes()
    start = time.perf_counter()
    pipe = pipeline(model, mb_args=(), mb_kwargs=subject.inputs(), split_spec=spec)
    seconds = time.perf_counter() - start
    assert pipe.num_stages == num_stages
    return {"seconds": seconds, "peak_bytes": peak_bytes(), "peak_bytes_before": before}


SIDES = {"dit_pipelining": run_ours, "torch pipeline()": run_torch}


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(subject: str, side: str, num_stages: int) -> dict[str, float]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--subject", subject, "--side", side, "--num-stages", str(num_stages)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="runs of each side (default: 3)")
    parser.add_argument("--subject", choices=SUBJECTS, help="one model only (default: all)")
    parser.add_argument("--side", choices=SIDES, help="run one side in this process and print its figures")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(SIDES[args.side](SUBJECTS[args.subject or "wan-14b-720p"], args.num_stages)))
        return

    rows, results = [], {}
    for subject in [args.subject] if args.subject else SUBJECTS:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(args.runs):
            for side in SIDES:
                runs[side].append(measure(subject, side, args.num_stages))
        figures = {side: {key: spread([run[key] for run in runs[side]]) for key in runs[side][0]} for side in SIDES}
        ours, peer = figures.values()
        share = ours["seconds"]["median"] / peer["seconds"]["median"]
        met = share <= LARGEST_SHARE_OF_TIME and ours["peak_bytes"]["max"] <= LARGEST_PEAK
        results[subject] = {**figures, "share_of_time": share, "target_met": met}
        rows += [
            {
                "model": subject,
                "by": side,
                "seconds (median)": f"{figure['seconds']['median']:.2f}",
                "range": f"{figure['seconds']['min']:.2f} to {figure['seconds']['max']:.2f}",
                "peak RSS": f"{figure['peak_bytes']['max'] / 1e9:.2f} GB",
                "share of torch's time": f"{figure['seconds']['median'] / peer['seconds']['median']:.2f}",
            }
            for side, figure in figures.items()
        ]
    show(f"Capture and split into {args.num_stages} stages, without weights", rows)
    write(args.json, {"num_stages": args.num_stages, "runs": args.runs, "models": results})


if __name__ == "__main__":
    main()
