"""The components of the tiny Wan pipeline, untrained: their sizes, the word-level tokenizer and the scheduler."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tiny_world import vocabulary
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

FLOW_SHIFT = 3.0
TEXT_DIM = 64
LATENT_CHANNELS = 16
MAX_TEXT_LENGTH = 512
"""The text length `WanPipeline` pads prompts to unless told otherwise."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words of the tiny world; it lower-cases, splits at punctuation and ends with `</s>`."""
    words = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", words["</s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=MAX_TEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_text_encoder(vocabulary_size: int) -> UMT5EncoderModel:
    """A two-layer UMT5 encoder; it is trained together with the transformer.

    Args:
        vocabulary_size: Tokens the tokenizer knows.
    """
    config = UMT5Config(
        vocab_size=-(-vocabulary_size // 32) * 32,
        d_model=TEXT_DIM,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return UMT5EncoderModel(config)


def build_vae() -> AutoencoderKLWan:
    """A thin VAE of the Wan 2.2 kind: 8 times smaller in height and width, 4 times in time, 16 channels."""
    vae = AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=24,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        in_channels=12,
        out_channels=12,
        patch_size=2,
        is_residual=True,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )
    # Start with latents that are nearly free of noise, or the decoder first learns to ignore them.
    with torch.no_grad():
        vae.quant_conv.weight[LATENT_CHANNELS:].mul_(0.1)
        vae.quant_conv.bias[LATENT_CHANNELS:].fill_(-6.0)
    return vae


def build_transformer() -> WanTransformer3DModel:
    """A Wan transformer of 12 thin blocks; four heads, so that heads divide over 2 and 4 ranks."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=40,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=128,
        ffn_dim=512,
        num_layers=12,
        rope_max_seq_len=64,
    )
    # Start with an output of zero and with modulations that depend little on the timestep, as is usual for DiTs.
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.normal_(transformer.condition_embedder.time_proj.weight, std=0.01)
    torch.nn.init.zeros_(transformer.condition_embedder.time_proj.bias)
    return transformer


def build_scheduler() -> UniPCMultistepScheduler:
    """The scheduler of the Wan checkpoints, with a flow shift that fits few tokens."""
    return UniPCMultistepScheduler(
        num_train_timesteps=1000, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT
    )


def save_pipeline(
    folder: Path, vae: AutoencoderKLWan, transformer: WanTransformer3DModel, text_encoder: UMT5EncoderModel
) -> None:
    """Write a folder that `WanPipeline.from_pretrained` loads.

    Args:
        folder: Where to write; made if absent.
        vae: The VAE, with the latent statistics in its configuration.
        transformer: The transformer.
        text_encoder: The text encoder.
    """
    WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=build_scheduler(),
    ).save_pretrained(folder)
    # Newer transformers write their internal name of this class; the name written here loads in older ones as well.
    for name in ("model_index.json", "tokenizer/tokenizer_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
