"""The timeline in a terminal: one line per rank, a character for a moment."""

from rich.style import Style
from rich.text import Text

from dit_pipelining.lowering.names import duration
from dit_pipelining.planning.timeline import Span, Timeline
from dit_pipelining.show.colours import colour

BRANCHES = "█▓▒░"
"""The calls of one step of a request: the first branch of guidance, the second, ..."""

COMPONENTS = {"encode": "E", "decode": "D"}
IDLE = "·"
COLUMNS_PER_STAGE = 4
"""Characters that a call on a stage of mean length gets, so that it can be seen."""


def timeline_view(timeline: Timeline, width: int) -> Text:
    """The first steps of a run, as many as can be told apart.

    Args:
        timeline: of a run.
        width: of the terminal, in characters.
    """
    load = timeline.workload
    columns = max(width - 12, 20)
    mean = sum(load.stage_seconds) / load.num_stages
    start, end = timeline.loop
    shown = min(end - start, max(columns / COLUMNS_PER_STAGE * mean, timeline.step_seconds))
    whole = "the whole loop" if shown >= end - start else f"the first {duration(shown)} of {duration(end - start)}"
    text = Text(f" timeline, {whole}: ")
    for request in range(min(load.requests, 8)):
        text.append("█", Style(color=colour(request))).append(f" request {request}  ")
    if load.calls_per_step > 1:
        text.append(f"({' '.join(BRANCHES[: load.calls_per_step])} its calls)  ", style="dim")
    kinds = {span.kind for rank in range(load.num_ranks) for span in timeline.spans_of(rank)}
    text.append("  ".join(f"{mark} {kind}" for kind, mark in COMPONENTS.items() if kind in kinds), style="dim")
    for rank in range(load.num_ranks):
        text.append(f"\n {'rank':>6} {rank:<3} ")
        text.append_text(_line(timeline.spans_of(rank), start, shown, columns))
    return text


def _line(spans: list[Span], start: float, shown: float, columns: int) -> Text:
    line = Text()
    for column in range(columns):
        moment = start + (column + 0.5) * shown / columns
        span = next((span for span in spans if span.start <= moment < span.end), None)
        if span is None:
            line.append(IDLE, style="dim")
        else:
            character = COMPONENTS.get(span.kind) or BRANCHES[span.branch % len(BRANCHES)]
            line.append(character, Style(color=colour(span.request)))
    return line
