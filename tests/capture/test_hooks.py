"""Hooks that would act on tensors without data are refused, and the model stays usable."""

from typing import Any

import pytest
import torch
from diffusers import ContextParallelConfig, FirstBlockCacheConfig
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelOutput

from dit_pipelining.api import split_model
from dit_pipelining.capture.capturing import capture
from dit_pipelining.errors import ConfigError
from tests.same import assert_same
from tests.zoo import CASES, build_inputs, build_model


def test_a_cache_that_is_on_is_refused() -> None:
    case = CASES["WanTransformer3D"]
    model = build_model(case)
    with torch.no_grad():
        expected = model(**build_inputs(case))
        model.enable_cache(FirstBlockCacheConfig(threshold=0.1))  # type: ignore[operator]
        with pytest.raises(ConfigError, match="disable_cache"):
            capture(model, build_inputs(case))
        model.disable_cache()  # type: ignore[operator]
        capture(model, build_inputs(case))
        assert_same(model(**build_inputs(case)), expected)


def test_diffusers_own_context_parallelism_is_refused() -> None:
    model: Any = build_model(CASES["WanTransformer3D"])
    plan = {"proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3)}
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=2), plan)
    with pytest.raises(ConfigError, match=r"cp_output.*give `ulysses_degree`"):
        capture(model, build_inputs(CASES["WanTransformer3D"]))


def test_layers_that_cast_their_weights_are_recorded_and_stay_cast() -> None:
    case = CASES["WanTransformer3D"]
    model: Any = build_model(case)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    inputs = build_inputs(case)
    with torch.no_grad():
        expected = model(**inputs)
        assert_same(split_model(model, 2, inputs)(**inputs), expected)
    assert model.blocks[0].ffn.net[2].weight.dtype == torch.float8_e4m3fn
