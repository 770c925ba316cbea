"""`dit-pipelining doctor`."""

import pytest

from dit_pipelining.cli import checks, main


def test_this_machine_passes_and_ranks_talk_over_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "torch" in printed
    assert "gloo" in printed


def test_a_setting_that_makes_ranks_wait_for_each_other_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    (found,) = checks.environment()
    assert found.state == checks.BAD
    assert "unset" in found.hint


def test_an_old_torch_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "2.4.1+cpu")
    assert [found.what for found in checks.versions() if found.state == checks.BAD] == ["torch"]


def test_a_transfer_that_fails_says_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "launch", _fail)
    (found,) = checks.transfers(1.0)
    assert found.state == checks.BAD
    assert "no route" in found.text
    assert "GLOO_SOCKET_IFNAME" in found.hint


def _fail(*_: object, **__: object) -> None:
    raise checks.RemoteRankError("rank 1 failed: no route to host")
