"""Blocks cut over tensor-parallel ranks compute what the whole model does, to the rounding of the sums over ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors.torch import save_file

from dit_pipelining import ParallelConfig, load_pipeline, parallelize, split_model
from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.tensor import apply_tensor_parallel, check_tensor_parallel, refuse_additions
from dit_pipelining.sharding.tensor_layers import Shard
from dit_pipelining.weights.checkpoint import open_checkpoint
from tests import checkpoints
from tests.distributed import RankPool
from tests.zoo import CASES, build_inputs, build_model, case_names
from tests.zoo.case import Case
from tests.zoo.test_zoo import tensors_in

TOLERANCE = 1e-5
"""Of float32 results, relative to the largest value: sums over ranks add up in another order than one product does."""

FAMILIES = (
    "WanTransformer3D",  # norms over all heads
    "FluxTransformer",  # diffusers' own plan, with layers that join heads and hidden width
    "QwenImageTransformer",
    "SD35Transformer",  # two attentions in a block; the last one without output for the text
    "HunyuanVideoTransformer",  # joins heads and hidden width; plan made from modules
    "LTXTransformer",  # rotary tables of all heads side by side
    "MochiTransformer",  # rotary tables for each head
    "JoyImageEditTransformer",  # queries, keys and values by one layer
)

TAKES_WHOLE_HEADS = ("@kv-read", "@kv-cached")
"""How the names of cases end whose inputs are caches that a whole model has filled."""

EVEN_HEADS: dict[str, dict[str, Any]] = {
    "Cosmos3OmniTransformer": dict(hidden_size=24, num_attention_heads=4, num_key_value_heads=2),
    "Lumina2Transformer": dict(hidden_size=32, num_attention_heads=4, num_kv_heads=2),
    "ZImageTransformer": dict(dim=96, n_heads=6),
}
"""What the configurations of cases with an odd number of heads are changed to; variants with other inputs stay refused."""

REFUSED = {
    "AnyFlowFARTransformer3DModel": "caches with the keys and values of all heads",
    "CosmosTransformer3DModel": "CosmosAttnProcessor2_5, of which it is not known",
    "EasyAnimateTransformer3DModel": "the heads of the text leave it without an output projection",
    "HeliosTransformer3DModel": "history_key_scale",
    "LuminaNextDiT2DModel": "a gate for each head",
    "MotifVideoTransformer3DModel": "reads the heads of another attention",
    "PriorTransformer": "repeats the mask",
    "RFD4ProteinaTransformer": "as wide together as the model",
    "SanaWMLTX2RefinerTransformer3DModel": "SanaWMLTX2RefinerAttnProcessor, of which it is not known",
    "SanaWMTransformer3DModel": "a state goes from frame to frame",
    "WanAnimate2Transformer3DModel": "WanAnimate2AttnProcessor, of which it is not known",
}
"""Classes that are refused, or some of their variants, and why."""
VARIANTS_ONLY = (
    *("CosmosTransformer3DModel", "EasyAnimateTransformer3DModel", "HeliosTransformer3DModel"),
    "MotifVideoTransformer3DModel",
)


def case_of(name: str) -> Case:
    """The zoo's, with heads that two ranks can share where they are known to fit."""
    case = CASES[name]
    return replace(case, init={**case.init, **EVEN_HEADS.get(name, {})})


def largest_error(found: Any, expected: Any) -> float:
    pairs = [pair for pair in zip(tensors_in(found), tensors_in(expected), strict=True) if pair[1].is_floating_point()]
    assert pairs
    return max(((own - other).abs().max() / other.abs().max()).item() for own, other in pairs)


def errors(names: tuple[str, ...], num_stages: int) -> dict[str, tuple[float, float] | str]:
    """By case: the largest errors of the cut model, whole and in stages; or why it was refused."""
    found: dict[str, tuple[float, float] | str] = {}
    for name in names:
        case = case_of(name)
        model = build_model(case)
        expected = model(**build_inputs(case))
        whole = sum(parameter.numel() for parameter in model.parameters())
        try:
            apply_tensor_parallel(model, dist.group.WORLD, find_blocks(model))
        except ConfigError as error:
            found[name] = str(error)
            continue
        assert sum(parameter.numel() for parameter in model.parameters()) < whole
        error = largest_error(model(**build_inputs(case)), expected)
        split = split_model(model, num_stages, build_inputs(case), partitioner="uniform")
        found[name] = error, largest_error(split(**build_inputs(case)), expected)
    return found


