"""What a model is cut for, where a command was told of it: the machine, and how it is shown."""

from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.devices import DEFAULT_DEVICE, find_device, known_device
from dit_pipelining.costs.machine import Machine, machine
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.errors import ConfigError
from dit_pipelining.show.picture import Target


def machine_and_target(config: ParallelConfig) -> tuple[Machine, Target]:
    """The machine to cut for, and how it is shown. Where no device was named, memory does not limit the cut."""
    profile = config.profile or (find_device(DEFAULT_DEVICE) if config.ranks is None else None)
    found = machine(config.pipeline_parallel_size, config.ranks, profile, config.topology)
    measured = found.timing if isinstance(found.timing, MeasuredProfile) else None
    if measured is not None and config.ranks is None and known_device(measured.device) is None:
        raise ConfigError(
            f"{config.profile} was measured on {measured.device!r}, whose memory and links are not known; name the known "
            "device that is most like it with --device."
        )
    devices = tuple(map(found.device_of, found.ranks))
    limits = (rank.memory_bytes or device.usable_bytes for rank, device in zip(found.ranks, devices, strict=True))
    links = (device.link(config.topology) for device in devices[:-1])
    source = f"as measured on {measured.device}" if measured else "from data sheets"
    return found, Target(devices, tuple(links), tuple(limits), source)
