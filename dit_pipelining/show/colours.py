"""Colours of stages and requests, told apart on white and on dark ground; the first eight also by the colour-blind."""

PALETTE = ("#2a78d6", "#e08a1e", "#1a9e77", "#d1495b", "#8661c1", "#3aa6b9", "#c2549d", "#8a8f1f")


def colour(index: int) -> str:
    """The colour of a stage or a request."""
    return PALETTE[index % len(PALETTE)]
