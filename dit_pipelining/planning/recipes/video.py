"""What video pipelines pass to their transformers."""

from dit_pipelining.planning.inputs import Description, tensor
from dit_pipelining.planning.recipes.call import Call, Family

Inputs = dict[str, Description]

CLIP_IMAGE_TOKENS = 257
"""Of CLIP ViT-H/14 at 224 pixels, which embeds the image of Wan's image-to-video models."""

SIGLIP_IMAGE_TOKENS = 729
"""27 x 27 patches of SigLIP, which embeds the image of HunyuanVideo 1.5."""

LTX_FRAME_RATE = 25


def _latents(call: Call) -> Description:
    return tensor(call.batch, call.config["in_channels"], call.frames, call.height, call.width)


def _text(call: Call, width: str) -> Description:
    return tensor(call.batch, call.text_tokens, call.config[width])


def _wan(call: Call) -> Inputs:
    each_token = tensor(call.batch, call.tokens, dtype="float32")
    inputs = dict(
        hidden_states=_latents(call),
        timestep=each_token if call.expand_timesteps else tensor(call.batch, dtype="int64"),
        encoder_hidden_states=_text(call, "text_dim"),
    )
    if width := call.config.get("image_dim"):
        image = tensor(call.batch, CLIP_IMAGE_TOKENS, width)
        if both := call.config.get(
            "pos_embed_seq_len"
        ):  # tokens of the first and the last frame, embedded as two samples
            image = tensor(2 * call.batch, both // 2, width)
        inputs["encoder_hidden_states_image"] = image
    return inputs


def _hunyuan_video(call: Call) -> Inputs:
    inputs = dict(
        hidden_states=_latents(call),
        timestep=tensor(call.batch, dtype="float32"),
        encoder_hidden_states=_text(call, "text_embed_dim"),
        encoder_attention_mask=tensor(call.batch, call.text_tokens, fill=1),
        pooled_projections=tensor(call.batch, call.config["pooled_projection_dim"]),
    )
    return inputs | (dict(guidance=tensor(call.batch)) if call.config.get("guidance_embeds") else {})


def _hunyuan_video_15(call: Call) -> Inputs:
    config = call.config
    second = int(call.text["seq_len_2"])
    return dict(
        hidden_states=_latents(call),
        # All zeros mean that there is no image.
        image_embeds=tensor(
            call.batch, SIGLIP_IMAGE_TOKENS, config["image_embed_dim"], fill=int(config["task_type"] != "t2v")
        ),
        timestep=tensor(call.batch),
        encoder_hidden_states=_text(call, "text_embed_dim"),
        encoder_attention_mask=tensor(call.batch, call.text_tokens, fill=1),
        encoder_hidden_states_2=tensor(call.batch, second, config["text_embed_2_dim"]),
        encoder_attention_mask_2=tensor(call.batch, second, fill=1),
    )


def _cogvideox(call: Call) -> Inputs:
    config = call.config
    inputs = dict(
        hidden_states=tensor(call.batch, call.frames, config["in_channels"], call.height, call.width),
        encoder_hidden_states=tensor(call.batch, config["max_text_seq_length"], config["text_embed_dim"]),
        timestep=tensor(call.batch, dtype="int64"),
    )
    if config.get("use_rotary_positional_embeddings"):
        table = tensor(call.tokens, config["attention_head_dim"], dtype="float32")
        inputs["image_rotary_emb"] = {"tuple": [table, table]}
    if config.get("ofs_embed_dim"):
        inputs["ofs"] = tensor(1)
    return inputs


def _ltx(call: Call) -> Inputs:
    frames, height, width = call.grid
    scale = [call.pixel_frames / LTX_FRAME_RATE, call.pixels, call.pixels]
    return dict(
        hidden_states=tensor(call.batch, call.tokens, call.config["in_channels"]),
        encoder_hidden_states=_text(call, "caption_channels"),
        timestep=tensor(call.batch, dtype="float32"),
        encoder_attention_mask=tensor(call.batch, call.text_tokens, dtype="int64", fill=1),
        num_frames={"value": frames},
        height={"value": height},
        width={"value": width},
        rope_interpolation_scale={"value": scale},
    )


def _mochi(call: Call) -> Inputs:
    return dict(
        hidden_states=_latents(call),
        encoder_hidden_states=_text(call, "text_embed_dim"),
        timestep=tensor(call.batch),
        encoder_attention_mask=tensor(call.batch, call.text_tokens, dtype="bool", fill=1),
    )


def _allegro(call: Call) -> Inputs:
    def pairs(sides: tuple[int, ...]) -> Description:
        tables = [tensor(side, call.config["attention_head_dim"] // 3, dtype="float32") for side in sides]
        return {"tuple": [{"tuple": [table, table]} for table in tables]}

    positions = tensor(1, call.tokens, dtype="int64")
    return dict(
        hidden_states=_latents(call),
        encoder_hidden_states=tensor(call.batch, 1, call.text_tokens, call.config["caption_channels"]),
        encoder_attention_mask=tensor(call.batch, call.text_tokens, dtype="int64", fill=1),
        timestep=tensor(call.batch, dtype="float32"),
        image_rotary_emb={"tuple": [pairs(call.grid), {"tuple": [positions] * 3}]},
    )


def _latte(call: Call) -> Inputs:
    return dict(
        hidden_states=_latents(call),
        encoder_hidden_states=_text(call, "caption_channels"),
        timestep=tensor(call.batch, dtype="int64"),
        enable_temporal_attentions={"value": True},
    )


_WAN = Family(_wan, limit=lambda config: config["rope_max_seq_len"])

VIDEO_FAMILIES = {
    "WanTransformer3DModel": _WAN,
    "SkyReelsV2Transformer3DModel": _WAN,
    "HunyuanVideoTransformer3DModel": Family(_hunyuan_video),
    "HunyuanVideo15Transformer3DModel": Family(_hunyuan_video_15),
    "CogVideoXTransformer3DModel": Family(_cogvideox, sample=("sample_height", "sample_width", "sample_frames")),
    "LTXVideoTransformer3DModel": Family(_ltx),
    "MochiTransformer3DModel": Family(_mochi),
    "AllegroTransformer3DModel": Family(_allegro, sample=("sample_height", "sample_width")),
    "LatteTransformer3DModel": Family(_latte, sample=("sample_size", "sample_size", "video_length")),
}
