"""The ranks that a command is about: flags for how many there are of each dimension, and which of them does what."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_pipelining.cli.arguments import positive
from dit_pipelining.comm.layout import Layout
from dit_pipelining.config import DIMENSIONS, ParallelConfig
from dit_pipelining.config_sources import load_config
from dit_pipelining.planning.degrees import FLAGS

if TYPE_CHECKING:
    from dit_pipelining.runtime.placing import Places

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
        "--vae-patch-parallel-size", type=positive, metavar="N", help="ranks that compute the VAE's tiles together"
    )
    group.add_argument(
        "--text-encoder-tp-size", type=positive, metavar="N", help="ranks over which text encoders are split"
    )
    group.add_argument("--config", type=Path, metavar="FILE", help="fields of ParallelConfig as YAML; flags beat it")


FIELDS = (*DIMENSIONS.values(), "use_hsdp", "hsdp_shard_size", "vae_patch_parallel_size", "text_encoder_tp_size")
"""Of `ParallelConfig`, that have a flag here."""


def given_degrees(args: argparse.Namespace) -> list[str]:
    """The flags of these that were given."""
    return [f"--{field.replace('_', '-')}" for field in (*FIELDS, "config") if getattr(args, field)]


def config_asked_for(args: argparse.Namespace, **more: Any) -> ParallelConfig:
    """What the flags, the environment and the file of --config say about the ranks, as in the recipes.

    Args:
        args: with the flags.
        more: other fields; None: not given.

    Raises:
        ConfigError: a run could not have them together.
    """
    given: dict[str, Any] = {field: getattr(args, field) or None for field in FIELDS}
    return load_config(args.config, **given, **more)


def parts(layout: Layout, places: "Places") -> Iterator[tuple[int, str]]:
    """Each rank: its place along the dimensions that there are, and what it has of components that are not on every rank.

    Places and parts are counted from 0.
    """
    from dit_pipelining.comm.mesh import Mesh

    for rank in range(layout.size):
        coordinates = layout.coordinates(rank)
        own = [f"{WORDS[name][0]} {place}" for name, place in coordinates.items() if getattr(layout, name) > 1]
        mesh = Mesh.of(layout, rank % (layout.size // layout.data))  # the same in each copy
        for name in places.owners:
            if places.has_weights(name, mesh):
                part = places.teams[name].compute.index(mesh.world_rank) if name in places.texts else None
                own.append(name if part is None else f"{name} part {part}")
        yield rank, ", ".join(own)
