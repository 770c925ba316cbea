"""A ParallelConfig from a YAML file, the environment and arguments.

[Note: keys]
A file and the environment may set every field of ParallelConfig under its own name, in the environment in capitals behind
`DIT_PIPELINING_`. Besides, these keys of configurations for streaming diffusion are understood:

- `strategy`: `none` (one stage), `pipeline` (`pipeline_stages`, or as many as processes), `auto` (as many stages as
  processes), `sequence` (tokens split over as many ranks as processes, by Ulysses). What other degrees need of the processes
  is taken off.
- `pipeline_stages`: `pipeline_parallel_size`.
- `block_partition`: `uniform` (the partitioner of that name), `dynamic` (`rebalance`).
- `hardware.topology`: `topology`, as a key with a dot or nested.
- `stream_batch_steps`, `slo.target_fps`, `slo.max_ttff_ms`, `slo.adaptive_steps`: of streams (`stream/goals.py`); they say
  nothing about the ranks.

These keys may lie under `diffusion` and `diffusion.parallelism`. In the environment they are the variables of `VARIABLES`.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import yaml

from dit_pipelining.config import DIMENSIONS, ParallelConfig
from dit_pipelining.config_checks import check_positive, integer_in
from dit_pipelining.config_names import sources_named
from dit_pipelining.errors import ConfigError

PREFIX = "DIT_PIPELINING_"
SIZE = "pipeline_parallel_size"
ULYSSES = "ulysses_degree"
HOLDERS = ("cfg_parallel_size", "ring_degree", ULYSSES)
FIELDS = tuple(field.name for field in fields(ParallelConfig) if field.name != "told")
VARIABLES = {
    "DIFFUSION_PARALLELISM_STRATEGY": "strategy",
    "DIFFUSION_PIPELINE_STAGES": "pipeline_stages",
    "DIFFUSION_VAE_PLACEMENT": "vae_placement",
    "DIFFUSION_BLOCK_PARTITION": "block_partition",
    "DIFFUSION_TOPOLOGY": "hardware.topology",
    "DIFFUSION_STREAM_BATCH_STEPS": "stream_batch_steps",
    "DIFFUSION_TARGET_FPS": "slo.target_fps",
    "DIFFUSION_MAX_TTFF_MS": "slo.max_ttff_ms",
    "DIFFUSION_ADAPTIVE_STEPS": "slo.adaptive_steps",
}
STRATEGIES = ("none", "pipeline", "auto", "sequence")
BLOCK_PARTITIONS: dict[str, dict[str, Any]] = {"uniform": {"partitioner": "uniform"}, "dynamic": {"rebalance": True}}
OTHER_NAMES = {"pipeline_stages": SIZE, "hardware.topology": "topology"}
STREAM_KEYS = ("stream_batch_steps", "slo.target_fps", "slo.max_ttff_ms", "slo.adaptive_steps")
THE_REST = object()
"""In place of a size: as many as there are processes, but for what other sizes need."""

TRANSPARENT = ("diffusion", "parallelism")
"""Keys that only hold others."""
KEYS = (*FIELDS, "strategy", "block_partition", *OTHER_NAMES, *STREAM_KEYS)


@dataclass(frozen=True)
class _Source:
    """Settings from one place: their keys, and what to call the place (and each key) in an error; "": nothing."""

    name: str
    settings: Mapping[str, Any]
    known_as: Mapping[str, str]

    def of(self, key: str) -> str:
        return f"{self.known_as.get(key, key)}={self.settings[key]!r}" + f" ({self.name})" * bool(self.name)


def load_config(
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    defaults: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> ParallelConfig:
    """A configuration, each setting from the first of these that has it: arguments, environment, file, defaults.

    Args:
        path: of a YAML file; None: no file.
        environment: where variables are looked up.
        defaults: settings for when nobody says anything else.
        arguments: fields of ParallelConfig, or other keys of [Note: keys]. None counts as not given.

    Raises:
        ConfigError: the file cannot be read; a key is not known (lists those that are); a value cannot be used. Names a
            setting by its key, value and file (or variable).
        CountsError: a partition holds something else than one number of blocks per stage.
    """
    if not isinstance(path, str | Path | None):
        raise ConfigError(f"expected the path of a YAML file, got {path!r}.")
    sources = [_Source("", defaults or {}, {})]
    if path is not None:
        sources.append(_read_file(Path(path)))
    sources.append(_read_environment(environment))
    sources.append(_Source("", {key: value for key, value in arguments.items() if value is not None}, {}))
    for key in (*(defaults or {}), *arguments):
        if key not in KEYS:
            raise _unknown(f"the argument {key!r}", key, KEYS)
    merged: dict[str, Any] = {}
    told: dict[str, str] = {}
    for source in sources:
        own, keys = _as_fields(source)
        strategy = source.settings.get("strategy")
        sizes: dict[str, Any] = {}
        if strategy == "auto" or (strategy == "pipeline" and SIZE not in merged):
            sizes = {SIZE: THE_REST}  # unless somebody says more
        if strategy == "sequence":
            sizes = {SIZE: 1, ULYSSES: THE_REST}
        merged |= sizes | own
        told = {field: other for field, other in told.items() if field not in sizes}
        told |= {field: source.of(key) for field, key in keys.items()}
    named = {field: (merged[field], name) for field, name in told.items()}
    with sources_named(named):
        counted = _counted(merged, environment)
    return ParallelConfig(**counted, told=named)


def refuse_no_config(config: object) -> None:
    """Refuse what somebody could pass in place of a configuration.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(config, ParallelConfig):
        raise ConfigError(
            f"expected a ParallelConfig, got {config!r}. Make one of fields, ParallelConfig(pipeline_parallel_size=2), or of a "
            "file, load_config('config.yaml')."
        )


