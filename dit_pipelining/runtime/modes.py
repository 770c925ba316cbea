"""What torch keeps for each thread, taken over by another: grad and inference mode, autocast, the current GPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from dit_pipelining.torch_internals import autocast_state

Enter = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a thread has what another one had."""


def request_mode() -> Enter:
    """This thread's grad and inference mode and its current GPU, for a thread that does nothing else."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    in_grad_mode = _grad_mode()

    @contextmanager
    def enter() -> Iterator[None]:
        if device is not None:
            torch.cuda.set_device(device)
        with in_grad_mode():
            yield

    return enter


def calling_mode() -> Enter:
    """This thread's grad, inference and autocast state, for a call that is run elsewhere."""
    in_grad_mode = _grad_mode()
    states = [autocast_state("cpu")]
    if torch.cuda.is_available():
        states.append(autocast_state("cuda"))

    @contextmanager
    def enter() -> Iterator[None]:
        with in_grad_mode(), ExitStack() as stack:
            for device_type, enabled, dtype in states:
                if enabled:
                    stack.enter_context(torch.autocast(device_type, dtype=dtype))
            yield

    return enter


def _grad_mode() -> Enter:
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    @contextmanager
    def enter() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad and not inference):
            yield

    return enter
