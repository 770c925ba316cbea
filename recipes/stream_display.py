"""Shows how a stream goes, live in the terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dit_pipelining.stream.metrics import Reading

BAR = 30


class StreamDisplay:
    """A live table; where there is no terminal, its last state is printed at the end."""

    def __init__(self) -> None:
        self._live = Live(Text("waiting for the first frame"), console=Console(), refresh_per_second=8)

    def __enter__(self) -> StreamDisplay:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def update(self, reading: Reading, loads: list[float], dropped: int, levels: int) -> None:
        """Show new numbers.

        Args:
            reading: of the stream's metrics.
            loads: share of the time that each stage works.
            dropped: chunks that the consumer did not get.
            levels: noise levels that chunks pass now.
        """
        numbers = Table(box=None, show_header=False, pad_edge=False)
        numbers.add_column(style="bold", justify="right")
        numbers.add_column()
        numbers.add_row(f"{reading.frames}", "frames")
        numbers.add_row(f"{reading.fps:.2f}", "frames/s")
        numbers.add_row(f"{reading.first_frame or 0.0:.2f}", "s to the first frame")
        numbers.add_row(f"{reading.latency:.2f}", "s latency of the last chunk")
        numbers.add_row(f"{reading.misses}", "deadlines missed")
        numbers.add_row(f"{dropped}", "chunks dropped")
        numbers.add_row(f"{levels}", "noise levels")
        stages = Table(box=None, show_header=False, pad_edge=False)
        for index, load in enumerate(loads):
            filled = round(BAR * min(load, 1.0))
            stages.add_row(f"stage {index}", "█" * filled + "░" * (BAR - filled), f"{load:.0%} busy")
        self._live.update(Group(numbers, stages))
