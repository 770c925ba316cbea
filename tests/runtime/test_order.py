"""On every rank the host gives out the operations of its calls in one order: receive, stage, send, result."""

from pathlib import Path
from typing import Any

import pytest

from dit_pipelining.api import ParallelConfig, generate, load_pipeline
from dit_pipelining.comm.links import ReplicaLinks
from dit_pipelining.lowering.stage import StageModule
from tests import checkpoints
from tests.distributed import RankPool

CALLS = 2 * 2 * 3
"""Branches, requests, steps."""


def operations(folder: Path) -> list[str]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=3))
    pipeline.set_progress_bar_config(disable=True)
    size = dict(height=16, width=16, num_frames=5, max_sequence_length=16, output_type="latent")
    request = dict(prompt="a red cat", num_inference_steps=3, guidance_scale=4.0, **size)
    generate(pipeline, [dict(request, num_inference_steps=1)])
    log: list[str] = []

    def logged(cls: type, name: str, operation: str) -> None:
        original = getattr(cls, name)

        def call(self: Any, *args: Any) -> Any:
            log.append(operation)
            return original(self, *args)

        patch.setattr(cls, name, call)

    with pytest.MonkeyPatch.context() as patch:
        for name, operation in (("receive", "receive"), ("send", "send"), ("share", "result")):
            logged(ReplicaLinks, name, operation)
        logged(StageModule, "run", "stage")
        generate(pipeline, [request, {**request, "prompt": "a blue dog"}])
    return log


def test_receive_stage_send_and_result_of_each_call_follow_each_other(ranks: RankPool, tmp_path: Path) -> None:
    first, middle, last = ranks.run(3, operations, checkpoints.wan(tmp_path / "wan"))
    for log, expected in (
        (first, ["stage", "send"]),
        (middle, ["receive", "stage", "send"]),
        (last, ["receive", "stage", "result"]),
    ):
        for operation in expected:
            assert log.count(operation) == CALLS
        for call in range(CALLS):
            places = [[i for i, own in enumerate(log) if own == operation][call] for operation in expected]
            assert places == sorted(places)
        # The receive of the next call is posted before a stage runs, so that data travels meanwhile; never of a later one.
        for i, own in enumerate(log):
            if own == "stage" and "receive" in expected:
                assert log[:i].count("receive") - log[:i].count("stage") in (1, 2)
    # Results are taken in by every rank in the order of the calls, each call's once.
    assert first.count("result") == middle.count("result") == CALLS
