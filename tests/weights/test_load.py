"""A stage's weights are those that `from_pretrained` loads, and no others are read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ModelMixin, WanTransformer3DModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import nn

from dit_pipelining.api import split_model
from dit_pipelining.weights.checkpoint import open_checkpoint
from dit_pipelining.weights.empty import empty_model
from dit_pipelining.weights.load import check_tensors, load_weights, release_weights, tensor_names
from tests.same import assert_same
from tests.weights.test_checkpoint import Opened
from tests.zoo import CASES, build_inputs, build_model

CPU = torch.device("cpu")
WAN = CASES["WanTransformer3D"]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def names_of_modules(model: nn.Module) -> list[str]:
    """What a stage that holds everything would ask for."""
    return [
        *(name for name, _ in model.named_children()),
        *(name for name, _ in model.named_parameters() if "." not in name),
        *(name for name, _ in model.named_buffers() if "." not in name),
    ]


def loaded(cls: Any, folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    model = empty_model(cls, cls.load_config(folder), dtype)
    load_weights(model, names_of_modules(model), open_checkpoint(folder), CPU, dtype)
    return model


def assert_same_tensors(model: nn.Module, expected: nn.Module) -> None:
    actual = dict([*model.named_parameters(), *model.named_buffers()])
    wanted = dict([*expected.named_parameters(), *expected.named_buffers()])
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_and_dtypes_are_those_of_from_pretrained(
    tmp_path: Path, dtype: torch.dtype | None, stored: torch.dtype
) -> None:
    build_model(WAN).to(stored).save_pretrained(tmp_path)  # type: ignore[operator]
    expected = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=dtype)
    model = loaded(WanTransformer3DModel, tmp_path, dtype)
    assert_same_tensors(model, expected)
    kept = {name for name, tensor in model.named_parameters() if tensor.dtype == torch.float32}
    if dtype in (torch.bfloat16, torch.float16):
        assert "scale_shift_table" in kept
        assert "blocks.0.attn1.to_q.weight" not in kept
    inputs = build_inputs(WAN)
    if dtype is None:
        assert_same(model(**inputs), expected(**inputs))


class WithOldNames(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A model whose attention has been renamed since some checkpoints were saved, and that saves a buffer."""

    _supports_gradient_checkpointing = False
    table: torch.Tensor
    scratch: torch.Tensor

    @register_to_config
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"to_q": nn.Linear(width, width)}) for _ in range(2))
        for block in self.blocks:
            block._from_deprecated_attn_block = True  # type: ignore[assignment]
        self.register_buffer("table", torch.zeros(width))
        self.register_buffer("counts", torch.zeros(width, dtype=torch.int64))
        self.register_buffer("scratch", torch.arange(width) / 3, persistent=False)


def save_with_old_names(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = WithOldNames()
    model.table.copy_(torch.arange(4) / 7)
    model.counts.copy_(torch.arange(4))
    model.save_pretrained(folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace(".to_q.", ".query."): tensor for name, tensor in tensors.items()}, file)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_old_names_and_buffers_are_loaded_as_diffusers_does(tmp_path: Path, dtype: torch.dtype | None) -> None:
    save_with_old_names(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert "blocks.0.query.weight" in checkpoint.files
    check_tensors(empty_model(WithOldNames, {}), checkpoint)
    model = loaded(WithOldNames, tmp_path, dtype)
    assert_same_tensors(model, WithOldNames.from_pretrained(tmp_path, torch_dtype=dtype))
    assert model.table.dtype == (dtype or torch.float32)
    assert model.counts.tolist() == [0, 1, 2, 3]


def test_only_the_stages_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model(WAN).save_pretrained(tmp_path, max_shard_size="40KB")  # type: ignore[operator]
    seen: set[str] = set()
    for stage in range(2):
        model = empty_model(WanTransformer3DModel, WanTransformer3DModel.load_config(tmp_path))
        split = split_model(model, 2, build_inputs(WAN), partitioner="uniform")
        weights = split.stages[stage].held_weights
        wanted = tensor_names(model, weights)
        opened = Opened(monkeypatch)
        load_weights(model, weights, open_checkpoint(tmp_path), CPU)
        assert opened.tensors == dict.fromkeys(wanted, 1)
        assert {name for name, p in model.named_parameters() if p.device == CPU} == set(wanted)
        assert {name for name, p in model.named_parameters() if p.is_meta} == {*model.state_dict()} - set(wanted)
        other = "blocks.0." if stage else f"blocks.{len(model.blocks) - 1}."  # type: ignore[arg-type]
        assert not any(name.startswith(other) for name in wanted)
        seen |= set(wanted)
    assert seen == set(model.state_dict())


def test_released_weights_take_no_memory_and_kept_ones_stay() -> None:
    model = build_model(WAN)
    kept = {"blocks.0", "scale_shift_table", "patch_embedding.weight"}
    before = dict(model.named_parameters())
    release_weights(model, kept)
    names = set(tensor_names(model, kept))
    assert {"scale_shift_table", "patch_embedding.weight", "blocks.0.attn1.to_q.weight"} < names
    assert "patch_embedding.bias" not in names
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (name not in names)
        assert (parameter is before[name]) == (name in names)
        assert parameter.shape == before[name].shape
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_released_weights_that_are_tied_are_both_released() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2), "kept": nn.Linear(2, 2)})
    model["other"].weight = model["one"].weight
    release_weights(model, ["kept"])
    assert model["one"].weight.is_meta
    assert model["other"].weight.is_meta
    assert not model["kept"].weight.is_meta
