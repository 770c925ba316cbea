"""What devices can do, by their makers' data sheets: peak rates, memory, links.

Rates are dense (data sheets of NVIDIA print twice that, for sparse weights). Bandwidths of links are those of one
direction (data sheets print the sum of both). Gigabytes of memory chips are binary, those of bandwidths decimal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dit_pipelining.config import TOPOLOGIES
from dit_pipelining.errors import ConfigError

GIB = 2**30

HALF_PRECISION_BYTES = 2

MATRIX_SHARE = 0.6
"""Share of the peak rate that matrix products and attention of a transformer reach. A rule of thumb, and the largest
error of a prediction from a data sheet: `dit-pipelining profile` measures it instead."""

MEMORY_SHARE = 0.8
"""Share of the memory's bandwidth that elementwise operations and norms reach: a rule of thumb likewise."""

LINK_SHARE = 0.8
"""Share of a link's bandwidth that large transfers reach: packet headers and the library's protocol take the rest."""

RESERVED_BYTES = 1 * GIB
"""Memory of each GPU that a plan leaves alone: CUDA's context, NCCL's buffers, and what the allocator cannot use."""


@dataclass(frozen=True)
class Link:
    """A link between two neighbouring devices.

    Attributes:
        name: of the link.
        bytes_per_second: one direction, as printed.
        latency_seconds: of a transfer of no bytes.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float

    @property
    def usable_bytes_per_second(self) -> float:
        return self.bytes_per_second * LINK_SHARE


# NVIDIA's product pages: NVLink 900 (Hopper), 600 (A100), 112.5 GB/s (GeForce RTX 3090, with a bridge), both directions
# together. PCI-SIG: 16 and 32 GT/s a lane, 16 lanes, 128 of 130 bits are data. Latencies are the order of magnitude of a
# small send and receive of NCCL over each kind of link; transfers of hidden states take a hundred times as long.
NVLINK_4 = Link("NVLink 4", 450e9, 10e-6)
NVLINK_3 = Link("NVLink 3", 300e9, 10e-6)
NVLINK_BRIDGE = Link("NVLink bridge", 56.25e9, 10e-6)
PCIE_5 = Link("PCIe 5.0 x16", 63.0e9, 20e-6)
PCIE_4 = Link("PCIe 4.0 x16", 31.5e9, 20e-6)
ETHERNET_100G = Link("100 Gb/s Ethernet", 12.5e9, 50e-6)
ETHERNET_10G = Link("10 Gb/s Ethernet", 1.25e9, 50e-6)
LOOPBACK = Link("loopback", 2e9, 100e-6)


@dataclass(frozen=True)
class DeviceProfile:
    """What one device can do.

    Attributes:
        name: as in `DEVICES`.
        title: as people say it.
        bfloat16_flops_per_second: peak dense rate of matrix products in 16 bits, sums in 32.
        float32_flops_per_second: likewise in 32 bits. TF32 is not counted, since torch leaves it off.
        memory_bytes: of the device.
        memory_bytes_per_second: peak bandwidth of its memory.
        links: by topology (`nvlink`, `pcie`, `ethernet`): the fastest link of that kind that joins two such devices.
        reserved_bytes: memory that no plan may use.
        matrix_share: of the peak rate that matrix products reach.
        memory_share: of the memory's bandwidth that other operations reach.
    """

    name: str
    title: str
    bfloat16_flops_per_second: float
    float32_flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float
    links: Mapping[str, Link] = field(hash=False)
    reserved_bytes: int = RESERVED_BYTES
    matrix_share: float = MATRIX_SHARE
    memory_share: float = MEMORY_SHARE

    @property
    def usable_bytes(self) -> int:
        """Memory that a stage, other components and activations may take together."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def usable_memory_bytes_per_second(self) -> float:
        """Of the memory's bandwidth, what elementwise operations and norms reach."""
        return self.memory_bytes_per_second * self.memory_share

    def usable_flops_per_second(self, itemsize: int) -> float:
        """The rate that matrix products of elements of this size reach."""
        half = itemsize <= HALF_PRECISION_BYTES
        peak = self.bfloat16_flops_per_second if half else self.float32_flops_per_second
        return peak * self.matrix_share

    def link(self, topology: str = "auto") -> Link:
        """How the device is joined to the next one.

        Raises:
            ConfigError: there is no such topology, or the device has no such link.
        """
        if topology not in TOPOLOGIES:
            raise ConfigError(f"topology={topology!r}: expected one of {', '.join(TOPOLOGIES)}.")
        if topology == "auto":
            topology = "nvlink" if "nvlink" in self.links and self.links["nvlink"] is not NVLINK_BRIDGE else "pcie"
        if topology not in self.links:
            raise ConfigError(f"{self.title} has no {topology}; its links are {', '.join(self.links)}.")
        return self.links[topology]


