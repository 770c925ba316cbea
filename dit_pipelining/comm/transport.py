"""Choose how data moves between the ranks: by what lies between their devices."""

import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: its name.
        device: `"cpu"`, or which GPU.
        reaches: the GPUs of the host copy into each other's memory.
    """

    host: str
    device: str
    reaches: bool = False


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
    chosen = transport_between(places, config.transport)
    if config.transport == "auto" and dist.get_rank(control) == 0 and (slow := why_slow(places)):
        warnings.warn(f"{slow}, so everything between ranks goes through host memory, which is slow.", stacklevel=2)
    return chosen


def transport_between(places: Sequence[Place], wanted: str = "auto") -> str:
    """The transport between ranks at these places; see `choose_transport`."""
    possible = _possible(places)
    if wanted == "auto":
        return possible[0]
    if wanted not in possible:
        where = ", ".join(f"rank {rank} on {place.host} {place.device}" for rank, place in enumerate(places))
        raise ConfigError(
            f"transport={wanted!r} cannot work between these ranks ({where}); possible are "
            f"{', '.join(map(repr, possible))}. Leave it out to take the first of them."
        )
    return wanted


def why_slow(places: Sequence[Place]) -> str:
    """Why ranks on GPUs go through host memory, and what to do; empty if they do not."""
    if any(place.device == "cpu" for place in places) or transport_between(places) != "host":
        return ""
    if "nccl" not in _possible(places):
        return "ranks share a GPU (give each one of its own)"
    if len({place.host for place in places}) > 1:
        where = "the ranks' GPUs are on several hosts"
    else:
        where = "the ranks' GPUs do not reach each other's memory"
    return f"{where} (ParallelConfig(transport='nccl') may be faster)"


def _place(device: torch.device) -> Place:
    if device.type != "cuda":
        return Place(socket.gethostname(), "cpu")
    count = torch.cuda.device_count()
    reaches = all(
        torch.cuda.can_device_access_peer(device.index, other) for other in range(count) if other != device.index
    )
    return Place(socket.gethostname(), f"GPU {torch.cuda.get_device_properties(device).uuid}", reaches)


def _possible(places: Sequence[Place]) -> list[str]:
    """Transports that can work, the best first."""
    devices = {(place.host, place.device) for place in places}
    if any(place.device == "cpu" for place in places) or len(devices) < len(places):
        return ["host"]
    one_host = len({place.host for place in places}) == 1
    # NCCL is for those who ask for it: it has been seen on one host only, where copy engines are faster.
    return ["peer", "host", "nccl"] if one_host and all(place.reaches for place in places) else ["host", "nccl"]
