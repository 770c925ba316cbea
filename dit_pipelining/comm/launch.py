"""Join the process group that torchrun launched this process into."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import WorldSizeError


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
        `cuda:<local rank>` with NCCL where there are GPUs, else the CPU with gloo.

    Raises:
        WorldSizeError: the launch does not fit the degrees, or this machine has fewer GPUs than ranks.
    """
    config.check_world_size(launched_world_size())
    device = _device()
    if config.world_size > 1 and not dist.is_initialized():
        timeout = timedelta(seconds=config.timeout_seconds)
        if device.type == "cuda":
            dist.init_process_group("nccl", timeout=timeout, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=timeout)
    return device


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise WorldSizeError(
            f"local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}. Launch at most "
            "one process per GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
