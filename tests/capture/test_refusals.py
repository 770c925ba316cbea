"""What a graph could not repeat is refused while it is captured, not done wrong."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dit_pipelining.capture.capturing import capture
from dit_pipelining.errors import CaptureError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    """Two blocks, and glue that the test gives."""

    def __init__(self, glue: Callable[[Any, torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.glue = glue

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return self.glue(self, x, extra)


def change_object(model: Any, x: torch.Tensor, extra: Any) -> torch.Tensor:
    for i, block in enumerate(model.blocks):
        extra.layer = i
        x = block(x, extra)
    return x


def hand_over_a_closure(model: Any, x: torch.Tensor, extra: Any) -> torch.Tensor:
    for i, block in enumerate(model.blocks):
        x = block(x, lambda: i)  # noqa: B023 - that is what is refused
    return x


def fill_a_list(model: Any, x: torch.Tensor, extra: Any) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
        extra.append(x)
    return x


def draw(model: Any, x: torch.Tensor, extra: Any) -> torch.Tensor:
    for block in model.blocks:
        x = block(x) * random.random()
    return x


@pytest.mark.parametrize(
    ("glue", "extra", "message"),
    [
        (change_object, SimpleNamespace(layer=0), "changes a SimpleNamespace between the blocks"),
        (hand_over_a_closure, None, "hands the function"),
        (fill_a_list, [], "puts tensors into a list"),
        (draw, None, "random numbers"),
    ],
)
def test_glue_that_a_graph_cannot_repeat_is_refused(glue: Any, extra: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Model(glue), dict(x=torch.zeros(2, 4), extra=extra))


def write_input(model: Any, x: torch.Tensor, extra: Any) -> torch.Tensor:
    x += 1
    for block in model.blocks:
        x = block(x)
    return x + extra


def test_a_write_into_an_input_that_shares_its_memory_is_refused() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(CaptureError, match="shares its memory with 'extra'"):
        capture(Model(write_input), dict(x=x, extra=x[:1]))
