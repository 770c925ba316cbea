"""Caches whose modules decide by the number of the step act on a split pipeline as in one process."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import hooks
from torch import nn

from dit_pipelining.api import ParallelConfig, generate, load_pipeline, parallelize, split_model
from dit_pipelining.errors import ConfigError
from tests import checkpoints
from tests.distributed import RankPool
from tests.layouts import LAYOUTS
from tests.zoo import CASES, build_inputs, build_model

SCHEDULE = dict(cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=torch.float32)
CACHES = {
    "attention": hooks.TaylorSeerCacheConfig(**SCHEDULE),
    "blocks": hooks.TaylorSeerCacheConfig(cache_identifiers=[r".*transformer_blocks\.\d+"], max_order=2, **SCHEDULE),
    "lite": hooks.TaylorSeerCacheConfig(use_lite_mode=True, **SCHEDULE),
}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.flux(tmp_path_factory.mktemp("caches") / "flux")


def request(seed: int, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = dict(prompt="a red cat", negative_prompt="moon", true_cfg_scale=3.0, height=8, width=8)
    options |= dict(max_sequence_length=16, num_inference_steps=5, output_type="latent")
    return options | dict(generator=torch.Generator().manual_seed(seed)) | changes


def requests() -> list[dict[str, Any]]:
    """Of several lengths and sizes, with and without a second branch."""
    return [request(1), request(2, num_inference_steps=7, height=16), request(3, true_cfg_scale=1.0)]


def session(folder: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """Images with each cache, one after the other and side by side, and when it is off again."""
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    if layout is not None:
        pipeline = load_pipeline(folder, ParallelConfig(**LAYOUTS[layout]))
    pipeline.set_progress_bar_config(disable=True)
    seen = {}
    for name, cache in CACHES.items():
        pipeline.transformer.enable_cache(cache)
        seen[name] = pipeline(**request(7)).images
        if name == "attention":
            seen["again"] = pipeline(**request(7, num_inference_steps=4)).images
            outputs = generate(pipeline, requests())
            seen |= {f"side by side, {index}": output.images for index, output in enumerate(outputs)}
        pipeline.transformer.disable_cache()
    seen["off"] = pipeline(**request(7)).images
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.transformer.enable_cache(CACHES["blocks"])
    if layout is not None:
        pipeline = parallelize(pipeline, ParallelConfig(**LAYOUTS[layout]))
    pipeline.set_progress_bar_config(disable=True)
    seen["before the split"] = pipeline(**request(7)).images
    return seen


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-cfg2", marks=pytest.mark.full)])
def test_images_with_a_cache_are_those_of_one_process(ranks: RankPool, flux: Path, layout: str) -> None:
    [expected] = ranks.run(1, session, flux, None)
    assert all(not torch.equal(expected["off"], expected[name]) for name in CACHES)
    for results in ranks.run(4 if layout == "pp2-cfg2" else 2, session, flux, layout):
        assert [name for name, image in expected.items() if not torch.equal(results[name], image)] == []


def test_stages_in_one_process_keep_a_cache_as_the_model_does() -> None:
    case = CASES["FluxTransformer"]
    model, inputs = build_model(case), build_inputs(case)
    model.enable_cache(CACHES["attention"])

    def steps(function: nn.Module | Any) -> list[torch.Tensor]:
        model._reset_stateful_cache()
        results = []
        for step in range(5):
            with model.cache_context("cond"):
                moved = {"hidden_states": inputs["hidden_states"] * (1 + step)}
                results.append(function(**{**inputs, **moved, "return_dict": False})[0])
        return results

    with torch.no_grad():
        expected = steps(model)
        for own, other in zip(steps(split_model(model, 2, inputs)), expected, strict=True):
            assert torch.equal(own, other)


def test_modules_that_do_not_run_at_each_step_are_refused() -> None:
    case = CASES["FluxTransformer"]
    model, inputs = build_model(case), build_inputs(case)
    model.enable_cache(hooks.TaylorSeerCacheConfig(cache_identifiers=["context_embedder"]))
    with pytest.raises(ConfigError, match="the cache of FluxTransformer2DModel is on 'context_embedder'"):
        split_model(model, 2, inputs)


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("tensor_parallel_size", dict(tensor_parallel_size=2)),
        ("ulysses_degree", dict(ulysses_degree=2)),
        ("compile", dict(pipeline_parallel_size=2, compile="blocks")),
        ("gpipe", dict(pipeline_parallel_size=2, schedule="gpipe")),
    ],
)
def test_what_runs_modules_otherwise_is_refused(
    flux: Path, monkeypatch: pytest.MonkeyPatch, option: str, config: dict[str, Any]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(flux)
    pipeline.transformer.enable_cache(CACHES["attention"])
    with pytest.raises(ConfigError, match=rf"a cache is on.* together with .*{option}"):
        parallelize(pipeline, ParallelConfig(**config))
