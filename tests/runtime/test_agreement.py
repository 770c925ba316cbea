"""Ranks that are called differently hear what differs; what all ranks refuse alike leaves the pipeline usable."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from dit_pipelining.api import ParallelConfig, generate, load_pipeline
from dit_pipelining.errors import InputError
from dit_pipelining.runtime.agreement import describe, digest, given_arguments
from tests import checkpoints
from tests.distributed import RankPool, RanksFailedError
from tests.faults import CALL


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("agreement") / "wan")


def a_function() -> None:
    pass


def other_function() -> None:
    pass


def generator(seed: int, drawn: int = 0) -> torch.Generator:
    made = torch.Generator().manual_seed(seed)
    torch.rand(drawn, generator=made)
    return made


SAME: list[Callable[[], Any]] = [
    lambda: None,
    lambda: "a cat",
    lambda: 0.1 + 0.2,
    lambda: [1, (2.0, "x"), {"a": None}],
    lambda: torch.arange(6.0).view(2, 3),
    lambda: torch.arange(6).to(torch.bfloat16),
    lambda: np.linspace(0, 1, 7),
    lambda: np.array([{"a": 1}, "b"], dtype=object),
    lambda: Image.new("RGB", (4, 3), (1, 2, 3)),
    lambda: generator(3),
    lambda: a_function,
    lambda: functools.partial(a_function, x=1),
    lambda: torch.float16,
    lambda: Path("a/b"),
    lambda: object(),
]

DIFFERENT: list[tuple[Any, Any]] = [
    ("a cat", "a dog"),
    ("1", 1),
    (1, 1.0),
    (True, 1),
    (None, "None"),
    (0.1, 0.1 + 1e-17 + 1e-16),
    (["a", "b"], ["b", "a"]),
    (["ab", "c"], ["a", "bc"]),
    ([1, [2]], [1, 2]),
    ([1], (1,)),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    (torch.zeros(4), torch.zeros(2, 2)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(2), torch.tensor([0.0, 1e-30])),
    (np.zeros(2), torch.zeros(2)),
    (Image.new("RGB", (2, 2)), Image.new("RGB", (2, 2), (0, 0, 1))),
    (generator(1), generator(2)),
    (generator(1), generator(1, drawn=1)),
    (a_function, other_function),
    (functools.partial(a_function, 1), functools.partial(a_function, 2)),
    ("\ud800", "\ud801"),
]


@pytest.mark.parametrize("make", SAME)
def test_equal_values_have_equal_digests(make: Callable[[], Any]) -> None:
    assert digest(make()) == digest(make())


def test_order_and_memory_layout_do_not_matter() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({3, 1, 2}) == digest({2, 3, 1})
    assert digest(torch.arange(6).view(2, 3).t().contiguous()) == digest(torch.arange(6).view(2, 3).t())
    assert digest(np.float32(0.5)) == digest(0.5)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_a_list_that_holds_itself_has_a_digest() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert digest(endless) == digest(endless)


def test_values_are_described_shortly() -> None:
    assert describe("a cat") == "'a cat'"
    long = "a cat " * 100
    assert len(describe(long)) < 100
    assert describe(long) != describe(long + "!")
    assert describe(torch.zeros(2, 3)).startswith("float32 tensor (2, 3) with content ")
    assert describe(Image.new("RGB", (4, 3))).startswith("RGB image 4x3 with content ")
    assert describe(generator(7)).startswith("generator with seed 7 ")
    assert describe(a_function) == "a_function"


def test_arguments_have_one_name_whether_given_by_name_or_by_position() -> None:
    def call(prompt: str, steps: int = 2, **others: Any) -> None:
        pass

    assert given_arguments(call, ("a", 3), {"x": 1}) == given_arguments(call, (), {"x": 1, "steps": 3, "prompt": "a"})
    assert given_arguments(call, (1, 2, 3), {}) == {"argument 0": 1, "argument 1": 2, "argument 2": 3}


def crop_and_widen(_: Any, step: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Another shape after the first step, another dtype after the second."""
    latents = values["latents"]
    return {"latents": latents[:, :, :2] if step == 0 else latents.double() if step == 1 else latents}


