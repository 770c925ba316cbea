"""Names and numbers as people read them."""

import pytest

from dit_pipelining.lowering.names import block_ranges, count, data_size
from dit_pipelining.show.stage_table import BAR_WIDTH, bar


def test_runs_of_blocks_are_written_as_one():
    names = ["joint.0", "joint.1", "joint.2", "single.0", "single.2", "mid"]
    assert block_ranges(names) == ("joint 0-2", "single 0", "single 2", "mid")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 K"), (14288491584, "14.3 B"), (999_700_000, "1.00 B"), (6.52e15, "6.52 P")],
)
def test_counts_have_three_digits(number, text):
    assert count(number) == text


def test_sizes_are_in_binary_units():
    assert [data_size(size) for size in (10, 10240, 774144000, 2**40)] == ["10 B", "10.0 KiB", "738 MiB", "1.00 TiB"]


def test_a_bar_is_as_long_as_its_fraction():
    assert len(bar(1.0)) == BAR_WIDTH
    assert len(bar(0.5)) == BAR_WIDTH // 2
    assert bar(0.0) == ""
    assert bar(1 / BAR_WIDTH / 2) == "▌"
