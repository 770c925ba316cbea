"""What scripts do to a pipeline between its calls and from callbacks acts on a split one as in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from dit_pipelining.api import ParallelConfig, load_pipeline
from tests import checkpoints
from tests.distributed import RankPool
from tests.layouts import LAYOUTS

Seen = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("between")
    return {"wan": checkpoints.wan(root / "wan"), "flux": checkpoints.flux(root / "flux")}


def loaded(folder: Path, layout: str | None) -> Any:
    if layout is None:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    else:
        pipeline = load_pipeline(folder, ParallelConfig(**LAYOUTS[layout]))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def request(**changes: Any) -> dict[str, Any]:
    options = dict(height=8, width=8, max_sequence_length=16, num_inference_steps=2, output_type="latent")
    return dict(prompt="a red cat", generator=torch.Generator().manual_seed(7)) | options | changes


def paint(pipeline: Any, **changes: Any) -> torch.Tensor:
    images: torch.Tensor = pipeline(**request(**changes)).images
    return images


def film(pipeline: Any, callback: Any = None, **changes: Any) -> torch.Tensor:
    options: dict[str, Any] = dict(height=16, width=16, num_frames=5, max_sequence_length=16, num_inference_steps=3)
    options |= {"output_type": "latent", "generator": torch.Generator().manual_seed(7), **changes}
    if callback is not None:
        names = ["latents", "prompt_embeds", "negative_prompt_embeds"]
        options |= dict(callback_on_step_end=callback, callback_on_step_end_tensor_inputs=names)
    frames: torch.Tensor = pipeline(prompt="a red cat", negative_prompt="moon", guidance_scale=4.0, **options).frames
    return frames


def with_callbacks(folder: Path, layout: str | None) -> Seen:
    pipeline, another = loaded(folder, layout), loaded(folder, layout)
    kept: list[torch.Tensor] = []

    def change(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {name: 0.9 * value for name, value in values.items()}

    def write(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        values["latents"].mul_(0.9)
        values["prompt_embeds"].mul_(1.1)
        return {}

    def shorten(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": values["prompt_embeds"][:, :8]}

    def interrupt(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == 1
        return values

    def keep(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        kept.append(values["latents"])
        return values

    def stop(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("as the caller wants it")

    def film_another(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"latents": values["latents"] + film(another, num_inference_steps=1)}

    seen = {own.__name__: film(pipeline, own) for own in (change, write, shorten, interrupt, keep, film_another)}
    with pytest.raises(KeyError, match="as the caller wants it"):
        film(pipeline, stop)
    return {**seen, "after an error": film(pipeline), "kept": torch.stack(kept)}


def with_other_schedulers(folder: Path, layout: str | None) -> Seen:
    pipeline = loaded(folder, layout)
    flow = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    schedulers: dict[str, Any] = {
        "two calls a step": diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0),
        "multistep": diffusers.UniPCMultistepScheduler(**flow),
        "stochastic": diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", **flow),
    }
    seen = {}
    for name, scheduler in schedulers.items():
        pipeline.scheduler = scheduler
        torch.manual_seed(11)
        seen[name] = film(pipeline)
        seen[f"{name}, without a generator"] = film(pipeline, generator=None)
    return seen


class Scaled:
    """An attention processor around another one."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.own(*args, **kwargs)
        return tuple(0.9 * part for part in result) if isinstance(result, tuple) else 0.9 * result


class Shrunk(torch.nn.Module):
    """Rotary tables of another embedding, smaller."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = self.own(ids)
        return 0.9 * cosine, 0.9 * sine


def with_other_parts(folder: Path, layout: str | None) -> Seen:
    pipeline, other = loaded(folder, layout), loaded(folder, layout)
    model = pipeline.transformer
    seen = {"plain": paint(pipeline)}

    def exchange_forward() -> None:
        own = model.context_embedder.forward
        model.context_embedder.forward = lambda text: 0.9 * own(text)

    def exchange_processors() -> None:
        model.set_attn_processor({name: Scaled(own) for name, own in model.attn_processors.items()})

    def load_weights() -> None:
        generator = torch.Generator().manual_seed(3)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        model.load_state_dict(
            {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}, assign=True
        )

    changes: list[Callable[[], None]] = [exchange_forward, exchange_processors, load_weights]
    for change in changes:
        change()
        seen[change.__name__] = paint(pipeline)
    model.pos_embed = Shrunk(model.pos_embed)
    seen["another rotary embedding"] = paint(pipeline)
    del model.single_transformer_blocks[1]
    seen["a block less"] = paint(pipeline)
    pipeline.transformer, other.transformer = other.transformer, model
    seen["the other's transformer"] = paint(pipeline, height=16)
    seen["in the other pipeline"] = paint(other)
    return seen


def with_other_arguments(folder: Path, layout: str | None) -> Seen:
    pipeline = loaded(folder, layout)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    latents = torch.randn(1, 16, 4, generator=torch.Generator().manual_seed(3))

    def guide(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = 9.0  # which Flux has read before its loop
        return {"latents": values["latents"].double().float() + 0.1}

    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "sigmas": dict(sigmas=[1.0, 0.7, 0.2]),
        "one step": dict(num_inference_steps=1),
        "images of a prompt": dict(num_images_per_prompt=2, generator=generators),
        "prompts": dict(prompt=["a red cat", "blue"]),
        "no generator": dict(generator=None),
        "a short text": dict(max_sequence_length=4),
        "latents": dict(latents=latents),
        "latents of another dtype": dict(latents=latents.bfloat16()),
        "guidance": dict(guidance_scale=torch.tensor(7.0)),
        "a callback": dict(callback_on_step_end=guide),
    }
    torch.manual_seed(5)
    seen = {name: paint(pipeline, **changes) for name, changes in calls.items()}
    for kind in ("pt", "np", "pil"):
        [image] = pipeline(**request(output_type=kind), return_dict=False)[0]
        seen[kind] = torch.as_tensor(np.array(image))
    for wrong in (dict(generator=generators * 2), dict(height=-8), dict(max_sequence_length=5000)):
        with pytest.raises((ValueError, RuntimeError)):
            paint(pipeline, **wrong)
    return seen


SESSIONS = {
    "arguments": ("flux", with_other_arguments),
    "callbacks": ("wan", with_callbacks),
    "schedulers": ("wan", with_other_schedulers),
    "parts": ("flux", with_other_parts),
}


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-cfg2", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", SESSIONS)
def test_each_result_of_a_session_is_that_of_one_process(
    ranks: RankPool, folders: dict[str, Path], name: str, layout: str
) -> None:
    model, session = SESSIONS[name]
    [expected] = ranks.run(1, session, folders[model], None)
    results = list(expected.values())
    assert all(not torch.equal(results[0], other) for other in results[1:])
    for found in ranks.run(4 if layout == "pp2-cfg2" else 2, session, folders[model], layout):
        assert [key for key, wanted in expected.items() if not torch.equal(found[key], wanted)] == []
