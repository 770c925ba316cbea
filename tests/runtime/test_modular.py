"""Modular pipelines of diffusers and their guiders on split transformers give what they give in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ModularPipeline, guiders
from diffusers.hooks import HookRegistry, LayerSkipConfig, ModelHook, SmoothedEnergyGuidanceConfig
from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.modular_pipelines import PipelineState

from dit_pipelining.api import ParallelConfig, generate, load_pipeline, parallelize
from dit_pipelining.errors import ConfigError, ModelNotFoundError
from tests import checkpoints
from tests.distributed import RankPool
from tests.layouts import LAYOUTS

ALWAYS = dict(skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0)
GUIDERS = {
    "none": lambda: guiders.ClassifierFreeGuidance(enabled=False),
    "classifier-free": lambda: guiders.ClassifierFreeGuidance(guidance_scale=4.0),
    "classifier-free, in the middle": lambda: guiders.ClassifierFreeGuidance(guidance_scale=4.0, start=0.3, stop=0.8),
    "zero star": lambda: guiders.ClassifierFreeZeroStarGuidance(guidance_scale=4.0, zero_init_steps=1),
    "tangential": lambda: guiders.TangentialClassifierFreeGuidance(guidance_scale=4.0),
    "adaptive projected": lambda: guiders.AdaptiveProjectedGuidance(
        guidance_scale=4.0, adaptive_projected_guidance_momentum=-0.5
    ),
    "skips layers": lambda: guiders.SkipLayerGuidance(skip_layer_config=LayerSkipConfig([1, 2]), **ALWAYS),
    "skips the first stage": lambda: guiders.SkipLayerGuidance(skip_layer_config=LayerSkipConfig([0, 1]), **ALWAYS),
    "skips feed-forward": lambda: guiders.SkipLayerGuidance(
        skip_layer_config=LayerSkipConfig([0, 3], skip_attention=False), **ALWAYS
    ),
    "perturbed attention": lambda: guiders.PerturbedAttentionGuidance(
        perturbed_guidance_layers=[1, 2], perturbed_guidance_start=0.0, perturbed_guidance_stop=1.0
    ),
    "auto": lambda: guiders.AutoGuidance(auto_guidance_config=LayerSkipConfig([0, 3])),
    "smoothed energy": lambda: guiders.SmoothedEnergyGuidance(
        seg_guidance_config=SmoothedEnergyGuidanceConfig([1, 2]), seg_guidance_start=0.0, seg_guidance_stop=1.0
    ),
}


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.sd3(tmp_path_factory.mktemp("modular") / "sd3")


def plain(folder: Path) -> Any:
    pipeline = ModularPipeline.from_pretrained(str(folder))
    pipeline.load_components(dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def spread(folder: Path, layout: str | None) -> Any:
    pipeline = plain(folder)
    return pipeline if layout is None else parallelize(pipeline, ParallelConfig(**LAYOUTS[layout]))


def call(seed: int = 7, **changes: Any) -> dict[str, Any]:
    size = dict(height=8, width=8, num_inference_steps=4, max_sequence_length=16)
    options = dict(prompt="a red cat", negative_prompt="moon", output="latents", **size)
    return options | dict(generator=torch.Generator().manual_seed(seed)) | changes


class Brighter:
    """Has a hook, and holds the pipeline, which cannot be copied."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def hook(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return 1.5 * output


