"""Load a diffusers pipeline with transformers that have no weights yet."""

import importlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from dit_pipelining.errors import ModelNotFoundError, NotATransformerError
from dit_pipelining.weights.checkpoint import Checkpoint, open_checkpoint
from dit_pipelining.weights.empty import empty_model

TRANSFORMERS = "diffusers.models.transformers"
"""Where diffusers keeps the classes of diffusion transformers."""

DtypeChoice = torch.dtype | Mapping[str, torch.dtype] | None
"""One dtype for all components, or by component name with an optional "default", as diffusers takes it."""


@dataclass(frozen=True)
class EmptyTransformer:
    """A transformer without weights, and where they are."""

    model: nn.Module
    checkpoint: Checkpoint
    torch_dtype: torch.dtype | None


def pipeline_folder(source: str | Path, *, variant: str | None = None, revision: str | None = None) -> Path:
    """The local folder of a pipeline: itself, or a hub id's, downloaded once per machine into the hub's cache.

    Raises:
        ModelNotFoundError: it is neither; says what is there.
    """
    folder = Path(source)
    if (folder / "model_index.json").is_file():
        return folder
    if folder.exists():
        hint = "It is a single model: pass the folder above it." if (folder / "config.json").is_file() else ""
        raise ModelNotFoundError(f"{folder} is no diffusers pipeline: it has no model_index.json. {hint}".strip())
    try:
        # The hub's client locks files while it downloads, so ranks of one machine do not fetch twice.
        return Path(diffusers.DiffusionPipeline.download(str(source), variant=variant, revision=revision))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"{str(source)!r} is neither a folder nor a hub id that can be reached ({type(error).__name__}: {error}). "
            "Check the path, the network, or `huggingface-cli login`."
        ) from error


def empty_transformers(folder: Path, dtype: DtypeChoice, variant: str | None = None) -> dict[str, EmptyTransformer]:
    """Build every diffusion transformer of a pipeline's folder without weights, by component name.

    Raises:
        NotATransformerError: the pipeline has none (a UNet pipeline, for example).
        CheckpointError: a transformer's weights are incomplete.
        ModelNotFoundError: model_index.json cannot be read.
    """
    found: dict[str, EmptyTransformer] = {}
    index = _read_index(folder / "model_index.json")
    for name, cls in _component_classes(index).items():
        if not cls.__module__.startswith(TRANSFORMERS):
            continue
        torch_dtype = dtype.get(name, dtype.get("default")) if isinstance(dtype, Mapping) else dtype
        checkpoint = open_checkpoint(folder / name, variant)
        config = cls.load_config(folder / name)  # type: ignore[attr-defined]
        found[name] = EmptyTransformer(empty_model(cls, config, torch_dtype), checkpoint, torch_dtype)
    if not found:
        raise NotATransformerError(
            f"{index.get('_class_name', folder)} has no diffusion transformer to split; its components are "
            f"{', '.join(name for name in index if not name.startswith('_'))}. Only transformers are split, not UNets."
        )
    return found


@contextmanager
def without_components(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """A folder like a pipeline's, whose index leaves some components to the caller.

    `from_pretrained(transformer=...)` is not enough: of components that a pipeline's class lists as optional, as Wan's
    transformers are, diffusers 0.42 loads the checkpoint's own although one was passed.
    """
    index = _read_index(folder / "model_index.json")
    index.update({name: [None, None] for name in names})
    with tempfile.TemporaryDirectory() as made:
        for entry in folder.iterdir():
            if entry.name != "model_index.json":
                (Path(made) / entry.name).symlink_to(entry.resolve())
        (Path(made) / "model_index.json").write_text(json.dumps(index))
        yield Path(made)


def transformers_of(pipeline: Any) -> dict[str, nn.Module]:
    """The diffusion transformers among a pipeline's components, by name.

    Raises:
        NotATransformerError: there are none.
    """
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        kind = pipeline.__name__ if isinstance(pipeline, type) else type(pipeline).__name__
        raise NotATransformerError(
            f"expected a diffusers pipeline, got {kind}. To split a model alone use split_model."
        )
    found = {
        n: c for n, c in components.items() if isinstance(c, nn.Module) and type(c).__module__.startswith(TRANSFORMERS)
    }
    if not found:
        raise NotATransformerError(
            f"{type(pipeline).__name__} has no diffusion transformer to split; its components are "
            f"{', '.join(components)}. Only transformers are split, not UNets."
        )
    return found


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ModelNotFoundError(f"{path} is not valid JSON ({error}). Copy it again.") from error
    return index


def _component_classes(index: Mapping[str, Any]) -> dict[str, type]:
    """Classes of the components that diffusers itself provides."""
    classes: dict[str, type] = {}
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == "diffusers" and entry[1]:
            cls = getattr(importlib.import_module("diffusers"), entry[1], None)
            if isinstance(cls, type):
                classes[name] = cls
    return classes
