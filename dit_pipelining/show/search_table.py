"""The ways to spread a model that `dit-pipelining show --search` prints, and as data."""

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from dit_pipelining.lowering.names import data_size
from dit_pipelining.planning.search import Search, Way


def print_search(found: Search, console: Console, runners_up: int) -> None:
    """Print the best way with its flags, the runners-up, why each takes as long as it does, and what cannot be.

    Args:
        found: all ways.
        console: to print on.
        runners_up: number of ways besides the best.
    """
    if not found.ways:
        console.print(f"no way to spread this model over {found.gpus} GPU(s):")
    else:
        console.print(f"best {found.goal} on {found.gpus} GPU(s): {found.ways[0].degrees.flags()}", style="bold")
        table = Table(box=None, padding=(0, 1), header_style="bold")
        table.add_column("", justify="right")
        table.add_column("degrees", no_wrap=True)
        for title in ("request", "per hour", "memory", "step"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("why")
        for number, way in enumerate(found.ways[: 1 + runners_up], start=1):
            numbers = (
                f"{way.latency:.2f} s",
                f"{way.requests_per_hour:.0f}",
                data_size(way.memory_bytes),
                f"{way.step_seconds * 1e3:.1f} ms",
            )
            table.add_row(str(number), str(way.degrees), *numbers, why(way))
        console.print(table)
    reasons = Counter(refused.reason for refused in found.refused)
    for reason, count in reasons.most_common():
        closest = min((one for one in found.refused if one.reason == reason), key=lambda one: one.lacks_bytes)
        lacks = (
            f"; the closest, {closest.degrees}, lacks {data_size(closest.lacks_bytes)}" if closest.lacks_bytes else ""
        )
        console.print(f"{count} way(s) cannot be: {reason}{lacks}", soft_wrap=True)


def why(way: Way) -> str:
    """Where the time of a step goes: computing, and sending by dimension; the rest are waits of the pipeline."""
    parts = [f"computes {way.computing:.0%}"]
    parts += [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in way.sending.items()]
    if way.degrees.pipeline > 1:
        parts.append("blocks " + ",".join(map(str, way.counts)))
    return ", ".join(parts)


def search_data(found: Search) -> dict[str, Any]:
    """A search for machines."""
    return {
        "goal": found.goal,
        "gpus": found.gpus,
        "ways": [
            {**vars(way), "degrees": vars(way.degrees), "flags": way.degrees.flags(), "why": why(way)}
            for way in found.ways
        ],
        "refused": [{**vars(refused), "degrees": vars(refused.degrees)} for refused in found.refused],
    }
