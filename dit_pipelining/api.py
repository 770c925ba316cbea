"""The front door: split a model, load or parallelise a pipeline, generate."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.capturing import CaptureCache
from dit_pipelining.capture.hooks import refuse_hooks
from dit_pipelining.capture.signature import bind
from dit_pipelining.comm.launch import Launch
from dit_pipelining.comm.processes import launch
from dit_pipelining.config import ParallelConfig
from dit_pipelining.config_checks import check_partitioner, check_positive, early_counts_check
from dit_pipelining.config_names import sources_named
from dit_pipelining.config_sources import load_config, refuse_no_config
from dit_pipelining.costs.machine import RankChoice, machine
from dit_pipelining.costs.plan import plan_cut
from dit_pipelining.costs.timing import TimingChoice
from dit_pipelining.errors import ConfigError, InputError, ModelNotFoundError
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.planning.presets import published_like, refuse_preset
from dit_pipelining.runtime.attach import adopt, rolling_of
from dit_pipelining.runtime.loading import find_pipeline, load_split, load_whole
from dit_pipelining.runtime.parallel import split_in_memory
from dit_pipelining.runtime.requests import OnOutput, run_requests
from dit_pipelining.runtime.serving import RequestQueue
from dit_pipelining.runtime.whole import check_whole, says_something
from dit_pipelining.stream.session import VideoStream
from dit_pipelining.stream.spec import StreamSpec
from dit_pipelining.weights.pipelines import (
    DtypeChoice,
    check_load_arguments,
    refuse_no_pipeline,
    refuse_other_models,
    transformers_of,
)
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
    early_counts_check(counts, num_stages, f"counts={counts!r}")
    if not isinstance(components, Sequence) or not all(isinstance(own, Component) for own in components):
        raise ConfigError(f"components={components!r}: expected Components, such as [Component('vae', bytes=2**28)].")
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
    config = ParallelConfig() if config is None else config
    if dtype is not None and torch_dtype is not None:
        raise ConfigError(
            f"dtype={dtype} and torch_dtype={torch_dtype} are two names of one argument; give one of them."
        )
    dtype = torch_dtype if dtype is None else dtype
    refuse_no_config(config)
    check_load_arguments(source, pipeline_class, dtype)
    refuse_preset(source)
    with sources_named(config.told), Launch(config) as launch:
        try:
            files = find_pipeline(source, pipeline_class, dtype, variant, revision, components)
        except ModelNotFoundError as error:
            hint = "" if Path(source).exists() else published_like(source)
            raise ModelNotFoundError(f"{error} {hint}".strip()) from None
        load = load_whole if config.world_size == 1 else load_split
        return load(files, config, launch)


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
    refuse_no_config(config)
    refuse_no_pipeline(pipeline)
    with sources_named(config.told), Launch(config) as launch:
        if config.world_size == 1:
            if says_something(config):
                check_whole(pipeline, config)
            return pipeline.to(launch.join())
        models = transformers_of(pipeline)
        if not adopt(pipeline, models, config):
            split_in_memory(pipeline, models, config, launch)
    return pipeline


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
        InputError: `requests` is no list of dicts, or the ranks were given different requests.
        ConfigError: `max_in_flight` is no positive integer.
        RemoteRankError: another rank failed first; names it and the cause.
    """
    refuse_no_pipeline(pipeline)
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
    error of its own (a wrong size, in a callback) on every rank gives that error as its result and leaves the others alone; one
    that raises on some ranks only ends the queue, which says what it raised and where.

    Args:
        pipeline: from `load_pipeline` or `parallelize`; a plain pipeline runs its requests one after the other.
        max_in_flight: requests that run at a time. Default: twice as many as ranks, with which no stage waits.
        max_waiting: requests that may wait; one more is refused with QueueFullError.

    Raises:
        ConfigError: a number is no positive integer.
    """
    refuse_no_pipeline(pipeline)
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
    refuse_no_pipeline(pipeline)
    return VideoStream(pipeline, spec or StreamSpec(), height=height, width=width, prompt=prompt, **options)
