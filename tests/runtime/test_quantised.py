"""Quantised transformers: each stage makes or reads its own tensors, and results are those of one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import PipelineQuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from dit_pipelining.api import ParallelConfig, load_pipeline, parallelize
from dit_pipelining.errors import CheckpointError, ConfigError, ModelNotFoundError
from tests import checkpoints
from tests.distributed import RankPool
from tests.layouts import LAYOUTS

DTYPE = torch.bfloat16
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.flux(tmp_path_factory.mktemp("quantised") / "plain")
    checkpoints.write_gguf(folder)
    return folder


@pytest.fixture(scope="module")
def stored(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a transformer that is stored quantised."""
    folder = tmp_path_factory.mktemp("quantised") / "stored"
    pipeline = diffusers.DiffusionPipeline.from_pretrained(plain, dtype=DTYPE, quantization_config=checkpoints.int8())
    pipeline.save_pretrained(folder)
    return folder


def paint(pipeline: Any, height: int = 8) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    images: torch.Tensor = pipeline(
        "a red cat",
        negative_prompt="moon",
        true_cfg_scale=3.0,
        height=height,
        width=8,
        max_sequence_length=16,
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(7),
    ).images
    return images


def held_bytes(model: nn.Module) -> int:
    weights = [tensor for tensor in nn.Module.parameters(model) if tensor.device.type != "meta"]
    return sum(part.nbytes for weight in weights for part in parts(weight))


def parts(weight: torch.Tensor) -> list[torch.Tensor]:
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


def gguf_of(plain: Path, layout: str | None) -> Any:
    """What is passed as `transformer=`."""
    path = plain / "q8.gguf"
    if layout is not None:
        return path
    return diffusers.FluxTransformer2DModel.from_single_file(
        str(path),
        config=str(plain / "transformer"),
        torch_dtype=DTYPE,
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=DTYPE),
    )


