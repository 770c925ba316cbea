"""Which layers of a text encoder are cut over ranks, and how: plans as data.

[Note: plans of text encoders]
Attention and feed-forward are cut as those of a diffusion transformer are (see [Note: one cut per sub-layer]). Decoders of
the transformers library (Llama, Qwen, Gemma, Mistral, ...) bring a plan in their configuration, `base_model_tp_plan`, which
is taken. For encoders that have none (T5, CLIP, Bert, the towers that look at images) the layers are listed here by the class
of the module that they are in. The table of tokens, a third of UMT5's weights, is cut by the vocabulary, and so is the layer
that makes logits. Everything else (norms, positions, projections behind the layers) is small and whole on every rank.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import transformers
from torch import nn

from dit_pipelining.errors import ConfigError

Style = Literal["column", "row", "heads", "tokens"]
"""`column` and `row` as in `LayerCut`; `heads`: an embedding with a column for each head; `tokens`: by the vocabulary."""

_SEPARATE: Mapping[str, Style] = {"q_proj": "column", "k_proj": "column", "v_proj": "column"}
_T5_ATTENTION: Mapping[str, Style] = {
    "q": "column",
    "k": "column",
    "v": "column",
    "o": "row",
    "relative_attention_bias": "heads",
}
_JOINED: Mapping[str, Style] = {"qkv": "column", "proj": "row"}
_GATED: Mapping[str, Style] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
_T5_GATED: Mapping[str, Style] = {"wi_0": "column", "wi_1": "column", "wo": "row"}
_T5_PLAIN: Mapping[str, Style] = {"wi": "column", "wo": "row"}
_PLAIN: Mapping[str, Style] = {"fc1": "column", "fc2": "row"}
_VISION_PLAIN: Mapping[str, Style] = {"linear_fc1": "column", "linear_fc2": "row"}

LAYERS: Mapping[str, Mapping[str, Style]] = {
    "T5Attention": _T5_ATTENTION,
    "T5DenseGatedActDense": _T5_GATED,
    "T5DenseActDense": _T5_PLAIN,
    "UMT5Attention": _T5_ATTENTION,
    "UMT5DenseGatedActDense": _T5_GATED,
    "UMT5DenseActDense": _T5_PLAIN,
    "CLIPAttention": {**_SEPARATE, "out_proj": "row"},
    "CLIPMLP": _PLAIN,
    "SiglipAttention": {**_SEPARATE, "out_proj": "row"},
    "SiglipMLP": _PLAIN,
    "PixtralAttention": {**_SEPARATE, "o_proj": "row"},
    "PixtralMLP": _GATED,
    "Qwen2_5_VLVisionAttention": _JOINED,
    "Qwen2_5_VLMLP": _GATED,
    "Qwen3VLTextAttention": {**_SEPARATE, "o_proj": "row"},
    "Qwen3VLTextMLP": _GATED,
    "Qwen3VLVisionAttention": _JOINED,
    "Qwen3VLVisionMLP": _VISION_PLAIN,
    "BertSelfAttention": {"query": "column", "key": "column", "value": "column"},
    "BertSelfOutput": {"dense": "row"},
    "BertIntermediate": {"dense": "column"},
    "BertOutput": {"dense": "row"},
    "GlmMLP": {"gate_up_proj": "column", "down_proj": "row"},
}
"""By the class of a module, those of its layers that are cut."""

STRETCHES: Mapping[str, int] = {"qkv": 3, "gate_up_proj": 2}
"""How many things of the same size such a layer makes side by side."""

STYLES: Mapping[str, Style | None] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "tokens",
    "replicated_with_grad_allreduce": None,
}
"""Words of the transformers library's plans; None: stays whole."""

HEAD_WIDTHS = ("head_dim", "key_value_proj_dim", "attention_head_size")
"""Attributes of attention modules that say how wide a head is."""

COUNTS_OF_HEADS = ("n_heads", "num_heads", "num_key_value_heads", "num_attention_heads", "inner_dim", "all_head_size")
"""Attributes of attention modules from which forwards compute shapes; a rank has its share of each."""

OLDEST = 5
"""The first major version of the transformers library whose attention takes its number of heads from the tensors."""


@dataclass(frozen=True)
class TextCut:
    """How one layer is cut; `parts` as in `LayerCut`."""

    style: Style
    parts: tuple[int, ...]


