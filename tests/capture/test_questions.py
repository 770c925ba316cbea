"""Forwards that look at values: which graphs serve which inputs, and what may not be asked."""

import runpy
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dit_pipelining.api import split_model
from dit_pipelining.capture.capturing import CaptureCache, capture
from dit_pipelining.capture.values import summary
from dit_pipelining.errors import CaptureError
from tests.capture.toy import DIM, Block, Toy, assert_splits_exactly, hidden, randn
from tests.same import assert_same

TEXT = randn(1, 6, DIM, seed=1)


def mask(*kept: int, length: int = 6) -> torch.Tensor:
    """Row i keeps the first kept[i] positions."""
    return torch.arange(length) < torch.tensor(kept)[:, None]


def with_mask(*kept: int) -> dict[str, Any]:
    return hidden() | dict(text=TEXT, mask=mask(*kept))


class CutsToTheLength(Toy):
    """Padding is cut off: the length of the text decides a shape."""

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = int(mask.sum(dim=1).max())
        context = self.text(text[:, :length]).mean(1, keepdim=True)
        return self.run_blocks(hidden_states, context)


class SelectsByMask(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        chosen = self.text(text)[mask]
        positions = mask.nonzero()[:, 1:]
        return self.run_blocks(hidden_states, chosen.mean(0) + positions.float().sum())


class BranchesOnTheMask(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mask.all():
            return self.run_blocks(hidden_states)
        return self.run_blocks(hidden_states, self.text(text).mean(1, keepdim=True))


class LoopsOverLengths(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        parts = [self.text(text[0, :length]).sum(0) for length in mask.sum(1).tolist()]
        return self.run_blocks(hidden_states, torch.stack(parts).mean(0))


@pytest.mark.parametrize("cls", [CutsToTheLength, SelectsByMask, BranchesOnTheMask, LoopsOverLengths])
@pytest.mark.parametrize("kept", [(3,), (6,)])
def test_a_forward_may_look_at_a_mask(cls: type[Toy], kept: tuple[int, ...]) -> None:
    assert_splits_exactly(cls(3), lambda: with_mask(*kept))


def captures_of(model: nn.Module) -> tuple[CaptureCache, Any]:
    cache = CaptureCache(model)
    return cache, lambda *kept: cache.get(with_mask(*kept))


def test_another_mask_with_the_same_answer_reuses_the_graph() -> None:
    _, graph_of = captures_of(CutsToTheLength(2))
    assert graph_of(3, 2) is graph_of(1, 3)


def test_another_answer_is_captured_anew_and_both_graphs_are_kept() -> None:
    cache, graph_of = captures_of(CutsToTheLength(2))
    three, four = graph_of(3), graph_of(4)
    assert three is not four
    assert graph_of(3) is three
    assert graph_of(4) is four
    assert sum(len(graphs) for graphs in cache.graphs.values()) == 2


def test_of_a_selection_only_the_number_of_chosen_positions_is_an_answer() -> None:
    _, graph_of = captures_of(SelectsByMask(2))
    assert graph_of(3) is graph_of(3)
    scattered = with_mask(3) | dict(mask=torch.tensor([[True, False, True, False, False, True]]))
    cache, _ = captures_of(SelectsByMask(2))
    assert cache.get(scattered) is cache.get(with_mask(3))
    assert cache.get(scattered) is not cache.get(with_mask(2))


def test_masks_with_other_answers_give_what_the_model_gives() -> None:
    for cls in (CutsToTheLength, SelectsByMask, BranchesOnTheMask, LoopsOverLengths):
        model = cls(2)
        with torch.no_grad():
            split = split_model(model, 2, with_mask(3), partitioner="uniform")
            for kept in (3, 5, 6, 3):
                assert_same(split(**with_mask(kept)), model(**with_mask(kept)))


def test_a_mask_that_was_changed_in_place_is_asked_again() -> None:
    model = CutsToTheLength(2)
    inputs = with_mask(3)
    with torch.no_grad():
        split = split_model(model, 2, inputs, partitioner="uniform")
        before = split(**inputs)
        inputs["mask"][:, 3:5] = True
        assert_same(split(**inputs), model(**inputs))
        assert not torch.equal(split(**inputs), before)


def test_a_mask_made_in_inference_mode_is_asked_at_every_call() -> None:
    model = CutsToTheLength(2)
    with torch.inference_mode():
        inputs = with_mask(3)
        split = split_model(model, 2, inputs, partitioner="uniform")
        inputs["mask"][:, 3:5] = True
        assert_same(split(**inputs), model(**inputs))


class CountsThroughNumpy(Toy):
    """Positions by way of an array, as a text mask's are in some models."""

    convert = staticmethod(torch.Tensor.numpy)

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = self.convert(mask)
        return self.run_blocks(hidden_states, self.text(text).mean() * float((kept * np.arange(kept.size)).sum()))


class CountsThroughAsarray(CountsThroughNumpy):
    convert = staticmethod(np.asarray)


@pytest.mark.parametrize("cls", [CountsThroughNumpy, CountsThroughAsarray])
def test_an_array_is_an_answer_by_its_content(cls: type[Toy]) -> None:
    assert_splits_exactly(cls(3), lambda: with_mask(3))
    _, graph_of = captures_of(cls(2))
    three, four = graph_of(3), graph_of(4)
    assert three is not four
    assert graph_of(3) is three
    assert graph_of(4) is four


class LooksAtAFloat(Toy):
    """Lists of floating-point values, with NaN among them."""

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = (mask.float() / mask.float()).tolist()  # 0 / 0
        largest = max(value for row in rows for value in row if value == value)
        return self.run_blocks(hidden_states, self.text(text).mean() * largest + mask.float().mean().log().item())


def test_nan_and_infinity_are_equal_to_themselves_as_answers() -> None:
    cache, graph_of = captures_of(LooksAtAFloat(2))
    assert graph_of(3) is graph_of(3)
    assert graph_of(2, 4) is graph_of(2, 4)
    assert graph_of(3) is not graph_of(4)
    assert sum(len(graphs) for graphs in cache.graphs.values()) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1, 2], (1, 2)),
        ([[1], [2]], [[1, 2]]),
        ([1.0, float("nan")], [1.0, 0.0]),
        (np.zeros(2), np.zeros((1, 2))),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.array([0.0, 1.0])),
        (np.array([1, None]), np.array([2, None])),
        (np.float32(1), np.float32(2)),
        (dict(a=1), dict(a=2)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int)),
    ],
)
def test_different_answers_differ_and_equal_ones_do_not(one: Any, other: Any) -> None:
    assert summary(one) != summary(other)
    assert summary(one) == summary(deepcopy(one))
    assert summary([one, (other,)]) == summary(deepcopy([one, (other,)]))


