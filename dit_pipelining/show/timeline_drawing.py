"""When each rank computes, coloured by request, and what travels between the ranks."""

import math

from dit_pipelining.lowering.names import duration
from dit_pipelining.planning.timeline import Span, Timeline
from dit_pipelining.show.colours import colour
from dit_pipelining.show.drawing import WIDTH, Drawing, element, text

ROW, BAR = 34.0, 24.0
LEFT = 110.0
MOST_SPANS = 240
"""More cannot be told apart, and would make the file large."""

BRANCH_OPACITY = (1.0, 0.6, 0.8, 0.45)


def timeline_drawing(timeline: Timeline) -> Drawing:
    """Draw the first steps of a run, as many as can be told apart."""
    load = timeline.workload
    end = _shown(timeline)
    scale = (WIDTH - LEFT) / end
    parts: list[str] = []
    for rank in range(load.num_ranks):
        y = rank * ROW
        used = timeline.utilisation(rank)
        words = element(
            "g",
            text(0, y + 16, f"rank {rank}") + text(58, y + 16, f"{used:.0%}", "soft"),
            tip=f"rank {rank}: {used:.1%} of all the time at work",
        )
        parts.append(words)
        parts.append(element("rect", class_="track", x=LEFT, y=y, width=WIDTH - LEFT, height=BAR, rx=3.0))
        parts += [_span(span, y, scale, end) for span in timeline.spans_of(rank) if span.start < end]
    for moved in timeline.transfers:
        if moved.kind == "boundary" and moved.end < end:
            parts.append(
                element(
                    "line",
                    class_="transfer",
                    x1=LEFT + moved.start * scale,
                    x2=LEFT + moved.end * scale,
                    y1=moved.source * ROW + BAR,
                    y2=moved.target * ROW,
                )
            )
    bottom = load.num_ranks * ROW
    parts += _axis(end, scale, bottom)
    parts.append(_legend(timeline, bottom + 34))
    return Drawing("".join(parts), bottom + 52)


def _shown(timeline: Timeline) -> float:
    """Until when the drawing goes."""
    if len(timeline.spans) <= MOST_SPANS:
        return timeline.makespan
    return sorted(span.end for span in timeline.spans)[MOST_SPANS]


def _span(span: Span, y: float, scale: float, end: float) -> str:
    width = (min(span.end, end) - span.start) * scale
    component = span.kind != "stage"
    what = (
        f"{span.kind}, request {span.request}"
        if component
        else f"request {span.request}, step {span.step}, call {span.branch}"
    )
    return element(
        "rect",
        tip=f"rank {span.rank}: {what}\n{duration(span.seconds)}, from {duration(span.start)} on",
        class_="span",
        x=LEFT + span.start * scale,
        y=y + (4 if component else 0),
        width=max(width - min(1.0, width / 6), 0.2),
        height=BAR - (8 if component else 0),
        rx=min(2.0, width / 4),
        fill=colour(span.request),
        fill_opacity=BRANCH_OPACITY[max(span.branch, 0) % len(BRANCH_OPACITY)],
    )


def _axis(end: float, scale: float, y: float) -> list[str]:
    step = 10 ** math.floor(math.log10(end / 4)) if end > 0 else 1.0
    step *= next(factor for factor in (1, 2, 5, 10) if end / (step * factor) <= 10)
    parts = []
    for tick in range(int(end / step) + 1):
        x = LEFT + tick * step * scale
        anchor = "start" if tick == 0 else "middle" if x < WIDTH - 30 else "end"
        parts.append(element("line", class_="line", x1=x, x2=x, y1=0.0, y2=y - 4))
        parts.append(text(x, y + 12, duration(tick * step) if tick else "0", "soft", anchor))
    return parts


def _legend(timeline: Timeline, y: float) -> str:
    load = timeline.workload
    parts, x = [], LEFT
    for request in range(min(load.requests, 8)):
        parts.append(element("rect", x=x, y=y, width=12.0, height=12.0, rx=2.0, fill=colour(request)))
        parts.append(text(x + 18, y + 11, f"request {request}", "soft"))
        x += 98
    if _shown(timeline) < timeline.makespan:
        parts.append(text(WIDTH, y + 11, f"the beginning of {duration(timeline.makespan)}", "soft", "end"))
    return "".join(parts)
