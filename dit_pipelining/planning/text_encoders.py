"""What splitting text encoders over ranks asks of them: heads, layers, widths."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import transformers

from dit_pipelining.costs.collectives import tensor_seconds
from dit_pipelining.costs.devices import Link
from dit_pipelining.sharding.text_encoder import check_heads, check_text_encoder
from dit_pipelining.sharding.text_plans import TextPlan


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
        name: of the component.
        parameters: that are loaded in the dtype that was asked for.
        stored_bytes: of weights that stay as they are stored, quantised.
        known_as: the name of the model in `SHAPES`, where the encoder is a preset's.
        build: makes it without weights, where its configuration is there.
    """

    name: str
    parameters: int
    stored_bytes: int = 0
    known_as: str = ""
    build: Callable[[], transformers.PreTrainedModel] | None = None

    def plan(self, parts: int) -> TextPlan:
        """How it is cut over so many ranks.

        Raises:
            ConfigError: it cannot be, as a run says.
        """
        if self.build is not None:
            return check_text_encoder(self.name, self.build(), parts)
        plan = TextPlan({}, (), {"its attention": SHAPES[self.known_as].heads}, self.parameters)
        check_heads(self.name, plan, self.known_as, parts)
        return plan

    def sums_seconds(self, parts: int, tokens: int, itemsize: int, link: Link) -> float:
        """Seconds of the sums over ranks in one call, two in each layer.

        Args:
            parts: number of ranks.
            tokens: that go in.
            itemsize: bytes of an element of the hidden states.
            link: between the ranks.
        """
        if self.build is not None:
            config = self.build().config.get_text_config()
            layers, width = config.num_hidden_layers, config.hidden_size
        else:
            shape = SHAPES[self.known_as]
            layers, width = shape.layers, shape.width
        return layers * tensor_seconds(tokens * width * itemsize, parts, link)


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
