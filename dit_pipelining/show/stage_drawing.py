"""The blocks of a transformer in a row, as wide as they take time, coloured by stage."""

from dit_pipelining.lowering.names import count, data_size, duration
from dit_pipelining.lowering.report import BlockReport, CrossingReport, StageReport, TransformerReport
from dit_pipelining.planning.timeline import Timeline
from dit_pipelining.show.colours import colour
from dit_pipelining.show.drawing import WIDTH, Drawing, element, text

HEIGHT = 56.0
WIDEST_GAP, SHARE_OF_GAPS = 78.0, 0.3
KIND_OPACITY = (1.0, 0.62, 0.8, 0.45)
LABEL_WIDTH = 96.0
"""A stage that is narrower has no room for its words."""


def stage_drawing(report: TransformerReport, timeline: Timeline) -> Drawing:
    """Draw one transformer.

    Args:
        report: of it.
        timeline: of the same transformer, for the seconds of its stages.
    """
    stages = len(report.stages)
    gap = min(WIDEST_GAP, WIDTH * SHARE_OF_GAPS / max(stages - 1, 1))
    scale = (WIDTH - gap * (stages - 1)) / (sum(_width(block) for block in report.blocks) or 1.0)
    kinds = list(dict.fromkeys(block.kind for block in report.blocks))
    parts: list[str] = []
    x = 0.0
    for stage in report.stages:
        own = report.blocks[stage.first_block : stage.end_block]
        left = x
        for block in own:
            parts.append(_block(block, x, _width(block) * scale, kinds.index(block.kind)))
            x += _width(block) * scale
        seconds = timeline.workload.stage_seconds[stage.stage]
        parts += _words(stage, report, seconds, left, x)
        if stage.stage < stages - 1:
            moved = timeline.workload.transfer_seconds[stage.stage]
            parts.append(_arrow(report.boundaries[stage.stage], stage.stage, moved, x, gap))
            x += gap
    parts += _legend(kinds)
    return Drawing("".join(parts), HEIGHT + (92 if len(kinds) > 1 else 68))


def _width(block: BlockReport) -> float:
    return block.seconds or 1e-9


def _block(block: BlockReport, x: float, width: float, kind: int) -> str:
    tip = (
        f"{block.name} on stage {block.stage}\n{block.kind}\n{duration(block.seconds)} a call, {count(block.flops)}FLOPs\n"
        f"{data_size(block.parameter_bytes)} of weights"
    )
    inset = min(1.0, width / 8)
    return element(
        "rect",
        tip=tip,
        class_="block",
        data_stage=block.stage,
        x=x + inset,
        y=0.0,
        width=width - 2 * inset,
        height=HEIGHT,
        rx=min(4.0, width / 4),
        fill=colour(block.stage),
        fill_opacity=KIND_OPACITY[kind % len(KIND_OPACITY)],
    )


def _words(stage: StageReport, report: TransformerReport, seconds: float, left: float, right: float) -> list[str]:
    middle, below = (left + right) / 2, HEIGHT + 20
    blocks = ", ".join(stage.blocks) or "no blocks"
    tip = (
        f"stage {stage.stage}: {blocks}\n{duration(seconds)} a call, {report.flops_share(stage):.1%} of the FLOPs\n"
        f"{count(stage.parameters)} parameters, {data_size(stage.parameter_bytes)}"
        + (f"\nbeside: {', '.join(stage.side_blocks)}" if stage.side_blocks else "")
    )
    lines = [text(middle, below, f"stage {stage.stage}" if right - left > 44 else str(stage.stage), "", "middle")]
    if right - left >= LABEL_WIDTH:
        blocks = blocks if len(blocks) * 6.2 < right - left else f"{stage.end_block - stage.first_block} blocks"
        lines.append(text(middle, below + 17, blocks, "soft", "middle"))
        lines.append(
            text(middle, below + 34, f"{duration(seconds)}, {data_size(stage.parameter_bytes)}", "soft", "middle")
        )
    return [element("g", "".join(lines), tip=tip, class_="stage", data_stage=stage.stage, tabindex=0)]


def _arrow(crossing: tuple[CrossingReport, ...], stage: int, seconds: float, x: float, gap: float) -> str:
    middle, start, end = HEIGHT / 2, x + gap * 0.16, x + gap * 0.84
    head = min(6.0, gap * 0.15)
    size = data_size(sum(value.bytes for value in crossing))
    ordered = sorted(crossing, key=lambda value: -value.bytes)
    tip = f"stage {stage} to {stage + 1}: {size}, {duration(seconds)}\n" + "\n".join(
        f"{value.origin}: {'x'.join(map(str, value.shape))} {value.dtype}{' (relayed)' if value.relayed else ''}"
        for value in ordered
    )
    path = f"M{start:.4g} {middle}H{end:.4g}m{-head:.3g} {-head:.3g}l{head:.3g} {head:.3g}l{-head:.3g} {head:.3g}"
    label = text(x + gap / 2, middle - 10, size, "soft", "middle") if gap > 60 else ""
    catch = element("rect", x=x, y=0.0, width=gap, height=HEIGHT, fill="transparent")
    return element("g", catch + element("path", class_="arrow", d=path) + label, tip=tip, class_="boundary", tabindex=0)


def _legend(kinds: list[str]) -> list[str]:
    if len(kinds) < 2:
        return []
    parts, x, y = [], 0.0, HEIGHT + 76
    for index, kind in enumerate(kinds):
        opacity = KIND_OPACITY[index % len(KIND_OPACITY)]
        parts.append(element("rect", x=x, y=y, width=12.0, height=12.0, rx=2.0, fill=colour(0), fill_opacity=opacity))
        parts.append(text(x + 18, y + 11, kind, "soft"))
        x += 34 + 7 * len(kind)
    return parts