def changing(pipeline: Any) -> torch.Tensor:
    frames: torch.Tensor = pipeline(**CALL, generator=generator(5), callback_on_step_end=crop_and_widen).frames
    return frames


def branches_of_two_lengths(pipeline: Any) -> torch.Tensor:
    given = {name: value for name, value in CALL.items() if name != "prompt"}
    text = dict(prompt_embeds=torch.ones(1, 6, 32), negative_prompt_embeds=torch.zeros(1, 4, 32))
    frames: torch.Tensor = pipeline(**given, **text, generator=generator(5)).frames
    return frames


def stop(*_: Any) -> None:
    raise KeyError("stopped by a callback")


def messages_and_results(folder: Path) -> tuple[list[str], list[torch.Tensor]]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    pipeline.set_progress_bar_config(disable=True)
    rank = dist.get_rank()
    messages = []

    def refused(kind: type[Exception], function: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            function()
        messages.append(str(caught.value))

    refused(InputError, lambda: pipeline(**{**CALL, "prompt": ["a cat", "a dog"][rank]}))
    refused(InputError, lambda: pipeline(**CALL, **({"guidance_scale": 3.0} if rank else {})))
    refused(InputError, lambda: generate(pipeline, [CALL, {**CALL, "generator": generator(rank)}]))
    refused(InputError, lambda: pipeline(**CALL) if rank else generate(pipeline, [CALL]))
    refused(ValueError, lambda: pipeline(**{**CALL, "height": 17}))
    refused(InputError, lambda: generate(pipeline, [CALL, 3]))  # type: ignore[list-item]
    refused(KeyError, lambda: generate(pipeline, [CALL, {**CALL, "callback_on_step_end": stop}, CALL]))
    torch.manual_seed(11 if rank == 0 else 12)
    # Each call draws from where the last one left off, as in one process.
    drawn = [pipeline(**CALL).frames, pipeline(**CALL).frames]
    return messages, [*drawn, changing(pipeline), branches_of_two_lengths(pipeline)]


def test_what_all_ranks_refuse_is_named_and_leaves_the_pipeline_usable(ranks: RankPool, wan: Path) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(wan)
    plain.set_progress_bar_config(disable=True)
    torch.manual_seed(11)
    expected = [plain(**CALL).frames, plain(**CALL).frames, changing(plain), branches_of_two_lengths(plain)]
    for messages, results in ranks.run(2, messages_and_results, wan):
        assert [torch.equal(one, other) for one, other in zip(results, expected, strict=True)] == [True] * 4
        prompt, guidance, seed, call, height, request, callback = messages
        assert "prompt (rank 0: 'a cat', rank 1: 'a dog')" in prompt
        assert "guidance_scale (rank 0: not given, rank 1: 3.0)" in guidance
        assert "generator of request 1 (rank 0: generator with seed 0" in seed
        assert "rank 0: generate with a WanPipeline, rank 1: WanPipeline" in call
        assert "17" in height
        assert "request 1 is int" in request
        assert "stopped by a callback" in callback


def stop_on_rank_1(*args: Any) -> dict[str, Any]:
    return stop() if dist.get_rank() == 1 else args[-1]  # type: ignore[return-value]


def request_that_fails_on_one_rank(folder: Path) -> None:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    generate(pipeline, [CALL, {**CALL, "callback_on_step_end": stop_on_rank_1}, CALL])


def test_a_request_that_raises_on_one_rank_ends_all(ranks: RankPool, wan: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(2, request_that_fails_on_one_rank, wan)
    of_rank_0, of_rank_1 = str(caught.value).split("\nrank 1:\n", 1)
    assert "RemoteRankError: rank 1 failed: KeyError: 'stopped by a callback'" in of_rank_0
    assert "RemoteRankError" not in of_rank_1
