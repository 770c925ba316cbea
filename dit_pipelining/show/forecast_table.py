"""What `dit-pipelining show` predicts: memory by kind, seconds, a timeline, and a comparison of cuts."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dit_pipelining.lowering.names import data_size, duration
from dit_pipelining.planning.memory import MEMORY_KINDS, RankMemory
from dit_pipelining.planning.timeline import ComponentCall
from dit_pipelining.show.picture import Alternative, Picture
from dit_pipelining.show.timeline_view import timeline_view


def print_forecast(picture: Picture, console: Console) -> None:
    """Print memory, seconds and timeline of a picture, and the comparison if one was asked for."""
    console.print(Text("memory of each rank", style="bold cyan"))
    console.print(_memory(picture))
    if picture.not_counted:
        console.print(Text(f" (without {picture.not_counted})", style="dim"))
    console.print()
    heading = Text("predicted ", style="bold cyan")
    console.print(heading.append(f" {picture.target}", style="default"))
    console.print(_seconds(picture))
    console.print(timeline_view(picture.timeline, console.width))
    if picture.alternatives:
        console.print()
        console.print(Text("other ways to cut", style="bold cyan"))
        console.print(_comparison(picture.alternatives))


def _memory(picture: Picture) -> Table:
    kinds = [kind for kind in MEMORY_KINDS if any(getattr(rank, kind) for rank in picture.memory)]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("rank", justify="right")
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("all", justify="right")
    table.add_column("of")
    rows = zip(picture.memory, picture.limits, picture.shortfalls, strict=True)
    for place, (memory, limit, lacking) in enumerate(rows):
        usable = data_size(limit) + (f", {data_size(lacking)} too little" if lacking else "")
        table.add_row(
            picture.ranks_of(place),
            *_sizes(memory, kinds),
            data_size(memory.total),
            usable,
            style="bold red" if lacking else None,
        )
    return table


def _sizes(memory: RankMemory, kinds: Sequence[str]) -> list[str]:
    return [data_size(getattr(memory, kind)) if getattr(memory, kind) else "" for kind in kinds]


def _seconds(picture: Picture) -> Text:
    timeline = picture.timeline
    load = timeline.workload
    stages = ", ".join(duration(seconds) for seconds in load.stage_seconds)
    used = ", ".join(f"{timeline.utilisation(rank):.0%}" for rank in range(load.num_ranks))
    lines = [
        picture.load,
        f"a call on each stage: {stages}",
        f"a step of a request: {duration(timeline.step_seconds)}; all requests: {timeline.steps_per_second:.3g} steps a second",
        f"bubble: {timeline.bubble:.1%} of the loop; ranks compute {used} of {duration(timeline.makespan)} in all",
    ]
    if load.transfer_seconds:
        moved = ", ".join(duration(seconds) for seconds in load.transfer_seconds)
        lines.insert(2, f"transfers: {moved}; a result: {duration(load.result_seconds)}")
    if load.encode_seconds or load.decode_seconds:
        parts = [
            f"{what} {duration(seconds)}{_where(picture, calls)}"
            for what, seconds, calls in (
                ("encoding", load.encode_seconds, load.encodes),
                ("decoding", load.decode_seconds, load.decodes),
            )
        ]
        lines.insert(-1, f"beside the loop: {', '.join(parts)}")
    return Text("\n".join(f" {line}" for line in lines))


def _where(picture: Picture, calls: Sequence[ComponentCall]) -> str:
    """The ranks that take part, where there are others."""
    every = range(len(picture.memory))
    ranks = sorted({rank for call in calls for rank in call.ranks or every})
    if len(every) == 1 or not ranks:
        return ""
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(picture.ranks_of, ranks))}"


def _comparison(alternatives: Sequence[Alternative]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name, justify in (("partitioner", "left"), ("blocks", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("slowest stage", "a step", "bubble", "in all", "fullest rank"):
        table.add_column(name, justify="right")
    for other in alternatives:
        counts = "; ".join(",".join(map(str, counts)) for counts in other.counts)
        if other.problem:
            table.add_row(other.name, Text(other.problem, style="red"))
            continue
        table.add_row(
            other.name,
            counts,
            duration(other.slowest_seconds),
            duration(other.step_seconds),
            f"{other.bubble:.1%}",
            duration(other.makespan),
            data_size(other.memory_bytes),
        )
    return table
