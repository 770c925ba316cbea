"""What is to be simulated, and what a simulation gives: when each rank computes, and what is on its way meanwhile."""

from collections.abc import Iterable
from dataclasses import dataclass

from dit_pipelining.config import SCHEDULES
from dit_pipelining.errors import ConfigError

SIMULATED_SCHEDULES = (*SCHEDULES, "sequential")
"""`sequential`: each call is waited for before the next one starts, as handing the latents back after each call does."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is to be run.

    Attributes:
        requests, steps: requests, and denoising steps of each.
        calls_per_step: transformer calls of one step that do not wait for each other (branches of guidance).
        replicas: pipelines over which calls are spread.
        schedule: one of `SIMULATED_SCHEDULES`.
        in_flight: requests at a time; None: all.
    """

    requests: int = 1
    steps: int = 1
    calls_per_step: int = 1
    replicas: int = 1
    schedule: str = "rolling"
    in_flight: int | None = None


@dataclass(frozen=True)
class ComponentCall:
    """What a component does for one request, before or after its denoising loop.

    Attributes:
        seconds: on each of the ranks.
        ranks: that do it together, the first of which gives the others the result; None: each rank does it for itself.
            Ranks may be counted from the end, as in lists.
    """

    seconds: float
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Workload(Load):
    """A load, and what it costs.

    Attributes:
        stage_seconds: of one call on each stage.
        transfer_seconds: from each stage to the next.
        result_seconds: from the last stage to all ranks.
        boundary_tensors: number of tensors that cross each boundary; default: one each.
        host_seconds: of the pipeline's own code between two steps (the scheduler).
        encodes, decodes: what precedes and what follows the loop of a request, in order.

    Raises:
        ConfigError: the numbers do not belong together.
    """

    stage_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    result_seconds: float = 0.0
    boundary_tensors: tuple[int, ...] = ()
    host_seconds: float = 0.0
    encodes: tuple[ComponentCall, ...] = ()
    decodes: tuple[ComponentCall, ...] = ()

    def __post_init__(self) -> None:
        if self.schedule not in SIMULATED_SCHEDULES:
            raise ConfigError(f"schedule {self.schedule!r}: expected one of {', '.join(SIMULATED_SCHEDULES)}.")
        boundaries = len(self.stage_seconds) - 1
        if not self.boundary_tensors:
            object.__setattr__(self, "boundary_tensors", (1,) * boundaries)
        if boundaries < 0 or {len(self.transfer_seconds), len(self.boundary_tensors)} != {boundaries}:
            raise ConfigError(
                f"{len(self.stage_seconds)} stages, {len(self.transfer_seconds)} transfers between them and "
                f"{len(self.boundary_tensors)} numbers of tensors: expected one less than stages of both."
            )
        for name in ("requests", "steps", "calls_per_step", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: expected at least 1.")
        if self.in_flight is not None and self.in_flight < 1:
            raise ConfigError(f"in_flight {self.in_flight}: at least one request has to be in flight.")
        if self.schedule == "gpipe" and self.replicas > 1:
            raise ConfigError("the gpipe schedule runs one pipeline; use rolling with more than one replica.")

    @property
    def num_stages(self) -> int:
        return len(self.stage_seconds)

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.replicas

    @property
    def encode_seconds(self) -> float:
        """Of all encoders, one after the other."""
        return sum(call.seconds for call in self.encodes)

    @property
    def decode_seconds(self) -> float:
        return sum(call.seconds for call in self.decodes)

    @property
    def at_a_time(self) -> int:
        """Requests in flight."""
        return 1 if self.schedule == "sequential" else min(self.in_flight or self.requests, self.requests)


@dataclass(frozen=True)
class Span:
    """Something that occupies a rank, in seconds from the start.

    Attributes:
        rank: that is busy.
        kind: `stage`, `encode` or `decode`.
        request, step, branch: what it belongs to; step and branch are -1 outside the loop.
    """

    rank: int
    start: float
    end: float
    kind: str
    request: int
    step: int = -1
    branch: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Transfer:
    """Data on its way, in seconds from the start.

    Attributes:
        source, target: ranks; the target of a result is -1, which means all.
        kind: `boundary` or `result`.
        request, step, branch: what it belongs to.
    """

    source: int
    target: int
    start: float
    end: float
    kind: str
    request: int
    step: int
    branch: int


@dataclass(frozen=True)
class Timeline:
    """What a simulation gave.

    Attributes:
        workload: that was simulated.
        spans: when ranks are busy, by rank and start.
        transfers: what was on its way.
        makespan: seconds until the last request is done.
    """

    workload: Workload
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    makespan: float

    def spans_of(self, rank: int) -> list[Span]:
        return [span for span in self.spans if span.rank == rank]

    def utilisation(self, rank: int) -> float:
        """Part of the whole time in which a rank works."""
        return sum(span.seconds for span in self.spans_of(rank)) / self.makespan if self.makespan else 1.0

    @property
    def loop(self) -> tuple[float, float]:
        """When the first denoising loop starts and the last one ends."""
        return _extent(self._loops().values())

    @property
    def step_seconds(self) -> float:
        """Seconds from one step of a request to its next one, on average."""
        loops = self._loops().values()
        return sum(end - start for start, end in loops) / len(loops) / self.workload.steps

    @property
    def steps_per_second(self) -> float:
        """Steps of all requests together that are done in a second of the denoising loops."""
        first, last = self.loop
        return self.workload.requests * self.workload.steps / (last - first) if last > first else 0.0

    @property
    def bubble(self) -> float:
        """Part of the ranks' time in the denoising loops in which they do not compute."""
        first, last = self.loop
        working = sum(_overlap(span, first, last) for span in self.spans)
        available = (last - first) * self.workload.num_ranks
        return max(1 - working / available, 0.0) if available else 0.0

    def _loops(self) -> dict[int, tuple[float, float]]:
        """Start and end of each request's denoising loop."""
        found: dict[int, list[tuple[float, float]]] = {}
        for span in self.spans:
            if span.kind == "stage":
                found.setdefault(span.request, []).append((span.start, span.end))
        for moved in self.transfers:
            found[moved.request].append((moved.start, moved.end))
        return {request: _extent(parts) for request, parts in found.items()}


def _extent(parts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    starts, ends = zip(*parts, strict=True)
    return min(starts), max(ends)


def _overlap(span: Span, first: float, last: float) -> float:
    return max(min(span.end, last) - max(span.start, first), 0.0)
