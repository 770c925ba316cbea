"""What the dimensions inside a stage give for one call at a time, and a VAE's tiles over ranks, against one GPU.

    python recipes/benchmarks/inside_a_stage.py [--ranks 2] [--sections flux/tp2 wan ...] [--seconds 60] [--json FILE]
    torchrun --nproc-per-node 2 recipes/benchmarks/inside_a_stage.py [...]

Random weights of real configurations in bf16 on GPUs, tiny ones in float32 over gloo where there are none. One launch does all
sections; each adds a row to the file as it ends. A section that takes longer than `--seconds` ends the launch; without
torchrun the sections after it get a new one.

What should happen, with c the time of a call on one GPU and two ranks: Ulysses and ring, (c - glue) / 2 and what they send;
tensor parallelism the same, but that norms and sums are not divided. HSDP with Ulysses: as Ulysses, with half of the
blocks' weights. HSDP alone: c, since its second replica has nothing to run, with half of the weights. Two stages: c, since
one request without guidance takes them in turns, with half of the weights. Tiles: the decode's time by their number, 5 of 9
for an image of 2048 pixels and 8 of 15 for the video, and every bit.
"""

import argparse
import faulthandler
import gc
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from ranks import in_processes
from reporting import show, write
from torch import nn
from workloads import Workload, build, dtype_on, request

from dit_pipelining import ParallelConfig, parallelize
from dit_pipelining.torch_internals import local_part

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "tp2": dict(tensor_parallel_size=2),
    "ulysses2": dict(ulysses_degree=2),
    "ring2": dict(ring_degree=2),
    "ulysses2+hsdp2": dict(ulysses_degree=2, use_hsdp=True),
    "hsdp2": dict(use_hsdp=True, hsdp_shard_size=2),
    "pp2": dict(pipeline_parallel_size=2),
    "tp4": dict(tensor_parallel_size=4),
    "ulysses4": dict(ulysses_degree=4),
    "ulysses2+ring2": dict(ulysses_degree=2, ring_degree=2),
    "tp2+ulysses2": dict(tensor_parallel_size=2, ulysses_degree=2),
    "pp2+tp2": dict(pipeline_parallel_size=2, tensor_parallel_size=2),
    "pp2+ulysses2": dict(pipeline_parallel_size=2, ulysses_degree=2),
    "pp2+ulysses2+hsdp2": dict(pipeline_parallel_size=2, ulysses_degree=2, use_hsdp=True),
}
"""Those are run that need as many ranks as were launched."""

FEW_BLOCKS = dict(num_layers=2, num_single_layers=2, num_attention_heads=4)
FEW_WAN_BLOCKS = dict(num_layers=2, num_attention_heads=4, ffn_dim=512)
LARGE = {
    "flux": Workload("flux.1-dev", dict(height=1024, width=1024), 8),
    "wan": Workload("wan2.1-t2v-1.3b", dict(height=480, width=832, num_frames=33), 8),
}
TINY = {
    "flux": Workload("flux.1-dev", dict(height=256, width=256), 2, FEW_BLOCKS),
    "wan": Workload("wan2.1-t2v-1.3b", dict(height=128, width=128, num_frames=9), 2, FEW_WAN_BLOCKS),
}


@dataclass(frozen=True)
class Decode:
    """A VAE, and latents that it decodes tile by tile.

    Attributes:
        name: its class.
        config: of the class.
        latents: their shape.
        beside: a transformer for its pipeline, which does not run.
        tiling: attributes that are set.
    """

    name: str
    config: Mapping[str, Any]
    latents: tuple[int, ...]
    beside: Workload
    tiling: Mapping[str, int] = field(default_factory=dict)


IMAGE_VAE: dict[str, Any] = dict(
    latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159
)
FOUR_LEVELS = dict(down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4)
LARGE_VAES = {
    "vae-image": Decode(
        "AutoencoderKL",
        IMAGE_VAE | FOUR_LEVELS | dict(block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=1024),
        (1, 16, 256, 256),
        TINY["flux"],
    ),
    "vae-video": Decode("AutoencoderKLWan", {}, (1, 16, 9, 60, 104), TINY["wan"]),
}
TINY_VAES = {
    "vae-image": Decode(
        "AutoencoderKL",
        IMAGE_VAE | FOUR_LEVELS | dict(block_out_channels=(32,) * 4, sample_size=128),
        (1, 16, 32, 32),
        TINY["flux"],
    ),
    "vae-video": Decode(
        "AutoencoderKLWan",
        dict(base_dim=16, num_res_blocks=1),
        (1, 16, 3, 16, 24),
        TINY["wan"],
        {
            f"tile_sample_{kind}_{side}": size
            for kind, size in (("min", 64), ("stride", 48))
            for side in ("height", "width")
        },
    ),
}

