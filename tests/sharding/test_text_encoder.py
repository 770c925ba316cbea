"""Text encoders cut over ranks compute what the whole ones do, to the rounding of the sums over ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from peft import LoraConfig, inject_adapter_in_model

from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.text_encoder import check_text_encoder, cut_text_encoder
from tests.distributed import RankPool
from tests.sharding.test_tensor import largest_error

TOLERANCE = 1e-5
"""Of float32 results, relative to the largest value: sums over ranks add up in another order than one product does."""

LLAMA = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=45,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
"""A vocabulary and a width that do not divide."""

T5 = dict(vocab_size=61, d_model=32, d_kv=8, d_ff=45, num_layers=2, num_heads=4)
CLIP = dict(vocab_size=61, hidden_size=32, intermediate_size=45, num_hidden_layers=2, num_attention_heads=4)
QWEN_VISION = dict(depth=2, hidden_size=32, intermediate_size=45, num_heads=4, out_hidden_size=32, patch_size=4)
PIXTRAL = dict(
    hidden_size=32, intermediate_size=45, num_hidden_layers=2, num_attention_heads=4, patch_size=4, image_size=16
)


def qwen2_5_vl() -> Any:
    config = tf.Qwen2_5_VLConfig(
        text_config={**LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config={**QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 8},
        image_token_id=60,
        vision_start_token_id=59,
        vision_end_token_id=58,
    )
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def mistral3() -> Any:
    config = tf.Mistral3Config(
        text_config={**LLAMA, "model_type": "mistral", "head_dim": 8},
        vision_config={**PIXTRAL, "model_type": "pixtral", "head_dim": 8},
        image_token_index=60,
        spatial_merge_size=2,
    )
    return tf.Mistral3ForConditionalGeneration(config)


def gemma3() -> Any:
    config = tf.Gemma3Config(
        text_config={**LLAMA, "head_dim": 8, "sliding_window": 4},
        vision_config=dict(
            hidden_size=32,
            intermediate_size=45,
            num_hidden_layers=2,
            num_attention_heads=4,
            patch_size=4,
            image_size=16,
        ),
        mm_tokens_per_image=4,
        image_token_id=60,
        boi_token_id=59,
        eoi_token_id=58,
    )
    return tf.Gemma3ForConditionalGeneration(config)


def qwen3_vl() -> Any:
    config = tf.Qwen3VLConfig(
        text_config={**LLAMA, "head_dim": 8, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}},
        vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        image_token_id=60,
        vision_start_token_id=59,
        vision_end_token_id=58,
    )
    return tf.Qwen3VLForConditionalGeneration(config)


ENCODERS: dict[str, Callable[[], Any]] = {
    "T5": lambda: tf.T5EncoderModel(tf.T5Config(**T5, feed_forward_proj="gated-gelu")),
    "T5, plain feed-forward": lambda: tf.T5EncoderModel(tf.T5Config(**T5, feed_forward_proj="relu")),
    "UMT5": lambda: tf.UMT5EncoderModel(tf.UMT5Config(**T5, feed_forward_proj="gated-gelu")),
    "CLIP": lambda: tf.CLIPTextModel(tf.CLIPTextConfig(**CLIP)),
    "CLIP with projection": lambda: tf.CLIPTextModelWithProjection(tf.CLIPTextConfig(**CLIP, projection_dim=16)),
    "Bert": lambda: tf.BertModel(tf.BertConfig(**CLIP)),
    "Llama": lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA)),
    "Llama with logits": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)),
    "Llama with tied logits": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "Gemma": lambda: tf.GemmaModel(tf.GemmaConfig(**LLAMA, head_dim=8)),
    "Gemma 2": lambda: tf.Gemma2Model(tf.Gemma2Config(**LLAMA, head_dim=8, sliding_window=4)),
    "Gemma 3": gemma3,
    "Glm": lambda: tf.GlmModel(tf.GlmConfig(**LLAMA, head_dim=8, pad_token_id=0)),
    "Mistral 3": mistral3,
    "Qwen 2.5 VL": qwen2_5_vl,
    "Qwen 3": lambda: tf.Qwen3Model(tf.Qwen3Config(**LLAMA, head_dim=8)),
    "Qwen 3 VL": qwen3_vl,
    "SmolLM 3": lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**LLAMA, pad_token_id=0)),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = ENCODERS[name]().eval()
    for parameter in model.parameters():  # initial norms and biases of ones and zeros would hide a part of another rank
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def outputs(model: Any) -> list[torch.Tensor]:
    ids = torch.randint(0, 58, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    found = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    states = [state[mask.bool()] for state in found.hidden_states]
    return [*states, *(found[key] for key in ("logits", "text_embeds", "pooler_output") if found.get(key) is not None)]


PATCHES = dict(hidden_states=(16, 96), grid_thw=[[1, 4, 4]])
IMAGES = dict(pixel_values=(1, 3, 16, 16))
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen 2.5 VL": ("model.visual", PATCHES),
    "Qwen 3 VL": ("model.visual", PATCHES),
    "Mistral 3": ("model.vision_tower", IMAGES | dict(image_sizes=[[16, 16]])),
    "Gemma 3": ("model.vision_tower", IMAGES),
}
"""Parts of encoders that look at images: their names, and what goes in, shapes of random tensors or values."""


def of_an_image(name: str, model: Any) -> list[torch.Tensor]:
    if name not in TOWERS:
        return []
    tower, inputs = TOWERS[name]
    generator = torch.Generator().manual_seed(2)
    made = {
        key: torch.randn(value, generator=generator) if isinstance(value, tuple) else torch.tensor(value)
        for key, value in inputs.items()
    }
    found = model.get_submodule(tower)(**made)
    return [found.last_hidden_state]


def errors(names: tuple[str, ...]) -> dict[str, float]:
    """By encoder: the largest error of what it makes of tokens and of images."""
    found = {}
    for name in names:
        model = made(name)
        expected = outputs(model) + of_an_image(name, model)
        whole = sum(parameter.numel() for parameter in model.parameters())
        cut_text_encoder(model, check_text_encoder("text_encoder", model, dist.get_world_size()), dist.group.WORLD)
        found[name] = largest_error(outputs(model) + of_an_image(name, model), expected)
        assert sum(own.numel() for own in model.parameters()) < 0.8 * whole
    return found


def test_encoders_on_two_ranks_compute_what_the_whole_ones_do(ranks: RankPool) -> None:
    for found in ranks.run(2, errors, tuple(ENCODERS)):
        assert set(found) == set(ENCODERS)
        assert not {name: error for name, error in found.items() if not error < TOLERANCE}


def looked_up() -> bool:
    model = made("Gemma 3")
    table = model.get_input_embeddings()
    ids = torch.tensor([[0, 30, 31, 60]])  # both ranks' first and last tokens
    expected = table(ids)
    cut_text_encoder(model, check_text_encoder("text_encoder", model, 2), dist.group.WORLD)
    with pytest.raises(IndexError):
        table(torch.tensor([[3, 61]]))
    return torch.equal(table(ids), expected) and table.weight.shape[0] < 61


def test_tokens_are_looked_up_bit_for_bit(ranks: RankPool) -> None:
    assert all(ranks.run(2, looked_up))


def test_what_stands_in_the_way_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"'llm': 4 does not divide the 2 heads of layers\.0\.self_attn\.k_proj.*: 1, 2\."
    ):
        check_text_encoder("llm", made("Llama"), 4)
    with pytest.raises(ConfigError, match="not known how to split a GPT2Model"):
        check_text_encoder("llm", tf.GPT2Model(tf.GPT2Config(n_embd=8, n_layer=1, n_head=2)), 2)
    adapted = made("CLIP")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["fc1"]), adapted)
    with pytest.raises(ConfigError, match=r"mlp\.fc1 of CLIPTextModel is a Linear, .* without adapters"):
        check_text_encoder("llm", adapted, 2)
