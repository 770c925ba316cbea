"""Tiny text and image encoders, and the tokenizers for them."""

from typing import Any

import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

SPECIAL = ["<pad>", "</s>", "<unk>", "<s>", "<|im_start|>", "<|im_end|>"]
WORDS = [
    *SPECIAL,
    "user",
    "assistant",
    "system",
    "a",
    "red",
    "blue",
    "green",
    "cat",
    "dog",
    "circle",
    "square",
    "moves",
]
WORDS += ["left", "right", "on", "the", "moon"]
VOCABULARY = 64

CHAT = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '<unk>' }} {% endfor %}"
    "{% endif %} <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def tokenizer(length: int = 77, **options: Any) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        model_max_length=length,
        **options,
    )
    made.chat_template = CHAT
    return made


class TextProcessor:
    """Stands in for a processor of text and pictures where only text comes; those of pictures need torchvision."""

    def __init__(self, tokens: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokens
        self.image_processor = transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2)

    def __call__(self, text: Any = None, images: None = None, **options: Any) -> Any:
        return self.tokenizer(text, **options)

    def apply_chat_template(self, messages: Any, tokenize: bool = False, **options: Any) -> Any:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        return [self.tokenizer.encode(text)] if tokenize else text


def text_processor() -> TextProcessor:
    """A processor for text alone, that knows the words for pictures."""
    tokens = tokenizer()
    tokens.add_tokens(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"], special_tokens=True)
    return TextProcessor(tokens)


def t5(width: int = 32) -> T5EncoderModel:
    """T5's encoder."""
    return T5EncoderModel(T5Config(vocab_size=VOCABULARY, d_model=width, d_kv=8, d_ff=37, num_layers=2, num_heads=4))


def umt5(width: int = 32) -> UMT5EncoderModel:
    """UMT5's encoder."""
    return UMT5EncoderModel(
        UMT5Config(vocab_size=VOCABULARY, d_model=width, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    )


def _clip_config(width: int, projection: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=projection,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
    )


def clip(width: int = 32) -> CLIPTextModel:
    """CLIP's text encoder."""
    return CLIPTextModel(_clip_config(width, width))


def clip_projected(width: int = 32, projection: int = 32) -> CLIPTextModelWithProjection:
    """CLIP's text encoder with its projection."""
    return CLIPTextModelWithProjection(_clip_config(width, projection))


def _clip_vision_config(width: int, projection: int) -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=width,
        projection_dim=projection,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
    )


def clip_vision(width: int = 32) -> CLIPVisionModel:
    """CLIP's image encoder: 5 tokens for an image."""
    return CLIPVisionModel(_clip_vision_config(width, width))


def clip_vision_projected(width: int = 32, projection: int = 32) -> CLIPVisionModelWithProjection:
    """CLIP's image encoder with its projection."""
    return CLIPVisionModelWithProjection(_clip_vision_config(width, projection))


def image_processor(size: int = 32) -> CLIPImageProcessor:
    """Scales pictures to what `clip_vision` takes."""
    return CLIPImageProcessor(crop_size=size, size={"shortest_edge": size})


def decoder_only(kind: str, width: int = 32, layers: int = 2, head: str = "Model", **options: Any) -> Any:
    """A language model of `transformers` with two heads: kind "Llama", "Qwen2", "Qwen3", "Gemma2", "Glm", ..."""
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": 37,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": width // 2,
            "pad_token_id": 0,
            "bos_token_id": 3,
            "eos_token_id": 1,
            "max_position_embeddings": 2048,
            **options,
        }
    )
    return getattr(transformers, f"{kind}{head}")(config)


def qwen25_vl(width: int = 32) -> Any:
    """Qwen2.5-VL, language and vision."""
    config = transformers.Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            rope_scaling={"mrope_section": [2, 2, 4], "rope_type": "default", "type": "default"},
            rope_theta=1000000.0,
            max_position_embeddings=2048,
            bos_token_id=3,
            eos_token_id=1,
        ),
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=37,
            num_heads=2,
            out_hidden_size=width,
            patch_size=4,
            spatial_merge_size=2,
            fullatt_block_indexes=[1],
        ),
        vision_start_token_id=4,
        vision_end_token_id=5,
        image_token_id=2,
        video_token_id=60,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def gemma3(width: int = 32, layers: int = 2) -> Any:
    """Gemma 3, language and vision."""
    config = transformers.Gemma3Config(
        text_config=dict(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=37,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            pad_token_id=0,
            bos_token_id=3,
            eos_token_id=1,
        ),
        vision_config=dict(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        ),
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def connectors() -> LTX2TextConnectors:
    """What LTX-2 puts between its text encoder and its transformer."""
    return LTX2TextConnectors(
        caption_channels=32,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        rope_double_precision=False,
    )
