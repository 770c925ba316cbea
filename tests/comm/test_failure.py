"""A rank that dies, leaves, never comes or fails by itself ends the others with a message that names it and the cause."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dit_pipelining.api import ParallelConfig, load_pipeline
from dit_pipelining.comm.waking import is_effect
from dit_pipelining.errors import CheckpointError, RemoteRankError
from tests import checkpoints, faults
from tests.distributed import RankPool


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("failure") / "wan")


def last_line(ended: faults.Ended) -> str:
    return ended.errors.strip().splitlines()[-1]


def test_a_killed_rank_is_named(wan: Path) -> None:
    other, killed = faults.run("killed", wan)
    assert killed.code == -9
    assert other.code == 1
    assert "RemoteRankError: rank 1 has shown no sign of life" in last_line(other)


def test_a_rank_that_never_arrives_is_named(wan: Path) -> None:
    (alone,) = faults.run("absent", wan, ranks=[0])
    assert alone.code == 1
    assert "RemoteRankError: rank 1 of 2 did not arrive within 3 s" in last_line(alone)


def test_an_error_between_calls_reaches_the_rank_that_waits(wan: Path) -> None:
    waiting, failed = faults.run("uncaught", wan)
    assert (waiting.code, failed.code) == (1, 1)
    assert "RemoteRankError: rank 1 failed: LookupError: between two calls" in waiting.errors
    assert "RemoteRankError" not in failed.errors


@pytest.mark.full
def test_a_rank_that_ended_its_script_is_not_waited_for(wan: Path) -> None:
    waiting, left = faults.run("left", wan)
    assert (waiting.code, left.code) == (1, 0)
    assert "RemoteRankError: rank 1 has ended, but rank 0 waits for it" in last_line(waiting)


@pytest.mark.full
def test_a_rank_that_cannot_be_woken_prints_the_cause_and_exits(wan: Path) -> None:
    stuck, failed = faults.run("stuck", wan)
    assert (stuck.code, failed.code) == (1, 1)
    assert "[rank 0] rank 1 failed: KeyError: 'only on rank 1'" in stuck.errors


@pytest.mark.full
def test_a_part_of_a_text_encoder_that_fails_ends_the_others_that_wait_in_a_sum(wan: Path) -> None:
    waiting, failed = faults.run("part", wan)
    assert (waiting.code, failed.code) == (1, 1)
    assert "RemoteRankError: rank 1 failed: MemoryError: only on rank 1" in waiting.errors
    assert "RemoteRankError" not in failed.errors


def receive_nothing() -> bool:
    if dist.get_rank() == 1:
        return True
    with pytest.raises(RuntimeError) as caught:
        dist.irecv(torch.empty(1), src=1).wait(timedelta(milliseconds=50))
    return is_effect(caught.value)


def test_a_transfer_that_times_out_is_an_effect_of_what_went_wrong_elsewhere(ranks: RankPool) -> None:
    assert ranks.run(2, receive_nothing) == [True, True]


def load_where_rank_1_lacks_a_shard(folders: list[Path]) -> str:
    with pytest.raises((CheckpointError, RemoteRankError)) as caught:
        load_pipeline(folders[dist.get_rank()], ParallelConfig(pipeline_parallel_size=2))
    return f"{caught.typename}: {caught.value}"


def test_a_shard_that_one_rank_lacks_ends_the_load_on_all(ranks: RankPool, wan: Path, tmp_path: Path) -> None:
    lacking = checkpoints.wan(tmp_path / "wan")
    shard = sorted((lacking / "transformer").glob("*.safetensors"))[1]
    shard.unlink()
    of_rank_0, of_rank_1 = ranks.run(2, load_where_rank_1_lacks_a_shard, [wan, lacking])
    assert of_rank_0.startswith("RemoteRankError: rank 1 failed: CheckpointError")
    assert shard.name in of_rank_0
    assert of_rank_1.startswith("CheckpointError")
