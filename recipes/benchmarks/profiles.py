"""How well stage times are predicted: from a measured profile, and from the device's data sheet.

    python recipes/benchmarks/profiles.py --device cuda --json FILE [--profiles FOLDER]

For each case the parts of a model are measured as `dit-pipelining profile` does it (one block of each kind, with random
weights), and then the real stages of a split of the whole model, with random weights too. What the profile predicts for a
stage is the sum of its parts. `--profiles` keeps the measured profiles for `dit-pipelining show --profile`.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reporting
import torch

from dit_pipelining.api import split_model
from dit_pipelining.capture.signature import bind
from dit_pipelining.costs.devices import DeviceProfile, find_device
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.inputs import build_inputs
from dit_pipelining.planning.models import SizeRequest, find_model, model_inputs
from dit_pipelining.planning.profile import device_name, measure_model
from dit_pipelining.planning.profiling import random_inputs
from dit_pipelining.planning.stopwatch import median_seconds
from dit_pipelining.planning.weightless import build_weightless, transformer_class
from dit_pipelining.weights.random import fill_randomly


@dataclass(frozen=True)
class Case:
    """A model, the size of what it makes, and how many stages it is cut into.

    Attributes:
        changes: of the transformer's config, such as fewer blocks than it has.
        with_vae: measure its VAE too.
    """

    model: str
    stages: int
    size: SizeRequest = field(default_factory=SizeRequest)
    changes: Mapping[str, Any] = field(default_factory=dict)
    with_vae: bool = True


CASES = {
    "cuda": (
        Case("wan2.1-t2v-1.3b", 4),
        Case("wan2.2-t2v-a14b", 2, changes={"num_layers": 4}, with_vae=False),
        Case("flux.1-dev", 4),
    ),
    "cpu": (
        Case("wan2.1-t2v-1.3b", 2, SizeRequest(128, 128, 9), {"num_layers": 4}, with_vae=False),
        Case("dit-xl-2-256", 2, SizeRequest(batch=1), {"num_layers": 8}),
    ),
}
"""All of FLUX and Wan 1.3B fit on one device; of Wan 14B a few blocks are enough, since they are all alike."""


def run(case: Case, device: torch.device) -> tuple[MeasuredProfile, list[dict[str, Any]]]:
    """Measure a model's parts and its stages."""
    profile, problems = measure_model(find_model(case.model), device, case.size, with_vae=case.with_vae)
    for problem in problems if case.with_vae else []:
        print(f"{case.model}: {problem}")
    measured, from_profile = measure_stages(case, device, profile)
    data_sheet = _data_sheet(device)
    from_data_sheet: list[float | None] = [None] * case.stages
    if data_sheet is not None:
        from_data_sheet[:] = measure_stages(case, None, data_sheet)[1]
    rows = []
    for stage, seconds in enumerate(measured):
        roofline = from_data_sheet[stage]
        rows.append(
            dict(
                model=case.model + (f" {dict(case.changes)}" if case.changes else ""),
                stage=stage,
                measured=seconds,
                from_profile=from_profile[stage],
                profile_error=from_profile[stage] / seconds - 1,
                from_data_sheet=roofline,
                data_sheet_error=roofline / seconds - 1 if roofline else None,
            )
        )
    return profile, rows


def _data_sheet(device: torch.device) -> DeviceProfile | None:
    try:
        return find_device(device_name(device))
    except ConfigError as error:
        print(error)
        return None


def measure_stages(
    case: Case, device: torch.device | None, profile: MeasuredProfile | DeviceProfile
) -> tuple[list[float], list[float]]:
    """Seconds of each stage of the split model, as measured on a device (if one is given) and as predicted."""
    found = find_model(case.model)
    spec = found.transformers[0]
    described, _ = model_inputs(found, spec, case.size)
    model = build_weightless(transformer_class(spec.model_class), {**spec.config, **case.changes})
    inputs = random_inputs(build_inputs(described), device or torch.device("cpu"))
    with torch.no_grad():
        split = split_model(model, case.stages, inputs, partitioner="uniform", profile=profile)
        assert split.cut is not None
        predicted = split.cut.partition.compute_seconds(split.cut.costs, split.cut.ranks)
        if device is None:
            return [], predicted
        fill_randomly(
            model, [name for name, _ in (*model.named_children(), *model.named_parameters(recurse=False))], device
        )
        graph, call = split.resolve(bind(model.forward, (), inputs))
        leaves = call.leaves
        measured, sent = [], ()
        for stage in split.stages:
            received = sent
            run_stage = lambda stage=stage, received=received: stage.run(graph, received, leaves)  # noqa: E731
            measured.append(median_seconds(run_stage, device))
            sent = run_stage()
    return measured, predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="where to write the profiles")
    args = parser.parse_args()
    device = torch.device(args.device)
    profiles, rows = {}, []
    for case in CASES[device.type]:
        profile, own = run(case, device)
        profiles[case.model] = profile
        rows += own
        if args.profiles is not None:
            args.profiles.mkdir(parents=True, exist_ok=True)
            profile.save(args.profiles / f"{case.model}.json")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        # What is measured is kept even if a later case fails.
        reporting.write(args.json, results(device, profiles, rows))
    reporting.show(f"Seconds of a stage on {device_name(device)}", [written(row) for row in rows])


def results(
    device: torch.device, profiles: Mapping[str, MeasuredProfile], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "device": device_name(device),
        "profiles": {name: profile.as_data() for name, profile in profiles.items()},
        "stages": rows,
        "largest_profile_error": max(abs(row["profile_error"]) for row in rows),
    }


def written(row: Mapping[str, Any]) -> dict[str, str]:
    def number(name: str) -> str:
        value = row[name]
        return "" if value is None else f"{value:+.1%}" if name.endswith("error") else f"{value * 1000:.2f} ms"

    return {name: str(row[name]) if name in ("model", "stage") else number(name) for name in row}


if __name__ == "__main__":
    main()
