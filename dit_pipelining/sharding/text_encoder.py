"""Cut a text encoder over ranks: each has a part of its heads, of its hidden widths and of its vocabulary."""

from typing import Any

import torch.distributed as dist
import transformers
from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.tensor_layers import Shard, cut_layer, part_of
from dit_pipelining.sharding.tensor_plans import LayerCut
from dit_pipelining.sharding.text_plans import COUNTS_OF_HEADS, TextPlan, text_plan
from dit_pipelining.sharding.vocabulary import cut_vocabulary


def check_text_encoder(name: str, model: transformers.PreTrainedModel, size: int) -> TextPlan:
    """Check that a text encoder can be cut over `size` ranks, with weights or without.

    Args:
        name: of the component.
        model: the encoder.
        size: number of ranks.

    Raises:
        ConfigError: it cannot; says what stands in the way, and which sizes work.
    """
    plan = text_plan(model, f"text_encoder_tp_size={size} for the component {name!r}")
    check_heads(name, plan, type(model).__name__, size)
    return plan


def check_heads(name: str, plan: TextPlan, model: str, size: int) -> None:
    """Check that `size` divides the heads of a text encoder.

    Args:
        name: of the component.
        plan: of the encoder.
        model: its name, for the message.
        size: number of ranks.

    Raises:
        ConfigError: it does not; says which sizes do.
    """
    wrong = next((layer for layer, heads in plan.heads.items() if heads % size), None)
    if wrong is not None:
        sizes = plan.sizes()
        raise ConfigError(
            f"text_encoder_tp_size={size} for the component {name!r}: {size} does not divide the {plan.heads[wrong]} heads of "
            f"{wrong} in {model}. Sizes that work: {', '.join(map(str, sizes))}. Sizes can be given by component: "
            f"text_encoder_tp_size={{{name!r}: {sizes[-1]}}}."
        )


def cut_text_encoder(model: nn.Module, plan: TextPlan, group: dist.ProcessGroup) -> dict[str, Shard]:
    """Cut a text encoder over the ranks of a group, in place; each of them calls this.

    Args:
        model: the encoder, with weights (the same on every rank) or without.
        plan: of the encoder.
        group: the ranks, which have to run its calls at the same time.

    Returns:
        which part of a tensor this rank holds, by the tensor's name, for those that are cut.
    """
    index, count = dist.get_rank(group), dist.get_world_size(group)
    shards: dict[str, Shard] = {}
    tied: dict[nn.Parameter, nn.Parameter] = {}
    for name, cut in plan.layers.items():
        layer: Any = model.get_submodule(name)
        if cut.style == "tokens":
            own = cut_vocabulary(layer, group, tied)
        elif cut.style == "heads":
            own = {"weight": Shard(1, cut.parts, index, count, tuple(layer.weight.shape))}
            layer.weight = part_of(layer.weight, own["weight"])
            layer.embedding_dim = own["weight"].size
        else:
            own = cut_layer(layer, LayerCut(cut.style, cut.parts), group)
        shards |= {f"{name}.{key}": shard for key, shard in own.items()}
    for name in plan.counts:
        module = model.get_submodule(name)
        for attribute in COUNTS_OF_HEADS:
            if isinstance(heads := getattr(module, attribute, None), int):
                setattr(module, attribute, heads // count)
    return shards
