"""What `dit-pipelining doctor` looks at: versions, settings, devices, and whether ranks can talk to each other."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dit_pipelining.comm.processes import launch
from dit_pipelining.errors import RemoteRankError
from dit_pipelining.lowering.names import data_size

OLDEST = {"torch": "2.11", "diffusers": "0.42", "transformers": "4.57", "accelerate": "1.0", "safetensors": "0.5"}
"""The packages that matter, and the oldest releases of them that work: those of pyproject.toml."""

CONSUMER_CARDS = re.compile(r"GeForce|RTX \d{4}\b|RTX PRO|TITAN", re.IGNORECASE)
"""Names of cards whose driver can report peer access that then hangs."""

GOOD, BAD, NOTE = "ok", "trouble", "note"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: was looked at.
        state: `"ok"`, `"trouble"` or `"note"`.
        text: what was found.
        hint: what to do about it.
    """

    what: str
    state: str
    text: str
    hint: str = ""


def every_check(seconds: float) -> Iterator[Finding]:
    """All findings; `seconds` is how long a transfer may take."""
    yield from versions()
    yield from environment()
    yield from devices()
    yield from links()
    yield from transfers(seconds)


def versions() -> Iterator[Finding]:
    """Python and the packages that matter."""
    yield Finding("Python", GOOD, platform.python_version())
    for name in OLDEST:
        version = importlib.metadata.version(name)
        oldest = OLDEST[name]
        if _numbers(version) < _numbers(oldest):
            yield Finding(name, BAD, version, f"install {name} {oldest} or newer, the same on every host")
        else:
            yield Finding(name, GOOD, version)
    yield from _driver()


def _driver() -> Iterator[Finding]:
    """Whether torch can use the GPUs that the driver shows."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    if os.path.exists("/proc/driver/nvidia/version"):
        yield Finding(
            "CUDA",
            BAD,
            f"torch is made for CUDA {torch.version.cuda}, and the driver does not give it a GPU",
            "update the driver, or install a torch for an older CUDA; see CUDA_VISIBLE_DEVICES too",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version.split("+")[0])[:2])


def environment() -> Iterator[Finding]:
    """Settings that are known to make trouble."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield Finding(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            BAD,
            "1",
            "unset it: with one hardware queue a stream that waits for another rank holds up all others",
        )
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(set(shown)) < len(shown):
        yield Finding(
            "CUDA_VISIBLE_DEVICES", BAD, ",".join(shown), "name each GPU once: NCCL refuses two ranks on one GPU"
        )
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        yield Finding("NCCL_P2P_DISABLE", NOTE, "1", "unset it, unless transfers between the GPUs hang")
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        yield Finding(
            "PYTORCH_CUDA_ALLOC_CONF", NOTE, "expandable_segments", "fine; IPC of tensors does not work with it"
        )


def devices() -> Iterator[Finding]:
    """Memory and GPUs."""
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("host", GOOD, f"{cores} cores, {data_size(memory.available)} of {data_size(memory.total)} free")
    if not torch.cuda.is_available():
        hint = (
            "" if torch.version.cuda is None else "the driver is missing or older than torch's CUDA, or GPUs are hidden"
        )
        yield Finding("GPUs", NOTE if torch.version.cuda is None else BAD, "none: ranks run on the CPU", hint)
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        busy = free < 0.9 * total
        hint = "another process holds memory there (nvidia-smi shows which)" if busy else ""
        text = f"{facts.name}, {data_size(free)} of {data_size(total)} free"
        yield Finding(f"GPU {index}", NOTE if busy else GOOD, text, hint)
        if not torch.cuda.is_bf16_supported():
            yield Finding(f"GPU {index}", NOTE, "no bfloat16", "use dtype=torch.float16")


def links() -> Iterator[Finding]:
    """Whether the GPUs reach each other's memory, on which the fastest transport relies."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 1:
        yield Finding(
            "ranks on one GPU",
            NOTE,
            "there is one GPU",
            "two ranks on it go through host memory, since NCCL refuses that, and gain nothing: it shows that they work",
        )
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    apart = [f"{one}-{other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    if not pairs:
        return
    if apart:
        yield Finding(
            "peer access",
            NOTE,
            f"not between GPUs {', '.join(apart)}",
            'the transport is "host" then, through host memory; where NCCL hangs inside stages, set NCCL_P2P_DISABLE=1',
        )
        return
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    if any(CONSUMER_CARDS.search(name) for name in names):
        yield Finding(
            "peer access",
            NOTE,
            f"reported between {', '.join(sorted(names))}",
            'where a transfer hangs, though it is reported, use ParallelConfig(transport="host") and set NCCL_P2P_DISABLE=1',
        )
    else:
        yield Finding("peer access", GOOD, 'between all GPUs: the transport is "peer"')


def transfers(seconds: float) -> Iterator[Finding]:
    """A real transfer between two ranks, over gloo and, with two GPUs, over NCCL."""
    yield _transfer("gloo", seconds, "check the firewall of the loopback interface, and GLOO_SOCKET_IFNAME")
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        yield _transfer("nccl", seconds, "try NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO says more")


def _transfer(backend: str, seconds: float, hint: str) -> Finding:
    try:
        launch(_exchange, backend, seconds, nproc=2)
    except RemoteRankError as error:
        return Finding(f"two ranks over {backend}", BAD, str(error).splitlines()[0], hint)
    return Finding(f"two ranks over {backend}", GOOD, "a tensor came across")


def _exchange(backend: str, seconds: float) -> None:
    rank = int(os.environ["RANK"])
    device: Any = torch.device("cuda", rank) if backend == "nccl" else "cpu"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    tensor = torch.full((1024,), float(rank), device=device)
    dist.broadcast(tensor, src=1)
    if float(tensor.sum()) != 1024.0:
        raise RuntimeError(f"{backend} gave wrong numbers")
    dist.destroy_process_group()
