"""A packed value comes back as it was: types, layout in memory, shared memory; a module comes back without weights."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLFlux2
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from transformers.modeling_outputs import BaseModelOutput

from dit_pipelining.comm.packing import pack, tensor_in, unpack
from tests.same import assert_same


def there_and_back(value: Any) -> Any:
    packed, flats = pack(value)
    return unpack(packed, tensor_in([flat.clone() for flat in flats]))


@dataclass
class Pair:
    """As pipelines' own outputs."""

    first: torch.Tensor
    second: Any


WHOLE = torch.arange(240, dtype=torch.float32).reshape(2, 10, 12)


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, "two", [3.0, {"four": None}]),
        WHOLE,
        WHOLE[:, 3:7, ::2],
        WHOLE.transpose(0, 2),
        WHOLE[:, :0],
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.zeros(1).expand(4, 5),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3).to(torch.bfloat16),
        BaseModelOutput(last_hidden_state=WHOLE, hidden_states=(WHOLE[0], WHOLE)),
    ],
)
def test_values_come_back_with_their_layout(value: Any) -> None:
    result = there_and_back(value)
    assert_same(result, value)
    if isinstance(value, torch.Tensor):
        assert result.stride() == value.stride()


def test_views_of_one_memory_stay_views_of_one_memory() -> None:
    result = there_and_back(Pair(WHOLE[0], [WHOLE[:, 5], WHOLE[0]]))
    assert type(result) is Pair
    result.second[0].fill_(-1.0)
    assert torch.equal(result.first[5], torch.full((12,), -1.0))
    assert WHOLE.min() == 0


def test_alignment_is_kept() -> None:
    part = WHOLE.flatten()[19:]
    result = there_and_back(part)
    assert result.storage_offset() * result.itemsize % 64 == part.storage_offset() * part.itemsize % 64


def test_only_the_part_in_use_travels() -> None:
    _, flats = pack([WHOLE[1, 2], WHOLE[1, 4]])
    assert [flat.numel() for flat in flats] == [3 * 48 + (144 * 4) % 64]


def test_a_distribution_is_sampled_where_it_arrives() -> None:
    distribution = DiagonalGaussianDistribution(torch.randn(2, 8, 4, 4))
    result = there_and_back(distribution)
    one, other = (d.sample(torch.Generator().manual_seed(0)) for d in (distribution, result))
    assert torch.equal(one, other)


def test_a_module_without_weights_keeps_all_else() -> None:
    blocks = dict(
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",), block_out_channels=(4,)
    )
    vae = AutoencoderKLFlux2(**blocks, norm_num_groups=1, latent_channels=2, layers_per_block=1).eval()
    vae.bn.running_mean.normal_()
    vae.enable_tiling()
    packed, flats = pack(vae, weights=False)
    assert sum(flat.numel() for flat in flats) < 200
    result = unpack(packed, tensor_in(flats))
    assert all(parameter.device.type == "meta" for parameter in result.parameters())
    assert {name: p.shape for name, p in result.named_parameters()} == {n: p.shape for n, p in vae.named_parameters()}
    assert_same(dict(result.named_buffers()), dict(vae.named_buffers()))
    assert (result.config, result.dtype, result.training, result.use_tiling) == (vae.config, vae.dtype, False, True)
