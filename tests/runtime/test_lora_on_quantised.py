"""LoRA weights beside quantised ones act as in one process; they cannot be added to them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import BitsAndBytesConfig, GGUFQuantizationConfig

from dit_pipelining.api import ParallelConfig, load_pipeline
from dit_pipelining.errors import ConfigError
from tests import adapters, checkpoints
from tests.distributed import RankPool
from tests.layouts import LAYOUTS

DTYPE = torch.bfloat16


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.flux(tmp_path_factory.mktemp("quantised") / "flux")
    checkpoints.write_gguf(folder)
    return folder


@pytest.fixture(scope="module")
def loras(flux: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    targets = enumerate(adapters.FLUX_TARGETS)
    return [adapters.lora(tmp_path_factory.mktemp("adapter"), flux, own, seed) for seed, own in targets]


def quantised(folder: Path, kind: str, layout: str | None) -> Any:
    """By torchao while it is loaded, or from a GGUF file."""
    options: dict[str, Any]
    if kind == "torchao":
        options = dict(quantization_config=checkpoints.int8())
    elif layout is not None:
        options = dict(transformer=folder / "q8.gguf")
    else:
        transformer = diffusers.FluxTransformer2DModel.from_single_file(
            str(folder / "q8.gguf"),
            config=str(folder / "transformer"),
            torch_dtype=DTYPE,
            quantization_config=GGUFQuantizationConfig(compute_dtype=DTYPE),
        )
        options = dict(transformer=transformer)
    if layout is None:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=DTYPE, **options)
    else:
        pipeline = load_pipeline(folder, ParallelConfig(**LAYOUTS[layout]), dtype=DTYPE, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def paint(pipeline: Any, **changes: Any) -> torch.Tensor:
    options: dict[str, Any] = dict(
        negative_prompt="moon", true_cfg_scale=3.0, height=8, width=8, max_sequence_length=16
    )
    options |= dict(num_inference_steps=2, output_type="latent", generator=torch.Generator().manual_seed(7))
    images: torch.Tensor = pipeline("a red cat", **options | changes).images
    return images


def session(folder: Path, loras: list[Path], layout: str | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Images with adapters, of which one is loaded before a GGUF file's first call; what is said to who fuses them."""
    seen, told = {}, {}
    for kind in ("torchao", "gguf"):
        pipeline = quantised(folder, kind, layout)
        if kind == "torchao":
            seen[f"{kind}: before"] = paint(pipeline)
        pipeline.load_lora_weights(loras[0], adapter_name="style")
        seen[f"{kind}: style"] = paint(pipeline)
        seen[f"{kind}: half"] = paint(pipeline, joint_attention_kwargs={"scale": 0.5})
        pipeline.load_lora_weights(loras[1], adapter_name="subject")
        pipeline.set_adapters(["style", "subject"], [0.7, 0.3])
        seen[f"{kind}: both, larger"] = paint(pipeline, height=16)
        told[kind] = what_fusing_raises(pipeline) if layout is not None else None
        pipeline.unload_lora_weights()
        seen[f"{kind}: unloaded"] = paint(pipeline)
    return seen, told


def what_fusing_raises(pipeline: Any) -> str:
    with pytest.raises(ConfigError) as error:
        pipeline.fuse_lora()
    return str(error.value)


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-cfg2", marks=pytest.mark.full)])
def test_adapters_beside_quantised_weights_act_as_in_one_process(
    ranks: RankPool, flux: Path, loras: list[Path], layout: str
) -> None:
    [(expected, _)] = ranks.run(1, session, flux, loras, None)
    assert torch.equal(expected["torchao: before"], expected["torchao: unloaded"])
    for kind in ("torchao", "gguf"):
        images = [expected[f"{kind}: {name}"] for name in ("style", "half", "unloaded")]
        assert len({image.float().numpy().tobytes() for image in images}) == 3
    for results, told in ranks.run(4 if layout == "pp2-cfg2" else 2, session, flux, loras, layout):
        assert [name for name, image in expected.items() if not torch.equal(results[name], image)] == []
        assert all(
            "fuse_lora adds adapters to the weights of FluxTransformer2DModel" in str(own) for own in told.values()
        )


def before_layers_of_bitsandbytes_have_weights(folder: Path, lora: Path) -> str:
    """The library needs a GPU, so the model only says that its layers are of it."""
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    pipeline.transformer.hf_quantizer = SimpleNamespace(quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(ConfigError) as error:
        pipeline.load_lora_weights(lora)
    return str(error.value)


def test_adapters_for_layers_of_bitsandbytes_without_weights_are_refused(
    ranks: RankPool, flux: Path, loras: list[Path]
) -> None:
    for told in ranks.run(2, before_layers_of_bitsandbytes_have_weights, flux, loras[0]):
        assert "quantised by bitsandbytes" in told
        assert "Call the pipeline once before" in told
