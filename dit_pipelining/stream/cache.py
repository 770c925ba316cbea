"""RollingKVCache: keys and values of the chunks that later chunks see, of one block.

[Note: ring]
A cache holds the sinks, then a ring of window + 1 chunks; a chunk's own keys and values are written into the ring before it
attends, so attention reads one piece of memory from the start on: no copy, whatever is overwritten next. The order of keys
is that of the ring, which attention does not care for.

[Note: positions]
Keys in the ring are kept rotated for the frame they belong to, counted from the stream's beginning without end: angles are
computed in float64 for the frames at hand, so there is no table to run out of. Rotary attention sees differences of
positions only, and within the window those stay small. Sinks would move away for ever; they are kept unrotated, and rotated
at each pass as if they stood right before the window, so that no distance grows beyond what sinks + window + chunk span.

Pointers and positions are host integers: nothing here waits for a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from dit_pipelining.stream.spec import StreamSpec


@dataclass
class Pointer:
    """How far one cache (of a stream, level and branch) is filled.

    Attributes:
        written: chunks that were kept since the stream began: where the ring goes on, and the position of the next chunk.
        next_chunk: number of the chunk that comes next.
    """

    written: int = 0
    next_chunk: int = 0


@dataclass(frozen=True)
class Place:
    """Where a chunk's keys and values go and what it sees, in chunks.

    Attributes:
        own: slot of the chunk in the cache.
        seen: slots that are filled, the own one included, from the first on.
        position: of the chunk, in chunks since the stream began.
        sink_shift: by how many chunks the sinks have to move to stand right before the window.
    """

    own: int
    seen: int
    position: int
    sink_shift: int


def place_of(written: int, spec: StreamSpec) -> Place:
    """Where the chunk goes that comes after `written` others."""
    sinks, ring = spec.sink_chunks, spec.window_chunks + 1
    own = written if written < sinks else sinks + (written - sinks) % ring
    return Place(own, min(written + 1, sinks + ring), written, max(0, written - sinks - spec.window_chunks))


@dataclass
class RollingKVCache:
    """Keys and values of one block, for all streams, levels and branches: `caches` many.

    Attributes:
        keys, values: (caches, tokens, heads, channels).
        raw_sinks: unrotated keys of the sinks, (caches, sink tokens, heads, channels).
        pointers: one per cache.
    """

    spec: StreamSpec
    pointers: list[Pointer] = field(default_factory=list)
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    raw_sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.pointers:
            self.pointers = [Pointer() for _ in range(num_caches(self.spec))]

    def reserve(self, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors of the cache, made at the first call, for a chunk's keys (rows, tokens, heads, channels)."""
        if self.keys is None or self.values is None or self.raw_sinks is None:
            _, tokens, heads, channels = key.shape
            slots = self.spec.sink_chunks + self.spec.window_chunks + 1
            count = len(self.pointers)
            self.keys = key.new_zeros(count, slots * tokens, heads, channels)
            self.values = torch.zeros_like(self.keys)
            self.raw_sinks = key.new_zeros(count, self.spec.sink_chunks * tokens, heads, channels)
        return self.keys, self.values, self.raw_sinks

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What moves with the block, besides the pointers; empty before the first call."""
        return [tensor for tensor in (self.keys, self.values, self.raw_sinks) if tensor is not None]

    def change_levels(self, spec: StreamSpec, sources: Sequence[int]) -> None:
        """Go on with caches for another spec, which differs in its levels.

        Args:
            spec: the new one.
            sources: for each new cache of a stream and branch the old one whose state it takes over.
        """
        old, count = self.spec.caches, spec.branches * spec.streams
        taken = [own * old + source for own in range(count) for source in sources]
        if self.keys is not None and self.values is not None and self.raw_sinks is not None:
            self.keys, self.values, self.raw_sinks = self.keys[taken], self.values[taken], self.raw_sinks[taken]
        self.pointers = [replace(self.pointers[source]) for source in taken]
        self.spec = spec

    def restore(self, tensors: Sequence[torch.Tensor], pointers: Sequence[tuple[int, int]]) -> None:
        """Take over the state of the same block's cache on another rank."""
        if tensors:
            self.keys, self.values, self.raw_sinks = tensors
        self.pointers = [Pointer(*numbers) for numbers in pointers]


def num_caches(spec: StreamSpec) -> int:
    """Caches of a block."""
    return spec.branches * spec.streams * spec.caches


def cache_index(branch: int, stream: int, level: int, spec: StreamSpec) -> int:
    """The number of the cache that a row uses; rows in order use neighbouring ones."""
    return (branch * spec.streams + stream) * spec.caches + spec.cache_of(level)
