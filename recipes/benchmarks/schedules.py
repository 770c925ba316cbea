"""How much of the ideal throughput each schedule reaches, with stages that sleep, so that two cores suffice.

    python recipes/benchmarks/schedules.py [--json FILE] [--steps 20] [--milliseconds 50]

and how well the simulation behind `dit-pipelining show` predicts it, from times of a stage, a transfer and a broadcast that
are measured alone, before.

M requests of T steps, each step one call (or two, with guidance) of a transformer whose S stages take c each, need at least
M * T * calls * c on a line of stages that never waits. What should happen:

- sequential (each call is waited for before the next starts, as a hand-back of the latents per step does): 1 / S of it.
- gpipe (torch's ScheduleGPipe over the M requests of each step): M / (M + S - 1), since the line drains at each step.
- rolling, M >= 2S requests: fill and drain once per run, so n / (n + S - 1) of n calls: 0.98 for 8 requests of 20 steps.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import reporting
import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.api import split_model
from dit_pipelining.comm.launch import Launch
from dit_pipelining.comm.links import make_links
from dit_pipelining.comm.mesh import Mesh
from dit_pipelining.config import ParallelConfig
from dit_pipelining.planning.simulation import simulate
from dit_pipelining.planning.timeline import Workload
from dit_pipelining.runtime.attach import attach
from dit_pipelining.runtime.executor import TransformerExecutor
from dit_pipelining.runtime.pending import resolved
from dit_pipelining.runtime.rolling import Rolling

TOKENS = (1, 1024, 64)
REPEATS = 11


@dataclass(frozen=True)
class Job:
    """One run: M requests of T steps over a number of pipelines."""

    schedule: str
    stages: int
    replicas: int
    requests: int
    steps: int
    calls: int
    seconds: float


@dataclass(frozen=True)
class Parts:
    """Seconds of what a run consists of, each measured alone: a stage, a transfer, a broadcast; and tensors a boundary."""

    stages: tuple[float, ...]
    transfer: float
    result: float
    tensors: int


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


def median_seconds(function: Callable[[], Any]) -> float:
    function()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_parts(stages: int, replicas: int, seconds: float) -> Parts:
    """Time a stage, a transfer and a broadcast, each alone; the same on every rank."""
    mesh = Mesh(dist.get_rank(), stages, replicas)
    model = SleepingTransformer(stages, seconds).eval()
    inputs = dict(hidden_states=torch.zeros(TOKENS), timestep=torch.tensor(0.0))
    split = split_model(model, stages, inputs, partitioner="uniform")
    graph, call = split.resolve(inputs)
    stage = split.stages[mesh.stage]
    received = [torch.zeros(value.wire_shape, dtype=value.dtype) for value in stage.received(graph)]
    own = median_seconds(lambda: stage.run(graph, received, call.leaves))
    all_stages: list[float] = [0.0] * mesh.size
    dist.all_gather_object(all_stages, own)
    links = make_links(mesh, timedelta(seconds=120), torch.device("cpu"))
    boundary = [torch.zeros(value.wire_shape, dtype=value.dtype) for value in split.boundaries[0]]
    result = [torch.zeros(node.meta["shape"], dtype=node.meta["dtype"]) for node in graph.output_nodes]

    def there_and_back() -> None:
        if mesh.rank < 2:
            for sender in (0, 1):
                for tensor in boundary:
                    group = links[0].hops[0].wire.group
                    (dist.send if mesh.rank == sender else dist.recv)(tensor, 1 - mesh.rank, group)

    def around() -> None:
        for root in range(mesh.size):  # each has to have received before it sends
            for tensor in result:
                dist.broadcast(tensor, root, group=links[0].results.group)

    times = torch.tensor([median_seconds(there_and_back) / 2, median_seconds(around) / mesh.size])
    dist.broadcast(times, 0)
    return Parts(tuple(all_stages[:stages]), float(times[0]), float(times[1]), len(boundary))


def predict(job: Job, parts: Parts) -> float:
    """Seconds that the simulation gives for a run."""
    workload = Workload(
        stage_seconds=parts.stages,
        transfer_seconds=(parts.transfer,) * (job.stages - 1),
        result_seconds=parts.result,
        boundary_tensors=(parts.tensors,) * (job.stages - 1),
        requests=job.requests,
        steps=job.steps,
        calls_per_step=job.calls,
        replicas=job.replicas,
        schedule=job.schedule,
    )
    return simulate(workload).makespan


def run(job: Job) -> float:
    """Seconds of one run on this rank; the result is checked against plain arithmetic."""
    schedule, stages, replicas, requests = job.schedule, job.stages, job.replicas, job.requests
    steps, calls, seconds = job.steps, job.calls, job.seconds
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
    attach(model, TransformerExecutor("transformer", model, model, config, rolling, lambda *_: None))
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

    work(2)  # the second step is the first one whose latents are pending
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


def rank_main(rank: int, world: int, store: str, jobs: list[Job], answers: Any) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    parts = measure_parts(jobs[0].stages, jobs[0].replicas, jobs[0].seconds)
    times = [run(job) for job in jobs]
    if rank == 0:
        answers.put((parts, times))
    dist.barrier()
    dist.destroy_process_group()


def measure(jobs: list[Job]) -> list[dict[str, Any]]:
    """Run jobs of one number of stages and replicas on ranks of their own; one row each."""
    world = jobs[0].stages * jobs[0].replicas
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, world, f"{folder}/store", jobs, answers) for rank in range(world)]
        processes = [context.Process(target=rank_main, args=own) for own in arguments]
        for process in processes:
            process.start()
        parts, times = answers.get(timeout=1800)
        for process in processes:
            process.join(60)
    return [row(job, elapsed, parts) for job, elapsed in zip(jobs, times, strict=True)]


def row(job: Job, elapsed: float, parts: Parts) -> dict[str, Any]:
    share = job.requests * job.steps * job.calls * max(parts.stages) / job.replicas / elapsed
    predicted = predict(job, parts)
    names = dict(schedule=job.schedule, stages=job.stages, replicas=job.replicas, requests=job.requests)
    figures = dict(seconds=round(elapsed, 3), share_of_ideal=round(share, 3))
    return {
        **names,
        "calls_per_step": job.calls,
        **figures,
        "predicted": round(predicted, 3),
        "measured_over_predicted": round(elapsed / predicted, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--milliseconds", type=float, default=50)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--json")
    args = parser.parse_args()
    seconds = args.milliseconds / 1000
    rows: list[dict[str, Any]] = []
    for stages in args.stages:
        rows += measure(
            [
                Job(schedule, stages, 1, requests, args.steps, calls, seconds)
                for calls in (1, 2)
                for requests in dict.fromkeys((1, 2, stages, 2 * stages))
                for schedule in ("sequential", "gpipe", "rolling")
            ]
        )
    rows += measure([Job("rolling", 2, 2, 8, args.steps, calls, seconds) for calls in (1, 2)])
    reporting.show("Schedules", [{name: str(value) for name, value in entry.items()} for entry in rows])
    off = [abs(entry["measured_over_predicted"] - 1) for entry in rows]
    print(f"furthest from the prediction: {max(off):.1%}; median {statistics.median(off):.1%}")
    reporting.write(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
