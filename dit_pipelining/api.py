"""The front door: split a model, load or parallelise a pipeline, generate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
from torch import nn

from dit_pipelining.capture.graph import CaptureCache
from dit_pipelining.capture.signature import bind
from dit_pipelining.comm.launch import join, launched_world_size
from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.model_costs import model_costs
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.executor import check_counts
from dit_pipelining.runtime.parallel import from_checkpoint, from_memory, spread
from dit_pipelining.weights.load import check_names
from dit_pipelining.weights.pipelines import (
    DtypeChoice,
    empty_transformers,
    pipeline_folder,
    transformers_of,
    without_components,
)
from partitioners import Partitioner, RankSpec, resolve_partition

__all__ = ["ParallelConfig", "SplitModel", "load_pipeline", "parallelize", "split_model"]


def split_model(
    model: nn.Module,
    num_stages: int,
    example_inputs: Mapping[str, Any],
    *,
    partitioner: str | Partitioner = "balanced",
    counts: Sequence[int] | str | None = None,
    ranks: Sequence[RankSpec] | None = None,
    blocks: Sequence[str] | None = None,
) -> SplitModel:
    """Cut a diffusion transformer into pipeline stages at block boundaries.

    Args:
        model: a transformer with weights, or without (parameters on the meta device).
        num_stages: number of stages.
        example_inputs: keyword arguments of one call of the model's forward (one microbatch). Values matter only where the
            forward looks at them (masks, lengths).
        partitioner: `"balanced"`, `"uniform"` or a function `(costs, ranks) -> Partition`. The environment variable
            VLLM_PP_LAYER_PARTITION beats it.
        counts: blocks per stage, for example `[8, 12, 12, 8]` or `"8,12,12,8"`; beats the variable.
        ranks: speed, memory and links of the rank of each stage. Default: equal ranks without limits.
        blocks: names of the model's blocks or block lists. Default: found by `find_blocks`.

    Returns:
        the stages, what crosses between them, and a callable that runs them all in this process.

    Raises:
        NotATransformerError, BlocksNotFoundError: there is nothing to cut.
        InputError: the example inputs do not fit the forward.
        CaptureError: the forward's glue cannot be recorded; names the line.
        PartitionError: the counts or the number of stages do not fit the model.
    """
    captures = CaptureCache(model, blocks, count_flops=True)
    graph = captures.get(bind(model.forward, (), example_inputs))
    partition = resolve_partition(
        partitioner, model_costs(graph, model), ranks or [RankSpec()] * num_stages, counts=counts
    )
    return SplitModel(model, captures, graph, partition)


def load_pipeline(
    source: str | Path,
    config: ParallelConfig | None = None,
    *,
    pipeline_class: type = diffusers.DiffusionPipeline,
    torch_dtype: DtypeChoice = None,
    variant: str | None = None,
    revision: str | None = None,
    **components: Any,
) -> Any:
    """Load a diffusers pipeline whose transformers are split over the ranks of this launch.

    Every rank makes the same calls and gets the same results. A rank reads only the weights of its own stage, at the
    first call of the pipeline, since where to cut depends on the shapes; text encoders and VAE are on every rank.

    Args:
        source: a pipeline's folder, or a hub id.
        config: how many stages, and how to cut. Default: one process, which is the plain diffusers pipeline.
        pipeline_class: a diffusers pipeline class. Default: the one the folder names.
        torch_dtype: as in `from_pretrained`: one dtype, or by component.
        variant: as in `from_pretrained`, for example `"fp16"`.
        revision: of a hub id.
        components: passed on to `from_pretrained`, for example `vae=...`.

    Returns:
        the diffusers pipeline, on this rank's device.

    Raises:
        WorldSizeError: the launch has another number of processes than the configuration.
        ModelNotFoundError, CheckpointError, NotATransformerError: there is nothing to load or to split.
        PartitionError: more stages than blocks, or a partition that cannot be.
    """
    config = config or ParallelConfig()
    config.check_world_size(launched_world_size())
    folder = pipeline_folder(source, variant=variant, revision=revision)
    options = {"torch_dtype": torch_dtype, "variant": variant, **components}
    if config.pipeline_parallel_size == 1:
        return pipeline_class.from_pretrained(folder, **options).to(join(config))  # type: ignore[attr-defined]
    empty = empty_transformers(folder, torch_dtype, variant)
    for name, transformer in empty.items():
        check_names(transformer.model, transformer.checkpoint)
        check_counts(config, name, transformer.model)
    device = join(config)
    models = {name: transformer.model for name, transformer in empty.items()}
    with without_components(folder, models) as rest:
        pipeline = pipeline_class.from_pretrained(rest, **options, **models)  # type: ignore[attr-defined]
    spread(pipeline, models, {n: from_checkpoint(t, device) for n, t in empty.items()}, config, device)
    return pipeline


def parallelize(pipeline: Any, config: ParallelConfig) -> Any:
    """Split the transformers of a pipeline that is in memory over the ranks of this launch.

    Each rank keeps its stage's weights, at the first call of the pipeline, and drops the others.

    Args:
        pipeline: a diffusers pipeline, the same on every rank; it is changed in place.
        config: how many stages, and how to cut.

    Returns:
        the pipeline, on this rank's device.

    Raises:
        WorldSizeError, NotATransformerError, PartitionError: as in `load_pipeline`.
    """
    config.check_world_size(launched_world_size())
    if config.pipeline_parallel_size == 1:
        return pipeline.to(join(config))
    models = transformers_of(pipeline)
    for name, model in models.items():
        check_counts(config, name, model)
    device = join(config)
    spread(pipeline, models, {name: from_memory(model, device) for name, model in models.items()}, config, device)
    return pipeline
