"""Ranks that go wrong, as real processes: `python -m tests.faults SCENARIO FOLDER` is one rank; `run` starts them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CALL = dict(
    prompt="a red cat",
    height=16,
    width=16,
    num_frames=9,
    num_inference_steps=3,
    max_sequence_length=16,
    output_type="latent",
)


@dataclass(frozen=True)
class Ended:
    """How a rank's process ended: its exit code, what it wrote to stderr, and after how many seconds."""

    code: int
    errors: str
    seconds: float


def run(scenario: str, folder: Path, ranks: Sequence[int] = (0, 1), world_size: int = 2) -> list[Ended]:
    """Start these ranks of a launch without torchrun, so that rank 0 hosts the store, and wait for their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in ranks:
        environment = {
            **os.environ,
            **dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size)),
            **dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        }
        command = [sys.executable, "-m", "tests.faults", scenario, str(folder)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    started = time.monotonic()
    ended = []
    try:
        for process in processes:
            errors = process.communicate(timeout=120)[1]
            ended.append(Ended(process.returncode, errors, time.monotonic() - started))
    finally:
        for process in processes:
            process.kill()
    return ended


def main(scenario: str, folder: str) -> None:
    import torch.distributed as dist

    from dit_pipelining.api import ParallelConfig, load_pipeline

    seconds = 3.0 if scenario == "absent" else 60.0
    parts = 2 if scenario == "part" else 1
    config = ParallelConfig(pipeline_parallel_size=2, text_encoder_tp_size=parts, timeout_seconds=seconds)
    pipeline = load_pipeline(folder, config)
    pipeline.set_progress_bar_config(disable=True)
    pipeline(**CALL)
    rank = dist.get_rank()
    print(f"[{time.time():.1f}] rank {rank} has made one call", file=sys.stderr, flush=True)

    def at_step_end(_pipe: Any, step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == 1 and rank == 1 and scenario == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 1 and rank == 1 and scenario == "stuck":
            raise KeyError("only on rank 1")
        if step == 1 and rank == 0 and scenario == "stuck":
            time.sleep(600)
        return values

    def fail(*_: Any) -> None:
        raise MemoryError("only on rank 1, in the middle of its part")

    if rank == 1 and scenario == "part":
        dict(pipeline.text_encoder.named_modules())["encoder.block.1"].register_forward_pre_hook(fail)
    if rank == 1 and scenario == "uncaught":
        raise LookupError("between two calls")
    if not (rank == 1 and scenario == "left"):
        try:
            pipeline(**CALL, callback_on_step_end=at_step_end)
        finally:
            print(f"[{time.time():.1f}] rank {rank} ends", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
