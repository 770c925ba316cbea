"""Runs a recipe as a user does, as one process or under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(recipe: str, processes: int, *flags: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [*launcher, str(ROOT / "recipes" / recipe), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
