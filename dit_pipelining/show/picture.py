"""Everything there is to show about a model on a machine, before it is drawn, printed or written."""

from dataclasses import dataclass

from dit_pipelining.costs.devices import DeviceProfile, Link
from dit_pipelining.lowering.report import TransformerReport
from dit_pipelining.planning.components import NOTHING
from dit_pipelining.planning.degrees import ALONE, Degrees
from dit_pipelining.planning.memory import RankMemory
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.timeline import Timeline
from dit_pipelining.runtime.placing import Places


@dataclass(frozen=True)
class Target:
    """What the model is cut for.

    Attributes:
        devices: of the ranks of one replica.
        links: from each rank to the next.
        limits: bytes that each rank may use.
        source: of the seconds, in words.
    """

    devices: tuple[DeviceProfile, ...]
    links: tuple[Link, ...]
    limits: tuple[int, ...]
    source: str

    def __str__(self) -> str:
        devices = " + ".join(dict.fromkeys(device.title for device in self.devices))
        links = " + ".join(dict.fromkeys(link.name for link in self.links))
        return f"{devices}{f' with {links}' if links else ''}, seconds {self.source}"


@dataclass(frozen=True)
class Alternative:
    """One way to cut the model.

    Attributes:
        name: of the partitioner.
        counts: blocks per stage, for each transformer.
        problem: why the model cannot be cut like this; then all else is empty.
        slowest_seconds: of the busiest stage, for one call.
        step_seconds, bubble, makespan: as in `Timeline`.
        memory_bytes: of the fullest rank.
    """

    name: str
    counts: tuple[tuple[int, ...], ...] = ()
    problem: str = ""
    slowest_seconds: float = 0.0
    step_seconds: float = 0.0
    bubble: float = 0.0
    makespan: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Picture:
    """A model, cut for a machine.

    Attributes:
        model, source: as given; source is preset, pipeline, transformer or config.
        decided_by: what chose the partition.
        size: of what is generated; None where the inputs were described.
        dtype: of the weights.
        target: what it is cut for.
        reports: of the transformers, those that are alike in one.
        timelines: of the same transformers.
        memory: of each rank of a line (the stages of the first replica, then those of the next one); of the ranks that share
            its stage, where they differ, the fullest.
        not_counted: what memory and timelines leave out, in words; empty: nothing.
        alternatives: other cuts, for comparison.
        degrees: how many stages, replicas and copies there are, and how many ranks share each stage.
        places: of the components.
    """

    model: str
    source: str
    decided_by: str
    size: Size | None
    dtype: str
    target: Target
    reports: tuple[TransformerReport, ...]
    timelines: tuple[Timeline, ...]
    memory: tuple[RankMemory, ...]
    not_counted: str
    alternatives: tuple[Alternative, ...] = ()
    degrees: Degrees = ALONE
    places: Places = NOTHING.places

    def ranks_of(self, place: int) -> str:
        """The ranks that share a stage of a replica, by its place in the line, as text: `0`, or `2-3`."""
        first, last = place * self.degrees.inside, (place + 1) * self.degrees.inside - 1
        return str(first) if first == last else f"{first}-{last}"

    @property
    def num_stages(self) -> int:
        return len(self.reports[0].stages)

    @property
    def timeline(self) -> Timeline:
        """Of the first transformer, which in most pipelines is the only one or like the others."""
        return self.timelines[0]

    @property
    def limits(self) -> tuple[int, ...]:
        """Bytes that each rank of a line may use."""
        return self.target.limits * self.degrees.cfg

    @property
    def shortfalls(self) -> tuple[int, ...]:
        """Bytes that each rank of a line lacks; 0 where it has enough."""
        return tuple(max(rank.total - limit, 0) for rank, limit in zip(self.memory, self.limits, strict=True))

    @property
    def load(self) -> str:
        """What is run on which ranks, in words."""
        load = self.timeline.workload
        requests = f"{load.requests} requests" if load.requests > 1 else "1 request"
        calls = f"{load.calls_per_step} calls" if load.calls_per_step > 1 else "1 call"
        replicas = f", {load.replicas} replicas" if load.replicas > 1 else ""
        copies = f" on each of {self.degrees.data} copies" if self.degrees.data > 1 else ""
        inside = f", each stage on {self.degrees.inside} ranks" if self.degrees.inside > 1 else ""
        return f"{requests}{copies}, {load.steps} steps of {calls}{replicas}{inside}, {load.schedule} schedule"


def alternative(picture: Picture) -> Alternative:
    """What is compared of one way to cut."""
    timeline = picture.timeline
    return Alternative(
        name=picture.decided_by,
        counts=tuple(report.partition for report in picture.reports),
        slowest_seconds=max(timeline.workload.stage_seconds),
        step_seconds=timeline.step_seconds,
        bubble=timeline.bubble,
        makespan=timeline.makespan,
        memory_bytes=max(rank.total for rank in picture.memory),
    )
