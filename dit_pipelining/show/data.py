"""`dit-pipelining show --json`: the same numbers for machines."""

from dataclasses import asdict
from typing import Any

from dit_pipelining.lowering.report import TransformerReport
from dit_pipelining.planning.timeline import Timeline
from dit_pipelining.show.picture import Picture
from dit_pipelining.show.stage_table import rank_totals

FORMAT = 2
"""Raised when a key changes its meaning or goes; new keys do not raise it."""


def as_data(picture: Picture) -> dict[str, Any]:
    """A picture as an object for JSON.

    Keys:
        format: 2.
        model, source: as given; source is preset, pipeline, transformer or config.
        num_stages, decided_by: stages, and what chose the partition.
        size: height and width in pixels, frames, batch; null where the inputs were given.
        dtype: of the weights.
        degrees: ranks along each dimension: data, cfg, pipeline, ring, ulysses, tensor; shards of HSDP, tiles of the VAE.
        transformers: one entry for transformers that are alike:
            names, model_class, parameters, parameter_bytes, unused_parameters, flops, partition (blocks per stage),
            flops_imbalance (busiest stage over the mean), largest_stage (over an even share of the parameters),
            extra_parameters (copies, over the model's parameters), each a fraction;
            stages: stage, first_block, end_block (excluded), blocks, side_blocks, parameters, parameter_bytes,
            parameter_ratio (1.0 is an even share), flops, flops_share;
            blocks: name, kind, stage, parameter_bytes, flops, seconds;
            boundaries: bytes, and tensors: name, origin, shape, dtype, bytes, relayed;
            predicted: stage_seconds and transfer_seconds of one call, result_seconds, encode_seconds, decode_seconds, and in
            encodes and decodes the seconds of each component with the ranks that compute it together (null: each by itself),
            requests, steps, calls_per_step, replicas, schedule, and what comes of it: step_seconds, steps_per_second,
            bubble (a fraction of the loop), makespan in seconds, utilisation of each rank.
        target: devices and links by name, limits in bytes, source of the seconds.
        ranks: one entry for all that share a stage of a replica: rank (their place in the line: the stages of the first
            replica, then those of the next one), parameters and parameter_bytes of the stage over all transformers; memory of
            the fullest in bytes by kind, and shortfall.
        alternatives: name, counts, problem, slowest_seconds, step_seconds, bubble, makespan, memory_bytes.
    """
    target = picture.target
    totals = zip(rank_totals(picture.reports) * picture.degrees.cfg, picture.memory, picture.shortfalls, strict=True)
    return {
        "format": FORMAT,
        "model": picture.model,
        "source": picture.source,
        "num_stages": picture.num_stages,
        "decided_by": picture.decided_by,
        "size": None if picture.size is None else asdict(picture.size),
        "dtype": picture.dtype,
        "degrees": asdict(picture.degrees),
        "transformers": [
            _transformer(report) | {"predicted": _predicted(timeline)}
            for report, timeline in zip(picture.reports, picture.timelines, strict=True)
        ],
        "target": {
            "devices": [device.name for device in target.devices],
            "links": [link.name for link in target.links],
            "limits": list(target.limits),
            "source": target.source,
        },
        "ranks": [
            {
                "rank": rank,
                "parameters": parameters,
                "parameter_bytes": held,
                "memory": asdict(memory) | {"total": memory.total},
                "shortfall": lacking,
            }
            for rank, ((parameters, held), memory, lacking) in enumerate(totals)
        ],
        "alternatives": [asdict(other) for other in picture.alternatives],
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


def _predicted(timeline: Timeline) -> dict[str, Any]:
    return asdict(timeline.workload) | {
        "encode_seconds": timeline.workload.encode_seconds,
        "decode_seconds": timeline.workload.decode_seconds,
        "step_seconds": timeline.step_seconds,
        "steps_per_second": timeline.steps_per_second,
        "bubble": timeline.bubble,
        "makespan": timeline.makespan,
        "utilisation": [timeline.utilisation(rank) for rank in range(timeline.workload.num_ranks)],
    }
