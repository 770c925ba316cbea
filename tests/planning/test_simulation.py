"""Simulated schedules against what follows from the schedule by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.simulation import simulate
from dit_pipelining.planning.timeline import ComponentCall, Workload


def even(stages, **work):
    """A line of stages that take one second each, with links that take no time."""
    return Workload(stage_seconds=(1.0,) * stages, transfer_seconds=(0.0,) * (stages - 1), **work)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("calls", [1, 2])
def test_sequentially_every_call_takes_the_whole_line(stages, calls):
    timeline = simulate(even(stages, requests=3, steps=5, calls_per_step=calls, schedule="sequential"))
    assert timeline.makespan == 3 * 5 * calls * stages
    assert timeline.step_seconds == calls * stages
    assert timeline.bubble == pytest.approx(1 - 1 / stages)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("requests", [1, 3, 8])
def test_gpipe_fills_and_drains_the_line_at_every_call(stages, requests):
    timeline = simulate(even(stages, requests=requests, steps=5, calls_per_step=2, schedule="gpipe"))
    assert timeline.makespan == 5 * 2 * (requests + stages - 1)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("calls", [1, 2])
def test_rolling_fills_and_drains_the_line_once(stages, calls):
    timeline = simulate(even(stages, requests=2 * stages, steps=5, calls_per_step=calls))
    assert timeline.makespan == 2 * stages * 5 * calls + stages - 1
    assert timeline.bubble == pytest.approx((stages - 1) / timeline.makespan)


def test_two_branches_of_one_request_fill_two_stages_in_part():
    # Per step: branch 0 on stage 0, then both stages work, then branch 1 on stage 1; the next step waits for both.
    assert simulate(even(2, steps=10, calls_per_step=2)).makespan == 10 * 3
    assert simulate(even(2, steps=10, calls_per_step=2, schedule="sequential")).makespan == 10 * 4


def test_branches_and_requests_spread_over_replicas():
    assert simulate(even(2, steps=10, calls_per_step=2, replicas=2)).makespan == 10 * 2
    timeline = simulate(even(2, requests=8, steps=10, replicas=2))
    assert timeline.makespan == 8 * 10 / 2 + 1
    replica_of = {(span.request, span.rank // 2) for span in timeline.spans}
    assert replica_of == {(request, request % 2) for request in range(8)}


def test_a_transfer_is_hidden_where_another_call_fills_the_stage():
    slow = replace(even(2, requests=8, steps=10), transfer_seconds=(0.5,), result_seconds=0.25)
    assert simulate(slow).makespan == 8 * 10 + 0.5 + 1 + 0.25
    alone = replace(slow, requests=1)
    assert simulate(alone).makespan == 10 * (1 + 0.5 + 1 + 0.25)


def test_a_slow_link_sets_the_pace():
    timeline = simulate(replace(even(2, requests=8, steps=10), transfer_seconds=(3.0,)))
    assert timeline.makespan == 1 + 3 * 8 * 10 + 1


def test_gpipe_does_not_hide_transfers_since_it_receives_between_microbatches():
    timeline = simulate(replace(even(2, requests=4, schedule="gpipe"), transfer_seconds=(0.5,)))
    assert timeline.makespan == 1 + 4 * (0.5 + 1)


def test_the_slowest_stage_sets_the_pace():
    timeline = simulate(Workload(stage_seconds=(1.0, 2.0, 1.0), transfer_seconds=(0.0, 0.0), requests=6, steps=10))
    assert timeline.makespan == 2 * 6 * 10 + 2
    assert [timeline.utilisation(rank) for rank in range(3)] == pytest.approx([60 / 122, 120 / 122, 60 / 122])


def test_a_rank_waits_for_its_oldest_send():
    # Stage 1 takes ever more time than stage 0, which may be ahead by the eight sends it keeps, and by two receives.
    slow = Workload(stage_seconds=(1.0, 10.0), transfer_seconds=(0.0,), requests=40)
    free = [span.end for span in simulate(slow).spans_of(0)]
    many = [span.end for span in simulate(replace(slow, boundary_tensors=(4,))).spans_of(0)]
    assert free[:9] == many[:2] + [pytest.approx(i + 1.0) for i in range(2, 9)]
    assert many[-1] > free[-1] + 40


def test_only_some_requests_are_in_flight():
    timeline = simulate(even(4, requests=6, steps=5, in_flight=1))
    assert timeline.makespan == 6 * 5 * 4
    assert simulate(even(4, requests=6, steps=5, in_flight=3)).makespan < timeline.makespan / 2


def test_the_pipelines_own_code_runs_for_one_request_at_a_time():
    timeline = simulate(even(1, requests=2, steps=3, host_seconds=0.5))
    # While one request's scheduler runs, the other one's call is on the stage.
    assert timeline.makespan == 2 * 3 + 0.5
    assert simulate(even(1, requests=1, steps=3, host_seconds=0.5)).makespan == 3 * 1.5


def test_encoding_and_decoding_occupy_their_ranks():
    work = even(2, requests=2, steps=1, encodes=(ComponentCall(3.0, (0,)),), decodes=(ComponentCall(5.0, (-1,)),))
    timeline = simulate(work)
    kinds = {kind: [span for span in timeline.spans if span.kind == kind] for kind in ("encode", "decode")}
    assert {span.rank for span in kinds["encode"]} == {0}
    assert {span.rank for span in kinds["decode"]} == {1}
    assert sum(span.seconds for span in timeline.spans_of(1)) == 2 * (1 + 5)
    # Both requests encode and run stage 0, the second runs stage 1, and then the two videos are decoded in turn.
    assert timeline.makespan == 2 * (3 + 1) + 1 + 2 * 5
    assert simulate(replace(work, decodes=(ComponentCall(5.0, (0,)),))).spans_of(1)[-1].kind == "stage"
    everywhere = simulate(replace(work, decodes=(ComponentCall(5.0),)))
    assert everywhere.makespan == timeline.makespan
    assert [span.kind for span in everywhere.spans_of(0)][-2:] == ["decode", "decode"]


def test_encoders_on_several_ranks_run_one_after_the_other():
    timeline = simulate(even(2, steps=1, encodes=(ComponentCall(3.0, (0,)), ComponentCall(2.0, (1, 0)))))
    spans = [(span.rank, span.start, span.end) for span in timeline.spans if span.kind == "encode"]
    assert spans == [(0, 0.0, 3.0), (0, 3.0, 5.0), (1, 3.0, 5.0)]
    assert timeline.makespan == 5 + 2


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 4),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from(["rolling", "sequential", "gpipe"]),
)
def test_no_rank_does_two_things_at_once_and_the_bounds_hold(stages, hop, requests, steps, calls, replicas, schedule):
    workload = Workload(
        stage_seconds=tuple(map(float, stages)),
        transfer_seconds=(float(hop),) * (len(stages) - 1),
        requests=requests,
        steps=steps,
        calls_per_step=calls,
        replicas=1 if schedule == "gpipe" else replicas,
        schedule=schedule,
    )
    timeline = simulate(workload)
    assert len(timeline.spans) == requests * steps * calls * len(stages)
    for rank in range(workload.num_ranks):
        assert all(one.end <= other.start for one, other in pairwise(timeline.spans_of(rank)))
    line = sum(stages) + hop * (len(stages) - 1)
    assert timeline.makespan >= steps * line
    assert timeline.makespan >= requests * steps * calls * max(stages) / workload.replicas
    assert timeline.makespan <= requests * steps * calls * line
    assert 0 <= timeline.bubble < 1


@pytest.mark.parametrize(
    "wrong",
    [
        dict(schedule="magic"),
        dict(transfer_seconds=(0.0, 0.0)),
        dict(boundary_tensors=(1, 1)),
        dict(requests=0),
        dict(in_flight=0),
        dict(schedule="gpipe", replicas=2),
    ],
)
def test_what_does_not_belong_together_is_refused(wrong):
    with pytest.raises(ConfigError):
        replace(even(2), **wrong)
