"""What the split costs and gains on one GPU: all stages in turn against the unsplit model, plain, compiled, as CUDA graphs.

    python recipes/benchmarks/one_gpu.py [--workloads flux ...] [--compile] [--offload flux ...] [--json FILE]

Random weights of real configurations, bf16, one forward at a time, with latents and a timestep that are new at each call, as
in a denoising loop. Variants are run in turn, several rounds; figures are medians.

What should happen: the split runs the same kernels on the same data, without what does not change from step to step (rotary
tables, text projections), which it keeps. So plain: 1.00, or a little less; at 1,560 tokens, where launching kernels is what
takes the time, less by the launches saved. Compiled: the same blocks compiled alike, so 1.00. CUDA graphs: what the kernels
take without the launches: for Wan 1.3B at 1,560 tokens 2 x 1.3e9 x 1,560 FLOPs and as much again for attention and text, 6 ms
at the rates that such small products reach.
"""

import argparse
import functools
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from random_models import random_inputs, random_transformer
from reporting import show, write
from torch import nn

from dit_pipelining import split_model
from dit_pipelining.capture.signature import first_argument
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.planning.presets import preset


@dataclass(frozen=True)
class Workload:
    """One model at one size.

    Attributes:
        preset: its configuration.
        latents: shape of the latents, where it is not the preset's.
        blocks: of each of the class's lists, where fewer will do.
        rounds: how often each variant is run.
    """

    preset: str
    latents: tuple[int, ...] | None = None
    blocks: dict[str, int] = field(default_factory=dict)
    rounds: int = 8


WORKLOADS = {
    "flux": Workload("flux.1-dev"),
    "wan-1.3b": Workload("wan2.1-t2v-1.3b", (1, 16, 21, 60, 104), rounds=4),
    "wan-1.3b-1560": Workload("wan2.1-t2v-1.3b", (1, 16, 1, 60, 104), rounds=20),
    "wan-14b": Workload("wan2.1-t2v-14b", (1, 16, 21, 60, 104), dict(num_layers=8), rounds=4),
    "qwen-image": Workload("qwen-image"),
    "hunyuanvideo": Workload(
        "hunyuanvideo", (1, 16, 16, 68, 120), dict(num_layers=4, num_single_layers=8, num_refiner_layers=2), rounds=4
    ),
    "tiny": Workload("wan2.1-t2v-1.3b", (1, 16, 1, 16, 16), dict(num_layers=4)),
}


def described_inputs(workload: Workload, main: str) -> dict[str, Any]:
    described = dict(preset(workload.preset).inputs)
    if workload.latents:
        described[main] = {"shape": list(workload.latents), "dtype": "bfloat16"}
    return described


def milliseconds(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0]
    return found


class Loop:
    """Calls with new latents and a new timestep each, all else the same tensors, as a denoising loop makes them."""

    def __init__(self, inputs: dict[str, Any], main: str) -> None:
        self.inputs = inputs
        self.changing = [name for name in inputs if name in (main, "timestep") and torch.is_tensor(inputs[name])]

    def next(self) -> dict[str, Any]:
        return {**self.inputs, **{name: self.inputs[name].clone() for name in self.changing}}