def session(plain: Path, stored: Path, layout: str | None) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Images of transformers that are quantised while they are loaded, stored quantised, in memory, and in a file."""
    config = ParallelConfig(**LAYOUTS[layout]) if layout else None
    images, sizes = {}, {}
    for name, folder, options in (
        ("while loading", plain, dict(quantization_config=checkpoints.int8())),
        ("stored", stored, {}),
        ("gguf", plain, dict(transformer=gguf_of(plain, layout))),
    ):
        if config is None:
            pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=DTYPE, **options)
        else:
            pipeline = load_pipeline(folder, config, dtype=DTYPE, **options)
        images[name] = paint(pipeline)
        images[f"{name}, larger"] = paint(pipeline, height=16)  # captured when each rank has its own stage only
        sizes[name] = held_bytes(pipeline.transformer)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(stored, dtype=DTYPE)
    images["memory"] = paint(pipeline if config is None else parallelize(pipeline, config))
    images["plain"] = paint(diffusers.DiffusionPipeline.from_pretrained(plain, dtype=DTYPE))
    return images, sizes


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-cfg2", marks=pytest.mark.full)])
def test_stages_of_a_quantised_transformer_give_the_bits_of_the_whole_and_hold_their_part_of_it(
    ranks: RankPool, plain: Path, stored: Path, layout: str
) -> None:
    [(images, whole)] = ranks.run(1, session, plain, stored, None)
    assert not torch.equal(images["plain"], images["while loading"])
    assert not torch.equal(images["plain"], images["gguf"])
    results = ranks.run(4 if layout == "pp2-cfg2" else 2, session, plain, stored, layout)
    for own, _ in results:
        for name, image in images.items():
            torch.testing.assert_close(own[name], image, rtol=0.0, atol=0.0, msg=f"{name} differs")
    for name, size in whole.items():
        first, second = (held[name] for _, held in results[:2])
        assert max(first, second) < size <= first + second < 1.2 * size  # a few glue layers are on both


def cast_session(plain: Path, layout: str | None) -> dict[str, torch.Tensor]:
    """Images with layers that cast their weights, from before the split, and from between two calls."""
    casting = dict(storage_dtype=torch.float8_e4m3fn, compute_dtype=DTYPE)
    config = ParallelConfig(**LAYOUTS[layout]) if layout else None
    pipeline = diffusers.DiffusionPipeline.from_pretrained(plain, dtype=DTYPE)
    pipeline.transformer.enable_layerwise_casting(**casting)
    seen = {"before the split": paint(pipeline if config is None else parallelize(pipeline, config))}
    if config is None:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(plain, dtype=DTYPE)
    else:
        pipeline = load_pipeline(plain, config, dtype=DTYPE)
    embeds, pooled, _ = pipeline.encode_prompt("a red cat", "a red cat", max_sequence_length=16)
    prompt = dict(prompt_embeds=embeds, pooled_prompt_embeds=pooled)
    seen["uncast"] = paint_prompt(pipeline, prompt)
    pipeline.transformer.enable_layerwise_casting(**casting)
    seen["same prompt"] = paint_prompt(pipeline, prompt)
    seen["larger"] = paint(pipeline, height=16)
    return seen


def paint_prompt(pipeline: Any, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
    """By embeddings, which stay the same tensors from call to call."""
    pipeline.set_progress_bar_config(disable=True)
    options: dict[str, Any] = dict(height=8, width=8, num_inference_steps=2, output_type="latent")
    images: torch.Tensor = pipeline(**prompt, **options, generator=torch.Generator().manual_seed(7)).images
    return images


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-cfg2", marks=pytest.mark.full)])
def test_layers_that_cast_their_weights_do_so_on_each_rank(ranks: RankPool, plain: Path, layout: str) -> None:
    [expected] = ranks.run(1, cast_session, plain, None)
    assert not torch.equal(expected["uncast"], expected["same prompt"])
    for results in ranks.run(4 if layout == "pp2-cfg2" else 2, cast_session, plain, layout):
        assert [name for name, image in expected.items() if not torch.equal(results[name], image)] == []


# ---- what cannot be --------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> ParallelConfig:
    """As if launched with two processes; nothing here gets as far as meeting the other one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    return ParallelConfig(pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("rebalance", dict(pipeline_parallel_size=2, rebalance=True)),
        ("tensor_parallel_size", dict(pipeline_parallel_size=1, tensor_parallel_size=2)),
        ("use_hsdp", dict(pipeline_parallel_size=1, cfg_parallel_size=2, use_hsdp=True)),
    ],
)
def test_what_would_cut_or_move_quantised_weights_is_refused(
    stored: Path, two_ranks: ParallelConfig, option: str, config: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"{option}: the weights of 'transformer'.*quantised"):
        load_pipeline(stored, ParallelConfig(**config), dtype=DTYPE)


def test_casts_of_layers_that_are_compiled_are_refused(plain: Path, two_ranks: ParallelConfig) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(plain, dtype=DTYPE)
    pipeline.transformer.enable_layerwise_casting(compute_dtype=DTYPE)
    with pytest.raises(ConfigError, match=r"compile: layers of 'transformer'.* cast their weights"):
        parallelize(pipeline, ParallelConfig(pipeline_parallel_size=2, compile="blocks"))


def test_a_configuration_for_something_else_is_refused(plain: Path, two_ranks: ParallelConfig) -> None:
    own = checkpoints.int8().quant_mapping["transformer"]
    with pytest.raises(ConfigError, match=r"TorchAoConfig; for a pipeline it has to be.*PipelineQuantizationConfig"):
        load_pipeline(plain, two_ranks, quantization_config=own)
    other = PipelineQuantizationConfig(quant_mapping={"unet": own})
    with pytest.raises(ConfigError, match=r"names unet, but the pipeline's components are .*transformer"):
        load_pipeline(plain, two_ranks, quantization_config=other)


def with_config(stored: Path, tmp_path: Path, quantisation: dict[str, Any]) -> Path:
    """The folder with another description of how it is quantised."""
    folder = copied(stored, tmp_path)
    path = folder / "transformer" / "config.json"
    content = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps(content | {"quantization_config": quantisation}))
    return folder


def copied(folder: Path, target: Path) -> Path:
    for path in folder.rglob("*"):
        if path.is_file():
            own = target / path.relative_to(folder)
            own.parent.mkdir(parents=True, exist_ok=True)
            own.symlink_to(path)
    return target


