"""The picture as one page that needs nothing else: no network, no other files."""

import json
from html import escape
from importlib import resources
from string import Template

from dit_pipelining import __version__
from dit_pipelining.lowering.names import count, data_size, duration
from dit_pipelining.lowering.report import TransformerReport
from dit_pipelining.show.colours import colour
from dit_pipelining.show.data import as_data
from dit_pipelining.show.memory_drawing import memory_drawing
from dit_pipelining.show.picture import Picture
from dit_pipelining.show.stage_drawing import stage_drawing
from dit_pipelining.show.svg import STYLE
from dit_pipelining.show.timeline_drawing import timeline_drawing


def html_page(picture: Picture) -> str:
    """A page that can be opened, sent and kept."""
    template = Template(resources.files("dit_pipelining.show").joinpath("page.html").read_text(encoding="utf-8"))
    size = f"{picture.size}, " if picture.size else ""
    about = f"{size}{picture.dtype}; cut into {picture.num_stages} by {picture.decided_by}; {picture.target}"
    # "<" could end the script element that holds the data.
    data = json.dumps(as_data(picture)).replace("<", "\\u003c")
    return template.substitute(
        title=escape(picture.model),
        about=escape(about),
        style=STYLE,
        tiles="".join(_tiles(picture)),
        sections="\n".join(_sections(picture)),
        footer=escape(f"dit-pipelining {__version__}. Predicted, not run. Rest the mouse on anything for its numbers."),
        data=data,
    )


def _tiles(picture: Picture) -> list[str]:
    timeline = picture.timeline
    fullest = max(picture.memory, key=lambda rank: rank.total)
    short = max(picture.shortfalls)
    memory = f"{data_size(short)} too little" if short else "on the fullest rank"
    tiles = [
        (duration(timeline.step_seconds), "a step of a request", False),
        (f"{timeline.steps_per_second:.3g}", "steps a second, all requests", False),
        (f"{timeline.bubble:.1%}", "bubble in the loop", False),
        (duration(timeline.makespan), "in all", False),
        (data_size(fullest.total), memory, bool(short)),
    ]
    return [
        f'<div class="tile{" bad" if bad else ""}"><b>{escape(number)}</b><span>{escape(words)}</span></div>'
        for number, words, bad in tiles
    ]


def _sections(picture: Picture) -> list[str]:
    made = []
    for report, timeline in zip(picture.reports, picture.timelines, strict=True):
        names = " and ".join(report.names)
        each = ", each" if len(report.names) > 1 else ""
        numbers = (
            f"{report.model_class}, {count(report.parameters)} parameters, {data_size(report.parameter_bytes)}, "
            f"{count(report.flops)}FLOPs a call{each}"
        )
        drawing = stage_drawing(report, timeline).svg(f"blocks of {names}, coloured by stage")
        made.append(_section(names, numbers, f'<div class="wide">{drawing}</div>{_stages(report)}'))
    memory = memory_drawing(picture).svg("memory of each rank by kind")
    unknown = f"without {picture.not_counted}" if picture.not_counted else ""
    made.append(_section("Memory of each rank", unknown, f'<div class="wide">{memory}</div>'))
    timeline_svg = timeline_drawing(picture.timeline).svg("when each rank computes")
    made.append(_section("Timeline", picture.load, f'<div class="wide">{timeline_svg}</div>'))
    if picture.alternatives:
        made.append(_section("Other ways to cut", "", _comparison(picture)))
    return made


def _section(title: str, about: str, content: str) -> str:
    small = f"<small>{escape(about)}</small>" if about else ""
    return f"<section><h2>{escape(title)}{small}</h2>{content}</section>"


def _stages(report: TransformerReport) -> str:
    head = ("stage", "blocks", "parameters", "memory", "of an even share", "FLOPs", "sends on")
    rows = []
    for stage in report.stages:
        beside = f"; beside: {', '.join(stage.side_blocks)}" if stage.side_blocks else ""
        last = stage.stage == len(report.stages) - 1
        sent = "" if last else data_size(sum(value.bytes for value in report.boundaries[stage.stage]))
        swatch = f'<span class="swatch" style="background:{colour(stage.stage)}"></span>'
        cells = (
            f"{swatch}{stage.stage}",
            escape((", ".join(stage.blocks) or "none") + beside),
            count(stage.parameters),
            data_size(stage.parameter_bytes),
            f"{report.parameter_ratio(stage):.3f}",
            f"{report.flops_share(stage):.1%}",
            sent,
        )
        rows.append(_row(cells, 2))
    return _table(head, rows, 2)


def _comparison(picture: Picture) -> str:
    head = ("partitioner", "blocks", "slowest stage", "a step", "bubble", "in all", "fullest rank")
    rows = []
    for other in picture.alternatives:
        if other.problem:
            rows.append(
                f'<tr><td>{escape(other.name)}</td><td colspan="6" class="problem">{escape(other.problem)}</td></tr>'
            )
            continue
        cells = (
            escape(other.name),
            "; ".join(",".join(map(str, counts)) for counts in other.counts),
            duration(other.slowest_seconds),
            duration(other.step_seconds),
            f"{other.bubble:.1%}",
            duration(other.makespan),
            data_size(other.memory_bytes),
        )
        rows.append(_row(cells, 2, "chosen" if other.name == picture.decided_by else ""))
    return _table(head, rows, 2)


def _table(head: tuple[str, ...], rows: list[str], first_number: int) -> str:
    cells = "".join(
        f"<th{' class=number' if index >= first_number else ''}>{escape(name)}</th>" for index, name in enumerate(head)
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(cells: tuple[str, ...], first_number: int, class_: str = "") -> str:
    written = "".join(
        f"<td{' class=number' if index >= first_number else ''}>{cell}</td>" for index, cell in enumerate(cells)
    )
    return f'<tr class="{class_}">{written}</tr>' if class_ else f"<tr>{written}</tr>"
