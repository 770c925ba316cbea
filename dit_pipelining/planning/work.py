"""What one call of a transformer does on one GPU, of which a search works out what it does on several."""

from dataclasses import dataclass, field

from torch import nn

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.nodes import value_bytes
from dit_pipelining.costs.devices import DeviceProfile
from dit_pipelining.costs.inside import BlockWork, block_works
from dit_pipelining.costs.model_costs import model_costs
from dit_pipelining.costs.roofline import Roofline
from dit_pipelining.planning.components import Components
from dit_pipelining.planning.degrees import Divides
from partitioners import BlockCost


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """One call of a transformer on one GPU, and what surrounds it.

    Attributes:
        blocks: calls of blocks of the main chain.
        prologue, epilogue: the glue.
        result_bytes: that a call returns.
        divides: by what it can be divided inside a stage.
        copies: transformers like this one, which take turns.
        calls, batch: of the transformer in a step, and samples in each; a batch can be cut into calls of one sample.
        steps: of a request.
        beside: the text encoders and the VAE.
    """

    blocks: tuple[BlockWork, ...]
    prologue: BlockCost
    epilogue: BlockCost
    result_bytes: int
    divides: Divides
    copies: int = 1
    calls: int = 1
    batch: int = 1
    steps: int = 50
    beside: Components = field(default_factory=Components)


def model_work(graph: BlockGraph, model: nn.Module, device: DeviceProfile, divides: Divides) -> ModelWork:
    """What a captured model costs on one GPU.

    Args:
        graph: of one call, captured with `count_work`.
        model: with weights or without.
        device: the GPU.
        divides: by what the model can be divided.
    """
    costs = model_costs(graph, model, Roofline(device))
    return ModelWork(
        blocks=block_works(graph, model, costs, device),
        prologue=costs.prologue,
        epilogue=costs.epilogue,
        result_bytes=sum(value_bytes(node) for node in graph.output_nodes),
        divides=divides,
    )
