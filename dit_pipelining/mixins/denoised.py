"""The two halves of a step of distilled models: the clean latents that a prediction means, and noise on top again.

Few-step models (DMD, LCM) predict clean latents at each step and go to the next noise level with fresh noise. Schedulers name
these halves differently; here each has one name.
"""

from typing import Any

import torch


def predict_clean(scheduler: Any, noise_pred: Any, t: Any, latents: Any) -> Any:
    """The clean latents.

    Args:
        scheduler: one with a method `predict_clean(noise_pred, t, latents)`, or of a flow-matching model: then
            latents - sigma * noise_pred, computed in float64 as the distilled models' own code does.
        noise_pred: prediction, as `latents`.
        t: timestep, one number or a tensor of one element.
        latents: (batch, ...)

    Raises:
        TypeError: the scheduler is of neither kind.
    """
    own = getattr(scheduler, "predict_clean", None)
    if callable(own):
        return own(noise_pred, t, latents)
    sigma = _sigma(scheduler, t).to(latents.device)
    return (latents.double() - sigma * noise_pred.double()).to(latents.dtype)


def add_noise(scheduler: Any, clean: Any, noise: Any, t: Any) -> Any:
    """Clean latents with noise up to a timestep.

    Args:
        scheduler: one with a method `add_noise(clean, noise, timesteps)`, or diffusers' `scale_noise`.
        clean: (batch, ...)
        noise: as `clean`.
        t: timestep, one number or a tensor of one element.

    Raises:
        TypeError: the scheduler has neither.
    """
    if callable(getattr(scheduler, "add_noise", None)):
        return scheduler.add_noise(clean, noise, _per_sample(t, clean))
    if callable(getattr(scheduler, "scale_noise", None)):
        return scheduler.scale_noise(clean, _per_sample(t, clean), noise)
    raise TypeError(
        f"{type(scheduler).__name__} has neither add_noise nor scale_noise: override add_noise in the pipeline"
    )


def _per_sample(t: Any, clean: Any) -> Any:
    """The timestep as schedulers index it: one per sample."""
    if not isinstance(clean, torch.Tensor):
        return t
    return torch.as_tensor(t, device=clean.device).flatten().expand(clean.shape[0])


def _sigma(scheduler: Any, t: Any) -> torch.Tensor:
    config = getattr(scheduler, "config", {})
    flow = "FlowMatch" in type(scheduler).__name__ or config.get("prediction_type") == "flow_prediction"
    if not (flow and hasattr(scheduler, "sigmas") and hasattr(scheduler, "timesteps")):
        raise TypeError(
            f"{type(scheduler).__name__} has no predict_clean and is not known to be of a flow-matching model: override "
            "predict_clean in the pipeline"
        )
    timesteps = scheduler.timesteps.to("cpu", torch.float64)
    nearest = (timesteps - torch.as_tensor(t).to("cpu", torch.float64)).abs().argmin()
    return scheduler.sigmas.to("cpu", torch.float64)[nearest]
