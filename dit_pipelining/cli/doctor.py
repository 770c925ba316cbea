"""`dit-pipelining doctor`: what this machine has, whether ranks can talk to each other, and a hint for each known trouble."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dit_pipelining.cli.arguments import PIPED_WIDTH, add_model, add_size, asked_size, seconds
from dit_pipelining.cli.ranks import add_degrees
from dit_pipelining.errors import ConfigError

if TYPE_CHECKING:
    from dit_pipelining.cli.checks import Finding
    from dit_pipelining.planning.degrees import Degrees

HELP = "check this machine: versions, devices, links, whether ranks can talk to each other, and what a model needs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_model(parser)
    parser.add_argument("--seconds", type=seconds, default=60.0, help="how long a transfer may take (default: 60)")
    parser.add_argument("--device", help="how many of these MODEL needs, such as rtx4090 or 24GB; default: those here")
    add_size(parser)
    add_degrees(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 1 if there is trouble."""
    from rich.console import Console
    from rich.table import Table

    from dit_pipelining import __version__
    from dit_pipelining.cli.checks import BAD, GOOD, NOTE, every_check
    from dit_pipelining.cli.ranks import degrees_asked_for, parts

    about_model = ("device", "height", "width", "num_frames", "batch_size", "inputs")
    if args.model is None and (given := [name for name in about_model if getattr(args, name) is not None]):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags}: about what a model needs; give the MODEL too.")
    degrees = degrees_asked_for(args)
    needed = [] if args.model is None else list(_needs(args, degrees))  # what cannot be is an error before ranks start
    colours = {GOOD: "green", BAD: "red", NOTE: "yellow"}
    table = Table("checked", "", "found", "what to do", title=f"dit-pipelining {__version__}")
    trouble = False
    for found in (*every_check(args.seconds), *needed):
        trouble |= found.state == BAD
        table.add_row(found.what, f"[{colours[found.state]}]{found.state}[/]", found.text, found.hint)
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(table)
    if degrees.size > 1:
        console.print(f"{degrees.size} ranks, torchrun --nproc-per-node {degrees.size}:", highlight=False)
        mesh = Table("rank", "does")
        for rank, part in parts(degrees, args.text_encoder_tp_size or 1):
            mesh.add_row(str(rank), part)
        console.print(mesh)
    return int(trouble)


def _needs(args: argparse.Namespace, degrees: "Degrees") -> "Iterator[Finding]":
    from dit_pipelining.cli.needs import needs
    from dit_pipelining.cli.study import Question

    question = Question(
        model=args.model,
        degrees=degrees,
        size=asked_size(args),
        inputs=args.inputs,
        dtype=args.dtype,
        text_encoder_tp_size=args.text_encoder_tp_size or 1,
    )
    return needs(question, args.device)
