"""What the dimensions inside a stage send: bytes per rank and block of one call, and the seconds that takes.

`hidden` is the size of a block's hidden states on the whole, batch x tokens x dim x bytes per element. Ranks talk at the
bandwidth of one link, all at the same time.
"""

from dit_pipelining.costs.devices import Link


def ulysses_bytes(hidden: float, degree: int) -> float:
    """Bytes that a rank sends for one attention.

    Queries, keys, values and the result are each exchanged by an all-to-all, in which a rank keeps its own part of its
    `hidden / degree` bytes and sends the others (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.2).
    """
    return 4 * hidden / degree * (degree - 1) / degree


def ring_bytes(hidden: float, degree: int) -> float:
    """Bytes that a rank sends for one attention.

    It passes keys and values on, its own and those it was sent, `degree - 1` times (Ring Attention, Liu et al. 2023, section
    3). diffusers gathers them before it computes, so nothing hides them.
    """
    return 2 * hidden / degree * (degree - 1)


def tensor_bytes(hidden: float, degree: int, reductions: int = 2) -> float:
    """Bytes that a rank sends for the sums of a block.

    There is one all-reduce after each attention and each feed-forward, two in a plain block (Megatron-LM, Shoeybi et al. 2019,
    section 3). A ring all-reduce sends every byte twice but for the rank's own part (Patarasuk and Yuan 2009).
    """
    return reductions * 2 * hidden * (degree - 1) / degree


def hsdp_bytes(weights: float, shards: int) -> float:
    """Bytes that a rank receives to have a block's weights whole.

    It gathers the shards of all others, at each call (FSDP, Zhao et al. 2023, section 3.2).
    """
    return weights * (shards - 1) / shards


def ulysses_seconds(hidden: float, degree: int, link: Link) -> float:
    """Of one attention's four all-to-alls."""
    return 0.0 if degree == 1 else _seconds(ulysses_bytes(hidden, degree), 4, link)


def ring_seconds(hidden: float, degree: int, link: Link) -> float:
    """Of one attention's rounds."""
    return 0.0 if degree == 1 else _seconds(ring_bytes(hidden, degree), degree - 1, link)


def tensor_seconds(hidden: float, degree: int, link: Link, reductions: int = 2) -> float:
    """Of a block's all-reduces, each of `2 (degree - 1)` steps around the ring."""
    if degree == 1:
        return 0.0
    return _seconds(tensor_bytes(hidden, degree, reductions), reductions * 2 * (degree - 1), link)


def hsdp_seconds(weights: float, shards: int, link: Link) -> float:
    """Of gathering a block's weights."""
    return 0.0 if shards == 1 else _seconds(hsdp_bytes(weights, shards), shards - 1, link)


def _seconds(sent: float, steps: int, link: Link) -> float:
    return steps * link.latency_seconds + sent / link.usable_bytes_per_second
