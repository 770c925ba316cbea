"""What MODEL on a command line means: a preset, a pipeline's folder, a transformer's folder, or a config file.

Only JSON files are read, never weights.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dit_pipelining.errors import ConfigError, InputError, ModelNotFoundError
from dit_pipelining.planning.presets import Preset, near_matches, preset, presets_of
from dit_pipelining.planning.recipes import FAMILIES, Size, describe_inputs
from dit_pipelining.planning.weightless import class_defaults, transformer_class
from dit_pipelining.weights.pipelines import transformer_classes


@dataclass(frozen=True)
class TransformerSpec:
    """One transformer of a model, or several that are alike.

    Attributes:
        names: of the pipeline's components, such as `transformer` and `transformer_2`.
        model_class: name of the class in diffusers.
        config: arguments of the class, without its defaults.
        known: the preset itself, or the nearest one of the same class; None if no preset has the class.
    """

    names: tuple[str, ...]
    model_class: str
    config: Mapping[str, Any]
    known: Preset | None

    @property
    def full_config(self) -> dict[str, Any]:
        return class_defaults(transformer_class(self.model_class)) | dict(self.config)


@dataclass(frozen=True)
class ModelSpec:
    """A model whose split can be planned.

    Attributes:
        name: as it was asked for.
        source: `preset`, `pipeline`, `transformer` or `config`.
        transformers: those that are alike in one entry.
        vae: pixels (`spatial`) and frames (`temporal`) per latent, where they are known.
        expand_timesteps: whether every token has a timestep of its own; None where the model does not say.
        folder: of the pipeline, where there is one.
    """

    name: str
    source: str
    transformers: tuple[TransformerSpec, ...]
    vae: Mapping[str, int] = field(default_factory=dict)
    expand_timesteps: bool | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class SizeRequest:
    """Sizes that the user chose; None: the model's own. In pixels, and frames of the video."""

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    batch: int | None = None

    def apply(self, size: Size) -> Size:
        chosen = {name: value for name, value in vars(self).items() if value is not None}
        for name, value in chosen.items():
            if value < 1:
                raise InputError(f"{name} {value} is not a positive number.")
        return replace(size, **chosen)

    @property
    def is_empty(self) -> bool:
        return all(value is None for value in vars(self).values())


def find_model(name: str) -> ModelSpec:
    """The model that is meant.

    Args:
        name: of a preset (or the id of its model repository), of a folder, or of a config.json. A preset goes before a
            folder of the same name; write `./name` for the folder.

    Raises:
        ModelNotFoundError: there is no such preset, folder or file, or the folder holds no model.
        NotATransformerError: the class is no transformer, or the pipeline has none.
        ConfigError: a file is no JSON, or lacks the name of the class.
    """
    path = Path(name)
    try:
        found = preset(name)
    except ModelNotFoundError:
        if not name or not path.exists():
            raise ModelNotFoundError(f"{name!r} is no preset, folder or config file; {near_matches(name)}.") from None
    else:
        spec = TransformerSpec(found.components, found.model_class, found.config, found)
        return ModelSpec(found.name, "preset", (spec,), expand_timesteps=found.expand_timesteps)
    if path.name == "model_index.json":
        path = path.parent
    if path.is_file():
        if path.suffix != ".json":
            raise ModelNotFoundError(f"{name} is no JSON file; give the folder of a pipeline or of a transformer.")
        spec = _transformer(path, path.stem if path.stem != "config" else "transformer")
        return ModelSpec(name, "config", (spec,))
    if (path / "model_index.json").is_file():
        return _pipeline(name, path)
    if (path / "config.json").is_file():
        spec = _transformer(path / "config.json", "transformer")
        return ModelSpec(name, "transformer", (spec,))
    raise ModelNotFoundError(
        f"the folder {name} holds neither model_index.json (a pipeline) nor config.json (a transformer)."
    )


