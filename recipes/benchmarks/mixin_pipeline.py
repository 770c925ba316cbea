"""What the benchmarks of hand-written pipelines share: a pipeline of linear layers, and ranks to run it on."""

import multiprocessing
import tempfile
from collections.abc import Callable
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


class Scheduler:
    def step(self, noise_pred: torch.Tensor, t: Any, latents: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        return (latents - 0.1 * noise_pred,)


class LinearLayers(nn.Module):
    """Layers without bias, each seeded by its number: a stage has the weights of the whole."""

    def __init__(self, num_layers: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.start, self.end, self.layers = make_layers(
            num_layers, lambda prefix: nn.Linear(dim, dim, bias=False), prefix="layers"
        )
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, PPMissingLayer):
                weight = torch.randn((dim, dim), generator=torch.Generator().manual_seed(i)) * 0.02
                layer.weight = nn.Parameter(weight.to(device, dtype), requires_grad=False)

    def forward(self, x: torch.Tensor, intermediate_tensors: IntermediateTensors | None = None) -> Any:
        if intermediate_tensors is not None:
            x = intermediate_tensors["hidden_states"]
        for layer in self.layers[self.start : self.end]:
            x = layer(x)
        return (x,) if get_pp_group().is_last_rank else IntermediateTensors({"hidden_states": x})


class LinearPipeline(PipelineParallelMixin, CFGParallelMixin):
    def __init__(self, num_layers: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.transformer, self.scheduler = LinearLayers(num_layers, dim, dtype, device), Scheduler()

    def diffuse(self, latents: Any, steps: int, guided: bool) -> Any:
        """A loop of so many steps, with two branches in each if it is guided."""
        for t in range(steps):
            negative = {"x": latents * 0.5} if guided else None
            noise_pred = self.predict_noise_maybe_with_cfg(guided, 7.5, {"x": latents}, negative, cfg_normalize=False)
            latents = self.scheduler_step_maybe_with_cfg(noise_pred, t, latents, guided)
        return latents


def _rank_main(
    rank: int,
    world: int,
    store: str,
    backend: str,
    branches: int,
    function: Callable[..., Any],
    args: Any,
    answers: Any,
) -> None:
    torch.set_num_threads(1)
    init_distributed_environment(world, rank, f"file://{store}", local_rank=rank, backend=backend)
    initialize_model_parallel(pipeline_parallel_size=world // branches, cfg_parallel_size=branches)
    try:
        with torch.inference_mode():
            answers.put((rank, function(*args)))
    except Exception as error:
        answers.put((rank, error))
        raise
    finally:
        destroy_distributed_env()


def on_ranks(world: int, backend: str, function: Callable[..., Any], *args: Any, branches: int = 1) -> list[Any]:
    """What a module-level function returns on each of `world` new processes, in the order of their ranks.

    It must not return tensors: they would be shared with a process that may have ended.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        shared = (world, f"{folder}/store", backend, branches, function, args, answers)
        processes = [context.Process(target=_rank_main, args=(rank, *shared)) for rank in range(world)]
        for process in processes:
            process.start()
        try:
            results = dict(answers.get(timeout=300) for _ in range(world))
            for result in results.values():
                if isinstance(result, Exception):
                    raise result
            for process in processes:
                process.join(60)
        finally:
            for process in processes:
                process.kill()
    return [results[rank] for rank in range(world)]
