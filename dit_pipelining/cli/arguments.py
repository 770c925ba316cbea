"""Arguments that several commands share."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dit_pipelining.errors import ConfigError

if TYPE_CHECKING:
    from dit_pipelining.planning.models import SizeRequest

PIPED_WIDTH = 120
"""Characters per line where the output is no terminal."""

DTYPES = ("bfloat16", "float16", "float32")

DEFAULT_STEPS = 50
"""Denoising steps of a request to a model whose own number is not known."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model that a command is about."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="preset, folder of a pipeline or a transformer, or config.json"
    )


def add_size(parser: argparse.ArgumentParser) -> None:
    """What is generated, or else the inputs of one call; and the dtype of the weights."""
    size = parser.add_argument_group("what is generated")
    size.add_argument("--height", type=positive, help="pixels; default: the model's own")
    size.add_argument("--width", type=positive, help="pixels; default: the model's own")
    size.add_argument("--num-frames", type=positive, help="frames of the video; default: the model's own")
    size.add_argument("--batch-size", type=positive, help="samples in one transformer call; default: as guidance needs")
    size.add_argument(
        "--inputs", type=Path, metavar="FILE", help="JSON file that describes the inputs of one transformer call"
    )
    size.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of the weights; default: {DTYPES[0]}")


def asked_size(args: argparse.Namespace) -> "SizeRequest":
    """The size that was asked for."""
    from dit_pipelining.planning.models import SizeRequest

    return SizeRequest(args.height, args.width, args.num_frames, args.batch_size)


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


def seconds(text: str) -> float:
    """A time that something may take, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def check_can_write(path: Path) -> None:
    """Refuse a file that could not be written, before the work is done.

    Raises:
        ConfigError: its folder does not exist, or it is a folder itself.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {path.absolute().parent} to write {path.name} to.")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file.")


def written(path: Path, content: str) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
