"""Load a pipeline from its folder, whole or with each rank's part of it only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.comm.launch import Launch, launched_rank
from dit_pipelining.comm.layout import CALLERS
from dit_pipelining.comm.mesh import Mesh, layout_of, line_group, new_group
from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import ConfigError, NotATransformerError
from dit_pipelining.runtime.checks import check_cuts, check_splits
from dit_pipelining.runtime.filling import from_checkpoint, from_memory
from dit_pipelining.runtime.owned import text_parts
from dit_pipelining.runtime.parallel import cut_over_ranks, kept_whole, spread
from dit_pipelining.runtime.placing import Places, choose_places, plan_with
from dit_pipelining.runtime.whole import check_whole, says_something
from dit_pipelining.sharding.teams import make_team_groups
from dit_pipelining.weights.components import (
    component_class,
    components_in_folder,
    components_in_memory,
    load_on_owners,
)
from dit_pipelining.weights.modular import load_modular
from dit_pipelining.weights.pipelines import (
    HUB_ARGUMENTS,
    DtypeChoice,
    EmptyTransformer,
    empty_transformers,
    is_transformer,
    name_sources,
    pipeline_folder,
    read_index,
    refuse_contradicting,
    silence_loading_bars,
    without_components,
)
from dit_pipelining.weights.quantised import chosen_among
from dit_pipelining.weights.single_files import with_files_opened
from dit_pipelining.weights.text_encoders import cut_in_memory, empty_text_encoder, load_parts

Check = Callable[[ParallelConfig, Mapping[str, nn.Module]], None]


@dataclass(frozen=True)
class PipelineFiles:
    """A pipeline on disk, and how it is to be loaded.

    Attributes:
        source: its folder or hub id, as the caller gave it.
        folder: where it lies.
        cls: the pipeline class, or a modular one.
        dtype, variant: as `from_pretrained` takes them.
        given: what else it takes: components, and values of the pipeline's configuration.
    """

    source: str | Path
    folder: Path
    cls: Any
    dtype: DtypeChoice
    variant: str | None
    given: Mapping[str, Any]

    @property
    def is_modular(self) -> bool:
        """Whether the class is one of diffusers' modular pipelines."""
        return issubclass(self.cls, diffusers.ModularPipeline)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`."""
        return {"dtype": self.dtype, "variant": self.variant, **self.given}

    @property
    def quantisation(self) -> Any:
        """The `quantization_config` that is asked for."""
        return self.given.get("quantization_config")


def find_pipeline(
    source: str | Path,
    pipeline_class: type,
    dtype: DtypeChoice,
    variant: str | None,
    revision: str | None,
    arguments: Mapping[str, Any],
) -> PipelineFiles:
    """Find a pipeline's folder, and open what is given as a file; `arguments` are those left of `from_pretrained`.

    Raises:
        ModelNotFoundError: there is no pipeline.
        ConfigError: a modular pipeline is to be quantised.
    """
    if launched_rank() != 0:
        silence_loading_bars()
    hub = {name: arguments[name] for name in HUB_ARGUMENTS if name in arguments}
    given = {name: value for name, value in arguments.items() if name not in hub}
    folder = pipeline_folder(source, variant=variant, revision=revision, **hub)
    given = with_files_opened(folder, given, dtype)
    files = PipelineFiles(source, folder, pipeline_class, dtype, variant, given)
    if files.is_modular and files.quantisation is not None:
        raise ConfigError(
            "quantization_config is for plain pipelines; a modular one takes it in load_components: split it with parallelize."
        )
    return files


@dataclass(frozen=True)
class _Outlook:
    """What is known of a pipeline before anything of it is loaded.

    Attributes:
        empty: the transformers of the folder, without weights.
        passed: those that the caller gave.
        models: all of them.
        index: content of model_index.json.
        places: of the components beside them.
    """

    empty: Mapping[str, EmptyTransformer]
    passed: Mapping[str, nn.Module]
    models: Mapping[str, nn.Module]
    index: Mapping[str, Any]
    places: Places


def _look_at(files: PipelineFiles, config: ParallelConfig, check: Check) -> _Outlook:
    """Check what a configuration says of a pipeline, before anything of it is loaded; `check` what it says of transformers."""
    passed = {name: value for name, value in files.given.items() if is_transformer(type(value))}
    empty = empty_transformers(files.folder, files.dtype, files.variant, given=files.given)
    models: dict[str, nn.Module] = {name: transformer.model for name, transformer in empty.items()} | passed
    if not models:
        named = ", ".join(f"{name}={type(value).__name__}" for name, value in files.given.items())
        raise NotATransformerError(f"{named}: no diffusion transformer is left to split. Leave the transformer out.")
    check(config, models)
    index = read_index(files.folder)
    on_disk = components_in_folder(files.folder, index, given=files.given)

    def encoder(name: str) -> Any:
        if name in files.given:
            return files.given[name]
        cls = component_class(*index[name])
        return empty_text_encoder(cls, files.folder / name, chosen_among([name], files.quantisation))

    sizes = {**on_disk, **components_in_memory(files.given)}
    return _Outlook(
        empty, passed, models, index, choose_places(config, sizes, models, plan_with(encoder), text_parts(files.given))
    )


def load_whole(files: PipelineFiles, config: ParallelConfig, launch: Launch) -> Any:
    """The plain pipeline, on this process's device."""
    if is_checked := says_something(config):
        _look_at(files, config, check_cuts)
    if files.is_modular:
        pipeline = load_modular(files.cls, files.folder, files.dtype, files.variant, files.given)
    else:
        pipeline = files.cls.from_pretrained(files.folder, **files.options)
        pipeline.register_to_config(_name_or_path=str(files.source))
    if is_checked:
        check_whole(pipeline, config)
    return pipeline.to(launch.join())


def load_split(files: PipelineFiles, config: ParallelConfig, launch: Launch) -> Any:
    """The pipeline with its transformers and components spread over the ranks."""
    refuse_contradicting(files.given)
    outlook = _look_at(files, config, check_splits)
    for transformer in outlook.empty.values():
        transformer.check_tensors()
    models, places = outlook.models, outlook.places
    device = launch.join()
    mesh = Mesh.of(layout_of(config), dist.get_rank())
    components = _load_components(files, outlook.index, places, mesh, device, launch.timeout)
    pipeline = _load_rest(files, outlook.index, {**models, **components})
    whole = kept_whole(models, config)
    shards = cut_over_ranks(models, config, device)
    fill = {name: from_memory(model, device) for name, model in outlook.passed.items()}
    fill |= {name: from_checkpoint(transformer, device, shards[name]) for name, transformer in outlook.empty.items()}
    spread(pipeline, models, whole, fill, places, config, device, launch.guard)
    return pipeline


def _load_components(
    files: PipelineFiles,
    index: Mapping[str, Any],
    places: Places,
    mesh: Mesh,
    device: torch.device,
    timeout: timedelta,
) -> dict[str, nn.Module]:
    """The components of the folder that do not lie on every rank: this rank's own, and the others' without weights."""
    owners, teams, texts = places.owners, places.teams, places.texts
    on_disk = [name for name in owners if name not in files.given]
    stored = {name: mesh.line[owners[name]] for name in on_disk if name not in texts}
    helpers = {name: team.compute for name, team in teams.items() if name not in texts}
    loaded = load_on_owners(files.folder, index, stored, helpers, files.options, line_group(mesh, timeout))
    if texts:
        groups = make_team_groups({name: teams[name] for name in texts}, mesh.layout, device, timeout)
        in_files = {name: (component_class(*index[name]), texts[name]) for name in on_disk if name in texts}
        callers = new_group(mesh.layout.groups(*CALLERS), timeout)
        loaded |= load_parts(files.folder, in_files, teams, groups, files.options, callers)
        cut_in_memory({name: files.given[name] for name in texts if name in files.given}, texts, groups)
    return loaded


def _load_rest(files: PipelineFiles, index: Mapping[str, Any], ready: Mapping[str, nn.Module]) -> Any:
    """The pipeline around components that are ready; diffusers loads all others, on every rank."""
    if files.is_modular:
        return load_modular(files.cls, files.folder, files.dtype, files.variant, {**files.given, **ready})
    there = {**files.options, **ready}
    there["quantization_config"] = chosen_among(index.keys() - there.keys(), files.quantisation)
    with without_components(files.folder, [*files.given, *ready]) as rest:
        pipeline = files.cls.from_pretrained(rest, **there)
        name_sources(pipeline, files.source, files.folder, loaded_from=rest)
    if files.quantisation is not None:
        pipeline.quantization_config = files.quantisation
    return pipeline
