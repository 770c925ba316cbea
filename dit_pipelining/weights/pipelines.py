"""Load a diffusers pipeline with transformers that have no weights yet."""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from dit_pipelining.errors import CheckpointError, ConfigError, ModelNotFoundError, NotATransformerError
from dit_pipelining.weights.checkpoint import Checkpoint, has_variant, open_checkpoint, variant_in
from dit_pipelining.weights.empty import empty_model
from dit_pipelining.weights.load import check_tensors
from dit_pipelining.weights.quantised import QuantisedTransformer, check_chosen, chosen_for, empty_quantised

TRANSFORMERS = "diffusers.models.transformers."
"""Where diffusers keeps the classes of diffusion transformers."""

NOT_TRANSFORMERS = ("diffusers.models.autoencoders.", "diffusers.models.unets.")
"""Where it keeps models that have lists of blocks and yet are no transformers."""

CONTRADICTING = {
    "device_map": "each rank has its own device, and the transformer's stage lies on it",
    "max_memory": "only what `device_map` places is limited",
    "offload_folder": "nothing is offloaded while loading",
    "offload_state_dict": "nothing is offloaded while loading",
    "low_cpu_mem_usage": "a rank never holds more than its stage",
    "use_safetensors": "a stage is read from safetensors files, and from no others",
    "use_flashpack": "a stage is read from safetensors files, and from no others",
    "disable_mmap": "a stage is read from mapped files",
}
"""Arguments of `from_pretrained` that a split pipeline cannot follow, and why."""

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
"""Arguments of `from_pretrained` that say how to get a hub id's files."""

HARMLESS = (("low_cpu_mem_usage", True), ("use_safetensors", True), ("use_flashpack", False), ("disable_mmap", False))
"""Values of them that ask for what happens anyway."""

DtypeChoice = torch.dtype | Mapping[str, torch.dtype] | None
"""One dtype for all components, or by component name with an optional "default", as diffusers takes it."""


@dataclass(frozen=True)
class EmptyTransformer:
    """A transformer without weights, and where they are.

    Attributes:
        model: on the meta device.
        checkpoint: its weights; of one that the pipeline does not use, the error that reading them gave.
        torch_dtype: of the weights, as asked for.
        quantised: how its quantised tensors are made, if they are.
    """

    model: nn.Module
    checkpoint: Checkpoint | CheckpointError
    torch_dtype: torch.dtype | None
    quantised: QuantisedTransformer | None = None

    def check_tensors(self) -> None:
        """Compare the checkpoint's tensors with the model's; only headers are read.

        Raises:
            CheckpointError: lists what is wrong.
        """
        if isinstance(self.checkpoint, CheckpointError):
            return
        if self.quantised is not None:
            self.quantised.check_tensors(self.model, self.checkpoint)
        else:
            check_tensors(self.model, self.checkpoint)


def pipeline_folder(source: str | Path, **hub: Any) -> Path:
    """The local folder of a pipeline: itself, or a hub id's, downloaded once per machine into the hub's cache.

    Args:
        source: a folder, or a hub id.
        hub: what `download` of a diffusers pipeline takes: `variant`, `revision` and those of `HUB_ARGUMENTS`.

    Raises:
        ModelNotFoundError: it is neither; says what is there.
    """
    folder = Path(source)
    if (folder / "model_index.json").is_file():
        return folder
    if (folder / "modular_model_index.json").is_file():
        raise ModelNotFoundError(
            f"{folder} is a modular pipeline whose components can lie anywhere: load it with ModularPipeline.from_pretrained "
            "and load_components, and split it with parallelize."
        )
    if folder.exists():
        hint = "It is a single model: pass the folder above it." if (folder / "config.json").is_file() else ""
        raise ModelNotFoundError(f"{folder} is no diffusers pipeline: it has no model_index.json. {hint}".strip())
    try:
        # The hub's client locks files while it downloads, so ranks of one machine do not fetch twice.
        return Path(diffusers.DiffusionPipeline.download(str(source), **hub))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"{str(source)!r} is neither a folder nor a hub id that can be reached ({type(error).__name__}: {error}). "
            "Check the path, the network, or `huggingface-cli login`."
        ) from None


def is_transformer(cls: type) -> bool:
    """Whether a class is one of diffusers' diffusion transformers, or derived from one."""
    return any(base.__module__.startswith(TRANSFORMERS) for base in cls.__mro__)


def refuse_other_models(model: Any) -> None:
    """Refuse what somebody could pass in place of a transformer; a model that is not of diffusers may be one.

    Raises:
        NotATransformerError: it is a pipeline, or a VAE or UNet of diffusers.
    """
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    if isinstance(getattr(model, "components", None), dict):
        raise NotATransformerError(
            f"{name} is a whole pipeline. Pass its transformer, for example `pipe.transformer`, or split the pipeline with "
            "load_pipeline or parallelize."
        )
    if any(base.__module__.startswith(NOT_TRANSFORMERS) for base in type(model).__mro__):
        raise NotATransformerError(
            f"{name} is not a diffusion transformer ({type(model).__module__}). Pass the pipeline's transformer, for "
            "example `pipe.transformer`."
        )


