"""Measuring a stream gives the cost of each stage, and a configuration that keeps the goals."""

from pathlib import Path
from typing import Any

import pytest

from dit_pipelining.api import ParallelConfig, load_pipeline, open_stream
from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.batch_scheduler import StreamChoice
from dit_pipelining.stream.head import StreamInput
from dit_pipelining.stream.simulation import StageCost
from dit_pipelining.stream.spec import StreamSpec
from dit_pipelining.stream.tuning import measure, tune
from tests import checkpoints
from tests.distributed import RankPool

SIZE = dict(height=64, width=64, max_sequence_length=16)
SPEC = StreamSpec(levels=(1.0, 0.6), frames_per_chunk=1, window=2)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("tuning") / "wan", num_layers=3)


def opened(folder: Path, stages: int) -> Any:
    config = ParallelConfig(pipeline_parallel_size=stages, timeout_seconds=60, component_ranks={"vae": "all"})
    return load_pipeline(folder, config)


def tuned(folder: Path, stages: int) -> tuple[list[StageCost], StreamChoice, list[int]]:
    """The costs for a changed video, the choice for longer chunks, and the frames of each chunk that it gives."""
    pipeline = opened(folder, stages)
    stream = open_stream(pipeline, SPEC, prompt="a red cat", **SIZE)
    costs = measure(stream, encodes=True)
    choice = tune(stream, 0.01, streams=(1, 2), frames_per_chunk=(2,))
    longer = open_stream(pipeline, choice.spec, prompt="a red cat", **SIZE)
    inputs = [iter([StreamInput()] * 2) for _ in range(choice.spec.streams)]
    return costs, choice, [len(chunk.frames) for chunk in longer.run(inputs)]


def test_all_ranks_measure_and_choose_the_same(ranks: RankPool, wan: Path) -> None:
    (costs, choice, nothing), (*others, frames) = ranks.run(2, tuned, wan, 2)
    assert others == [costs, choice]
    assert all(cost.fixed + cost.per_row > 0 for cost in costs)
    assert [cost.per_start > 0 for cost in costs] == [True, False]  # the first rank encodes
    assert [cost.per_finish > 0 for cost in costs] == [False, True]  # the last rank decodes
    spec = choice.spec
    assert (spec.num_levels, spec.streams, spec.frames_per_chunk, spec.window) == (2, 2, 2, 2)
    assert (nothing, frames) == ([], [5, 5, 8, 8])


def test_goals_beyond_this_machine_are_refused(wan: Path) -> None:
    stream = open_stream(opened(wan, 1), StreamSpec(levels=(1.0,), window=1), prompt="a red cat", **SIZE)
    assert [cost.per_start for cost in measure(stream)] == [0.0]
    with pytest.raises(ConfigError, match=r"no choice gives 1e\+06 frames/s .* Nearest is 1 levels"):
        tune(stream, 1e6)