Row = dict[str, Any]


class Bench:
    """One rank's share of the sections.

    Args:
        device: of this rank.
        rows: of sections that have been run; those that are run now are added.
        path: of a file that rank 0 writes them to.
    """

    def __init__(self, device: torch.device, rows: list[Row], path: str | None) -> None:
        self.device = device
        self.rows = rows
        self.path = path
        self.on_gpus = device.type == "cuda"
        self._single: dict[str, tuple[float, torch.Tensor]] = {}

    def run(self, section: str) -> None:
        """Measure one section, such as `flux/tp2`, `flux/one` or `vae-image`."""
        name, _, layout = section.partition("/")
        if name in LARGE_VAES:
            self._decode(section, (LARGE_VAES if self.on_gpus else TINY_VAES)[name])
        else:
            self._steps(section, name, (LARGE if self.on_gpus else TINY)[name], layout)
        gc.collect()
        if self.on_gpus:
            torch.cuda.empty_cache()

    def _steps(self, section: str, name: str, workload: Workload, layout: str) -> None:
        if name not in self._single:
            self._measure_single(name, workload)
        seconds, expected = self._single[name]
        if layout == "one":
            return
        pipeline = build(workload, self.device)
        parallelize(pipeline, ParallelConfig(**LAYOUTS[layout], timeout_seconds=60))
        pipeline.set_progress_bar_config(disable=True)
        pipeline(**{**request(workload, self.device, 0, False), "num_inference_steps": 1})
        gc.collect()
        self._forget_peak()
        taken, (latents,) = self._timed(lambda: pipeline(**request(workload, self.device, 0, False)))
        self._add(section, workload.steps, taken, seconds, latents, expected, held(pipeline.transformer))

    def _measure_single(self, name: str, workload: Workload) -> None:
        pipeline = build(workload, self.device)
        pipeline(**{**request(workload, self.device, 0, False), "num_inference_steps": 1})
        self._forget_peak()
        seconds, (latents,) = self._timed(lambda: pipeline(**request(workload, self.device, 0, False)))
        self._single[name] = seconds, latents.clone()
        if f"{name}/one" not in {row["section"] for row in self.rows}:
            self._add(f"{name}/one", workload.steps, seconds, seconds, latents, latents, held(pipeline.transformer))

    def _decode(self, section: str, decode: Decode) -> None:
        torch.manual_seed(0)
        vae = getattr(diffusers, decode.name)(**decode.config).to(self.device, dtype_on(self.device)).eval()
        for attribute, value in decode.tiling.items():
            setattr(vae, attribute, value)
        random = torch.Generator().manual_seed(1)
        latents = torch.randn(decode.latents, generator=random).to(self.device, dtype_on(self.device))
        vae.enable_tiling()
        vae.decode(latents)
        self._forget_peak()
        single, (expected,) = self._timed(lambda: vae.decode(latents, return_dict=False))
        self._add(f"{section}/one", 1, single, single, expected, expected, held(vae))
        pipeline = build(decode.beside, self.device, vae)
        ranks = dist.get_world_size()
        config = ParallelConfig(pipeline_parallel_size=ranks, vae_patch_parallel_size=ranks, timeout_seconds=60)
        vae = parallelize(pipeline, config).vae
        vae.decode(latents)
        self._forget_peak()
        taken, (pixels,) = self._timed(lambda: vae.decode(latents, return_dict=False))
        self._add(f"{section}/tiles", 1, taken, single, pixels, expected, held(vae))

    def _timed(self, function: Callable[[], Any], rounds: int = 2) -> tuple[float, Any]:
        """Seconds of the slowest rank in the best of a few rounds, with nothing running before and after."""
        best, result = float("inf"), None
        for _ in range(rounds):
            self._synchronize()
            dist.barrier()
            started = time.perf_counter()
            result = function()
            self._synchronize()
            seconds = torch.tensor([time.perf_counter() - started])
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            best = min(best, float(seconds))
        return best, result

    def _add(
        self, section: str, steps: int, seconds: float, single: float, found: Any, expected: Any, weights: int
    ) -> None:
        peak = torch.cuda.max_memory_allocated(self.device) if self.on_gpus else None
        facts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(facts, (relative_error(found, expected), weights, peak))
        errors, held_bytes, peaks = zip(*facts, strict=True)
        self.rows.append(
            dict(
                section=section,
                ms_per_step=1000 * seconds / steps,
                speedup=single / seconds,
                relative_error=max(errors),
            )
            | dict(weight_bytes=held_bytes, peak_bytes=peaks)
        )
        self.note()
        if dist.get_rank() == 0:
            print(
                f"{section}: {1000 * seconds / steps:.1f} ms, {single / seconds:.2f}x, error {max(errors):.1e}",
                flush=True,
            )

    def note(self) -> None:
        """Write what there is so far."""
        if dist.get_rank() == 0:
            write(self.path, {"card": card(self.device), "rows": self.rows})

    def _synchronize(self) -> None:
        if self.on_gpus:
            torch.cuda.synchronize(self.device)

    def _forget_peak(self) -> None:
        if self.on_gpus:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def card(device: torch.device) -> str:
    return f"{dist.get_world_size()} x {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU process'}"