def refuse_no_pipeline(pipeline: Any) -> None:
    """Refuse what somebody could pass in place of a pipeline.

    Raises:
        NotATransformerError: it has no components: a model, a path, a class.
    """
    if not isinstance(getattr(pipeline, "components", None), dict):
        kind = f"the class {pipeline.__name__}" if isinstance(pipeline, type) else type(pipeline).__name__
        raise NotATransformerError(
            f"expected a diffusers pipeline, got {kind}. To load one from a folder use load_pipeline, to split a model alone "
            "split_model."
        )


def check_load_arguments(source: object, pipeline_class: object, dtype: object) -> None:
    """Check the types of what a pipeline is loaded from and as.

    Raises:
        ModelNotFoundError: `source` is no path and no hub id.
        ConfigError: `pipeline_class` is no class of pipelines, or `dtype` not one dtype or dtypes by component.
    """
    if not isinstance(source, str | Path):
        raise ModelNotFoundError(f"expected a pipeline's folder or hub id, got {type(source).__name__}.")
    if not (isinstance(pipeline_class, type) and hasattr(pipeline_class, "from_pretrained")):
        raise ConfigError(
            f"pipeline_class={pipeline_class!r}: expected a class, such as diffusers.FluxPipeline. Leave it out for the one "
            "that the folder names."
        )
    given = list(dtype.values()) if isinstance(dtype, Mapping) else [dtype]
    if not all(own is None or isinstance(own, torch.dtype) for own in given):
        raise ConfigError(
            f"dtype={dtype!r}: expected a dtype, such as torch.bfloat16, or dtypes by component, such as "
            '{"transformer": torch.bfloat16, "default": torch.float32}.'
        )


def transformer_classes(index: Mapping[str, Any]) -> dict[str, type]:
    """The classes of a pipeline's diffusion transformers, by component name: what is split.

    Args:
        index: content of the pipeline's model_index.json.

    Raises:
        NotATransformerError: there are none (a UNet pipeline, for example), or a class is not in this diffusers.
    """
    entries = {
        name: entry[1] for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[1]
    }
    classes: dict[str, type] = {}
    for name, class_name in entries.items():
        if index[name][0] == "diffusers":
            cls = diffusers_class(class_name)
            if is_transformer(cls):
                classes[name] = cls
    if not classes:
        listed = ", ".join(f"{name} ({class_name})" for name, class_name in entries.items())
        raise NotATransformerError(
            f"{index.get('_class_name', 'the pipeline')} has no diffusion transformer to split; its components are "
            f"{listed or 'none'}. Only transformers are split, not UNets."
        )
    return classes


def diffusers_class(name: str) -> type:
    """The class of diffusers that has this name.

    Raises:
        NotATransformerError: this diffusers has no such class.
    """
    found = getattr(diffusers, name, None)
    if not isinstance(found, type):
        raise NotATransformerError(
            f"diffusers {diffusers.__version__} has no class {name!r}; install the release that the model was saved with, "
            "or a newer one."
        )
    return found


