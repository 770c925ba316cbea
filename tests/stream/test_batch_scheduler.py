"""The cost model plays the schedule through; the scheduler chooses by it, or says that it cannot."""

import pytest
import torch

from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.batch_scheduler import StreamBatchScheduler
from dit_pipelining.stream.head import StreamHead, StreamInput
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.schedule import Row, Start, steady_starts
from dit_pipelining.stream.simulation import StageCost, fit_cost, simulate
from dit_pipelining.stream.spec import StreamSpec, fewer_levels

SPEC = StreamSpec(levels=(1.0, 0.8, 0.6, 0.4))


def test_measured_micro_steps_give_fixed_and_per_row_seconds() -> None:
    samples = [(rows, 0.05 + 0.01 * rows) for rows in (1, 2, 2, 4)]
    cost = fit_cost([(4, 9.9), *samples, (4, 0.09)])  # one was disturbed
    assert cost.fixed == pytest.approx(0.05)
    assert cost.per_row == pytest.approx(0.01)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_slowest_stage_sets_the_rate_and_latency_is_levels_times_stages(num_stages: int) -> None:
    stages = [StageCost(0.02, 0.01)] * (num_stages - 1) + [StageCost(0.04, 0.01)]
    forecast = simulate(SPEC, stages)
    tick = 0.04 + 4 * 0.01
    assert forecast.chunks_per_second == pytest.approx(1 / tick, rel=0.02)
    assert forecast.latency == pytest.approx(SPEC.num_levels * num_stages * tick, rel=0.3)
    assert forecast.busy[-1] == pytest.approx(1.0, abs=0.12)


def test_a_finished_chunk_policy_needs_as_many_streams_as_stages() -> None:
    stages = [StageCost(0.1, 0.0)] * 3
    rates = []
    for streams in (1, 3):
        spec = StreamSpec(levels=(1.0, 0.5), policy="clean", streams=streams)
        rates.append(streams * simulate(spec, stages).chunks_per_second)
    assert rates[0] == pytest.approx(1 / (2 * 3 * 0.1 + 0.1), rel=0.03)  # one after the other
    assert rates[1] == pytest.approx(3 * rates[0], rel=0.03)


def test_guidance_and_streams_are_further_rows() -> None:
    alone = simulate(SPEC, [StageCost(0.0, 0.1)]).chunks_per_second
    doubled = StreamSpec(levels=SPEC.levels, guidance_scale=3.0)
    assert simulate(doubled, [StageCost(0.0, 0.1)]).chunks_per_second == pytest.approx(alone / 2)
    two = StreamSpec(levels=SPEC.levels, streams=2)
    assert simulate(two, [StageCost(0.0, 0.1)]).chunks_per_second == pytest.approx(alone / 2)


def test_the_most_levels_that_meet_the_rate_are_chosen() -> None:
    scheduler = StreamBatchScheduler([StageCost(0.1, 0.05, per_finish=0.05)], SPEC)
    assert [scheduler.compute_optimal_config(fps).spec.num_levels for fps in (9.9, 12.0, 15.0, 19.9)] == [4, 3, 2, 1]
    assert scheduler.compute_optimal_config(9.9, max_latency=0.7).spec.num_levels == 2
    assert scheduler.compute_optimal_config(9.9, streams=(1, 2)).spec.streams == 1


def test_longer_chunks_are_chosen_where_the_fixed_part_is_too_much() -> None:
    scheduler = StreamBatchScheduler([StageCost(0.4, 0.01)], SPEC)
    assert scheduler.compute_optimal_config(20.0, frames_per_chunk=(1, 2, 3)).spec.frames_per_chunk > 1


