"""The state of torch's random generators: taken, compared and put back, so that ranks draw what one process draws."""

from collections.abc import Sequence

import torch


def random_state(device: torch.device | None = None) -> list[torch.Tensor]:
    """The state of the CPU's generator, and of the GPU's if there is one; by default of the current GPU if it is in use."""
    on_gpu = device.type == "cuda" if device is not None else torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device or "cuda")] if on_gpu else [])]


def set_random_state(state: Sequence[torch.Tensor], device: torch.device | None = None) -> None:
    """Go back to what `random_state` returned, here or on another rank."""
    cpu, *gpu = state
    torch.set_rng_state(cpu.cpu())
    for own in gpu:
        torch.cuda.set_rng_state(own.cpu(), device or "cuda")


def differ(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether some of these states, of the same generators, differ: between them, something was drawn."""
    return any(not torch.equal(*pair) for pair in zip(one, other, strict=True))
