"""Fixtures for tests of the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dit_pipelining.cli import main
from tests.zoo import CASES


@pytest.fixture(autouse=True)
def no_partition_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `show ... --json` and returns what it printed, after checking that nothing else was said."""

    def run(*arguments: object) -> Any:
        code = main(["show", *map(str, arguments), "--json"])
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, "")
        return json.loads(printed.out)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The config of a Wan of 4 blocks."""
    file = tmp_path / "tiny" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"_class_name": "WanTransformer3DModel", **CASES["WanTransformer3D"].init}))
    return file
