"""The keys of streaming configurations, from a file and the environment."""

from pathlib import Path

import pytest

from dit_pipelining.config import ParallelConfig
from dit_pipelining.config_sources import load_config
from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.goals import StreamGoals, load_goals
from dit_pipelining.stream.metrics import Reading

PROPOSED = """
diffusion:
  parallelism:
    strategy: pipeline
    pipeline_stages: 4
    stream_batch_steps: 4
    vae_placement: shared
    block_partition: dynamic
  slo:
    target_fps: 20
    max_ttff_ms: 800
    adaptive_steps: true
hardware:
  topology: nvlink
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_one_file_holds_the_ranks_and_the_goals(tmp_path: Path) -> None:
    path = written(tmp_path, PROPOSED)
    assert load_config(path, environment={}) == ParallelConfig(
        pipeline_parallel_size=4, vae_placement="shared", rebalance=True, topology="nvlink"
    )
    assert load_goals(path, environment={}) == StreamGoals(4, 20, 800, True)


def test_the_environment_beats_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, PROPOSED)
    environment = {"DIFFUSION_STREAM_BATCH_STEPS": "2", "DIFFUSION_VAE_PLACEMENT": "inline"}
    assert load_goals(path, environment=environment).stream_batch_steps == 2
    assert load_config(path, environment=environment).vae_placement == "inline"
    assert load_goals(environment={}) == StreamGoals()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stream_batch_steps: 0", r"stream_batch_steps=0 \(.*config.yaml\): expected a number of noise levels"),
        ("slo: {target_fps: fast}", "slo.target_fps='fast' .*: expected a number above 0"),
        ("slo: {adaptive_steps: 1}", "slo.adaptive_steps=1 .*: expected true or false"),
        ("slo: {adaptive_steps: true}", r"slo.adaptive_steps=True \(.*config.yaml\) needs .*: something to adapt to"),
        ("slo: {fps: 1}", "the key 'slo.fps' of .* is not known"),
    ],
)
def test_goals_that_cannot_be_used_are_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_goals(written(tmp_path, text), environment={})


def test_goals_that_were_missed_are_said() -> None:
    goals = StreamGoals(target_fps=16, max_ttff_ms=1500)
    assert goals.missed(Reading(frames=40, fps=16.5, first_frame=1.4, latency=0.9, misses=0)) == []
    slow = Reading(frames=40, fps=12.25, first_frame=2.0, latency=0.9, misses=3)
    assert goals.missed(slow) == [
        "slo.target_fps=16 was missed: 12.25 frames/s came",
        "slo.max_ttff_ms=1500 was missed by the first frame: it came after 2000 ms",
    ]
    assert StreamGoals().missed(slow) == []
    nothing = Reading(frames=0, fps=0.0, first_frame=None, latency=0.0, misses=0)
    assert goals.missed(nothing)[1].endswith("none came")


def test_a_variable_is_named_in_its_error() -> None:
    with pytest.raises(ConfigError, match="DIFFUSION_TARGET_FPS='slow'"):
        load_goals(environment={"DIFFUSION_TARGET_FPS": "slow"})
