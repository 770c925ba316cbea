"""Tiny pipelines with random weights in diffusers format, for tests that load from disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PipelineQuantizationConfig,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    TorchAoConfig,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

WORDS = [
    "<pad>",
    "</s>",
    "<unk>",
    "a",
    "red",
    "blue",
    "green",
    "cat",
    "dog",
    "circle",
    "square",
    "moves",
    "left",
    "right",
    "on",
    "the",
    "moon",
]


def tokenizer(length: int) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of a few words."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=length,
    )


def wan(folder: Path, *, experts: int = 1, num_layers: int = 4, seed: int = 0) -> Path:
    """A Wan text-to-video pipeline; two experts as in Wan2.2 with `experts=2`."""
    torch.manual_seed(seed)
    transformers = [_wan_transformer(in_channels=4, num_layers=num_layers) for _ in range(experts)]
    pipeline = WanPipeline(
        **_wan_components(),
        transformer=transformers[0],
        transformer_2=transformers[1] if experts == 2 else None,
        boundary_ratio=0.5 if experts == 2 else None,
    )
    pipeline.save_pretrained(folder, max_shard_size="40KB")  # several files with an index
    return folder


def wan_image_to_video(folder: Path, seed: int = 0) -> Path:
    """A Wan image-to-video pipeline without an image encoder, as in Wan 2.2: latents, mask and image are channels."""
    torch.manual_seed(seed)
    transformer = _wan_transformer(in_channels=4 + 4 + 4, num_layers=4)
    WanImageToVideoPipeline(**_wan_components(), transformer=transformer).save_pretrained(folder)
    return folder


def _wan_transformer(in_channels: int, num_layers: int) -> torch.nn.Module:
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=num_layers,
        rope_max_seq_len=32,
    )
    return _randomised(model)


def _wan_components() -> dict[str, Any]:
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4))
    return dict(
        tokenizer=tokenizer(32),
        text_encoder=encoder,
        vae=AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def wan_i2v(folder: Path, seed: int = 0) -> Path:
    """A Wan 2.1 image-to-video pipeline with its image encoder."""
    torch.manual_seed(seed)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=12,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=32,
        image_dim=4,
        added_kv_proj_dim=24,
    )
    vision = CLIPVisionConfig(
        hidden_size=4, projection_dim=4, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    pipeline = WanImageToVideoPipeline(
        tokenizer=tokenizer(32),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
        ),
        image_encoder=CLIPVisionModelWithProjection(vision),
        image_processor=CLIPImageProcessor(crop_size=32, size=32),
        vae=AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=_randomised(transformer),
    )
    pipeline.save_pretrained(folder)
    return folder


def flux(folder: Path, seed: int = 0) -> Path:
    """A FLUX text-to-image pipeline."""
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=CLIPTextModel(_clip()),
        tokenizer=tokenizer(77),
        text_encoder_2=_t5(),
        tokenizer_2=tokenizer(48),
        vae=_image_vae(channels=1),
        transformer=_randomised(transformer),
    )
    pipeline.save_pretrained(folder)
    return folder


def sd3(folder: Path, seed: int = 0) -> Path:
    """A Stable Diffusion 3 text-to-image pipeline; its guidance doubles the batch."""
    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=96,
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=_randomised(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_image_vae(channels=4),
        text_encoder=CLIPTextModelWithProjection(_clip()),
        tokenizer=tokenizer(77),
        text_encoder_2=CLIPTextModelWithProjection(_clip()),
        tokenizer_2=tokenizer(77),
        text_encoder_3=_t5(),
        tokenizer_3=tokenizer(77),
    )
    pipeline.save_pretrained(folder)
    return folder


def write_gguf(folder: Path) -> None:
    """Write the transformer of a FLUX pipeline to `q8.gguf` in its folder."""
    write_tensors(folder / "q8.gguf", FluxTransformer2DModel.from_pretrained(folder / "transformer").state_dict())


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a GGUF file: matrices as Q8_0, all else as it is."""
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "flux")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def int8() -> PipelineQuantizationConfig:
    """What quantises a transformer by torchao, weights only, while it is loaded."""
    from torchao.quantization import Int8WeightOnlyConfig

    return PipelineQuantizationConfig(quant_mapping={"transformer": TorchAoConfig(Int8WeightOnlyConfig())})


def _randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Noise on every parameter: gates and output layers that start at zero would hide a wrong split."""
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def _clip() -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )


def _t5() -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4))


def _image_vae(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )
