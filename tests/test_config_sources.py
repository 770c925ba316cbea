"""Configurations from a file, the environment and arguments: which one decides, and what wrong keys meet."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dit_pipelining.api import ParallelConfig, load_config, load_pipeline
from dit_pipelining.config_names import sources_named
from dit_pipelining.errors import ConfigError, WorldSizeError
from partitioners import CountsNotIntegersError, NegativeCountError, NoCountsError, WrongNumberOfCountsError
from partitioners.errors import CountsError
from tests import checkpoints


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "parallel.yaml"
    path.write_text("pipeline_parallel_size: 2\nschedule: gpipe\nmicrobatches: 3\n")
    return path


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_arguments_beat_the_environment_which_beats_the_file_which_beats_defaults(file: Path) -> None:
    environment = {"DIT_PIPELINING_MICROBATCHES": "4", "DIT_PIPELINING_PIPELINE_PARALLEL_SIZE": "3"}
    defaults = dict(microbatches=9, timeout_seconds=30.0, schedule="rolling")
    found = load_config(file, environment=environment, defaults=defaults, pipeline_parallel_size=5, partitioner=None)
    assert found == ParallelConfig(pipeline_parallel_size=5, schedule="gpipe", microbatches=4, timeout_seconds=30.0)


def test_nothing_said_is_the_default() -> None:
    assert load_config(environment={"PATH": "/bin", "WORLD_SIZE": "4"}) == ParallelConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("strategy: none", dict()),
        ("strategy: pipeline\npipeline_stages: 3", dict(pipeline_parallel_size=3)),
        ("strategy: pipeline", dict(pipeline_parallel_size=4)),
        ("strategy: auto\ncfg_parallel_size: 2", dict(pipeline_parallel_size=2, cfg_parallel_size=2)),
        ("strategy: sequence", dict(ulysses_degree=4)),
        ("strategy: sequence\npipeline_stages: 2", dict(pipeline_parallel_size=2, ulysses_degree=2)),
        ("strategy: sequence\nulysses_degree: 3", dict(ulysses_degree=3)),
        ("strategy: auto\nulysses_degree: 2", dict(pipeline_parallel_size=2, ulysses_degree=2)),
        (
            "strategy: auto\nuse_hsdp: true\nhsdp_shard_size: 2",
            dict(pipeline_parallel_size=2, use_hsdp=True, hsdp_shard_size=2),
        ),
        (
            "strategy: auto\nuse_hsdp: true\ncfg_parallel_size: 2\nhsdp_shard_size: 2",
            dict(pipeline_parallel_size=2, use_hsdp=True, cfg_parallel_size=2),
        ),
        ("pipeline_stages: 2", dict(pipeline_parallel_size=2)),
        ("block_partition: uniform", dict(partitioner="uniform")),
        ("block_partition: dynamic", dict(rebalance=True)),
        ("vae_placement: shared\npipeline_stages: 2", dict(vae_placement="shared", pipeline_parallel_size=2)),
        ("hardware:\n  topology: pcie", dict(topology="pcie")),
        ("hardware.topology: nvlink", dict(topology="nvlink")),
        ("partition: [1, 2]\npipeline_stages: 2", dict(pipeline_parallel_size=2, partition=[1, 2])),
        ("", dict()),
    ],
)
def test_the_keys_of_streaming_configurations_are_understood(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    assert load_config(written(tmp_path, text), environment={"WORLD_SIZE": "4"}) == ParallelConfig(**expected)


@pytest.mark.parametrize(
    ("environment", "stages"),
    [
        ({"DIFFUSION_PARALLELISM_STRATEGY": "none"}, 1),
        ({"DIFFUSION_PARALLELISM_STRATEGY": "pipeline"}, 2),
        ({"DIFFUSION_PARALLELISM_STRATEGY": "auto"}, 8),
        ({"DIFFUSION_PARALLELISM_STRATEGY": "pipeline", "DIFFUSION_PIPELINE_STAGES": "4"}, 4),
        ({"DIFFUSION_PIPELINE_STAGES": "4"}, 4),
        ({}, 2),
    ],
)
def test_the_environments_strategy_beats_the_files_stages(
    tmp_path: Path, environment: dict[str, str], stages: int
) -> None:
    file = written(tmp_path, "strategy: pipeline\npipeline_stages: 2")
    assert load_config(file, environment={"WORLD_SIZE": "8", **environment}).pipeline_parallel_size == stages


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("PARTITION", "8", "partition", "8"),
        ("REBALANCE", "true", "rebalance", True),
        ("TIMEOUT_SECONDS", "2.5", "timeout_seconds", 2.5),
        ("RANKS", "24GB*2", "ranks", "24GB*2"),
        ("BLOCKS", "[blocks]", "blocks", ["blocks"]),
        ("TEXT_ENCODER_TP_SIZE", "{text_encoder_2: 1}", "text_encoder_tp_size", {"text_encoder_2": 1}),
    ],
)
def test_the_environments_text_becomes_the_fields_type(variable: str, text: str, field: str, value: Any) -> None:
    assert getattr(load_config(environment={f"DIT_PIPELINING_{variable}": text}), field) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pipeline_stage: 2",
            r"the key 'pipeline_stage' of .*config.yaml is not known. Did you mean pipeline_stages\?",
        ),
        ("hardware:\n  gpus: 2", "the key 'hardware.gpus' .*Known are pipeline_parallel_size, "),
        ("strategy: tensor", r"strategy='tensor' \(.*config.yaml\): expected one of none, pipeline, auto"),
        ("strategy: none\npipeline_stages: 2", "strategy='none' .* contradicts pipeline_stages=2"),
        ("pipeline_stages: 2\npipeline_parallel_size: 3", "pipeline_stages=2 .* contradicts pipeline_parallel_size=3"),
        ("block_partition: [uniform]", r"block_partition=\['uniform'\] .* expected one of uniform, dynamic"),
        ("block_partition: even", "block_partition='even' .* expected one of uniform, dynamic"),
        ("vae_placement: alone", "vae_placement='alone' FILE: expected one of inline, shared"),
        (
            "vae_placement: shared\nblock_partition: uniform",
            "vae_placement='shared' FILE does not go with block_partition='uniform' FILE: use 'balanced'",
        ),
        ("vae_placement: shared", "vae_placement='shared' FILE takes a rank from the blocks"),
        ("rebalance: sometimes", "rebalance='sometimes' FILE: expected True or False"),
        ("hardware:\n  topology: ring", "hardware.topology='ring' FILE: expected one of auto, nvlink, pcie"),
        ("pipeline_stages: two", "^pipeline_stages='two' FILE: expected an integer"),
        ("diffusion: {parallelism: {pipeline_stages: 0}}", "^pipeline_stages=0 FILE: expected an integer"),
        ("strategy: auto\ncfg_parallel_size: zero", "cfg_parallel_size='zero' FILE: expected an integer"),
        (
            "ring_degree: 2\nblock_partition: dynamic",
            "ring_degree=2 FILE and block_partition='dynamic' FILE: blocks are",
        ),
        ("hsdp_shard_size: 2", "hsdp_shard_size=2 FILE is given, but use_hsdp is not"),
        ("use_hsdp: true", "use_hsdp=True FILE needs ranks that hold the same stage"),
        (
            "component_ranks: {vae: 7}",
            r"component_ranks=\{'vae': 7\} FILE: 7 is no rank; expected 0 to 0, .* for 'vae'",
        ),
        ("output_ranks: [7]", r"output_ranks=\[7\] FILE: 7 is no rank"),
        ("text_encoder_tp_size: {t5: 2}", r"text_encoder_tp_size=\{'t5': 2\} FILE: 1 rank at most"),
        ("vae_patch_parallel_size: 12", "vae_patch_parallel_size=12 FILE: 1 rank at most"),
        ("- 1", "holds a list; expected keys and values"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_a_file_gets_wrong_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message.replace("FILE", rf"\({path}\)")):
        load_config(path, environment={})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("partition: 3,x", CountsNotIntegersError, "from partition='3,x' FILE: 'x' is not an integer"),
        ("partition: [3, -1]", NegativeCountError, r"from partition=\[3, -1\] FILE: -1 is negative"),
        ("partition: {transformer: '3,1'}", WrongNumberOfCountsError, "from partition=.*FILE: there are 2 of them"),
        ("partition: []", NoCountsError, r"from partition=\[\] FILE; expected one integer per stage"),
    ],
)
def test_block_counts_that_a_file_gets_wrong_are_said(
    tmp_path: Path, text: str, error: type[CountsError], message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(error, match=message.replace("FILE", rf"\({path}\)")):
        load_config(path, environment={})


def test_a_setting_is_named_as_the_source_that_decides_has_it(file: Path) -> None:
    environment = {"DIFFUSION_PIPELINE_STAGES": "x"}
    with pytest.raises(ConfigError, match=r"^DIFFUSION_PIPELINE_STAGES='x' \(the environment\): expected an integer"):
        load_config(file, environment=environment)
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size='y': expected an integer"):
        load_config(file, environment=environment, pipeline_parallel_size="y")


def test_a_size_that_a_strategy_makes_is_not_said_to_be_of_the_file(tmp_path: Path) -> None:
    file, environment = written(tmp_path, "pipeline_stages: 2"), {"DIFFUSION_PARALLELISM_STRATEGY": "sequence"}
    config = load_config(file, environment={**environment, "WORLD_SIZE": "2"})
    with (
        pytest.raises(WorldSizeError, match="pipeline_parallel_size=1 x ulysses_degree=2 needs 2"),
        sources_named(config.told),
    ):
        config.check_world_size(3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline_stages: 3", "has 1 rank, but cfg_parallel_size=1 x pipeline_stages=3 FILE needs 3"),
        ("partition: {transfomer: '4'}", r"partition=\{'transfomer': '4'\} FILE names 'transfomer'"),
    ],
)
def test_what_does_not_fit_the_launch_or_the_model_is_named_by_the_file_too(
    tmp_path: Path, text: str, message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message.replace("FILE", rf"\({path}\)")):
        load_pipeline(checkpoints.wan(tmp_path / "wan"), load_config(path, environment={}))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.yaml cannot be read"):
        load_config(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"DIT_PIPELINING_SCEDULE": "gpipe"},
            r"DIT_PIPELINING_SCEDULE is not known. Did you mean DIT_PIPELINING_SCHEDULE\?",
        ),
        ({"DIT_PIPELINING_BLOCKS": "["}, r"DIT_PIPELINING_BLOCKS is '\[', which YAML cannot read"),
        ({"DIFFUSION_PARALLELISM_STRATEGY": "all"}, r"DIFFUSION_PARALLELISM_STRATEGY='all' \(the environment\)"),
        ({"DIFFUSION_PIPELINE_STAGES": "0"}, r"^DIFFUSION_PIPELINE_STAGES=0 \(the environment\): expected"),
    ],
)
def test_what_the_environment_gets_wrong_is_said(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(environment=environment)


@pytest.mark.parametrize("size", ["x", "", "2.5", "-1"])
def test_a_number_of_processes_that_is_none_is_said(size: str) -> None:
    with pytest.raises(ConfigError, match=f"the environment variable WORLD_SIZE is '{size}': expected an integer"):
        load_config(environment={"WORLD_SIZE": size}, strategy="auto")


def test_an_unknown_argument_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"the argument 'stages' is not known. .*Known are pipeline_parallel_size"):
        load_config(environment={}, stages=2)


def test_a_configuration_with_values_exchanged_names_the_others_by_their_file(tmp_path: Path) -> None:
    path = written(tmp_path, "pipeline_stages: 2\nhardware.topology: pcie\npartition: [3, 1]")
    config = replace(load_config(path, environment={}), timeout_seconds=5.0)
    assert config == load_config(path, environment={}, timeout_seconds=5.0)
    of_file = re.escape(f"({path})")
    with (
        pytest.raises(WorldSizeError, match=f"x pipeline_stages=2 {of_file} needs 2"),
        sources_named(config.told),
    ):
        config.check_world_size(3)
    with pytest.raises(ConfigError, match=f"^hardware.topology='pcie' {of_file}: no"), sources_named(config.told):
        raise ConfigError("topology='pcie': no")
    with pytest.raises(WrongNumberOfCountsError, match=rf"from partition=\[3, 1\] {of_file}: there are 2"):
        replace(config, pipeline_parallel_size=3)


def test_what_is_exchanged_is_not_said_to_be_of_the_file(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "pipeline_stages: 2\npartition: [3, 1]"), environment={})
    with pytest.raises(WrongNumberOfCountsError, match="from the argument: there are 1 of them"):
        replace(config, partition=[4])
    changed = replace(config, pipeline_parallel_size=3, partition=None)
    with pytest.raises(WorldSizeError, match=r"x pipeline_parallel_size=3 needs 3"), sources_named(changed.told):
        changed.check_world_size(2)
