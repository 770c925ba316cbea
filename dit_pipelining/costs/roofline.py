"""Seconds from a device's data sheet: every operation is as slow as its arithmetic or its memory traffic.

The roofline of Williams, Waterman and Patterson (2009), per operation, since an eager model launches one after the other.
"""

from dataclasses import dataclass

from dit_pipelining.capture.counting import Operation
from dit_pipelining.costs.devices import HALF_PRECISION_BYTES, DeviceProfile
from dit_pipelining.costs.model_costs import Section


@dataclass(frozen=True)
class Roofline:
    """Predicts from the peak rates of a device, and the shares of them that are reached."""

    device: DeviceProfile

    def seconds(self, section: Section) -> float:
        if not section.counted:
            return section.flops / self.device.usable_flops_per_second(HALF_PRECISION_BYTES)
        return sum(self.operation_seconds(operation) * count for operation, count in section.operations.items())

    def operation_seconds(self, operation: Operation) -> float:
        """The longer of arithmetic and memory traffic."""
        arithmetic = operation.flops / self.device.usable_flops_per_second(operation.itemsize)
        traffic = operation.bytes / self.device.usable_memory_bytes_per_second
        return max(arithmetic, traffic)
