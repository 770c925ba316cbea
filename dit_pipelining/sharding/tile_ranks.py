"""Which VAEs' tiles can be computed by several ranks, and which of them computes each tile: pure functions."""

import math
from collections.abc import Sequence

STATE_IN_LAYERS = ("_clear_conv_cache", "_empty_causal_cached")
"""Methods by which diffusers' VAEs (EasyAnimate's, VidTok) clear what their layers keep from one call to the next."""

WIDEST_PACE = 4.0
"""No rank counts as more than so many times slower than the fastest, so that each is measured again."""


def can_spread(cls: type) -> bool:
    """Whether the tiles of a VAE of this class are independent calls: it has tiling, and its layers keep nothing."""
    return hasattr(cls, "tiled_decode") and not any(hasattr(cls, name) for name in STATE_IN_LAYERS)


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