def refuse_contradicting(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `from_pretrained` that a split pipeline cannot follow.

    Raises:
        ConfigError: names the first of them, and why.
    """
    for name, reason in CONTRADICTING.items():
        if arguments.get(name) is not None and (name, arguments[name]) not in HARMLESS:
            raise ConfigError(
                f"{name}={arguments[name]!r} cannot be followed by a split pipeline: {reason}. Leave it out."
            )


def empty_transformers(
    folder: Path, dtype: DtypeChoice, variant: str | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, EmptyTransformer]:
    """Build every diffusion transformer of a pipeline's folder without weights, by component name.

    Args:
        folder: of the pipeline.
        dtype: of the weights, as `from_pretrained` takes it.
        variant: of the files. As in diffusers it holds for those components that have files of it.
        given: components that are not read from the folder, and other arguments of the pipeline.

    Raises:
        NotATransformerError: the pipeline has none (a UNet pipeline, for example).
        CheckpointError: a transformer's weights are incomplete.
        ModelNotFoundError: model_index.json cannot be read.
    """
    found: dict[str, EmptyTransformer] = {}
    given = given or {}
    index = read_index(folder)
    check_chosen(given.get("quantization_config"), index)
    unused = unused_transformer(given.get("boundary_ratio", index.get("boundary_ratio")))
    if variant and not any(has_variant(path, variant) for path in folder.iterdir() if path.is_dir()):
        raise CheckpointError(f"{folder} has no files of the variant {variant!r}. Leave `variant` out.")
    for name, cls in transformer_classes(index).items():
        if name in given:
            continue
        own = folder / name
        torch_dtype = dtype_of(name, dtype)
        checkpoint: Checkpoint | CheckpointError
        try:
            checkpoint = open_checkpoint(own, variant_in(own, variant))
        except CheckpointError as error:
            if name != unused:
                raise
            checkpoint = error
        config = cls.load_config(own)  # type: ignore[attr-defined]
        chosen = chosen_for(name, given.get("quantization_config"))
        quantised = None
        if chosen is not None or config.get("quantization_config"):
            model, quantised = empty_quantised(cls, own, config, chosen, torch_dtype)
        else:
            model = empty_model(cls, config, torch_dtype)
        model.register_to_config(_name_or_path=str(own))  # type: ignore[operator]
        found[name] = EmptyTransformer(model, checkpoint, torch_dtype, quantised)
    return found


def dtype_of(name: str, dtype: DtypeChoice) -> torch.dtype | None:
    """The dtype chosen for a component's weights."""
    return dtype.get(name, dtype.get("default")) if isinstance(dtype, Mapping) else dtype


def unused_transformer(boundary_ratio: float | None) -> str | None:
    """Which of two transformers such a boundary between them leaves without work: none of its weights are read.

    Wan 2.2 gives timesteps from `boundary_ratio * num_train_timesteps` on to `transformer` and those below to
    `transformer_2`. With 1.0 a scheduler that starts at the very last timestep does call `transformer` once; it is then
    loaded at that call.
    """
    return {0.0: "transformer_2", 1.0: "transformer"}.get(boundary_ratio) if boundary_ratio is not None else None


@contextmanager
def without_components(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """A folder like a pipeline's, whose index leaves some components to the caller.

    `from_pretrained(transformer=...)` is not enough: of components that a pipeline's class lists as optional, as Wan's
    transformers are, diffusers 0.42 loads the checkpoint's own although one was passed.
    """
    index = read_index(folder)
    index.update({name: [None, None] for name in names if isinstance(index.get(name), list)})
    with tempfile.TemporaryDirectory() as made:
        for entry in folder.iterdir():
            if entry.name != "model_index.json":
                (Path(made) / entry.name).symlink_to(entry.resolve())
        (Path(made) / "model_index.json").write_text(json.dumps(index))
        yield Path(made)


def name_sources(pipeline: Any, source: str | Path, folder: Path, loaded_from: Path) -> None:
    """Make a pipeline and its components say that they come from `source`, as plain ones do, not from `loaded_from`."""
    pipeline.register_to_config(_name_or_path=str(source))
    for name, component in pipeline.components.items():
        name_source(component, str(folder / name), str(loaded_from / name))


def name_source(component: Any, own: str, loaded: str) -> None:
    """Make a component that says that it comes from `loaded` say that it comes from `own`."""
    if hasattr(component, "register_to_config"):
        if dict(component.config).get("_name_or_path") == loaded:
            component.register_to_config(_name_or_path=own)
        return
    for part in (getattr(component, "config", None), component):
        for attribute in ("_name_or_path", "name_or_path"):
            if getattr(part, attribute, None) == loaded:
                setattr(part, attribute, own)


def transformers_of(pipeline: Any) -> dict[str, nn.Module]:
    """The diffusion transformers among a pipeline's components, by name.

    Raises:
        NotATransformerError: there are none.
        ConfigError: one is compiled whole.
    """
    refuse_no_pipeline(pipeline)
    components = pipeline.components
    refuse_compiled_whole(components)
    found = {name: component for name, component in components.items() if is_transformer(type(component))}
    if not found:
        raise NotATransformerError(
            f"{type(pipeline).__name__} has no diffusion transformer to split; its components are "
            f"{', '.join(components)}. Only transformers are split, not UNets."
        )
    return found


def refuse_compiled_whole(components: Mapping[str, Any]) -> None:
    """Refuse what `torch.compile` has made of a transformer: it would compile what sends calls to ranks.

    Raises:
        ConfigError: names the component.
    """
    for name, component in components.items():
        if is_transformer(type(getattr(component, "_orig_mod", None))):
            raise ConfigError(
                f"the component {name!r} is wrapped by torch.compile, but the forward runs on several ranks. Leave it as it is "
                f"(pipe.{name} = pipe.{name}._orig_mod), and give ParallelConfig(compile='blocks')."
            )


def read_index(folder: Path) -> dict[str, Any]:
    """The content of a pipeline's model_index.json.

    Raises:
        ModelNotFoundError: it cannot be read.
    """
    path = folder / "model_index.json"
    try:
        index: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ModelNotFoundError(f"{path} is not valid JSON ({error}). Copy it again.") from None
    return index


def silence_loading_bars() -> None:
    """Leave the progress bars of loading to the first rank."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
