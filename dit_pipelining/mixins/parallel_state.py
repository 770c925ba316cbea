"""The process groups of this process, for pipelines that ask for them anywhere in their code.

This is the one module with process groups as state: the contract of hand-written pipelines wants `get_pp_group()` inside a
model's forward. `init_distributed_environment` and `initialize_model_parallel` make it, `destroy_distributed_env` ends it.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from dit_pipelining.config_checks import check_positive
from dit_pipelining.errors import ConfigError, WorldSizeError
from dit_pipelining.mixins.group_coordinator import GroupCoordinator, local_device

TIMEOUT = timedelta(minutes=10)
"""Of each wait for another rank, unless told otherwise."""

_WORLD: GroupCoordinator | None = None
_PP: GroupCoordinator | None = None
_CFG: GroupCoordinator | None = None
_DP: GroupCoordinator | None = None
_started_default_group = False
_timeout = TIMEOUT


class GroupNotInitializedError(AssertionError):
    """A group was asked for before `initialize_model_parallel` made it."""


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str | None = "env://",
    local_rank: int = -1,
    backend: str | None = None,
    timeout: timedelta = TIMEOUT,
) -> None:
    """Join the default process group, if the process is in none yet, and choose this rank's device.

    Args:
        world_size: number of processes; -1: as the launcher says.
        rank: of this process; -1: as the launcher says.
        distributed_init_method: where the processes meet: `env://`, `tcp://host:port`, `file:///path`.
        local_rank: number of this process on its machine; -1: as the launcher says, or the rank.
        backend: `"nccl"` or `"gloo"`; default: NCCL where there are GPUs. Ranks that share a GPU need gloo.
        timeout: of each wait for another rank, of this group and of those made later.
    """
    global _WORLD, _started_default_group, _timeout
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(
            backend, init_method=distributed_init_method, world_size=world_size, rank=rank, timeout=timeout
        )
        _started_default_group = True
    if _WORLD is not None:
        if _WORLD.world_size != dist.get_world_size():
            raise WorldSizeError(
                f"the world group has {_WORLD.world_size} ranks, but the default process group has {dist.get_world_size()}; "
                "call destroy_distributed_env() before you make another"
            )
        return
    _timeout = timeout
    if local_rank == -1:
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    device = local_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _WORLD = GroupCoordinator([range(dist.get_world_size())], local_rank, dist.get_backend(), timeout)


def initialize_model_parallel(
    data_parallel_size: int = 1,
    cfg_parallel_size: int = 1,
    sequence_parallel_size: int | None = None,
    ulysses_degree: int = 1,
    ring_degree: int = 1,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    *,
    backend: str | None = None,
) -> None:
    """Make the groups of pipelines, of CFG branches and of data parallelism; every rank calls it.

    Stages are innermost: with 2 stages and 2 branches, ranks 0 and 1 are the pipeline of the first branch, ranks 2 and 3
    that of the second; the CFG groups are ranks 0 and 2, and ranks 1 and 3.

    Args:
        data_parallel_size: default 1.
        cfg_parallel_size: pipelines that share the branches of guidance.
        pipeline_parallel_size: stages of each pipeline.
        sequence_parallel_size: must be 1 here, as the next three: blocks are sharded by `dit_pipelining.sharding`.
        ulysses_degree: must be 1.
        ring_degree: must be 1.
        tensor_parallel_size: must be 1.
        backend: of the groups; default: the default group's.

    Raises:
        GroupNotInitializedError: `init_distributed_environment` was not called.
        ConfigError: a degree is not a positive integer, or one that must be 1 is not.
        WorldSizeError: the degrees' product is not the number of ranks.
    """
    global _PP, _CFG, _DP
    world = get_world_group()
    if model_parallel_is_initialized():
        raise ConfigError("the groups exist already; call destroy_model_parallel() before you make others")
    degrees = {
        "data_parallel_size": data_parallel_size,
        "cfg_parallel_size": cfg_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
    }
    others = {
        "sequence_parallel_size": 1 if sequence_parallel_size is None else sequence_parallel_size,
        "ulysses_degree": ulysses_degree,
        "ring_degree": ring_degree,
        "tensor_parallel_size": tensor_parallel_size,
    }
    for name, degree in (degrees | others).items():
        check_positive(name, degree)
    for name, degree in others.items():
        if degree != 1:
            raise ConfigError(
                f"{name} is {degree}, but these groups are for stages, branches of guidance and data parallelism; shard "
                "blocks with the plans of dit_pipelining.sharding"
            )
    if data_parallel_size * cfg_parallel_size * pipeline_parallel_size != world.world_size:
        product = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise WorldSizeError(
            f"{product} is not the number of ranks, {world.world_size}; change the launch or the degrees"
        )
    backend = backend or dist.get_backend()
    ranks = torch.arange(world.world_size).view(data_parallel_size, cfg_parallel_size, pipeline_parallel_size)

    def groups_along(dim: int, ring: bool = False) -> GroupCoordinator:
        group_ranks = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
        return GroupCoordinator(group_ranks, world.local_rank, backend, _timeout, ring=ring)

    _DP, _CFG, _PP = groups_along(0), groups_along(1), groups_along(2, ring=True)


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` made the groups."""
    return _PP is not None and _CFG is not None and _DP is not None


