"""`dit-pipelining show`: where the blocks of a model go, and what crosses between the stages."""

import argparse
import inspect
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch and diffusers are imported where they are needed, so that --help and --list answer at once.
from dit_pipelining.errors import USER_ERRORS, ConfigError, InputError
from partitioners import ENVIRONMENT_VARIABLE, PARTITIONERS

if TYPE_CHECKING:
    from dit_pipelining.planning.models import TransformerSpec
    from dit_pipelining.show.report import TransformerReport

HELP = "Show how a model is cut into pipeline stages, without its weights."

PIPED_WIDTH = 120
"""Characters per line where the output is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="preset, folder of a pipeline or a transformer, or config.json"
    )
    parser.add_argument("--stages", type=_positive, metavar="N", help="number of pipeline stages")
    parser.add_argument("--list", action="store_true", help="list the presets")
    parser.add_argument("--partitioner", choices=sorted(PARTITIONERS), default="balanced", help="default: balanced")
    parser.add_argument(
        "--partition", metavar="COUNTS", help=f"blocks per stage, such as 8,12,12,8; beats {ENVIRONMENT_VARIABLE}"
    )
    parser.add_argument("--height", type=_positive, help="pixels; default: the model's own")
    parser.add_argument("--width", type=_positive, help="pixels; default: the model's own")
    parser.add_argument("--num-frames", type=_positive, help="frames of the video; default: the model's own")
    parser.add_argument("--batch-size", type=_positive, help="samples in one transformer call; default: 1")
    parser.add_argument(
        "--inputs", type=Path, metavar="FILE", help="JSON file that describes the inputs of one transformer call"
    )
    parser.add_argument("--json", action="store_true", help="print an object for machines")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    if args.list:
        from dit_pipelining.show.preset_table import print_presets

        print_presets(console)
        return 0
    if args.model is None:
        raise ConfigError("MODEL is missing; give a preset, a folder or a config.json, or --list to see the presets.")
    if args.stages is None:
        raise ConfigError("--stages is missing; say how many pipeline stages to cut the model into.")
    return _show(args, console)


def _show(args: argparse.Namespace, console: Any) -> int:
    from dit_pipelining.planning.inputs import read_inputs
    from dit_pipelining.planning.models import SizeRequest, find_model, model_inputs
    from dit_pipelining.show.machine import as_data
    from dit_pipelining.show.stage_table import Heading, print_split

    model = find_model(args.model)
    asked = SizeRequest(args.height, args.width, args.num_frames, args.batch_size)
    size = None
    if args.inputs is not None and not asked.is_empty:
        raise ConfigError("--inputs describes the inputs, and so their size; leave out either it or the sizes.")
    reports: list[TransformerReport] = []
    for spec in model.transformers:
        if args.inputs is not None:
            described = read_inputs(args.inputs)
        else:
            described, size = model_inputs(model, spec, asked)
        reports.append(_split(spec, described, args))
    if args.json:
        print(json.dumps(as_data(model.name, model.source, _decided_by(args), size, reports), indent=2))
    else:
        print_split(Heading(model.name, str(size or ""), _decided_by(args)), reports, console)
    return 0


def _split(spec: "TransformerSpec", described: dict[str, Any], args: argparse.Namespace) -> "TransformerReport":
    import torch

    from dit_pipelining.api import split_model
    from dit_pipelining.planning.inputs import build_inputs
    from dit_pipelining.planning.weightless import build_weightless, transformer_class
    from dit_pipelining.show.report import report_split

    cls = transformer_class(spec.model_class)
    inputs = build_inputs(described)
    try:
        with torch.no_grad(), _quiet():
            model = build_weightless(cls, spec.config)
            split = split_model(model, args.stages, inputs, partitioner=args.partitioner, counts=args.partition)
    except USER_ERRORS:
        raise
    except Exception as error:
        if not _raised_in(cls, error):
            raise
        raise InputError(
            f"the forward of {spec.model_class} fails on these inputs: {type(error).__name__}: {error}. Try another "
            "--height, --width or --num-frames, or describe the inputs in a file for --inputs."
        ) from error
    return report_split(split, spec.names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Libraries warn of what concerns running the model, and it does not run; errors they log are raised as well."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


def _raised_in(cls: type, error: Exception) -> bool:
    """Whether the error came out of the model's own forward, which means that the inputs do not fit it."""
    code = inspect.getsourcefile(cls)
    return any(frame.filename == code for frame in traceback.extract_tb(error.__traceback__))


def _decided_by(args: argparse.Namespace) -> str:
    if args.partition is not None:
        return f"--partition {args.partition}"
    if (counts := os.environ.get(ENVIRONMENT_VARIABLE)) is not None:
        return f"{ENVIRONMENT_VARIABLE}={counts}"
    return args.partitioner


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return number