@dataclass(frozen=True)
class TextPlan:
    """How a text encoder is cut.

    Attributes:
        layers: by name of the layer.
        counts: names of attention modules, whose attributes in `COUNTS_OF_HEADS` are divided.
        heads: by name of a layer, the number of heads that it makes.
        elements: of all weights.
    """

    layers: Mapping[str, TextCut]
    counts: tuple[str, ...]
    heads: Mapping[str, int]
    elements: int

    def sizes(self) -> list[int]:
        """The numbers of ranks over which the encoder can be cut."""
        common = math.gcd(*self.heads.values())
        return [size for size in range(1, common + 1) if common % size == 0]


def is_text_encoder(cls: type) -> bool:
    """Whether a component of this class may be a text encoder: a model of the transformers library that takes tokens."""
    return issubclass(cls, transformers.PreTrainedModel) and getattr(cls, "main_input_name", "") == "input_ids"


def text_plan(model: transformers.PreTrainedModel, what: str) -> TextPlan:
    """The plan of a text encoder, with weights or without.

    Args:
        model: the encoder.
        what: names it and what was asked for, for messages.

    Raises:
        ConfigError: it has none, or is quantised; says which layer is in the way.
    """
    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise ConfigError(
            f"{what}: needs transformers {OLDEST} or newer, whose attention works on a part of its heads; "
            f"{transformers.__version__} is installed."
        )
    styles = dict(_styles(model, what))
    cut = {name: TextCut(style, _parts(name, model.get_submodule(name), style)) for name, style in styles.items()}
    heads, counts = {}, []
    for name, own in cut.items():
        owner_name = name.rpartition(".")[0]
        owner = model.get_submodule(owner_name)
        width = next((getattr(owner, key) for key in HEAD_WIDTHS if hasattr(owner, key)), None)
        if own.style == "heads":
            heads[name] = own.parts[0]
        elif own.style == "column" and width is not None:
            heads[name] = own.parts[0] // width
            counts.append(owner_name)
    if not heads:
        raise ConfigError(
            f"{what}: it is not known how to split a {type(model).__name__} over ranks. Leave it at 1 for this component."
        )
    for name in cut:
        layer = model.get_submodule(name)
        if not (isinstance(layer, nn.Embedding) or type(layer) is nn.Linear):
            raise ConfigError(
                f"{what}: {name} of {type(model).__name__} is a {type(layer).__name__}, and only plain layers can be cut. Load "
                "it unquantised and without adapters, or leave it at 1 for this component."
            )
    elements = sum(parameter.numel() for parameter in model.parameters())
    return TextPlan(cut, tuple(dict.fromkeys(counts)), heads, elements)


def _styles(model: transformers.PreTrainedModel, what: str) -> Iterator[tuple[str, Style]]:
    """Layers that are cut; of one that comes twice the last counts."""
    modules = dict(model.named_modules())
    inner = {name: own for name, own in modules.items() if isinstance(own, transformers.PreTrainedModel)}
    for prefix, own in inner.items():
        for pattern, word in (getattr(own.config, "base_model_tp_plan", None) or {}).items():
            for name in _matching(own, pattern):
                owner = modules[_joined(prefix, name.rpartition(".")[0])]
                if type(owner).__name__ in LAYERS:
                    continue
                if word not in STYLES:
                    raise ConfigError(
                        f"{what}: the plan in the configuration of {type(own).__name__} has {word!r} for {pattern!r}, which is "
                        "not known here. Leave it at 1 for this component."
                    )
                if (style := STYLES[word]) is not None:
                    yield _joined(prefix, name), style
    for name, module in modules.items():
        for layer, style in LAYERS.get(type(module).__name__, {}).items():
            if isinstance(getattr(module, layer, None), nn.Module):
                yield f"{name}.{layer}", style
    names = {id(module): name for name, module in modules.items()}
    for own in inner.values():
        for get in (own.get_input_embeddings, own.get_output_embeddings):
            with suppress(NotImplementedError):  # it has neither: a part of an encoder
                if isinstance(layer := get(), nn.Embedding | nn.Linear) and id(layer) in names:
                    yield names[id(layer)], "tokens"


def _matching(module: nn.Module, pattern: str) -> Iterator[str]:
    """Names of the submodules that a pattern means, with `*` for any member of a list; none if it is of another module."""
    found = [("", module)]
    for step in pattern.split("."):
        found = [
            (_joined(name, key), child)
            for name, own in found
            for key, child in own.named_children()
            if step in ("*", key)
        ]
    yield from (name for name, _ in found)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}".strip(".")


def _parts(name: str, layer: Any, style: Style) -> tuple[int, ...]:
    if style == "tokens":
        return (layer.weight.shape[0],)
    if style in ("heads", "row"):
        return (layer.weight.shape[1],)
    stretches = STRETCHES.get(name.rpartition(".")[2], 1)
    return (layer.weight.shape[0] // stretches,) * stretches
