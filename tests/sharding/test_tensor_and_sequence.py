"""Heads over some ranks and tokens over others, together: what diffusers' unsplit models give."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dit_pipelining.api import split_model
from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.comm.layout import Layout
from dit_pipelining.comm.mesh import new_group
from dit_pipelining.errors import InputError
from dit_pipelining.sharding.groups import make_sequence_groups
from dit_pipelining.sharding.sequence import apply_sequence_parallel
from dit_pipelining.sharding.tensor import apply_tensor_parallel
from tests.distributed import RankPool
from tests.sharding.families import FAMILIES
from tests.zoo import build_inputs, build_model

TOLERANCE = dict(rtol=1e-5, atol=1e-5)
QUICK = ["Wan", "SD3 and 3.5"]
MINUTE = timedelta(seconds=60)


def share(model: Any, layout: Layout, uneven: bool) -> None:
    """Cut the heads and then the tokens, as a launch does it."""
    group = new_group(layout.groups("tensor"), MINUTE)
    apply_tensor_parallel(model, group, find_blocks(model))
    groups = make_sequence_groups(layout, dist.get_rank(), torch.device("cpu"), MINUTE)
    apply_sequence_parallel(model, groups, uneven=uneven)


def check(names: list[str], sizes: dict[str, int]) -> list[torch.Tensor]:
    """Compare each family, whole and in two stages, with diffusers' own model; gives the results in stages."""
    found = []
    for name in names:
        case = FAMILIES[name].with_four_heads()
        expected = build_model(case)(**build_inputs(case))[0]
        model = build_model(case)
        share(model, Layout(**sizes), uneven=True)
        whole = model(**build_inputs(case))[0]
        stages = split_model(model, 2, build_inputs(case), partitioner="uniform")(**build_inputs(case))[0]
        for output in (whole, stages):
            torch.testing.assert_close(output, expected, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
        found.append(stages)
    return found


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        (dict(ulysses=2, tensor=2), QUICK),
        pytest.param(dict(ulysses=2, tensor=2), list(FAMILIES), marks=pytest.mark.full),
        pytest.param(dict(ring=2, tensor=2), list(FAMILIES), marks=pytest.mark.full),
    ],
    ids=["ulysses, some families", "ulysses", "ring"],
)
def test_heads_and_tokens_are_shared_together(ranks: RankPool, sizes: dict[str, int], names: list[str]) -> None:
    first, *others = ranks.run(4, check, names, sizes)
    for results in others:
        assert all(torch.equal(own, other) for own, other in zip(results, first, strict=True))


def too_many() -> str:
    case = FAMILIES["Qwen-Image"].with_four_heads()
    model = build_model(case)
    apply_tensor_parallel(model, new_group(Layout(ulysses=2, tensor=2).groups("tensor"), MINUTE), find_blocks(model))
    groups = make_sequence_groups(Layout(ulysses=4), dist.get_rank(), torch.device("cpu"), MINUTE)
    apply_sequence_parallel(model, groups, uneven=True)
    with pytest.raises(InputError) as refused:
        model(**build_inputs(case))
    return str(refused.value)


def test_ulysses_shares_the_heads_that_tensor_parallelism_leaves(ranks: RankPool) -> None:
    for message in ranks.run(4, too_many):
        assert "an attention with 2 heads on each rank cannot share them among ulysses_degree=4" in message
