"""Passes: the rows that a stage runs at the moment, and where their keys and values go."""

from dataclasses import dataclass

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from dit_pipelining.errors import InputError
from dit_pipelining.stream.cache import Place, RollingKVCache, cache_index, place_of
from dit_pipelining.stream.micro_step import MicroStep
from dit_pipelining.stream.spec import StreamSpec

Table = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each (rows, tokens, 1, channels)."""

ROTARY_THETA = 10000.0
"""Of Wan's rotary embedding; its class has no other."""


class Passes:
    """The rows that a stage runs at the moment; shared by the attention of all its blocks.

    Attributes:
        current: None while the stage runs nothing: then attention is the model's own (a capture).
    """

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.current: MicroStep | None = None
        self._plans: dict[tuple[int, ...], Plan] = {}

    def begin(self, step: MicroStep) -> None:
        self.current, self._plans = step, {}

    def end(self) -> None:
        self.current, self._plans = None, {}

    def plan(self, cache: RollingKVCache, rotary: Table) -> "Plan":
        """Where the rows go in this cache; the same for all blocks whose caches are filled alike."""
        assert self.current is not None
        indices = [cache_index(row.branch, row.stream, row.level, self.spec) for row in self.current.rows]
        for index, row, facts in zip(indices, self.current.rows, self.current.facts, strict=True):
            pointer = cache.pointers[index]
            if facts.first:
                pointer.written, pointer.next_chunk = 0, row.chunk
            if pointer.next_chunk != row.chunk:
                raise InputError(
                    f"chunk {row.chunk} of stream {row.stream} came at level {row.level}, where chunk {pointer.next_chunk} is "
                    "due; chunks of a stream have to come in order, or start it anew."
                )
        written = tuple(cache.pointers[index].written for index in indices)
        if written not in self._plans:
            self._plans[written] = Plan.of(
                indices, [place_of(count, self.spec) for count in written], rotary, self.spec
            )
        return self._plans[written]

    def keep(self, cache: RollingKVCache) -> None:
        """Let later chunks see what was written in this pass."""
        assert self.current is not None
        for row in self.current.rows:
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
    """Caches whose sinks have to be rotated: neighbours, from `first` on."""

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
    """

    table: Table
    slots: torch.Tensor
    raw: tuple[tuple[int, int, int], ...]
    sinks: tuple[Sinks, ...]
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, caches: list[int], places: list[Place], rotary: Table, spec: StreamSpec) -> "Plan":
        tokens, device = rotary[0].shape[1], rotary[0].device
        size = (spec.sink_chunks + spec.window_chunks + 1) * tokens
        frames = spec.frames_per_chunk

        def table(position: int, chunks: int) -> Table:
            return rotary_table(rotary, position * frames, frames, chunks)

        starts = [cache * size + place.own * tokens for cache, place in zip(caches, places, strict=True)]
        raw = tuple(
            (row, cache, place.own * tokens)
            for row, (cache, place) in enumerate(zip(caches, places, strict=True))
            if place.own < spec.sink_chunks and place.position < spec.sink_chunks
        )
        sinks = [
            Sinks(cache, 1, table(place.sink_shift, spec.sink_chunks))
            for cache, place in zip(caches, places, strict=True)
            if spec.sink_chunks and place.sink_shift
        ]
        return cls(
            table=_stacked([table(place.position, 1) for place in places]),
            slots=torch.cat([torch.arange(start, start + tokens, device=device) for start in starts]),
            raw=raw,
            sinks=tuple(_neighbours(sinks)),
            groups=tuple(_groups(caches, places)),
        )


def _stacked(tables: list[Table]) -> Table:
    return torch.cat([cos for cos, _ in tables]), torch.cat([sin for _, sin in tables])


def _neighbours(sinks: list[Sinks]) -> list[Sinks]:
    merged: list[list[Sinks]] = []
    for own in sinks:
        if merged and merged[-1][-1].first + 1 == own.first:
            merged[-1].append(own)
        else:
            merged.append([own])
    return [Sinks(run[0].first, len(run), _stacked([own.table for own in run])) for run in merged]


def _groups(caches: list[int], places: list[Place]) -> list[Group]:
    groups: list[Group] = []
    for row, (cache, place) in enumerate(zip(caches, places, strict=True)):
        last = groups[-1] if groups else None
        if last is not None and last.first_cache + last.count == cache and last.seen == place.seen:
            groups[-1] = Group(last.first_row, last.first_cache, last.count + 1, last.seen)
        else:
            groups.append(Group(row, cache, 1, place.seen))
    return groups


def rotary_table(rotary: Table, first_frame: int, frames: int, chunks: int) -> Table:
    """The rotary table of frames that do not start at 0.

    Args:
        rotary: the model's own for one chunk, (1, tokens, 1, channels): rows and columns are right in it.
        first_frame: position of the first frame.
        frames: of one chunk.
        chunks: how many chunks follow each other.
    """
    parts = []
    for own in rotary:
        channels, tokens = own.shape[-1], own.shape[1]
        time_channels = channels - 4 * (channels // 6)  # as WanRotaryPosEmbed divides them
        parts.append(
            (own[..., time_channels:].expand(chunks, -1, -1, -1).reshape(1, chunks * tokens, 1, -1), time_channels)
        )
    device, tokens = rotary[0].device, rotary[0].shape[1]
    positions = torch.arange(first_frame, first_frame + frames * chunks, dtype=torch.float64, device=device)
    angles = get_1d_rotary_pos_embed(
        parts[0][1], positions, ROTARY_THETA, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64
    )
    tables = []
    for angle, (space, _) in zip(angles, parts, strict=True):
        time = angle.repeat_interleave(tokens // frames, dim=0).view(1, chunks * tokens, 1, -1)
        tables.append(torch.cat([time.to(space.dtype), space], dim=-1))
    return tables[0], tables[1]
