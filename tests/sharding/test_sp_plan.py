"""Plans written for vLLM-Omni, and forwards that split by hand."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from dit_pipelining.api import split_model
from dit_pipelining.comm.layout import Layout
from dit_pipelining.errors import ConfigError, InputError
from dit_pipelining.sharding.groups import SequenceGroups, make_sequence_groups
from dit_pipelining.sharding.sequence import apply_sequence_parallel, sp_gather, sp_shard
from dit_pipelining.sharding.sp_plan import SequenceParallelInput, SequenceParallelOutput, read_plan
from tests.distributed import RankPool

WIDTH, HEADS = 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rotated = hidden * table + index[..., None]
        heads = self.qkv(rotated).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return hidden + self.out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Rope(nn.Module):
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(hidden.shape[1], dtype=hidden.dtype)
        return places[:, None].cos(), places / 10


class Planned(nn.Module):
    """As vLLM-Omni's models are written: a plan on the class, `num_heads` nowhere."""

    _sp_plan: ClassVar[dict[str, Any]] = {
        "rope": {0: SequenceParallelInput(split_dim=0, expected_dims=2, split_output=True)},
        "blocks.0": {"hidden": SequenceParallelInput(split_dim=1, expected_dims=3)},
        "blocks.*": {"index": SequenceParallelInput(split_dim=0, expected_dims=1)},
        "head": SequenceParallelOutput(gather_dim=1, expected_dims=3),
    }

    def __init__(self) -> None:
        super().__init__()
        self.rope = Rope()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        table, index = self.rope(hidden)
        for block in self.blocks:
            hidden = block(hidden, table, index)
        return self.head(hidden)


class ByHand(Planned):
    """Splits and joins in its forward."""

    _sp_plan: ClassVar[dict[str, Any]] = {}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        table, index = self.rope(hidden)
        hidden, table, index = sp_shard(hidden, dim=1), sp_shard(table, dim=0), sp_shard(index, dim=0)
        for block in self.blocks:
            hidden = block(hidden, table, index)
        return sp_gather(self.head(hidden), dim=1)


class Padded(Planned):
    _sp_plan: ClassVar[dict[str, Any]] = {
        **Planned._sp_plan,
        "blocks.0": {"hidden": SequenceParallelInput(split_dim=1, expected_dims=3, auto_pad=True)},
    }


def build(cls: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls().eval().requires_grad_(False)


def tokens(count: int) -> torch.Tensor:
    return torch.randn(2, count, WIDTH, generator=torch.Generator().manual_seed(count))


def groups() -> SequenceGroups:
    ulysses = dist.get_world_size()
    return make_sequence_groups(Layout(ulysses=ulysses), dist.get_rank(), torch.device("cpu"), timedelta(seconds=60))


def run(cls: type[nn.Module], count: int) -> None:
    expected = build(cls)(tokens(count))  # without groups sp_shard and sp_gather do nothing
    torch.testing.assert_close(expected, build(Planned)(tokens(count)), rtol=0, atol=0)
    model = build(cls)
    apply_sequence_parallel(model, groups())
    torch.testing.assert_close(model(tokens(count)), expected, rtol=1e-5, atol=1e-5)
    split = split_model(model, 2, dict(hidden=tokens(count)), partitioner="uniform")
    torch.testing.assert_close(split(tokens(count)), expected, rtol=1e-5, atol=1e-5)
    [crossing] = split.boundaries
    assert (2, len(tokens(count)[0].tensor_split(dist.get_world_size())[dist.get_rank()]), WIDTH) in [
        value.shape for value in crossing
    ]


def run_all() -> str:
    run(Planned, 12)
    run(ByHand, 12)
    run(Padded, 13)
    model = build(ByHand)
    apply_sequence_parallel(model, groups())
    with pytest.raises(InputError) as odd:
        model(tokens(13))
    return str(odd.value)


def test_plans_of_vllm_omni_and_forwards_that_split_by_hand_give_what_all_tokens_give(ranks: RankPool) -> None:
    for error in ranks.run(2, run_all):
        assert "13 tokens cannot be split evenly" in error


def test_a_plan_is_read_for_every_module_it_means() -> None:
    found = read_plan(build(Planned), Planned._sp_plan)
    assert sorted(found) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "head", "rope"]
    assert sorted(found["blocks.0"].inputs) == ["hidden", "index"]
    assert list(found["blocks.1"].inputs) == ["index"]
    assert list(found["rope"].outputs) == [0]


def test_a_plan_of_a_longer_model_fits_a_shorter_one() -> None:
    joined = SequenceParallelOutput(gather_dim=1)
    assert sorted(read_plan(build(Planned), {f"blocks.{i}": joined for i in range(40)})) == [
        f"blocks.{i}" for i in range(4)
    ]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tail": SequenceParallelOutput(gather_dim=1)}, "names 'tail', which it lacks"),
        ({"head": 3}, "expected SequenceParallelOutput, not 3"),
        ({"rope": {0: SequenceParallelInput(split_dim=0)}}, "split_output=True"),
        ({"blocks.0": {"hidden": None}}, "expected SequenceParallelInput, not None"),
        ({"blocks.0": {"hidden": SimpleNamespace(split_dim=1, text_len_source=3)}}, "Split the text as well"),
        ([], "is no dict"),
    ],
)
def test_a_plan_that_cannot_be_read_says_where(plan: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plan(build(Planned), plan)
