"""Say how a pipeline's transformers were split, in a few lines."""

from typing import Any

from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.attach import split_of


def describe_split(name: str, split: SplitModel) -> str:
    """One transformer's partition, weights per stage and bytes at each boundary, as text."""
    shares = [
        f"{count} blocks, {stage.parameter_bytes / 1e6:,.1f} MB"
        for count, stage in zip(split.partition.counts, split.stages, strict=True)
    ]
    lines = [f"{name}: {split.partition.num_blocks} blocks over {split.num_stages} stages ({split.partition})"]
    for index, share in enumerate(shares):
        line = f"  stage {index}: {share}"
        if index < len(split.boundaries):
            values = ", ".join(f"{v.name} {list(v.shape)}" for v in split.boundaries[index])
            line += f"; sends {sum(v.bytes for v in split.boundaries[index]) / 1e6:,.2f} MB: {values}"
        lines.append(line)
    return "\n".join(lines)


def print_split(pipeline: Any) -> None:
    """Print how each transformer of the pipeline was split; nothing for one that has not run yet or is not split."""
    for name, component in pipeline.components.items():
        split = split_of(component)
        if split is not None:
            print(describe_split(name, split))
