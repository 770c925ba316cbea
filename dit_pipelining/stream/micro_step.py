"""MicroStep: what goes through the pipeline at one tick, and the header that tells the next stage."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dit_pipelining.stream.schedule import Row
from dit_pipelining.stream.spec import StreamSpec

FIXED = 4
PER_ROW = 8
NOTED = 2


class Kind(enum.IntEnum):
    """What a header announces."""

    ROWS = 0
    PROMPT = 1
    REBALANCE = 2
    IDLE = 3
    END = 4
    LEVELS = 5


@dataclass(frozen=True)
class ChunkFacts:
    """What all passes of a chunk have to know.

    Attributes:
        noise_scale: sigma of the first level.
        first: nothing earlier is seen: the stream starts here, anew perhaps.
        given: whether the source gave latents for it.
        started: when its source gave it, as `time.time()` counts.
    """

    noise_scale: float
    first: bool
    given: bool = False
    started: float = 0.0


@dataclass(frozen=True)
class MicroStep:
    """The rows of one tick.

    Attributes:
        tick: number of the tick.
        rows: in the order of the batch.
        facts: of each row's chunk.
    """

    tick: int
    rows: tuple[Row, ...]
    facts: tuple[ChunkFacts, ...]


@dataclass(frozen=True)
class Header:
    """The first part of every message, of a fixed size, so that it can be received before anything is known.

    Attributes:
        kind: what follows.
        micro_step: for `ROWS`.
        numbers: for other kinds: stream and first chunk of a `PROMPT`; the seconds of each stage for a `REBALANCE`;
            the levels from now on for `LEVELS`.
    """

    kind: Kind
    micro_step: MicroStep | None = None
    numbers: tuple[float, ...] = ()


def header_length(spec: StreamSpec, num_stages: int) -> int:
    """Numbers in a header: kind, rows or times, and at its end what stages note on the way."""
    return FIXED + max(PER_ROW * spec.max_rows, num_stages) + NOTED * num_stages


def noted(numbers: torch.Tensor, num_stages: int) -> torch.Tensor:
    """The part of a header in which every stage notes its load and its seconds per tick, (stages, 2); a view."""
    return numbers[-NOTED * num_stages :].view(num_stages, NOTED)


def following(numbers: torch.Tensor) -> int:
    """How many rows of latents follow a header, where it says so."""
    return int(numbers[FIXED - 1])


def set_following(numbers: torch.Tensor, count: int) -> None:
    numbers[FIXED - 1] = count


def encode(header: Header, length: int) -> torch.Tensor:
    """The header as float64 numbers, which hold whole numbers up to 2**53 exactly."""
    step = header.micro_step
    body: list[float] = list(header.numbers)
    if step is not None:
        for row, facts in zip(step.rows, step.facts, strict=True):
            body += [
                row.branch,
                row.stream,
                row.level,
                row.chunk,
                facts.noise_scale,
                facts.first,
                facts.given,
                facts.started,
            ]
    count = len(step.rows) if step is not None else len(header.numbers)
    values = [float(header.kind), float(step.tick if step is not None else 0), float(count), 0.0, *map(float, body)]
    return torch.tensor(values + [0.0] * (length - len(values)), dtype=torch.float64)


def decode(numbers: torch.Tensor) -> Header:
    """What `encode` was given."""
    values: Sequence[float] = numbers.tolist()
    kind, tick, count = Kind(int(values[0])), int(values[1]), int(values[2])
    if kind is not Kind.ROWS:
        return Header(kind, numbers=tuple(values[FIXED : FIXED + count]))
    rows, facts = [], []
    for i in range(count):
        branch, stream, level, chunk, *own = values[FIXED + PER_ROW * i : FIXED + PER_ROW * (i + 1)]
        rows.append(Row(int(branch), int(stream), int(level), int(chunk)))
        noise_scale, first, given, started = own
        facts.append(ChunkFacts(noise_scale, bool(first), bool(given), started))
    return Header(kind, MicroStep(tick, tuple(rows), tuple(facts)))
