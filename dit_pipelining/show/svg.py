"""The picture as an SVG file: blocks coloured by stage, memory, timeline; numbers appear where the mouse rests."""

from collections.abc import Sequence

from dit_pipelining.show.drawing import WIDTH, Drawing, element, text
from dit_pipelining.show.memory_drawing import memory_drawing
from dit_pipelining.show.picture import Picture
from dit_pipelining.show.stage_drawing import stage_drawing
from dit_pipelining.show.timeline_drawing import timeline_drawing

STYLE = """
svg { --ink: #1c2430; --soft: #5b6675; --line: #cfd6df; --ground: #ffffff; --faint: #eef1f5;
      font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6eaf0; --soft: #98a4b3; --line: #3a4452; --ground: #14181f; --faint: #1f2630; }
}
svg text { fill: var(--ink); font-size: 13px; }
svg text.soft { fill: var(--soft); font-size: 12px; }
svg text.heading { font-size: 20px; font-weight: 600; }
svg text.section { font-size: 15px; font-weight: 600; }
svg .ground { fill: var(--ground); }
svg .track { fill: var(--faint); }
svg .line { stroke: var(--line); stroke-width: 1; fill: none; }
svg .arrow { stroke: var(--soft); stroke-width: 1.5; fill: none; }
svg .limit { stroke: #d1495b; stroke-width: 2; stroke-dasharray: 4 3; }
svg .transfer { stroke: var(--soft); stroke-width: 1; opacity: 0.55; }
svg [tabindex]:focus { outline: 2px solid var(--ink); outline-offset: 1px; }
svg .block:hover, svg .span:hover, svg .part:hover { filter: brightness(1.15); }
"""

MARGIN = 30


def svg_file(picture: Picture) -> str:
    """A file of its own."""
    parts = [*sections(picture)]
    height = 90.0
    body: list[str] = []
    for title, drawing in parts:
        body.append(text(0, height, title, "section"))
        body.append(element("g", drawing.body, transform=f"translate(0 {height + 14:g})"))
        height += 14 + drawing.height + 44
    size = f"{picture.size}, " if picture.size else ""
    heading = [
        text(0, 24, picture.model, "heading"),
        text(0, 48, f"{size}{picture.dtype}; {picture.target}", "soft"),
    ]
    full_width, full_height = WIDTH + 2 * MARGIN, height + MARGIN
    ground = element("rect", class_="ground", x=0, y=0, width=full_width, height=full_height)
    group = element("g", "".join([*heading, *body]), transform=f"translate({MARGIN} {MARGIN})")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width:g} {full_height:g}" '
        f'width="{full_width:g}" height="{full_height:g}"><style>{STYLE}</style>{ground}{group}</svg>\n'
    )


def sections(picture: Picture) -> Sequence[tuple[str, Drawing]]:
    """The drawings of a picture, with their titles."""
    stages = [
        (" and ".join(report.names) + f"  ({report.model_class})", stage_drawing(report, timeline))
        for report, timeline in zip(picture.reports, picture.timelines, strict=True)
    ]
    return [
        *stages,
        ("Memory of each rank", memory_drawing(picture)),
        (f"Timeline: {picture.load}", timeline_drawing(picture.timeline)),
    ]
