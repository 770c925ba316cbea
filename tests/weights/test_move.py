"""Weights that move between ranks arrive as they were: values, dtype, strides, and place within a cache line."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.weights.load import release_weights
from dit_pipelining.weights.move import CACHE_LINE, check_movable, move_weights
from tests.distributed import RankPool


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 5) for _ in range(4))
        self.blocks[1].bias = nn.Parameter(torch.randn(5, dtype=torch.bfloat16), requires_grad=False)
        self.blocks[1].register_buffer("table", torch.randn(3), persistent=False)
        self.blocks[2].weight = nn.Parameter(torch.randn(6, 5).t())  # dense, in another order
        self.blocks[2].empty = nn.Parameter(torch.empty(0, 3))
        self.blocks[3].scale = nn.Parameter(torch.tensor(2.0))
        # 8 bytes behind a cache line, as tensors lie in a mapped file.
        self.blocks[3].bias = nn.Parameter(torch.randn(10)[2:7])
        self.shared = nn.Parameter(torch.randn(7, 7)[::2, ::2])  # with gaps
        self.unused = nn.Parameter(torch.randn(2))


BEFORE = [frozenset({"blocks.0", "blocks.1", "shared"}), frozenset({"blocks.2", "blocks.3"})]
AFTER = [frozenset({"blocks.0"}), frozenset({"blocks.1", "blocks.2", "blocks.3.weight", "shared"})]
BACK = [frozenset({"blocks.0", "blocks.1", "blocks.2", "shared"}), frozenset({"blocks.3.weight", "shared"})]


def described(model: nn.Module) -> dict[str, Any]:
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {
        name: (tensor.detach().clone(), tensor.stride(), tensor.data_ptr() % CACHE_LINE, tensor.requires_grad)
        for name, tensor in tensors.items()
        if tensor.device.type != "meta"
    }


def moved() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the whole model holds, and what this rank does after each of two moves."""
    model = Model()
    rank = dist.get_rank()
    whole = described(model)
    release_weights(model, BEFORE[rank])
    if rank:
        model.blocks[1].table = torch.zeros(3)  # as it was made, not as the rank that holds the block has it
    move_weights(model, BEFORE, AFTER, [0, 1], dist.group.WORLD, torch.device("cpu"))
    first = described(model)
    move_weights(model, AFTER, BACK, [0, 1], dist.group.WORLD, torch.device("cpu"))
    return whole, [first, described(model)]


def test_weights_arrive_as_they_were_and_those_not_needed_are_dropped(ranks: RankPool) -> None:
    for rank, (whole, states) in enumerate(ranks.run(2, moved)):
        for state, needed in zip(states, (AFTER[rank], BACK[rank]), strict=True):
            expected = {name for name in whole if any(name == own or name.startswith(f"{own}.") for own in needed)} | {
                "blocks.1.table"
            }
            assert set(state) == expected
            for name in needed_names(state, needed):
                value, stride, remainder, requires_grad = state[name]
                original, original_stride, original_remainder, original_grad = whole[name]
                assert value.dtype == original.dtype
                assert torch.equal(value, original), name
                assert requires_grad == original_grad
                if name != "shared":  # which had gaps, and is dense now
                    assert stride == original_stride, name
                    assert remainder == original_remainder or not value.numel(), name


def needed_names(state: dict[str, Any], needed: frozenset[str]) -> list[str]:
    return [name for name in state if any(name == own or name.startswith(f"{own}.") for own in needed)]


class Quantised(torch.Tensor):
    """Stands for the tensor classes of quantisation libraries."""


def test_a_quantised_model_is_refused() -> None:
    model = Model()
    model.blocks[0].weight = nn.Parameter(torch.randn(5, 6).as_subclass(Quantised))
    with pytest.raises(ConfigError, match=r"Model's 'blocks.0.weight' is a Quantised"):
        check_movable(model)
