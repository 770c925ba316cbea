"""`dit-pipelining doctor`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dit_pipelining.cli import checks, main
from dit_pipelining.cli.doctor import usual_places
from dit_pipelining.cli.needs import needs
from dit_pipelining.cli.ranks import parts
from dit_pipelining.cli.study import Question
from dit_pipelining.comm.mesh import layout_of
from dit_pipelining.config import ParallelConfig
from dit_pipelining.lowering.names import data_size
from dit_pipelining.planning.components import NOTHING
from dit_pipelining.planning.degrees import Degrees


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
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "2.4.1+cpu" if name == "torch" else "99.0")
    assert [found.what for found in checks.versions() if found.state == checks.BAD] == ["torch"]


def test_a_transfer_that_fails_says_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "launch", _fail)
    (found,) = checks.transfers(1.0)
    assert found.state == checks.BAD
    assert "no route" in found.text
    assert "GLOO_SOCKET_IFNAME" in found.hint


def _fail(*_: object, **__: object) -> None:
    raise checks.RemoteRankError("rank 1 failed: no route to host")


FLUX = Question(model="flux.1-dev")
TINY_WAN = str(Path(__file__).parents[2] / "recipes" / "tiny_wan")


def test_a_model_that_fits_on_one_large_gpu_needs_two_small_ones() -> None:
    """FLUX.1-dev: 11.9 billion parameters in 16 bits are 22.2 GiB, its text encoders 9.1."""
    whole, large = needs(FLUX, "h100")
    assert "weights 22.2 GiB" in whole.text
    assert "encoders 9.10 GiB" in whole.text
    assert large.text.startswith("1: ")
    *_, small = needs(FLUX, "rtx4090")
    assert small.text.startswith("2: ")
    assert small.hint == "pipeline_parallel_size=2"


def test_what_no_number_of_gpus_holds_is_said() -> None:
    *_, tiny = needs(FLUX, "2GB")
    assert "too small" in tiny.text


def test_gpus_that_are_too_few_are_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (20 * 2**30, 24 * 2**30))
    *_, found = needs(FLUX)
    assert found.state == checks.BAD
    assert "here are 1" in found.text


def test_a_model_that_is_not_known_is_an_error_before_anything_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


def test_one_gpu_named_twice_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    (found,) = checks.environment()
    assert "two ranks on one GPU" in found.hint


@pytest.mark.parametrize(
    ("name", "count", "reach", "hint"),
    [
        ("NVIDIA GeForce RTX 4090", 2, True, "NCCL_P2P_DISABLE=1"),
        ("NVIDIA GeForce RTX 4090", 2, False, "NCCL_P2P_DISABLE=1"),
        ("NVIDIA H100 80GB HBM3", 2, True, ""),
        ("NVIDIA H100 80GB HBM3", 1, True, "through host memory"),
    ],
)
def test_links_that_are_known_to_make_trouble_come_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, reach: bool, hint: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach)
    (found,) = checks.links()
    assert hint in found.hint
    assert (found.state == checks.GOOD) == (not hint)


def test_a_driver_that_does_not_fit_torch_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks.os.path, "exists", lambda path: True)
    (found,) = (own for own in checks.versions() if own.state == checks.BAD)
    assert "update the driver" in found.hint


def test_the_mesh_says_which_rank_does_what() -> None:
    found = dict(parts(Degrees(cfg=2, pipeline=2, ulysses=2), NOTHING.places))
    assert found[0] == "replica 0, stage 0, Ulysses part 0"
    assert found[3] == "replica 0, stage 1, Ulysses part 1"
    assert found[4] == "replica 1, stage 0, Ulysses part 0"


def test_the_mesh_says_which_rank_has_which_component_and_which_part() -> None:
    config = ParallelConfig(
        data_parallel_size=2,
        pipeline_parallel_size=2,
        ulysses_degree=2,
        text_encoder_tp_size=3,
        vae_patch_parallel_size=3,
    )
    found = dict(parts(layout_of(config), usual_places(config)))
    assert [own.rpartition("Ulysses part ")[2] for own in found.values()] == [
        "0, text_encoder part 0",
        "1, text_encoder part 1, vae",
        "0, text_encoder part 2, vae",
        "1, vae",
    ] * 2


def test_the_mesh_of_a_model_has_its_components(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "every_check", lambda seconds: [])
    file = tmp_path / "ranks.yaml"
    file.write_text("component_ranks: {vae: 2}")
    flags = ["--stages", "2", "--cfg-parallel-size", "2", "--config", str(file), "--device", "a100"]
    assert main(["doctor", TINY_WAN, *flags]) == 0
    rows = [re.split(r"\s*│\s*", line.strip("│ ")) for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row[0].isdigit()] == [
        ["0", "replica 0, stage 0, text_encoder"],
        ["1", "replica 0, stage 1"],
        ["2", "replica 1, stage 0, vae"],
        ["3", "replica 1, stage 1"],
    ]


def test_degrees_are_printed_as_a_mesh(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "every_check", lambda seconds: [])
    assert main(["doctor", "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"]) == 0
    printed = capsys.readouterr().out
    assert "torchrun --nproc-per-node 4" in printed
    assert "stage 1, part of the heads 1" in printed


@pytest.mark.parametrize(
    "sizes",
    [
        dict(ulysses_degree=2, text_encoder_tp_size=2),
        dict(ring_degree=2, cfg_parallel_size=2, use_hsdp=True),
        dict(tensor_parallel_size=2, text_encoder_tp_size=4),
        dict(ulysses_degree=2, vae_patch_parallel_size=3),
    ],
)
def test_what_each_rank_needs_is_what_show_says(show: Callable[..., Any], sizes: dict[str, Any]) -> None:
    """All that divides a rank's memory counts: tokens, heads, shards, parts of text encoders, tiles."""
    flags = [
        part
        for name, size in sizes.items()
        for part in (f"--{name.replace('_', '-')}", *([] if size is True else [size]))
    ]
    shown = show(TINY_WAN, "--stages", 2, "--ranks", "a100", *flags)
    alone = show(TINY_WAN, "--stages", 2, "--ranks", "a100")
    config = ParallelConfig(pipeline_parallel_size=2, **sizes)
    _, found = needs(Question(model=TINY_WAN, config=config), "a100")
    totals = [rank["memory"]["total"] for rank in shown["ranks"]]
    assert re.findall(r"ranks (\S+) (\S+ \S+) \(", found.text) == [
        (f"{2 * place}-{2 * place + 1}", data_size(total)) for place, total in enumerate(totals)
    ]
    assert len(totals) == config.line_size
    assert found.text.startswith(f"{config.world_size}: ")
    assert totals[0] < alone["ranks"][0]["memory"]["total"]


