"""`dit-pipelining doctor`: what this machine has, whether ranks can talk to each other, and a hint for each known trouble."""

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from dit_pipelining.cli.arguments import PIPED_WIDTH, add_model, add_size, asked_size, seconds
from dit_pipelining.cli.ranks import add_degrees
from dit_pipelining.errors import ConfigError

if TYPE_CHECKING:
    from dit_pipelining.cli.study import Question
    from dit_pipelining.config import ParallelConfig
    from dit_pipelining.runtime.placing import Places

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
    from dit_pipelining.cli.capturing import once_each
    from dit_pipelining.cli.checks import BAD, GOOD, NOTE, every_check
    from dit_pipelining.cli.needs import as_asked, needs
    from dit_pipelining.cli.ranks import config_asked_for, parts
    from dit_pipelining.comm.mesh import layout_of

    about_model = ("device", "height", "width", "num_frames", "batch_size", "inputs")
    if args.model is None and (given := [name for name in about_model if getattr(args, name) is not None]):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags}: about what a model needs; give the MODEL too.")
    config = config_asked_for(args, ranks=args.device)
    kind = config.ranks if config.ranks is None or isinstance(config.ranks, str) else ",".join(map(str, config.ranks))
    capture, needed = once_each(), []
    if args.model is not None:
        question = _question(args, config)
        needed = list(needs(question, kind, capture))  # what cannot be is an error before ranks start
    colours = {GOOD: "green", BAD: "red", NOTE: "yellow"}
    table = Table("checked", "", "found", "what to do", title=f"dit-pipelining {__version__}")
    trouble = False
    for found in (*every_check(args.seconds), *needed):
        trouble |= found.state == BAD
        table.add_row(found.what, f"[{colours[found.state]}]{found.state}[/]", found.text, found.hint)
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(table)
    size = config.world_size
    if size > 1:
        places = usual_places(config) if args.model is None else as_asked(question, kind, capture).places
        console.print(f"{size} ranks, torchrun --nproc-per-node {size}:", highlight=False)
        mesh = Table("rank", "does")
        for rank, part in parts(layout_of(config), places):
            mesh.add_row(str(rank), part)
        console.print(mesh)
    return int(trouble)


def _question(args: argparse.Namespace, config: "ParallelConfig") -> "Question":
    from dit_pipelining.cli.study import Question

    return Question(model=args.model, config=config, size=asked_size(args), inputs=args.inputs, dtype=args.dtype)


def usual_places(config: "ParallelConfig") -> "Places":
    """Of a pipeline that has a text encoder and a VAE, as most have."""
    from dit_pipelining.runtime.placing import choose_places
    from dit_pipelining.sharding.text_plans import TextPlan
    from dit_pipelining.weights.placement import ComponentSize

    sizes = {"text_encoder": ComponentSize("encoder", 1, text=True), "vae": ComponentSize("decoder", 0, tiles=True)}
    by_weight = replace(config, partitioner="balanced")  # what fits beside which blocks is not known
    return choose_places(by_weight, sizes, {}, lambda name, size: TextPlan({}, (), {}, 0), {})
