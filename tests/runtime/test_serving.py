"""Requests that join and leave a running pipeline."""

import gc
import random
import threading
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from dit_pipelining.api import ParallelConfig, load_pipeline, serve
from dit_pipelining.errors import ConfigError, InputError
from dit_pipelining.runtime.serving import QueueFullError, RequestFuture, RequestQueue
from tests import checkpoints
from tests.distributed import RankPool

SIZE = dict(height=16, width=16, num_frames=5, max_sequence_length=16, output_type="latent")
PROMPTS = ("a red cat", "a blue dog", "the moon", "a circle", "a square", "moves left")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("serving") / "wan")


def request(index: int) -> dict[str, Any]:
    """Different in prompt, steps, size and guidance."""
    size = {**SIZE, "width": (16, 32)[index % 2]}
    steps, guidance = 2 + index % 3, (4.0, 1.0)[index % 3 == 1]
    return dict(prompt=PROMPTS[index], num_inference_steps=steps, guidance_scale=guidance, **size)


def seeded(index: int) -> dict[str, Any]:
    return {**request(index), "generator": torch.Generator().manual_seed(index)}


def served(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    pipeline = load_pipeline(folder, ParallelConfig(**config))
    pipeline.set_progress_bar_config(disable=True)
    with serve(pipeline, max_in_flight=3) as queue:
        if not queue.leads:
            with pytest.raises(ConfigError, match="only rank 0"):
                queue.submit(prompt="a")
            return None
        return lead(queue)
    raise AssertionError("a block that raises nothing is left by its return")


def lead(queue: RequestQueue) -> dict[str, Any]:
    steps: list[tuple[int, int | None]] = []
    futures = [queue.submit(**seeded(index)) for index in range(3)]
    with pytest.raises(InputError, match=r"callback_on_step_end=.*cannot be sent to the other ranks"):
        queue.submit(**seeded(0), callback_on_step_end=lambda *step: {})
    wrong = queue.submit(**{**seeded(3), "height": 17})
    long = {**seeded(4), "num_inference_steps": 500}
    cancelled, late = queue.submit(**long), queue.submit(timeout=0.5, **long)
    time.sleep(0.2)  # joins while the others run
    futures += [queue.submit(**seeded(3)), queue.submit(on_step=lambda *done: steps.append(done), **seeded(4))]
    while not cancelled.running():
        time.sleep(0.01)
    assert cancelled.cancel()
    errors = [future.exception(timeout=100) for future in (wrong, late)]
    with pytest.raises(CancelledError):
        cancelled.result(timeout=100)
    shared = seeded(5)
    idle = queue.submit(**shared)  # when nothing else runs any more
    shared["generator"].manual_seed(0)  # a request is what it was when it was submitted
    results = [future.result(timeout=100).frames for future in (*futures, idle)]
    return dict(results=results, errors=[(type(error).__name__, str(error)) for error in errors], steps=steps)


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (2, 2)])
def test_requests_that_come_and_go_give_what_each_gives_alone(
    ranks: RankPool, wan: Path, stages: int, replicas: int
) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(wan)
    plain.set_progress_bar_config(disable=True)
    expected = [plain(**seeded(index)).frames for index in range(6)]
    config = dict(pipeline_parallel_size=stages, cfg_parallel_size=replicas)
    found, *others = ranks.run(stages * replicas, served, wan, config)
    assert others == [None] * (stages * replicas - 1)
    assert all(torch.equal(one, other) for one, other in zip(found["results"], expected, strict=True))
    assert found["errors"][0][0] == "ValueError"
    assert "17" in found["errors"][0][1]
    assert found["errors"][1][0] == "TimeoutError"
    assert found["steps"] == [(done, 3) for done in (1, 2, 3)]


