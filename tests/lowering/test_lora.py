"""LoRA adapters: their layers stay in place, and what scales them is done to each stage's own."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from dit_pipelining.api import split_model
from tests.capture.toy import run_apart
from tests.same import assert_same
from tests.zoo import CASES, build_inputs, build_model

CASE = CASES["WanTransformer3D"]
# Attention in the blocks, and the text projection, which is computed once per prompt.
TARGETS = ["to_q", "to_v", "text_embedder.linear_1"]


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def adapted(*names: str) -> Any:
    model: Any = build_model(CASE)
    for i, name in enumerate(names):
        torch.manual_seed(i)
        model.add_adapter(LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False), adapter_name=name)
    model.set_adapters(list(names))
    return model.eval()


def scalings(model: nn.Module) -> list[dict[str, float]]:
    return [dict(vars(module)["scaling"]) for module in model.modules() if isinstance(module, BaseTunerLayer)]


def test_adapters_are_part_of_the_stages_under_the_models_names() -> None:
    model = adapted("style")
    split = split_model(model, 2, build_inputs(CASE), partitioner="uniform")
    assert {key for stage in split.stages for key in stage.state_dict()} == set(model.state_dict())
    assert_same(split(**build_inputs(CASE)), model(**build_inputs(CASE)))
    assert not torch.equal(split(**build_inputs(CASE))[0], build_model(CASE)(**build_inputs(CASE))[0])


@pytest.mark.parametrize("first", [1.0, 0.5])
def test_the_scale_in_the_attention_kwargs_is_applied_on_every_stage(first: float) -> None:
    model = adapted("style")
    before = scalings(model)
    inputs = build_inputs(CASE)
    split = split_model(model, 3, inputs | dict(attention_kwargs={"scale": first}), partitioner="uniform")
    outputs = []
    for scale in (0.5, 0.25, 1.0, 0.0, 0.5):
        call = inputs | dict(attention_kwargs={"scale": scale})
        expected = model(**call)
        assert_same(split(**call), expected)
        assert_same(run_apart(split, call), expected)
        outputs.append(expected[0])
        assert scalings(model) == before
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:4])


def test_the_scale_is_taken_back_after_a_failing_block() -> None:
    model = adapted("style")
    before = scalings(model)
    call = build_inputs(CASE) | dict(attention_kwargs={"scale": 0.5})
    split = split_model(model, 2, call, partitioner="uniform")

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    model.blocks[3].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        split(**call)
    assert scalings(model) == before


def test_a_capture_leaves_the_scales_as_they_are() -> None:
    model = adapted("style")
    before = scalings(model)
    split_model(model, 2, build_inputs(CASE) | dict(attention_kwargs={"scale": 0.5}), partitioner="uniform")
    assert scalings(model) == before


def test_changed_adapter_weights_are_seen_with_the_same_prompt() -> None:
    model = adapted("style", "subject")
    inputs = build_inputs(CASE)  # the same tensors in every call: the projected prompt is kept
    split = split_model(model, 2, inputs, partitioner="uniform")
    for names, weights in ((["style", "subject"], [1.0, 0.3]), (["style"], [0.5]), (["subject"], [2.0])):
        model.set_adapters(names, weights)
        assert_same(split(**inputs), model(**inputs))


def test_disabled_adapters_are_seen_with_the_same_prompt() -> None:
    model = adapted("style")
    inputs = build_inputs(CASE)
    split = split_model(model, 2, inputs, partitioner="uniform")
    before = split(**inputs)[0]
    model.disable_lora()
    assert_same(split(**inputs), model(**inputs))
    assert not torch.equal(split(**inputs)[0], before)
    model.enable_lora()
    assert torch.equal(split(**inputs)[0], before)


def test_fused_adapters_are_seen_with_the_same_prompt() -> None:
    model = adapted("style")
    inputs = build_inputs(CASE)
    split = split_model(model, 2, inputs, partitioner="uniform")
    split(**inputs)
    model.fuse_lora(lora_scale=0.5)
    assert_same(split(**inputs), model(**inputs))
    model.unfuse_lora()
    assert_same(split(**inputs), model(**inputs))


def test_adapters_added_after_the_split_are_used() -> None:
    model: Any = build_model(CASE)
    inputs = build_inputs(CASE)
    split = split_model(model, 2, inputs, partitioner="uniform")
    before = split(**inputs)[0]
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False), adapter_name="late")
    model.eval()
    assert_same(split(**inputs), model(**inputs))
    assert not torch.equal(split(**inputs)[0], before)
