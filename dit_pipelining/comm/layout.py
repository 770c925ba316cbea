"""How the ranks of a launch are laid out: data x cfg x pipeline x ring x ulysses x tensor.

The dimension that talks most is innermost, so that its ranks are neighbours. Ranks that differ in cfg and pipeline only are a
line: they run a pipeline's calls together, stage by stage, in one replica or several. Lines do not know of each other: those of
other ring, ulysses and tensor ranks make the same calls and meet inside the transformer, those of other data ranks have other
requests.
"""

from dataclasses import dataclass
from itertools import product
from math import prod

from dit_pipelining.config import DIMENSIONS

LINE = ("cfg", "pipeline")
CALLERS = tuple(name for name in DIMENSIONS if name != "data")


@dataclass(frozen=True)
class Layout:
    """How many ranks there are of each dimension, outermost first."""

    data: int = 1
    cfg: int = 1
    pipeline: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    @property
    def sequence(self) -> int:
        """Ranks that share the tokens of a call."""
        return self.ring * self.ulysses

    @property
    def inside(self) -> int:
        """Ranks of a replica that share each stage."""
        return self.sequence * self.tensor

    @property
    def size(self) -> int:
        """All ranks."""
        return prod(getattr(self, name) for name in DIMENSIONS)

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place along each dimension."""
        places = {}
        for name in reversed(DIMENSIONS):
            rank, places[name] = divmod(rank, getattr(self, name))
        return dict(reversed(places.items()))

    def peers(self, rank: int, *dimensions: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along these dimensions only, itself among them, in order."""
        place = self.coordinates(rank)
        ranges = [range(getattr(self, name)) if name in dimensions else [at] for name, at in place.items()]
        return tuple(self._rank(at) for at in product(*ranges))

    def groups(self, *dimensions: str) -> list[tuple[int, ...]]:
        """All sets of ranks that differ along these dimensions only, each in order."""
        return sorted({self.peers(rank, *dimensions) for rank in range(self.size)})

    def _rank(self, places: tuple[int, ...]) -> int:
        rank = 0
        for name, place in zip(DIMENSIONS, places, strict=True):
            rank = rank * getattr(self, name) + place
        return rank


ONE_RANK = Layout()
