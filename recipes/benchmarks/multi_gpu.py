"""What several GPUs of one host give: every schedule and layout against one GPU, on unmodified diffusers pipelines.

    python recipes/benchmarks/multi_gpu.py [--layouts pp2 pp2xcfg2 pp2:nccl] [--workloads wan-1.3b ...] [--json FILE]

Random weights of real configurations, bf16, latents only (no text encoder, no VAE). Each layout is one launch; in each,
every rank first times the unsplit pipeline on its own GPU and keeps its latents, which the split must equal bit for bit.

What should happen, with c the time of one call on one GPU and S stages, of which the largest has the share s of the work
(by FLOPs; 1 / S if blocks divide evenly): a call cannot take less than s * c of the bottleneck's time, so M requests of T
steps with n calls each take M * T * n * s * c on a line that never waits. That is the ideal that `share` is measured
against. One request without guidance leaves S - 1 of S stages idle (that is also what handing the latents back at every step
does): share 1 / S. With guidance both branches are in flight: 2 / (S + 1). Rolling with 2S requests: 1 but for filling
and draining once. ScheduleGPipe drains at every step: M / (M + S - 1). Replicas share the calls: on cfg2 each does half.
"""

import argparse
import faulthandler
import gc
import json
import os
import re
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from ranks import in_processes
from reporting import show, write
from workloads import Workload, build, request

from dit_pipelining import ParallelConfig, generate, parallelize
from dit_pipelining.capture.nodes import value_bytes
from dit_pipelining.comm.peer_links import PeerLinks
from dit_pipelining.costs.devices import find_device
from dit_pipelining.costs.model_costs import model_costs
from dit_pipelining.lowering.clock import StageClock
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.planning.forecast import transfer_seconds
from dit_pipelining.planning.memory import rank_memory
from dit_pipelining.planning.simulation import simulate
from dit_pipelining.planning.timeline import Workload as Simulated
from dit_pipelining.runtime.attach import rolling_of, split_of
from partitioners import RankSpec

CALL_SECONDS = 30
"""A call that takes longer hangs: the runtime then says on which rank, before the launch's own time is over."""

SMALL_VIDEO = dict(height=480, width=832, num_frames=81)
ONE_FRAME = dict(height=480, width=832, num_frames=1)


WORKLOADS = {
    "wan-1.3b": Workload("wan2.1-t2v-1.3b", SMALL_VIDEO, 5, guidances=(True,)),
    "wan-1.3b-1560": Workload("wan2.1-t2v-1.3b", ONE_FRAME, 20),
    "wan-14b": Workload("wan2.1-t2v-14b", SMALL_VIDEO, 8, changes=dict(num_layers=8), guidances=(False,)),
    "wan-14b-1560": Workload("wan2.1-t2v-14b", ONE_FRAME, 12),
    "flux": Workload("flux.1-dev", dict(height=1024, width=1024), 20, guidances=(False,)),
    "wan-1.3b-33": Workload("wan2.1-t2v-1.3b", dict(height=480, width=832, num_frames=33), 6, guidances=(True,)),
    "tiny": Workload("wan2.1-t2v-1.3b", dict(height=128, width=128, num_frames=9), 3, changes=dict(num_layers=4)),
}


@dataclass(frozen=True)
class Layout:
    """How the ranks are used."""

    stages: int = 1
    replicas: int = 1
    transport: str = "auto"
    ulysses: int = 1
    compile: str | None = None

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas * self.ulysses

    @property
    def name(self) -> str:
        parts = [f"pp{self.stages}"] * (self.stages > 1) + [f"cfg{self.replicas}"] * (self.replicas > 1)
        parts += [f"ulysses{self.ulysses}"] * (self.ulysses > 1)
        return " x ".join(parts) + (f" {self.compile}" if self.compile else "")


