"""Give a transformer the weights of one stage, and take away all others."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.errors import CheckpointError
from dit_pipelining.lowering.boundary import StagePlan
from dit_pipelining.runtime.executor import FillStage
from dit_pipelining.sharding.tensor_layers import Shard
from dit_pipelining.weights.given import Untouched
from dit_pipelining.weights.load import load_weights, move_to, release_weights
from dit_pipelining.weights.pipelines import EmptyTransformer


def from_checkpoint(empty: EmptyTransformer, device: torch.device, shards: Mapping[str, Shard]) -> FillStage:
    """Fill a stage with its tensors of the checkpoint. What the caller has put into the model meanwhile is kept.

    Args:
        empty: the transformer; it is looked at now, when it is cut over ranks.
        device: of this rank.
        shards: which part of a tensor this rank holds, from `cut_over_ranks`.
    """
    untouched = Untouched(empty.model)

    def fill(plan: StagePlan, then: Mapping[str, Callable[[], object]]) -> None:
        checkpoint, quantised = empty.checkpoint, empty.quantised
        if isinstance(checkpoint, CheckpointError):
            raise checkpoint
        given = untouched.given(empty.model)
        if quantised is not None:
            quantised.read(empty.model, plan.weights, checkpoint)
            load = partial(quantised.load, empty.model, device=device, given=given)
        else:
            load = partial(
                load_weights,
                empty.model,
                checkpoint=checkpoint,
                device=device,
                torch_dtype=empty.torch_dtype,
                given=given,
                shards=shards,
            )
        for name, do in then.items():
            load(weights=[name])
            do()
        load(weights=plan.weights - then.keys())
        if quantised is not None:
            quantised.finish(empty.model)
        blocks = tuple(f"{name}." for name in find_blocks(empty.model))
        beside_blocks = [name for name in given if not name.startswith(blocks)]
        release_weights(empty.model, [*plan.weights, *beside_blocks])
        for name in beside_blocks:  # a later call may use them on any stage
            move_to(empty.model, name, device)

    return fill


def from_memory(model: nn.Module, device: torch.device) -> FillStage:
    """Keep a stage's weights of a model that is loaded, and drop the others."""

    def fill(plan: StagePlan, then: Mapping[str, Callable[[], object]]) -> None:
        release_weights(model, plan.weights)
        for name in sorted(plan.weights):
            move_to(model, name, device)
            then.get(name, lambda: None)()

    return fill
