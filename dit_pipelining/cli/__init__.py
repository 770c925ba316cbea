"""The `dit-pipelining` command. Each subcommand is a module here with `HELP`, `add_arguments(parser)` and `run(args)`."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from dit_pipelining import __version__
from dit_pipelining.cli import doctor, profile, show
from dit_pipelining.errors import USER_ERRORS

COMMANDS = {"show": show, "profile": profile, "doctor": doctor}

USER_ERROR = 2


class _UsageError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. What the user got wrong is one line on stderr and code 2."""
    parser = _Parser(prog="dit-pipelining", description="Pipeline parallelism for diffusion transformers.")
    parser.add_argument("--version", action="version", version=f"dit-pipelining {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP, description=command.HELP))
    try:
        args = parser.parse_args(argv)
        return COMMANDS[args.command].run(args)
    except (_UsageError, *USER_ERRORS) as error:
        print(f"dit-pipelining: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