def layout_of(text: str) -> Layout:
    """A layout from its name, transport and way to compile, such as `pp2xcfg2:peer`, `ulysses2`, `pp2:auto:blocks`."""
    name, transport, compiled, *_ = [*text.split(":"), "", ""]
    degrees = {kind: int(size) for kind, size in re.findall(r"(pp|cfg|ulysses)(\d+)", name)}
    return Layout(
        stages=degrees.get("pp", 1),
        replicas=degrees.get("cfg", 1),
        transport=transport or "auto",
        ulysses=degrees.get("ulysses", 1),
        compile=compiled or None,
    )


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slowest rank, with the GPUs idle before and after."""
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    seconds = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), result


def count_syncs(function: Callable[[], Any]) -> int:
    """How often the host waited for the GPU, as torch notices it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
        return sum("synchroniz" in str(warning.message) for warning in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def short(workload: Workload, device: torch.device, guided: bool, steps: int = 2) -> dict[str, Any]:
    return {**request(workload, device, 0, guided), "num_inference_steps": steps}


def measure(
    name: str, workload: Workload, layout: Layout, device: torch.device, rows: list[dict[str, Any]], file: Path
) -> None:
    """All schedules of one workload on one layout; adds a row for each."""
    started = time.perf_counter()
    multiply(device)
    left = torch.cuda.memory_allocated(device)
    pipeline = build(workload, device)
    torch.cuda.reset_peak_memory_stats(device)
    single: dict[bool, float] = {}
    expected: dict[bool, torch.Tensor] = {}
    syncs: dict[bool, int] = {}
    for guided in workload.guidances:
        pipeline(**short(workload, device, guided, 1))
        syncs[guided] = count_syncs(lambda guided=guided: pipeline(**short(workload, device, guided)))
        single[guided], (latents,) = timed(lambda guided=guided: pipeline(**request(workload, device, 0, guided)))
        expected[guided] = latents.clone()
    whole = torch.cuda.max_memory_allocated(device) - left

    def add(
        schedule: str, guided: bool, requests: int, seconds: float, share: float, replicas: int, **more: Any
    ) -> None:
        ideal = requests * single[guided] * share / replicas
        rows.append(
            dict(workload=name, layout=layout.name, transport=more.pop("transport", ""), schedule=schedule)
            | dict(guidance=guided, requests=requests, ms_per_step=1000 * seconds / workload.steps / requests)
            | dict(ms_total=1000 * seconds, single_ms_per_step=1000 * single[guided] / workload.steps)
            | dict(speedup=requests * single[guided] / seconds, share=ideal / seconds, **more)
        )
        if dist.get_rank() == 0:
            row = rows[-1]
            file.write_text(json.dumps(rows))
            print(
                f"{time.perf_counter() - started:5.1f} s  {name} {layout.name} {row['transport']}: {schedule}, "
                f"guidance {guided}, {requests} requests: {row['ms_per_step']:.1f} ms a step, share {row['share']:.3f}",
                flush=True,
            )

    if layout.ulysses > 1:
        pipeline.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=layout.ulysses))
        for guided in workload.guidances:
            pipeline(**short(workload, device, guided, 1))
            seconds, _ = timed(lambda guided=guided: pipeline(**request(workload, device, 0, guided)))
            add("context parallel", guided, 1, seconds, 1 / layout.ulysses, 1)
        return

    sizes = dict(pipeline_parallel_size=layout.stages, cfg_parallel_size=layout.replicas, transport=layout.transport)
    parallelize(pipeline, ParallelConfig(**sizes, compile=layout.compile, timeout_seconds=CALL_SECONDS))
    pipeline.set_progress_bar_config(disable=True)
    for guided in workload.guidances:
        pipeline(**short(workload, device, guided, 5))  # as many as it takes to record CUDA graphs
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    split = split_of(pipeline.transformer)
    assert split is not None
    share = largest_share(split)
    crossing = sum(value.bytes for value in split.boundaries[0]) if split.boundaries else 0
    for guided in workload.guidances:
        extra = count_syncs(lambda guided=guided: pipeline(**short(workload, device, guided)))
        seconds, (latents,) = timed(lambda guided=guided: pipeline(**request(workload, device, 0, guided)))
        facts = dict(transport=layout.transport, equal=bool(torch.equal(latents, expected[guided])))
        facts |= dict(largest_share=share, boundary_bytes=crossing, host_syncs=extra, single_host_syncs=syncs[guided])
        calls = 2 if guided else 1
        add("one request", guided, 1, seconds, share, min(layout.replicas, calls), **facts)
        full = 2 * layout.stages * layout.replicas
        for count in (full // 2, full) if name == "flux" else (full,):
            several = [request(workload, device, seed, guided) for seed in range(count)]
            generate(pipeline, [{**own, "num_inference_steps": 1} for own in several])
            several = [request(workload, device, seed, guided) for seed in range(count)]
            stage = split.stages[dist.get_rank() % layout.stages]
            stage.clock = clock = StageClock(device)
            seconds, results = timed(lambda several=several: generate(pipeline, several))
            stage.clock = None
            per_call = gathered(clock.seconds_per_call())
            own_calls = count * workload.steps * calls / layout.replicas
            facts |= dict(stage_seconds=per_call, busy=[own * own_calls / seconds for own in per_call])
            load = simulated(split, workload, layout, count, calls, per_call)
            predicted = simulate(load).makespan
            facts |= dict(predicted_ms_per_step=1000 * predicted / workload.steps / count)
            facts |= dict(predicted_bytes=[own.total for own in rank_memory([(split, 1)], load)])
            facts["equal"] = bool(torch.equal(results[0][0], expected[guided]))
            add("rolling", guided, count, seconds, share, layout.replicas, **facts)
    peaks: list[Any] = [None] * layout.ranks
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated(device) - left + slots_bytes(pipeline))
    for row in rows:
        if row["workload"] == name:
            row.update(peak_bytes=peaks, single_peak_bytes=whole)
    if name == "flux" and layout.replicas == 1 and layout.transport == "auto":
        del pipeline, split
        torch.cuda.empty_cache()
        measure_gpipe(workload, layout, device, add)


