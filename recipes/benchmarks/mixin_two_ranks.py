"""A hand-written pipeline over two ranks on GPUs, in bfloat16, against one process.

    python recipes/benchmarks/mixin_two_ranks.py [--json FILE] [--backend nccl gloo]

nccl needs a GPU for each rank. With gloo both ranks share a GPU, and tensors go through pinned host memory. Without GPUs, gloo
runs on the CPU. The latents of a denoising loop must be within --tolerance (1e-2) of one process's, and the shapes change in
between. The script ends with exit code 1 if they are not.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from mixin_pipeline import LinearPipeline, on_ranks
from reporting import show, write

from dit_pipelining.mixins import get_pp_group

LAYERS = 8
CASES = (("one branch", False), ("two branches", True))


def loops(steps: int, dim: int, most_tokens: int) -> list[dict[str, Any]]:
    """Latents and seconds per step of each case, on this rank."""
    group = get_pp_group()
    pipeline = LinearPipeline(LAYERS, dim, torch.bfloat16, group.device)
    results = []
    for name, guided in CASES:
        for tokens in (most_tokens, most_tokens // 2, most_tokens):
            generator = torch.Generator().manual_seed(tokens)
            latents = torch.randn((tokens, dim), generator=generator).to(group.device, torch.bfloat16)
            result = pipeline.diffuse(latents, 2, guided)  # layouts become known, kernels are loaded
            _synchronize(group.device)
            started = time.perf_counter()
            result = pipeline.diffuse(latents, steps, guided)
            _synchronize(group.device)
            seconds = (time.perf_counter() - started) / steps
            results.append(dict(case=name, tokens=tokens, seconds=seconds, latents=result.float().cpu().numpy()))
    return results


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    possible = ["gloo", *(["nccl"] if gpus >= 2 else [])]
    parser.add_argument("--backend", nargs="+", choices=["nccl", "gloo"], default=possible)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dim", type=int, default=2048 if gpus else 256)
    parser.add_argument("--tokens", type=int, default=4096 if gpus else 256)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--json")
    args = parser.parse_args()
    if "nccl" in args.backend and gpus < 2:
        raise SystemExit(f"--backend nccl needs a GPU for each of two ranks; this machine has {gpus}")
    sizes = (args.steps, args.dim, args.tokens)
    (alone,) = on_ranks(1, "gloo", loops, *sizes)
    rows, entries = [], []
    for backend in args.backend:
        by_rank = on_ranks(2, backend, loops, *sizes)
        for i, expected in enumerate(alone):
            error = max(float(abs(runs[i]["latents"] - expected["latents"]).max()) for runs in by_rank)
            exact = all(np.array_equal(runs[i]["latents"], expected["latents"]) for runs in by_rank)
            entry = dict(
                backend=backend,
                case=expected["case"],
                tokens=expected["tokens"],
                largest_error=error,
                bitwise_equal=exact,
                milliseconds_per_step=1000 * max(runs[i]["seconds"] for runs in by_rank),
                milliseconds_per_step_alone=1000 * expected["seconds"],
            )
            entries.append(entry)
            rows.append(
                {
                    "backend": backend,
                    "case": f"{expected['case']}, {expected['tokens']} tokens",
                    "largest error": f"{error:.2g}",
                    "bitwise": str(exact),
                    "ms a step": f"{entry['milliseconds_per_step']:.2f}",
                    "alone": f"{entry['milliseconds_per_step_alone']:.2f}",
                }
            )
    show("A hand-written pipeline over two ranks, bfloat16", rows)
    device = torch.cuda.get_device_name() if gpus else "CPU"
    write(args.json, {"device": device, "gpus": gpus, "dim": args.dim, "tolerance": args.tolerance, "runs": entries})
    if worst := [entry for entry in entries if not entry["largest_error"] <= args.tolerance]:  # nan is wrong, too
        raise SystemExit(f"{len(worst)} results differ by more than {args.tolerance}")


if __name__ == "__main__":
    main()
