"""Build only this stage's layers of a hand-written transformer, and know which parameters are elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dit_pipelining.mixins.intermediate_tensors import IntermediateTensors
from dit_pipelining.mixins.parallel_state import get_pp_group, pipeline_group_is_initialized
from partitioners import ModelCosts, Partition, RankSpec, resolve_partition


class PPMissingLayer(nn.Identity):
    """Stands where another stage has a layer: keeps the numbering, holds no parameters, gives back what it gets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument, unchanged."""
        return args[0] if args else next(iter(kwargs.values()))


def get_pp_indices(
    num_hidden_layers: int,
    pp_rank: int,
    pp_size: int,
    partition: Partition | Sequence[int] | str | None = None,
) -> tuple[int, int]:
    """The layers of one stage, as (start, end) with `end` excluded.

    Args:
        num_hidden_layers: layers of the whole transformer.
        pp_rank: the stage.
        pp_size: number of stages.
        partition: layers per stage: a `Partition` of any partitioner, counts, or text such as `"8,12,12,8"`. Where it is
            None the environment variable VLLM_PP_LAYER_PARTITION decides, and without it an even split whose remainder
            goes to the stages before the last (vLLM's rule, `vllm/distributed/utils.py`).

    Raises:
        PartitionError: the counts do not fit the layers or the stages, or there are more stages than layers.
    """
    costs, ranks = ModelCosts.uniform(num_hidden_layers), [RankSpec()] * pp_size
    counts = partition.counts if isinstance(partition, Partition) else partition
    return resolve_partition("uniform", costs, ranks, counts).ranges[pp_rank]


def make_layers(
    num_hidden_layers: int,
    layer_fn: Callable[..., nn.Module],
    prefix: str,
    partition: Partition | Sequence[int] | str | None = None,
) -> tuple[int, int, nn.ModuleList]:
    """This stage's layers, built in their places among placeholders; a single process gets all of them.

    Args:
        num_hidden_layers: layers of the whole transformer.
        layer_fn: called as `layer_fn(prefix="blocks.7")` for each layer of this stage.
        prefix: name of the list within the model.
        partition: see `get_pp_indices`.

    Returns:
        start, end (excluded) of this stage's layers, and a list of `num_hidden_layers` modules.
    """
    stage, stages = 0, 1
    if pipeline_group_is_initialized():
        group = get_pp_group()
        stage, stages = group.rank_in_group, group.world_size
    start, end = get_pp_indices(num_hidden_layers, stage, stages, partition)
    layers = [
        layer_fn(prefix=f"{prefix}.{i}") if start <= i < end else PPMissingLayer() for i in range(num_hidden_layers)
    ]
    return start, end, nn.ModuleList(layers)


def missing_layer_names(model: nn.Module) -> Iterator[str]:
    """Names of the model's placeholders, each ending with a dot."""
    return (f"{name}." for name, module in model.named_modules() if isinstance(module, PPMissingLayer))


def is_pp_missing_parameter(name: str, model: nn.Module) -> bool:
    """Whether a parameter of the checkpoint belongs to a layer that another stage has.

    Args:
        name: as the model would call it, such as `"blocks.7.attn1.to_out.0.weight"`.
        model: the transformer of this stage.
    """
    if isinstance(model, PPMissingLayer):
        return True
    return name.startswith(tuple(missing_layer_names(model)))


def make_empty_intermediate_tensors_factory(
    keys: Sequence[str], hidden_size: int
) -> Callable[[int, torch.dtype, torch.device], IntermediateTensors]:
    """A function `(batch_size, dtype, device)` that gives zeros (batch_size, hidden_size) under each key."""

    def make_empty_intermediate_tensors(
        batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        return IntermediateTensors(
            {key: torch.zeros((batch_size, hidden_size), dtype=dtype, device=device) for key in keys}
        )

    return make_empty_intermediate_tensors
