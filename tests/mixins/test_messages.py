"""Dictionaries of tensors between ranks: exact, one message as long as layouts stay, in order whatever is waited for first."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dit_pipelining.mixins import get_pp_group
from dit_pipelining.mixins.messages import WINDOW, OutOfStepError
from tests.distributed import RankPool
from tests.mixins.pipelines import on_groups


def payload(i: int) -> dict[str, Any]:
    """Messages whose shapes change between small and large, with everything that a message can hold."""
    generator = torch.Generator().manual_seed(i)
    size = (4, 300, 7, 300)[i % 4] if i < 30 else 16
    tensor = torch.randn((2, size, 3), generator=generator)
    return {
        "hidden_states": tensor,
        "channels_last": torch.randn((1, 3, 4, size), generator=generator).to(memory_format=torch.channels_last),
        "strided": tensor[:, ::2],
        "half": tensor.bfloat16(),
        "mask": tensor > 0,
        "scalar": torch.tensor(i),
        "empty": torch.empty(0, 3),
        "number": i if i < 30 else 1,
        "flag": True,
        "name": "cond",
        "nothing": None,
    }


def exchange(count: int, ahead: int) -> Any:
    group = get_pp_group()
    if group.is_first_rank:
        for i in range(count):
            sent = payload(i)
            (handle,) = group.isend_tensor_dict(sent)
            sent["hidden_states"].fill_(-1)  # it is copied already
            handle.wait()
        return group.sent.messages, group.sent.extras
    received, posted = [], []
    for i in range(count):
        tensors, (handle,), after = group.irecv_tensor_dict()
        assert after == []
        posted.append((tensors, handle))
        if len(posted) == ahead or i == count - 1:
            posted[-1][1].wait()  # the last first: the others before it are there then
            received += [dict(tensors) for tensors, _ in posted]
            for _, each in posted:
                each.wait()
            posted = []
    return received


@pytest.mark.parametrize("ahead", [1, 3, WINDOW + 5])
def test_messages_arrive_exactly_and_in_order(ranks: RankPool, ahead: int) -> None:
    (messages, extras), received = ranks.run(2, on_groups, 2, 1, exchange, 60, ahead)
    assert messages == 60
    assert extras == 2 * 30 + 1 + WINDOW  # described as long as they change, announced once more in each place
    for i, got in enumerate(received):
        expected = payload(i)
        assert list(got) == list(expected)
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape)
                assert torch.equal(got[name], value)
            else:
                assert got[name] == value
                assert type(got[name]) is type(value)
        assert got["channels_last"].is_contiguous(memory_format=torch.channels_last)


def cannot_send() -> str:
    with pytest.raises(TypeError) as error:
        get_pp_group().isend_tensor_dict({"latents": (torch.ones(1), torch.ones(1))})
    return str(error.value)


def test_what_cannot_be_sent_is_named(ranks: RankPool) -> None:
    assert "'latents' is a tuple" in ranks.run(2, on_groups, 2, 1, cannot_send)[0]


def out_of_step() -> str:
    group = get_pp_group()
    if group.is_first_rank:
        words = torch.tensor([0x6469745F7070, 5, 0, 0, 0, 0, 0, 0])
        dist.send(words.view(torch.uint8), group.next_rank, group=group.cpu_group)
        return ""
    with pytest.raises(OutOfStepError) as error:
        group.recv_tensor_dict()
    return str(error.value)


def test_ranks_out_of_step_are_told(ranks: RankPool) -> None:
    text = ranks.run(2, on_groups, 2, 1, out_of_step)[1]
    assert "expected message 0 from rank 0, got its message 5" in text
    assert "same denoising loop" in text


def around() -> Any:
    """Everyone to everyone, by place."""
    group, rank = get_pp_group(), dist.get_rank()
    others = [other for other in range(group.world_size) if other != rank]
    handles = [
        handle for other in others for handle in group.isend_tensor_dict({"x": torch.tensor(10 * rank + other)}, other)
    ]
    values = [int(group.recv_tensor_dict(other)["x"]) for other in others]
    for handle in handles:
        handle.wait()
    with pytest.raises(ValueError, match=f"rank {rank} of a group of 3 cannot send to rank {rank}"):
        group.isend_tensor_dict({}, dst=rank)
    return values


def test_any_rank_of_the_group_can_be_reached(ranks: RankPool) -> None:
    assert ranks.run(3, on_groups, 3, 1, around) == [[10, 20], [1, 21], [2, 12]]


def alone() -> Any:
    group = get_pp_group()
    tensor = torch.ones(2)
    return (
        group.isend_tensor_dict({"x": tensor}),
        group.irecv_tensor_dict(),
        group.all_gather(tensor),
        group.broadcast(tensor),
    )


def test_a_group_of_one_sends_nothing(ranks: RankPool) -> None:
    sent, received, gathered, broadcast = ranks.run(1, on_groups, 1, 1, alone)[0]
    assert (sent, received) == ([], ({}, [], []))
    assert torch.equal(gathered, broadcast)
