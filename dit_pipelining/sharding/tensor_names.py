"""What attention and feed-forward modules of diffusers call their layers: facts, for classes that bring no `_tp_plan`.

Attention with a processor that is not listed here is refused, since it may use heads in a way that a cut would make wrong;
the tests compare each of these with the uncut model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

QUERIES = ("to_q", "to_query", "to_qkv", "img_attn_qkv", "img_qkv_proj")
KEYS = ("to_k", "to_key")
COLUMN_LAYERS = (
    *QUERIES,
    *KEYS,
    *("to_v", "to_value", "to_kv", "to_gate", "to_gate_logits"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_added_qkv"),
    *("to_q_t", "to_k_t", "to_v_t", "txt_attn_qkv", "txt_kv_proj"),
)
"""Layers that make heads; those that make several things side by side have as many times the width of the heads."""
ROW_LAYERS = ("to_out", "out_layer", "img_attn_proj", "to_add_out", "to_out_t", "txt_attn_proj")
"""Layers that join heads, those of the model's own tokens first."""
NORMS_OF_HEADS = (
    *("norm_q", "norm_added_q", "q_norm", "q_rms_norm", "q_rms_norm_t"),
    *("norm_k", "norm_added_k", "k_norm", "k_rms_norm", "k_rms_norm_t"),
)
"""Norms of queries and keys. They are cut where they span all heads."""

HEADS = ("heads", "num_heads", "num_attention_heads")
COUNTS_OF_HEADS = (
    *HEADS,
    *("kv_heads", "num_kv_heads", "num_key_value_heads", "sliceable_head_dim"),
    *("inner_dim", "inner_kv_dim", "kv_inner_dim"),
)
"""Attributes of attention modules from which processors compute shapes; a rank has its share of each."""
MORE_COUNTS: Mapping[str, tuple[str, ...]] = {"OmniGenAttnProcessor2_0": ("out_dim",)}
"""The same of some processors only."""
HIDDEN_WIDTHS = ("mlp_hidden_dim",)
"""The same of blocks that join heads and hidden width in one projection."""

PROCESSORS = frozenset(
    {
        "AceStepAttnProcessor2_0",
        "AllegroAttnProcessor2_0",
        "AnyFlowAttnProcessor",
        "AnyFlowCrossAttnProcessor",
        "AttnProcessor",
        "AttnProcessor2_0",
        "AudioDiTCrossAttnProcessor",
        "AudioDiTSelfAttnProcessor",
        "AuraFlowAttnProcessor2_0",
        "BriaAttnProcessor",
        "BriaFibo2AttnProcessor",
        "BriaFiboAttnProcessor",
        "CogVideoXAttnProcessor2_0",
        "CogView4AttnProcessor",
        "Cosmos3AttnProcessor",
        "CosmosAttnProcessor2_0",
        "EasyAnimateAttnProcessor2_0",
        "ErnieImageSingleStreamAttnProcessor",
        "Flux3AttnProcessor",
        "FluxAttnProcessor",
        "GlmImageAttnProcessor",
        "HeliosAttnProcessor",
        "HiDreamAttnProcessor",
        "HunyuanAttnProcessor2_0",
        "HunyuanImageAttnProcessor",
        "HunyuanVideo15AttnProcessor2_0",
        "HunyuanVideoAttnProcessor2_0",
        "Ideogram4AttnProcessor",
        "JointAttnProcessor2_0",
        "JoyImageAttnProcessor",
        "JoyImageEditPlusAttnProcessor",
        "Kandinsky5AttnProcessor",
        "Kandinsky6AttnProcessor",
        "Kandinsky6SRAttnProcessor",
        "Krea2AttnProcessor",
        "LTX2AudioVideoAttnProcessor",
        "LTX2PerturbedAttnProcessor",
        "LTXVideoAttnProcessor",
        "LongCatImageAttnProcessor",
        "Lumina2AttnProcessor2_0",
        "MiniMaxH3AttnProcessor",
        "MiniMaxMusic3AttnProcessor",
        "MiniMaxMusic3DepthAttnProcessor",
        "MochiAttnProcessor2_0",
        "MotifVideoAttnProcessor2_0",
        "NucleusMoEAttnProcessor2_0",
        "OmniGenAttnProcessor2_0",
        "OvisImageAttnProcessor",
        "PRXAttnProcessor2_0",
        "SanaAttnProcessor2_0",
        "SanaLinearAttnProcessor2_0",
        "SanaLinearAttnProcessor3_0",
        "SkyReelsV2AttnProcessor",
        "StableAudio3CrossAttnProcessor",
        "StableAudio3SelfAttnProcessor",
        "StableAudioAttnProcessor2_0",
        "WanAttnProcessor",
        "ZSingleStreamAttnProcessor",
    }
)
"""diffusers' attention processors that work on whatever heads an attention module has."""