# NVIDIA H200 and H100 data sheets, SXM: BFLOAT16 1,979 with sparsity, FP32 67 TFLOPS; 141 GB at 4.8 TB/s, 80 GB at
# 3.35 TB/s.
H200 = DeviceProfile(
    "h200",
    "NVIDIA H200",
    989.4e12,
    67e12,
    141 * GIB,
    4.8e12,
    dict(nvlink=NVLINK_4, pcie=PCIE_5, ethernet=ETHERNET_100G),
)
H100 = DeviceProfile(
    "h100",
    "NVIDIA H100",
    989.4e12,
    67e12,
    80 * GIB,
    3.35e12,
    dict(nvlink=NVLINK_4, pcie=PCIE_5, ethernet=ETHERNET_100G),
)
# NVIDIA A100 data sheet, 80GB SXM: BFLOAT16 312, FP32 19.5 TFLOPS; 2,039 GB/s.
A100 = DeviceProfile(
    "a100",
    "NVIDIA A100",
    312e12,
    19.5e12,
    80 * GIB,
    2.039e12,
    dict(nvlink=NVLINK_3, pcie=PCIE_4, ethernet=ETHERNET_100G),
)
# NVIDIA L40S data sheet: BFLOAT16 362.05, FP32 91.6 TFLOPS; 48 GB at 864 GB/s, of which error correction takes 1/16; no
# NVLink.
L40S = DeviceProfile(
    "l40s", "NVIDIA L40S", 362.05e12, 91.6e12, 45 * GIB, 864e9, dict(pcie=PCIE_4, ethernet=ETHERNET_100G)
)
# NVIDIA Ada GPU architecture white paper, GeForce RTX 4090: BF16 with FP32 accumulate 165.2, FP32 82.6 TFLOPS; 24 GB at
# 1,008 GB/s; no NVLink.
RTX_4090 = DeviceProfile(
    "rtx4090", "GeForce RTX 4090", 165.2e12, 82.6e12, 24 * GIB, 1008e9, dict(pcie=PCIE_4, ethernet=ETHERNET_10G)
)
# NVIDIA Ampere GA102 GPU architecture white paper, GeForce RTX 3090: BF16 with FP32 accumulate 71, FP32 35.6 TFLOPS; 24 GB
# at 936 GB/s. The bridge joins two cards only, and few machines have it: it must be asked for.
RTX_3090 = DeviceProfile(
    "rtx3090",
    "GeForce RTX 3090",
    71e12,
    35.6e12,
    24 * GIB,
    936e9,
    dict(nvlink=NVLINK_BRIDGE, pcie=PCIE_4, ethernet=ETHERNET_10G),
)
# Eight cores at 3 GHz with two 8-wide multiply-adds a cycle (AVX2), which computes 16-bit products in 32 bits; two
# channels of DDR5-4800 (JEDEC: 38.4 GB/s each). Ranks on one host talk through gloo.
CPU = DeviceProfile(
    "cpu",
    "8-core CPU",
    768e9,
    768e9,
    32 * GIB,
    76.8e9,
    dict(pcie=LOOPBACK, ethernet=ETHERNET_10G),
)

DEVICES: dict[str, DeviceProfile] = {
    device.name: device for device in (H200, H100, A100, L40S, RTX_4090, RTX_3090, CPU)
}
"""The devices that have a name."""

DEFAULT_DEVICE = "h200"
"""What ranks are taken to be where nobody says it."""


def find_device(name: str) -> DeviceProfile:
    """The device of this name; capitals, spaces, hyphens and the makers' names do not matter.

    Raises:
        ConfigError: there is none; names those that there are.
    """
    if (device := known_device(name)) is None:
        raise ConfigError(f"there is no device {name!r}; known are {', '.join(DEVICES)}.")
    return device


def known_device(name: str) -> DeviceProfile | None:
    """The same; None: there is none."""
    key = "".join(letter for letter in name.lower() if letter.isalnum())
    for word in ("nvidia", "geforce"):
        key = key.replace(word, "")
    # torch names devices such as `NVIDIA H100 80GB HBM3` and `NVIDIA A100-SXM4-80GB`.
    return next((device for device in DEVICES.values() if key.startswith(device.name)), None)
