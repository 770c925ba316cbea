"""What is known about text encoders that are split, against the classes of the transformers library."""

from collections.abc import Callable
from typing import Any

import pytest
import transformers as tf
from accelerate import init_empty_weights

from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.devices import find_device
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.beside import beside_preset
from dit_pipelining.planning.components import components_of
from dit_pipelining.planning.presets import preset, preset_names
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.text_encoders import SHAPES
from dit_pipelining.sharding.text_plans import text_plan

GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
LLAMA_8B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
QWEN_7B = dict(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4
)
QWEN_VISION = dict(
    depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584, fullatt_block_indexes=[7]
)
T5_XXL = dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, **GATED)

PUBLISHED: dict[str, Callable[[], Any]] = {
    "openai/clip-vit-large-patch14": lambda: tf.CLIPTextModel(
        tf.CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    ),
    "laion/CLIP-ViT-bigG-14": lambda: tf.CLIPTextModelWithProjection(
        tf.CLIPTextConfig(
            hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280
        )
    ),
    "google/t5-v1_1-xxl": lambda: tf.T5EncoderModel(tf.T5Config(vocab_size=32128, **T5_XXL)),
    "google/umt5-xxl": lambda: tf.UMT5EncoderModel(tf.UMT5Config(vocab_size=256384, **T5_XXL)),
    "EleutherAI/pile-t5-xl": lambda: tf.UMT5EncoderModel(
        tf.UMT5Config(vocab_size=32128, d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_heads=32, **GATED)
    ),
    "mT5-xl (HunyuanDiT text_encoder_2)": lambda: tf.T5EncoderModel(
        tf.T5Config(vocab_size=250112, d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_heads=32, **GATED)
    ),
    "google/gemma-2-2b(-it)": lambda: tf.Gemma2Model(tf.Gemma2Config()),
    "THUDM/glm-4-9b-hf": lambda: tf.GlmModel(tf.GlmConfig()),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=128256, **LLAMA_8B)),
    "Qwen/Qwen2.5-VL-7B-Instruct": lambda: tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(text_config={"vocab_size": 152064, **QWEN_7B}, vision_config=QWEN_VISION)
    ),
    "Qwen3-4B": lambda: tf.Qwen3Model(
        tf.Qwen3Config(
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        )
    ),
}
"""Encoders whose configuration is short."""

H200 = find_device("h200")


def known(model: str) -> set[int]:
    """The numbers of parameters that presets state for a model."""
    every = [encoder for name in preset_names() for encoder in preset(name).text_encoders]
    return {encoder["parameters"] for encoder in every if encoder["model"] == model}


def test_every_text_encoder_of_a_preset_is_known():
    every = [encoder for name in preset_names() for encoder in preset(name).text_encoders]
    assert {own["model"] for own in every if "Vision" not in own["class"]} == set(SHAPES)


@pytest.mark.parametrize("model", list(PUBLISHED))
def test_facts_are_those_of_the_class_and_parts_are_even(model):
    with init_empty_weights(include_buffers=False):
        encoder = PUBLISHED[model]()
    encoder.tie_weights()
    sizes = {name: own.numel() for name, own in encoder.named_parameters()}
    assert sum(sizes.values()) in known(model)
    plan, shape = text_plan(encoder, model), SHAPES[model]
    assert plan.sizes()[-1] == shape.heads
    assert plan.elements == sum(sizes.values())
    config = encoder.config.get_text_config()
    assert (config.num_hidden_layers, config.hidden_size) == (shape.layers, shape.width)
    split = sum(size for name, size in sizes.items() if name.rpartition(".")[0] in plan.layers)
    for parts in {2, shape.heads} - {1}:
        share = split / parts + sum(sizes.values()) - split
        assert share <= (1.05 if parts <= 8 else 1.2) * sum(sizes.values()) / parts


def placed(name: str, parts: int, **sizes: int):
    config = ParallelConfig(text_encoder_tp_size=parts, **sizes)
    return components_of(beside_preset(preset(name)), Size(480, 832, 81), 2, H200).placed(config)


def test_parts_of_encoders_take_their_share_of_memory_and_seconds():
    whole, halves = (placed("flux.1-dev", parts, pipeline_parallel_size=3) for parts in (1, 2))
    held = whole.held[0].encoders
    assert [own.encoders for own in halves.held] == [held // 2, held // 2, 0]
    for one, half in zip(whole.encodes, halves.encodes, strict=True):
        assert (one.ranks, half.ranks) == ((0,), (0, 1))
    seconds = sum(call.seconds for call in whole.encodes)
    assert seconds / 2 < sum(call.seconds for call in halves.encodes) < seconds


def test_parts_fill_the_ranks_of_a_stage_first():
    """Three ranks have a part: both of the first stage, and one of the second."""
    held = placed("hunyuandit-1.2", 4, pipeline_parallel_size=3, ulysses_degree=2).held
    assert [own.encoders > 0 for own in held] == [True, True, False]


def test_an_encoder_of_images_stays_whole():
    known = preset("wan2.1-i2v-14b-480p")
    images = [own["parameters"] for own in known.text_encoders if own["model"] not in SHAPES]
    first, second = placed("wan2.1-i2v-14b-480p", 2, pipeline_parallel_size=2).held
    assert abs(first.encoders - second.encoders) == 2 * sum(images) > 0


def test_sizes_that_do_not_divide_are_refused_as_a_run_refuses_them():
    with pytest.raises(
        ConfigError, match=r"'text_encoder': 8 does not divide the 12 heads of .*/clip.* 1, 2, 3, 4, 6, 12"
    ):
        placed("flux.1-dev", 8, pipeline_parallel_size=8)
    with pytest.raises(ConfigError, match="the text encoders of this pipeline that are not on every rank are none"):
        placed("dit-xl-2-256", 2, pipeline_parallel_size=2)
