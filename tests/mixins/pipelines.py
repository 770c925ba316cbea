"""Small hand-written pipelines, and functions that run them on ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dit_pipelining.mixins import (
    CFGParallelMixin,
    IntermediateTensors,
    PipelineParallelMixin,
    PPMissingLayer,
    destroy_distributed_env,
    get_pp_group,
    init_distributed_environment,
    initialize_model_parallel,
    make_layers,
)

DIM = 64
SCALE = 7.5
STEP_SIZE = 0.1


class EulerScheduler:
    """latents - 0.1 * prediction; also the halves of a distilled model's step."""

    def __init__(self) -> None:
        self.steps = 0

    def step(
        self,
        noise_pred: torch.Tensor,
        t: Any,
        latents: torch.Tensor,
        return_dict: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor]:
        self.steps += 1
        latents = latents - STEP_SIZE * noise_pred
        if generator is not None:
            latents = latents + torch.randn(latents.shape, generator=generator)
        return (latents,)

    def predict_clean(self, noise_pred: torch.Tensor, t: Any, latents: torch.Tensor) -> torch.Tensor:
        return latents - t / 1000 * noise_pred

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        level = (timesteps / 1000).view(-1, 1)
        return (1 - level) * clean + level * noise


class Layers(nn.Module):
    """Linear layers without bias, each seeded by its number, so that stages have the weights of the whole."""

    def __init__(self, num_layers: int = 4, partition: str | None = None) -> None:
        super().__init__()
        self.start, self.end, self.layers = make_layers(
            num_layers, lambda prefix: nn.Linear(DIM, DIM, bias=False), prefix="layers", partition=partition
        )
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, PPMissingLayer):
                weight = torch.randn((DIM, DIM), generator=torch.Generator().manual_seed(42 + i)) * 0.02
                layer.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor, intermediate_tensors: IntermediateTensors | None = None) -> Any:
        if intermediate_tensors is not None:
            x = intermediate_tensors["hidden_states"]
        for layer in self.layers[self.start : self.end]:
            x = layer(x)
        return (x,) if get_pp_group().is_last_rank else IntermediateTensors({"hidden_states": x})


class LinearPipeline(PipelineParallelMixin, CFGParallelMixin):
    """The mixin's own predict_noise on `Layers`. It does not call `super().__init__()`."""

    def __init__(self, num_layers: int = 4, partition: str | None = None) -> None:
        self.transformer = Layers(num_layers, partition)
        self.scheduler: Any = EulerScheduler()

    def diffuse(self, latents: Any, steps: int, negative: torch.Tensor | None = None) -> Any:
        """A loop with guidance if there is a negative prompt; here that is something added to the latents."""
        for t in range(steps, 0, -1):
            guided = None if negative is None else {"x": latents + negative}
            noise_pred = self.predict_noise_maybe_with_cfg(
                negative is not None, SCALE, {"x": latents}, guided, cfg_normalize=False
            )
            latents = self.scheduler_step_maybe_with_cfg(noise_pred, t, latents, negative is not None)
        return latents


class TuplePipeline(LinearPipeline):
    """Predicts video and audio, with guidance on the video alone and a scheduler for each."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__(num_layers)
        self.scheduler = CompositeScheduler()

    def predict_noise(self, intermediate_tensors: IntermediateTensors | None = None, **kwargs: Any) -> Any:
        result = self.transformer(intermediate_tensors=intermediate_tensors, **kwargs)
        return result if isinstance(result, IntermediateTensors) else (result[0], result[0][:, :8] * 2)

    def combine_cfg_noise(  # type: ignore[override]
        self, positive: Any, negative: Any, scale: float, normalize: bool = False
    ) -> Any:
        (video, audio), (video_negative, _) = positive, negative
        return super().combine_cfg_noise(video, video_negative, scale, normalize), audio


class CompositeScheduler:
    def __init__(self) -> None:
        self.video, self.audio = EulerScheduler(), EulerScheduler()

    def step(self, noise_pred: Any, t: Any, latents: Any, return_dict: bool = False) -> Any:
        schedulers = (self.video, self.audio)
        pairs = zip(schedulers, noise_pred, t, latents, strict=True)
        return (tuple(scheduler.step(part, at, own)[0] for scheduler, part, at, own in pairs),)


class ThreeBranchPipeline(LinearPipeline):
    def combine_multi_branch_cfg_noise(  # type: ignore[override]
        self, predictions: list[torch.Tensor], true_cfg_scale: dict[str, float], cfg_normalize: bool = False
    ) -> torch.Tensor:
        positive, reference, unconditional = predictions
        guided = unconditional + true_cfg_scale["image"] * (reference - unconditional)
        return guided + true_cfg_scale["text"] * (positive - reference)


def inputs(seed: int, batch: int = 2, dim: int = DIM) -> torch.Tensor:
    """Random latents (batch, dim)."""
    return torch.randn((batch, dim), generator=torch.Generator().manual_seed(seed))


@contextmanager
def parallel(stages: int = 1, branches: int = 1) -> Iterator[None]:
    """The groups of a launch, inside the process group of the test's rank."""
    init_distributed_environment()
    try:
        initialize_model_parallel(pipeline_parallel_size=stages, cfg_parallel_size=branches)
        yield
    finally:
        destroy_distributed_env()


def on_groups(stages: int, branches: int, function: Callable[..., Any], *args: Any) -> Any:
    """What a test runs on each rank: the function within the groups, in inference mode as pipelines are."""
    with parallel(stages, branches), torch.inference_mode():
        return function(*args)
