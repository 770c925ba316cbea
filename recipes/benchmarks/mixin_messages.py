"""Messages and time per step of a hand-written pipeline, against metadata that is pickled for each message.

    python recipes/benchmarks/mixin_messages.py [--json FILE] [--steps 200]

Layers are tiny, so that a step is little else than its messages; all runs are on gloo, with one thread a rank. The pickled
way sends a dictionary as usual: the size of the pickled names, dtypes and shapes, these themselves, then each tensor; the
receiver waits for the first two before it can post the others. Latents of both ways are compared bit for bit.
"""

import argparse
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mixin_pipeline import LinearPipeline, on_ranks
from reporting import show, spread, write

from dit_pipelining.mixins import get_pp_group, pipeline_parallel

LAYERS, DIM, BATCH = 8, 64, 4


class PickledMetadata:
    """The group of a pipeline whose messages begin with pickled metadata."""

    def __init__(self, group: Any) -> None:
        self.group, self.messages = group, 0
        self.world_size, self.is_first_rank, self.is_last_rank = (
            group.world_size,
            group.is_first_rank,
            group.is_last_rank,
        )

    def isend_tensor_dict(self, tensors: dict[str, torch.Tensor], dst: int | None = None) -> list[Any]:
        target = self.group.next_rank if dst is None else self.group.ranks[dst]
        metadata = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        pickled = torch.frombuffer(bytearray(pickle.dumps(metadata)), dtype=torch.uint8)
        parts = [torch.tensor([pickled.numel()]), pickled, *tensors.values()]
        self.messages += len(parts)
        # A handle keeps the memory that is being sent.
        return [Kept(dist.isend(part, target, group=self.group.cpu_group), part) for part in parts]

    def irecv_tensor_dict(self, src: int | None = None) -> tuple[dict[str, torch.Tensor], list[Any], list[Any]]:
        source = self.group.prev_rank if src is None else self.group.ranks[src]
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, group=self.group.cpu_group)
        pickled = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(pickled, source, group=self.group.cpu_group)
        metadata = pickle.loads(pickled.numpy().tobytes())
        tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in metadata}
        handles = [dist.irecv(tensor, source, group=self.group.cpu_group) for tensor in tensors.values()]
        return tensors, handles, []


class Kept:
    def __init__(self, work: Any, memory: torch.Tensor) -> None:
        self.work, self.memory = work, memory

    def wait(self) -> None:
        self.work.wait()


def steps_of(ways: tuple[str, ...], repeats: int, steps: int, guided: bool) -> list[dict[str, Any]]:
    """Seconds per step and messages of this rank per step; ways take turns, so that a busy machine is busy for both."""
    pipeline = LinearPipeline(LAYERS, DIM, torch.float32, torch.device("cpu"))
    latents = torch.randn((BATCH, DIM), generator=torch.Generator().manual_seed(0))
    group, pickled = get_pp_group(), PickledMetadata(get_pp_group())
    groups: dict[str, tuple[Any, Callable[[], int]]] = {
        "header": (group, lambda: group.sent.messages + group.sent.extras),
        "pickled": (pickled, lambda: pickled.messages),
    }
    measured: list[dict[str, Any]] = []
    results = []
    for repeat in range(-1, repeats):
        for way in ways:
            used, sent = groups[way]
            pipeline_parallel.get_pp_group = lambda used=used: used
            before = sent()
            dist.barrier()
            started = time.perf_counter()
            results.append(pipeline.diffuse(latents, steps, guided))
            dist.barrier()
            seconds = (time.perf_counter() - started) / steps
            if repeat >= 0:  # the first run meets unknown layouts
                measured.append(dict(way=way, seconds=seconds, messages=(sent() - before) / steps))
    if group.is_first_rank or group.is_last_rank:
        assert all(torch.equal(result, results[0]) for result in results)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    ways, rows, entries = ("header", "pickled"), [], []
    for stages in (2, 4):
        for guided in (False, True):
            by_rank = on_ranks(stages, "gloo", steps_of, ways, args.repeats, args.steps, guided)
            entry: dict[str, Any] = dict(stages=stages, branches=2 if guided else 1)
            for way in ways:
                of_way = [[run for run in runs if run["way"] == way] for runs in by_rank]
                entry[way] = dict(
                    messages_per_step=sum(runs[0]["messages"] for runs in of_way),
                    milliseconds_per_step=spread([1000 * run["seconds"] for run in of_way[0]]),
                )
            header, pickled = (entry[way]["milliseconds_per_step"]["median"] for way in ways)
            entry["time_ratio"] = header / pickled
            entries.append(entry)
            rows.append(
                {
                    "stages, branches": f"{stages}, {entry['branches']}",
                    "messages a step": f"{entry['header']['messages_per_step']:.0f}",
                    "pickled": f"{entry['pickled']['messages_per_step']:.0f}",
                    "ms a step": f"{header:.2f}",
                    "ms pickled": f"{pickled:.2f}",
                    "ratio": f"{header / pickled:.2f}",
                }
            )
    show("Messages of a hand-written pipeline, over gloo", rows)
    write(args.json, {"layers": LAYERS, "dim": DIM, "steps": args.steps, "runs": entries})


if __name__ == "__main__":
    main()
