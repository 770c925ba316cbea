"""Guided Wan requests over two ranks of one thread each, against one process of one thread.

    OMP_NUM_THREADS=1 python recipes/benchmarks/cpu_wan.py --json recipes/benchmarks/results/cpu_wan.json

A few blocks of Wan 1.3B's size with random weights, run by diffusers' WanPipeline: two transformer calls a step. By counting,
on S = 2 stages that take half a call each:

- one request: both branches of a step are in flight, and the line drains at each step: 2S / (S + 1) = 4/3 of one process.
- four requests, rolling: the line drains once, after n calls: Sn / (n + S - 1), 1.94 for four steps.
- accelerate's prepare_pippy (torch's pipeline() and ScheduleGPipe; it needs a loop of its own, since WanPipeline makes one
  call after the other and passes its inputs by name): the branches of all requests are the chunks of one batch, and the line
  drains at each step: 4/3 for one request, 16/9 for four of equal shapes.

Targets: 0.9 of the bound for one request, 1.85 for four; and the simulation behind `dit-pipelining show`, told how long the
stages took a call in the same run, within 15% of its seconds. Runs take turns, each process is pinned to a core of its own
where there are two, and a ratio is the median over rounds of one process' time, the mean of that before and after, against the
time in the round. Results of the rolling schedule are compared with those of one process bit for bit, those of prepare_pippy
up to rounding.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.utils import logging
from reporting import show, spread, write
from torch import nn

from dit_pipelining.api import ParallelConfig, generate, parallelize
from dit_pipelining.lowering.clock import StageClock
from dit_pipelining.planning.simulation import simulate
from dit_pipelining.planning.timeline import Workload
from dit_pipelining.runtime.attach import split_of

STAGES = 2
REQUESTS = 4
GUIDANCE = 5.0
TEXT = (1, 128, 4096)
LARGEST_WAIT_SECONDS = 900
TARGETS = {"rolling, 1 request": 0.9 * 4 / 3, f"rolling, {REQUESTS} requests": 1.85}
LARGEST_FORECAST_ERROR = 0.15


@dataclass(frozen=True)
class Size:
    """What is run.

    Attributes:
        blocks: transformer blocks.
        heads: of 128 channels each; 12 in Wan 1.3B.
        side: of the latents; a frame has (side / 2)^2 tokens.
        frames: of the latents.
        steps: of denoising.
    """

    blocks: int
    heads: int
    side: int
    frames: int
    steps: int

    @property
    def tokens(self) -> int:
        return self.frames * (self.side // 2) ** 2


def build(size: Size) -> WanTransformer3DModel:
    """The same weights in every process."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=size.heads,
        attention_head_dim=128,
        ffn_dim=size.heads * 128 * 35 // 6,  # 8960 for 1536 channels
        num_layers=size.blocks,
        text_dim=TEXT[-1],
    )
    return model.eval()


def pipeline_of(model: WanTransformer3DModel) -> WanPipeline:
    """The diffusers pipeline, from prompt embeddings to latents."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def calls(size: Size, count: int, steps: int) -> list[dict[str, Any]]:
    """The arguments of `count` requests of so many steps, which differ in prompt and noise."""
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        made.append(
            dict(
                prompt_embeds=torch.randn(TEXT, generator=generator),
                negative_prompt_embeds=torch.randn(TEXT, generator=generator),
                latents=torch.randn(1, 16, size.frames, size.side, size.side, generator=generator),
                height=8 * size.side,
                width=8 * size.side,
                num_frames=4 * size.frames - 3,
                num_inference_steps=steps,
                guidance_scale=GUIDANCE,
                output_type="latent",
            )
        )
    return made


class Positional(nn.Module):
    """The transformer as prepare_pippy can take it: tensors by position in, one tensor out."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        prediction: torch.Tensor = self.transformer(hidden_states, timestep, text, return_dict=False)[0]
        return prediction


def prepared(size: Size, chunks: int) -> nn.Module:
    """The model split by accelerate; a call takes a batch of `chunks` samples. What it was split from is marked for good."""
    from accelerate import prepare_pippy

    example = calls(size, 1, 1)[0]
    return prepare_pippy(
        Positional(build(size)),
        split_points=[f"transformer.blocks.{size.blocks // STAGES}"],
        example_args=(example["latents"], torch.zeros(1), example["prompt_embeds"]),
        num_chunks=chunks,
    )


