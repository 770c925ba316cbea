"""Text encoders split over ranks give every rank what they give in one process, to the rounding of sums over ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

from dit_pipelining.api import ParallelConfig, generate, load_pipeline, parallelize
from dit_pipelining.errors import ConfigError
from dit_pipelining.runtime.owned import on_this_rank
from dit_pipelining.weights.checkpoint import Checkpoint
from tests import checkpoints
from tests.distributed import RankPool, RanksFailedError
from tests.pipelines import CASES
from tests.pipelines.case import build_pipeline
from tests.sharding.test_tensor import largest_error

TOLERANCE = 1e-5
"""Of float32 results, relative to the largest value."""

CALLS: dict[str, dict[str, Any]] = {
    "wan": dict(prompt="a red cat", negative_prompt="blue", height=16, width=16, num_frames=5, max_sequence_length=16),
    "sd3": dict(prompt="a green square", negative_prompt="red", height=16, width=16, max_sequence_length=16),
    "qwen": dict(
        prompt="a red cat", negative_prompt="blue", height=32, width=32, true_cfg_scale=2.0, max_sequence_length=16
    ),
}
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("text")
    qwen = root / "qwen"
    build_pipeline(CASES["QwenImagePipeline"]).save_pretrained(qwen)
    return {"wan": checkpoints.wan(root / "wan"), "sd3": checkpoints.sd3(root / "sd3"), "qwen": qwen}


def latents(pipeline: Any, name: str, **more: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    call = {**CALLS[name], "num_inference_steps": 2, "output_type": "latent", **more}
    found: torch.Tensor = pipeline(generator=torch.Generator().manual_seed(7), **call)[0]
    return found


def weights(model: nn.Module) -> int:
    """Bytes of a model's weights on this rank."""
    held = {id(own): own.nbytes for own in model.parameters() if own.device.type != "meta"}
    return sum(held.values())


def spread(jobs: list[tuple[str, Path, dict[str, Any], bool]]) -> list[Any]:
    """For each job: latents, the weights of each encoder here, and how many bytes of its files were read."""
    found = []
    for name, folder, config, in_memory in jobs:
        read: dict[str, int] = {}
        original = Checkpoint.read

        def counted(self: Checkpoint, *args: Any, read: dict[str, int] = read, original: Any = original) -> Any:
            for key, tensor in original(self, *args):
                read[self.folder.name] = read.get(self.folder.name, 0) + tensor.nbytes
                yield key, tensor

        Checkpoint.read = counted  # type: ignore[method-assign]
        try:
            pipeline = (
                parallelize(diffusers.DiffusionPipeline.from_pretrained(folder), ParallelConfig(**config))
                if in_memory
                else load_pipeline(folder, ParallelConfig(**config))
            )
            result = latents(pipeline, name)
        finally:
            Checkpoint.read = original  # type: ignore[method-assign]
        encoders = {key: getattr(pipeline, key) for key in ENCODERS if getattr(pipeline, key, None) is not None}
        found.append((result, {key: weights(own) for key, own in encoders.items()}, read))
    return found


TWO = dict(pipeline_parallel_size=2, text_encoder_tp_size=2)
JOBS: dict[int, list[tuple[str, dict[str, Any], bool]]] = {
    2: [("sd3", TWO, False), ("qwen", TWO, False), ("wan", TWO, True)],
    4: [
        ("sd3", dict(pipeline_parallel_size=2, cfg_parallel_size=2, text_encoder_tp_size=4), False),
        ("qwen", dict(pipeline_parallel_size=2, cfg_parallel_size=2, text_encoder_tp_size=2), False),
        ("wan", dict(pipeline_parallel_size=2, ulysses_degree=2, text_encoder_tp_size={"text_encoder": 4}), False),
        ("sd3", dict(pipeline_parallel_size=2, tensor_parallel_size=2, text_encoder_tp_size=2), False),
    ],
}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_pipeline_gives_what_one_process_gives(ranks: RankPool, folders: dict[str, Path], world: int) -> None:
    every = ranks.run(world, spread, [(name, folders[name], *rest) for name, *rest in JOBS[world]])
    for job, (name, config, in_memory) in enumerate(JOBS[world]):
        single = diffusers.DiffusionPipeline.from_pretrained(folders[name])
        with torch.no_grad():
            expected = latents(single, name)
        found = [own[job] for own in every]
        for result, _, _ in found:
            assert largest_error(result, expected) < TOLERANCE
            assert torch.equal(result, found[0][0])
        for key in found[0][1]:
            sizes = config["text_encoder_tp_size"]
            size = sizes if isinstance(sizes, int) else sizes[key]
            held = [encoders[key] for _, encoders, _ in found]
            assert sum(own > 0 for own in held) == size
            assert in_memory or all(read.get(key, 0) == own for own, (_, _, read) in zip(held, found, strict=True))


