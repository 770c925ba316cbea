"""`dit-pipelining show`: where the blocks of a model go, what crosses between the stages, and what to expect of a run."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch and diffusers are imported where they are needed, so that --help and --list answer at once.
from dit_pipelining.cli.arguments import (
    PIPED_WIDTH,
    add_model,
    add_size,
    asked_size,
    check_can_write,
    positive,
    written,
)
from dit_pipelining.cli.ranks import add_degrees, config_asked_for, given_degrees
from dit_pipelining.config import SCHEDULES, TOPOLOGIES
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.degrees import GOALS
from dit_pipelining.planning.guidance import GUIDANCE_MODES
from partitioners import ENVIRONMENT_VARIABLE, PARTITIONERS

if TYPE_CHECKING:
    from dit_pipelining.show.picture import Picture

HELP = "Show how a model is cut into pipeline stages and how it would run, without its weights and without a GPU."

STANDARD_OUTPUT = Path("-")

MOST_GPUS = 128
"""GPUs that are searched; the ways to spread a model over more become too many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_model(parser)
    parser.add_argument("--list", action="store_true", help="list the presets")
    add_degrees(parser)
    searching = parser.add_argument_group("or the best way to spread it over GPUs of one kind (--device)")
    searching.add_argument("--search", action="store_true", help="search the degrees of all dimensions; needs --gpus")
    searching.add_argument("--gpus", type=positive, metavar="N", help="number of GPUs")
    searching.add_argument("--goal", choices=GOALS, default=GOALS[0], help=f"default: {GOALS[0]}")
    searching.add_argument(
        "--runners-up", type=positive, default=4, metavar="K", help="ways beside the best; default: 4"
    )
    cut = parser.add_argument_group("where to cut")
    cut.add_argument("--partitioner", choices=sorted(PARTITIONERS), help="default: balanced")
    cut.add_argument(
        "--partition", metavar="COUNTS", help=f"blocks per stage, such as 8,12,12,8; beats {ENVIRONMENT_VARIABLE}"
    )
    cut.add_argument(
        "--compare", metavar="NAMES", type=_partitioners, default=(), help="partitioners, such as uniform,balanced"
    )
    add_size(parser)
    machine = parser.add_argument_group("on what")
    machine.add_argument(
        "--device", help="such as h200, a100, rtx4090; also limits memory. Default: h200 without limits"
    )
    machine.add_argument(
        "--ranks", metavar="LIST", help="a device for each stage instead, such as rtx4090,rtx3090:16GB"
    )
    machine.add_argument("--link", choices=TOPOLOGIES, help="between the ranks; default: the device's")
    machine.add_argument(
        "--profile", type=Path, metavar="FILE", help="seconds measured by dit-pipelining profile, not from data sheets"
    )
    load = parser.add_argument_group("what to run")
    load.add_argument("--requests", type=positive, default=1, metavar="M", help="requests side by side; default: 1")
    load.add_argument(
        "--steps", "--num-inference-steps", type=positive, metavar="T", help="denoising steps; default: the model's own"
    )
    load.add_argument(
        "--cfg",
        choices=sorted(GUIDANCE_MODES),
        help="guidance: none, a call for each branch, or both in a batch; default: as the model's pipeline does it",
    )
    load.add_argument("--schedule", choices=(*SCHEDULES, "sequential"), help="default: rolling")
    output = parser.add_argument_group("output beside the tables")
    output.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help="for machines; alone: printed instead",
    )
    output.add_argument("--svg", type=Path, metavar="FILE", help="a drawing")
    output.add_argument("--html", type=Path, metavar="FILE", help="a page with drawings and numbers")
    output.add_argument("--trace", type=Path, metavar="FILE", help="the timeline, for ui.perfetto.dev")


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
    for path in (args.json, args.svg, args.html, args.trace):
        if path is not None:
            check_can_write(path)
    if args.search:
        _search(args, console)
        return 0
    if args.gpus is not None:
        raise ConfigError(
            "--gpus belongs to --search; without it, --stages, --cfg-parallel-size, ... say how many ranks there are."
        )
    if args.pipeline_parallel_size is None and args.config is None:
        raise ConfigError("--stages is missing; say how many pipeline stages to cut the model into.")
    _show(args, console)
    return 0


