"""Tensors arrive bit for bit whatever their size, and pieces of several are on their way at once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dit_pipelining.weights import staging
from dit_pipelining.weights.staging import staged

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 64)


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "many pieces": torch.randn(37, 41, generator=draw),
        "one piece": torch.randn(8, generator=draw).to(torch.bfloat16),
        "exactly two": torch.arange(32, dtype=torch.float32),
        "a number": torch.tensor(3.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "flags": torch.rand(70, generator=draw) > 0.5,
        "eight bits": torch.randn(130, generator=draw).to(torch.float8_e4m3fn),
    }


def test_tensors_of_a_file_arrive_in_order_and_bit_for_bit(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "some.safetensors")
    mapped = load_file(tmp_path / "some.safetensors")
    arrived = dict(staged(mapped.items(), CPU))
    assert list(arrived) == list(mapped)
    for name, tensor in tensors().items():
        assert arrived[name].dtype == tensor.dtype
        assert arrived[name].shape == tensor.shape
        assert arrived[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))
        assert not len(tensor.flatten()) or arrived[name].data_ptr() != mapped[name].data_ptr()


def test_a_view_that_is_not_contiguous_arrives_contiguous() -> None:
    tensor = torch.arange(24.0).view(4, 6).T
    [(_, arrived)] = staged([("transposed", tensor)], CPU)
    assert arrived.is_contiguous()
    assert arrived.equal(tensor)


def test_what_fails_in_a_reader_is_raised() -> None:
    with pytest.raises(TypeError, match="meta"):  # NumPy cannot look at it
        list(staged([("good", torch.ones(2)), ("bad", torch.ones(2, device="meta"))], CPU))
