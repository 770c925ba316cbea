"""The front door: split a model, load or parallelise a pipeline, generate."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch.distributed as dist
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.casting import refuse_cutting_casts
from dit_pipelining.capture.graph import CaptureCache
from dit_pipelining.capture.hooks import refuse_hooks
from dit_pipelining.capture.signature import bind
from dit_pipelining.capture.step_caches import keeps_steps
from dit_pipelining.comm.launch import Launch, launched_rank
from dit_pipelining.comm.layout import CALLERS
from dit_pipelining.comm.mesh import Mesh, layout_of, line_group, new_group
from dit_pipelining.comm.processes import launch
from dit_pipelining.config import ParallelConfig
from dit_pipelining.config_checks import check_partitioner, check_positive, early_counts_check
from dit_pipelining.config_sources import load_config
from dit_pipelining.costs.by_weight import owners_by_weight
from dit_pipelining.costs.machine import RankChoice, machine
from dit_pipelining.costs.plan import plan_cut
from dit_pipelining.costs.timing import TimingChoice
from dit_pipelining.errors import ConfigError, InputError, NotATransformerError
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.attach import adopt, rolling_of
from dit_pipelining.runtime.executor import check_counts
from dit_pipelining.runtime.parallel import cut_over_ranks, from_checkpoint, from_memory, spread
from dit_pipelining.runtime.requests import OnOutput, run_requests
from dit_pipelining.runtime.serving import RequestQueue
from dit_pipelining.runtime.step_states import check_can_keep
from dit_pipelining.sharding.sequence import check_sequence_parallel
from dit_pipelining.sharding.teams import Team, make_team_groups, team_of
from dit_pipelining.sharding.tensor import check_tensor_parallel
from dit_pipelining.sharding.text_encoder import check_text_encoder
from dit_pipelining.sharding.text_plans import TextPlan
from dit_pipelining.stream.session import VideoStream
from dit_pipelining.stream.spec import StreamSpec
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
    empty_transformers,
    is_transformer,
    name_sources,
    pipeline_folder,
    read_index,
    refuse_contradicting,
    refuse_other_models,
    silence_loading_bars,
    transformers_of,
    without_components,
)
from dit_pipelining.weights.placement import ComponentSize, place_components
from dit_pipelining.weights.quantised import chosen_among, refuse_cutting_quantised
from dit_pipelining.weights.single_files import with_files_opened
from dit_pipelining.weights.text_encoders import cut_in_memory, empty_text_encoder, load_parts
from partitioners import Component, Partitioner

__all__ = [
    "ParallelConfig",
    "SplitModel",
    "StreamSpec",
    "VideoStream",
    "generate",
    "launch",
    "load_config",
    "load_pipeline",
    "open_stream",
    "parallelize",
    "serve",
    "split_model",
]


def split_model(
    model: nn.Module,
    num_stages: int,
    example_inputs: Mapping[str, Any],
    *,
    partitioner: str | Partitioner = "balanced",
    counts: Sequence[int] | str | None = None,
    ranks: RankChoice | None = None,
    profile: TimingChoice | None = None,
    topology: str = "auto",
    components: Sequence[Component] = (),
    blocks: Sequence[str] | None = None,
) -> SplitModel:
    """Cut a diffusion transformer into pipeline stages at block boundaries.

    Args:
        model: a transformer with weights, or without (parameters on the meta device).
        num_stages: number of stages.
        example_inputs: keyword arguments of one call of the model's forward (one microbatch). Values matter only where the
            forward looks at them (masks, lengths).
        partitioner: `"balanced"`, `"vae-aware"`, `"uniform"` or a function `(costs, ranks) -> Partition`. The environment
            variable VLLM_PP_LAYER_PARTITION beats it.
        counts: blocks per stage, for example `[8, 12, 12, 8]` or `"8,12,12,8"`; beats the variable.
        ranks: the rank of each stage: devices or memory, such as `"rtx4090,rtx3090"` or `"24GB*2,16GB"` (see
            `costs.machine`), or RankSpecs. Default: equal ranks without limits.
        profile: what seconds per block are taken from: a file of `dit-pipelining profile`, or a device such as `"h200"`.
            Default: FLOPs, or the first device of `ranks`.
        topology: the links between devices: `"auto"`, `"nvlink"`, `"pcie"` or `"ethernet"`.
        components: text encoders and VAE, which take memory and time of the rank that holds them; `"vae-aware"` chooses it.
        blocks: names of the model's blocks or block lists. Default: found by `find_blocks`.

    Returns:
        the stages, what crosses between them, and a callable that runs them all in this process.

    Raises:
        NotATransformerError, BlocksNotFoundError: there is nothing to cut.
        ConfigError: `num_stages` is no positive integer, there is no such partitioner or profile, or `ranks` is not one per
            stage.
        InputError: the example inputs do not fit the forward.
        CaptureError: the forward's glue cannot be recorded; names the line.
        PartitionError: the counts or the number of stages do not fit the model.
    """
    refuse_other_models(model)
    find_blocks(model, blocks)
    refuse_hooks(model)
    check_positive("num_stages", num_stages)
    check_partitioner(partitioner)
    early_counts_check(counts, num_stages)
    if not isinstance(example_inputs, Mapping):
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}; give the keyword arguments of one call as a dict."
        )
    target = machine(num_stages, ranks, profile, topology)
    captures = CaptureCache(model, blocks, model.forward, count_work=True)
    graph = captures.get(bind(model.forward, (), example_inputs))
    cut = plan_cut(graph, model, target, partitioner, counts, components)
    return SplitModel(model, captures, graph, cut.partition, cut=cut)


def load_pipeline(
    source: str | Path,
    config: ParallelConfig | None = None,
    *,
    pipeline_class: type = diffusers.DiffusionPipeline,
    dtype: DtypeChoice = None,
    torch_dtype: DtypeChoice = None,
    variant: str | None = None,
    revision: str | None = None,
    **components: Any,
) -> Any:
    """Load a diffusers pipeline whose transformers are split over the ranks of this launch.

    Every rank makes the same calls and gets the same results. A rank reads only the weights of its own stage, at the
    first call of the pipeline, since where to cut depends on the shapes. Text encoders, image encoders and VAEs are loaded
    on one rank each, which runs them for all; of text encoders that are split, several ranks read a part each.

    Args:
        source: a pipeline's folder, or a hub id.
        config: how many stages, and how to cut. Default: one process, which is the plain diffusers pipeline.
        pipeline_class: a diffusers pipeline class. Default: the one the folder names. With `diffusers.ModularPipeline`, or a
            class of that kind, the modular pipeline that belongs to it.
        dtype: of the weights, as in `from_pretrained`: one dtype, or by component.
        torch_dtype: diffusers' older name of `dtype`.
        variant: as in `from_pretrained`, for example `"fp16"`.
        revision: of a hub id.
        components: passed on to `from_pretrained`, for example `vae=...`, or `cache_dir=...` for a hub id. A transformer
            that is passed, with its weights and the same on every rank, is split as `parallelize` does it; one that is the
            path of a GGUF file is read from there by each rank as far as its stage goes. With
            `quantization_config=PipelineQuantizationConfig(...)` each rank quantises its own stage.

    Returns:
        the diffusers pipeline, on this rank's device.

    Raises:
        WorldSizeError: the launch has another number of processes than the configuration.
        ConfigError: an argument contradicts the split (`device_map`), or the configuration names components that are not
            there.
        ModelNotFoundError, CheckpointError, NotATransformerError: there is nothing to load or to split.
        PartitionError: more stages than blocks, or a partition that cannot be.
        RemoteRankError: loading failed on another rank, or a rank did not arrive within `timeout_seconds`; names it.
    """
    config = config or ParallelConfig()
    if dtype is not None and torch_dtype is not None:
        raise ConfigError(
            f"dtype={dtype} and torch_dtype={torch_dtype} are two names of one argument; give one of them."
        )
    dtype = torch_dtype if dtype is None else dtype
    with Launch(config) as launch:
        return _load(launch, source, config, pipeline_class, dtype, variant, revision, components)


def _load(
    launch: Launch,
    source: str | Path,
    config: ParallelConfig,
    pipeline_class: type,
    dtype: DtypeChoice,
    variant: str | None,
    revision: str | None,
    components: Mapping[str, Any],
) -> Any:
    if launched_rank() != 0:
        silence_loading_bars()
    hub = {name: components[name] for name in HUB_ARGUMENTS if name in components}
    components = {name: value for name, value in components.items() if name not in hub}
    folder = pipeline_folder(source, variant=variant, revision=revision, **hub)
    components = with_files_opened(folder, components, dtype)
    options = {"dtype": dtype, "variant": variant, **components}
    is_modular = issubclass(pipeline_class, diffusers.ModularPipeline)
    if is_modular and components.get("quantization_config") is not None:
        raise ConfigError(
            "quantization_config is for plain pipelines; a modular one takes it in load_components: split it with parallelize."
        )
    if config.world_size == 1:
        if is_modular:
            return load_modular(pipeline_class, folder, dtype, variant, components).to(launch.join())
        pipeline = pipeline_class.from_pretrained(folder, **options).to(launch.join())  # type: ignore[attr-defined]
        pipeline.register_to_config(_name_or_path=str(source))
        config.check_components(name for name, part in pipeline.components.items() if is_transformer(type(part)))
        return pipeline
    refuse_contradicting(components)
    given = {name: value for name, value in components.items() if is_transformer(type(value))}
    empty = empty_transformers(folder, dtype, variant, given=components)
    for transformer in empty.values():
        transformer.check_tensors()
    models = {**{name: transformer.model for name, transformer in empty.items()}, **given}
    if not models:
        passed = ", ".join(f"{name}={type(value).__name__}" for name, value in components.items())
        raise NotATransformerError(f"{passed}: no diffusion transformer is left to split. Leave the transformer out.")
    _check_splits(config, models)
    index = read_index(folder)
    on_disk = components_in_folder(folder, index, given=components)
    sizes = {**on_disk, **components_in_memory(components)}
    quantised = components.get("quantization_config")

    def text_encoder(name: str) -> Any:
        if name in components:
            return components[name]
        return empty_text_encoder(component_class(*index[name]), folder / name, chosen_among([name], quantised))

    texts = _text_plans(config, sizes, text_encoder)
    sizes = _with_parts(config, sizes, texts)
    owners = _owners(config, sizes, models)
    teams = _teams(config, sizes, owners)
    device = launch.join()
    mesh = Mesh.of(layout_of(config), dist.get_rank())
    stored = {name: mesh.line[owners[name]] for name in on_disk if name in owners and name not in texts}
    helpers = {name: own.compute for name, own in teams.items() if name not in texts}
    timeout = timedelta(seconds=config.timeout_seconds)
    loaded = load_on_owners(folder, index, stored, helpers, options, line_group(mesh, timeout))
    if texts:
        groups = make_team_groups({name: teams[name] for name in texts}, mesh.layout, device, timeout)
        in_files = {name: (component_class(*index[name]), plan) for name, plan in texts.items() if name in on_disk}
        callers = new_group(mesh.layout.groups(*CALLERS), timeout)
        loaded |= load_parts(folder, in_files, teams, groups, options, callers)
        cut_in_memory({name: components[name] for name in texts if name in components}, texts, groups)
    if is_modular:
        pipeline = load_modular(pipeline_class, folder, dtype, variant, {**components, **models, **loaded})
    else:
        there = {**options, **models, **loaded}
        chosen = options.pop("quantization_config", None)
        there["quantization_config"] = chosen_among(index.keys() - there.keys(), chosen)
        with without_components(folder, [*models, *components, *loaded]) as rest:
            pipeline = pipeline_class.from_pretrained(rest, **there)  # type: ignore[attr-defined]
            name_sources(pipeline, source, folder, loaded_from=rest)
        if chosen is not None:
            pipeline.quantization_config = chosen
    shards = cut_over_ranks(models, config, device)
    fill = {name: from_memory(model, device) for name, model in given.items()}
    fill |= {name: from_checkpoint(transformer, device, shards[name]) for name, transformer in empty.items()}
    spread(pipeline, models, fill, owners, teams, texts, config, device, launch.guard)
    return pipeline


def parallelize(pipeline: Any, config: ParallelConfig) -> Any:
    """Split the transformers of a pipeline that is in memory over the ranks of this launch.

    Each rank keeps its stage's weights, at the first call of the pipeline, and drops the others; of text encoders, image
    encoders and VAEs it keeps those that it runs for all.

    Args:
        pipeline: a diffusers pipeline, the same on every rank; it is changed in place. One that shares its transformers with
            a split pipeline, such as `FluxImg2ImgPipeline(**pipe.components)`, takes over its stages.
        config: how many stages, and how to cut; for a pipeline that shares its transformers, the same as there.

    Returns:
        the pipeline, on this rank's device.

    Raises:
        WorldSizeError, ConfigError, NotATransformerError, PartitionError, RemoteRankError: as in `load_pipeline`.
    """
    with Launch(config) as launch:
        if config.world_size == 1:
            return pipeline.to(launch.join())
        models = transformers_of(pipeline)
        if adopt(pipeline, models, config):
            return pipeline
        _check_splits(config, models)
        sizes = components_in_memory(pipeline.components)
        texts = _text_plans(config, sizes, pipeline.components.__getitem__)
        sizes = _with_parts(config, sizes, texts)
        owners = _owners(config, sizes, models)
        teams = _teams(config, sizes, owners)
        device = launch.join()
        cut_over_ranks(models, config, device)
        timeout = timedelta(seconds=config.timeout_seconds)
        groups = make_team_groups({name: teams[name] for name in texts}, layout_of(config), device, timeout)
        cut_in_memory({name: pipeline.components[name] for name in texts}, texts, groups)
        fill = {name: from_memory(model, device) for name, model in models.items()}
        spread(pipeline, models, fill, owners, teams, texts, config, device, launch.guard)
    return pipeline


def _owners(
    config: ParallelConfig, components: Mapping[str, ComponentSize], models: Mapping[str, nn.Module]
) -> dict[str, int]:
    """The rank of each component, by its kind and size.

    With `vae-aware` on ranks of limited memory, those that the configuration does not bind go where they fit beside blocks.
    """
    config.check_component_ranks(components)
    chosen = config.component_ranks or {}
    owners = place_components(components, config.line_size, config.shown_on(), chosen)
    target = machine(config.pipeline_parallel_size, config.ranks, config.profile, config.topology)
    if config.partitioner != "vae-aware" or not target.has_limits:
        return owners
    bound = {
        name: name in chosen or (components[name].kind == "decoder" and config.output_ranks != "all") for name in owners
    }
    stages = config.pipeline_parallel_size
    whole = {name: owner for name, owner in owners.items() if components[name].parts == 1}
    sizes = [
        Component(
            name,
            bytes=components[name].bytes,
            rank=owner % stages if bound[name] else None,
            preferred_rank=owner % stages,
        )
        for name, owner in whole.items()
    ]
    sizes += [
        Component(f"{name} on rank {rank}", bytes=components[name].bytes // components[name].parts, rank=rank % stages)
        for name in owners.keys() - whole.keys()
        for rank in components[name].holders(owners[name], config.line_size)
    ]
    placed = owners_by_weight(models.values(), config.blocks, target, sizes)
    return owners | {name: owner if placed[name] == owner % stages else placed[name] for name, owner in whole.items()}


def _text_plans(
    config: ParallelConfig, components: Mapping[str, ComponentSize], encoder: Callable[[str], Any]
) -> dict[str, TextPlan]:
    """How each text encoder is cut that is to be, by its name; `encoder` gives it, with weights or without."""
    sizes = config.text_encoder_tp_size
    everywhere = [name for name, place in (config.component_ranks or {}).items() if place == "all"]
    known = [name for name, part in components.items() if part.text and name not in everywhere]
    unknown = [name for name in sizes if name not in known] if isinstance(sizes, Mapping) else []
    if unknown or (sizes != 1 and not known):
        raise ConfigError(
            f"text_encoder_tp_size={sizes}: the text encoders of this pipeline that are not on every rank are "
            f"{', '.join(map(repr, known)) or 'none'}."
        )
    cut = {name: size for name in known if (size := config.text_encoder_size(name)) > 1}
    return {name: check_text_encoder(name, encoder(name), size) for name, size in cut.items()}


def _with_parts(
    config: ParallelConfig, components: Mapping[str, ComponentSize], texts: Mapping[str, TextPlan]
) -> dict[str, ComponentSize]:
    """Say of the components that are cut how many ranks of a line have a part."""
    lines = config.copy_size // config.line_size
    sizes = {name: config.text_encoder_size(name) for name in texts}
    return {
        name: replace(part, parts=sizes[name], ranks=math.ceil(sizes[name] / lines)) if name in sizes else part
        for name, part in components.items()
    }


def _teams(
    config: ParallelConfig, components: Mapping[str, ComponentSize], owners: Mapping[str, int]
) -> dict[str, Team]:
    """The ranks that compute each component which several compute together: VAEs by tiles, text encoders by parts."""
    layout, rank = layout_of(config), launched_rank()
    teams = {
        name: team_of(layout, rank, owners[name], part.parts, towards=1)
        for name, part in components.items()
        if part.parts > 1
    }
    size = config.vae_patch_parallel_size
    if size == 1:
        return teams
    names = [name for name, part in components.items() if part.tiles and name in owners]
    if not names:
        raise ConfigError(
            f"vae_patch_parallel_size={size}: this pipeline has no VAE on one rank whose tiling can be spread over several "
            f"(its components on one rank: {', '.join(owners) or 'none'}). Leave it at 1."
        )
    return teams | {name: team_of(layout, rank, owners[name], size, towards=-1) for name in names}


def _check_splits(config: ParallelConfig, models: Mapping[str, nn.Module]) -> None:
    config.check_components(models)
    cuts = {
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "use_hsdp": config.use_hsdp,
        "rebalance": config.rebalance,
    }
    refuse_cutting_quantised(models, [name for name, is_asked in cuts.items() if is_asked])
    touches = {**cuts, "compile": config.compile is not None}
    refuse_cutting_casts(models, [name for name, is_asked in touches.items() if is_asked])
    for model in models.values():
        refuse_hooks(model)
        if keeps_steps(model):
            check_can_keep(config)
        if config.sequence_parallel_size > 1:
            check_sequence_parallel(model, config.ring_degree, config.ulysses_degree, config.tensor_parallel_size)
        if config.tensor_parallel_size > 1:
            check_tensor_parallel(model, config.tensor_parallel_size, find_blocks(model, config.blocks))
    target = machine(config.pipeline_parallel_size, config.ranks, config.profile, config.topology)
    given = [check_counts(config, name, model) for name, model in models.items()]
    if target.has_limits and not any(given):
        owners_by_weight(models.values(), config.blocks, target, ())


def generate(
    pipeline: Any,
    requests: Sequence[Mapping[str, Any]],
    *,
    max_in_flight: int | None = None,
    on_output: OnOutput | None = None,
) -> list[Any]:
    """Run several calls of a pipeline side by side, so that no stage waits while another request has work for it.

    With twice as many equal requests as stages there is no bubble between denoising steps. Requests may differ in
    prompt, size, steps, guidance and seed; each runs the pipeline's own code. Give each its own `generator`: without one,
    every request starts from the same random state.

    Args:
        pipeline: from `load_pipeline` or `parallelize`, on every rank; a plain pipeline runs them one after the other.
        requests: arguments of the pipeline's calls, the same on every rank.
        max_in_flight: requests at a time. Default: all.
        on_output: called on every rank with the number and the output of each request as soon as it is complete; what it
            returns is kept in place of the output, so that long lists need not stay in memory. The other requests go on
            when it returns: leave slow work, such as writing a video, to a thread.

    With `data_parallel_size` n, copy k of the pipeline runs requests k, k + n, k + 2n, ...; `on_output` is called on the ranks
    of that copy, and the results are exchanged when all are done.

    Returns:
        what each call returns, in order, on every rank; bit for bit what it returns alone. With `on_output`, what that
        returned.

    Raises:
        InputError: a request is no dict, or the ranks were given different requests.
        RemoteRankError: another rank failed first; names it and the cause.
    """
    return run_requests(pipeline, requests, max_in_flight, on_output)


@contextmanager
def serve(pipeline: Any, *, max_in_flight: int | None = None, max_waiting: int = 64) -> Iterator[RequestQueue]:
    """A queue in front of a pipeline: requests join while others run, and leave when they are done.

    Every rank enters the block. Rank 0 submits; the others follow it until it leaves the block:

        with serve(pipe) as queue:
            if queue.leads:
                future = queue.submit(prompt="a cat", generator=torch.Generator().manual_seed(0))
                image = future.result().images[0]

    Leaving the block waits for the requests that were submitted; by an error, it cancels them. A request that raises an
    error of its own (a wrong size) gives that error as its result and leaves the others alone.

    Args:
        pipeline: from `load_pipeline` or `parallelize`; a plain pipeline runs its requests one after the other.
        max_in_flight: requests that run at a time. Default: twice as many as ranks, with which no stage waits.
        max_waiting: requests that may wait; one more is refused with QueueFullError.

    Raises:
        ConfigError: a number is no positive integer.
    """
    for name, number in (("max_in_flight", max_in_flight), ("max_waiting", max_waiting)):
        if number is not None:
            check_positive(name, number)
    rolling = rolling_of(pipeline)
    ranks = rolling.mesh.size if rolling is not None else 1
    if rolling is not None and len(rolling.mesh.copies) > 1:
        raise ConfigError(
            f"a queue of requests runs on one copy of a pipeline, but there are data_parallel_size={len(rolling.mesh.copies)}: "
            "use generate(), or data_parallel_size=1."
        )
    queue = RequestQueue(pipeline, rolling, max_in_flight or 2 * ranks, max_waiting)
    try:
        yield queue
    except BaseException:
        queue.cancel_all()
        raise
    finally:
        queue.close()


def open_stream(
    pipeline: Any,
    spec: StreamSpec | None = None,
    *,
    height: int,
    width: int,
    prompt: str | Sequence[str],
    **options: Any,
) -> VideoStream:
    """Make a stream of video of a pipeline: chunk after chunk, all noise levels of different chunks in flight.

    Every rank opens it, and iterates over `stream.run()`; the last stage's rank gets the frames. The pipeline must not be
    called otherwise meanwhile, and its transformer attends causally from now on while the stream runs.

    Args:
        pipeline: a Wan text-to-video pipeline from `load_pipeline` or `parallelize`, or a plain one, which is one stage.
        spec: noise levels, frames per chunk, and what a chunk sees of earlier ones. Default: `StreamSpec()`.
        height: of the frames in pixels.
        width: of the frames in pixels.
        prompt: of all streams, or one for each.
        options: `negative_prompt`, `seed`, `batched`, `max_sequence_length`, `adaptive_fps`, as `VideoStream` describes them.

    Raises:
        InputError, ConfigError: the pipeline cannot stream, or the sizes do not fit it; says why.
    """
    return VideoStream(pipeline, spec or StreamSpec(), height=height, width=width, prompt=prompt, **options)
