"""What an import brings with it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules_after(statement: str) -> set[str]:
    """Names of all modules that a new interpreter has after this statement."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {statement}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_partitioners_load_no_torch() -> None:
    loaded = modules_after("import partitioners")
    assert "partitioners.balanced" in loaded
    assert not {"torch", "numpy", "diffusers", "transformers", "dit_pipelining"} & loaded


def test_dit_pipelining_loads_nothing_by_itself() -> None:
    loaded = modules_after("import dit_pipelining")
    assert "dit_pipelining" in loaded
    assert not {"torch", "numpy", "diffusers", "transformers"} & loaded


def test_the_package_has_the_names_of_its_front_door() -> None:
    from dit_pipelining import PUBLIC, api

    assert list(PUBLIC) == api.__all__


def test_capture_and_lowering_know_nothing_of_diffusers() -> None:
    loaded = modules_after("from dit_pipelining.lowering.split import SplitModel")
    assert "torch" in loaded
    assert not {"diffusers", "transformers"} & loaded


@pytest.mark.parametrize("name", ["torch", "diffusers"])
def test_these_tests_would_notice_an_import(name: str) -> None:
    assert name in modules_after(f"import {name}")
