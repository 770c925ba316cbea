"""Whether the order in which `show --search` ranks ways is the order in which they run, with blocks that sleep.

    python recipes/benchmarks/search_order.py [--model wan2.2-t2v-a14b] [--link pcie] [--ranks 4] [--json FILE]

The search is asked for the ways to spread a model over some GPUs of a kind. Each way is then run by as many processes over
gloo: one request of a real WanPipeline with a tiny transformer, spread by just these degrees, whose blocks sleep as long as
the search says a block takes on each rank (what it computes, and what it waits for), times one factor for all. So what is put
to the test is what the search makes of these seconds: stages that take turns, calls that are spread over replicas, the
partition; the seconds of a block are not.

What should happen: ways whose predictions lie more than a tenth apart run in the predicted order. A run takes longer than
predicted by what the tiny blocks and messages take, the more ranks share a block the longer.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from ranks import on_ranks
from reporting import show, write

from dit_pipelining import ParallelConfig, parallelize
from dit_pipelining.cli.plan_search import work_of
from dit_pipelining.config import DIMENSIONS
from dit_pipelining.costs.devices import find_device
from dit_pipelining.planning.components import Components
from dit_pipelining.planning.degrees import Degrees
from dit_pipelining.planning.models import SizeRequest
from dit_pipelining.planning.search import search, sharded_costs
from dit_pipelining.planning.work import ModelWork

BLOCKS = 12
STEPS = 3
APART = 1.1


@dataclass(frozen=True)
class Run:
    """One way as it is run: its degrees, blocks of each stage, seconds that a block sleeps, and seconds predicted."""

    degrees: Degrees
    counts: tuple[int, ...]
    block_seconds: float
    predicted: float


class SleepingBlock(WanTransformerBlock):
    """A block that takes at least some time."""

    seconds: float

    def forward(self, hidden_states: Any, encoder_hidden_states: Any, temb: Any, rotary_emb: Any) -> Any:
        time.sleep(self.seconds)
        return super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)


def work_alone(model: str, device: str) -> ModelWork:
    """The first blocks of a model and nothing else, so that all of a run is known."""
    work = work_of(model, find_device(device), SizeRequest())
    nothing = dict(seconds=0.0, parameter_bytes=0, activation_bytes=0)
    return replace(
        work,
        blocks=work.blocks[:BLOCKS],
        prologue=replace(work.prologue, **nothing),
        epilogue=replace(work.epilogue, **nothing),
        result_bytes=0,
        copies=1,
        steps=STEPS,
        beside=Components(),
    )


def ways(work: ModelWork, ranks: int, device: str, link: str, best_seconds: float) -> list[Run]:
    """What the search ranks, the best first and brought to so many seconds; ways that differ in nothing else left out."""
    found = search(work, ranks, find_device(device), link).ways
    plain = [way for way in found if way.degrees.data == way.degrees.shards == 1]
    factor = best_seconds / plain[0].latency
    costs = [sharded_costs(work, way.degrees, find_device(device).link(link)).blocks[0].seconds for way in plain]
    return [
        Run(way.degrees, way.counts, factor * seconds, factor * way.latency)
        for way, seconds in zip(plain, costs, strict=True)
    ]


def measure(runs: Sequence[Run], calls: int) -> list[float]:
    """Seconds of one request each way, on a rank."""
    return [_measure(run, calls) for run in runs]


def _measure(run: Run, calls: int) -> float:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=12, text_dim=16, ffn_dim=32, num_layers=BLOCKS, rope_max_seq_len=32
    ).eval()
    for block in model.blocks:
        block.__class__ = SleepingBlock
        block.seconds = run.block_seconds
    missing: Any = None
    pipeline = WanPipeline(missing, missing, missing, FlowMatchEulerDiscreteScheduler(), transformer=model)
    config = ParallelConfig(
        partition=run.counts,
        blocks=["blocks"],
        **{size: getattr(run.degrees, dimension) for dimension, size in DIMENSIONS.items()},
    )
    parallelize(pipeline, config)
    pipeline.set_progress_bar_config(disable=True)
    text = torch.zeros(1, 16, 16)
    call = dict(height=128, width=128, num_frames=1, output_type="latent", prompt_embeds=text)
    call |= dict(guidance_scale=5.0, negative_prompt_embeds=text) if calls > 1 else dict(guidance_scale=1.0)
    pipeline(num_inference_steps=1, generator=torch.Generator().manual_seed(0), **call)
    started = time.perf_counter()
    pipeline(num_inference_steps=STEPS, generator=torch.Generator().manual_seed(0), **call)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan2.2-t2v-a14b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--link", default="pcie")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0, help="that the best way is brought to")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    work = work_alone(args.model, args.device)
    runs = ways(work, args.ranks, args.device, args.link, args.seconds)
    seconds = [max(own) for own in zip(*on_ranks(args.ranks, measure, runs, work.calls * work.batch), strict=True)]
    pairs = [
        (first, second)
        for first, second in combinations(range(len(runs)), 2)
        if runs[second].predicted > APART * runs[first].predicted
    ]
    wrong = [(str(runs[a].degrees), str(runs[b].degrees)) for a, b in pairs if seconds[a] >= seconds[b]]
    show(
        f"{args.model}, {args.ranks} x {args.device}, {args.link}",
        [
            {"way": str(run.degrees), "predicted s": f"{run.predicted:.2f}", "run s": f"{own:.2f}"}
            | {"run / predicted": f"{own / run.predicted:.3f}"}
            for run, own in zip(runs, seconds, strict=True)
        ],
    )
    print(f"{len(pairs) - len(wrong)} of {len(pairs)} pairs that are a tenth apart run in the predicted order", *wrong)
    rows = [
        dict(way=str(run.degrees), predicted=run.predicted, run=own) for run, own in zip(runs, seconds, strict=True)
    ]
    error = max(math.fabs(row["run"] / row["predicted"] - 1) for row in rows)
    facts = dict(model=args.model, device=args.device, link=args.link, ranks=args.ranks)
    write(args.json, facts | dict(rows=rows, pairs=len(pairs), wrong=wrong, largest_error=error))


if __name__ == "__main__":
    main()
