"""Ranks without torchrun."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dit_pipelining import ParallelConfig, launch
from dit_pipelining.errors import ConfigError, RemoteRankError


def sum_of_ranks(factor: int) -> int:
    torch.distributed.init_process_group("gloo")  # from the environment, as under torchrun
    total = torch.tensor([torch.distributed.get_rank() + 1])
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    if factor == 0:
        raise ValueError("a factor of nothing")
    return int(total) * factor


def test_every_rank_runs_the_function_and_hands_back_its_result() -> None:
    assert launch(sum_of_ranks, 5, nproc=2) == [15, 15]


def test_what_a_rank_raises_is_raised_here() -> None:
    with pytest.raises(RemoteRankError) as caught:
        launch(sum_of_ranks, 0, nproc=2)
    first, *traceback = str(caught.value).splitlines()
    assert re.fullmatch(r"rank \d failed: ValueError: a factor of nothing", first)
    assert any("in sum_of_ranks" in line for line in traceback)


def needs_three() -> None:
    ParallelConfig(pipeline_parallel_size=3).check_world_size(int(os.environ["WORLD_SIZE"]))


def test_too_few_processes_are_told_how_many_to_launch() -> None:
    with pytest.raises(
        RemoteRankError, match=r"has 1 rank, but .* Start them with `launch\(\.\.\., nproc=3\)`"
    ) as caught:
        launch(needs_three, nproc=1)
    assert "torchrun" not in str(caught.value)


@pytest.mark.full
def test_a_script_that_its_ranks_would_run_again_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from dit_pipelining import launch\n\ndef f(): return 3\n\nlaunch(f, nproc=1)\n")
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": "."})
    assert ended.returncode != 0
    assert 'put it below `if __name__ == "__main__":`' in ended.stderr
    assert "rank 0 failed: it ended while it started, and printed why" in ended.stderr


TYPED = """
from dit_pipelining import launch

def rank(offset):
    import os
    return int(os.environ["RANK"]) + offset

print(launch(rank, 5, nproc=2))
"""


@pytest.mark.full
def test_a_function_of_a_script_from_the_standard_input_is_run_by_every_rank() -> None:
    environment = {**os.environ, "PYTHONPATH": "."}
    ended = subprocess.run([sys.executable], input=TYPED, capture_output=True, text=True, timeout=120, env=environment)
    assert "[5, 6]" in ended.stdout, ended.stderr
    assert ended.returncode == 0


def test_what_new_processes_cannot_import_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lambda.* cannot be sent to new processes.*neither a lambda"):
        launch(lambda: 3, nproc=1)
    with pytest.raises(ConfigError, match="cannot be sent to new processes"):
        launch(sum_of_ranks, threading.Lock(), nproc=1)


@pytest.mark.parametrize("nproc", [0, -1, 1.5, True])
def test_a_number_of_processes_that_is_none_is_refused(nproc: int) -> None:
    with pytest.raises(ConfigError, match="nproc"):
        launch(sum_of_ranks, 1, nproc=nproc)


def test_an_unknown_way_to_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="spawn"):
        launch(sum_of_ranks, 1, nproc=2, start_method="teleport")