def denoise(model: nn.Module, requests: list[dict[str, Any]]) -> list[torch.Tensor]:
    """WanPipeline's loop over the requests in step, both branches of all of them in one batch."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(requests[0]["num_inference_steps"])
    latents = torch.cat([request["latents"] for request in requests])
    names = ("prompt_embeds", "negative_prompt_embeds")
    text = torch.cat([request[name] for name in names for request in requests])
    for time_now in scheduler.timesteps:
        batch = torch.cat([latents, latents])
        prediction = model(batch, time_now.expand(len(text)), text)
        # As gather_output=True would, which stops at torch.zeros(<tensor>) with accelerate 1.15 and torch 2.13.
        prediction = torch.empty_like(batch) if prediction is None else prediction
        dist.broadcast(prediction, src=STAGES - 1)
        with_prompt, without = prediction.chunk(2)
        guided = without + GUIDANCE * (with_prompt - without)
        latents = scheduler.step(guided, time_now, latents, return_dict=False)[0]
    return list(latents.split(1))


Result = tuple[list[torch.Tensor], float | None]
"""Latents, and what the simulation makes of the stages' times: seconds of the whole run."""

Runs = Mapping[str, Callable[[int], Result]]
"""What a process can run, by name, for a number of steps."""


def one_process(size: Size) -> Runs:
    pipeline = pipeline_of(build(size))
    return {"one process": lambda steps: ([pipeline(**call).frames for call in calls(size, 1, steps)], None)}


def two_ranks(size: Size) -> Runs:
    from accelerate import PartialState

    PartialState(cpu=True)
    pippy = {count: prepared(size, 2 * count) for count in (1, REQUESTS)}
    pipeline = parallelize(pipeline_of(build(size)), ParallelConfig(pipeline_parallel_size=STAGES))

    def rolling(count: int, steps: int) -> Result:
        split = split_of(pipeline.transformer)
        clock = StageClock(torch.device("cpu"))
        if split is not None:  # after the first call
            split.stages[dist.get_rank()].clock = clock
        latents = [output.frames for output in generate(pipeline, calls(size, count, steps))]
        return latents, forecast(clock, count, steps)

    def chunks(count: int, steps: int) -> Result:
        return denoise(pippy[count], calls(size, count, steps)), None

    return {
        "rolling, 1 request": lambda steps: rolling(1, steps),
        "prepare_pippy, 1 request": lambda steps: chunks(1, steps),
        f"rolling, {REQUESTS} requests": lambda steps: rolling(REQUESTS, steps),
        f"prepare_pippy, {REQUESTS} requests": lambda steps: chunks(REQUESTS, steps),
    }


def forecast(clock: StageClock, requests: int, steps: int) -> float | None:
    """Seconds of guided requests by simulation, from what every rank's stage took a call."""
    every: list[float | None] = [None] * STAGES
    dist.all_gather_object(every, clock.seconds_per_call())
    seconds = tuple(own for own in every if own is not None)
    if len(seconds) < STAGES:
        return None
    sizes = dict(requests=requests, steps=steps, calls_per_step=2)
    return simulate(Workload(stage_seconds=seconds, transfer_seconds=(0.0,) * (STAGES - 1), **sizes)).makespan


def serve(connection: Connection, size: Size, core: int | None, rank: int | None, store: str) -> None:
    """A process that runs what it is told to, and answers with seconds and the first result."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    logging.disable_progress_bar()
    if rank is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(STAGES), LOCAL_WORLD_SIZE=str(STAGES))
        group = dict(store=dist.FileStore(store, STAGES), rank=rank, world_size=STAGES)
        dist.init_process_group("gloo", timeout=timedelta(seconds=LARGEST_WAIT_SECONDS), **group)
    runs = one_process(size) if rank is None else two_ranks(size)
    connection.send(list(runs))
    while (job := connection.recv()) is not None:
        name, steps = job
        if rank is not None:
            dist.barrier()
        started = time.perf_counter()
        results, predicted = runs[name](steps)
        seconds = time.perf_counter() - started
        connection.send((seconds, [result.numpy() for result in results], predicted))
    if rank is not None:
        dist.barrier()
        dist.destroy_process_group()


class Workers:
    """The processes of one side, which run the same thing at the same time."""

    def __init__(self, size: Size, cores: list[int | None], ranks: list[int | None], store: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        for core, rank in zip(cores, ranks, strict=True):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs, size, core, rank, store), daemon=True).start()
            theirs.close()
            self.connections.append(ours)
        self.names: list[str] = self._answers()[0]

    def run(self, name: str, steps: int) -> tuple[float, list[torch.Tensor], float | None]:
        """Seconds and results of the first process, and how many seconds were predicted."""
        for connection in self.connections:
            connection.send((name, steps))
        seconds, results, predicted = self._answers()[0]
        return seconds, [torch.from_numpy(result) for result in results], predicted

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)

    def _answers(self) -> list[Any]:
        answers = []
        for connection in self.connections:
            if not connection.poll(LARGEST_WAIT_SECONDS):
                raise SystemExit(f"no answer within {LARGEST_WAIT_SECONDS} s")
            answers.append(connection.recv())
        return answers


def physical_cores() -> list[int]:
    """One CPU number of each core that this process may use; the last ones first, since systems keep the first busy."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    seen, found = set(), []
    for cpu in sorted(os.sched_getaffinity(0), reverse=True):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text() if siblings.exists() else str(cpu)
        if core not in seen:
            seen.add(core)
            found.append(cpu)
    return found


