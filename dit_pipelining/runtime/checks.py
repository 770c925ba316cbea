"""What can be said against a split before anything is loaded."""

from collections.abc import Mapping

from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.casting import refuse_cutting_casts
from dit_pipelining.capture.hooks import refuse_hooks
from dit_pipelining.capture.step_caches import keeps_steps
from dit_pipelining.comm.mesh import layout_of
from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.by_weight import owners_by_weight
from dit_pipelining.costs.machine import machine_of
from dit_pipelining.runtime.executor import check_counts
from dit_pipelining.runtime.step_states import check_can_keep
from dit_pipelining.sharding.sequence import check_sequence_parallel
from dit_pipelining.sharding.tensor import check_tensor_parallel
from dit_pipelining.weights.quantised import refuse_cutting_quantised


def check_splits(config: ParallelConfig, models: Mapping[str, nn.Module]) -> None:
    """Check that transformers, with weights or without, can be split as a configuration says.

    Raises:
        ConfigError, BlocksNotFoundError, PartitionError: they cannot; says why.
    """
    check_cuts(config, models)
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
            check_sequence_parallel(model, config.ulysses_degree, config.tensor_parallel_size)
        if config.tensor_parallel_size > 1:
            check_tensor_parallel(model, config.tensor_parallel_size, find_blocks(model, config.blocks))


def check_cuts(config: ParallelConfig, models: Mapping[str, nn.Module]) -> None:
    """Check what a configuration says about where transformers are cut, and for what.

    Raises:
        ConfigError, BlocksNotFoundError, PartitionError: it does not fit them, or they do not fit the ranks' memory.
    """
    config.check_components(models)
    target = machine_of(config)
    given = [check_counts(config, name, model) for name, model in models.items()]
    if target.has_limits and not any(given):
        layout, shards = layout_of(config), config.hsdp_shard_size or 1
        owners_by_weight(models.values(), config.blocks, target, (), layout, shards)
