"""`dit-pipelining show --json`: the same numbers for machines."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dit_pipelining.planning.recipes import Size
from dit_pipelining.show.report import TransformerReport
from dit_pipelining.show.stage_table import rank_totals

FORMAT = 1
"""Raised when a key changes its meaning or goes; new keys do not raise it."""


def as_data(model: str, source: str, decided_by: str, size: Size | None, reports: Sequence[TransformerReport]) -> dict:
    """A split as an object for JSON.

    Keys:
        format: 1.
        model, source: as given; source is preset, pipeline, transformer or config.
        num_stages, decided_by: stages, and what chose the partition.
        size: height and width in pixels, frames, batch; null where the inputs were given.
        transformers: one entry for transformers that are alike:
            names, model_class, parameters, parameter_bytes, unused_parameters, flops, partition (blocks per stage),
            flops_imbalance (busiest stage over the mean), largest_stage (over an even share of the parameters),
            extra_parameters (copies, over the model's parameters), each a fraction;
            stages: stage, first_block, end_block (excluded), blocks, side_blocks, parameters, parameter_bytes,
            parameter_ratio (1.0 is an even share), flops, flops_share;
            boundaries: bytes, and tensors: name, origin, shape, dtype, bytes, relayed.
        ranks: rank, parameters, parameter_bytes over all transformers.
    """
    return {
        "format": FORMAT,
        "model": model,
        "source": source,
        "num_stages": len(reports[0].stages),
        "decided_by": decided_by,
        "size": None if size is None else asdict(size),
        "transformers": [_transformer(report) for report in reports],
        "ranks": [
            {"rank": rank, "parameters": parameters, "parameter_bytes": held}
            for rank, (parameters, held) in enumerate(rank_totals(reports))
        ],
    }


def _transformer(report: TransformerReport) -> dict[str, Any]:
    data = asdict(report)
    for entry, stage in zip(data["stages"], report.stages, strict=True):
        entry["parameter_ratio"] = report.parameter_ratio(stage)
        entry["flops_share"] = report.flops_share(stage)
    data["boundaries"] = [
        {"bytes": sum(crossing["bytes"] for crossing in crossings), "tensors": crossings}
        for crossings in data["boundaries"]
    ]
    ratios = ("flops_imbalance", "largest_stage", "extra_parameters")
    return data | {name: getattr(report, name) for name in ratios}
