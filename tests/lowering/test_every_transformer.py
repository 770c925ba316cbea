"""Every diffusers transformer: all stages in one process equal the unsplit model, bit for bit."""

from collections.abc import Iterator

import pytest
import torch

from dit_pipelining.capture.capturing import CaptureCache
from dit_pipelining.capture.signature import bind
from dit_pipelining.lowering.split import SplitModel
from partitioners import Partition
from tests.same import assert_same
from tests.zoo import CASES, build_inputs, build_model, case_names


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def splits(blocks: int) -> Iterator[tuple[int, ...]]:
    """Two and three even stages, uneven ones, and stages of one block."""
    wanted = [
        (blocks // 2, blocks - blocks // 2),
        (blocks // 3, blocks // 3, blocks - 2 * (blocks // 3)),
        (1, blocks - 1),
        (blocks - 1, 1),
        (1,) * blocks,
    ]
    yield from dict.fromkeys(counts for counts in wanted if all(counts))


@pytest.mark.parametrize("name", case_names())
def test_stages_equal_the_unsplit_model(name: str) -> None:
    case = CASES[name]
    model = build_model(case)
    expected = model(**build_inputs(case))
    captures = CaptureCache(model)
    graph = captures.get(bind(model.forward, (), build_inputs(case)))
    for counts in splits(len(graph.blocks)):
        split = SplitModel(model, captures, graph, Partition(counts))
        assert_same(split(**build_inputs(case)), expected)
    assert_same(split(**build_inputs(case)), expected)  # the second call uses what the first has kept
    assert_same(model(**build_inputs(case)), expected)  # nothing of the capture stays in the model
