"""What is known about text encoders that are split, against the classes of the transformers library."""

from collections.abc import Callable
from typing import Any

import pytest
import transformers as tf
from accelerate import init_empty_weights

from dit_pipelining.costs.devices import find_device
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.beside import beside_preset
from dit_pipelining.planning.components import components_of
from dit_pipelining.planning.degrees import Degrees
from dit_pipelining.planning.presets import preset, preset_names
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.simulation import simulate
from dit_pipelining.planning.text_encoders import SHAPES
from dit_pipelining.planning.timeline import Workload
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


def test_parts_of_encoders_take_their_share_of_memory_and_seconds():
    flux, size = preset("flux.1-dev"), Size(1024, 1024, 1)
    whole = components_of(beside_preset(flux), size, 2, H200, None)
    halves = components_of(beside_preset(flux), size, 2, H200, None, encoder_parts=2)
    assert [halves.encoder_bytes_at(place) for place in range(3)] == [whole.encoder_bytes // 2] * 2 + [0]
    assert whole.encode_seconds / 2 < halves.encode_seconds < whole.encode_seconds
    encoders = [own for own in halves.for_partitioner(50, Degrees(pipeline=2)) if own.name != "vae"]
    assert [(own.rank, own.bytes) for own in encoders] == [(0, whole.encoder_bytes // 2), (1, whole.encoder_bytes // 2)]


def test_an_encoder_of_images_stays_whole_on_the_first_rank():
    known = preset("wan2.1-i2v-14b-480p")
    images = [own["parameters"] for own in known.text_encoders if own["model"] not in SHAPES]
    beside = components_of(beside_preset(known), Size(480, 832, 81), 2, H200, None, encoder_parts=2)
    assert beside.encoder_bytes_at(0) - beside.encoder_bytes_at(1) == 2 * sum(images) > 0


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"heads of flux\.1-dev's text encoder openai/clip.* work: 1, 2, 3, 4, 6, 12"):
        components_of(beside_preset(preset("flux.1-dev")), Size(1024, 1024, 1), 2, H200, None, encoder_parts=8)
    with pytest.raises(ConfigError, match="no text encoder"):
        components_of(beside_preset(preset("dit-xl-2-256")), Size(256, 256, 1), 2, H200, None, encoder_parts=2)


def test_ranks_with_parts_encode_together():
    load = Workload(
        stage_seconds=(1.0,) * 3, transfer_seconds=(0.0,) * 2, encode_seconds=2.0, encode_rank=0, encode_parts=2
    )
    spans = [span for span in simulate(load).spans if span.kind == "encode"]
    assert [(span.rank, span.start, span.end) for span in spans] == [(0, 0.0, 2.0), (1, 0.0, 2.0)]
