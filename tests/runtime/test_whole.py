"""In one process nothing is cut, but a configuration that no launch could use is refused as there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, DiffusionPipeline, UNet2DModel

from dit_pipelining.api import ParallelConfig, load_config, load_pipeline, parallelize
from dit_pipelining.costs.measured import Measured, MeasuredProfile
from dit_pipelining.errors import BlocksNotFoundError, ConfigError, NotATransformerError
from partitioners import CountsNotIntegersError, DoesNotFitError, WrongNumberOfCountsError, WrongSumError
from partitioners.explicit import ENVIRONMENT_VARIABLE
from tests import checkpoints

CALL: dict[str, Any] = dict(
    prompt="a", height=16, width=16, num_frames=5, max_sequence_length=16, num_inference_steps=1, output_type="latent"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("whole") / "wan")


def unet() -> Any:
    model = UNet2DModel(block_out_channels=(4,) * 4, norm_num_groups=1, sample_size=16)
    return DDPMPipeline(model, DDPMScheduler())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (dict(ranks="rtx9999"), ConfigError, "rtx9999"),
        (dict(ranks=["24GB", "16GB", "8GB"]), ConfigError, "describes 3 ranks"),
        (dict(ranks="1.1GB*0"), ConfigError, "has the speed '0'"),
        (dict(ranks="1.000001GB"), DoesNotFitError, "rank 0 lacks"),
        (dict(profile="nope"), ConfigError, "neither a profile"),
        (dict(blocks=["nope"]), BlocksNotFoundError, "no submodule 'nope'"),
        (dict(partition={"nope": "4"}), ConfigError, "names 'nope'"),
        (dict(component_ranks={"nope": 0}), ConfigError, "names 'nope'"),
        (dict(text_encoder_tp_size={"nope": 1}), ConfigError, "text encoders of this pipeline .* 'text_encoder'"),
    ],
)
def test_what_does_not_fit_the_pipeline_is_refused_on_one_process_as_on_two(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    fields: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    config = ParallelConfig(cfg_parallel_size=world_size, **fields)
    with pytest.raises(error, match=message):
        load_pipeline(folder, config)
    with pytest.raises(error, match=message):
        parallelize(DiffusionPipeline.from_pretrained(folder), config)


@pytest.mark.parametrize(("text", "error"), [("2,2", WrongNumberOfCountsError), ("x", CountsNotIntegersError)])
def test_a_wrong_variable_is_refused_on_one_process_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception]
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, text)
    with pytest.raises(error, match=ENVIRONMENT_VARIABLE):
        load_pipeline(folder)
    with pytest.raises(error, match=ENVIRONMENT_VARIABLE):
        parallelize(DiffusionPipeline.from_pretrained(folder), ParallelConfig())


def test_what_depends_on_the_call_is_refused_at_each_first_one(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("partition: {transformer: [5]}")
    pipeline = load_pipeline(folder, load_config(file, environment={}))
    for _ in range(2):
        with pytest.raises(WrongSumError, match=r"config.yaml\): they sum to 5; expected 4"):
            pipeline(**CALL)
    of_flux = MeasuredProfile(
        model="flux",
        model_class="FluxTransformer2DModel",
        device="cpu",
        dtype="float32",
        blocks={"FluxTransformerBlock": Measured(1.0)},
        prologue=Measured(0.0),
        epilogue=Measured(0.0),
    )
    of_flux.save(tmp_path / "profile.json")
    pipeline = parallelize(DiffusionPipeline.from_pretrained(folder), ParallelConfig(profile=tmp_path / "profile.json"))
    with pytest.raises(ConfigError, match="profile"):
        pipeline(**CALL)


def test_what_fits_runs_as_without_it(folder: Path) -> None:
    expected = DiffusionPipeline.from_pretrained(folder)(**CALL, generator=torch.Generator().manual_seed(0)).frames
    config = ParallelConfig(partition="4", blocks=["blocks"], ranks="rtx4090", component_ranks={"vae": 0})
    for pipeline in (load_pipeline(folder, config), parallelize(DiffusionPipeline.from_pretrained(folder), config)):
        for _ in range(2):
            found = pipeline(**CALL, generator=torch.Generator().manual_seed(0)).frames
            assert torch.equal(found, expected)
        assert not pipeline.transformer._forward_pre_hooks


def test_a_pipeline_without_a_transformer_is_left_alone_if_nothing_is_asked_of_it() -> None:
    pipeline = unet()
    assert parallelize(pipeline, ParallelConfig()) is pipeline
    with pytest.raises(NotATransformerError, match="no diffusion transformer to split"):
        parallelize(pipeline, ParallelConfig(blocks=["up_blocks"]))
