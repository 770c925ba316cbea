"""What splitting text encoders over ranks asks of them: heads, layers, widths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import transformers

from dit_pipelining.costs.collectives import tensor_seconds
from dit_pipelining.costs.devices import Link
from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.text_plans import is_text_encoder, text_plan


@dataclass(frozen=True)
class EncoderShape:
    """What splitting a text encoder asks of it.

    Attributes:
        layers: of its language part.
        width: of its hidden states.
        heads: the largest number that divides all its numbers of heads: those of queries, of keys, of a tower for images.
    """

    layers: int
    width: int
    heads: int


@dataclass(frozen=True)
class Encoder:
    """A text or image encoder.

    Attributes:
        name: of the model, or of the component.
        parameters: that are loaded in the dtype that was asked for.
        stored_bytes: of weights that stay as they are stored, quantised.
        shape: None: it stays whole.
    """

    name: str
    parameters: int
    stored_bytes: int = 0
    shape: EncoderShape | None = None


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


def shape_of(model: transformers.PreTrainedModel) -> EncoderShape | None:
    """What splitting an encoder asks of it, with weights or without; None where it cannot be split."""
    if not is_text_encoder(type(model)):
        return None
    try:
        plan = text_plan(model, "text_encoder_tp_size")
    except ConfigError:
        return None
    config = model.config.get_text_config()
    return EncoderShape(config.num_hidden_layers, config.hidden_size, plan.sizes()[-1])


def split_encoders(name: str, encoders: Sequence[Encoder], parts: int) -> list[Encoder]:
    """The encoders of a model that `text_encoder_tp_size` splits.

    Args:
        name: of the model, for messages.
        encoders: all of them.
        parts: number of ranks.

    Raises:
        ConfigError: there are none, or one cannot be split over so many ranks; says which sizes work.
    """
    split = [encoder for encoder in encoders if encoder.shape is not None]
    if not split:
        raise ConfigError(f"text_encoder_tp_size={parts}: {name} has no text encoder that can be split.")
    for encoder in split:
        heads = encoder.shape.heads if encoder.shape is not None else 1
        if heads % parts:
            sizes = [size for size in range(1, heads + 1) if heads % size == 0]
            raise ConfigError(
                f"text_encoder_tp_size={parts} does not divide the heads of {name}'s text encoder {encoder.name}. "
                f"Sizes that work: {', '.join(map(str, sizes))}."
            )
    return split


def sums_seconds(encoders: Sequence[Encoder], parts: int, tokens: int, itemsize: int, link: Link) -> float:
    """Seconds of the sums over ranks in one call of each encoder, two in each layer.

    Args:
        encoders: those that are split.
        parts: number of ranks.
        tokens: that go in.
        itemsize: bytes of an element of the hidden states.
        link: between the ranks.
    """
    shapes = [own.shape for own in encoders if own.shape is not None]
    return sum(own.layers * tensor_seconds(tokens * own.width * itemsize, parts, link) for own in shapes)
