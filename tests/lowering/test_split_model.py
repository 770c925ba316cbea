"""What people do with a model, done with a split one: hooks of its own, copies."""

import copy
import pickle
from typing import Any

import pytest
import torch

from dit_pipelining.api import split_model
from dit_pipelining.errors import ConfigError
from tests.same import assert_same
from tests.zoo import CASES, build_inputs, build_model

CASE = CASES["WanTransformer3D"]


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def test_hooks_of_the_model_run_around_its_stages() -> None:
    model: Any = build_model(CASE)
    split = split_model(model, 2, build_inputs(CASE), partitioner="uniform")
    plain = split(**build_inputs(CASE))[0]
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | dict(hidden_states=kwargs["hidden_states"] * 2)), with_kwargs=True
    )
    handle = model.register_forward_hook(lambda _, __, output: type(output)(sample=output.sample + 1))
    inputs = build_inputs(CASE) | dict(return_dict=True)
    for _ in range(2):
        assert_same(split(**inputs), model(**inputs))
    assert not torch.equal(split(**inputs)[0], plain)
    handle.remove()
    assert_same(split(**inputs), model(**inputs))


def test_a_copy_of_a_split_has_weights_of_its_own() -> None:
    model: Any = build_model(CASE)
    inputs = build_inputs(CASE)
    split = split_model(model, 2, inputs, partitioner="uniform")
    expected = split(**inputs)
    copied = copy.deepcopy(split)
    for parameter in model.parameters():
        parameter.mul_(0.5)
    assert copied.partition == split.partition
    assert_same(copied(**inputs), expected)
    assert_same(split(**inputs), model(**inputs))
    assert not torch.equal(split(**inputs)[0], expected[0])


def test_pickling_a_split_says_what_to_pickle() -> None:
    split = split_model(build_model(CASE), 2, build_inputs(CASE))
    with pytest.raises(ConfigError, match=r"Pickle `split.model`"):
        pickle.dumps(split)
