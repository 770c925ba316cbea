"""Where each tensor of a diffusers checkpoint lies, and how to read some of them."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dit_pipelining.errors import CheckpointError
from dit_pipelining.sharding.tensor_layers import Shard
from dit_pipelining.weights.staging import staged

WEIGHTS = "diffusion_pytorch_model"


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one model in safetensors files.

    Attributes:
        folder: that holds the files.
        files: file of each tensor, by the tensor's name in the file.
    """

    folder: Path
    files: Mapping[str, Path]

    def names_for(self, model: nn.Module) -> dict[str, str]:
        """Names in the files by the model's own names, old names translated as diffusers does on loading."""
        names: OrderedDict[str, Any] = OrderedDict((name, name) for name in self.files)
        if hasattr(model, "_fix_state_dict_keys_on_load"):
            model._fix_state_dict_keys_on_load(names)  # type: ignore[operator]
        return dict(names)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by its name in the file: from the headers, each file opened once.

        Raises:
            CheckpointError: a file is missing or damaged, or lacks a tensor that the index says it holds.
        """
        found: dict[str, tuple[int, ...]] = {}
        for path, names in self._by_file(self.files).items():
            with _opened(path) as file:
                found.update({name: tuple(file.get_slice(name).get_shape()) for name in names})
        return found

    def read(
        self, names: Iterable[str], device: torch.device, shards: Mapping[str, Shard] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors one after the other to `device`, file by file: to a GPU through pinned memory, on the CPU as views.

        Args:
            names: of the tensors, in the files.
            device: where they go.
            shards: for tensors of which this rank holds a part, which part; nothing else of them is read.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        shards = shards or {}
        for path, wanted in self._by_file(names).items():
            cut = [name for name in wanted if name in shards]
            whole = [name for name in wanted if name not in shards]
            if cut:
                with _opened(path, device) as file:
                    yield from ((name, shards[name].of(file.get_slice(name))) for name in cut)
            if whole:
                with _opened(path) as file:
                    mapped = ((name, file.get_tensor(name)) for name in whole)
                    yield from mapped if device.type == "cpu" else staged(mapped, device)

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        return by_file


def open_checkpoint(folder: str | Path, variant: str | None = None, stem: str = WEIGHTS) -> Checkpoint:
    """Find the tensors in a model's folder: one safetensors file, or several with an index.

    Args:
        folder: of the model itself, for example `wan/transformer`.
        variant: as in diffusers, for example `"fp16"` for `diffusion_pytorch_model.fp16.safetensors`.
        stem: how the files' names begin; the transformers library's with `"model"`.

    Raises:
        CheckpointError: there are no safetensors files, or a file that the index names is missing.
    """
    folder = Path(folder)
    suffix = f".{variant}" if variant else ""
    index = folder / f"{stem}.safetensors.index{suffix}.json"
    if index.is_file():
        return Checkpoint(folder, _files_of_index(folder, index))
    single = folder / f"{stem}{suffix}.safetensors"
    if single.is_file():
        return Checkpoint(folder, _files_of_single(single))
    present = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
    if any(name.endswith(".bin") for name in present):
        raise CheckpointError(
            f"{folder} holds pickled weights only ({', '.join(n for n in present if n.endswith('.bin'))}), of which a "
            "stage cannot read a part. Save the model again with save_pretrained(safe_serialization=True)."
        )
    raise CheckpointError(
        f"no weights in {folder}: expected {single.name} or {index.name}, found {', '.join(present) or 'nothing'}. "
        + ("Leave `variant` out, or name one that is there." if variant else "Check the folder, or pass `variant=`.")
    )


def has_variant(folder: Path, variant: str) -> bool:
    """Whether a component's folder has files of a variant, such as `"fp16"`."""
    return any(True for _ in folder.glob(f"*.{variant}[.-]*"))


def variant_in(folder: Path, variant: str | None) -> str | None:
    """The variant if a component's folder has files of it: as in diffusers, components without take their plain ones."""
    return variant if variant and has_variant(folder, variant) else None


def _files_of_index(folder: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of a sharded checkpoint ({error!r}). Copy it again.") from None
    missing = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} of its files: {', '.join(missing)}. Copy them again.")
    return {name: folder / file for name, file in weight_map.items()}


def _files_of_single(path: Path) -> dict[str, Path]:
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)


@contextmanager
def _opened(path: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. Download or copy the checkpoint again.") from None
