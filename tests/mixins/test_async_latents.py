"""Latents on their way: any use waits, once, and acts on the tensor."""

import copy
import pickle

import pytest
import torch

from dit_pipelining.mixins import AsyncLatents


class Transfer:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def latents_of(tensor: torch.Tensor, *transfers: Transfer) -> AsyncLatents:
    return AsyncLatents({"latents": tensor}, list(transfers), [])


def test_it_resolves_to_the_very_tensor() -> None:
    tensor = torch.randn(2, 4)
    assert latents_of(tensor)._resolve() is tensor


def test_attributes_are_the_tensor_s() -> None:
    tensor = torch.randn(2, 4, dtype=torch.float64)
    latents = latents_of(tensor)
    assert (latents.shape, latents.dtype, latents.ndim) == (tensor.shape, tensor.dtype, 2)
    assert torch.equal(latents.to(torch.float32), tensor.float())


def test_making_it_waits_for_nothing_and_the_first_use_waits_once() -> None:
    transfers, steps = [Transfer(), Transfer()], []
    latents = AsyncLatents(
        {"latents": torch.ones(3)}, transfers, [lambda: steps.append("first"), lambda: steps.append("second")]
    )
    assert [transfer.waits for transfer in transfers] == [0, 0]
    assert "on their way" in repr(latents)
    assert latents.shape == (3,)
    assert latents.sum() == 3
    assert [transfer.waits for transfer in transfers] == [1, 1]
    assert steps == ["first", "second"]


def test_torch_functions_take_it_also_inside_containers() -> None:
    tensor = torch.randn(2, 4)
    latents = latents_of(tensor)
    assert torch.equal(torch.ones(2, 4) * latents, tensor)
    assert torch.equal(torch.cat([latents, latents]), torch.cat([tensor, tensor]))
    assert torch.equal(torch.stack((latents, tensor)), torch.stack((tensor, tensor)))
    assert torch.equal(torch.add(input=latents, other=latents), tensor + tensor)
    assert torch.equal(torch.where(tensor > 0, latents, latents), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_tensor_shares_memory(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 4).to(dtype)
    converted = torch.as_tensor(latents_of(tensor))
    assert (converted.data_ptr(), converted.dtype) == (tensor.data_ptr(), dtype)


def test_operators_and_indexing() -> None:
    tensor = torch.randn(2, 4)
    latents = latents_of(tensor)
    assert torch.equal(latents * 2 - latents, tensor * 2 - tensor)
    assert torch.equal(1 - latents, 1 - tensor)
    assert torch.equal(-latents, -tensor)
    assert torch.equal(latents[:, :2], tensor[:, :2])
    assert torch.equal(latents == latents, torch.ones(2, 4, dtype=torch.bool))
    assert len(latents) == 2
    assert [row.shape for row in latents] == [(4,), (4,)]


def test_writes_reach_the_tensor() -> None:
    tensor = torch.zeros(2, 4)
    latents = latents_of(tensor)
    latents[0] = 1.0
    latents += 1
    assert tensor[:, 0].tolist() == [2.0, 1.0]
    assert latents is tensor


def test_a_copy_is_the_tensor_s() -> None:
    tensor, transfer = torch.randn(2), Transfer()
    latents = latents_of(tensor, transfer)
    assert torch.equal(pickle.loads(pickle.dumps(latents)), tensor)
    assert torch.equal(copy.deepcopy(latents), tensor)
    assert copy.copy(latents) is tensor
    assert transfer.waits == 1


def test_numpy_sees_the_values() -> None:
    tensor = torch.randn(3)
    assert latents_of(tensor).numpy().tolist() == tensor.tolist()
