"""What splitting the text encoders of known models over ranks asks of them: heads, layers, widths."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dit_pipelining.costs.collectives import tensor_seconds
from dit_pipelining.costs.devices import Link
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.presets import Preset


@dataclass(frozen=True)
class EncoderShape:
    """A published text encoder.

    Attributes:
        layers: of its language part.
        width: of its hidden states.
        heads: the largest number that divides all its numbers of heads: those of queries, of keys, of a tower for images.
    """

    layers: int
    width: int
    heads: int


SHAPES: Mapping[str, EncoderShape] = {
    "openai/clip-vit-large-patch14": EncoderShape(12, 768, 12),
    "laion/CLIP-ViT-bigG-14": EncoderShape(32, 1280, 20),
    "google/t5-v1_1-xxl": EncoderShape(24, 4096, 64),
    "google/umt5-xxl": EncoderShape(24, 4096, 64),
    "EleutherAI/pile-t5-xl": EncoderShape(24, 2048, 32),
    "mT5-xl (HunyuanDiT text_encoder_2)": EncoderShape(24, 2048, 32),
    "google/byt5-small with Glyph-SDXL-v2 weights": EncoderShape(12, 1472, 6),
    "HunyuanDiT text_encoder": EncoderShape(24, 1024, 16),
    "google/gemma-2-2b(-it)": EncoderShape(26, 2304, 4),
    "THUDM/glm-4-9b-hf": EncoderShape(40, 4096, 2),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": EncoderShape(32, 4096, 8),
    "xtuner/llava-llama-3-8b-v1_1-transformers": EncoderShape(32, 4096, 8),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": EncoderShape(40, 5120, 8),
    "Qwen/Qwen2.5-VL-7B-Instruct": EncoderShape(28, 3584, 4),
    "Qwen/Qwen2.5-VL-7B-Instruct (language model only)": EncoderShape(28, 3584, 4),
    "Qwen3-4B": EncoderShape(36, 2560, 8),
}
"""By the name of the model in a preset; from the models' configurations. Encoders of images are not here: they stay whole."""


def split_encoders(known: Preset, parts: int) -> list[Mapping[str, Any]]:
    """The encoders of a model that `text_encoder_tp_size` splits.

    Raises:
        ConfigError: there are none, or one cannot be split over so many ranks; says which sizes work.
    """
    split = [encoder for encoder in known.text_encoders if encoder["model"] in SHAPES]
    if not split:
        raise ConfigError(f"text_encoder_tp_size={parts}: {known.name} has no text encoder that can be split.")
    for encoder in split:
        heads = SHAPES[encoder["model"]].heads
        if heads % parts:
            sizes = [size for size in range(1, heads + 1) if heads % size == 0]
            raise ConfigError(
                f"text_encoder_tp_size={parts} does not divide the heads of {known.name}'s text encoder {encoder['model']}. "
                f"Sizes that work: {', '.join(map(str, sizes))}."
            )
    return split


def sums_seconds(encoders: list[Mapping[str, Any]], parts: int, tokens: int, itemsize: int, link: Link) -> float:
    """Seconds of the sums over ranks in one call of each encoder, two in each layer.

    Args:
        encoders: those that are split.
        parts: number of ranks.
        tokens: that go in.
        itemsize: bytes of an element of the hidden states.
        link: between the ranks.
    """
    shapes = [SHAPES[encoder["model"]] for encoder in encoders]
    return sum(own.layers * tensor_seconds(tokens * own.width * itemsize, parts, link) for own in shapes)
