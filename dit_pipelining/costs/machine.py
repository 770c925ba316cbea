"""The machine that a model is cut for: what each rank is, as the user writes it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dit_pipelining.config import TOPOLOGIES, ParallelConfig
from dit_pipelining.costs.devices import (
    DEFAULT_DEVICE,
    DEVICES,
    GIB,
    RESERVED_BYTES,
    DeviceProfile,
    find_device,
    known_device,
)
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.costs.model_costs import Timing
from dit_pipelining.costs.roofline import Roofline
from dit_pipelining.costs.timing import TimingChoice, find_timing
from dit_pipelining.errors import ConfigError
from partitioners import RankSpec

RankChoice = str | Sequence[str | RankSpec]

MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GiB|GB|G)", re.IGNORECASE)
"""Cards are sold with binary gigabytes, whatever they are called."""

EXPECTED = "a device (rtx4090), one with another memory (rtx4090:16GB), or memory (24GB), perhaps with a speed (24GB*2)"


@dataclass(frozen=True)
class Rank:
    """One rank as it was described.

    Attributes:
        device: whose memory, speed and links it has; None: memory and speed were given alone.
        memory_bytes: that a stage and other components may take; None: no limit.
        speed: times that of its device, or of other ranks without one.
        spec: given in full.
    """

    device: DeviceProfile | None = None
    memory_bytes: int | None = None
    speed: float = 1.0
    spec: RankSpec | None = None


@dataclass(frozen=True)
class Machine:
    """What a model is cut for. Use `machine`.

    Attributes:
        ranks: one for each stage, in pipeline order.
        timing: what seconds are taken from; None: FLOPs at a nominal rate.
        topology: which of their links joins the ranks.
    """

    ranks: tuple[Rank, ...]
    timing: Timing | None = None
    topology: str = "auto"

    @property
    def has_limits(self) -> bool:
        """Whether some rank's memory is limited."""
        limits = (rank.spec.memory_bytes if rank.spec is not None else rank.memory_bytes for rank in self.ranks)
        return any(limit is not None for limit in limits)

    def device_of(self, rank: Rank) -> DeviceProfile:
        """The rank's device; where it was described without one, the one that seconds are taken from, or else the default."""
        if rank.device is not None:
            return rank.device
        if isinstance(self.timing, Roofline):
            return self.timing.device
        measured = known_device(self.timing.device) if isinstance(self.timing, MeasuredProfile) else None
        return measured or DEVICES[DEFAULT_DEVICE]


def machine(
    num_stages: int,
    ranks: RankChoice | None = None,
    profile: TimingChoice | None = None,
    topology: str = "auto",
) -> Machine:
    """Read a description of the ranks.

    Args:
        num_stages: number of ranks.
        ranks: their descriptions, separated by commas or as a sequence; a single one stands for all. Each is a device
            (`rtx4090`), a device with another memory (`rtx4090:16GB`), or memory alone (`24GB`), and may say how many
            times faster it is than that, or than the others (`24GB*2`); in a sequence also a RankSpec. From memory, one
            gigabyte is left to CUDA. Default: equal ranks without limits.
        profile: what seconds are taken from, see `find_timing`. Default: the data sheet of the first device that `ranks`
            names.
        topology: `auto`, `nvlink`, `pcie` or `ethernet`: what joins devices.

    Raises:
        ConfigError: something is not described like this, or there is not one description per rank.
    """
    timing = find_timing(profile)
    if topology not in TOPOLOGIES:
        raise ConfigError(f"topology={topology!r}: expected one of {', '.join(TOPOLOGIES)}.")
    entries = ranks.split(",") if isinstance(ranks, str) else ranks
    if entries is None:
        return Machine((Rank(),) * num_stages, timing, topology)
    if not isinstance(entries, Sequence):
        raise ConfigError(f"ranks={ranks!r}: expected descriptions of ranks, such as 'rtx4090,rtx3090'.")
    read = [_read(entry) for entry in entries]
    if len(read) == 1:
        read *= num_stages
    if len(read) != num_stages:
        raise ConfigError(
            f"ranks={ranks!r} describes {len(read)} ranks for {num_stages} stages; give one per stage, or one for all."
        )
    devices = [rank.device for rank in read if rank.device is not None]
    for device in devices:
        device.link(topology)
    if timing is None and devices:
        timing = Roofline(devices[0])
    if isinstance(timing, MeasuredProfile) and devices:
        find_device(timing.device)  # or else the speed of the others, compared with it, is not known
    return Machine(tuple(read), timing, topology)


def machine_of(config: ParallelConfig) -> Machine:
    """The machine that a configuration describes.

    Raises:
        ConfigError: as `machine` does.
    """
    return machine(config.pipeline_parallel_size, config.ranks, config.profile, config.topology)


def _read(entry: object) -> Rank:
    if isinstance(entry, RankSpec):
        return Rank(spec=entry)
    if not isinstance(entry, str) or not entry.strip():
        raise ConfigError(f"the rank {entry!r} is nothing known; expected {EXPECTED}.")
    description, star, speed = entry.partition("*")
    name, colon, memory = description.partition(":")
    if MEMORY.fullmatch(name.strip()):
        device, limit = None, _usable_bytes(entry, name, RESERVED_BYTES)
    else:
        device = find_device(name)
        limit = _usable_bytes(entry, memory, device.reserved_bytes) if colon else device.usable_bytes
    return Rank(device, limit, _speed(entry, speed) if star else 1.0)


def _usable_bytes(entry: str, text: str, reserved: int) -> int:
    found = MEMORY.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"the rank {entry!r} has the memory {text!r}; expected {EXPECTED}.")
    usable = round(float(found[1]) * GIB) - reserved
    if usable <= 0:
        raise ConfigError(f"the rank {entry!r} has too little memory: {reserved / GIB:g} GB are left to CUDA.")
    return usable


def _speed(entry: str, text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise ConfigError(f"the rank {entry!r} has the speed {text!r}; expected {EXPECTED}.")
    return speed
