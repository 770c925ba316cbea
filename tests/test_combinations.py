"""The README's table of combinations says what the plans say, and every cell is run by a test."""

import inspect
from functools import cache
from pathlib import Path

import diffusers
import pytest
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.sequence import check_sequence_parallel
from dit_pipelining.sharding.tensor import check_tensor_parallel
from dit_pipelining.sharding.tile_ranks import can_spread
from tests import vaes
from tests.runtime import test_inside_stages
from tests.sharding import test_sequence, test_tensor, test_tensor_and_sequence
from tests.sharding.families import FAMILIES, OTHERS, WITHOUT_PIPELINE
from tests.zoo import CASES, build_model, case_names

README = Path(__file__).parent.parent / "README.md"
HEAD = "| | `tensor` | `ulysses` | `ring` | `ulysses` x `ring` | `tensor` x `ulysses` | `hsdp` | VAE tiles |"
COLUMNS = ("tensor", "ulysses", "ring", "both", "tensor and ulysses", "hsdp", "tiles")
DEGREES = {"ulysses": (2, 1), "ring": (1, 1), "both": (2, 1), "tensor and ulysses": (2, 2)}
"""Ulysses, tensor; any ring is possible where these are."""


def table() -> dict[str, dict[str, bool]]:
    """By name of a model: what is ticked."""
    lines = README.read_text(encoding="utf-8").split(HEAD)[1].splitlines()[2:]
    rows: dict[str, dict[str, bool]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert set(cells) <= {"", "✓"}
        rows |= {name: dict(zip(COLUMNS, (bool(cell) for cell in cells), strict=True)) for name in names.split(", ")}
    return rows


TABLE = table()


@cache
def model_of(name: str) -> nn.Module:
    if name in FAMILIES:
        return build_model(FAMILIES[name].with_four_heads())
    return build_model(test_tensor.case_of(OTHERS[name]))


def allows(name: str, column: str) -> bool:
    """What the code says."""
    if column == "tiles":
        vae = FAMILIES[name].vae if name in FAMILIES else None
        return vae is not None and can_spread(getattr(diffusers, vae))
    model = model_of(name)
    if column == "hsdp":
        return bool(find_blocks(model)) and name not in WITHOUT_PIPELINE
    try:
        if column.startswith("tensor"):
            check_tensor_parallel(model, 2, find_blocks(model))
        if column != "tensor":
            check_sequence_parallel(model, *DEGREES[column])
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", list(TABLE))
def test_the_table_says_what_the_plans_say(name: str) -> None:
    assert {column: allows(name, column) for column in COLUMNS} == TABLE[name]


def test_every_class_is_in_the_table() -> None:
    assert set(TABLE) == {*FAMILIES, *OTHERS}
    cases = [family.case for family in FAMILIES.values()] + list(OTHERS.values())
    assert {CASES[case].model_class for case in cases} == {CASES[name].model_class for name in case_names()}


def test_every_cell_is_run_over_ranks() -> None:
    compared = {*test_sequence.EVEN, *test_sequence.ODD, *test_sequence.MORE}
    for name, family in FAMILIES.items():
        assert family.case in compared, name  # ulysses, ring and both
        if family.vae is not None:
            assert family.vae in vaes.VAES
    assert "FAMILIES" in inspect.getsource(test_tensor_and_sequence)
    assert {"tp2", "pp2-tp2", "cfg2-tp2", "hsdp2", "pp2-hsdp2"} <= set(test_inside_stages.LAYOUTS)