@dataclass
class Measured:
    """What was found, by the name of a run.

    Attributes:
        seconds: in each round, those of one process once more at the end.
        forecasts: the predicted seconds over them.
        right: whether the results were.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    forecasts: dict[str, list[float]] = field(default_factory=dict)
    right: dict[str, bool] = field(default_factory=dict)


def measure(size: Size, rounds: int, pin: bool) -> Measured:
    cores: list[int | None] = list(physical_cores()[:STAGES]) if pin else []
    if len(cores) < STAGES:
        cores = [None] * STAGES
    with tempfile.TemporaryDirectory() as folder:
        alone = Workers(size, cores[:1], [None], "")
        pair = Workers(size, cores, list(range(STAGES)), f"{folder}/store")
        found = Measured({name: [] for name in (*alone.names, *pair.names)})
        for turn in range(rounds + 2):  # the first one warms up, the last one is for one process only
            steps = size.steps if turn else 1
            elapsed, (expected,), _ = alone.run("one process", steps)
            if turn:
                found.seconds["one process"].append(elapsed)
            for name in pair.names if turn <= rounds else ():
                elapsed, results, predicted = pair.run(name, steps)
                if turn:
                    found.seconds[name].append(elapsed)
                    if predicted is not None:
                        found.forecasts.setdefault(name, []).append(predicted / elapsed)
                exact = name.startswith("rolling")
                same = torch.equal if exact else lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-3)
                found.right[name] = found.right.get(name, True) and bool(same(results[0], expected))
        alone.close()
        pair.close()
    return found


def bound(name: str, steps: int) -> float:
    """How much faster than one process a run can be when each stage takes half of a call."""
    count = REQUESTS if str(REQUESTS) in name else 1
    chunks = 2 * count * steps if count > 1 and name.startswith("rolling") else 2 * count
    return STAGES * chunks / (chunks + STAGES - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--heads", type=int, default=12, help="of 128 channels each; 12 as Wan 1.3B")
    parser.add_argument("--side", type=int, default=16, help="of the latents: (side / 2)^2 tokens a frame")
    parser.add_argument("--frames", type=int, default=3, help="of the latents")
    parser.add_argument("--no-pinning", action="store_true", help="leave the choice of cores to the system")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    size = Size(args.blocks, args.heads, args.side, args.frames, args.steps)
    found = measure(size, args.rounds, not args.no_pinning)
    alone = found.seconds.pop("one process")
    between = [(before + after) / 2 for before, after in pairwise(alone)]
    rows: list[dict[str, str]] = [
        {"run": "one process, 1 request", **_times(alone), "faster": "1", "bound": "", "share": "", "predicted": ""}
    ]
    figures: dict[str, Any] = {"one process": spread(alone)}
    for name, times in found.seconds.items():
        count = REQUESTS if str(REQUESTS) in name else 1
        ratio = spread([count * single / own for single, own in zip(between, times, strict=True)])
        most = bound(name, args.steps)
        met = {"target": TARGETS[name], "target_met": ratio["median"] >= TARGETS[name]} if name in TARGETS else {}
        figures[name] = {
            "seconds": spread(times),
            "faster": ratio,
            "bound": most,
            "results_right": found.right[name],
            **met,
        }
        shown = {"faster": f"{ratio['median']:.3f}", "bound": f"{most:.3f}", "share": f"{ratio['median'] / most:.3f}"}
        shown["predicted"] = ""
        if name in found.forecasts:
            told = spread(found.forecasts[name])
            close = abs(told["median"] - 1) <= LARGEST_FORECAST_ERROR
            figures[name] |= {"predicted_over_measured": told, "forecast_target_met": close}
            shown["predicted"] = f"{told['median']:.3f} x"
        rows.append({"run": name, **_times(times), **shown})
    channels = 128 * args.heads
    show(f"Wan, {args.blocks} blocks of {channels} channels, {size.tokens} tokens, {args.steps} steps, guidance", rows)
    wrong = [name for name, ok in found.right.items() if not ok]
    write(args.json, {"size": vars(size), "tokens": size.tokens, "rounds": args.rounds, "runs": figures})
    if wrong:
        raise SystemExit(f"results differ from those of one process: {', '.join(wrong)}")


def _times(values: list[float]) -> dict[str, str]:
    figures = spread(values)
    return {"s (median)": f"{figures['median']:.2f}", "range": f"{figures['min']:.2f} to {figures['max']:.2f}"}


if __name__ == "__main__":
    main()
