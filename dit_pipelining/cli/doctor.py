"""`dit-pipelining doctor`: what this machine has, whether ranks can talk to each other, and a hint for each known trouble."""

import argparse

HELP = "check this machine: versions, devices, links, and whether ranks can talk to each other"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a transfer may take (default: 60)")


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 1 if there is trouble."""
    from rich.console import Console
    from rich.table import Table

    from dit_pipelining import __version__
    from dit_pipelining.cli.checks import BAD, GOOD, NOTE, every_check

    colours = {GOOD: "green", BAD: "red", NOTE: "yellow"}
    table = Table("checked", "", "found", "what to do", title=f"dit-pipelining {__version__}")
    trouble = False
    for found in every_check(args.seconds):
        trouble |= found.state == BAD
        table.add_row(found.what, f"[{colours[found.state]}]{found.state}[/]", found.text, found.hint)
    Console().print(table)
    return int(trouble)
