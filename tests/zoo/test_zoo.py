"""The table itself: it covers every class, and its cases are fit for comparing a split with the whole."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo import CASES, COVERED_CLASSES, FAMILIES, NOT_COVERED, Case, build_inputs, build_model, case_names
from tests.zoo.case import dit_classes


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of nested lists, tuples, dictionaries and attributes of objects, depth first."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))


def run(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """What the call leaves behind: floating tensors of its output, or of the caches among its inputs."""
    with torch.no_grad():
        outputs = list(tensors_in(model(**inputs)))
    left = outputs or list(tensors_in([value for name, value in inputs.items() if "cache" in name]))
    return [tensor.clone() for tensor in left if tensor.is_floating_point()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Outermost module lists whose members all have parameters."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer in found)
        if isinstance(module, nn.ModuleList) and not inside and all(any(True for _ in m.parameters()) for m in module):
            found[name] = module
    return found


def test_every_class_is_covered_or_has_a_reason() -> None:
    classes = set(dit_classes())
    assert len(classes) > 70
    assert not COVERED_CLASSES & set(NOT_COVERED)
    assert classes - COVERED_CLASSES - set(NOT_COVERED) == set()
    assert all(len(reason) > 20 for reason in NOT_COVERED.values())


def test_no_case_hides_another_of_the_same_name() -> None:
    assert len(case_names()) == sum(len(family.CASES) for family in FAMILIES)


@pytest.fixture(scope="module", params=case_names())
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def model(case: Case) -> nn.Module:
    """One model for the tests of a case, which leave it as it was."""
    return build_model(case)


def test_output_is_finite_varied_repeatable_and_depends_on_the_input(case: Case, model: nn.Module) -> None:
    outputs = run(model, build_inputs(case))
    assert outputs
    for output in outputs:
        assert output.isfinite().all()
        assert output.std() > 1e-4
    assert equal(run(model, build_inputs(case)), outputs)
    changed = build_inputs(case)
    next(tensor for tensor in tensors_in(changed) if tensor.is_floating_point()).mul_(1.5)
    assert not equal(run(model, changed), outputs)


def test_every_block_changes_the_output(case: Case, model: nn.Module) -> None:
    outputs = run(model, build_inputs(case))
    lists = block_lists(model)
    assert max(len(blocks) for blocks in lists.values()) >= 4
    idle = set()
    for list_name, blocks in lists.items():
        for index, block in enumerate(blocks):
            before = [parameter.clone() for parameter in block.parameters()]
            for parameter in block.parameters():
                parameter.mul_(1.25)
            if equal(run(model, build_inputs(case)), outputs):
                idle.add(f"{list_name}.{index}")
            for parameter, value in zip(block.parameters(), before, strict=True):
                parameter.copy_(value)
    named = {f"{name}.{index}" for name in case.idle & set(lists) for index in range(len(lists[name]))}
    assert idle == named | (case.idle - set(lists))


def test_same_seed_gives_the_same_model_and_inputs(case: Case, model: nn.Module) -> None:
    parameters = dict(build_model(case).named_parameters())
    for key, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, parameters[key]), key
        assert parameter.numel() < 2 or parameter.min() < parameter.max(), key
    one, two = build_inputs(case), build_inputs(case)
    assert equal(list(tensors_in(one)), list(tensors_in(two)))
    assert set(one) <= set(inspect.signature(model.forward).parameters)