def test_a_method_whose_tensors_are_not_made_one_by_one_is_refused(
    stored: Path, tmp_path: Path, two_ranks: ParallelConfig
) -> None:
    folder = with_config(stored, tmp_path, {"quant_method": "quanto", "weights_dtype": "int8"})
    with pytest.raises(ConfigError, match=r"quanto.*torchao, bitsandbytes"):
        load_pipeline(folder, two_ranks)


def test_a_library_that_is_missing_is_said(stored: Path, tmp_path: Path, two_ranks: ParallelConfig) -> None:
    folder = with_config(stored, tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ConfigError, match="transformer cannot be quantised: "):
        load_pipeline(folder, two_ranks)


def test_a_quantised_checkpoint_that_lacks_a_tensor_is_refused(
    stored: Path, tmp_path: Path, two_ranks: ParallelConfig
) -> None:
    folder = copied(stored, tmp_path)
    path = folder / "transformer" / WEIGHTS
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    names = json.loads(metadata["tensor_names"])
    lost = "single_transformer_blocks.2.attn.to_q.weight"
    metadata["tensor_names"] = json.dumps([name for name in names if name != lost])
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(lost[:-6])}
    path.unlink()
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=rf"torchao: it lacks 1 tensor: {lost}"):
        load_pipeline(folder, two_ranks)


Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda own: {}, "but 0 tensors"),
        (lambda own: {f"blocks.{name}": tensor for name, tensor in own.items()}, "such as 'blocks.time_text_embed"),
        (lambda own: {name: tensor for name, tensor in own.items() if name != "proj_out.weight"}, "tensors, such as"),
        (lambda own: {**own, "proj_out.bias": own["proj_out.bias"][:3]}, "proj_out.bias expected shape"),
        (lambda own: {**own, "x_embedder.weight": torch.ones(64, 32)}, "x_embedder.weight has an expected shape"),
    ],
    ids=["nothing", "other names", "one lacks", "smaller", "larger and quantised"],
)
def test_a_gguf_file_whose_tensors_do_not_fit_is_refused(
    plain: Path, tmp_path: Path, two_ranks: ParallelConfig, changed: Callable[[Tensors], Tensors], told: str
) -> None:
    own = diffusers.FluxTransformer2DModel.from_pretrained(plain / "transformer").state_dict()
    path = tmp_path / "other.gguf"
    checkpoints.write_tensors(path, changed(own))
    with pytest.raises(
        CheckpointError, match=rf"other.gguf does not hold .*FluxTransformer2DModel.*{told}.*Give the GGUF"
    ):
        load_pipeline(plain, two_ranks, transformer=path)


def test_a_gguf_file_is_not_quantised_again(plain: Path, two_ranks: ParallelConfig) -> None:
    with pytest.raises(ConfigError, match=r"q8.gguf.* is quantised already, but .* asks for TorchAoConfig"):
        load_pipeline(plain, two_ranks, transformer=plain / "q8.gguf", quantization_config=checkpoints.int8())


def test_a_file_that_is_no_transformer_is_refused(plain: Path, tmp_path: Path, two_ranks: ParallelConfig) -> None:
    with pytest.raises(ConfigError, match="only transformers can be given as files"):
        load_pipeline(plain, two_ranks, vae=str(plain / "q8.gguf"))
    with pytest.raises(ConfigError, match=r"only as GGUF files"):
        load_pipeline(plain, two_ranks, transformer=str(plain / "transformer" / WEIGHTS))
    with pytest.raises(ModelNotFoundError, match="no such file"):
        load_pipeline(plain, two_ranks, transformer=str(tmp_path / "other.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGU")
    with pytest.raises(CheckpointError, match=r"cannot read .*broken\.gguf"):
        load_pipeline(plain, two_ranks, transformer=str(tmp_path / "broken.gguf"))
    whole = (plain / "q8.gguf").read_bytes()
    for size in (0, 12, 30, 200, 2000, len(whole) // 2):  # in each part of the header, and in the tensors
        cut = tmp_path / f"cut{size}.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"cannot read .*{cut.name}"):
            load_pipeline(plain, two_ranks, transformer=cut)
