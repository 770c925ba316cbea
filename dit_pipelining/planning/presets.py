"""Presets: what is known about published models, so that a split can be planned without downloading anything.

One JSON file per model lies in the folder `presets`. Numbers that a model card states are marked as published; everything
else was computed from the class, or recorded from the diffusers pipeline at its default size.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dit_pipelining.errors import ModelNotFoundError


@dataclass(frozen=True)
class Preset:
    """One published model.

    Attributes:
        name: of the preset, such as `wan2.2-t2v-a14b`.
        model_class: the transformer's class in diffusers.
        config: arguments of the class that differ from its defaults.
        components: the pipeline's transformers, all of this class and config: Wan 2.2 has `transformer` and `transformer_2`.
        parameters: of one transformer, computed from the class, without buffers.
        published_parameters: of one transformer, as its authors state it, rounded.
        blocks: number of blocks in each of the model's lists.
        keep_in_fp32: parts of parameter names that stay in float32 when the rest is loaded in 16 bits.
        pipeline: the pipeline's class in diffusers.
        hf_repo: id of the model repository.
        vae: `class`, `config` (arguments that differ from the class's defaults), `parameters`, `latent_channels`, pixels
            (`spatial`) and frames (`temporal`) per latent, and what an `encode` and a `decode` at the default size do in 16
            bits, counted on the class: `flops`, `bytes` read and written, and `peak_bytes` of activations.
        text_encoders: `class`, `model` and `parameters` of each.
        text: tokens (`seq_len`) and width (`dim`) of the embedded prompt, and how it is `use`d.
        defaults: `height` and `width` in pixels, `frames`, `steps`, `guidance`, `scheduler`, ... of the pipeline.
        guidance: `mode` is two_calls (two forwards of batch 1 a step), batched (one of batch 2), embedded (guidance is an
            input) or none (distilled), with `calls_per_step` and `batch_per_call`.
        tokens: of the `image`, and text tokens in the same sequence (`joint_text`).
        flops: of one forward with `inputs`, 2 for a multiply-add.
        inputs: keyword arguments of one forward at the default size, batch 1, as recorded from the pipeline and described
            as `planning.inputs` builds them.
        expand_timesteps: whether every token has a timestep of its own.
        sources: where `config`, `parameters`, `defaults` and `inputs` come from.
        notes: what else to know.
    """

    name: str
    model_class: str
    config: Mapping[str, Any]
    components: tuple[str, ...]
    parameters: int
    published_parameters: int
    blocks: Mapping[str, int]
    keep_in_fp32: tuple[str, ...]
    pipeline: str
    hf_repo: str
    vae: Mapping[str, Any]
    text_encoders: tuple[Mapping[str, Any], ...]
    text: Mapping[str, Any]
    defaults: Mapping[str, Any]
    guidance: Mapping[str, Any]
    tokens: Mapping[str, int]
    flops: int
    inputs: Mapping[str, Any]
    sources: Mapping[str, str]
    expand_timesteps: bool = False
    notes: tuple[str, ...] = ()


@cache
def preset_names() -> tuple[str, ...]:
    """Names of all presets, in alphabetical order."""
    files = (file.name for file in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def preset(name: str) -> Preset:
    """The preset of this name; capitals do not matter, and the id of its model repository will do.

    Raises:
        ModelNotFoundError: there is none; names those that are written alike.
    """
    key = name.lower()
    if key not in preset_names():
        key = next((known for known in preset_names() if _load(known).hf_repo.lower() == key), "")
    if not key:
        raise ModelNotFoundError(f"there is no preset {name!r}; {near_matches(name)}.")
    return _load(key)


def presets_of(model_class: str) -> list[Preset]:
    """All presets whose transformer is of this class."""
    return [found for found in map(_load, preset_names()) if found.model_class == model_class]


def near_matches(name: str) -> str:
    """Half a sentence that says which presets are meant, perhaps."""
    near = _alike(name, preset_names())
    known = "`dit-pipelining show --list` shows all presets"
    return f"did you mean {' or '.join(near)}? {known}" if near else known


def refuse_preset(source: str | Path) -> None:
    """Refuse a preset's name where weights are asked for; a folder of that name is none.

    Raises:
        ModelNotFoundError: it is one; says where its weights are.
    """
    name = str(source).lower()
    if name in preset_names() and not Path(source).exists():
        raise ModelNotFoundError(
            f"{str(source)!r} is a preset: a description for `dit-pipelining show`, without weights. Its weights are published "
            f"as {_load(name).hf_repo!r}; give that id, or the folder that they have been downloaded to."
        )


def published_like(source: str | Path) -> str:
    """A question that names the hub ids of presets that are meant, perhaps; empty if there are none."""
    by_id = {_load(name).hf_repo.lower(): _load(name).hf_repo for name in preset_names()}
    near = [_load(name).hf_repo for name in _alike(str(source), preset_names())]
    near = [by_id[key] for key in _alike(str(source), list(by_id))] or near
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _alike(name: str, known: Sequence[str]) -> list[str]:
    """Up to three names that are written like this one, or else hold it."""
    key = name.lower()
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    return near or [other for other in known if key and key in other][:3]


@cache
def _load(name: str) -> Preset:
    facts = json.loads(_folder().joinpath(f"{name}.json").read_text(encoding="utf-8"))
    parameters = facts.pop("parameters")
    return Preset(
        name=name,
        model_class=facts.pop("class"),
        parameters=parameters["computed"],
        published_parameters=parameters["published"],
        components=tuple(facts.pop("components")),
        keep_in_fp32=tuple(facts.pop("keep_in_fp32")),
        text_encoders=tuple(facts.pop("text_encoders")),
        notes=tuple(facts.pop("notes", ())),
        **facts,
    )


def _folder() -> Any:
    return resources.files("dit_pipelining.planning").joinpath("presets")
