"""All stages of a split in one process against the unsplit model, on a CPU.

By counting: the stages run the same operations as the model, plus a few Python calls per stage; at seconds per call that
is nothing to see. Wan's text projection (two linears over 512 tokens, 2% of a call here, since 1080 tokens are few) depends
on the prompt alone: with one prompt for all calls, as in a denoising loop, the split computes it once and should be about
2% faster than the model, which projects the prompt at every step. With a new prompt in every call each stage after the
first that uses it adds those 2% again. Target, for a loop: at most 1.02 times the model's time.

Runs take turns: model, 2 stages, 4 stages, model, ... The ratio is the median over rounds of CPU time against the model's
in the same round, since other processes on the machine change wall time from call to call; wall time is shown beside it.
Results are compared bit for bit.

Seen (AMD EPYC, 1 thread, a machine shared with other work): 0.98 at 2 and at 4 stages with one prompt; 1.005 and 1.045
with a new prompt in every call.

    OMP_NUM_THREADS=1 python recipes/benchmarks/split_overhead_cpu.py --json recipes/benchmarks/results/split_overhead_cpu.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.utils import logging
from reporting import show, spread, write

from dit_pipelining.api import split_model

LARGEST_RATIO = 1.02
PROMPTS = ("the same", "new in every call")


def build(dtype: torch.dtype, num_layers: int) -> WanTransformer3DModel:
    """A few blocks of Wan 1.3B's size."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=num_layers)
    return model.eval().to(dtype)


def make_step(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Latents of 3 frames of 36 x 40, which are 3 x 18 x 20 = 1080 tokens, and a time."""
    return dict(
        hidden_states=torch.randn(1, 16, 3, 36, 40, generator=generator).to(dtype),
        timestep=torch.randint(1000, (1,), generator=generator),
        return_dict=False,
    )


def make_prompt(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(1, 512, 4096, generator=generator).to(dtype)


def median_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    return statistics.median(value / reference for value, reference in zip(values, references, strict=True))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--calls", type=int, default=9, help="timed calls of each (default: 9)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()

    logging.set_verbosity_error()  # a cast by `to` keeps no module in float32; both sides run the same model
    dtype: torch.dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)
    model = build(dtype, args.num_layers)
    example = make_step(dtype, generator) | dict(encoder_hidden_states=make_prompt(dtype, generator))
    candidates: dict[str, Callable[..., Any]] = {"model": model}
    for stages in args.num_stages:
        candidates[f"{stages} stages"] = split_model(model, stages, example, partitioner="uniform")

    rows, results = [], {}
    for prompts in PROMPTS:
        prompt = make_prompt(dtype, generator)
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for call in range(args.calls + 2):
            inputs = make_step(dtype, generator) | dict(encoder_hidden_states=prompt)
            outputs = {}
            for name, candidate in candidates.items():
                if prompts == PROMPTS[1]:
                    inputs["encoder_hidden_states"] = prompt.clone()
                start, cpu_start = time.perf_counter(), time.process_time()
                (outputs[name],) = candidate(**inputs)
                if call >= 2:  # the first ones warm up
                    seconds[name].append(time.perf_counter() - start)
                    cpu_seconds[name].append(time.process_time() - cpu_start)
            if not all(torch.equal(output, outputs["model"]) for output in outputs.values()):
                raise SystemExit("a split differs from the model")
        figures = {name: spread(values) for name, values in seconds.items()}
        ratios = {name: median_ratio(values, cpu_seconds["model"]) for name, values in cpu_seconds.items()}
        wall_ratios = {name: median_ratio(values, seconds["model"]) for name, values in seconds.items()}
        results[prompts] = {
            "seconds": figures,
            "cpu_seconds": {name: spread(values) for name, values in cpu_seconds.items()},
            "ratios": ratios,
            "wall_ratios": wall_ratios,
            **({"target_met": max(ratios.values()) <= LARGEST_RATIO} if prompts == PROMPTS[0] else {}),
            "equal": True,
        }
        rows += [
            {
                "prompts": prompts,
                "run by": name,
                "ms (median)": f"{1e3 * figure['median']:.1f}",
                "range": f"{1e3 * figure['min']:.1f} to {1e3 * figure['max']:.1f}",
                "ratio": f"{ratios[name]:.3f}",
                "of wall time": f"{wall_ratios[name]:.3f}",
            }
            for name, figure in figures.items()
        ]
    show(f"Wan blocks of 1.3B's size, {args.num_layers} of them, 1080 tokens, {args.dtype}; results equal", rows)
    options = {"dtype": args.dtype, "num_layers": args.num_layers, "calls": args.calls, "tokens": 1080}
    write(args.json, {**options, "threads": torch.get_num_threads(), "prompts": results})


if __name__ == "__main__":
    main()