def test_the_cost_model_chooses_how_the_branches_of_guidance_run() -> None:
    guided = StreamSpec(levels=(1.0, 0.5), guidance_scale=4.0)
    cost = StageCost(0.01, 0.1)
    alone = StreamBatchScheduler([cost], guided)
    assert alone.ways_of_guidance(guided) == ["rows"]
    for two in (
        StreamBatchScheduler([cost], guided, replicas=2),
        StreamBatchScheduler([StageCost(0.005, 0.05)] * 2, guided),
    ):
        rows, replicas = (two.forecast(guided, way) for way in ("rows", "replicas"))
        assert rows.fps == pytest.approx(4 / (0.005 + 4 * 0.05), rel=0.01)  # two stages of half the blocks
        assert replicas.fps == pytest.approx(4 / (0.01 + 2 * 0.1), rel=0.01)  # all blocks, rows of one branch
        assert replicas.latency == pytest.approx(rows.latency / 2, rel=0.05)
        assert two.compute_optimal_config(18.0).guidance == "replicas"
        assert two.compute_optimal_config(18.0, guidance=["rows"]).guidance == "rows"
    # With a VAE as slow as this, a rank that decodes and runs all blocks of a branch is what everything waits for.
    decoding = StreamBatchScheduler([StageCost(0.02, 0.01), StageCost(0.0, 0.0, per_finish=0.06)], guided)
    assert decoding.compute_optimal_config(60.0).guidance == "rows"


@pytest.mark.parametrize("policy", ["level", "clean"])
def test_a_stream_runs_the_rows_that_the_scheduler_schedules(policy: str) -> None:
    spec = StreamSpec(levels=(1.0, 0.6), policy=policy, streams=2, guidance_scale=2.0)
    scheduler = StreamBatchScheduler([StageCost(0.1, 0.05)] * 3, spec)
    noise = NoiseSource(0, (1, 1, 1, 1, 1), torch.float32, torch.device("cpu"))
    head = StreamHead(spec, 3, noise, [iter([StreamInput()] * 4) for _ in range(2)])
    run: dict[int, list[Row]] = {}
    while not head.finished:
        step = head.next_tick().step
        if step is not None:
            run[step.tick] = list(step.rows)
    starts = list(steady_starts(3, spec, 4))
    scheduled = {tick: scheduler.schedule_micro_step(tick, spec, starts) for tick in range(max(run) + 1)}
    assert run == {tick: found for tick, found in scheduled.items() if found}


def test_a_pipeline_for_each_branch_schedules_rows_of_one_branch() -> None:
    spec = StreamSpec(levels=(1.0, 0.6), guidance_scale=2.0)
    scheduler = StreamBatchScheduler([StageCost(0.1, 0.05)] * 4, spec)
    starts = [Start(0, 0, 0)]
    assert scheduler.schedule_micro_step(4, spec, starts, "rows") == [Row(0, 0, 1, 0), Row(1, 0, 1, 0)]
    assert scheduler.schedule_micro_step(2, spec, starts, "replicas") == [Row(0, 0, 1, 0)]  # two stages in each


def test_a_forecast_plays_what_is_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = StreamBatchScheduler([StageCost(0.0, 0.1)], SPEC)
    fps = scheduler.forecast(SPEC).fps
    schedule = StreamBatchScheduler.schedule_micro_step
    monkeypatch.setattr(StreamBatchScheduler, "schedule_micro_step", lambda *given: 2 * schedule(*given))
    assert scheduler.forecast(SPEC).fps == pytest.approx(fps / 2)


def test_no_choice_says_what_comes_nearest() -> None:
    scheduler = StreamBatchScheduler([StageCost(1.0, 0.1)], SPEC)
    with pytest.raises(ConfigError, match=r"no choice gives 30 frames/s within 1 s with 1 stage\. Nearest is 1 levels"):
        scheduler.compute_optimal_config(30.0, max_latency=1.0)


def test_fewer_levels_keep_the_first() -> None:
    assert fewer_levels(SPEC.levels, 2) == (1.0, 0.6)
    assert fewer_levels(SPEC.levels, 1) == (1.0,)
