"""HSDP: ranks that hold the same stage keep a part of its blocks' weights each, and gather a block's when it runs.

[Note: which ranks share weights]
The ranks that hold the same stage of the same copy: its replicas (cfg_parallel_size), and the ranks that share the tokens
of a call (ring_degree x ulysses_degree). Data-parallel copies have requests of their own and share nothing.

[Note: passes]
FSDP2's `fully_shard` holds, gathers and frees the weights; each gathering is a collective of all ranks of a group, so they
must gather the same blocks in the same order. Ranks of one call do so by themselves. Replicas run different calls, so what
is kept alike are passes: the n-th pass of each rank of a group gathers the same blocks, whether it runs a call or only
takes part (`gather_only`) since its replica has none; who has to when is decided in runtime/lockstep.py. Only blocks of
the main chain are sharded: what runs once per denoising loop would be gathered by some ranks and not by others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from dit_pipelining.comm.layout import Layout
from dit_pipelining.comm.mesh import backend_of, new_group
from dit_pipelining.torch_internals import is_spread

HOLDERS = ("cfg", "ring", "ulysses")
"""Ranks that differ along these dimensions hold the same stage, and make the same calls of the pipeline."""

ShardCondition = Callable[[str, nn.Module], bool]


@dataclass(eq=False)
class ShardedBlocks:
    """The sharded blocks of one rank's stage.

    Args:
        mesh: replicate x shard, or shard only, over the ranks that hold the same stage.
        conditions: as in `sharded_parameters`.

    Attributes:
        blocks: by name.
    """

    mesh: DeviceMesh
    conditions: Sequence[ShardCondition] = ()
    blocks: dict[str, FSDPModule] = field(default_factory=dict)
    _root: nn.Module | None = None
    _upcoming: list[FSDPModule] = field(default_factory=list)

    @property
    def shards(self) -> int:
        """Over how many ranks each block is sharded as a whole; 1: conditions leave some of it whole."""
        return 1 if self.conditions else self.mesh["shard"].size()

    def shard(self, name: str, block: nn.Module) -> bool:
        """Leave a block, with its weights, this rank's part of them; False: no condition holds, it stays whole."""
        chosen = sharded_parameters(name, block, self.conditions)
        if not chosen:
            return False
        ignored = {parameter for parameter in block.parameters() if id(parameter) not in chosen}
        with torch.inference_mode(False):  # what is made now is written to at every call, in any mode
            self.blocks[name] = fully_shard(
                block,
                mesh=self.mesh,
                reshard_after_forward=True,
                shard_placement_fn=self._placement,
                ignored_params=ignored,
            )
        block.register_forward_pre_hook(self._prefetch)  # runs after FSDP's own, which gathers the block itself
        return True

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        """The first dimension that divides: the usual first one can be of size 1 (tables of modulation)."""
        ranks = self.mesh["shard"].size()
        return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size and size % ranks == 0), None)

    def finish(self) -> None:
        """Called once when all blocks are sharded, on all ranks of the group: makes its communicators."""
        if not self.blocks:
            return
        with torch.inference_mode(False), torch.no_grad():
            # One root lets all blocks gather on the same streams, so that they take turns in the same memory.
            self._root = _Root(list(self.blocks.values()))  # type: ignore[arg-type]
            whole = {parameter for parameter in self._root.parameters() if not is_spread(parameter)}
            fully_shard(self._root, mesh=self.mesh, ignored_params=whole)
            self._root(None)
            self.gather_only(list(self.blocks))

    def start_pass(self, names: Sequence[str]) -> None:
        """Called before a stage runs these blocks in this order."""
        self._upcoming = [self.blocks[name] for name in names if name in self.blocks]

    def gather_only(self, names: Sequence[str]) -> None:
        """Take part in a pass in which this rank has nothing to run."""
        self.start_pass(names)
        while self._upcoming:
            block = self._upcoming[0]
            block.unshard()
            self._prefetch(block)
            block.reshard()

    def _prefetch(self, block: Any, *_: Any) -> None:
        """Gather the next block's weights while this one runs."""
        if not self._upcoming:
            return  # called by somebody else than a stage
        self._upcoming.pop(0)
        if self._upcoming and self._upcoming[0] is not block:
            self._upcoming[0].unshard(async_op=True)


def make_shard_mesh(
    layout: Layout, shard_size: int, device: torch.device, timeout: timedelta
) -> tuple[DeviceMesh, tuple[int, ...]]:
    """The mesh of the ranks that hold the same stage, replicate x shard; every rank of the launch calls this alike.

    Ranks that share weights are as near to each other as may be: those that share a call's tokens before replicas.

    Args:
        layout: of the launch.
        shard_size: over how many ranks weights are sharded; divides the number of those that hold the same stage.
        device: of this rank.
        timeout: of a transfer.

    Returns:
        this rank's mesh, and the ranks that share weights with it.
    """
    backend = backend_of(device)
    holders = [torch.tensor(ranks).reshape(-1, shard_size) for ranks in layout.groups(*HOLDERS)]
    shared = [tuple(row.tolist()) for mesh in holders for row in mesh]
    shard = new_group(shared, timeout, backend)
    own = next(mesh for mesh in holders if dist.get_rank() in mesh)
    sharing = next(ranks for ranks in shared if dist.get_rank() in ranks)
    if len(own) == 1:
        return DeviceMesh.from_group(shard, device.type, mesh_dim_names=("shard",)), sharing
    replicate = new_group([tuple(row.tolist()) for mesh in holders for row in mesh.T], timeout, backend)
    names = ("replicate", "shard")
    return DeviceMesh.from_group([replicate, shard], device.type, mesh=own, mesh_dim_names=names), sharing


class _Root(nn.Module):
    """What lies above all sharded blocks; it has nothing to run. FSDP moves its inputs to a GPU, so it must have one."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, _: None) -> None:
        return None


def sharded_parameters(name: str, block: nn.Module, conditions: Sequence[ShardCondition]) -> set[int]:
    """Which parameters of a block are sharded, by id: all, or those in modules for which any condition holds.

    Args:
        name: of the block in the model.
        block: the block.
        conditions: functions `(name, module) -> bool`, the model's `_hsdp_shard_conditions`; empty: all of the block.
    """
    if not conditions:
        return {id(parameter) for parameter in block.parameters()}
    return {
        id(parameter)
        for own, module in block.named_modules(prefix=name)
        if any(condition(own, module) for condition in conditions)
        for parameter in module.parameters()
    }