def _counted(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings with numbers in place of `THE_REST`."""
    counted = dict(settings)
    for size in (SIZE, ULYSSES):
        if counted.get(size) is THE_REST:
            others = [name for name in DIMENSIONS.values() if name != size and name in counted]
            for name in others:
                check_positive(name, counted[name])
            processes = integer_in(environment, "WORLD_SIZE", 1)
            taken = prod(counted[name] for name in others) * _replicas_for_shards(counted)
            counted[size] = max(processes // taken, 1)
    return counted


def _replicas_for_shards(settings: Mapping[str, Any]) -> int:
    """The replicas that `hsdp_shard_size` makes where no other size makes ranks that hold the same stage."""
    shard, replicate = settings.get("hsdp_shard_size"), settings.get("hsdp_replicate_size") or 1
    if not settings.get("use_hsdp") or any((settings.get(name) or 1) != 1 for name in HOLDERS) or shard is None:
        return 1
    check_positive("hsdp_shard_size", shard)
    check_positive("hsdp_replicate_size", replicate)
    return int(shard * replicate)


def stream_settings(
    path: str | Path | None = None, *, environment: Mapping[str, str] = os.environ
) -> dict[str, tuple[Any, str]]:
    """What a file and the environment, which beats it, say about streams: value by key, and how to name it in an error.

    Raises:
        ConfigError: the file cannot be read; a key is not known.
    """
    sources = [_read_environment(environment)]
    if path is not None:
        sources.insert(0, _read_file(Path(path)))
    return {key: (own.settings[key], own.of(key)) for own in sources for key in STREAM_KEYS if key in own.settings}


def _as_fields(source: _Source) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of one source under the names of ParallelConfig's fields, and the key that each comes from."""
    found = {key: value for key, value in source.settings.items() if key in FIELDS}
    keys = {field: field for field in found}
    for key, field in OTHER_NAMES.items():
        if key in source.settings:
            if found.get(field, source.settings[key]) != source.settings[key]:
                raise ConfigError(f"{source.of(key)} contradicts {source.of(field)}; give one of them.")
            found[field], keys[field] = source.settings[key], key
    if "block_partition" in source.settings:
        meaning = BLOCK_PARTITIONS.get(str(source.settings["block_partition"]))
        if meaning is None:
            raise ConfigError(f"{source.of('block_partition')}: expected one of {', '.join(BLOCK_PARTITIONS)}.")
        found, keys = {**meaning, **found}, {**dict.fromkeys(meaning, "block_partition"), **keys}
    strategy = source.settings.get("strategy")
    if strategy is not None and strategy not in STRATEGIES:
        raise ConfigError(f"{source.of('strategy')}: expected one of {', '.join(STRATEGIES)}.")
    if strategy == "none":
        if found.get(SIZE, 1) != 1:
            raise ConfigError(f"{source.of('strategy')} contradicts {source.of(keys[SIZE])}; give one of them.")
        found[SIZE], keys[SIZE] = 1, "strategy"
    return found, keys


def _read_file(path: Path) -> _Source:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}.") from None
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(f"the configuration file {path} holds a {type(settings).__name__}; expected keys and values.")
    flat = _flattened(settings)
    for key in flat:
        if key not in KEYS:
            raise _unknown(f"the key {key!r} of {path}", key, KEYS)
    return _Source(str(path), flat, {})


def _flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if key in TRANSPARENT and isinstance(value, dict):
            flat |= _flattened(value)
        elif key in ("hardware", "slo") and isinstance(value, dict):
            flat |= {f"{key}.{inner}": own for inner, own in value.items()}
        else:
            flat[str(key)] = value
    return flat


def _read_environment(environment: Mapping[str, str]) -> _Source:
    settings: dict[str, Any] = {}
    known_as: dict[str, str] = {}
    for variable, text in environment.items():
        key = VARIABLES.get(variable)
        if key is None:
            if not variable.startswith(PREFIX):
                continue
            key = variable.removeprefix(PREFIX).lower()
            if key not in FIELDS:
                known = [PREFIX + field.upper() for field in FIELDS]
                raise _unknown(f"the environment variable {variable}", variable, [*known, *VARIABLES])
        settings[key] = text if key == "partition" else _value(variable, text)
        known_as[key] = variable
    return _Source("the environment", settings, known_as)


def _value(variable: str, text: str) -> Any:
    """Text as YAML reads it: 2 is a number, true a truth value, [0, 1] a list, and `rtx4090,rtx3090` stays text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"the environment variable {variable} is {text!r}, which YAML cannot read.") from None


def _unknown(what: str, key: str, known: Any) -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    return ConfigError(f"{what} is not known.{meant} Known are {', '.join(known)}.")