def held(model: nn.Module) -> int:
    """Bytes of the weights on this rank."""
    return sum(local_part(tensor).nbytes for tensor in model.parameters() if tensor.device.type != "meta")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, relative to the largest value."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def sections_for(ranks: int, chosen: Sequence[str]) -> list[str]:
    """All sections for a number of ranks whose names start with one of those chosen."""
    fit = [name for name, sizes in LAYOUTS.items() if ParallelConfig(**sizes).world_size == ranks]
    known = [f"{model}/{layout}" for model in LARGE for layout in ("one", *fit)] + list(LARGE_VAES)
    return [section for section in known if not chosen or any(section.startswith(name) for name in chosen)]


def run_sections(sections: Sequence[str], path: str | None, seconds: float, rows: list[Row]) -> None:
    """Called on each rank: run these sections, and add their rows to those of others."""
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="32")
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    bench = Bench(device, rows, path)
    with torch.no_grad():
        for section in sections:
            if dist.get_rank() == 0:
                print(f"{section} ...", flush=True)
            faulthandler.dump_traceback_later(seconds, exit=True)
            try:
                bench.run(section)
            except Exception as error:
                trace = traceback.format_exc()
                bench.rows.append(dict(section=section, error=f"{type(error).__name__}: {error}", traceback=trace))
                bench.note()
                print(f"rank {dist.get_rank()}: {section}: {trace}", flush=True)
            faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    if dist.get_rank() == 0:
        show_rows(card(device), bench.rows)
    os._exit(0)  # without the destruction of groups, which waits for communicators that nobody uses any more


def run_all(ranks: int, sections: Sequence[str], path: Path, seconds: float) -> None:
    """Start ranks for the sections, and again for those after one that did not end."""
    rows: list[Row] = []
    while sections:
        limit = seconds * (len(sections) + 1)
        codes = in_processes(ranks, run_sections, sections, str(path), seconds, rows, seconds=limit)
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        done = {row["section"] for row in rows}
        stuck = next((own for own in sections if not {own, f"{own}/tiles"} & done), None)
        if stuck is None:
            return
        print(f"{stuck}: the ranks ended with {codes}", flush=True)
        sections = sections[sections.index(stuck) + 1 :]


def show_rows(title: str, rows: Sequence[Row]) -> None:
    shown = [
        {
            "section": row["section"],
            "ms": f"{row['ms_per_step']:.1f}",
            "speed-up": f"{row['speedup']:.2f}",
            "error": f"{row['relative_error']:.1e}" if row["relative_error"] else "0",
            "weights GiB": " ".join(f"{size / 2**30:.2f}" for size in row["weight_bytes"]),
            "peak GiB": " ".join(f"{size / 2**30:.2f}" for size in row["peak_bytes"] if size is not None),
        }
        for row in rows
        if "error" not in row
    ]
    if shown:
        show(title, shown)
    for row in rows:
        if "error" in row:
            print(f"{row['section']}: {row['error']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="without torchrun: how many; default: 2")
    parser.add_argument("--sections", nargs="*", default=[], help="those that start so, such as flux wan/tp2 vae")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, per section")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    launched = "RANK" in os.environ
    sections = sections_for(int(os.environ["WORLD_SIZE"]) if launched else args.ranks, args.sections)
    if not sections:
        raise SystemExit(f"no section starts with {' or '.join(args.sections)}")
    if launched:
        run_sections(sections, args.json, args.seconds, [])
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.json or f"{folder}/rows.json")
        path.unlink(missing_ok=True)
        run_all(args.ranks, sections, path, args.seconds)


if __name__ == "__main__":
    main()
