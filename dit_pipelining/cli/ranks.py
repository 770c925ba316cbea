"""Which rank of a launch does what, as `dit-pipelining doctor` prints it."""

import argparse
from collections.abc import Iterator

from dit_pipelining.cli.arguments import positive
from dit_pipelining.comm.layout import Layout
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.degrees import FLAGS
from partitioners.errors import counted

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
    """Declare a flag for each dimension."""
    group = parser.add_argument_group("which rank does what", "print the mesh of these sizes, the outermost first")
    for name, (_, counts) in WORDS.items():
        group.add_argument(FLAGS[name], dest=name, type=positive, default=1, metavar="N", help=counts)
    group.add_argument(
        "--text-encoder-tp-size", type=positive, default=1, metavar="N", help="ranks over which text encoders are split"
    )


def layout_asked_for(args: argparse.Namespace) -> Layout:
    """The layout of the flags."""
    return Layout(**{name: getattr(args, name) for name in WORDS})


def parts(layout: Layout, text_encoder_parts: int = 1) -> Iterator[tuple[int, str]]:
    """Each rank, and its part along the dimensions that there are, and of text encoders that are where they are by default.

    Raises:
        ConfigError: text encoders have more parts than ranks run a call together.
    """
    from dit_pipelining.sharding.teams import team_of

    together = layout.size // layout.data
    if text_encoder_parts > together:
        raise ConfigError(
            f"--text-encoder-tp-size {text_encoder_parts}: {counted(together, 'rank')} at most can run a call "
            f"together; use {together} or less."
        )
    for rank in range(layout.size):
        places = layout.coordinates(rank)
        own = [
            f"{WORDS[name][0]} {place + 1} of {getattr(layout, name)}"
            for name, place in places.items()
            if getattr(layout, name) > 1
        ]
        team = team_of(layout, rank, 0, text_encoder_parts, towards=1).compute
        if text_encoder_parts > 1 and rank in team:
            own.append(f"part {team.index(rank) + 1} of {text_encoder_parts} of the text encoders")
        yield rank, ", ".join(own)
