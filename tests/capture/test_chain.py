"""Which block calls a partition counts, and which are side branches."""

import pytest
import torch
from torch import nn

from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.graph import BlockGraph
from tests.capture.toy import DIM, Block, Toy, hidden, randn
from tests.zoo import CASES, build_inputs, build_model


def targets(nodes: tuple[torch.fx.Node, ...]) -> list[str]:
    return [str(node.target) for node in nodes]


def lists(nodes: tuple[torch.fx.Node, ...]) -> dict[str, int]:
    """How many calls of each block list, lists in the order of their first call."""
    found: dict[str, int] = {}
    for name in targets(nodes):
        prefix = name.rpartition(".")[0]
        found[prefix] = found.get(prefix, 0) + 1
    return found


def captured(name: str) -> BlockGraph:
    return capture(build_model(CASES[name]), build_inputs(CASES[name]))


def test_vace_hint_blocks_are_side_blocks() -> None:
    graph = captured("WanVACETransformer3D@scale")
    assert lists(graph.blocks) == {"blocks": 6}
    assert lists(graph.side_blocks) == {"vace_blocks": 3}


def test_fluxs_double_and_single_stream_blocks_are_one_chain() -> None:
    graph = captured("FluxTransformer")
    assert lists(graph.blocks) == {"transformer_blocks": 4, "single_transformer_blocks": 4}
    assert graph.side_blocks == ()


@pytest.mark.parametrize("name", ["WanTransformer3D", "HunyuanDiT", "LatteTransformer"])
def test_the_chain_is_in_execution_order(name: str) -> None:
    graph = captured(name)
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    assert [order[node] for node in graph.blocks] == sorted(order[node] for node in graph.blocks)


@pytest.mark.parametrize("name", ["Kandinsky5Transformer3DModel", "Lumina2Transformer", "ZImageTransformer"])
def test_text_stacks_are_side_blocks_and_latent_blocks_are_not(name: str) -> None:
    graph = captured(name)

    def depends_on_latents(node: torch.fx.Node) -> bool:
        return graph.main_input in {path.partition(".")[0] for path in graph.inputs_of[node]}

    assert all(depends_on_latents(node) for node in graph.blocks)
    assert any(not depends_on_latents(node) for node in graph.side_blocks)


class WithText(Toy):
    """A text stack that is longer than the main one and joins it in the middle."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.text_blocks = nn.ModuleList(Block() for _ in range(7))

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.text_blocks:
            text = block(text)
        x = self.blocks[0](hidden_states)
        x = self.blocks[1](x + text)
        return self.blocks[2](x)


def test_a_longer_text_stack_is_not_the_main_chain() -> None:
    graph = capture(WithText(), dict(hidden_states=randn(1, 4, DIM), text=randn(1, 4, DIM)))
    assert targets(graph.blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    assert lists(graph.side_blocks) == {"text_blocks": 7}


class WithHints(Toy):
    """Hint blocks that start from the latents too, as WanVACE's: no shorter a path than the main one."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        self.hints = nn.ModuleList(Block() for _ in range(2))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        first = self.hints[0](hidden_states)
        second = self.hints[1](first)
        x = self.blocks[0](hidden_states)
        x = self.blocks[1](x + first)
        return self.blocks[3](self.blocks[2](x + second))


def test_hint_blocks_that_depend_on_the_latents_are_side_blocks() -> None:
    graph = capture(WithHints(), hidden())
    assert targets(graph.blocks) == [f"blocks.{i}" for i in range(4)]
    assert targets(graph.side_blocks) == ["hints.0", "hints.1"]


class Twice(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(self.run_blocks(hidden_states))


def test_a_block_called_twice_counts_twice() -> None:
    graph = capture(Twice(2), hidden())
    assert targets(graph.blocks) == ["blocks.0", "blocks.1", "blocks.0", "blocks.1"]


class Parallel(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[0](hidden_states) + self.blocks[1](hidden_states))


def test_of_two_parallel_blocks_one_is_a_side_block() -> None:
    graph = capture(Parallel(3), hidden())
    assert len(graph.blocks) == 2
    assert targets(graph.blocks)[-1] == "blocks.2"
    assert len(graph.side_blocks) == 1


class Unused(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.blocks[1](hidden_states)
        return self.blocks[2](self.blocks[0](hidden_states))


def test_a_block_whose_result_nobody_uses_is_dropped() -> None:
    graph = capture(Unused(3), hidden())
    assert targets(graph.blocks) == ["blocks.0", "blocks.2"]
    assert graph.side_blocks == ()