def model_inputs(model: ModelSpec, spec: TransformerSpec, asked: SizeRequest) -> tuple[dict[str, Any], Size]:
    """What the pipeline would pass to the transformer, described as `planning.inputs` says, and the size it is for.

    Raises:
        InputError: no recipe is known for the class, or the model cannot do this size.
    """
    if model.source == "preset" and asked.is_empty and spec.known:
        return dict(spec.known.inputs), default_size(spec.known)
    family = FAMILIES.get(spec.model_class)
    if family is None or spec.known is None:
        raise InputError(
            f"it is not known what pipelines pass to {spec.model_class}; describe its inputs in a JSON file for --inputs: "
            f"{_listed_inputs(spec)}."
        )
    vae = {**{name: spec.known.vae[name] for name in ("spatial", "temporal")}, **model.vae}
    config = spec.full_config
    size = default_size(spec.known)
    if asked.frames is not None and asked.frames > 1 and size.frames == 1:
        raise InputError(f"{spec.model_class} makes images; {asked.frames} frames cannot be asked of it.")
    if model.source != "preset":
        size = family.default_size(config, vae, size)
    size = asked.apply(size)
    expand = spec.known.expand_timesteps if model.expand_timesteps is None else model.expand_timesteps
    return describe_inputs(family, family.call(config, vae, size, spec.known.text, expand)), size


def default_size(known: Preset) -> Size:
    """What a model makes by default."""
    return Size(known.defaults["height"], known.defaults["width"], known.defaults["frames"])


def _pipeline(name: str, folder: Path) -> ModelSpec:
    index = read_json(folder / "model_index.json")
    names = transformer_classes(index)
    found = [_transformer(folder / key / "config.json", key) for key in names]
    vae_config = folder / "vae" / "config.json"
    vae = vae_factors(read_json(vae_config)) if vae_config.is_file() else {}
    expand = bool(index.get("expand_timesteps", False))
    return ModelSpec(name, "pipeline", tuple(_merge_alike(found)), vae, expand, folder)


def _transformer(file: Path, name: str) -> TransformerSpec:
    config = read_json(file)
    model_class = config.get("_class_name")
    if not isinstance(model_class, str):
        raise ConfigError(f"{file} does not name its class; expected an entry _class_name, as diffusers writes it.")
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    return TransformerSpec((name,), model_class, arguments, _nearest(model_class, arguments))


def _merge_alike(found: list[TransformerSpec]) -> list[TransformerSpec]:
    merged: list[TransformerSpec] = []
    for spec in found:
        for i, other in enumerate(merged):
            if (other.model_class, other.config) == (spec.model_class, spec.config):
                merged[i] = replace(other, names=other.names + spec.names)
                break
        else:
            merged.append(spec)
    return merged


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelNotFoundError: it is missing.
        ConfigError: it holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{file} is missing; is the download complete?") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no readable JSON file: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a {type(content).__name__}; expected an object.")
    return content


def vae_factors(config: Mapping[str, Any]) -> dict[str, int]:
    """Pixels and frames per latent, as pipelines read them from a VAE's config."""
    spatial = config.get("scale_factor_spatial") or config.get("spatial_compression_ratio")
    if spatial is None and config.get("_class_name") in (
        "AutoencoderKL",
        "AutoencoderKLFlux2",
        "AutoencoderKLCogVideoX",
    ):
        spatial = 2 ** (len(config.get("block_out_channels", ())) - 1)
    temporal = config.get("scale_factor_temporal") or config.get("temporal_compression_ratio")
    factors = {"spatial": spatial, "temporal": temporal}
    return {name: int(value) for name, value in factors.items() if value}


def _nearest(model_class: str, config: Mapping[str, Any]) -> Preset | None:
    """The preset of the same class that agrees with the config in most fields."""
    defaults = class_defaults(transformer_class(model_class))
    plain = plain_config({**defaults, **config})

    def agreement(candidate: Preset) -> int:
        other = plain_config({**defaults, **candidate.config})
        return sum(plain.get(name) == value for name, value in other.items())

    return max(presets_of(model_class), key=agreement, default=None)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as JSON would give it back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}


def _listed_inputs(spec: TransformerSpec) -> str:
    """The arguments of the forward, those that it cannot do without first."""
    parameters = list(inspect.signature(transformer_class(spec.model_class).forward).parameters.values())[1:]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [
        p.name for p in parameters if p.default is not p.empty and p.name not in ("return_dict", "attention_kwargs")
    ]
    return ", ".join(required) + (f" and perhaps {', '.join(others)}" if others else "")
