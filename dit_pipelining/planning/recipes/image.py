"""What image pipelines pass to their transformers."""

import math

from dit_pipelining.planning.inputs import Description, tensor
from dit_pipelining.planning.recipes.call import Call, Config, Family, Patch

Inputs = dict[str, Description]


def _latents(call: Call) -> Description:
    return tensor(call.batch, call.config["in_channels"], call.height, call.width)


def _packed(call: Call) -> Description:
    return tensor(call.batch, call.tokens, call.config["in_channels"])


def _text(call: Call, width: str) -> Description:
    return tensor(call.batch, call.text_tokens, call.config[width])


def _mask(call: Call, tokens: int) -> Description:
    return tensor(call.batch, tokens, dtype="int64", fill=1)


def _flux(call: Call) -> Inputs:
    inputs = dict(
        hidden_states=_packed(call),
        timestep=tensor(call.batch),
        pooled_projections=tensor(call.batch, call.config["pooled_projection_dim"]),
        encoder_hidden_states=_text(call, "joint_attention_dim"),
        txt_ids=tensor(call.text_tokens, 3),
        img_ids=tensor(call.tokens, 3),
    )
    return inputs | _guidance(call)


def _guidance(call: Call) -> Inputs:
    return dict(guidance=tensor(call.batch, dtype="float32")) if call.config.get("guidance_embeds") else {}


def _flux2(call: Call) -> Inputs:
    inputs = dict(
        hidden_states=_packed(call),
        timestep=tensor(call.batch),
        encoder_hidden_states=_text(call, "joint_attention_dim"),
        txt_ids=tensor(call.batch, call.text_tokens, 4, dtype="int64"),
        img_ids=tensor(call.batch, call.tokens, 4, dtype="int64"),
    )
    return inputs | _guidance(call)


def _chroma(call: Call) -> Inputs:
    return dict(
        hidden_states=_packed(call),
        timestep=tensor(call.batch),
        encoder_hidden_states=_text(call, "joint_attention_dim"),
        txt_ids=tensor(call.text_tokens, 3),
        img_ids=tensor(call.tokens, 3),
        attention_mask=tensor(call.batch, call.text_tokens + call.tokens, fill=1),
    )


def _sd3(call: Call) -> Inputs:
    return dict(
        hidden_states=_latents(call),
        timestep=tensor(call.batch, dtype="float32"),
        encoder_hidden_states=_text(call, "joint_attention_dim"),
        pooled_projections=tensor(call.batch, call.config["pooled_projection_dim"]),
    )


def _qwen_image(call: Call) -> Inputs:
    shapes: list[Description] = [{"list": [{"value": list(call.grid)}]}] * call.batch
    inputs = dict(
        hidden_states=_packed(call),
        timestep=tensor(call.batch),
        encoder_hidden_states=_text(call, "joint_attention_dim"),
        img_shapes={"list": shapes},
    )
    if call.config.get("use_additional_t_cond"):
        inputs["additional_t_cond"] = tensor(call.batch, dtype="int64")
    return inputs | _guidance(call)


def _pixart(call: Call) -> Inputs:
    additional = call.config.get("use_additional_conditions")
    if additional is None:  # the class's own rule
        additional = call.config["sample_size"] == 128
    conditions: Description = {"value": {"resolution": None, "aspect_ratio": None}}
    if additional:
        conditions = {"dict": dict(resolution=tensor(call.batch, 2), aspect_ratio=tensor(call.batch, 1))}
    return dict(
        hidden_states=_latents(call),
        # Without a caption projection the text goes straight into the cross-attention.
        encoder_hidden_states=_text(
            call, "caption_channels" if call.config["caption_channels"] else "cross_attention_dim"
        ),
        encoder_attention_mask=_mask(call, call.text_tokens),
        timestep=tensor(call.batch, dtype="int64"),
        added_cond_kwargs=conditions,
    )


def _sana(call: Call) -> Inputs:
    inputs = dict(
        hidden_states=_latents(call),
        encoder_hidden_states=_text(call, "caption_channels"),
        encoder_attention_mask=_mask(call, call.text_tokens),
        timestep=tensor(call.batch, dtype="float32"),
    )
    return inputs | _guidance(call)


def _z_image(call: Call) -> Inputs:
    latents = tensor(call.config["in_channels"], call.frames, call.height, call.width)
    caption = tensor(call.text_tokens, call.config["cap_feat_dim"])
    return dict(
        x={"list": [latents] * call.batch},
        t=tensor(call.batch, dtype="float32"),
        cap_feats={"list": [caption] * call.batch},
    )


