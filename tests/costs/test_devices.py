import pytest

from dit_pipelining.costs.devices import DEVICES, H200, NVLINK_4, PCIE_4, RTX_3090, RTX_4090, find_device
from dit_pipelining.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h200", "h200"),
        ("H100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("rtx-3090", "rtx3090"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_is_found_under_the_names_that_people_and_torch_give_it(name: str, found: str) -> None:
    assert find_device(name).name == found


def test_an_unknown_device_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no device 'rtx5090'; known are h200, h100"):
        find_device("rtx5090")


def test_neighbours_talk_over_nvlink_where_every_machine_has_it() -> None:
    assert H200.link() is NVLINK_4
    assert RTX_4090.link() is PCIE_4
    assert RTX_3090.link() is PCIE_4
    assert RTX_3090.link("nvlink").bytes_per_second == 56.25e9


def test_a_link_that_a_device_does_not_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="GeForce RTX 4090 has no nvlink; its links are pcie, ethernet"):
        RTX_4090.link("nvlink")
    with pytest.raises(ConfigError, match="topology='infiniband': expected one of auto, nvlink"):
        H200.link("infiniband")


@pytest.mark.parametrize("name", DEVICES)
def test_the_figures_of_a_device_are_plausible(name: str) -> None:
    device = DEVICES[name]
    assert 0 < device.float32_flops_per_second <= device.bfloat16_flops_per_second
    assert 0 < device.usable_bytes < device.memory_bytes
    # Thousands of FLOPs can be done per byte at most, a few at least.
    assert 1 < device.bfloat16_flops_per_second / device.memory_bytes_per_second < 1000
