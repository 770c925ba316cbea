"""Load each component that is not split on the rank that owns it, and give the others an empty copy."""

import inspect
import json
import tempfile
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch.distributed as dist
import transformers
from torch import nn

from dit_pipelining.comm.packing import pack, tensor_in, unpack
from dit_pipelining.errors import SplitError
from dit_pipelining.sharding.text_plans import is_text_encoder
from dit_pipelining.sharding.tile_ranks import can_spread
from dit_pipelining.weights.checkpoint import has_variant
from dit_pipelining.weights.load import release_weights
from dit_pipelining.weights.pipelines import name_source
from dit_pipelining.weights.placement import ComponentSize, kind_of
from dit_pipelining.weights.quantised import chosen_among

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.ckpt")


def components_in_folder(
    folder: Path, index: Mapping[str, Any], given: Container[str] = ()
) -> dict[str, ComponentSize]:
    """The components of a pipeline's folder that go to one rank, with the bytes of their files.

    Args:
        folder: of the pipeline.
        index: content of its model_index.json.
        given: names of components that are not read from the folder.
    """
    found = {}
    for name, entry in index.items():
        if not isinstance(entry, list) or len(entry) != 2 or name in given:
            continue
        cls = component_class(*entry)
        kind = kind_of(cls) if cls is not None else None
        if cls is not None and kind is not None:
            files = [file for pattern in WEIGHT_FILES for file in (folder / name).glob(pattern)]
            size = sum(file.stat().st_size for file in files)
            found[name] = ComponentSize(kind, size, can_spread(cls), is_text_encoder(cls))
    return found


def components_in_memory(components: Mapping[str, Any]) -> dict[str, ComponentSize]:
    """The components among these objects that go to one rank, with the bytes of their parameters."""
    found = {}
    for name, component in components.items():
        kind = kind_of(type(component)) if isinstance(component, nn.Module) else None
        if kind is not None:
            size = sum(p.numel() * p.itemsize for p in component.parameters())
            cls = type(component)
            found[name] = ComponentSize(kind, size, can_spread(cls), is_text_encoder(cls))
    return found


def load_on_owners(
    folder: Path,
    index: Mapping[str, Any],
    owners: Mapping[str, int],
    helpers: Mapping[str, Collection[int]],
    options: Mapping[str, Any],
    group: dist.ProcessGroup,
) -> dict[str, nn.Module]:
    """Load this rank's components, and get the others' without weights; all ranks of the group call this.

    An empty copy is what its owner loaded: class, configuration, dtypes, attributes and buffers (which pipelines read:
    the statistics of FLUX.2's VAE, for example), but its parameters are on the meta device. Files of other ranks'
    components are not opened.

    Args:
        folder: of the pipeline.
        index: content of its model_index.json.
        owners: rank of each component, by name; a rank of the launch.
        helpers: other ranks that load it too, by name of the component.
        options: `dtype`, `variant` and `quantization_config`, as `from_pretrained` takes them.
        group: of the ranks that run the pipeline together, over gloo.

    Raises:
        Exception: what loading raised, on every rank.
    """
    rank = dist.get_rank()
    mine = [name for name, owner in owners.items() if rank in (owner, *helpers.get(name, ()))]
    loading = {*owners.values(), *(helper for name in owners for helper in helpers.get(name, ()))}
    return load_and_describe(lambda: _load(folder, index, mine, options) if mine else {}, owners, loading, group)


def load_and_describe(
    load: Callable[[], dict[str, nn.Module]],
    owners: Mapping[str, int],
    loading: Collection[int],
    group: dist.ProcessGroup,
) -> dict[str, nn.Module]:
    """Load what this rank has, and get what others have without weights; all ranks of the group call this.

    Args:
        load: gives this rank's components by name.
        owners: for each component, the rank that describes it to the others.
        loading: all ranks that load any.
        group: of these and of those that get descriptions, over gloo.

    Raises:
        Exception: what loading raised, on every rank.
    """
    rank = dist.get_rank()
    loaded: dict[str, nn.Module] = {}
    packed: dict[str, Any] = {}
    error: Exception | None = None
    try:
        loaded = load()
        packed = {name: _packed(name, part) for name, part in loaded.items() if owners[name] == rank}
    except Exception as raised:
        error = raised
    found = dict(loaded)
    inside = dist.get_process_group_ranks(group)
    for source in sorted(set(loading).intersection(inside)):
        box: list[Any] = [_failed(error) or packed] if source == rank else [None]
        dist.broadcast_object_list(box, src=source, group=group)
        if isinstance(box[0], SplitError):
            raise error or box[0]
        others = {name: own for name, own in box[0].items() if name not in loaded}
        found |= {name: unpack(header, tensor_in(flats)) for name, (header, flats) in others.items()}
    return {name: found[name] for name in owners}


def drop_weights(module: nn.Module) -> None:
    """Leave a module's parameters without data; configuration, dtypes, attributes and buffers stay."""
    release_weights(module, ())


def _packed(name: str, component: nn.Module) -> Any:
    try:
        return pack(component, weights=False)
    except Exception as error:
        raise SplitError(
            f"the component {name!r} ({type(component).__name__}) cannot be described to the other ranks: {error}. Keep it on "
            f'every rank: ParallelConfig(component_ranks={{"{name}": "all"}}).'
        ) from error


def _failed(error: Exception | None) -> SplitError | None:
    """The error as it can travel: some cannot be pickled."""
    return None if error is None else SplitError(f"{type(error).__name__} on rank {dist.get_rank()}: {error}")


def _load(
    folder: Path, index: Mapping[str, Any], names: Sequence[str], options: Mapping[str, Any]
) -> dict[str, nn.Module]:
    """Some components as diffusers' `from_pretrained` loads them: through a pipeline that has no others."""
    variant = options.get("variant")
    if variant is not None and not any(has_variant(folder / name, variant) for name in names):
        options = {**options, "variant": None}
    own = {key: value for key, value in options.items() if key not in index}  # all else is for the whole pipeline
    own["quantization_config"] = chosen_among(names, options.get("quantization_config"))
    with tempfile.TemporaryDirectory() as made:
        for name in names:
            (Path(made) / name).symlink_to((folder / name).resolve())
        parts = {name: index[name] for name in names}
        (Path(made) / "model_index.json").write_text(json.dumps({"_class_name": "Parts", **parts}))
        pipeline = _pipeline_of(names).from_pretrained(made, **own)
        components: dict[str, nn.Module] = dict(pipeline.components)
        for name, component in components.items():
            name_source(component, str(folder / name), str(Path(made) / name))
    return components


def _pipeline_of(names: Sequence[str]) -> Any:
    """A pipeline class with just these components."""

    def init(self: Any, **components: Any) -> None:
        diffusers.DiffusionPipeline.__init__(self)
        self.register_modules(**components)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("self", *names)]
    parameters[0] = parameters[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    init.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type("Parts", (diffusers.DiffusionPipeline,), {"__init__": init})


def component_class(library: str | None, name: str | None) -> type | None:
    """The class a model_index.json names, if it is one of diffusers, transformers, or of one of diffusers' pipelines."""
    if library is None or name is None:
        return None
    homes = {"diffusers": diffusers, "transformers": transformers}
    home = homes.get(library) or getattr(diffusers.pipelines, library, None)
    found = getattr(home, name, None)
    return found if isinstance(found, type) else None
