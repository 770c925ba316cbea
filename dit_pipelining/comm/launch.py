"""Join the process group that torchrun launched this process into."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from dit_pipelining.config import ParallelConfig

HARDWARE_QUEUES = "32"
"""The most there are. With the default of 8, a stream that waits for another rank can hold up one that need not."""


def launched_world_size() -> int:
    """Number of processes of this launch: of the process group, or of torchrun's environment, or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's number in the launch."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def join(config: ParallelConfig) -> torch.device:
    """Check the world size, make the default process group if there is none yet, and choose this rank's device.

    Returns:
        this rank's GPU, or the CPU where there are none.

    Raises:
        WorldSizeError: the launch does not fit the degrees.
    """
    config.check_world_size(launched_world_size())
    device = _device()
    if config.world_size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_seconds))
    return device


def _device() -> torch.device:
    """The GPUs of this machine are dealt out to its ranks in turn; ranks share them where there are fewer."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", HARDWARE_QUEUES)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
