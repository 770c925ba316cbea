"""The ranks that a command is about: flags for how many there are of each dimension, and which of them does what."""

import argparse
from collections.abc import Iterator
from typing import Any

from dit_pipelining.cli.arguments import positive
from dit_pipelining.comm.layout import Layout
from dit_pipelining.config import DIMENSIONS, ParallelConfig
from dit_pipelining.planning.degrees import FLAGS, Degrees

WORDS = {
    "data": ("copy", "copies that share the requests"),
    "cfg": ("replica", "replicas of the pipeline"),
    "pipeline": ("stage", "stages"),
    "ring": ("ring part", "ranks that gather each other's keys and values"),
    "ulysses": ("Ulysses part", "ranks that exchange heads for tokens"),
    "tensor": ("part of the heads", "ranks over which each block's heads are split"),
}
"""What a rank's place along each dimension of a layout is, and what the dimension's size counts."""


def add_degrees(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for each dimension, and for what is shared along it; they are those of the recipes."""
    group = parser.add_argument_group("over which ranks, the outermost first")
    for dimension, (_, counts) in WORDS.items():
        also = ["--stages"] if dimension == "pipeline" else []
        group.add_argument(*also, FLAGS[dimension], dest=DIMENSIONS[dimension], type=positive, metavar="N", help=counts)
    group.add_argument("--use-hsdp", action="store_true", help="keep weights sharded between ranks of the same stage")
    group.add_argument("--hsdp-shard-size", type=positive, metavar="N", help="default: all that hold the same stage")
    group.add_argument(
        "--text-encoder-tp-size", type=positive, metavar="N", help="ranks over which text encoders are split"
    )


def given_degrees(args: argparse.Namespace) -> list[str]:
    """The flags of these that were given."""
    fields = (*DIMENSIONS.values(), "use_hsdp", "hsdp_shard_size", "text_encoder_tp_size")
    return [f"--{field.replace('_', '-')}" for field in fields if getattr(args, field)]


def degrees_asked_for(args: argparse.Namespace) -> Degrees:
    """The degrees of the flags.

    Raises:
        ConfigError: a run could not have them together.
    """
    fields: dict[str, Any] = {
        field: getattr(args, field) or 1 for field in (*DIMENSIONS.values(), "text_encoder_tp_size")
    }
    config = ParallelConfig(use_hsdp=args.use_hsdp, hsdp_shard_size=args.hsdp_shard_size, **fields)
    sizes = {dimension: getattr(config, field) for dimension, field in DIMENSIONS.items()}
    return Degrees(**sizes, shards=config.hsdp_shard_size or 1)


def parts(layout: Layout, text_encoder_parts: int = 1) -> Iterator[tuple[int, str]]:
    """Each rank, and its place along the dimensions that there are and among the parts of text encoders, counted from 0.

    Text encoders are where they are by default.
    """
    from dit_pipelining.sharding.teams import team_of

    for rank in range(layout.size):
        places = layout.coordinates(rank)
        own = [f"{WORDS[name][0]} {place}" for name, place in places.items() if getattr(layout, name) > 1]
        team = team_of(layout, rank, 0, text_encoder_parts, towards=1).compute
        if text_encoder_parts > 1 and rank in team:
            own.append(f"text encoders, part {team.index(rank)}")
        yield rank, ", ".join(own)
