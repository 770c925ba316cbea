"""Drawings, timeline and trace, read back."""

from xml.etree import ElementTree

import pytest

from dit_pipelining.planning.simulation import simulate
from dit_pipelining.planning.timeline import Workload
from dit_pipelining.show.drawing import WIDTH
from dit_pipelining.show.svg import svg_file
from dit_pipelining.show.timeline_drawing import MOST_SPANS, timeline_drawing
from dit_pipelining.show.timeline_view import timeline_view
from dit_pipelining.show.trace import trace_events

SVG = "{http://www.w3.org/2000/svg}"


def parts(drawing, name):
    return [part for part in drawing.iter(f"{SVG}rect") if part.get("class") == name]


def test_the_drawing_is_as_wide_as_the_blocks_take_time(picture):
    drawing = ElementTree.fromstring(svg_file(picture))
    (report,) = picture.reports
    blocks = parts(drawing, "block")
    assert len(blocks) == len(report.blocks)
    widths = [float(block.get("width")) for block in blocks]
    double, single = report.blocks[0].seconds, report.blocks[-1].seconds
    assert widths[0] / widths[-1] == pytest.approx(double / single, rel=0.05)
    assert float(blocks[-1].get("x")) + widths[-1] <= WIDTH
    titles = [block.find(f"{SVG}title").text for block in blocks]
    assert [title.split(" on ")[0] for title in titles] == [block.name for block in report.blocks]


def test_bars_of_memory_are_as_long_as_the_bytes(picture):
    drawing = ElementTree.fromstring(svg_file(picture))
    bars = parts(drawing, "part")
    rank0 = [bar for bar in bars if bar.find(f"{SVG}title").text.startswith("rank 0,")]
    lengths = {bar.find(f"{SVG}title").text.split(":")[0]: float(bar.get("width")) for bar in rank0}
    memory = picture.memory[0]
    ratio = lengths["rank 0, weights"] / lengths["rank 0, activations"]
    assert ratio == pytest.approx(memory.weights / memory.activations, rel=1e-3)


def test_the_timeline_shows_what_was_simulated_and_stays_small(picture):
    drawing = ElementTree.fromstring(svg_file(picture))
    assert len(parts(drawing, "span")) == len(picture.timeline.spans) == 3 * 4 * 2 * 3
    many = simulate(Workload(stage_seconds=(1.0,) * 4, transfer_seconds=(0.1,) * 3, requests=8, steps=100))
    body = timeline_drawing(many).body
    assert body.count('class="span"') <= MOST_SPANS + 8
    assert "the beginning of 80" in body


def test_a_line_of_the_terminal_shows_work_and_waiting():
    timeline = simulate(Workload(stage_seconds=(1.0, 1.0), transfer_seconds=(0.0,), steps=3, calls_per_step=2))
    heading, first, last = timeline_view(timeline, width=12 + 36).plain.splitlines()
    assert "the whole loop" in heading
    # 9 seconds on 36 characters: per step a second for each branch, and one of waiting.
    assert first.split()[-1] == ("████▓▓▓▓····" * 3)
    assert last.split()[-1] == ("····████▓▓▓▓" * 3)


def test_a_trace_has_every_span_and_transfer(picture):
    events = trace_events(picture)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(picture.timeline.spans) + len(picture.timeline.transfers)
    first = picture.timeline.spans[0]
    assert complete[0]["dur"] == pytest.approx(first.seconds * 1e6)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} <= named
    assert sum(event["dur"] for event in complete if event["cat"] == "stage") == pytest.approx(
        3 * 4 * 2 * sum(picture.timeline.workload.stage_seconds) * 1e6
    )