def by_hand(folder: Path) -> tuple[Any, ...]:
    """Calls outside of the pipeline's: generated tokens, an error that all ranks raise, and a call after it."""
    encoder = load_pipeline(folder, ParallelConfig(**TWO)).text_encoder
    torch.manual_seed(dist.get_rank())  # generating draws; ranks draw what the first one does
    told = encoder.generate(**GENERATE)
    with pytest.raises(IndexError) as caught:
        encoder(torch.tensor([[3, 10**6]]))
    return told, encoder(PROMPT).logits, getattr(caught.value, "__notes__", []), encoder.name_or_path


PROMPT = torch.tensor([[7, 9, 13, 10]])
GENERATE: dict[str, Any] = dict(inputs=PROMPT, max_new_tokens=5, do_sample=True, top_k=0, pad_token_id=0)


def test_calls_by_hand_give_what_one_process_gives(ranks: RankPool, folders: dict[str, Path]) -> None:
    single = diffusers.DiffusionPipeline.from_pretrained(folders["qwen"]).text_encoder
    torch.manual_seed(0)
    told = single.generate(**GENERATE)
    with torch.no_grad():
        logits = single(PROMPT).logits
    for tokens, found, notes, source in ranks.run(2, by_hand, folders["qwen"]):
        assert torch.equal(tokens, told)
        assert largest_error(found, logits) < TOLERANCE
        assert source == single.name_or_path
        assert notes == [] or "on rank 0" in notes[0]


def several(folder: Path) -> list[Any]:
    pipeline = load_pipeline(
        folder, ParallelConfig(**TWO), dtype={"text_encoder_3": torch.float16, "default": torch.float32}
    )
    encoder = pipeline.text_encoder_3
    kinds = {name: own.dtype for name, own in encoder.named_parameters()}
    pipeline.text_encoder_3.to(dtype=torch.float32)
    outputs = generate(pipeline, [request(seed) for seed in range(3)])
    return [kinds, [output.images for output in outputs]]