def test_ranks_that_lack_memory_are_told_what_they_need() -> None:
    _, found = needs(Question(model=TINY_WAN, config=ParallelConfig(pipeline_parallel_size=2)), "1.1GB")
    assert found.state == checks.BAD
    assert re.search(r"rank 0 \S+ MiB .*MiB too little", found.text)
    assert found.hint == "a smaller --height, --width or --num-frames needs less"


def test_images_have_no_frames() -> None:
    whole, tiny = needs(Question(model="pixart-sigma-1024"), "1.5GB")
    assert "frames" not in whole.hint + tiny.hint


def test_encoders_that_are_too_large_for_a_gpu_are_to_be_split() -> None:
    """PixArt's text encoder has 8.9 GiB, all else 3.5."""
    _, small = needs(Question(model="pixart-sigma-1024"), "8GB")
    assert small.state == checks.BAD
    assert "--text-encoder-tp-size" in small.hint


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ulysses-degree", "7"], "heads do not divide by ulysses x tensor = 7"),
        (["--use-hsdp"], "use_hsdp=True needs ranks that hold the same stage"),
        (["--text-encoder-tp-size", "3"], "text_encoder_tp_size=3: 1 rank at most can run a call together"),
        (
            ["--tensor-parallel-size", "2", "--cfg-parallel-size", "2", "--use-hsdp"],
            "use_hsdp=True and tensor_parallel_size=2",
        ),
        (["--vae-patch-parallel-size", "2"], "vae_patch_parallel_size=2: 1 rank at most can run a call together"),
        (["--stages", "100"], "100 stages are more than the model's 12 blocks"),
        (["--seconds", "0"], "'0' is not a number of seconds above 0"),
        (["--device", "toaster"], "there is no device 'toaster'"),
        (["--device", ""], "the rank '' is nothing known"),
    ],
)
def test_ranks_that_cannot_be_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["doctor", TINY_WAN, *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
