"""Small hand-written models, and the comparison of their splits with themselves."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dit_pipelining.api import SplitModel, split_model
from tests.same import assert_same

DIM = 8


class Block(nn.Module):
    """`x + linear(x)`, with optional additive context."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        y = x + self.linear(x)
        return y if context is None else y + context


class Toy(nn.Module):
    """A model with a list of blocks; tests give it a forward."""

    def __init__(self, num_blocks: int = 2, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj_in = nn.Linear(DIM, DIM)
        self.text = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.proj_out = nn.Linear(DIM, DIM)

    def run_blocks(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *args)
        return x


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def hidden() -> dict[str, Any]:
    """The inputs of a model that takes nothing but latents."""
    return dict(hidden_states=randn(2, 4, DIM))


def all_cuts(num_blocks: int) -> Iterator[tuple[int, ...]]:
    """Every cut into two stages, and stages of one block."""
    yield from ((i, num_blocks - i) for i in range(1, num_blocks))
    if num_blocks > 2:
        yield (1,) * num_blocks


def run_apart(split: SplitModel, kwargs: dict[str, Any]) -> Any:
    """Run the stages as on ranks of their own: what crosses a boundary is a copy."""
    graph, inputs = split.resolve(kwargs)
    tensors: list[torch.Tensor] = []
    for stage in split.stages:
        tensors = [tensor.clone() for tensor in stage.run(graph, tensors, inputs.leaves)]
    return graph.rebuild_output(tensors, inputs)


def assert_splits_exactly(
    model: nn.Module,
    make_inputs: Callable[[], dict[str, Any]] = hidden,
    cuts: Sequence[tuple[int, ...]] | None = None,
    num_blocks: int | None = None,
) -> SplitModel:
    """Every split returns what the model returns, leaves its inputs as the model does, and changes nothing in the model.

    Returns:
        the last split.
    """
    with torch.no_grad():
        expected_inputs = make_inputs()
        expected = model(**expected_inputs)
        for counts in cuts or list(all_cuts(num_blocks or len(model.blocks))):  # type: ignore[arg-type]
            split = split_model(model, len(counts), make_inputs(), counts=counts)
            assert split.partition.counts == counts
            for _ in range(2):  # the second call uses what the first has kept
                inputs = make_inputs()
                assert_same(split(**inputs), expected)
                assert_same(inputs, expected_inputs)
                assert_same(run_apart(split, make_inputs()), expected)
        assert_same(model(**make_inputs()), expected)
    return split
