"""A bar for each rank: what its memory is needed for."""

from dit_pipelining.lowering.names import data_size
from dit_pipelining.planning.memory import MEMORY_KINDS
from dit_pipelining.show.drawing import WIDTH, Drawing, element, text
from dit_pipelining.show.picture import Picture

ROW, BAR = 30.0, 20.0
LEFT, RIGHT = 60.0, 190.0
KIND_COLOURS = {
    "weights": "#2a78d6",
    "replicated": "#8ab4e8",
    "activations": "#1a9e77",
    "buffers": "#e08a1e",
    "requests": "#6b7a88",
    "encoders": "#8661c1",
    "vae": "#c2549d",
}


def memory_drawing(picture: Picture) -> Drawing:
    """Draw the memory of all ranks of a line, and the limit where it is near."""
    most = max(rank.total for rank in picture.memory) or 1
    scale = (WIDTH - LEFT - RIGHT) / (most * 1.08)
    parts: list[str] = []
    for place, (memory, limit) in enumerate(zip(picture.memory, picture.limits, strict=True)):
        y, rank = place * ROW, picture.ranks_of(place)
        parts.append(text(0, y + 15, f"rank {rank}"))
        parts.append(element("rect", class_="track", x=LEFT, y=y, width=WIDTH - LEFT - RIGHT, height=BAR, rx=3.0))
        x = LEFT
        for kind in MEMORY_KINDS:
            size = getattr(memory, kind)
            width = size * scale
            if size:
                tip = f"rank {rank}, {kind}: {data_size(size)}\n{size / memory.total:.1%} of {data_size(memory.total)}"
                parts.append(
                    element("rect", tip=tip, class_="part", x=x, y=y, width=width, height=BAR, fill=KIND_COLOURS[kind])
                )
            x += width
        if limit <= most * 1.08:
            at = LEFT + limit * scale
            tip = f"{picture.target.devices[place % picture.num_stages].title}: {data_size(limit)} usable"
            parts.append(element("line", tip=tip, class_="limit", x1=at, x2=at, y1=y - 3, y2=y + BAR + 3))
        needed = f"{data_size(memory.total)} of {data_size(limit)}" + (" !" if memory.total > limit else "")
        parts.append(text(WIDTH - RIGHT + 12, y + 15, needed, "soft"))
    return Drawing("".join(parts) + _legend(picture, len(picture.memory) * ROW + 6), len(picture.memory) * ROW + 26)


def _legend(picture: Picture, y: float) -> str:
    parts, x = [], LEFT
    for kind in MEMORY_KINDS:
        if any(getattr(rank, kind) for rank in picture.memory):
            parts.append(element("rect", x=x, y=y, width=12.0, height=12.0, rx=2.0, fill=KIND_COLOURS[kind]))
            parts.append(text(x + 18, y + 11, kind, "soft"))
            x += 46 + 7 * len(kind)
    return "".join(parts)