def test_a_pipeline_in_one_process_serves_one_after_the_other(wan: Path) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(wan)
    plain.set_progress_bar_config(disable=True)
    expected = plain(**seeded(0)).frames
    with torch.no_grad(), serve(plain, max_waiting=2) as queue:
        future = queue.submit(**seeded(0))
        wrong = queue.submit(**{**seeded(1), "height": 17})
        assert torch.equal(future.result(timeout=60).frames, expected)
        assert isinstance(wrong.exception(timeout=60), ValueError)
        slow = [queue.submit(**{**seeded(0), "num_inference_steps": 50})]
        while not slow[0].running():
            time.sleep(0.01)
        slow += [queue.submit(**seeded(0)) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests"):
            queue.submit(**seeded(0))
        assert slow[-1].cancel()
    assert slow[0].result(timeout=0) is not None
    with pytest.raises(CancelledError):
        slow[-1].result(timeout=0)


def test_an_error_in_the_block_cancels_what_waits(wan: Path) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(wan)
    plain.set_progress_bar_config(disable=True)
    futures = []

    def stop() -> None:
        with torch.no_grad(), serve(plain) as queue:
            futures.extend(queue.submit(**{**seeded(0), "num_inference_steps": 20}) for _ in range(8))
            raise KeyError("stop")

    with pytest.raises(KeyError):
        stop()
    assert futures[-1].cancelled()


MANY = 50
CANCELLED = (7, 20, 33)
FAILING = 13


def many(folder: Path) -> tuple[dict[int, Any], dict[str, int]] | None:
    """What requests that come at random times give, by number, and what is left of them while the queue goes on."""
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    pipeline.set_progress_bar_config(disable=True)
    draw = random.Random(1)
    before = set(threading.enumerate())
    with serve(pipeline, max_in_flight=4) as queue:
        if not queue.leads:
            return None
        futures = []
        for index in range(MANY):
            changes: dict[int, dict[str, Any]] = {FAILING: {"height": 17}}
            changes |= {long: {"num_inference_steps": 5000} for long in CANCELLED}
            futures.append(queue.submit(**seeded(index % 6) | changes.get(index, {})))
            time.sleep(draw.choice((0.0, 0.0, 0.02, 0.05)))
        assert futures[CANCELLED[-1]].cancel()  # while it waits, most likely
        for index in CANCELLED[:-1]:
            while not futures[index].running():
                time.sleep(0.005)
            assert futures[index].cancel()
        outcomes = {index: outcome(futures.pop(0)) for index in range(MANY)}
        outputs = [weakref.ref(value) for value in outcomes.values() if isinstance(value, torch.Tensor)]
        copies = {i: value.clone() if isinstance(value, torch.Tensor) else value for i, value in outcomes.items()}
        outcomes.clear()
        queue.submit(**seeded(0)).result(timeout=100)  # the queue has gone on since
        gc.collect()
        left = {
            "outputs": sum(output() is not None for output in outputs),
            "threads beyond those in flight": len(set(threading.enumerate()) - before) - 4 - len(("queue", "door")),
            "running": queue.running,
            "waiting": queue.waiting,
        }
        return copies, left
    raise AssertionError("a block that raises nothing is left by its return")


def outcome(future: RequestFuture) -> Any:
    """The latents, or the kind of error."""
    try:
        return future.result(timeout=100).frames
    except (CancelledError, ValueError) as error:
        return type(error).__name__


def test_of_fifty_requests_at_random_times_each_gives_what_it_gives_alone_and_leaves_nothing(
    ranks: RankPool, wan: Path
) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(wan)
    plain.set_progress_bar_config(disable=True)
    alone = [plain(**seeded(index)).frames for index in range(6)]
    (found, left), other = ranks.run(2, many, wan)
    assert other is None
    assert {index for index, value in found.items() if isinstance(value, str) and value == "CancelledError"} == {
        *CANCELLED
    }
    assert {index for index, value in found.items() if isinstance(value, str) and value == "ValueError"} == {FAILING}
    served = {index: value for index, value in found.items() if isinstance(value, torch.Tensor)}
    assert len(served) == MANY - len(CANCELLED) - 1
    assert [index for index, value in served.items() if not torch.equal(value, alone[index % 6])] == []
    assert all(count <= 0 for count in left.values()), left


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_a_limit_that_is_no_positive_integer_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match="max_in_flight"), serve(object(), max_in_flight=number):
        pass
