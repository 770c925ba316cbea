"""Host memory and time of loading one stage's weights, against loading the whole transformer with diffusers.

    python recipes/benchmarks/loading.py [--json FILE] [--stages 2] [--dtype float32|bfloat16]

What should happen: a stage reads its own tensors from the file, each straight into place. In the checkpoint's own dtype
they stay views of the mapped file on the CPU, so that anonymous memory (RssAnon) hardly grows; cast to another dtype it
grows by the stage's bytes. Either way it must stay below the stage's bytes + 0.5 GB above what the imports took.

Each measurement is a process of its own: RssAnon is sampled every 5 ms from /proc/self/status.
"""

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

BLOCKS = 10
SIZES = dict(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=BLOCKS)
"""Ten blocks of Wan 2.1 1.3B: about 2 GB in float32."""


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


def write_checkpoint(folder: Path) -> None:
    import torch
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    WanTransformer3DModel(**SIZES).save_pretrained(folder, max_shard_size="1GB")


def load_whole(folder: Path, dtype: str) -> dict[str, Any]:
    import torch
    from diffusers import WanTransformer3DModel

    with Peak() as peak:
        model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=getattr(torch, dtype))
        touched = sum(float(parameter.flatten()[::1024].float().sum()) for parameter in model.parameters())
    return peak.result(bytes=sum(p.numel() * p.element_size() for p in model.parameters()), checksum=touched)


def load_stage(folder: Path, dtype: str, stage: int, stages: int) -> dict[str, Any]:
    import torch
    from diffusers import WanTransformer3DModel

    from dit_pipelining.api import split_model
    from dit_pipelining.weights.checkpoint import open_checkpoint
    from dit_pipelining.weights.empty import empty_model
    from dit_pipelining.weights.load import load_weights

    torch_dtype = getattr(torch, dtype)
    with Peak() as planning:
        config = WanTransformer3DModel.load_config(folder)
        model = empty_model(WanTransformer3DModel, config, torch_dtype)
        latents = torch.zeros(1, 16, 5, 60, 104, dtype=torch_dtype)
        text = torch.zeros(1, 512, 4096, dtype=torch_dtype)
        inputs = dict(
            hidden_states=latents, timestep=torch.tensor([500]), encoder_hidden_states=text, return_dict=False
        )
        split = split_model(model, stages, inputs, partitioner="uniform")
        weights = split.stages[stage].held_weights
    with Peak() as peak:
        load_weights(model, weights, open_checkpoint(folder), torch.device("cpu"), torch_dtype)
        loaded = [parameter for parameter in model.parameters() if parameter.device.type == "cpu"]
        touched = sum(float(parameter.flatten()[::1024].float().sum()) for parameter in loaded)
    size = sum(parameter.numel() * parameter.element_size() for parameter in loaded)
    above = max(planning.peak, peak.peak) - planning.base
    return peak.result(bytes=size, checksum=touched, planning_seconds=planning.seconds) | {"peak_above_imports": above}


def in_process(function: Any, *args: Any) -> Any:
    """Run in a fresh process, so that nothing of an earlier measurement is resident."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, args).get(timeout=600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from rich.console import Console
    from rich.table import Table

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        in_process(write_checkpoint, folder)
        for dtype in ("float32", "bfloat16"):
            whole = in_process(load_whole, folder, dtype)
            rows.append({"what": "whole model, from_pretrained", "dtype": dtype, **whole})
            for stage in range(args.stages):
                row = in_process(load_stage, folder, dtype, stage, args.stages)
                rows.append({"what": f"stage {stage} of {args.stages}", "dtype": dtype, **row})
    table = Table("what", "dtype", "bytes [GB]", "peak RssAnon above imports [GB]", "time [s]")
    for row in rows:
        sizes = f"{row['bytes'] / 1e9:.2f}", f"{row['peak_above_imports'] / 1e9:.2f}"
        table.add_row(row["what"], row["dtype"], *sizes, f"{row['seconds']:.2f}")
    Console().print(table)
    import torch

    about = dict(
        machine=platform.processor() or platform.machine(), torch=torch.__version__, command=" ".join(sys.argv)
    )
    if args.json:
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1))
    for row in rows:
        if row["what"].startswith("stage"):
            limit = row["bytes"] + 5e8
            assert row["peak_above_imports"] <= limit, (
                f"{row['what']} in {row['dtype']} took {row['peak_above_imports']}"
            )


if __name__ == "__main__":
    main()