def multiply(device: torch.device) -> None:
    """Let this thread get its workspace of cuBLAS (32 MiB on Hopper), which torch keeps and a rank that only splits lacks."""
    few = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    torch.matmul(few, few)


def measure_gpipe(workload: Workload, layout: Layout, device: torch.device, add: Callable[..., None]) -> None:
    """ScheduleGPipe over one batched call per step, on a pipeline of its own."""
    pipeline = build(workload, device)
    count = 2 * layout.stages
    config = ParallelConfig(
        pipeline_parallel_size=layout.stages, microbatches=count, schedule="gpipe", timeout_seconds=CALL_SECONDS
    )
    parallelize(pipeline, config)
    pipeline.set_progress_bar_config(disable=True)
    call = request(workload, device, 0, False, batch=count)
    pipeline(**{**call, "num_inference_steps": 1})
    seconds, _ = timed(lambda: pipeline(**request(workload, device, 0, False, batch=count)))
    split = split_of(pipeline.transformer)
    assert split is not None
    add("ScheduleGPipe", False, count, seconds, largest_share(split), 1, transport="nccl")


def tiny_pipeline(layout: Layout, device: torch.device, workload: Workload) -> Any:
    pipeline = build(workload, device)
    sizes = dict(pipeline_parallel_size=layout.stages, cfg_parallel_size=layout.replicas, transport=layout.transport)
    parallelize(pipeline, ParallelConfig(**sizes, timeout_seconds=CALL_SECONDS))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stress(layout: Layout, device: torch.device, rows: list[dict[str, Any]], runs: int = 200, steps: int = 20) -> None:
    """Many short runs, each of which must give the same latents."""
    workload = replace(WORKLOADS["tiny"], steps=steps)
    pipeline = tiny_pipeline(layout, device, workload)
    expected: list[torch.Tensor] = []

    def run(number: int) -> bool:
        (latents,) = pipeline(**request(workload, device, number % 2, False))
        if number < 2:
            expected.append(latents.clone())
        return bool(torch.equal(latents, expected[number % 2]))

    seconds, same = timed(lambda: [run(number) for number in range(runs)])
    facts = dict(workload="stress", layout=layout.name, transport=layout.transport, schedule=f"{runs} x {steps} steps")
    rows.append(dict(**facts, seconds=seconds, equal=all(same)))
    if dist.get_rank() == 0:
        print(rows[-1], flush=True)


def kill(layout: Layout, device: torch.device, rows: list[dict[str, Any]]) -> None:
    """The last rank is killed in the middle of a run; the others have to end, and say why."""
    pipeline = tiny_pipeline(layout, device, WORKLOADS["tiny"])
    pipeline(**short(WORKLOADS["tiny"], device, True))
    dist.barrier()
    killed = time.perf_counter() + 1
    if dist.get_rank() == layout.ranks - 1:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    message = ""
    while not message:
        try:
            (latents,) = pipeline(**short(WORKLOADS["tiny"], device, True))
            latents.cpu()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - killed
    facts = dict(workload="kill", layout=layout.name, transport=layout.transport, schedule="a rank is killed")
    rows.append(dict(**facts, seconds=seconds, message=message))
    print(f"rank {dist.get_rank()} ended after {seconds:.1f} s: {message.splitlines()[0]}", flush=True)


