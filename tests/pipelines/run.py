"""Run the table of pipelines over ranks, and print what came out.

    python -m tests.pipelines.run [--layouts pp2 pp2-cfg2] [--only NAME ...] [--json FILE]

A cell says `bits` where every rank gives the bits of one process, else the tolerance within which a cut batch is equal.
"""

import argparse
import json
import os
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import diffusers
import torch

from tests.distributed import RankPool

from . import CASES
from .compare import LAYOUTS, compare, plain


def run_case(ranks: RankPool, name: str, layouts: list[str]) -> dict[str, Any]:
    """What came out of one case in each layout; an error as its last line."""
    result: dict[str, Any] = {"case": name}
    try:
        [expected] = ranks.run(1, plain, name)
    except AssertionError as error:
        return {**result, "error": _last_line(error)}
    for layout in layouts:
        try:
            result[layout] = compare(ranks, CASES[name], layout, expected)
        except AssertionError as error:
            result[layout] = f"FAILED: {_last_line(error)}"
    return result


def _last_line(error: AssertionError) -> str:
    """The last line that names an error, else the last line."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1]).strip()[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=["pp2", "pp3", "cfg2", "pp2-cfg2"], choices=list(LAYOUTS))
    parser.add_argument("--only", nargs="*", default=["*"], help="names of cases; * stands for anything")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = [name for name in CASES if any(fnmatch(name, wanted) for wanted in args.only)]
    ranks = RankPool()
    results = []
    print(" | ".join(["case", *args.layouts]), " | ".join(["---"] * (len(args.layouts) + 1)), sep="\n", flush=True)
    started = time.monotonic()
    for name in names:
        results.append(run_case(ranks, name, args.layouts))
        print(" | ".join([name, *_cells(results[-1], args.layouts)]), flush=True)
    ranks.close()
    failed = [result["case"] for result in results if any("FAILED" in cell for cell in _cells(result, args.layouts))]
    classes = {CASES[name].pipeline_class for name in names}
    print(
        f"\n{len(results) - len(failed)} of {len(results)} cases of {len(classes)} pipeline classes equal, "
        f"diffusers {diffusers.__version__}, torch {torch.__version__}, {time.monotonic() - started:.0f} s"
    )
    if args.json:
        about = dict(diffusers=diffusers.__version__, torch=torch.__version__, layouts=args.layouts)
        args.json.write_text(json.dumps({**about, "cases": results}, indent=1) + "\n")


def _cells(result: dict[str, Any], layouts: list[str]) -> list[str]:
    if "error" in result:
        return [f"FAILED in one process: {result['error']}"] * len(layouts)
    return [result[layout] for layout in layouts]


if __name__ == "__main__":
    main()
