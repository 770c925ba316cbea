"""What people add to a pipeline acts on a split one as in one process: weights, attention, IP-Adapters, guidance."""

import time
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import attention_backend

from dit_pipelining.api import ParallelConfig, load_pipeline, parallelize
from dit_pipelining.runtime.attach import split_of
from tests import checkpoints
from tests.distributed import RankPool
from tests.layouts import LAYOUTS


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.flux(tmp_path_factory.mktemp("addons") / "flux")
    checkpoints.write_gguf(folder)
    changed(diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer")).save_pretrained(
        folder / "transformer", variant="changed"
    )
    return folder


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.sd3(tmp_path_factory.mktemp("addons") / "sd3")


def loaded(folder: Path, layout: str | None, **options: Any) -> Any:
    """The pipeline over ranks, or the plain one without a layout."""
    if layout is None:
        return diffusers.DiffusionPipeline.from_pretrained(folder, **options)
    return load_pipeline(folder, ParallelConfig(**LAYOUTS[layout]), **options)


def paint(pipeline: Any, **changes: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    options = dict(height=8, width=8, max_sequence_length=16, num_inference_steps=2, output_type="latent")
    if "prompt_embeds" not in changes:
        options["prompt"] = "a red cat"
    images: torch.Tensor = pipeline(generator=torch.Generator().manual_seed(7), **options | changes).images
    return images


def changed(model: Any) -> Any:
    """The model with other weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    return model


def with_own_parts(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """A VAE that the caller has loaded, and a variant of the transformer's weights."""
    plain = loaded(folder, layout)
    seen = {"plain": paint(plain, output_type="pt")}
    vae = changed(diffusers.AutoencoderKL.from_pretrained(folder / "vae"))
    seen["own VAE"] = paint(loaded(folder, layout, vae=vae), output_type="pt")
    seen["variant"] = paint(loaded(folder, layout, variant="changed"), output_type="pt")
    return seen


def with_single_files(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """A transformer from one file, and a quantised one; another size comes when ranks hold their own stage only."""
    seen = {}
    for kind, file, options in (
        ("plain", "transformer/diffusion_pytorch_model.safetensors", {}),
        ("gguf", "q8.gguf", dict(quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32))),
    ):
        transformer = diffusers.FluxTransformer2DModel.from_single_file(
            str(folder / file), config=str(folder / "transformer"), torch_dtype=torch.float32, **options
        )
        pipeline = loaded(folder, layout, transformer=transformer)
        seen[kind] = paint(pipeline)
        seen[f"{kind}, larger"] = paint(pipeline, height=16)
    return seen


@attention_backend(
    "native"
)  # setting a model's backend sets diffusers' own default too; here that ends with the session
def with_attention_backends(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """Images with a backend set before the first call, others after it, and by context; the prompt's tensors stay."""
    pipeline = loaded(folder, layout)
    embeds, pooled, _ = pipeline.encode_prompt("a red cat", "a red cat", max_sequence_length=16)
    prompt = dict(prompt_embeds=embeds, pooled_prompt_embeds=pooled)
    pipeline.transformer.set_attention_backend("_native_math")
    seen = {"math before the split": paint(pipeline, **prompt)}
    pipeline.transformer.set_attention_backend("native")
    seen["native"] = paint(pipeline, **prompt)
    pipeline.transformer.set_attention_backend("_native_math")
    seen["math"] = paint(pipeline, **prompt)
    pipeline.transformer.reset_attention_backend()
    with attention_backend("_native_math"):
        seen["context of math"] = paint(pipeline, **prompt)
    with attention_backend("native"):
        seen["context of native"] = paint(pipeline, **prompt)
    return seen


def ip_adapter() -> dict[str, Any]:
    """The state dict of one."""
    torch.manual_seed(4)
    width, tokens = 32, 4
    adapter: dict[str, Any] = {
        "image_proj": {
            "proj.weight": torch.randn(tokens * width, 16),
            "proj.bias": torch.randn(tokens * width),
            "norm.weight": torch.randn(width),
            "norm.bias": torch.randn(width),
        },
        "ip_adapter": {},
    }
    for index in range(2):
        for name in ("to_k_ip", "to_v_ip"):
            adapter["ip_adapter"][f"{index}.{name}.weight"] = torch.randn(width, width)
            adapter["ip_adapter"][f"{index}.{name}.bias"] = torch.randn(width)
    return adapter


def ip_adapter_image() -> dict[str, Any]:
    given = [torch.linspace(-1, 1, 16).reshape(1, 1, 16)]
    return dict(ip_adapter_image_embeds=given, negative_ip_adapter_image_embeds=given)


def load_ip_adapter(pipeline: Any) -> None:
    pipeline.load_ip_adapter(ip_adapter(), weight_name="", image_encoder_pretrained_model_name_or_path=None)


def with_an_ip_adapter(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """Images before and with an IP-Adapter, at another scale, and after it is unloaded."""
    image = ip_adapter_image()
    seen = {}
    for first in ("call", "adapter"):
        pipeline = loaded(folder, layout)
        if first == "call":
            seen["before"] = paint(pipeline)
        load_ip_adapter(pipeline)
        seen[f"{first} first"] = paint(pipeline, **image)
        pipeline.set_ip_adapter_scale(0.5)
        seen[f"{first} first, half"] = paint(pipeline, **image)
    pipeline.unload_ip_adapter()
    seen["unloaded"] = paint(pipeline)
    return seen


def with_an_ip_adapter_that_moves(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """Images with an IP-Adapter whose blocks move away from a slow first stage."""
    if layout is None:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    else:
        pipeline = load_pipeline(folder, ParallelConfig(rebalance=True, **LAYOUTS[layout]))
    if layout is not None and dist.get_rank() % 2 == 0:
        for block in (*pipeline.transformer.transformer_blocks, *pipeline.transformer.single_transformer_blocks):
            block.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    guided = dict(negative_prompt="moon", true_cfg_scale=3.0)  # so that all replicas have work
    seen = {"before": paint(pipeline, **guided)}
    cuts = [stage_counts(pipeline)]
    load_ip_adapter(pipeline)
    for turn in range(3):
        seen[f"adapter {turn}"] = paint(pipeline, **guided, **ip_adapter_image())
        cuts.append(stage_counts(pipeline))
    pipeline.unload_ip_adapter()
    seen["unloaded"] = paint(pipeline, **guided)
    assert layout is None or cuts[0] != cuts[-1], cuts
    return seen


def stage_counts(pipeline: Any) -> tuple[int, ...] | None:
    split = split_of(pipeline.transformer)
    return None if split is None else split.partition.counts


def with_true_guidance(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """FLUX by prompt and negative prompt, by embeddings of both, and without guidance."""
    pipeline = loaded(folder, layout)
    embeds, pooled, _ = pipeline.encode_prompt("a red cat", "a red cat", max_sequence_length=16)
    negative, negative_pooled, _ = pipeline.encode_prompt("moon", "moon", max_sequence_length=16)
    given = dict(prompt_embeds=embeds, pooled_prompt_embeds=pooled)
    given |= dict(negative_prompt_embeds=negative, negative_pooled_prompt_embeds=negative_pooled)
    return {
        "prompt": paint(pipeline, negative_prompt="moon", true_cfg_scale=3.0),
        "embeddings": paint(pipeline, true_cfg_scale=3.0, **given),
        "without": paint(pipeline),
    }


def with_skipped_layers(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """SD3 with guidance that adds a third branch without some layers; without one of its text encoders."""
    pipeline = loaded(folder, layout, text_encoder_3=None, tokenizer_3=None)
    skipping = dict(skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0, negative_prompt="moon")
    return {
        "guided": paint(pipeline, negative_prompt="moon"),
        "skips": paint(pipeline, skip_guidance_layers=[1, 2], **skipping),
        "skips others": paint(pipeline, skip_guidance_layers=[3], **skipping),
        "skips the first stage": paint(pipeline, skip_guidance_layers=[0, 1], **skipping),
        "skips the last stage": paint(pipeline, skip_guidance_layers=[2, 3], **skipping),
    }


def with_a_second_pipeline(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """Two pipelines over one transformer, in turns."""
    pipeline = loaded(folder, layout)
    other = diffusers.FluxImg2ImgPipeline(**pipeline.components)
    if layout is not None:
        other = parallelize(other, ParallelConfig(**LAYOUTS[layout]))
    picture = torch.linspace(0, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)
    seen = {"text": paint(pipeline)}
    seen["image"] = paint(other, image=picture, num_inference_steps=4, strength=0.5)
    seen["text again"] = paint(pipeline)
    return seen


CUT_BATCH = 1e-3
"""Where the batch of a guided step is cut over replicas: kernels add up in another order for another batch."""

SESSIONS = {
    "single files": ("flux", with_single_files),
    "two pipelines": ("flux", with_a_second_pipeline),
    "attention backends": ("flux", with_attention_backends),
    "IP-Adapter": ("flux", with_an_ip_adapter),
    "own parts": ("flux", with_own_parts),
    "IP-Adapter that moves": ("flux", with_an_ip_adapter_that_moves),
    "true guidance": ("flux", with_true_guidance),
    "skipped layers": ("sd3", with_skipped_layers),
}


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-cfg2", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", SESSIONS)
def test_each_image_of_a_session_is_that_of_one_process(
    ranks: RankPool, flux: Path, sd3: Path, name: str, layout: str
) -> None:
    model, session = SESSIONS[name]
    folder = {"flux": flux, "sd3": sd3}[model]
    [expected] = ranks.run(1, session, folder, None)
    images = list(expected.values())
    assert any(not torch.equal(images[0], other) for other in images[1:])
    assert name != "own parts" or not any(torch.equal(images[0], other) for other in images[1:])
    tolerance = CUT_BATCH if layout == "pp2-cfg2" and name == "skipped layers" else 0.0
    for results in ranks.run(4 if layout == "pp2-cfg2" else 2, session, folder, layout):
        for key, image in expected.items():
            torch.testing.assert_close(results[key], image, rtol=tolerance, atol=tolerance, msg=f"{key} differs")
