"""Where the tokens of each model family are split and joined: facts, for classes of diffusers that bring no plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.sp_plan import (
    ModulePlan,
    SequenceParallelInput,
    SequenceParallelOutput,
    Undivided,
    read_plan,
)

TEXT = "encoder_hidden_states"

_TOKENS = SequenceParallelInput(split_dim=1, expected_dims=3)
_MADE_TOKENS = SequenceParallelInput(split_dim=1, expected_dims=3, split_output=True)
_TABLE = SequenceParallelInput(split_dim=0, expected_dims=2)
_MADE_TABLE = SequenceParallelInput(split_dim=0, expected_dims=2, split_output=True)
_MASK = SequenceParallelInput(split_dim=1, expected_dims=2)
_JOIN = SequenceParallelOutput(gather_dim=1, expected_dims=3)


@dataclass(frozen=True)
class Family:
    """A class of diffusers.

    Attributes:
        plan: as in `sp_plan`.
        inside: names of the lists of blocks that run on split tokens. Default: all.
        splits_text: whether keys of the text are split; None: where the plan splits `encoder_hidden_states`.
        latents: the input that the output has as many tokens as, or `"<module> output <index>"` where it is split there.
        refuse: says why a model of the class cannot be split by tokens, if it cannot.
    """

    plan: Mapping[str, Any]
    inside: tuple[str, ...] = ()
    splits_text: bool | None = None
    latents: str = "hidden_states"
    refuse: Callable[[nn.Module], str | None] = field(default=lambda model: None)


def _replaces_first_frame(model: Any) -> str | None:
    if model.config.image_condition_type == "token_replace":
        return 'with image_condition_type="token_replace" its blocks treat the tokens of the first frame apart'
    return None


_HUNYUAN_VIDEO = Family(
    {
        # The mask of a part of the text is what the forward needs: it counts the tokens that are no padding and takes them
        # to come first, in a part as in the whole. The text refiner works on the whole text.
        "": {"encoder_attention_mask": _MASK},
        "context_embedder": {"attention_mask": Undivided("encoder_attention_mask"), 0: _MADE_TOKENS},
        "x_embedder": {0: _MADE_TOKENS},
        "rope": {0: _MADE_TABLE, 1: _MADE_TABLE},
        "proj_out": _JOIN,
    },
    inside=("transformer_blocks", "single_transformer_blocks"),
    splits_text=True,
    latents="x_embedder output 0",
    refuse=_replaces_first_frame,
)

_MADE_TABLE_OF_BATCH = SequenceParallelInput(split_dim=1, expected_dims=3, split_output=True)


def _orders_heads_first(model: Any) -> str | None:
    if model.config.rope_type == "split":
        return 'with rope_type="split" its rotary tables have the heads before the tokens'
    return None


_LTX2 = Family(
    {
        # The tokens of the sound stay whole on every rank. diffusers' own plan leaves out the timestep of each token, and the
        # rotary table between sound and video.
        "": {"hidden_states": _TOKENS, TEXT: _TOKENS, "encoder_attention_mask": _MASK, "timestep": _MASK},
        "rope": {0: _MADE_TABLE_OF_BATCH, 1: _MADE_TABLE_OF_BATCH},
        "cross_attn_rope": {0: _MADE_TABLE_OF_BATCH, 1: _MADE_TABLE_OF_BATCH},
        "proj_out": _JOIN,
    },
    refuse=_orders_heads_first,
)

FAMILIES: Mapping[str, Family] = {
    "SD3Transformer2DModel": Family(
        {
            "": {"block_controlnet_hidden_states": _TOKENS},
            "transformer_blocks.0": {"hidden_states": _TOKENS, TEXT: _TOKENS},
            "proj_out": _JOIN,
        }
    ),
    "CogVideoXTransformer3DModel": Family(
        {
            "": {"image_rotary_emb": (_TABLE, _TABLE)},
            "transformer_blocks.0": {"hidden_states": _TOKENS, TEXT: _TOKENS},
            "proj_out": _JOIN,
        }
    ),
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "LTX2VideoTransformer3DModel": _LTX2,
}

CONTROLNETS: Mapping[str, Mapping[str, Any]] = {
    "FluxTransformer2DModel": {
        "": {"controlnet_block_samples": _TOKENS, "controlnet_single_block_samples": _TOKENS},
    },
    "QwenImageTransformer2DModel": {"": {"controlnet_block_samples": _TOKENS}},
}
"""What diffusers' own plans lack: residuals that a ControlNet adds to the tokens."""


@dataclass(frozen=True)
class SequencePlan:
    """How one model is split by tokens.

    Attributes:
        modules: what happens at each module, by its name.
        inside: names of the lists of blocks that run on split tokens; empty: all.
        splits_text: whether keys of the text are split like the others. If not, every rank attends to the whole text.
        latents: what the output has as many tokens as, by the name of the input or output that is split.
        uneven: the plan allows any number of tokens.
    """

    modules: Mapping[str, ModulePlan]
    inside: tuple[str, ...]
    splits_text: bool
    latents: str
    uneven: bool


def sequence_plan(model: nn.Module) -> SequencePlan:
    """The plan for a model: its `_sp_plan`, else one of FAMILIES, else its `_cp_plan`.

    Raises:
        ConfigError: there is none, or the model cannot be split by tokens; says why.
    """
    name = type(model).__name__
    own = getattr(model, "_sp_plan", None)
    family = FAMILIES.get(name) if own is None else Family(own)
    if family is None and getattr(model, "_cp_plan", None) is not None:
        family = Family(model._cp_plan)  # type: ignore[arg-type]
    if family is None:
        raise ConfigError(
            f"{name} has no plan for splitting its tokens: no `_sp_plan` and no `_cp_plan`, and none is known for it "
            f"({', '.join(FAMILIES)}). Use pipeline_parallel_size or tensor_parallel_size, or give the class a `_sp_plan`."
        )
    if (reason := family.refuse(model)) is not None:
        raise ConfigError(f"the tokens of this {name} cannot be split over ranks: {reason}.")
    modules = read_plan(model, family.plan)
    for path, added in read_plan(model, CONTROLNETS.get(name, {}) if own is None else {}).items():
        modules[path] = modules.get(path, ModulePlan()) | added
    splits_text = family.splits_text
    if splits_text is None:
        splits_text = any(TEXT in entry.inputs for entry in modules.values())
    uneven = any(split.auto_pad for entry in modules.values() for split in entry.splits)
    return SequencePlan(modules, family.inside, splits_text, family.latents, uneven)
