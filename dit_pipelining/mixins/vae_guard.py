"""VAE decode only where the latents are."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from dit_pipelining.mixins.async_latents import resolved


class _NothingDecoded(tuple[None]):
    """What decode gives on a stage that has no latents: `(None,)`, which also answers `.sample`."""

    sample = None


def guard_vae_decode(
    vae: Any,
    *,
    stages: Callable[[], int],
    is_first_stage: Callable[[], bool],
    broadcast: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Let `vae.decode` run on the first stage only and give `(None,)` on the others; once for each VAE.

    A VAE that says `is_distributed_enabled()` decodes on every stage, with the first stage's latents.

    Args:
        vae: has a method `decode`; its name and docstring are kept.
        stages: number of stages, asked for at each call.
        is_first_stage: whether this rank's is the first, asked for at each call.
        broadcast: the first stage's tensor, on every stage.
    """
    decode = vae.decode
    if getattr(decode, "decodes_on_first_stage", False):
        return

    @wraps(decode)
    def guarded(z: Any, *args: Any, **kwargs: Any) -> Any:
        z, count = resolved(z), stages()
        if count == 1:
            return decode(z, *args, **kwargs)
        if callable(getattr(vae, "is_distributed_enabled", None)) and vae.is_distributed_enabled():
            # The last of two stages computed the latents that the first has; stages between have old ones.
            return decode(broadcast(z) if count > 2 else z, *args, **kwargs)
        return decode(z, *args, **kwargs) if is_first_stage() else _NothingDecoded((None,))

    guarded.decodes_on_first_stage = True  # type: ignore[attr-defined]
    vae.decode = guarded
