"""Hooks of one branch of guidance are part of a capture, and on the model only while it runs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.hooks import HookRegistry, LayerSkipConfig, ModelHook, apply_layer_skip
from torch import nn

from dit_pipelining.api import split_model
from dit_pipelining.capture.branch_hooks import ask_hooks, asked_hooks, forget_hooks, hooked, read_hooks
from dit_pipelining.errors import ConfigError
from dit_pipelining.runtime.guiders import check_repeatable
from tests.same import assert_same


@pytest.fixture(autouse=True)
def without_hooks() -> Iterator[None]:
    with torch.no_grad():
        yield
    forget_hooks()


def model() -> Any:
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
    )


def inputs() -> dict[str, torch.Tensor]:
    return dict(
        hidden_states=torch.linspace(-1, 1, 256).reshape(1, 4, 8, 8),
        encoder_hidden_states=torch.linspace(0, 1, 24).reshape(1, 3, 8),
        pooled_projections=torch.ones(1, 8),
        timestep=torch.tensor([500.0]),
    )


@pytest.mark.parametrize("options", [{}, {"skip_attention": False}])
def test_a_split_runs_with_the_hooks_that_are_asked_for(options: dict[str, Any]) -> None:
    with_hooks, plain = model(), model()
    apply_layer_skip(with_hooks, LayerSkipConfig([1, 2], **options))
    hooks = read_hooks(with_hooks)
    expected, without = with_hooks(**inputs()), plain(**inputs())
    assert not torch.equal(expected.sample, without.sample)
    split = split_model(plain, 2, inputs())
    for _ in range(2):
        assert_same(split(**inputs()), without)
        ask_hooks(plain, hooks)
        assert_same(split(**inputs()), expected)
        forget_hooks()
    assert_same(plain(**inputs()), without)
    assert all("forward" not in vars(module) for module in plain.modules())


def test_hooks_are_those_of_one_model_and_of_one_thread() -> None:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    source = model()
    apply_layer_skip(source, LayerSkipConfig([0]))
    ask_hooks(one, read_hooks(source))
    assert asked_hooks(one) == read_hooks(source)
    assert asked_hooks(other) == ()
    forget_hooks()
    assert asked_hooks(one) == ()


def test_hooks_are_taken_off_when_the_model_fails() -> None:
    source, own = model(), model()
    apply_layer_skip(source, LayerSkipConfig([0, 3]))
    with pytest.raises(TypeError), hooked(own, read_hooks(source)):
        own()
    assert all("forward" not in vars(module) for module in own.modules())


def test_a_hook_that_draws_numbers_or_is_not_known_is_refused() -> None:
    source = model()
    apply_layer_skip(source, LayerSkipConfig([0], dropout=0.5))
    with pytest.raises(ConfigError, match=r"dropout=1\.0"):
        check_repeatable(read_hooks(source))
    other = model()
    HookRegistry.check_if_exists_or_initialize(other.transformer_blocks[1]).register_hook(ModelHook(), "own")
    with pytest.raises(ConfigError, match=r"ModelHook on 'transformer_blocks\.1'"):
        check_repeatable(read_hooks(other))