def compare(runs: dict[str, Callable[..., Any]], loop: Loop, rounds: int) -> dict[str, float]:
    """Median milliseconds of each, run in turn, in another order each round: what ran before may leave its mark."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for round_number in range(rounds + 3):
        for name, run in order.sample(list(runs.items()), len(runs)):
            inputs = loop.next()
            torch.cuda.synchronize()
            own = milliseconds(lambda run=run, inputs=inputs: run(**inputs))
            if round_number >= 3:
                times[name].append(own)
    return {name: statistics.median(own) for name, own in times.items()}


def measure(name: str, device: torch.device, compiled: bool, rows: list[dict[str, Any]]) -> None:
    workload = WORKLOADS[name]
    model = random_transformer(preset(workload.preset), device, workload.blocks)
    main = first_argument(model.forward)
    inputs = random_inputs(described_inputs(workload, main), device)
    loop = Loop(inputs, main)
    expected = first(model(**loop.next()))
    splits = {stages: split_model(model, stages, inputs) for stages in (2, 4)}
    runs: dict[str, Callable[..., Any]] = {"unsplit": model}
    runs |= {f"{stages} stages": split for stages, split in splits.items()}
    equal = {key: bool(torch.equal(first(run(**loop.next())), expected)) for key, run in runs.items()}

    def add(kind: str, times: dict[str, float], **more: Any) -> None:
        base = times["unsplit"]
        for key, own in times.items():
            row = dict(workload=name, kind=kind, variant=key, ms=own, ratio=own / base, **more)
            rows.append({**row, "equal": equal.get(key) if kind == "eager" else None})
            print(f"{name} {kind} {key}: {own:.2f} ms, {own / base:.3f}", flush=True)

    add("eager", compare(runs, loop, workload.rounds))
    if compiled:
        started = time.perf_counter()
        model.compile_repeated_blocks()  # blocks are the model's own, so the splits run the compiled ones too
        difference = {
            key: float((first(run(**loop.next())).float() - expected.float()).norm() / expected.float().norm())
            for key, run in runs.items()
        }
        seconds = time.perf_counter() - started
        add("compiled", compare(runs, loop, workload.rounds), compile_seconds=seconds, difference=difference)
        splits[2].compile("blocks-cudagraphs")
        for _ in range(4):
            result = first(splits[2](**loop.next()))
        same = bool(torch.equal(result, first(model(**loop.next()))))
        graphs = {"unsplit": model, "2 stages": splits[2]}
        add("compiled, CUDA graphs", compare(graphs, loop, workload.rounds), equals_compiled=same)


CAP_GIB = 24.0
"""A card that holds neither FLUX nor Wan 14B, whose bf16 weights are 22 and 27 GiB."""


def offload(name: str, device: torch.device, rows: list[dict[str, Any]]) -> None:
    """A call on a card of 24 GiB: by the stages of a 2-stage split, and by diffusers' offloading of the whole model."""
    workload = replace(WORKLOADS[name], blocks={})
    kind = f"{name}, {CAP_GIB:.0f} GiB"

    def add(**row: Any) -> None:
        rows.append(dict(workload=kind, **row))
        print(rows[-1], flush=True)

    model = random_transformer(preset(workload.preset), device, workload.blocks)
    main = first_argument(model.forward)
    inputs = random_inputs(described_inputs(workload, main), device)
    split = split_model(model, 2, inputs)
    cap(model, device)
    for row in stage_rows(split, inputs, device):
        add(**row)
    try:
        model.to(device)
        add(kind="whole transformer on the card, as model offload needs it: fits")
    except torch.OutOfMemoryError as error:
        add(kind=f"whole transformer on the card, as model offload needs it: {str(error).splitlines()[0][:120]}")
    cap(model, device)
    started = time.perf_counter()
    model.enable_group_offload(  # type: ignore[operator]
        onload_device=device, offload_type="block_level", num_blocks_per_group=1, use_stream=True, record_stream=True
    )
    prepared = time.perf_counter() - started
    times = [milliseconds(lambda: model(**inputs)) for _ in range(3)][1:]
    add(kind="group offload, block by block on a stream of its own", ms=min(times), prepare_seconds=prepared)
    torch.cuda.set_per_process_memory_fraction(1.0, device)


def cap(model: nn.Module, device: torch.device) -> None:
    """Put the model into host memory, and let no more than the cap be had on the card."""
    model.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP_GIB * 2**30 / total, device)


def stage_rows(split: SplitModel, inputs: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """What each stage, alone on the card, takes for a call, and what its weights weigh."""
    graph, flat = split.resolve(inputs)
    rows: list[dict[str, Any]] = []
    received: tuple[torch.Tensor, ...] = ()
    for stage in split.stages:
        stage.to(device)
        run = functools.partial(stage.run, graph, received, flat.leaves)
        times = [milliseconds(run) for _ in range(4)][1:]
        received = run()
        gib = sum(parameter.nbytes for parameter in stage.parameters()) / 2**30
        rows.append(dict(kind=f"stage {stage.stage_index} of 2", ms=statistics.median(times), weights_gib=gib))
        stage.to("cpu")
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=[name for name in WORKLOADS if name != "tiny"])
    parser.add_argument("--compile", nargs="*", default=["flux", "wan-1.3b-1560"], help="workloads to compile too")
    parser.add_argument("--offload", nargs="*", default=[], metavar="WORKLOAD", help="what to run on a card of 24 GiB")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in args.workloads:
            measure(name, device, name in args.compile, rows)
            torch.cuda.empty_cache()
            write(args.json, {"card": torch.cuda.get_device_name(0), "rows": rows})
        for name in args.offload:
            offload(name, device, rows)
            write(args.json, {"card": torch.cuda.get_device_name(0), "rows": rows})
    show(
        torch.cuda.get_device_name(0),
        [
            {
                "workload": row["workload"],
                "kind": row["kind"],
                "variant": row.get("variant", ""),
                "ms": f"{row['ms']:.2f}" if "ms" in row else "",
                "ratio": f"{row['ratio']:.3f}" if "ratio" in row else "",
                "equal": str(row.get("equal") if row.get("equal") is not None else ""),
            }
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
