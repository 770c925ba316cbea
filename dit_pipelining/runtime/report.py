"""Say how a pipeline was spread over ranks, in a few lines."""

from collections.abc import Mapping
from typing import Any

from dit_pipelining.config import DIMENSIONS, ParallelConfig
from dit_pipelining.lowering.names import data_size
from dit_pipelining.lowering.report import CrossingReport, report_split
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.attach import config_of, split_of
from partitioners.errors import counted

WORDS = {
    "data": ("copy (data)", "copies (data)"),
    "cfg": ("replica (cfg)", "replicas (cfg)"),
    "pipeline": ("stage", "stages"),
    "ring": ("token shard (ring)", "token shards (ring)"),
    "ulysses": ("token shard (ulysses)", "token shards (ulysses)"),
    "tensor": ("head shard (tensor)", "head shards (tensor)"),
}
"""What the ranks of each dimension are, one and several."""


def describe_layout(config: ParallelConfig) -> str:
    """What all ranks are, in a line, for example `4 ranks: 2 replicas (cfg) x 2 stages`."""
    sizes = {name: getattr(config, field) for name, field in DIMENSIONS.items()}
    ranks = " x ".join(
        f"{size} {WORDS[name][size > 1]}" for name, size in sizes.items() if size > 1 or name == "pipeline"
    )
    shared = []
    if config.use_hsdp:
        shared.append(f"each block's weights over {config.hsdp_shard_size} ranks (hsdp)")
    encoders = config.text_encoder_tp_size
    by_name = encoders if isinstance(encoders, Mapping) else {"each text encoder": encoders}
    shared += [f"{name} over {size} ranks" for name, size in by_name.items() if size > 1]
    if config.vae_patch_parallel_size > 1:
        shared.append(f"the VAE's tiles over {config.vae_patch_parallel_size} ranks")
    return "; ".join([f"{counted(config.world_size, 'rank')}: {ranks}", *shared])


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
    """Print what the ranks are, and how each transformer was split; nothing of one that has not run yet or is not split."""
    components = pipeline.components
    config = next(filter(None, map(config_of, components.values())), None)
    if config is not None:
        print(describe_layout(config))
    for name, component in components.items():
        split = split_of(component)
        if split is not None:
            print(describe_split(name, split))


def _described(crossing: CrossingReport) -> str:
    return f"{crossing.origin} {'x'.join(map(str, crossing.shape))}"
