"""Which ranks compute a VAE's tiles, and which of them each tile: pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dit_pipelining.comm.layout import Layout
from dit_pipelining.comm.mesh import Mesh

STATE_IN_LAYERS = ("_clear_conv_cache", "_empty_causal_cached")
"""Methods by which diffusers' VAEs (EasyAnimate's, VidTok) clear what their layers keep from one call to the next."""

WIDEST_PACE = 4.0
"""No rank counts as more than so many times slower than the fastest, so that each is measured again."""


def can_spread(cls: type) -> bool:
    """Whether the tiles of a VAE of this class are independent calls: it has tiling, and its layers keep nothing."""
    return hasattr(cls, "tiled_decode") and not any(hasattr(cls, name) for name in STATE_IN_LAYERS)


@dataclass(frozen=True)
class TileRanks:
    """Who has to do with the tiles of one VAE; ranks of the launch.

    Attributes:
        compute: those that compute tiles, the lead first.
        owners: of the VAE, one in each line of ranks that make the same calls, the lead first: it gives the others the
            result.
    """

    compute: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def lead(self) -> int:
        return self.compute[0]


def tile_ranks(layout: Layout, rank: int, owner: int, size: int) -> TileRanks:
    """Choose the ranks that compute a VAE's tiles: its owners in all lines, and then the ranks before the first of them.

    Args:
        layout: of the launch.
        rank: one of those in question; ranks of other data-parallel copies have nothing to do with it.
        owner: of the VAE, as a rank within each line.
        size: number of ranks that compute.
    """
    copy = layout.peers(rank, "cfg", "pipeline", "ring", "ulysses", "tensor")
    owners = tuple(sorted({Mesh.of(layout, peer).line[owner] for peer in copy}))
    lead = copy.index(owners[0])
    before = [copy[(lead - i) % len(copy)] for i in range(1, len(copy))]
    others = [peer for peer in before if peer not in owners]
    return TileRanks((*owners, *others)[:size], owners)


def assign_tiles(costs: Sequence[float], paces: Sequence[float]) -> list[int]:
    """Choose a rank for each tile: from the dearest on, each goes to the rank that is done with it first.

    This is the list scheduling of Graham (1969), longest tile first, for ranks of different speed. The last tile stays on the
    first rank, since the VAE's code may go on with its state.

    Args:
        costs: of the tiles.
        paces: of the ranks, in seconds per unit of cost.

    Returns:
        the number of a rank for each tile.
    """
    *others, last = range(len(costs))
    chosen = dict.fromkeys([last], 0)
    loads = [costs[last] * paces[0], *[0.0] * (len(paces) - 1)]
    for tile in sorted(others, key=lambda tile: -costs[tile]):
        done = [load + costs[tile] * pace for load, pace in zip(loads, paces, strict=True)]
        rank = done.index(min(done))
        chosen[tile], loads[rank] = rank, done[rank]
    return [chosen[tile] for tile in range(len(costs))]


def usable_paces(paces: Sequence[float]) -> list[float]:
    """Measured paces; ranks that are not measured count as the slowest of the others."""
    known = [pace for pace in paces if math.isfinite(pace)]
    if not known:
        return [1.0] * len(paces)
    return [min(pace if math.isfinite(pace) else max(known), WIDEST_PACE * min(known)) for pace in paces]
