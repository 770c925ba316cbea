"""The timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is Chrome's Trace Event Format: complete events (`"ph": "X"`) with microseconds, on threads of processes.
"""

from typing import Any

from dit_pipelining.planning.timeline import Timeline
from dit_pipelining.show.picture import Picture

RANKS, LINKS = 0, 1
"""The two processes of the trace: who computes, and what is on its way."""


def trace_events(picture: Picture) -> dict[str, Any]:
    """The whole run of the first transformer, as an object for JSON."""
    timeline = picture.timeline
    load = timeline.workload
    names = {(LINKS, rank): _link_name(rank, load.num_stages) for rank in range(load.num_ranks)}
    names |= {(RANKS, rank): f"rank {rank}, stage {rank % load.num_stages}" for rank in range(load.num_ranks)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": RANKS, "args": {"name": f"{picture.model}: ranks"}},
        {"ph": "M", "name": "process_name", "pid": LINKS, "args": {"name": f"{picture.model}: links"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
            for (process, thread), name in sorted(names.items())
        ),
        *_spans(timeline),
        *_transfers(timeline),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _spans(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "pid": RANKS,
            "tid": span.rank,
            "name": f"request {span.request}" if span.kind == "stage" else f"{span.kind} {span.request}",
            "cat": span.kind,
            "ts": span.start * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"request": span.request, "step": span.step, "call": span.branch},
        }
        for span in timeline.spans
    ]


def _transfers(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "pid": LINKS,
            "tid": moved.source,
            "name": f"{moved.kind} of request {moved.request}",
            "cat": moved.kind,
            "ts": moved.start * 1e6,
            "dur": (moved.end - moved.start) * 1e6,
            "args": {"request": moved.request, "step": moved.step, "call": moved.branch},
        }
        for moved in timeline.transfers
    ]


def _link_name(rank: int, stages: int) -> str:
    return f"rank {rank} to all" if rank % stages == stages - 1 else f"rank {rank} to {rank + 1}"
