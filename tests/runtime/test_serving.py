"""Requests that join and leave a running pipeline."""

import gc
import itertools
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
import torch.distributed as dist

from dit_pipelining.api import ParallelConfig, generate, load_pipeline, serve
from dit_pipelining.errors import ConfigError, InputError, QueueFullError, RemoteRankError
from dit_pipelining.runtime.serving import RequestQueue
from dit_pipelining.runtime.submissions import RequestFuture
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


class OwnError(Exception):
    """Of a script's own, which cannot be rebuilt from its arguments."""

    def __init__(self, step: int, word: str) -> None:
        super().__init__(f"{word} at step {step}")


class UnpicklableError(RuntimeError):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def raise_plain(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("too dark")


def raise_own(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    raise OwnError(step, "too bright")


def raise_unpicklable(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    raise UnpicklableError("too green")


def raise_at_second_step(done: int, total: int | None) -> None:
    if done == 2:
        raise RuntimeError("the client is gone")


def raise_at_first_call(pipeline: Any) -> None:
    """Let the text encoder, on the rank that has it, fail once."""
    handles: list[Any] = []

    def fail(*_: Any) -> None:
        handles.pop().remove()
        raise UnpicklableError("no such word")

    if dist.is_initialized() and dist.get_rank() > 0:
        return
    handles.append(pipeline.text_encoder.encoder.final_layer_norm.register_forward_hook(fail))


def with_failing_requests(pipeline: Any) -> list[Any]:
    """What seven requests give, of which every second one fails in another way."""
    pipeline.set_progress_bar_config(disable=True)
    raise_at_first_call(pipeline)
    with torch.no_grad(), serve(pipeline, max_in_flight=3) as queue:
        if not queue.leads:
            return []
        futures = [queue.submit(**seeded(0)), queue.submit(**seeded(1))]
        for callback in (raise_plain, raise_own, raise_unpicklable):
            futures.append(queue.submit(callback_on_step_end=callback, **seeded(2)))
            futures.append(queue.submit(**seeded(3)))
        futures.append(queue.submit(on_step=raise_at_second_step, **seeded(4)))
        futures.append(queue.submit(**seeded(5)))
        return [future.exception(timeout=60) or future.result().frames for future in futures]
    raise AssertionError("a block that raises nothing is left by its return")


def failing_requests_on_ranks(folder: Path) -> list[Any]:
    outcomes = with_failing_requests(load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2)))
    return [(type(one).__name__, str(one)) if isinstance(one, Exception) else one for one in outcomes]


FAILURES = {
    0: ("UnpicklableError", "no such word"),
    2: ("RuntimeError", "too dark"),
    4: ("OwnError", "too bright at step 0"),
    6: ("UnpicklableError", "too green"),
    8: ("RuntimeError", "the client is gone"),
}


def test_whatever_a_request_raises_is_its_own_result_and_the_others_give_what_each_gives_alone(
    ranks: RankPool, wan: Path
) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(wan)
    plain.set_progress_bar_config(disable=True)
    alone = {index: plain(**seeded(index)).frames for index in (1, 3, 5)}
    found = ranks.run(2, failing_requests_on_ranks, wan)[0]
    assert {index: one for index, one in enumerate(found) if isinstance(one, tuple)} == FAILURES
    for index, latents in enumerate(found):
        if index not in FAILURES:
            assert torch.equal(latents, alone[min(index, 3) if index < 9 else 5]), index


def test_whatever_a_request_raises_is_its_own_result_in_one_process(wan: Path) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(wan)
    outcomes = with_failing_requests(plain)
    failed = {index: one for index, one in enumerate(outcomes) if isinstance(one, Exception)}
    assert {index: (type(one).__name__, str(one)) for index, one in failed.items()} == FAILURES


def raise_on_one_rank(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if dist.get_rank() == 0:
        raise KeyError("only here")
    return tensors


def failing_on_one_rank(folder: Path) -> list[str]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    pipeline.set_progress_bar_config(disable=True)
    futures: list[RequestFuture] = []

    def submit() -> None:
        with serve(pipeline) as queue:
            if queue.leads:
                futures.append(queue.submit(callback_on_step_end=raise_on_one_rank, **seeded(0)))
                futures.append(queue.submit(**seeded(1)))

    with pytest.raises((InputError, RemoteRankError)) as ended:
        submit()
    return [str(ended.value), *(str(future.exception(timeout=0)) for future in futures)]


def test_a_request_that_raises_on_one_rank_only_ends_the_queue_on_all_with_the_reason(
    ranks: RankPool, wan: Path
) -> None:
    (of_first, _, of_other_request), (of_second,) = ranks.run(2, failing_on_one_rank, wan)
    for message in (of_first, of_other_request, of_second):
        assert "request 0 raised KeyError: 'only here' on rank 0, but still runs on rank 1" in message


STEPS = (8, 2, 3, 2, 3, 2)
"""Of requests that are submitted in this order."""


def steps_in_time(folder: Path) -> list[int]:
    """The numbers of the requests, in the order in which they made their steps."""
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    pipeline.set_progress_bar_config(disable=True)
    made: list[int] = []
    with serve(pipeline, max_in_flight=3) as queue:
        if queue.leads:
            for index, steps in enumerate(STEPS):
                arguments = {**seeded(0), "num_inference_steps": steps}
                queue.submit(on_step=lambda done, total, index=index: made.append(index), **arguments)
    return made


def test_requests_start_in_the_order_of_their_submission_and_none_is_overtaken_between_two_of_its_steps(
    ranks: RankPool, wan: Path
) -> None:
    made, _ = ranks.run(2, steps_in_time, wan)
    assert [made.count(index) for index in range(len(STEPS))] == list(STEPS)
    assert list(dict.fromkeys(made)) == list(range(len(STEPS)))
    for index in range(len(STEPS)):
        places = [place for place, own in enumerate(made) if own == index]
        for before, after in itertools.pairwise(places):
            between = made[before + 1 : after]
            assert len(between) == len(set(between)), f"{made}: request {index} waited while another made two steps"
    last = {index: len(made) - made[::-1].index(index) for index in range(len(STEPS))}
    assert all(last[index] < last[0] for index in range(1, 4)), f"{made}: short requests waited for the long one"


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


@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_a_limit_that_is_no_positive_integer_is_refused(wan: Path, number: Any) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(wan)
    with pytest.raises(ConfigError, match="max_in_flight"), serve(pipeline, max_in_flight=number):
        pass
    with pytest.raises(ConfigError, match="max_in_flight"):
        generate(pipeline, [{}], max_in_flight=number)