def _search(args: argparse.Namespace, console: Any) -> None:
    if args.gpus is None:
        raise ConfigError("--gpus is missing; say over how many GPUs the model is to be spread.")
    if args.gpus > MOST_GPUS:
        raise ConfigError(f"--gpus {args.gpus}: {MOST_GPUS} at most are searched, which takes minutes already.")
    chosen = {
        "--partitioner": args.partitioner,
        "--partition": args.partition,
        "--schedule": args.schedule,
        "--compare": args.compare,
        "--ranks": args.ranks,
        "--profile": args.profile,
        "--inputs": args.inputs,
        "--svg": args.svg,
        "--html": args.html,
        "--trace": args.trace,
    }
    if given := [*given_degrees(args), *(flag for flag, value in chosen.items() if value)]:
        raise ConfigError(
            f"{', '.join(given)}: of no use to --search, which chooses the degrees. Show the best of them after it."
        )
    from dit_pipelining.cli.plan_search import search_model
    from dit_pipelining.show.search_table import print_search, search_data

    found = search_model(
        args.model,
        args.gpus,
        device=args.device,
        topology=args.link or "auto",
        goal=args.goal,
        size=asked_size(args),
        dtype=args.dtype,
        steps=args.steps,
        guidance=args.cfg,
    )
    if args.json is not None:
        text = json.dumps(search_data(found), indent=2)
        if args.json == STANDARD_OUTPUT:
            print(text)
            return
        written(args.json, text + "\n")
    print_search(found, console, args.runners_up)


def _show(args: argparse.Namespace, console: Any) -> None:
    from dit_pipelining.cli.study import Question, study

    if args.device is not None and args.ranks is not None:
        raise ConfigError("--device and --ranks both say what the ranks are; give one of them.")
    config = config_asked_for(
        args,
        partitioner=args.partitioner,
        partition=args.partition,
        ranks=args.device if args.ranks is None else args.ranks,
        topology=args.link,
        profile=args.profile,
        schedule=args.schedule if args.schedule in SCHEDULES else None,
    )
    picture = study(
        Question(
            model=args.model,
            config=config,
            size=asked_size(args),
            inputs=args.inputs,
            dtype=args.dtype,
            requests=args.requests,
            steps=args.steps,
            guidance=args.cfg,
            schedule=args.schedule or config.schedule,
            compare=args.compare,
        )
    )
    _write_files(args, picture)
    if args.json == STANDARD_OUTPUT:
        from dit_pipelining.show.data import as_data

        print(json.dumps(as_data(picture), indent=2))
        return
    from dit_pipelining.show.forecast_table import print_forecast
    from dit_pipelining.show.stage_table import print_split

    print_split(picture, console)
    console.print()
    print_forecast(picture, console)


def _write_files(args: argparse.Namespace, picture: "Picture") -> None:
    if args.json not in (None, STANDARD_OUTPUT):
        from dit_pipelining.show.data import as_data

        written(args.json, json.dumps(as_data(picture), indent=2) + "\n")
    if args.svg is not None:
        from dit_pipelining.show.svg import svg_file

        written(args.svg, svg_file(picture))
    if args.html is not None:
        from dit_pipelining.show.html import html_page

        written(args.html, html_page(picture))
    if args.trace is not None:
        from dit_pipelining.show.trace import trace_events

        written(args.trace, json.dumps(trace_events(picture)))


def _partitioners(names: str) -> tuple[str, ...]:
    asked = tuple(name.strip() for name in names.split(","))
    unknown = [name for name in asked if name not in PARTITIONERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: expected some of {', '.join(PARTITIONERS)}")
    return asked
