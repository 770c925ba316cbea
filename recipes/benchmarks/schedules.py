"""How much of the ideal throughput each schedule reaches, with stages that sleep, so that two cores suffice.

    python recipes/benchmarks/schedules.py [--json FILE] [--steps 20] [--milliseconds 50]

M requests of T steps, each step one call (or two, with guidance) of a transformer whose S stages take c each, need at least
M * T * calls * c on a line of stages that never waits. What should happen:

- sequential (each call is waited for before the next starts, as a hand-back of the latents per step does): 1 / S of it.
- gpipe (torch's ScheduleGPipe over the M requests of each step): M / (M + S - 1), since the line drains at each step.
- rolling, M >= 2S requests: fill and drain once per run, so n / (n + S - 1) of n calls: 0.98 for 8 requests of 20 steps.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.comm.launch import Launch
from dit_pipelining.comm.mesh import Mesh
from dit_pipelining.config import ParallelConfig
from dit_pipelining.runtime.attach import attach
from dit_pipelining.runtime.executor import TransformerExecutor
from dit_pipelining.runtime.pending import resolved
from dit_pipelining.runtime.rolling import Rolling

TOKENS = (1, 1024, 64)


class SleepingBlock(nn.Module):
    """Takes a fixed time and no processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return hidden_states * self.weight


class SleepingTransformer(nn.Module):
    """One sleeping block per stage."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock(seconds) for _ in range(blocks))

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states + timestep


def denoise(model: nn.Module, seed: int, steps: int, calls: int, wait: bool) -> torch.Tensor:
    """A denoising loop; `wait` hands the result back after each call."""
    latents = torch.full(TOKENS, float(seed))
    for step in range(steps):
        time_now = torch.tensor(float(step))
        predictions = []
        for _ in range(calls):
            prediction = model(hidden_states=latents, timestep=time_now)
            predictions.append(resolved(prediction) if wait else prediction)
        latents = latents - 0.1 * sum(predictions) / calls
    return resolved(latents)


def run(schedule: str, stages: int, replicas: int, requests: int, steps: int, calls: int, seconds: float) -> float:
    """Seconds of one run on this rank; the result is checked against plain arithmetic."""
    config = ParallelConfig(
        pipeline_parallel_size=stages,
        cfg_parallel_size=replicas,
        partitioner="uniform",
        schedule="gpipe" if schedule == "gpipe" else "rolling",
        microbatches=requests if schedule == "gpipe" else 1,
    )
    model = SleepingTransformer(stages, seconds).eval()
    with Launch(config) as launch:
        launch.join()
        mesh = Mesh(dist.get_rank(), stages, replicas)
        rolling = Rolling(mesh, torch.device("cpu"), timedelta(seconds=120), launch.guard)
    attach(model, TransformerExecutor("transformer", model, config, rolling, lambda plan: None))
    if schedule == "gpipe":
        batch = torch.cat([torch.full(TOKENS, float(seed)) for seed in range(requests)])

        def work(steps: int) -> Any:
            latents = batch
            for step in range(steps):
                for _ in range(calls):
                    prediction = model(hidden_states=latents, timestep=torch.tensor(float(step)))
                latents = latents - 0.1 * prediction
            return list(latents.split(1))
    else:
        wait = schedule == "sequential"

        def work(steps: int) -> Any:
            return rolling.turns.run(
                [lambda seed=seed: denoise(model, seed, steps, calls, wait) for seed in range(requests)],
                in_flight=1 if wait else None,
            )

    work(1)
    dist.barrier()
    started = time.perf_counter()
    results = work(steps)
    dist.barrier()
    elapsed = time.perf_counter() - started
    for seed, result in enumerate(results):
        expected = torch.full(TOKENS, float(seed))
        for step in range(steps):
            expected = expected - 0.1 * (expected + float(step))
        torch.testing.assert_close(result, expected)
    rolling.close()
    return elapsed


def rank_main(rank: int, world: int, store: str, jobs: list[tuple[Any, ...]], answers: Any) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    for job in jobs:
        answers.put((rank, run(*job)))
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, jobs: list[tuple[Any, ...]]) -> list[float]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, world, f"{folder}/store", jobs, answers) for rank in range(world)]
        processes = [context.Process(target=rank_main, args=own) for own in arguments]
        for process in processes:
            process.start()
        times = [answers.get(timeout=600) for _ in range(world * len(jobs))]
        for process in processes:
            process.join(60)
    return [seconds for rank, seconds in times if rank == 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--milliseconds", type=float, default=50)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds = args.milliseconds / 1000
    rows: list[dict[str, Any]] = []
    for stages in args.stages:
        jobs = [
            (schedule, stages, 1, requests, args.steps, calls, seconds)
            for calls in (1, 2)
            for requests in dict.fromkeys((1, 2, stages, 2 * stages))
            for schedule in ("sequential", "gpipe", "rolling")
        ]
        for job, elapsed in zip(jobs, measure(stages, jobs), strict=True):
            rows.append(row(job, elapsed))
    two_replicas = [("rolling", 2, 2, 8, args.steps, calls, seconds) for calls in (1, 2)]
    for job, elapsed in zip(two_replicas, measure(4, two_replicas), strict=True):
        rows.append(row(job, elapsed))
    report(rows, args.json)


def row(job: tuple[Any, ...], elapsed: float) -> dict[str, Any]:
    schedule, stages, replicas, requests, steps, calls, seconds = job
    share = requests * steps * calls * seconds / replicas / elapsed
    names = dict(schedule=schedule, stages=stages, replicas=replicas, requests=requests, calls_per_step=calls)
    return {**names, "seconds": round(elapsed, 3), "share_of_ideal": round(share, 3)}


def report(rows: list[dict[str, Any]], path: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for entry in rows:
        table.add_row(*(str(value) for value in entry.values()))
    Console().print(table)
    if path:
        about = dict(torch=torch.__version__, command="python " + " ".join(sys.argv))
        path.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
