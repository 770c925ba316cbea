"""What every benchmark here needs: the machine it ran on, medians, a table, a JSON file."""

import json
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import dit_pipelining

PACKAGES = ("torch", "diffusers", "transformers", "accelerate")


def processor_name() -> str:
    """The CPU's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """What the figures depend on beside the code."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": processor_name(),
        "python": platform.python_version(),
        "dit_pipelining": dit_pipelining.__version__,
        **{name: version(name) for name in PACKAGES},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of a few measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows as a table; the keys of the first row are its head."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if name == next(iter(rows[0])) else "right")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def write(path: str | None, results: Mapping[str, Any]) -> None:
    """Write results with the environment they were measured in, if a path is given."""
    if path:
        Path(path).write_text(json.dumps({"environment": environment(), **results}, indent=2) + "\n")