def destroy_model_parallel() -> None:
    """Give the groups of `initialize_model_parallel` back."""
    global _PP, _CFG, _DP
    for group in (_PP, _CFG, _DP):
        if group is not None:
            group.destroy()
    _PP = _CFG = _DP = None


def destroy_distributed_env() -> None:
    """Undo `initialize_model_parallel` and `init_distributed_environment`.

    The default process group ends only if `init_distributed_environment` started it.
    """
    global _WORLD, _started_default_group
    destroy_model_parallel()
    if _WORLD is not None:
        _WORLD.destroy()
        _WORLD = None
    if _started_default_group and dist.is_initialized():
        dist.destroy_process_group()
    _started_default_group = False


def _existing(group: GroupCoordinator | None, name: str, maker: str = "initialize_model_parallel") -> GroupCoordinator:
    if group is None:
        raise GroupNotInitializedError(f"{name} group is not initialized; call {maker}() first")
    return group


def get_world_group() -> GroupCoordinator:
    """All ranks."""
    return _existing(_WORLD, "world", "init_distributed_environment")


def get_pp_group() -> GroupCoordinator:
    """The stages of this rank's pipeline, in order."""
    return _existing(_PP, "pipeline parallel")


def get_cfg_group() -> GroupCoordinator:
    """The ranks of this stage in the pipelines that share the branches of guidance."""
    return _existing(_CFG, "classifier_free_guidance parallel")


def get_dp_group() -> GroupCoordinator:
    """The ranks of this stage and branch in the data-parallel copies."""
    return _existing(_DP, "data parallel")


def pipeline_group_is_initialized() -> bool:
    return _PP is not None


def is_cfg_group_initialized() -> bool:
    return _CFG is not None


def get_pipeline_parallel_world_size() -> int:
    """Number of stages."""
    return get_pp_group().world_size


def get_pipeline_parallel_rank() -> int:
    """This rank's stage."""
    return get_pp_group().rank_in_group


def is_pipeline_first_stage() -> bool:
    return get_pipeline_parallel_rank() == 0


def is_pipeline_last_stage() -> bool:
    return get_pipeline_parallel_rank() == get_pipeline_parallel_world_size() - 1


def get_classifier_free_guidance_world_size() -> int:
    """Number of pipelines that share the branches of guidance."""
    return get_cfg_group().world_size


def get_classifier_free_guidance_rank() -> int:
    """Which of these pipelines this rank belongs to."""
    return get_cfg_group().rank_in_group


def get_data_parallel_world_size() -> int:
    """Number of data-parallel copies."""
    return get_dp_group().world_size


def get_data_parallel_rank() -> int:
    """Which of these copies this rank belongs to."""
    return get_dp_group().rank_in_group
