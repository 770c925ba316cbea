"""LoRA weights on a split pipeline act as in one process."""

import io
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from dit_pipelining.api import ParallelConfig, load_pipeline, parallelize
from tests import adapters, checkpoints
from tests.distributed import RankPool

CALL = dict(prompt="a red cat", height=16, width=16, num_frames=5, max_sequence_length=16, num_inference_steps=2)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("lora") / "wan")


@pytest.fixture(scope="module")
def lora(wan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on linears of the blocks and of the glue."""
    return adapters.lora(tmp_path_factory.mktemp("adapter"), wan, ["to_q", "linear_1"], seed=3)


def generate(pipeline: Any, **changes: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    frames: torch.Tensor = pipeline(
        generator=torch.Generator().manual_seed(7), output_type="latent", **CALL, **changes
    ).frames
    return frames


def with_lora(wan: Path, lora: Path, loader: str, called_before: bool) -> list[torch.Tensor]:
    """Latents with the adapter, at half its scale, and after it is unloaded."""
    config = ParallelConfig(pipeline_parallel_size=2)
    if loader == "plain":
        pipeline = diffusers.DiffusionPipeline.from_pretrained(wan)
    elif loader == "load_pipeline":
        pipeline = load_pipeline(wan, config)
    else:
        pipeline = parallelize(diffusers.DiffusionPipeline.from_pretrained(wan), config)
    if called_before:
        generate(pipeline)
    pipeline.load_lora_weights(lora)
    full = generate(pipeline)
    half = generate(pipeline, attention_kwargs={"scale": 0.5})
    pipeline.unload_lora_weights()
    return [full, half, generate(pipeline)]


@pytest.mark.parametrize(
    ("loader", "called_before"),
    [("load_pipeline", False), ("load_pipeline", True), ("parallelize", False), ("parallelize", True)],
)
def test_lora_weights_act_as_in_one_process(
    ranks: RankPool, wan: Path, lora: Path, loader: str, called_before: bool
) -> None:
    with torch.no_grad():
        expected = with_lora(wan, lora, "plain", called_before)
    assert not torch.equal(expected[0], expected[2])
    for results in ranks.run(2, with_lora, wan, lora, loader, called_before):
        assert [torch.equal(one, other) for one, other in zip(results, expected, strict=True)] == [True] * 3


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.flux(tmp_path_factory.mktemp("lora") / "flux")


@pytest.fixture(scope="module")
def flux_loras(flux: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    targets = enumerate(adapters.FLUX_TARGETS)
    return [adapters.lora(tmp_path_factory.mktemp("adapter"), flux, own, seed) for seed, own in targets]


def paint(pipeline: Any, **changes: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    options = dict(height=8, width=8, max_sequence_length=16, num_inference_steps=2, output_type="latent") | changes
    images: torch.Tensor = pipeline("a red cat", generator=torch.Generator().manual_seed(7), **options).images
    return images


def through_all_a_user_does(
    flux: Path, loras: list[Path], config: dict[str, int] | None, called_before: bool
) -> dict[str, torch.Tensor]:
    """Images after each step of a session with adapters. With `called_before` adapters come after the first call."""
    if config is None:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(flux)
    else:
        pipeline = load_pipeline(flux, ParallelConfig(**config))
    options: dict[str, Any] = dict(negative_prompt="the moon", true_cfg_scale=3.0)
    seen = {"before": paint(pipeline, **options)} if called_before else {}
    pipeline.load_lora_weights(loras[0], adapter_name="style")
    for scale in (0.0, 0.5, 1.0):
        seen[f"scale {scale}"] = paint(pipeline, joint_attention_kwargs={"scale": scale}, **options)
    pipeline.unload_lora_weights()
    seen["unloaded at once"] = paint(pipeline, **options)
    pipeline.load_lora_weights(loras[0], adapter_name="style")
    pipeline.load_lora_weights(loras[1], adapter_name="subject")
    pipeline.set_adapters(["style", "subject"], [0.7, 0.3])
    seen["two adapters"] = paint(pipeline, **options)
    seen["two adapters at half"] = paint(pipeline, joint_attention_kwargs={"scale": 0.5}, **options)
    pipeline.disable_lora()
    seen["disabled"] = paint(pipeline, **options)
    pipeline.enable_lora()
    pipeline.fuse_lora(lora_scale=0.5)
    seen["fused"] = paint(pipeline, **options)
    pipeline.unfuse_lora()
    seen["unfused"] = paint(pipeline, **options)
    pipeline.delete_adapters("style")
    seen["one deleted"] = paint(pipeline, **options)
    pipeline.unload_lora_weights()
    seen["unloaded"] = paint(pipeline, **options)
    return seen


@pytest.mark.parametrize(
    ("config", "called_before"),
    [
        (dict(pipeline_parallel_size=2), False),
        (dict(pipeline_parallel_size=2, cfg_parallel_size=2), True),
    ],
)
def test_a_session_with_adapters_on_blocks_and_glue_of_flux(
    ranks: RankPool, flux: Path, flux_loras: list[Path], config: dict[str, int], called_before: bool
) -> None:
    [expected] = ranks.run(1, through_all_a_user_does, flux, flux_loras, None, called_before)
    for one, other in (("scale 0.0", "scale 1.0"), ("scale 0.5", "scale 1.0"), ("two adapters", "scale 1.0")):
        assert not torch.equal(expected[one], expected[other])
    assert torch.equal(expected["unloaded at once"], expected.get("before", expected["disabled"]))
    world_size = 4 if "cfg_parallel_size" in config else 2
    for results in ranks.run(world_size, through_all_a_user_does, flux, flux_loras, config, called_before):
        different = [name for name, image in expected.items() if not torch.equal(results[name], image)]
        assert different == []


def with_an_adapter_of_something_else(flux: Path) -> tuple[str, bool]:
    """What is said about an adapter without a layer of the transformer, and whether the transformer has none."""
    pipeline = load_pipeline(flux, ParallelConfig(pipeline_parallel_size=2))
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    logging.getLogger("diffusers").addHandler(handler)
    pipeline.load_lora_weights({"unet.mid.lora_A.weight": torch.ones(2, 4), "unet.mid.lora_B.weight": torch.ones(4, 2)})
    logging.getLogger("diffusers").removeHandler(handler)
    return told.getvalue(), not pipeline.get_active_adapters()


def test_an_adapter_that_fits_no_layer_is_a_warning(ranks: RankPool, flux: Path) -> None:
    results = ranks.run(2, with_an_adapter_of_something_else, flux)
    assert (
        "No LoRA keys associated to FluxTransformer2DModel" in results[0][0]
    )  # diffusers speaks on the first rank only
    assert all(without for _, without in results)


def any_peft() -> Any:
    """A release of peft that is not out yet is what transformers 5.24 asks for; what it calls has been there for long."""
    return mock.patch("transformers.integrations.peft.check_peft_version")


@pytest.fixture(scope="module")
def encoder_lora(flux: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on the text encoder and on the transformer."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(flux)
    torch.manual_seed(4)
    pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_k"]))
    with any_peft():
        pipeline.text_encoder.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "out_proj", "fc1"]))
    adapters.randomise(pipeline.transformer)
    adapters.randomise(pipeline.text_encoder)
    layers = [get_peft_model_state_dict(model) for model in (pipeline.transformer, pipeline.text_encoder)]
    folder = tmp_path_factory.mktemp("adapter")
    pipeline.save_lora_weights(folder, *layers)
    return folder


@any_peft()
def with_an_adapter_of_the_text_encoder(
    flux: Path, lora: Path, config: dict[str, Any] | None, called_before: bool, *_: Any
) -> dict[str, torch.Tensor]:
    if config is None:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(flux)
    else:
        pipeline = load_pipeline(flux, ParallelConfig(**config))
    seen = {"before": paint(pipeline)} if called_before else {}
    pipeline.load_lora_weights(lora, adapter_name="style")
    seen["loaded"] = paint(pipeline)
    seen["half"] = paint(pipeline, joint_attention_kwargs={"scale": 0.5})
    pipeline.set_adapters(["style"], [{"text_encoder": 0.2, "transformer": 0.0}])
    seen["the text encoder's"] = paint(pipeline)
    pipeline.disable_lora()
    seen["disabled"] = paint(pipeline)
    pipeline.enable_lora()
    pipeline.fuse_lora(components=["text_encoder"], lora_scale=0.5)
    seen["fused"] = paint(pipeline)
    pipeline.unfuse_lora(components=["text_encoder"])
    pipeline.unload_lora_weights()
    seen["unloaded"] = paint(pipeline)
    return seen


@pytest.mark.parametrize(
    ("config", "called_before"),
    [
        (dict(pipeline_parallel_size=2, component_ranks={"text_encoder": 1}), True),
        (dict(pipeline_parallel_size=2), False),
        pytest.param(dict(pipeline_parallel_size=2, cfg_parallel_size=2), True, marks=pytest.mark.full),
    ],
)
def test_an_adapter_of_a_text_encoder_acts_on_the_rank_that_has_it(
    ranks: RankPool, flux: Path, encoder_lora: Path, config: dict[str, Any], called_before: bool
) -> None:
    [expected] = ranks.run(1, with_an_adapter_of_the_text_encoder, flux, encoder_lora, None, called_before)
    assert not torch.equal(expected["the text encoder's"], expected["disabled"])
    world_size = 4 if "cfg_parallel_size" in config else 2
    for results in ranks.run(
        world_size, with_an_adapter_of_the_text_encoder, flux, encoder_lora, config, called_before
    ):
        assert [name for name, image in expected.items() if not torch.equal(results[name], image)] == []
