"""What is known of a pipeline's encoders and VAE: from a preset, or from the configurations in a pipeline's folder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from dit_pipelining.capture.counting import WorkCounter
from dit_pipelining.errors import ConfigError, SplitError
from dit_pipelining.planning.models import ModelSpec, default_size, plain_config, read_json, vae_factors
from dit_pipelining.planning.presets import Preset, preset
from dit_pipelining.planning.text_encoders import SHAPES, Encoder
from dit_pipelining.planning.tiles import latents_of
from dit_pipelining.planning.weightless import build_weightless, class_defaults
from dit_pipelining.sharding.tile_ranks import can_spread
from dit_pipelining.weights.components import component_class, components_in_folder
from dit_pipelining.weights.pipelines import diffusers_class
from dit_pipelining.weights.placement import ComponentSize
from dit_pipelining.weights.text_encoders import empty_text_encoder


@dataclass(frozen=True)
class Decode:
    """What decoding does in 16 bits, without tiles.

    Attributes:
        flops: floating-point operations.
        bytes: read and written.
        peak_bytes: of activations at their fullest.
        pixels: of all frames that are decoded.
    """

    flops: int
    bytes: int
    peak_bytes: int
    pixels: int


@dataclass(frozen=True)
class Beside:
    """The components beside a pipeline's transformers.

    Attributes:
        name: of the model.
        encoders: of text and images.
        decoders: parameters of the VAE, and of what else makes pixels or sound of latents, by name of the component.
        sizes: what a run that loads the folder places them by; no bytes where their files are not there.
        vae: its `class`, `config`, `latent_channels`, and pixels (`spatial`) and frames (`temporal`) per latent; None: there
            is none.
        decode: None: not known.
        tokens: of the prompts of one request.
        missing: names of components that are not in the folder.
    """

    name: str
    encoders: tuple[Encoder, ...] = ()
    decoders: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, ComponentSize] = field(default_factory=dict)
    vae: Mapping[str, Any] | None = None
    decode: Decode | None = None
    tokens: int = 0
    missing: tuple[str, ...] = ()


def beside_model(model: ModelSpec) -> Beside | None:
    """What is known of a model's components; None where a transformer alone was given.

    Raises:
        ConfigError: a component cannot be built from its configuration.
    """
    known = model.transformers[0].known
    if model.source == "preset":
        assert known is not None
        return beside_preset(known)
    return _in_folder(model.folder, known.name if known else None) if model.folder is not None else None


def beside_preset(known: Preset) -> Beside:
    """What a preset says."""
    encoders: list[Encoder] = []
    sizes = {"vae": ComponentSize("decoder", 0, tiles=can_spread(diffusers_class(known.vae["class"])))}
    names = (f"text_encoder{number}" for number in ("", *(f"_{n}" for n in range(2, len(known.text_encoders) + 1))))
    for own in known.text_encoders:
        is_text = own["model"] in SHAPES
        name = next(names) if is_text else "image_encoder"
        encoders.append(Encoder(name, own["parameters"], known_as=own["model"]))
        sizes[name] = ComponentSize("encoder", 0, text=is_text)
    decoders = {"vae": known.vae["parameters"]}
    return Beside(
        known.name, tuple(encoders), decoders, sizes, known.vae, _published_decode(known), tokens=_tokens(known)
    )


@cache
def _in_folder(folder: Path, nearest: str | None) -> Beside:
    """What the configurations in a pipeline's folder say; `nearest` is the preset that is most like it."""
    known = preset(nearest) if nearest else None
    encoders: list[Encoder] = []
    missing: list[str] = []
    decoders = {}
    index = read_json(folder / "model_index.json")
    sizes = components_in_folder(folder, index)
    for name, size in list(sizes.items()):
        cls = component_class(*index[name])
        if not (folder / name / "config.json").is_file():
            missing.append(name)
            del sizes[name]
        elif size.kind == "encoder":
            encoders.append(_encoder(cls, folder / name))
        else:
            decoders[name] = _count(_built(cls, folder / name))
    vae, decode = (None, None) if not (folder / "vae" / "config.json").is_file() else _vae(folder / "vae", known)
    tokens = _tokens(known) if known else 0
    return Beside(str(folder), tuple(encoders), decoders, sizes, vae, decode, tokens, tuple(missing))


def _encoder(cls: Any, folder: Path) -> Encoder:
    build = cache(partial(_built, cls, folder))  # asked for its size, its plan and its layers
    parameters, stored = 0, 0
    if read_json(folder / "config.json").get("quantization_config"):
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    else:
        parameters = _count(build())
    return Encoder(folder.name, parameters, stored, build=build)


def _vae(folder: Path, known: Preset | None) -> tuple[Mapping[str, Any], Decode | None]:
    config = read_json(folder / "config.json")
    name, own = config.get("_class_name"), {key: value for key, value in config.items() if not key.startswith("_")}
    facts: dict[str, Any] = {"class": name, "config": own}
    if known is None or name != known.vae["class"]:
        return facts, None
    facts |= {key: known.vae[key] for key in ("spatial", "temporal", "latent_channels")} | vae_factors(config)
    facts["latent_channels"] = own.get("latent_channels") or own.get("z_dim") or facts["latent_channels"]
    cls = diffusers_class(name)
    defaults = class_defaults(cls)
    published = plain_config({**defaults, **known.vae["config"]})
    if all(plain_config({**defaults, **own}).get(key) == value for key, value in published.items()):
        return facts, _published_decode(known)
    size = default_size(known)
    vae: Any = build_weightless(cls, own).to("meta")
    with torch.no_grad(), WorkCounter() as counter:
        counter.start()
        vae.decode(torch.empty(latents_of(vae, facts, size), dtype=torch.bfloat16, device="meta"))
        work = counter.taken()
    moved = sum(operation.bytes * times for operation, times in work.operations.items())
    return facts, Decode(work.flops, moved, work.peak_bytes, size.height * size.width * size.frames)


def _published_decode(known: Preset) -> Decode:
    work, defaults = known.vae["decode"], known.defaults
    pixels = math.prod(defaults[name] for name in ("height", "width", "frames"))
    return Decode(work["flops"], work["bytes"], work["peak_bytes"], pixels)


def _tokens(known: Preset) -> int:
    prompts = known.guidance["calls_per_step"] * known.guidance["batch_per_call"]
    return int(known.text.get("seq_len", 0)) * int(prompts)


def _built(cls: Any, folder: Path) -> Any:
    """A component without weights."""
    if not issubclass(cls, transformers.PreTrainedModel):
        config = read_json(folder / "config.json")
        return build_weightless(cls, {key: value for key, value in config.items() if not key.startswith("_")})
    try:
        return empty_text_encoder(cls, folder)
    except SplitError:
        raise
    except Exception as error:
        raise ConfigError(f"the {cls.__name__} in {folder} cannot be built from its config: {error}") from error


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
