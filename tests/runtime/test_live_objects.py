"""Nothing that a call makes outlives its step: as much is alive late in a denoising loop as early."""

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from dit_pipelining.api import ParallelConfig, generate, load_pipeline
from dit_pipelining.runtime.attach import rolling_of
from tests import checkpoints
from tests.distributed import RankPool

STEPS = 20
MEASURED_AT = (4, 5, 6, STEPS - 1)
MORE_IN_FLIGHT = 8
"""What transfers on their way may hold more at one look than at another; one object for each call would be 50."""


class Watched:
    """Counts the objects that are alive of those it was given. Looking at all of Python's would disturb other threads."""

    def __init__(self) -> None:
        self._references: list[tuple[str, weakref.ref[Any]]] = []

    def add(self, kind: str, *values: Any) -> None:
        self._references += [(kind, weakref.ref(value)) for value in values]

    def alive(self) -> Counter[str]:
        gc.collect()
        known = {(kind, id(value)) for kind, reference in self._references if (value := reference()) is not None}
        return Counter(kind for kind, _ in known)


def counted(folder: Path) -> tuple[int, list[Counter[str]]]:
    """Calls that were made, and what of them was alive after some steps of the first of two requests."""
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    rolling = rolling_of(pipeline)
    assert rolling is not None
    watched, counts, made = Watched(), [], []
    submit, run = rolling.submit, rolling.runner.submit

    def watched_submit(*args: Any) -> Any:
        tensors, arrival = submit(*args)
        watched.add("arrival", arrival)
        watched.add("pending tensor", *tensors)
        made.append(1)
        return tensors, arrival

    def watched_run(call: Any) -> None:
        watched.add("call", call)
        watched.add("result", *call.results)
        watched.add("input", *(leaf for leaf in call.leaves.values() if isinstance(leaf, torch.Tensor)))
        run(call)
        watched.add("progress", call.state)

    def count(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step in MEASURED_AT:
            counts.append(watched.alive())
        return tensors

    rolling.submit, rolling.runner.submit = watched_submit, watched_run  # type: ignore[method-assign]
    size = dict(height=16, width=16, num_frames=5, max_sequence_length=16, output_type="latent")
    calls: list[dict[str, Any]] = [
        dict(prompt=prompt, num_inference_steps=STEPS, **size) for prompt in ("a red cat", "a blue dog")
    ]
    calls[0]["callback_on_step_end"] = count
    generate(pipeline, calls)
    return len(made), counts


def test_calls_leave_no_objects_behind(ranks: RankPool, tmp_path: Path) -> None:
    for made, (*early, late) in ranks.run(2, counted, checkpoints.wan(tmp_path / "wan")):
        assert made == STEPS * 4  # two requests with two branches
        for kind in ("arrival", "pending tensor", "call", "result", "input", "progress"):
            most = max(count[kind] for count in early)
            assert late[kind] <= most + MORE_IN_FLIGHT, kind