TRIALS = {"stress": stress, "kill": kill}


def gathered(seconds: float | None) -> list[float]:
    """How long the stage of each rank took per call, waits for data not included."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds or 0.0)
    return every


def simulated(
    split: SplitModel, workload: Workload, layout: Layout, requests: int, calls: int, stage_seconds: list[float]
) -> Simulated:
    """What the simulation behind `dit-pipelining show` is told: measured stages, the data sheet's NVLink."""
    link = find_device("h200").link("nvlink")
    results = [value_bytes(node) for node in split.graph.output_nodes]
    return Simulated(
        stage_seconds=tuple(stage_seconds[: layout.stages]),
        transfer_seconds=tuple(
            transfer_seconds(link, [own.bytes for own in crossing]) for crossing in split.boundaries
        ),
        result_seconds=transfer_seconds(link, results),
        requests=requests,
        steps=workload.steps,
        calls_per_step=calls,
        replicas=layout.replicas,
    )


def slots_bytes(pipeline: Any) -> int:
    """Memory that other ranks copy into, which torch's allocator does not count."""
    rolling = rolling_of(pipeline)
    links = getattr(rolling.runner if rolling is not None else None, "links", None)
    return links.channels.memory.size if isinstance(links, PeerLinks) and links.channels is not None else 0


def largest_share(split: Any) -> float:
    """The largest stage's part of the FLOPs."""
    seconds = split.partition.stage_seconds(model_costs(split.graph, split.model), [RankSpec()] * split.num_stages)
    return float(max(seconds) / sum(seconds))


def rank_main(layout: Layout, names: list[str], folder: str, seconds: float) -> None:
    # Says where a rank hangs, just before it is ended: a dump while threads run may end a rank that is well.
    faulthandler.dump_traceback_later(max(seconds - 5, 1))
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="32")
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in names:
            if name in TRIALS:
                TRIALS[name](layout, device, rows)
            else:
                measure(name, WORKLOADS[name], layout, device, rows, Path(folder, "rows.json"))
            gc.collect()  # pipelines refer to themselves; the next workload's peak must not contain them
            torch.cuda.empty_cache()
            if rank == 0:
                Path(folder, "rows.json").write_text(json.dumps(rows))
    if "kill" not in names:
        dist.barrier()
    os._exit(0)  # without the destruction of groups, which waits for communicators that nobody uses any more


def launch(layout: Layout, names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Run one layout in processes of its own; what was measured before one failed is kept."""
    with tempfile.TemporaryDirectory() as folder:
        codes = in_processes(layout.ranks, rank_main, layout, names, folder, seconds, seconds=seconds)
        if any(codes):
            print(f"{layout.name} {layout.transport}: exit codes {codes}", flush=True)
        rows = Path(folder, "rows.json")
        return json.loads(rows.read_text()) if rows.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layouts", nargs="*", default=["pp2", "cfg2"], help="such as pp2xcfg2, pp4:nccl, ulysses2, pp2:auto:blocks"
    )
    parser.add_argument("--workloads", nargs="*", default=["flux", "wan-14b", "wan-1.3b", "wan-1.3b-1560"])
    parser.add_argument("--seconds", type=float, default=300.0, help="at most, per layout")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    card = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    for layout in map(layout_of, args.layouts):
        names = [name for name in args.workloads if layout.ulysses == 1 or name not in TRIALS]
        rows += launch(layout, names, args.seconds)
        write(args.json, {"card": card, "rows": rows})
    if not any("share" in row for row in rows):
        return
    show(
        card,
        [
            {
                "workload": row["workload"],
                "layout": f"{row['layout']} {row['transport']}",
                "schedule": row["schedule"],
                "CFG": "yes" if row["guidance"] else "no",
                "requests": str(row["requests"]),
                "ms/step": f"{row['ms_per_step']:.1f}",
                "one GPU": f"{row['single_ms_per_step']:.1f}",
                "speed-up": f"{row['speedup']:.2f}",
                "share": f"{row['share']:.3f}",
                "predicted ms/step": f"{row['predicted_ms_per_step']:.1f}" if "predicted_ms_per_step" in row else "",
                "busy": " ".join(f"{own:.2f}" for own in row.get("busy", [])),
                "equal": str(row.get("equal", "")),
            }
            for row in rows
            if "share" in row
        ],
    )


if __name__ == "__main__":
    main()
