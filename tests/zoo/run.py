"""Run the whole table on one device and write what came out: for machines where the test suite does not run.

    python -m tests.zoo.run --device cuda --json results.json [--only NAME ...]

For every case all stages in one process are compared with the unsplit model, bit for bit, at several partitions.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import diffusers
import torch

from dit_pipelining.api import split_model
from dit_pipelining.capture.capturing import capture
from tests.same import assert_same
from tests.zoo import CASES, build_inputs, build_model


def check(name: str, device: str) -> dict[str, Any]:
    """Compare one case's split with the unsplit model at 2 and 3 stages, an uneven cut, and stages of one block."""
    model = build_model(CASES[name]).to(device)

    def inputs() -> dict[str, Any]:
        return build_inputs(CASES[name], device=device)

    expected = model(**inputs())
    assert_same(model(**inputs()), expected)  # else the model itself is not reproducible here
    started = time.perf_counter()
    blocks = len(capture(model, inputs()).blocks)
    seconds = time.perf_counter() - started
    partitions = [(blocks // 2, blocks - blocks // 2), (1, 1, blocks - 2), (1, blocks - 1), (1,) * blocks]
    for counts in dict.fromkeys(partitions):
        split = split_model(model, len(counts), inputs(), counts=counts)
        for _ in range(2):
            assert_same(split(**inputs()), expected)
    return {"case": name, "class": CASES[name].model_class, "blocks": blocks, "capture_seconds": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_grad_enabled(False)
    results: list[dict[str, Any]] = []
    for name in args.only or CASES:
        try:
            result = {**check(name, args.device), "equal": True}
        except Exception as error:
            result = {
                "case": name,
                "class": CASES[name].model_class,
                "equal": False,
                "error": f"{type(error).__name__}: {error}",
            }
            print(f"{name}: {result['error'][:400]}", flush=True)
        results.append(result)
    passed = sum(result["equal"] for result in results)
    card = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor()
    print(
        f"{passed} of {len(results)} cases equal on {card}, torch {torch.__version__}, diffusers {diffusers.__version__}"
    )
    if args.json:
        command = " ".join(["python -m tests.zoo.run --device", args.device, "--json FILE", *_only(args.only)])
        about = dict(device=card, torch=torch.__version__, diffusers=diffusers.__version__, command=command)
        args.json.write_text(json.dumps({**about, "passed": passed, "cases": results}, indent=1))


def _only(names: list[str]) -> list[str]:
    return ["--only", *names] if names else []


if __name__ == "__main__":
    main()