def _auraflow(call: Call) -> Inputs:
    return dict(
        hidden_states=_latents(call),
        encoder_hidden_states=_text(call, "joint_attention_dim"),
        timestep=tensor(call.batch),
    )


def _lumina2(call: Call) -> Inputs:
    return dict(
        hidden_states=_latents(call),
        timestep=tensor(call.batch, dtype="float32"),
        encoder_hidden_states=_text(call, "cap_feat_dim"),
        encoder_attention_mask=_mask(call, call.text_tokens),
    )


def _hidream(call: Call) -> Inputs:
    # The sequence holds the T5 tokens and twice the Llama tokens (the last layer, and one layer per block).
    tokens = call.text_tokens // 3
    t5_width, llama_width = call.config["caption_channels"]
    layers = max(call.config["llama_layers"]) + 1
    return dict(
        hidden_states=_latents(call),
        timesteps=tensor(call.batch, dtype="int64"),
        encoder_hidden_states_t5=tensor(call.batch, tokens, t5_width),
        encoder_hidden_states_llama3=tensor(layers, call.batch, tokens, llama_width),
        pooled_embeds=tensor(call.batch, call.config["text_emb_dim"]),
    )


def _hunyuan_dit(call: Call) -> Inputs:
    config = call.config
    rotary = tensor(call.tokens, config["attention_head_dim"], dtype="float32")
    return dict(
        hidden_states=_latents(call),
        timestep=tensor(call.batch),
        encoder_hidden_states=tensor(call.batch, config["text_len"], config["cross_attention_dim"]),
        text_embedding_mask=_mask(call, config["text_len"]),
        encoder_hidden_states_t5=tensor(call.batch, config["text_len_t5"], config["cross_attention_dim_t5"]),
        text_embedding_mask_t5=_mask(call, config["text_len_t5"]),
        image_meta_size=tensor(call.batch, 6),
        style=tensor(call.batch, dtype="int64"),
        image_rotary_emb={"tuple": [rotary, rotary]},
    )


def _cogview4(call: Call) -> Inputs:
    return dict(
        hidden_states=_latents(call),
        encoder_hidden_states=_text(call, "text_embed_dim"),
        timestep=tensor(call.batch, dtype="float32"),
        original_size=tensor(call.batch, 2),
        target_size=tensor(call.batch, 2),
        crop_coords=tensor(call.batch, 2),
    )


def _dit(call: Call) -> Inputs:
    return dict(
        hidden_states=_latents(call),
        timestep=tensor(call.batch, dtype="int64"),
        class_labels=tensor(call.batch, dtype="int64"),
    )


def _packed_by_the_pipeline(config: Config) -> Patch:
    return 1, 2, 2


def _z_image_patch(config: Config) -> Patch:
    size = config["all_patch_size"][0]
    return config["all_f_patch_size"][0], size, size


def _square_table(config: Config) -> int:
    return math.isqrt(config["pos_embed_max_size"])


_SQUARE = ("sample_size", "sample_size")

IMAGE_FAMILIES = {
    "FluxTransformer2DModel": Family(_flux, patch=_packed_by_the_pipeline),
    "Flux2Transformer2DModel": Family(_flux2, patch=_packed_by_the_pipeline),
    "ChromaTransformer2DModel": Family(_chroma, patch=_packed_by_the_pipeline),
    "SD3Transformer2DModel": Family(_sd3, sample=_SQUARE, limit=lambda config: config["pos_embed_max_size"]),
    "QwenImageTransformer2DModel": Family(_qwen_image, patch=_packed_by_the_pipeline),
    "PixArtTransformer2DModel": Family(_pixart, sample=_SQUARE),
    "SanaTransformer2DModel": Family(_sana, sample=_SQUARE),
    "ZImageTransformer2DModel": Family(_z_image, patch=_z_image_patch),
    "AuraFlowTransformer2DModel": Family(_auraflow, limit=_square_table),
    "Lumina2Transformer2DModel": Family(_lumina2, sample=_SQUARE),
    "HiDreamImageTransformer2DModel": Family(_hidream),
    "HunyuanDiT2DModel": Family(_hunyuan_dit, sample=_SQUARE),
    "CogView4Transformer2DModel": Family(_cogview4, sample=_SQUARE),
    "DiTTransformer2DModel": Family(_dit, sample=_SQUARE),
}
