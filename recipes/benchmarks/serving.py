"""How much of the ideal throughput a queue of requests reaches that come at random times, with stages that sleep.

    python recipes/benchmarks/serving.py [--json FILE] [--requests 50] [--stages 2 4] [--milliseconds 75]

Requests of mixed sizes, steps and guidance are submitted at random times, faster than the stages can serve them; some are
cancelled, one fails. The ideal is a line of stages that never waits: all steps that were done, times the slowest stage, from
the first request to the last result. At the end, when no request waits any more, the line empties; the share until then is
given beside it. A stage of a real model takes 25 to 100 ms. With four ranks on two cores their own Python, some 2 ms between
two calls of a stage, counts double, so the default is 75 ms.

Every result is checked against plain arithmetic. Threads and results that are left when all have ended are counted; there
should be no result, and no more threads than requests were in flight.
"""

import argparse
import contextlib
import gc
import multiprocessing
import random
import tempfile
import threading
import time
import weakref
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any

import reporting
import schedules
import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.api import serve
from dit_pipelining.comm.launch import Launch
from dit_pipelining.comm.mesh import Mesh
from dit_pipelining.config import ParallelConfig
from dit_pipelining.runtime.attach import attach, attach_pipeline
from dit_pipelining.runtime.executor import TransformerExecutor
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.runtime.serving import RequestQueue

CANCELLED_SHARE = 0.1
SIZES = (512, 1024)
"""Tokens of a request."""


class SleepingPipeline:
    """A denoising loop around a transformer whose blocks sleep."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer}

    def progress_bar(self, total: int) -> Any:
        raise NotImplementedError("requests have their own")

    def set_progress_bar_config(self, *, disable: bool) -> None:
        """It has none to disable."""

    def __call__(self, seed: int, tokens: int, steps: int, calls: int) -> torch.Tensor:
        if steps < 1:
            raise ValueError(f"steps={steps}")
        latents = torch.full((1, tokens, 64), float(seed))
        with self.progress_bar(total=steps) as bar:
            for step in range(steps):
                now = torch.tensor(float(step))
                predictions = [self.transformer(hidden_states=latents, timestep=now) for _ in range(calls)]
                latents = latents - 0.1 * sum(predictions) / calls
                bar.update()
        return latents


def expected(seed: int, tokens: int, steps: int, **_: Any) -> torch.Tensor:
    latents = torch.full((1, tokens, 64), float(seed))
    for step in range(steps):
        latents = latents - 0.1 * (latents + float(step))
    return latents


def lead(queue: RequestQueue, requests: int, stage_seconds: float) -> dict[str, Any]:
    """Submit, cancel and check; figures of the run."""
    draw = random.Random(0)
    for tokens in SIZES:
        queue.submit(seed=0, tokens=tokens, steps=2, calls=1).result(timeout=60)
    steps: list[tuple[float, int, bool]] = []  # when, calls of it, whether requests waited

    def on_step(calls: int) -> Any:
        return lambda *_: steps.append((time.perf_counter(), calls, queue.waiting > 0))

    submitted = []
    cancelled = set(draw.sample(range(requests), round(CANCELLED_SHARE * requests)))
    started = time.perf_counter()
    for index in range(requests):
        call = dict(seed=index, tokens=draw.choice(SIZES), steps=draw.randint(5, 15), calls=draw.choice((1, 2)))
        if index == requests // 2:
            call["steps"] = 0
        submitted.append((queue.submit(on_step=on_step(call["calls"]), **call), call))
        if index in cancelled:
            threading.Timer(draw.uniform(0.0, 20 * stage_seconds), submitted[-1][0].cancel).start()
        time.sleep(draw.expovariate(1 / (2 * stage_seconds)))
    outcomes: dict[str, int] = {}
    results = []
    for future, call in submitted:
        try:
            result = future.result(timeout=600)
            torch.testing.assert_close(result, expected(**call))
            results.append(weakref.ref(result))
            kind = "right"
        except (CancelledError, ValueError) as error:
            kind = type(error).__name__
        outcomes[kind] = outcomes.get(kind, 0) + 1
    elapsed = time.perf_counter() - started
    last = max(when for when, _, waited in steps if waited)
    full = [(when, calls) for when, calls, _ in steps if when <= last]
    del submitted, future, result
    queue.submit(seed=0, tokens=SIZES[0], steps=1, calls=1).result(timeout=60)  # the queue has gone on since
    gc.collect()
    return dict(
        requests=requests,
        seconds=round(elapsed, 2),
        share_of_ideal=round(sum(calls for _, calls, _ in steps) * stage_seconds / elapsed, 3),
        share_while_requests_wait=round(sum(calls for _, calls in full) * stage_seconds / (last - started), 3),
        right=outcomes.get("right", 0),
        cancelled=outcomes.get("CancelledError", 0),
        failed=outcomes.get("ValueError", 0),
        results_left=sum(result() is not None for result in results),
        threads=sum(thread.name == "request" for thread in threading.enumerate()),
    )


def run(stages: int, requests: int, seconds: float) -> dict[str, Any]:
    """One rank of a run; the figures, on the first."""
    parts = schedules.measure_parts(stages, 1, seconds)
    config = ParallelConfig(pipeline_parallel_size=stages, partitioner="uniform")
    model = schedules.SleepingTransformer(stages, seconds).eval()
    with Launch(config) as launch:
        launch.join()
        rolling = Rolling(Mesh(dist.get_rank(), stages, 1), torch.device("cpu"), timedelta(seconds=120), launch.guard)
    attach(model, TransformerExecutor("transformer", model, model, config, rolling, lambda *_: None))
    pipeline = SleepingPipeline(model)
    attach_pipeline(pipeline, rolling)
    found: dict[str, Any] = {}
    with serve(pipeline, max_waiting=requests) as queue:
        if queue.leads:
            found = dict(stages=stages, in_flight=2 * stages, **lead(queue, requests, max(parts.stages)))
    rolling.close()
    return found


def rank_main(rank: int, stages: int, store: str, requests: int, seconds: float, answers: Any) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", store=dist.FileStore(store, stages), rank=rank, world_size=stages)
    found = run(stages, requests, seconds)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(stages: int, requests: int, seconds: float) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_main, args=(rank, stages, f"{folder}/store", requests, seconds, answers))
            for rank in range(stages)
        ]
        with contextlib.ExitStack() as ends:
            for process in processes:
                process.start()
                ends.callback(process.join, 60)
            found: dict[str, Any] = answers.get(timeout=1800)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--milliseconds", type=float, default=75)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = [measure(stages, args.requests, args.milliseconds / 1000) for stages in args.stages]
    reporting.show("A queue of requests", [{name: str(value) for name, value in row.items()} for row in rows])
    reporting.write(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