def with_each_guider(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    pipeline = spread(folder, layout)
    # Diffusers knows how to perturb attention of processors that are registered; SD3's is not.
    AttentionProcessorRegistry.register(
        JointAttnProcessor2_0, AttentionProcessorMetadata(lambda module, hidden_states, *_, **__: hidden_states)
    )
    seen = {}
    for name, make in GUIDERS.items():
        pipeline.update_components(guider=make())
        seen[name] = pipeline(**call())
    pipeline.update_components(guider=GUIDERS["skips layers"]())
    pipeline.transformer.transformer_blocks[3].attn.to_q.register_forward_hook(Brighter(pipeline).hook)
    seen["skips layers, with a hook of the caller's"] = pipeline(**call())
    return seen


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-cfg2", marks=pytest.mark.full)])
def test_each_guider_gives_what_it_gives_in_one_process(ranks: RankPool, sd3: Path, layout: str) -> None:
    [expected] = ranks.run(1, with_each_guider, sd3, None)
    distinct = {image.numpy().tobytes() for image in expected.values()}
    assert len(distinct) == len(expected)
    for results in ranks.run(4 if layout == "pp2-cfg2" else 2, with_each_guider, sd3, layout):
        assert [name for name, image in expected.items() if not torch.equal(results[name], image)] == []


SIZES = {
    "sd3": dict(height=8, width=8),
    "flux": dict(height=8, width=8),
    "wan": dict(height=16, width=16, num_frames=5),
}


@pytest.fixture(scope="module")
def folders(sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("modular")
    return {"sd3": sd3, "flux": checkpoints.flux(made / "flux"), "wan": checkpoints.wan(made / "wan")}


def without_negative(name: str, **changes: Any) -> dict[str, Any]:
    options = call(**SIZES[name], **changes)
    if name == "flux":  # it has no guider
        del options["negative_prompt"]
    return options


def as_modular(folders: dict[str, Path], layout: str | None) -> dict[str, Any]:
    """Latents, all that a pipeline has made, and pictures of each kind of pipeline; then several requests side by side."""
    config = None if layout is None else ParallelConfig(**LAYOUTS[layout])
    seen: dict[str, Any] = {}
    for name, folder in folders.items():
        pipeline = load_pipeline(folder, config, pipeline_class=ModularPipeline)
        pipeline.set_progress_bar_config(disable=True)
        seen[name] = pipeline(**without_negative(name))
        state = pipeline(**without_negative(name, output=None, output_type="pt"))
        assert isinstance(state, PipelineState)
        seen[f"{name}, state"] = torch.as_tensor(state.get("videos" if name == "wan" else "images"))
        if name == "sd3":
            pipeline.update_components(guider=GUIDERS["skips layers"]())
            requests = [call(seed, num_inference_steps=2 + seed) for seed in range(3)]
            seen |= {f"request {seed}": image for seed, image in enumerate(generate(pipeline, requests))}
    return seen


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-cfg2", marks=pytest.mark.full)])
def test_modular_pipelines_are_loaded_stage_by_stage_and_run_requests_side_by_side(
    ranks: RankPool, folders: dict[str, Path], layout: str
) -> None:
    [expected] = ranks.run(1, as_modular, folders, None)
    for results in ranks.run(4 if layout == "pp2-cfg2" else 2, as_modular, folders, layout):
        assert [name for name, value in expected.items() if not torch.equal(results[name], value)] == []


class Counting(guiders.ClassifierFreeGuidance):
    """Puts a hook of its own on a block."""

    def prepare_models(self, denoiser: torch.nn.Module) -> None:
        super().prepare_models(denoiser)
        registry = HookRegistry.check_if_exists_or_initialize(denoiser.transformer_blocks[0])
        registry.register_hook(ModelHook(), f"counting {self._count_prepared}")


def refused(sd3: Path) -> list[str]:
    pipeline = spread(sd3, "pp2")
    found = []
    for guider in (guiders.AutoGuidance(auto_guidance_config=LayerSkipConfig([0], dropout=0.5)), Counting()):
        pipeline.update_components(guider=guider)
        with pytest.raises(ConfigError) as error:
            pipeline(**call())
        found.append(str(error.value))
    pipeline.update_components(guider=guiders.ClassifierFreeGuidance())
    assert torch.isfinite(pipeline(**call())).all()
    return found


def test_guiders_that_draw_numbers_or_keep_state_are_refused(ranks: RankPool, sd3: Path) -> None:
    for random, own in ranks.run(2, refused, sd3):
        assert "dropout=1.0" in random
        assert "ModelHook" in own


def test_a_folder_that_only_says_where_components_lie_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modular_model_index.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="load_components"):
        load_pipeline(tmp_path, pipeline_class=ModularPipeline)