def request(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {**CALLS["sd3"], "num_inference_steps": 1 + seed, "output_type": "latent", "generator": generator}


def test_requests_side_by_side_and_dtypes_of_parts(ranks: RankPool, folders: dict[str, Path]) -> None:
    dtypes = {"text_encoder_3": torch.float16, "default": torch.float32}
    single = diffusers.DiffusionPipeline.from_pretrained(folders["sd3"], dtype=dtypes)
    kinds = {name: own.dtype for name, own in single.text_encoder_3.named_parameters()}
    assert set(kinds.values()) == {torch.float16, torch.float32}  # T5 keeps some of its layers in float32
    single.text_encoder_3.to(dtype=torch.float32)
    expected = [single(**request(seed)).images for seed in range(3)]
    for found, outputs in ranks.run(2, several, folders["sd3"]):
        assert found == kinds
        assert all(largest_error(*pair) < TOLERANCE for pair in zip(outputs, expected, strict=True))


def shared(folder: Path) -> list[Any]:
    """What pipelines give that share a split encoder, and how another split of it is refused."""
    config = dict(pipeline_parallel_size=3, ranks="2GB", timeout_seconds=60)
    first = load_pipeline(folder, ParallelConfig(**config, text_encoder_tp_size=2))
    found = [latents(first, "wan")]
    for sizes in ({}, {"text_encoder_tp_size": 2}, {"text_encoder_tp_size": {"text_encoder": 2}}):
        other = load_pipeline(folder, ParallelConfig(**config, **sizes), text_encoder=first.text_encoder)
        found.append(latents(other, "wan"))
    plain = diffusers.DiffusionPipeline.from_pretrained(folder, text_encoder=first.text_encoder)
    found.append(latents(parallelize(plain, ParallelConfig(**config, text_encoder_tp_size=2)), "wan"))
    with pytest.raises(ConfigError) as caught:
        load_pipeline(folder, ParallelConfig(**config, text_encoder_tp_size=3), text_encoder=first.text_encoder)
    return [*found, str(caught.value)]


def test_a_split_encoder_of_another_pipeline_is_shared_as_it_is(ranks: RankPool, folders: dict[str, Path]) -> None:
    for *found, refused in ranks.run(3, shared, folders["wan"]):
        assert all(torch.equal(result, found[0]) for result in found)
        assert "'text_encoder', which another pipeline has split over 2 ranks already. Give 2, or leave" in refused


# ---- refusals -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if launched with two processes; nothing here gets as far as meeting the other one, or reads a weight."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(Checkpoint, "read", None)


@pytest.mark.usefixtures("two_ranks")
def test_what_cannot_be_split_is_refused_before_weights_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    def load(folder: Path, **changes: Any) -> None:
        load_pipeline(folder, ParallelConfig(**{**TWO, **changes}))

    with pytest.raises(ConfigError, match=r"\{'vae': 2\}: the text encoders of this pipeline .* are 'text_encoder'\."):
        load(folders["wan"], text_encoder_tp_size={"vae": 2})
    with pytest.raises(ConfigError, match="that are not on every rank are none"):
        load(folders["wan"], component_ranks={"text_encoder": "all"})
    odd = tmp_path / "odd"
    shutil.copytree(folders["wan"], odd)
    config = json.loads((odd / "text_encoder" / "config.json").read_text())
    (odd / "text_encoder" / "config.json").write_text(json.dumps({**config, "num_heads": 9}))
    with pytest.raises(ConfigError, match=r"'text_encoder': 2 does not divide the 9 heads of .* work: 1, 3, 9\."):
        load(odd)
    quantised = {**config, "quantization_config": {"quant_method": "bitsandbytes"}}
    (odd / "text_encoder" / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ConfigError, match="stored quantised"):
        load(odd)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="text_encoder_tp_size=3: 2 ranks at most"):
        ParallelConfig(pipeline_parallel_size=2, data_parallel_size=2, text_encoder_tp_size=3)
    with pytest.raises(ConfigError, match=r"text_encoder_tp_size=\{'t5': 0\}: expected integers of at least 1"):
        ParallelConfig(pipeline_parallel_size=2, text_encoder_tp_size={"t5": 0})


def refused(folder: Path) -> None:
    pipeline = load_pipeline(folder, ParallelConfig(**TWO))
    with on_this_rank([pipeline.text_encoder]), pytest.raises(ConfigError, match="each of several ranks has a part"):
        pipeline.text_encoder(PROMPT)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q"]), pipeline.text_encoder)
    with pytest.raises(ConfigError, match=r"SelfAttention\.q\..* after it was cut over ranks \(text_encoder_tp_size\)"):
        latents(pipeline, "wan")


def test_calls_on_one_rank_and_adapters_are_refused(ranks: RankPool, folders: dict[str, Path]) -> None:
    ranks.run(2, refused, folders["wan"])


def test_files_that_lack_a_tensor_are_named(ranks: RankPool, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "sd3"
    shutil.copytree(folders["sd3"], folder)
    file = folder / "text_encoder_3" / "model.safetensors"
    tensors = load_file(file)
    del tensors["encoder.block.1.layer.1.DenseReluDense.wo.weight"]
    save_file(tensors, file)
    with pytest.raises(RanksFailedError, match=r"lack 'encoder\.block\.1\.layer\.1\.DenseReluDense\.wo\.weight'"):
        ranks.run(2, spread, [("sd3", folder, TWO, False)])
