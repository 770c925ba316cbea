"""Choose how data moves between the ranks: by what lies between their devices."""

import socket
import warnings
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import ConfigError


def choose_transport(config: ParallelConfig, device: torch.device, control: dist.ProcessGroup) -> str:
    """The transport of this launch; the same on every rank.

    Args:
        config: `transport` may ask for one.
        device: of this rank.
        control: a gloo group of all ranks, which all call this.

    Returns:
        `"host"`: gloo, on the CPU or through pinned host memory; `"peer"`: copy engines between the GPUs of one host;
        `"nccl"`.

    Raises:
        ConfigError: the transport asked for cannot work here; says why.
    """
    places: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(places, _place(device), group=control)
    possible = _possible(places)
    if config.transport == "auto":
        chosen = next(iter(possible))
        if chosen == "host" and device.type == "cuda" and dist.get_rank(control) == 0:
            warnings.warn(
                "ranks share a GPU or are on several hosts, so everything between them goes through host memory, which is "
                "slow. Give each rank a GPU of its own on one host.",
                stacklevel=2,
            )
        return chosen
    if config.transport not in possible:
        where = ", ".join(f"rank {rank} on {host} {name}" for rank, (host, name, _) in enumerate(places))
        raise ConfigError(
            f"transport={config.transport!r} cannot work between these ranks ({where}); possible are "
            f"{', '.join(map(repr, possible))}. Leave it out to take the first of them."
        )
    return config.transport


def _place(device: torch.device) -> tuple[str, str, bool]:
    """Host, device, and whether the GPUs of this host reach each other's memory."""
    if device.type != "cuda":
        return socket.gethostname(), "cpu", False
    count = torch.cuda.device_count()
    reach = all(
        torch.cuda.can_device_access_peer(device.index, other) for other in range(count) if other != device.index
    )
    return socket.gethostname(), f"GPU {torch.cuda.get_device_properties(device).uuid}", reach


def _possible(places: list[tuple[str, str, bool]]) -> list[str]:
    """Transports that can work, the best first."""
    if any(name == "cpu" for _, name, _ in places) or len({(host, name) for host, name, _ in places}) < len(places):
        return ["host"]
    one_host = len({host for host, _, _ in places}) == 1
    # NCCL is for those who ask for it: it has been seen to run with small models only, and copy engines take no processors.
    return ["peer", "host", "nccl"] if one_host and all(reach for _, _, reach in places) else ["host", "nccl"]