class LooksAtTheTimestep(Toy):
    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        if timestep.max() > 500:
            return self.run_blocks(hidden_states)
        return self.run_blocks(hidden_states * 2)


class LooksAtTheLatents(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states * hidden_states.abs().max().item())


class LooksAtABlocksResult(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](hidden_states)
        return self.blocks[1](x) if bool((x > 0).any()) else x


class LooksThroughNumpy(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states * float(hidden_states.numpy().max()))


def test_a_question_about_the_timestep_is_refused_with_the_models_line() -> None:
    with pytest.raises(
        CaptureError, match=r"test_questions\.py:\d+ \(if timestep\.max\(\) > 500:\).*'timestep', which"
    ):
        capture(LooksAtTheTimestep(2), hidden() | dict(timestep=torch.tensor([900.0])))


def test_the_line_is_found_in_a_folder_that_is_named_like_a_library(tmp_path: Path) -> None:
    folder = tmp_path / "dit_pipelining" / "torch"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text("def scale(x):\n    return x.max().item()\n")
    code = runpy.run_path(str(folder / "model.py"))

    class CallsThatCode(Toy):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.run_blocks(hidden_states * code["scale"](hidden_states))

    with pytest.raises(CaptureError, match=r"dit_pipelining/torch/model\.py:2 \(return x\.max\(\)\.item\(\)\)"):
        capture(CallsThatCode(2), hidden())


def test_a_question_about_the_latents_is_refused_with_the_models_line() -> None:
    with pytest.raises(CaptureError, match=r"test_questions\.py:\d+ \(.*\.item\(\)\).*'hidden_states', which changes"):
        capture(LooksAtTheLatents(2), hidden())


def test_a_question_about_a_blocks_result_is_refused_with_the_blocks_name() -> None:
    with pytest.raises(CaptureError, match=r"test_questions\.py:\d+ .*output of the module 'blocks\.0'"):
        capture(LooksAtABlocksResult(2), hidden())


def test_a_conversion_of_the_latents_to_numpy_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"LooksThroughNumpy.*\.numpy\(\)\.max"):
        capture(LooksThroughNumpy(2), hidden())


def test_a_question_about_an_input_without_values_says_so() -> None:
    with pytest.raises(CaptureError, match=r"'mask', which was given without values \(on the meta device\)"):
        capture(CutsToTheLength(2), with_mask(3) | dict(mask=torch.empty(1, 6, dtype=torch.bool, device="meta")))


class LooksAtAParameter(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states * self.text.bias.max().item())


def test_a_question_about_weights_that_are_not_loaded_names_them() -> None:
    model = LooksAtAParameter(2)
    model.text.bias = nn.Parameter(torch.empty(DIM, device="meta"))
    with pytest.raises(CaptureError, match=r"values of 'text\.bias', which is not loaded"):
        capture(model, hidden())


class RoutesByValue(Block):
    """A block that looks at values, as the routing of tokens to experts does."""

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        y = x.clone()
        chosen = x[..., 0] > 0
        y[chosen] = self.linear(x[chosen])
        return super().forward(y, context) * (2.0 if chosen.sum().item() % 2 else 1.0)


class RoutesInBlocks(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states)


def test_a_block_may_look_at_values_and_does_so_at_every_call() -> None:
    model = RoutesInBlocks(3, RoutesByValue)
    split = assert_splits_exactly(model)
    with torch.no_grad():
        for seed in range(4):
            inputs = dict(hidden_states=randn(2, 4, DIM, seed=seed))
            assert_same(split(**inputs), model(**inputs))
    assert split.graph.questions == ()
