"""The table of stages and boundaries that `dit-pipelining show` prints."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dit_pipelining.lowering.names import count, data_size
from dit_pipelining.lowering.report import StageReport, TransformerReport
from dit_pipelining.show.picture import Picture

BAR_WIDTH = 16
BAR_EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_split(picture: Picture, console: Console) -> None:
    """Print tables of all transformers of a model."""
    title = Text(picture.model, style="bold")
    title.append(f"  {picture.size}" if picture.size else "", style="default")
    title.append(f"  {picture.dtype}", style="default")
    title.append(f"  partition by {picture.decided_by}", style="dim")
    console.print(title)
    reports = picture.reports
    for report in reports:
        console.print()
        console.print(Group(*_transformer(report)))
    if sum(len(report.names) for report in reports) > 1:
        console.print()
        _print_ranks(reports, console)


def _transformer(report: TransformerReport) -> list[RenderableType]:
    parts: list[RenderableType] = [_title(report), _stages(report)]
    if report.boundaries:
        parts += [_boundaries(report)]
    return [*parts, _summary(report)]


def _title(report: TransformerReport) -> Text:
    title = Text(" and ".join(report.names), style="bold cyan")
    alike, each = ("(cut alike)  ", ", each") if len(report.names) > 1 else ("", "")
    title.append(f"  {alike}{report.model_class}", style="default")
    title.append(
        f"  {count(report.parameters)} parameters, {data_size(report.parameter_bytes)}, "
        f"{count(report.flops)}FLOPs a call{each}",
        style="default",
    )
    return title


def _stages(report: TransformerReport) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("stage", justify="right")
    table.add_column("blocks", overflow="fold")
    table.add_column("parameters", justify="right")
    table.add_column("memory", justify="right")
    table.add_column(f"x 1/{len(report.stages)}", justify="right")
    table.add_column("FLOPs", justify="right")
    table.add_column("", no_wrap=True)
    largest = max((report.flops_share(stage) for stage in report.stages), default=0.0)
    for stage in report.stages:
        share = report.flops_share(stage)
        table.add_row(
            str(stage.stage),
            _blocks(stage),
            count(stage.parameters),
            data_size(stage.parameter_bytes),
            f"{report.parameter_ratio(stage):.3f}",
            f"{share:.1%}",
            Text(bar(share / largest if largest else 0.0), style="green"),
        )
    return table


def _blocks(stage: StageReport) -> str:
    number = stage.end_block - stage.first_block
    lines = [f"{number}: {', '.join(stage.blocks)}" if number else "none"]
    if stage.side_blocks:
        lines.append(f"beside: {', '.join(stage.side_blocks)}")
    return "\n".join(lines)


def _boundaries(report: TransformerReport) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("boundary", justify="right")
    table.add_column("what crosses", overflow="fold")
    table.add_column("shape and dtype")
    table.add_column("size", justify="right")
    for i, crossings in enumerate(report.boundaries):
        ordered = sorted(crossings, key=lambda crossing: -crossing.bytes)
        for row, crossing in enumerate(ordered):
            shape = "x".join(map(str, crossing.shape))
            table.add_row(
                f"{i} to {i + 1}" if row == 0 else "",
                crossing.origin + (" (relayed)" if crossing.relayed else ""),
                f"{shape} {crossing.dtype}",
                data_size(crossing.bytes),
            )
    return table


def _summary(report: TransformerReport) -> Text:
    lines = [
        f"busiest stage: {report.flops_imbalance:.3f} x the mean FLOPs",
        f"largest stage: {report.largest_stage:.3f} x an even share of the parameters",
        f"extra copies of parameters: {report.extra_parameters:.2%} of the model",
    ]
    if report.unused_parameters:
        lines.append(f"{count(report.unused_parameters)} parameters are used by no stage")
    return Text("\n".join(f" {line}" for line in lines))


def _print_ranks(reports: Sequence[TransformerReport], console: Console) -> None:
    total = sum(report.parameters * len(report.names) for report in reports)
    names = [name for report in reports for name in report.names]
    console.print(Text("the ranks of each stage hold ").append(" + ".join(names), style="bold cyan"))
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("stage", justify="right")
    table.add_column("parameters", justify="right")
    table.add_column("memory", justify="right")
    table.add_column(f"x 1/{len(reports[0].stages)}", justify="right")
    for stage, (parameters, size) in enumerate(rank_totals(reports)):
        ratio = parameters * len(reports[0].stages) / total
        table.add_row(str(stage), count(parameters), data_size(size), f"{ratio:.3f}")
    console.print(table)


def rank_totals(reports: Sequence[TransformerReport]) -> list[tuple[int, int]]:
    """Parameters and bytes of the ranks of each stage, which hold it of every transformer."""
    stages = range(len(reports[0].stages))
    return [
        (
            sum(report.stages[stage].parameters * len(report.names) for report in reports),
            sum(report.stages[stage].parameter_bytes * len(report.names) for report in reports),
        )
        for stage in stages
    ]


def bar(fraction: float) -> str:
    """A bar of eighths of a character: `BAR_WIDTH` characters for 1.0."""
    eighths = round(min(max(fraction, 0.0), 1.0) * BAR_WIDTH * 8)
    return (BAR_EIGHTHS[8] * (eighths // 8) + BAR_EIGHTHS[eighths % 8]).rstrip()
