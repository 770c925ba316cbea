"""Wrong use ends with its own message, before weights are loaded or a rank waits."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from dit_pipelining.api import ParallelConfig, load_pipeline, parallelize
from dit_pipelining.errors import (
    CaptureError,
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    NotATransformerError,
    WorldSizeError,
)
from partitioners import (
    CountsNotIntegersError,
    NegativeCountError,
    TooManyStagesError,
    WrongNumberOfCountsError,
    WrongSumError,
)
from tests import checkpoints
from tests.distributed import RankPool, RanksFailedError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("errors") / "wan")


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> ParallelConfig:
    """As if launched with two processes; nothing here gets as far as meeting the other one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    return ParallelConfig(pipeline_parallel_size=2)


def test_a_world_size_that_does_not_match_says_how_to_launch(folder: Path) -> None:
    with pytest.raises(WorldSizeError, match="--nproc-per-node 3"):
        load_pipeline(folder, ParallelConfig(pipeline_parallel_size=3))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_a_size_that_is_no_positive_integer_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        ParallelConfig(pipeline_parallel_size=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("component_ranks", ["vae"]),
        ("component_ranks", {"vae": 2}),
        ("component_ranks", {"vae": "first"}),
        ("output_ranks", []),
        ("output_ranks", "first"),
        ("output_ranks", [0, -1]),
        ("output_ranks", 0),
    ],
)
def test_ranks_that_are_not_there_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        ParallelConfig(pipeline_parallel_size=2, **{field: value})  # type: ignore[arg-type]


def test_a_component_that_cannot_lie_on_one_rank_is_named(folder: Path, two_ranks: ParallelConfig) -> None:
    config = ParallelConfig(pipeline_parallel_size=2, component_ranks={"transformer": 0})
    with pytest.raises(ConfigError, match=r"'transformer'; .* are 'text_encoder', 'vae'"):
        load_pipeline(folder, config)


def test_more_stages_than_blocks_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(TooManyStagesError):
        load_pipeline(folder, ParallelConfig(pipeline_parallel_size=5))


@pytest.mark.parametrize(
    ("text", "error"),
    [("2,two", CountsNotIntegersError), ("5,-1", NegativeCountError), ("1,1,2", WrongNumberOfCountsError)],
)
def test_a_wrong_environment_partition_is_named(
    folder: Path, two_ranks: ParallelConfig, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception]
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", text)
    with pytest.raises(error, match="VLLM_PP_LAYER_PARTITION"):
        load_pipeline(folder, two_ranks)


def test_a_folder_that_is_no_pipeline_says_what_to_pass(folder: Path, two_ranks: ParallelConfig) -> None:
    with pytest.raises(ModelNotFoundError, match="folder above"):
        load_pipeline(folder / "transformer", two_ranks)
    with pytest.raises(ModelNotFoundError, match="nowhere/at-all"):
        load_pipeline("nowhere/at-all", two_ranks)


def test_a_pipeline_without_a_transformer_is_named(tmp_path: Path, two_ranks: ParallelConfig) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "OnlyVae", "vae": ["diffusers", "AutoencoderKLWan"]}')
    with pytest.raises(NotATransformerError, match="OnlyVae"):
        load_pipeline(tmp_path, two_ranks)


def test_a_component_that_is_no_pipeline_is_refused(two_ranks: ParallelConfig) -> None:
    with pytest.raises(NotATransformerError, match="AutoencoderKLWan"):
        parallelize(AutoencoderKLWan, two_ranks)


def test_a_missing_shard_is_named(tmp_path: Path, two_ranks: ParallelConfig) -> None:
    folder = checkpoints.wan(tmp_path / "wan")
    shard = sorted((folder / "transformer").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_pipeline(folder, two_ranks)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path, two_ranks: ParallelConfig) -> None:
    import json

    folder = checkpoints.wan(tmp_path / "wan")
    config = folder / "transformer" / "config.json"
    values = json.loads(config.read_text())
    values["num_layers"] = 5
    config.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"lacks .* tensors: blocks\.4\."):
        load_pipeline(folder, two_ranks)
    values["num_layers"] = 3
    config.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"unexpected .* tensors: blocks\.3\."):
        load_pipeline(folder, two_ranks)


def generate_with_wrong_sum(folder: Path) -> None:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2, partition="1,2"))
    pipeline(prompt="a", height=16, width=16, num_frames=5, num_inference_steps=1, output_type="latent")


def move(folder: Path) -> None:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    pipeline.to("cpu")  # where it is already
    pipeline.to(dtype=torch.float16)


def paint_with_dropout(folder: Path) -> None:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    for module in pipeline.transformer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    options = dict(prompt="a", height=16, width=16, num_frames=5, num_inference_steps=1, output_type="latent")
    pipeline(**options)  # nothing is dropped
    pipeline.transformer.train()
    with pytest.raises(CaptureError, match=r"draw random numbers \(dropout\).*call eval\(\)"):
        pipeline(**options)
    pipeline.transformer.eval()
    pipeline(**options)


def test_dropout_in_blocks_is_refused_on_every_rank_alike(ranks: RankPool, folder: Path) -> None:
    ranks.run(2, paint_with_dropout, folder)


def test_a_wrong_sum_is_an_error_on_every_rank(ranks: RankPool, folder: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(2, generate_with_wrong_sum, folder)
    assert str(caught.value).count(WrongSumError.__name__) >= 2


def test_a_split_transformer_cannot_be_moved(ranks: RankPool, folder: Path) -> None:
    with pytest.raises(RanksFailedError, match="cannot be moved"):
        ranks.run(2, move, folder)
