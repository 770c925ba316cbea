"""Host memory and time of loading one stage's weights, against loading the whole transformer with diffusers.

    python recipes/benchmarks/loading.py [--json FILE] [--stages 2]
    python recipes/benchmarks/loading.py --model flux --device cuda --stages 4 [--json FILE]

What should happen: a stage reads its own tensors from the file, each straight into place. In the checkpoint's own dtype
they stay views of the mapped file on the CPU, so that anonymous memory (RssAnon) hardly grows; cast to another dtype it
grows by the stage's bytes. Either way it must stay below the stage's bytes + 0.5 GB above what the imports took. On a GPU
nothing but the tensor in flight is in host memory, and a stage takes its share of the whole model's time.

Each measurement is a process of its own: RssAnon is sampled every 5 ms from /proc/self/status. The file is in the page cache
(it was just written), for all alike; CUDA is initialised before the clock starts; the split's capture is counted apart.
"""

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reporting import show, write

WHOLE = "whole model, from_pretrained"


@dataclass(frozen=True)
class Case:
    """A preset's transformer, how many blocks it has, and the dtypes it is stored in and loaded in."""

    preset: str
    stored: str
    loaded: tuple[str, ...]
    changes: Mapping[str, int] = field(default_factory=dict)


CASES = {
    "wan": Case("wan2.1-t2v-1.3b", "float32", ("float32", "bfloat16"), {"num_layers": 10}),
    "flux": Case("flux.1-dev", "bfloat16", ("bfloat16",)),
}
"""Ten blocks of Wan 1.3B in float32 are 2 GB, FLUX.1-dev in bfloat16 24 GB."""

LARGEST_SHARE = 1.15
"""Of the time that a stage's bytes take in loading the whole model: the most a stage may take on a GPU."""


def rss_anon() -> int:
    """Anonymous resident memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


class Peak:
    """Largest RssAnon while the context is open."""

    def __enter__(self) -> "Peak":
        self.base = self.peak = rss_anon()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, rss_anon())

    def result(self, **more: Any) -> dict[str, Any]:
        return {"peak_above_imports": self.peak - self.base, "seconds": self.seconds, **more}


def write_checkpoint(case: Case, folder: Path, device: str) -> None:
    import torch
    from random_models import random_transformer

    from dit_pipelining.planning.presets import preset

    model = random_transformer(preset(case.preset), torch.device(device), dict(case.changes))
    model.to(getattr(torch, case.stored)).save_pretrained(folder, max_shard_size="10GB")  # type: ignore[operator]


def load_whole(case: Case, folder: Path, dtype: str, device: str, mapped: bool) -> dict[str, Any]:
    """By `from_pretrained`: to the CPU and then to the device, or with `device_map` straight to it."""
    import diffusers
    import torch

    from dit_pipelining.planning.presets import preset

    model_class = getattr(diffusers, preset(case.preset).model_class)
    ready(device)
    options = dict(device_map=device) if mapped else {}
    with Peak() as peak:
        model = model_class.from_pretrained(folder, torch_dtype=getattr(torch, dtype), **options).to(device)
        touched = checksum(model.parameters())
    return peak.result(bytes=sum(p.nbytes for p in model.parameters()), checksum=touched)


def load_stage(case: Case, folder: Path, dtype: str, device: str, stage: int, stages: int) -> dict[str, Any]:
    import diffusers
    import torch

    from dit_pipelining.api import split_model
    from dit_pipelining.planning.inputs import build_inputs
    from dit_pipelining.planning.presets import preset
    from dit_pipelining.torch_internals import tree_map
    from dit_pipelining.weights.checkpoint import open_checkpoint
    from dit_pipelining.weights.empty import empty_model
    from dit_pipelining.weights.load import load_weights

    facts, torch_dtype = preset(case.preset), getattr(torch, dtype)
    model_class = getattr(diffusers, facts.model_class)
    ready(device)
    with Peak() as planning:
        model = empty_model(model_class, model_class.load_config(folder), torch_dtype)
        inputs = tree_map(lambda leaf: in_dtype(leaf, torch_dtype), build_inputs(facts.inputs))
        split = split_model(model, stages, inputs, partitioner="uniform")
        weights = split.stages[stage].held_weights
    with Peak() as peak:
        load_weights(model, weights, open_checkpoint(folder), torch.device(device), torch_dtype)
        loaded = [parameter for parameter in model.parameters() if parameter.device.type != "meta"]
        touched = checksum(loaded)
    above = max(planning.peak, peak.peak) - planning.base
    result = peak.result(bytes=sum(p.nbytes for p in loaded), checksum=touched, planning_seconds=planning.seconds)
    return result | {"peak_above_imports": above}


def in_dtype(leaf: Any, dtype: Any) -> Any:
    """A preset's inputs are bfloat16 where they have the dtype of the weights."""
    return leaf.to(dtype) if str(getattr(leaf, "dtype", "")) == "torch.bfloat16" else leaf


