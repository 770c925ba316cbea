"""Caches that blocks fill, where a rank runs only some of the blocks."""

from typing import Any

import torch

from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.signature import flatten_inputs
from tests.capture.toy import DIM, Block, Toy, hidden


class Cache:
    def __init__(self, layers: int) -> None:
        self.layers: list[dict[str, Any]] = [{} for _ in range(layers)]
        self.last: torch.Tensor | None = None


class Remembering(Block):
    def forward(self, x: torch.Tensor, cache: Cache, layer: int) -> torch.Tensor:  # type: ignore[override]
        if "key" in cache.layers[layer]:
            x = x + cache.layers[layer]["key"]
        else:
            cache.layers[layer]["key"] = self.linear(x)
        return x


class Remembers(Toy):
    def __init__(self) -> None:
        super().__init__(2, Remembering)

    def forward(self, hidden_states: torch.Tensor, cache: Cache | None = None) -> Any:
        made = cache is None
        cache = Cache(2) if cache is None else cache
        for i, block in enumerate(self.blocks):
            hidden_states = block(hidden_states, cache, i)
        return (hidden_states, cache) if made else hidden_states


def test_a_cache_that_was_filled_in_part_can_be_captured_again() -> None:
    model = Remembers()
    call = {**hidden(), "cache": Cache(2)}
    graph = capture(model, call)
    call["cache"].layers[0]["key"] = torch.ones(2, 4, DIM)  # what the first block does on this rank
    graph.complete_objects(flatten_inputs(call))
    assert call["cache"].layers[0]["key"].device.type == "cpu"
    assert call["cache"].layers[1]["key"].device.type == "meta"
    assert call["cache"].layers[1]["key"].shape == (2, 4, DIM)
    assert call["cache"].last is None
    again = capture(model, call)
    assert len(again.blocks) == 2


def test_a_rank_that_ran_no_block_gets_the_cache_without_data() -> None:
    inputs = flatten_inputs(hidden())
    graph = capture(Remembers(), hidden())
    graph.complete_objects(inputs)
    _, cache = graph.rebuild_output([torch.zeros(2, 4, DIM)], inputs)
    assert [layer["key"].device.type for layer in cache.layers] == ["meta", "meta"]
