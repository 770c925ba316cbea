"""Finding and reading the tensors of a checkpoint's files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dit_pipelining.errors import CheckpointError
from dit_pipelining.weights import checkpoint as checkpoint_module
from dit_pipelining.weights.checkpoint import Checkpoint, open_checkpoint
from dit_pipelining.weights.empty import empty_model
from dit_pipelining.weights.load import check_tensors
from tests.zoo import CASES, build_model

CONFIG = CASES["WanTransformer3D"].init
SINGLE = "diffusion_pytorch_model.safetensors"
CPU = torch.device("cpu")


def saved(folder: Path, **options: Any) -> WanTransformer3DModel:
    model: WanTransformer3DModel = build_model(CASES["WanTransformer3D"])  # type: ignore[assignment]
    model.save_pretrained(folder, **options)
    return model


class Opened:
    """Wraps safe_open and counts which files are opened and which tensors are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: Counter[str] = Counter()
        self.tensors: Counter[str] = Counter()
        monkeypatch.setattr(checkpoint_module, "safe_open", self)

    def __call__(self, path: Path, **options: Any) -> Any:
        self.files[Path(path).name] += 1
        return _CountingFile(safe_open(path, **options), self.tensors)


class _CountingFile:
    def __init__(self, file: Any, tensors: Counter[str]) -> None:
        self._file = file
        self._tensors = tensors

    def __enter__(self) -> "_CountingFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        self._tensors[name] += 1
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


def assert_reads(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    expected = model.state_dict()
    read = dict(checkpoint.read(checkpoint.files, CPU))
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}


def test_a_single_file_is_read(tmp_path: Path) -> None:
    model = saved(tmp_path)
    assert (tmp_path / SINGLE).is_file()
    assert_reads(open_checkpoint(tmp_path), model)


def test_several_files_with_an_index_are_read_and_each_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path, max_shard_size="40KB")
    files = [path.name for path in tmp_path.glob("*.safetensors")]
    assert len(files) > 2
    assert_reads(open_checkpoint(tmp_path), model)
    opened = Opened(monkeypatch)
    checkpoint = open_checkpoint(tmp_path)
    for _ in range(2):
        check_tensors(empty_model(WanTransformer3DModel, CONFIG), checkpoint)
    assert opened.files == dict.fromkeys(files, 1)
    assert not opened.tensors  # headers only
    list(checkpoint.read(checkpoint.files, CPU))
    assert opened.files == dict.fromkeys(files, 2)


@pytest.mark.parametrize("options", [{}, dict(max_shard_size="40KB")])
def test_a_variant_is_another_set_of_files(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = saved(tmp_path, **options)
    for parameter in plain.parameters():
        parameter.data += 1
    plain.save_pretrained(tmp_path, variant="fp16", **options)
    assert_reads(open_checkpoint(tmp_path, "fp16"), plain)
    with pytest.raises(AssertionError):
        assert_reads(open_checkpoint(tmp_path), plain)
    with pytest.raises(CheckpointError, match="Leave `variant` out"):
        open_checkpoint(tmp_path, "fp8")


def test_pickled_weights_alone_say_how_to_save_them_again(tmp_path: Path) -> None:
    saved(tmp_path, safe_serialization=False)
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.bin.*safe_serialization=True"):
        open_checkpoint(tmp_path)


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"expected {SINGLE} .*found nothing"):
        open_checkpoint(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"cannot read .*{SINGLE}.*again"):
        open_checkpoint(tmp_path)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(b"no tensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=f"cannot read .*{shard.name}"):
        check_tensors(empty_model(WanTransformer3DModel, CONFIG), checkpoint)
    with pytest.raises(CheckpointError, match=f"cannot read .*{shard.name}"):
        list(checkpoint.read(checkpoint.files, CPU))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of its files: {shard.name}"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_its_shard_does_not_hold_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    lost = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, shard)
    with pytest.raises(CheckpointError, match=f"{shard.name}.*{lost}"):
        check_tensors(empty_model(WanTransformer3DModel, CONFIG), open_checkpoint(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    saved(tmp_path, max_shard_size="40KB")
    index = tmp_path / f"{SINGLE}.index.json"
    index.write_text(content)
    with pytest.raises(CheckpointError, match=f"{index.name} is no index"):
        open_checkpoint(tmp_path)


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    model = saved(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del tensors["proj_out.bias"]
    tensors["proj_in.bias"] = torch.zeros(3)
    tensors["patch_embedding.bias"] = torch.zeros(1, 2, dtype=torch.float64)
    tensors["scale_shift_table"] = torch.zeros(5)
    tensors["blocks.0.ffn.net.2.bias"] = tensors["blocks.0.ffn.net.2.bias"].double()  # another dtype is no error
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(empty_model(WanTransformer3DModel, CONFIG), open_checkpoint(tmp_path))
    width = model.patch_embedding.bias.numel()
    assert (
        f"does not fit WanTransformer3DModel: it lacks 1 tensor: proj_out.bias and has unexpected 1 tensor: proj_in.bias "
        f"and has other shapes for 2 tensors: patch_embedding.bias ([1, 2] instead of [{width}]), "
        f"scale_shift_table ([5] instead of [1, 2, {width}])." in str(caught.value)
    )


def test_tensors_that_the_class_ignores_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path)
    save_file({**model.state_dict(), "norm_added_q.weight": torch.zeros(2)}, tmp_path / SINGLE)
    ignored = WanTransformer3DModel._keys_to_ignore_on_load_unexpected
    assert ignored == ["norm_added_q"]
    check_tensors(empty_model(WanTransformer3DModel, CONFIG), open_checkpoint(tmp_path))
    monkeypatch.setattr(WanTransformer3DModel, "_keys_to_ignore_on_load_unexpected", None)
    with pytest.raises(CheckpointError, match=r"unexpected 1 tensor: norm_added_q\.weight"):
        check_tensors(empty_model(WanTransformer3DModel, CONFIG), open_checkpoint(tmp_path))


def test_the_index_decides_where_a_tensor_is(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="40KB")
    weight_map = json.loads((tmp_path / f"{SINGLE}.index.json").read_text())["weight_map"]
    files = open_checkpoint(tmp_path).files
    assert {name: path.name for name, path in files.items()} == weight_map
