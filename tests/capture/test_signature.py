import enum
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dit_pipelining.capture.signature import bind, flatten_inputs, rebuild_inputs
from dit_pipelining.errors import InputError

Pair = namedtuple("Pair", ["first", "second"])


class Cache:
    def __init__(self, length: int = 0, keys: torch.Tensor | None = None) -> None:
        self.length = length
        self.keys = keys


class Mode(enum.Enum):
    WRITE = 1
    READ = 2


def signature(value: Any) -> Any:
    return flatten_inputs(dict(x=value)).signature


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "integer and float": (1, 1.0),
    "integer and bool": (1, True),
    "float and bool": (0.0, False),
    "zero and minus zero": (0.0, -0.0),
    "values": (1, 2),
    "strings": ("a", "b"),
    "None and False": (None, False),
    "enum members": (Mode.WRITE, Mode.READ),
    "dtypes": (torch.float16, torch.bfloat16),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "tensor dtypes": (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
    "devices": (torch.zeros(2), torch.zeros(2, device="meta")),
    "strides": (torch.zeros(2, 3), torch.zeros(3, 2).T),
    "list and tuple": ([1, 2], (1, 2)),
    "lengths": ([1], [1, 1]),
    "an empty list and None": ([], None),
    "nesting": ([[1], 2], [[1, 2]]),
    "dictionary keys": ({"a": 1}, {"b": 1}),
    "dictionary types": ({"a": 1}, OrderedDict(a=1)),
    "tuple and namedtuple": ((1, 2), Pair(1, 2)),
    "size and tuple": (torch.Size([1, 2]), (1, 2)),
    "object types": (Cache(), object()),
    "numbers in objects": (Cache(1), Cache(2)),
    "shapes in objects": (Cache(keys=torch.zeros(1)), Cache(keys=torch.zeros(2))),
    "tensor and None in objects": (Cache(keys=torch.zeros(1)), Cache()),
    "numbers in objects in lists": ([Cache(1)], [Cache(2)]),
}

SAME: dict[str, Callable[[], Any]] = {
    "numbers": lambda: 1.5,
    "not a number": lambda: float("nan"),
    "tensors of other values": lambda: torch.randn(2, 3),
    "containers": lambda: {"a": [1, (torch.randn(2), None)]},
    "objects": lambda: Cache(3, torch.randn(2)),
    "nested objects": lambda: [Cache(3), {"cache": Cache(4, torch.randn(1))}],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_inputs_that_a_model_can_tell_apart_have_different_signatures(name: str) -> None:
    one, other = DIFFERENT[name]
    assert signature(one) != signature(other)


@pytest.mark.parametrize("name", SAME)
def test_inputs_that_differ_in_tensor_values_only_have_equal_signatures(name: str) -> None:
    assert signature(SAME[name]()) == signature(SAME[name]())
    assert hash(signature(SAME[name]())) == hash(signature(SAME[name]()))


def test_the_argument_name_belongs_to_the_signature() -> None:
    assert flatten_inputs(dict(a=1)).signature != flatten_inputs(dict(b=1)).signature


def test_the_order_of_keywords_does_not_belong_to_the_signature() -> None:
    assert flatten_inputs(dict(a=1, b=2)).signature == flatten_inputs(dict(b=2, a=1)).signature


def test_autocast_belongs_to_the_signature() -> None:
    plain = signature(torch.zeros(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert signature(torch.zeros(1)) != plain
    assert signature(torch.zeros(1)) == plain


def test_tensors_and_objects_are_found_by_path_in_nested_inputs() -> None:
    residual, cache = torch.zeros(1), Cache()
    inputs = flatten_inputs(dict(samples=[None, {"a": (residual,)}], cache=cache, scale=1.0))
    assert inputs.tensors == {"samples.1.a.0": residual}
    assert inputs.objects == {"cache": cache}


def test_rebuilding_replaces_leaves_and_leaves_the_callers_containers_alone() -> None:
    kwargs = dict(
        a=[torch.zeros(1), 2], b=Pair(torch.zeros(1), "x"), c=OrderedDict(d=torch.zeros(1)), e=torch.Size([1])
    )
    new = {path: torch.ones(1) for path in ("a.0", "b.0", "c.d")}
    rebuilt = rebuild_inputs(kwargs, new)
    assert rebuilt["a"][0] is new["a.0"]
    assert rebuilt["a"][1] == 2
    assert rebuilt["b"] == Pair(new["b.0"], "x")
    assert type(rebuilt["b"]) is Pair
    assert type(rebuilt["c"]) is OrderedDict
    assert rebuilt["c"]["d"] is new["c.d"]
    assert rebuilt["e"] == torch.Size([1])
    assert kwargs["a"][0] is not new["a.0"]  # type: ignore[index]


class Model(nn.Module):
    def forward(self, hidden_states: Any, timestep: Any = None, **more: Any) -> Any: ...


class Positional(nn.Module):
    def forward(self, hidden_states: Any, *more: Any) -> Any: ...


def test_positional_arguments_get_their_names() -> None:
    assert bind(Model().forward, (1, 2), {}) == dict(hidden_states=1, timestep=2)


def test_further_keywords_stay_keywords() -> None:
    assert bind(Model().forward, (1,), dict(scale=3)) == dict(hidden_states=1, timestep=None, scale=3)


def test_a_default_left_out_and_the_same_value_given_are_the_same_call() -> None:
    assert bind(Model().forward, (1,), {}) == bind(Model().forward, (1,), dict(timestep=None))


def test_a_missing_argument_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match=r"hidden_states.*It takes hidden_states, timestep, more"):
        bind(Model().forward, (), dict(timestep=1))


def test_an_argument_given_twice_is_an_error() -> None:
    with pytest.raises(InputError, match=r"multiple values for argument 'hidden_states'"):
        bind(Model().forward, (1,), dict(hidden_states=1))


def test_arguments_that_have_no_name_are_an_error() -> None:
    with pytest.raises(InputError, match=r"pass the inputs by name: more=\(2,\) came"):
        bind(Positional().forward, (1, 2), {})


def test_a_forward_that_is_replaced_on_its_class_is_read_anew() -> None:
    class Model(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    model = Model()
    assert bind(model.forward, (1,), {}) == {"hidden_states": 1}
    Model.forward = lambda self, latents, scale=2: latents  # type: ignore[assignment, method-assign]
    assert bind(model.forward, (1,), {}) == {"latents": 1, "scale": 2}
    model.forward = lambda other: other  # type: ignore[method-assign]
    assert bind(model.forward, (1,), {}) == {"other": 1}
