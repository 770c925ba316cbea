"""`dit-pipelining profile`: how long a model's parts take on this machine, for `show --profile` and the partitioners."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dit_pipelining.cli.arguments import add_model, add_size, asked_size, check_can_write
from dit_pipelining.errors import ConfigError

if TYPE_CHECKING:
    import torch


HELP = "Measure a model's parts on this machine, with random weights, one block of each kind."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_model(parser)
    parser.add_argument("--device", help="such as cuda, cuda:1 or cpu; default: cuda where there is one")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--no-vae", action="store_true", help="leave out the VAE")
    add_size(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.model is None:
        raise ConfigError("MODEL is missing; give a preset, a folder or a config.json.")
    if args.output is None:
        raise ConfigError("--output is missing; say which file to write the profile to.")
    check_can_write(args.output)
    import torch

    from dit_pipelining.cli.capturing import capturing
    from dit_pipelining.planning.models import find_model
    from dit_pipelining.planning.profile import measure_model

    device = _device(args.device)
    model = find_model(args.model)
    with capturing(model.transformers[0]):
        profile, problems = measure_model(
            model, device, asked_size(args), args.inputs, getattr(torch, args.dtype), with_vae=not args.no_vae
        )
    profile.save(args.output)
    from dit_pipelining.show.profile_table import print_profile

    print_profile(profile)
    for problem in problems:
        print(f"dit-pipelining: {problem}", file=sys.stderr)
    return 0


def _device(name: str | None) -> "torch.device":
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}.") from None
    return device
