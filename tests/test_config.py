"""ParallelConfig: values of a wrong type, in every field."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from dit_pipelining.api import ParallelConfig, load_config, load_pipeline
from dit_pipelining.config_sources import FIELDS
from dit_pipelining.errors import ConfigError

NO_INTEGERS = ["two", "2", 2.0, True, [2], {"a": 2}]
NO_TEXTS = [5, 1.5, True, ["a"], {"a": 1}]
SIZES = ("pipeline", "cfg", "data", "tensor", "vae_patch")
CHOICES = ("schedule", "transport", "ulysses_mode", "topology", "vae_placement")
WRONG: dict[str, list[Any]] = {
    **{f"{name}_parallel_size": [*NO_INTEGERS, None, 0] for name in SIZES},
    **{name: [*NO_INTEGERS, None, 0] for name in ("ulysses_degree", "ring_degree", "microbatches")},
    **{name: [*NO_INTEGERS, 0] for name in ("hsdp_shard_size", "hsdp_replicate_size")},
    **{name: ["yes", 1, None, [True], {"a": True}] for name in ("use_hsdp", "rebalance")},
    **{name: [*NO_TEXTS, None, "none"] for name in CHOICES},
    "compile": [*NO_TEXTS, "all"],
    "partitioner": [*NO_TEXTS, None, "even"],
    "profile": NO_TEXTS,
    "ranks": [5, True, {"a": "24GB"}, [24], [["24GB"]]],
    "partition": [5, 1.5, True, {"transformer": 5}],
    "blocks": [3, True, "transformer_blocks", [1], {"a": "b"}],
    "text_encoder_tp_size": ["two", 2.0, True, None, [2], {"text_encoder": "2"}, {"text_encoder": None}, {1: 2}, 0],
    "timeout_seconds": ["60", True, None, [60], math.nan, math.inf, 0],
    "component_ranks": [0, "all", [0], {"vae": "0"}, {"vae": 0.0}, {"vae": True}, {"vae": None}, {"vae": [0]}, {0: 0}],
    "output_ranks": [0, None, True, "none", "0", ["0"], [0.0], [True], {"vae": 0}, []],
}
"""What each field does not hold, in the types that a YAML file knows."""


def test_every_field_is_tried_with_wrong_types() -> None:
    assert WRONG.keys() == set(FIELDS)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_a_wrong_type_is_an_error_that_names_the_field_the_value_and_what_was_expected(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}.*=.*: expected ") as of_argument:
        ParallelConfig(**{name: value})
    message = str(of_argument.value)
    assert repr(value) in message or all(repr(inner) in message for inner in value.values())
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({name: value}))
    with pytest.raises(ConfigError) as of_file:
        load_config(path, environment={})
    assert str(of_file.value) == message.replace(f"{name}={value!r}", f"{name}={value!r} ({path})")
    assert str(path) in str(of_file.value)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_a_variable_of_the_launch_that_is_no_integer_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match=f"the environment variable {name} is 'x': expected an integer"):
        load_pipeline(tmp_path, ParallelConfig())
