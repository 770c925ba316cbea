"""A pipeline in one process: nothing is cut, but what a configuration says is refused as it would be on several ranks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.signature import bind
from dit_pipelining.config import ParallelConfig
from dit_pipelining.config_names import sources_named
from dit_pipelining.costs.machine import machine_of
from dit_pipelining.costs.plan import plan_cut
from dit_pipelining.costs.together import Others
from dit_pipelining.runtime.beside import held_beside, others_of_each
from dit_pipelining.runtime.checks import check_cuts
from dit_pipelining.runtime.owned import text_parts
from dit_pipelining.runtime.placing import choose_places, plan_with
from dit_pipelining.weights.components import components_in_memory
from dit_pipelining.weights.pipelines import transformers_of
from partitioners import Component, counts_from_environment


def says_something(config: ParallelConfig) -> bool:
    """Whether a configuration, or VLLM_PP_LAYER_PARTITION, asks for anything; else a pipeline of any kind is left as it is.

    Raises:
        CountsError: the variable holds something else than counts.
    """
    return config != ParallelConfig() or counts_from_environment() is not None


def check_whole(pipeline: Any, config: ParallelConfig) -> None:
    """Check what a configuration says of a pipeline in memory; what depends on shapes, at the first call.

    Raises:
        ConfigError, PartitionError, NotATransformerError: as on several ranks.
    """
    models = transformers_of(pipeline)
    check_cuts(config, models)
    components = pipeline.components
    sizes = components_in_memory(components)
    places = choose_places(config, sizes, models, plan_with(components.__getitem__), text_parts(components))
    beside, others = held_beside(pipeline, models, places, config), others_of_each(models, config)
    for name, model in models.items():
        counts = config.counts_for(name)
        given = (counts, counts_from_environment(), config.profile, config.ranks)
        if callable(config.partitioner) or any(value is not None for value in given):
            handles: list[Any] = []
            hook = partial(
                _check_cut, config=config, counts=counts, beside=beside, others=others[name], handles=handles
            )
            handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))


def _check_cut(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
    *,
    config: ParallelConfig,
    counts: str | Sequence[int] | None,
    beside: Sequence[Component],
    others: Others,
    handles: Sequence[Any],
) -> None:
    graph = capture(model, bind(model.forward, args, kwargs), config.blocks, count_work=True)
    with sources_named(config.told):
        plan_cut(
            graph, model, machine_of(config), config.partitioner, counts, beside, others=others, blocks=config.blocks
        )
    for handle in handles:
        handle.remove()
