"""Passes: the rows that a stage runs at the moment, and where their keys and values go.

[Note: replayed passes]
A CUDA graph reads and writes where it did when it was recorded. So what changes from one tick to the next (positions, places
in the ring) lies in tensors that are written before the blocks run, always the same ones for plans of one form. What would
make other kernels run is the form; a stage asks for a recording of each form, and for none while caches fill up, when every
tick has another form.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dit_pipelining.errors import InputError
from dit_pipelining.stream.cache import Place, RollingKVCache, cache_index, place_of
from dit_pipelining.stream.micro_step import MicroStep
from dit_pipelining.stream.rotary import Table, rotary_table
from dit_pipelining.stream.spec import StreamSpec


class Passes:
    """The rows that a stage runs at the moment; shared by the attention of all its blocks.

    Args:
        spec: of the streams.
        rotary: the model's rotary table of one chunk, (1, tokens, 1, channels).

    Attributes:
        current: None while the stage runs nothing: then attention is the model's own (a capture).
        text: the prompts of the rows; the same tensor as long as they are the same.
    """

    def __init__(self, spec: StreamSpec, rotary: Table) -> None:
        self.spec = spec
        self.current: MicroStep | None = None
        self.text: torch.Tensor | None = None
        self._rotary = rotary
        self._caches: Sequence[RollingKVCache] = ()
        self._plans: dict[int, Plan] = {}
        self._kept_plans: dict[Hashable, Plan] = {}
        self._known_texts: dict[int, torch.Tensor] = {}

    def begin(self, step: MicroStep, caches: Iterable[RollingKVCache], text: torch.Tensor) -> None:
        """Plan a step.

        Args:
            step: the rows.
            caches: of the blocks that will run them.
            text: the prompts of the rows.

        Raises:
            InputError: a chunk is not the one that comes next in its stream.
        """
        self._caches = list(caches)
        plans: dict[tuple[int, ...], Plan] = {}
        for cache in self._caches:
            written = self._written(step, cache)
            if written not in plans:  # all blocks have the same ones, unless something went wrong
                plans[written] = self._plan(step, written, len(plans))
            self._plans[id(cache)] = plans[written]
        self.current, self.text = step, text

    def end(self, succeeded: bool) -> None:
        """Leave the step, and let later chunks see what was written in it."""
        assert self.current is not None
        assert self.text is not None
        if succeeded:
            for cache in self._caches:
                self._keep(cache, self.current)
            self._known_texts[len(self.current.rows)] = self.text
        self.current = self.text = None
        self._plans = {}

    def plan(self, cache: RollingKVCache) -> "Plan":
        """Where the rows go in this cache."""
        return self._plans[id(cache)]

    @property
    def form(self) -> Hashable | None:
        """What a recording of the step is for; None: the step must run plainly. Outside of a step the same for all."""
        if self.current is None:
            return ()
        known = self._known_texts.get(len(self.current.rows)) is self.text  # its keys and values are there
        forms = tuple(plan.form for plan in self._plans.values())
        return forms if known and all(form is not None for form in forms) else None

    def _written(self, step: MicroStep, cache: RollingKVCache) -> tuple[int, ...]:
        written = []
        for row, facts in zip(step.rows, step.facts, strict=True):
            pointer = cache.pointers[cache_index(row.branch, row.stream, row.level, self.spec)]
            if facts.first:
                pointer.written, pointer.next_chunk = 0, row.chunk
            if pointer.next_chunk != row.chunk:
                raise InputError(
                    f"chunk {row.chunk} of stream {row.stream} came at level {row.level}, where chunk {pointer.next_chunk} is "
                    "due; chunks of a stream have to come in order, or start it anew."
                )
            written.append(pointer.written)
        return tuple(written)

    def _plan(self, step: MicroStep, written: Sequence[int], number: int) -> "Plan":
        indices = [cache_index(row.branch, row.stream, row.level, self.spec) for row in step.rows]
        made = Plan.of(indices, [place_of(count, self.spec) for count in written], self._rotary, self.spec)
        if made.form is None:
            return made
        kept = self._kept_plans.setdefault((made.form, number), made)
        if kept is not made:
            kept.take_over(made)
        return kept

    def _keep(self, cache: RollingKVCache, step: MicroStep) -> None:
        for row in step.rows:
            if self.spec.is_kept(row.level):
                pointer = cache.pointers[cache_index(row.branch, row.stream, row.level, self.spec)]
                pointer.written += 1
                pointer.next_chunk += 1


@dataclass(frozen=True)
class Group:
    """Rows that see as many chunks and whose caches are neighbours: one call of attention."""

    first_row: int
    first_cache: int
    count: int
    seen: int


@dataclass(frozen=True)
class Sinks:
    """Caches whose sinks have to be rotated: neighbours, from `first` on.

    Attributes:
        table: of the sinks' tokens where they stand now, (count, tokens, 1, channels).
    """

    first: int
    count: int
    table: Table


@dataclass(frozen=True)
class Plan:
    """What attention does with the rows of a micro-step.

    Attributes:
        table: rotary table of the rows' own tokens.
        slots: number of each own token in the cache's memory, over all caches, (rows * tokens).
        raw: rows whose own keys are sinks: row, cache, and first token there.
        sinks: to be rotated before attention.
        groups: calls of attention.
        form: all of it but what tensors hold; None while a cache fills up.
    """

    table: Table
    slots: torch.Tensor
    raw: tuple[tuple[int, int, int], ...]
    sinks: tuple[Sinks, ...]
    groups: tuple[Group, ...]
    form: Hashable | None

    @classmethod
    def of(cls, caches: list[int], places: list[Place], rotary: Table, spec: StreamSpec) -> "Plan":
        tokens, frames = rotary[0].shape[1], spec.frames_per_chunk
        size = (spec.sink_chunks + spec.window_chunks + 1) * tokens
        starts = [cache * size + place.own * tokens for cache, place in zip(caches, places, strict=True)]
        raw = tuple(
            (row, cache, place.own * tokens)
            for row, (cache, place) in enumerate(zip(caches, places, strict=True))
            if place.own < spec.sink_chunks and place.position < spec.sink_chunks
        )
        moved = [(cache, place.sink_shift) for cache, place in zip(caches, places, strict=True) if place.sink_shift]
        sinks = tuple(_sinks(moved, rotary, spec)) if spec.sink_chunks else ()
        groups = tuple(_groups(caches, places))
        is_full = all(place.seen == spec.sink_chunks + spec.window_chunks + 1 for place in places)
        return cls(
            table=rotary_table(rotary, [place.position * frames for place in places], frames),
            slots=_slots(starts, tokens, rotary[0].device),
            raw=raw,
            sinks=sinks,
            groups=groups,
            form=(groups, tuple((own.first, own.count) for own in sinks)) if is_full and not raw else None,
        )

    def take_over(self, other: "Plan") -> None:
        """Hold what another plan of the same form holds."""
        for own, new in zip(self._tensors(), other._tensors(), strict=True):
            own.copy_(new)

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.table, self.slots, *(part for own in self.sinks for part in own.table)]


def _slots(starts: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    first = torch.tensor(starts).to(device, non_blocking=True)
    return (first[:, None] + torch.arange(tokens, device=device)).flatten()


def _sinks(moved: Sequence[tuple[int, int]], rotary: Table, spec: StreamSpec) -> Iterable[Sinks]:
    """One for each run of neighbouring caches, from caches and by how many chunks their sinks have to move."""
    runs: list[list[tuple[int, int]]] = []
    for cache, shift in moved:
        if runs and runs[-1][-1][0] + 1 == cache:
            runs[-1].append((cache, shift))
        else:
            runs.append([(cache, shift)])
    frames = spec.frames_per_chunk
    for run in runs:
        table = rotary_table(rotary, [shift * frames for _, shift in run], frames, spec.sink_chunks)
        yield Sinks(run[0][0], len(run), table)


def _groups(caches: list[int], places: list[Place]) -> list[Group]:
    groups: list[Group] = []
    for row, (cache, place) in enumerate(zip(caches, places, strict=True)):
        last = groups[-1] if groups else None
        if last is not None and last.first_cache + last.count == cache and last.seen == place.seen:
            groups[-1] = Group(last.first_row, last.first_cache, last.count + 1, last.seen)
        else:
            groups.append(Group(row, cache, 1, place.seen))
    return groups