def ready(device: str) -> None:
    """Initialise a GPU and load the checksum's kernels, which takes seconds once per process."""
    import torch

    checksum([torch.ones(2**16, dtype=torch.bfloat16, device=device)])


def checksum(parameters: Iterable[Any]) -> float:
    """Reads a part of every page, since a mapped file is not read before."""
    return sum(float(parameter.detach().flatten()[::1024].float().sum()) for parameter in parameters)


def in_process(function: Any, *args: Any) -> Any:
    """Run in a fresh process, so that nothing of an earlier measurement is resident."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, args).get(timeout=600)


def measure(case: Case, folder: Path, device: str, stages: int) -> Iterator[dict[str, Any]]:
    """A row for the whole model and for each stage, in each dtype."""
    in_process(write_checkpoint, case, folder, device)
    for dtype in case.loaded:
        best = float("inf")
        for mapped in (False, True) if device != "cpu" else (False,):
            whole = in_process(load_whole, case, folder, dtype, device, mapped)
            best = min(best, whole["seconds"])
            yield {"what": WHOLE + (", device_map" if mapped else ""), "dtype": dtype, **whole}
        for stage in range(stages):
            row = in_process(load_stage, case, folder, dtype, device, stage, stages)
            share = row["seconds"] / best / (row["bytes"] / whole["bytes"])
            yield {"what": f"stage {stage} of {stages}", "dtype": dtype, **row, "share": share}


def misses(rows: Sequence[Mapping[str, Any]], device: str) -> list[str]:
    """What did not reach its target."""
    stages = [row for row in rows if row["what"].startswith("stage")]
    missed = [
        f"{row['what']} in {row['dtype']} took {row['peak_above_imports'] / 1e9:.2f} GB of host memory"
        for row in stages
        if row["peak_above_imports"] > (row["bytes"] + 5e8 if device == "cpu" else 2e9)
    ]
    slow = [row for row in stages if device != "cpu" and row["share"] > LARGEST_SHARE]
    return missed + [f"{row['what']} took {row['share']:.2f} x its share of the time" for row in slow]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CASES, default="wan")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument(
        "--folder", help="where the checkpoint is written and removed again; default: that of temporary files"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for row in measure(CASES[args.model], Path(folder), args.device, args.stages):
            rows.append(row)
            print(row, flush=True)
            write(args.json, {"device": args.device, "rows": rows})
    show(
        f"Loading {args.model} to {args.device}",
        [
            {
                "what": row["what"],
                "dtype": row["dtype"],
                "GB": f"{row['bytes'] / 1e9:.2f}",
                "peak RssAnon above imports [GB]": f"{row['peak_above_imports'] / 1e9:.2f}",
                "time [s]": f"{row['seconds']:.2f}",
                "of its bytes' share": f"{row['share']:.2f}" if "share" in row else "",
            }
            for row in rows
        ],
    )
    missed = misses(rows, args.device)
    write(args.json, {"device": args.device, "rows": rows, "missed": missed})
    if missed:
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    main()
