"""Say how a pipeline's transformers were split, in a few lines."""

from typing import Any

from dit_pipelining.lowering.names import data_size
from dit_pipelining.lowering.report import CrossingReport, report_split
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.attach import split_of
from partitioners.errors import counted


def describe_split(name: str, split: SplitModel) -> str:
    """One transformer's partition, weights per stage and what crosses each boundary, as text."""
    report = report_split(split, [name])
    size = f"{counted(len(report.blocks), 'block')} over {counted(split.num_stages, 'stage')}"
    lines = [f"{name}: {size} ({split.partition})"]
    for stage in report.stages:
        line = f"  stage {stage.stage}: {', '.join(stage.blocks) or 'no blocks'}, {data_size(stage.parameter_bytes)}"
        if stage.stage < len(report.boundaries):
            crossings = sorted(report.boundaries[stage.stage], key=lambda crossing: -crossing.bytes)
            total = data_size(sum(crossing.bytes for crossing in crossings))
            line += f"; sends {total}: {', '.join(map(_described, crossings))}"
        lines.append(line)
    return "\n".join(lines)


def print_split(pipeline: Any) -> None:
    """Print how each transformer of the pipeline was split; nothing for one that has not run yet or is not split."""
    for name, component in pipeline.components.items():
        split = split_of(component)
        if split is not None:
            print(describe_split(name, split))


def _described(crossing: CrossingReport) -> str:
    return f"{crossing.origin} {'x'.join(map(str, crossing.shape))}"