def _always(reason: str) -> Callable[[nn.Module], str | None]:
    return lambda module: reason


def _leaves_text_unjoined(module: nn.Module) -> str | None:
    if getattr(module, "add_q_proj", None) is None:
        return "in blocks after the first mmdit_layers the heads of the text leave it without an output projection"
    return None


REFUSED: Mapping[str, Callable[[nn.Module], str | None]] = {
    "AnyFlowCausalAttnProcessor": _always("its pipeline makes caches with the keys and values of all heads"),
    "BidirectionalGDNUCPESinglePathLiteLA": _always(
        "a state goes from frame to frame beside convolutions over all heads"
    ),
    "EasyAnimateAttnProcessor2_0": _leaves_text_unjoined,
    "LuminaAttnProcessor2_0": _always("its block mixes two attentions by a gate for each head before heads are joined"),
    "MotifVideoCrossAttnProcessor2_0": _always("it reads the heads of another attention before they are joined"),
    "PriorTransformer": _always("its forward repeats the mask of the text for all heads"),
    "RFD4ProteinaPairAttnProcessor": _always("it takes its heads to be as wide together as the model"),
}
"""Why some kinds of attention, by processor, module or model, cannot be cut; None: this one can."""


@dataclass(frozen=True)
class Rotary:
    """Arguments of an attention that hold rotary tables of all heads.

    Attributes:
        arguments: their names.
        dims: where the heads are, by the table's number of dimensions.
    """

    arguments: tuple[str, ...]
    dims: Mapping[int, int] = field(default_factory=lambda: {3: 2, 4: 1})


ROTARY: Mapping[str, Rotary] = {
    "LTXAttention": Rotary(("image_rotary_emb",)),  # side by side: applied before heads are told apart
    "LTX2Attention": Rotary(("query_rotary_emb", "key_rotary_emb")),
    "MochiAttention": Rotary(("image_rotary_emb",), {3: 1}),  # learned for each head
}

Layers = tuple[tuple[str, ...], str]
"""The layers of a feed-forward that make its hidden width, and the one that takes it."""

_GATED = (("w1", "w3"), "w2")
_GATE_UP_DOWN = (("gate_proj", "up_proj"), "down_proj")
FEED_FORWARD: Mapping[str, Sequence[Layers]] = {
    "AceStepMLP": (_GATE_UP_DOWN,),
    "AudioDiTFeedForward": ((("ff.0",), "ff.3"),),
    "AuraFlowFeedForward": ((("linear_1", "linear_2"), "out_projection"),),
    "Cosmos3VLTextMLP": (_GATE_UP_DOWN, (("up_proj",), "down_proj")),
    "FeedForward": ((("net.0.proj",), "net.2"), _GATED),
    "HiDreamImageFeedForwardSwiGLU": (_GATED,),
    "Ideogram4MLP": (_GATED,),
    "Kandinsky5FeedForward": ((("in_layer",), "out_layer"),),
    "Krea2SwiGLU": ((("gate", "up"), "down"),),
    "LuminaFeedForward": ((("linear_1", "linear_3"), "linear_2"),),
    "MiniMaxMusic3DepthDecoderBlock": (_GATE_UP_DOWN,),
    "MiniMaxMusic3TransformerBlock": ((("ff_in",), "ff_out"),),
    "OmniGenFeedForward": ((("gate_up_proj",), "down_proj"),),
    "PRXBlock": (_GATE_UP_DOWN,),
    "StableAudio3FeedForward": ((("proj_in",), "proj_out"),),
}
"""By class of the module they lie in: the first whose layers are all there. Those of other classes stay whole."""