def test_blocks_on_two_ranks_compute_what_the_model_does(ranks: RankPool) -> None:
    for found in ranks.run(2, errors, FAMILIES, 2):
        assert set(found) == set(FAMILIES)
        wrong = {name: own for name, own in found.items() if isinstance(own, str) or not max(own) < TOLERANCE}
        assert not wrong


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_every_class_is_cut_right_or_refused(ranks: RankPool, part: int) -> None:
    names = tuple(name for name in case_names() if not name.endswith(TAKES_WHOLE_HEADS))[part::8]
    for found in ranks.run(2, errors, names, 1):
        refused = {name: own for name, own in found.items() if isinstance(own, str)}
        for name, reason in refused.items():
            assert "tensor_parallel_size" in reason
            assert "does not divide" in reason or REFUSED[CASES[name].model_class] in reason
        for name, own in found.items():
            assert name in refused or max(own) < TOLERANCE, name  # type: ignore[type-var]
            assert name in refused or CASES[name].model_class in VARIANTS_ONLY or CASES[name].model_class not in REFUSED


# ---- pipelines ----------------------------------------------------------------------------------------------------------


def result(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(
        prompt="a red cat",
        negative_prompt="moves",
        height=16,
        width=16,
        num_inference_steps=3,
        max_sequence_length=16,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    )
    latents: torch.Tensor = output[0]
    return latents


def run_pipeline(folder: Path, sizes: dict[str, Any], *, in_memory: bool) -> tuple[torch.Tensor, int, list[str]]:
    """Latents, bytes of weights on this rank, and names of cut tensors that are whole or views of whole ones."""
    config = ParallelConfig(**sizes)
    pipeline = (
        parallelize(diffusers.DiffusionPipeline.from_pretrained(folder), config)
        if in_memory
        else load_pipeline(folder, config)
    )
    latents = result(pipeline)
    held = {name: tensor for name, tensor in pipeline.transformer.named_parameters() if tensor.device.type != "meta"}
    joined = [
        name
        for name, tensor in held.items()
        if in_memory and ".to_q." in name and tensor.untyped_storage().nbytes() > tensor.nbytes
    ]
    return latents, sum(tensor.nbytes for tensor in held.values()), joined


@pytest.mark.parametrize(
    ("model", "sizes", "in_memory"),
    [
        ("sd3", dict(tensor_parallel_size=2), False),
        ("wan", dict(pipeline_parallel_size=2, tensor_parallel_size=2), False),
        # By time, what so small a model sends counts more than its blocks, and one stage would get nearly all of them.
        ("flux", dict(pipeline_parallel_size=2, tensor_parallel_size=2, partition="2,3"), True),
    ],
)
def test_a_pipeline_gives_what_one_process_gives(
    ranks: RankPool, tmp_path: Path, model: str, sizes: dict[str, Any], in_memory: bool
) -> None:
    folder = getattr(checkpoints, model)(tmp_path / model)
    single = diffusers.DiffusionPipeline.from_pretrained(folder)
    with torch.no_grad():
        expected = result(single)
    whole = sum(parameter.nbytes for parameter in single.transformer.parameters())
    world_size = sizes["tensor_parallel_size"] * sizes.get("pipeline_parallel_size", 1)
    found = ranks.run(world_size, run_in_memory if in_memory else run_from_disk, folder, sizes)
    for latents, _, joined in found:
        assert largest_error(latents, expected) < TOLERANCE
        assert torch.equal(latents, found[0][0])  # ranks go on with the very same latents
        assert not joined
    # Modulation and embedders, large in such small models, stay whole; blocks are halved.
    assert max(held for _, held, _ in found) < 0.75 * whole / sizes.get("pipeline_parallel_size", 1) + 0.15 * whole


@pytest.mark.full
def test_stages_replicas_and_heads_go_together_on_eight_ranks(tmp_path: Path) -> None:
    folder, ranks = checkpoints.sd3(tmp_path / "sd3"), RankPool(8)
    with torch.no_grad():
        expected = result(diffusers.DiffusionPipeline.from_pretrained(folder))
    try:
        sizes = dict(pipeline_parallel_size=2, tensor_parallel_size=2, cfg_parallel_size=2)
        for latents, _, _ in ranks.run(8, run_from_disk, folder, sizes):
            assert largest_error(latents, expected) < TOLERANCE
    finally:
        ranks.close()


def run_from_disk(folder: Path, sizes: dict[str, int]) -> tuple[torch.Tensor, int, list[str]]:
    return run_pipeline(folder, sizes, in_memory=False)


def run_in_memory(folder: Path, sizes: dict[str, int]) -> tuple[torch.Tensor, int, list[str]]:
    return run_pipeline(folder, sizes, in_memory=True)


def add_lora_after_the_cut(folder: Path) -> str:
    pipeline = load_pipeline(folder, ParallelConfig(tensor_parallel_size=2))
    result(pipeline)
    with pytest.raises(ConfigError) as refused:
        pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    pipeline.transformer.blocks[0].attn1.extra = torch.nn.Linear(2, 2)  # by hand: refused at the next call
    with pytest.raises(ConfigError, match=r"attn1\.extra"):
        result(pipeline)
    return str(refused.value)


def test_adapters_after_the_cut_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    folder = checkpoints.wan(tmp_path / "wan")
    for message in ranks.run(2, add_lora_after_the_cut, folder):
        assert "add_adapter works on whole weights" in message
        assert "fuse_lora" in message


def test_sizes_that_do_not_divide_are_refused_before_anything_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    folder = checkpoints.sd3(tmp_path / "sd3")
    for file in (folder / "vae").glob("*.safetensors"):
        file.unlink()  # what is read later
    for message in ranks.run(3, refusal, folder):
        assert "tensor_parallel_size=3 does not divide" in message
        assert "Sizes that work: 1, 2" in message


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load_pipeline(folder, ParallelConfig(tensor_parallel_size=3))
    return str(refused.value)


# ---- without ranks ------------------------------------------------------------------------------------------------------


def test_sizes_must_divide_heads_of_keys_too() -> None:
    model = build_model(CASES["StableAudioDiTModel"])
    keys = model.transformer_blocks[0].attn2.to_k.out_features // model.transformer_blocks[0].attn2.to_q.out_features
    assert keys == 0  # fewer heads of keys than of queries
    with pytest.raises(ConfigError, match="key heads"):
        check_tensor_parallel(model, 4, find_blocks(model))


def test_sizes_must_divide_heads_of_a_plan_of_diffusers() -> None:
    model = build_model(CASES["FluxTransformer"])
    with pytest.raises(ConfigError, match=r"does not divide .*heads"):
        check_tensor_parallel(model, 4, find_blocks(model))


def test_a_processor_that_is_not_known_is_refused() -> None:
    class OwnProcessor(type(build_model(CASES["WanTransformer3D"]).blocks[0].attn1.processor)):  # type: ignore[misc]
        pass

    model = build_model(CASES["WanTransformer3D"])
    model.blocks[1].attn1.set_processor(OwnProcessor())
    with pytest.raises(ConfigError, match=r"blocks.1.attn1 .*OwnProcessor"):
        check_tensor_parallel(model, 2, find_blocks(model))


def test_adapters_before_the_cut_are_refused() -> None:
    model = build_model(CASES["WanTransformer3D"])
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(ConfigError, match="without adapters"):
        check_tensor_parallel(model, 2, find_blocks(model))


def test_additions_are_named() -> None:
    model = build_model(CASES["WanTransformer3D"])
    known = frozenset(model.state_dict())
    refuse_additions(model, known)
    model.blocks[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"blocks\.0\.extra\.bias"):
        refuse_additions(model, known)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_reads_its_part_of_a_tensor_from_the_file(tmp_path: Path, dim: int) -> None:
    whole = torch.arange(12.0 * 12).reshape(12, 12)
    save_file({"weight": whole}, tmp_path / "diffusion_pytorch_model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    parts = []
    for index in range(2):
        shard = Shard(dim, (4, 8), index, 2, (12, 12))
        [(_, own)] = checkpoint.read(["weight"], torch.device("cpu"), {"weight": shard})
        assert torch.equal(own, shard.of(whole))
        parts.append(own.split([2, 4], dim))
    joined = torch.cat([part for pair in zip(*parts, strict=True) for part in pair], dim)
    assert torch.equal(joined, whole)


def test_rebalancing_is_refused() -> None:
    with pytest.raises(ConfigError, match="rebalance"):
        ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, rebalance=True)
