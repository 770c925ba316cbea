"""Weights of blocks sharded over the ranks that hold the same stage: the same results, with less on each rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.utils import _to_kwargs

from dit_pipelining import ParallelConfig, generate, load_pipeline, parallelize
from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.hsdp import sharded_parameters
from dit_pipelining.torch_internals import local_part
from tests import checkpoints
from tests.distributed import RankPool

TOLERANCE = 1e-5
"""Of float32 pixels. Gathered weights lie elsewhere in memory than loaded ones, which products on the CPU round by."""

PROMPTS = ("a red cat", "a blue circle")


def requests(guidance_scale: float = 5.0) -> list[dict[str, Any]]:
    size = dict(height=32, width=32, num_frames=1, num_inference_steps=2, max_sequence_length=16, output_type="pt")
    return [
        dict(prompt=prompt, guidance_scale=guidance_scale, generator=torch.Generator().manual_seed(seed), **size)
        for seed, prompt in enumerate(PROMPTS)
    ]


def ask(pipeline: Any) -> list[torch.Tensor]:
    """With both branches of guidance, with one (which leaves a replica without work), and several requests at a time."""
    pipeline.set_progress_bar_config(disable=True)
    with_guidance, without = requests(), requests(1.0)
    found = [pipeline(**with_guidance[0])[0], pipeline(**without[1])[0]]
    return found + [output[0] for output in generate(pipeline, with_guidance)]


def held_bytes(model: nn.Module) -> int:
    return sum(local_part(tensor).nbytes for tensor in model.parameters() if tensor.device.type != "meta")


def run(folder: Path, sizes: dict[str, Any], in_memory: bool) -> tuple[list[torch.Tensor], int]:
    config = ParallelConfig(use_hsdp=True, **sizes)
    pipeline = (
        parallelize(diffusers.DiffusionPipeline.from_pretrained(folder), config)
        if in_memory
        else load_pipeline(folder, config)
    )
    found = ask(pipeline)
    experts = [getattr(pipeline, name, None) for name in ("transformer", "transformer_2")]
    return found, sum(held_bytes(expert) for expert in experts if expert is not None)


def compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    errors = [(own - other).abs().max().item() for own, other in zip(found, expected, strict=True)]
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize(
    ("sizes", "in_memory"),
    [
        (dict(hsdp_shard_size=2), False),
        (dict(cfg_parallel_size=2, pipeline_parallel_size=2), False),
        pytest.param(dict(ulysses_degree=2), False, marks=pytest.mark.full),
        pytest.param(dict(cfg_parallel_size=2, ulysses_degree=2), True, marks=pytest.mark.full),
        pytest.param(dict(cfg_parallel_size=4, hsdp_replicate_size=2), True, marks=pytest.mark.full),
    ],
)
def test_results_are_those_of_one_process(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, Any], in_memory: bool
) -> None:
    folder = checkpoints.wan(tmp_path / "wan", experts=2)
    single = diffusers.DiffusionPipeline.from_pretrained(folder)
    with torch.no_grad():
        expected = ask(single)
    whole = held_bytes(single.transformer) + held_bytes(single.transformer_2)
    config = ParallelConfig(use_hsdp=True, **sizes)
    results = ranks.run(config.world_size, run, folder, sizes, in_memory)
    for found, held in results:
        compare(found, expected)
        assert all(torch.equal(own, first) for own, first in zip(found, results[0][0], strict=True))
        assert held < whole * (0.75 if config.pipeline_parallel_size == 1 else 0.5)


@pytest.mark.full
def test_each_of_two_stages_sharded_over_two_ranks_holds_a_quarter(ranks: RankPool, tmp_path: Path) -> None:
    # As many blocks as Qwen-Image has: embedders, which both stages need and hold whole, are 1.6% of this tiny model.
    folder = checkpoints.wan(tmp_path / "wan", num_layers=60)
    single = diffusers.DiffusionPipeline.from_pretrained(folder)
    with torch.no_grad():
        expected = single(**requests()[0] | dict(num_inference_steps=1))[0]
    whole = held_bytes(single.transformer)
    sizes = dict(hsdp_shard_size=2, pipeline_parallel_size=2, partition="30,30")
    for found, held in ranks.run(4, run_once, folder, sizes):
        compare([found], [expected])
        assert held <= whole / 4 * 1.05


def run_once(folder: Path, sizes: dict[str, Any]) -> tuple[torch.Tensor, int]:
    pipeline = load_pipeline(folder, ParallelConfig(use_hsdp=True, **sizes))
    return pipeline(**requests()[0] | dict(num_inference_steps=1))[0], held_bytes(pipeline.transformer)


def run_as_on_a_gpu(folder: Path) -> tuple[torch.Tensor, int]:
    """FSDP moves the inputs of the outermost module to a GPU; here it does to the CPU."""
    original = FSDPState._root_pre_forward

    def moving(self: FSDPState, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = original(self, module, args, kwargs)
        moved_args, moved_kwargs = _to_kwargs(args, kwargs, torch.device("cpu"), False)
        return moved_args[0], moved_kwargs[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPState, "_root_pre_forward", moving)
        return run_once(folder, dict(hsdp_shard_size=2))


def test_inputs_are_moved_where_there_are_some(ranks: RankPool, tmp_path: Path) -> None:
    folder = checkpoints.wan(tmp_path / "wan")
    with torch.no_grad():
        expected = diffusers.DiffusionPipeline.from_pretrained(folder)(**requests()[0] | dict(num_inference_steps=1))[0]
    for found, _ in ranks.run(2, run_as_on_a_gpu, folder):
        compare([found], [expected])


# ---- conditions ---------------------------------------------------------------------------------------------------------


def run_with_conditions(folder: Path) -> tuple[list[torch.Tensor], dict[str, bool]]:
    """Results where a class names what is sharded, and which tensors of the second block are."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    conditions = [lambda name, module: name.endswith(".ffn"), lambda name, module: name.endswith("blocks.1.attn1.to_q")]
    pipeline.transformer._hsdp_shard_conditions = conditions
    pipeline = parallelize(pipeline, ParallelConfig(use_hsdp=True, hsdp_shard_size=2))
    found = ask(pipeline)
    block = pipeline.transformer.blocks[1]
    return found, {name: local_part(tensor) is not tensor for name, tensor in block.named_parameters()}


def test_modules_are_sharded_for_which_a_condition_of_the_model_holds(ranks: RankPool, tmp_path: Path) -> None:
    folder = checkpoints.wan(tmp_path / "wan")
    single = diffusers.DiffusionPipeline.from_pretrained(folder)
    with torch.no_grad():
        expected = ask(single)
    for found, sharded in ranks.run(2, run_with_conditions, folder):
        compare(found, expected)
        wanted = {name: name.startswith(("ffn.", "attn1.to_q.")) for name in sharded}
        assert sharded == wanted
        assert len(set(wanted.values())) == 2


def test_without_conditions_all_of_a_block_is_sharded() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert sharded_parameters("blocks.0", block, ()) == {id(parameter) for parameter in block.parameters()}
    assert sharded_parameters("blocks.0", block, [lambda name, module: False]) == set()
    chosen = sharded_parameters("blocks.0", block, [lambda name, module: name == "blocks.0.1"])
    assert chosen == {id(parameter) for parameter in block[1].parameters()}


# ---- configuration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tensor_parallel_size=2, cfg_parallel_size=2), "tensor-parallel ranks hold a part"),
        (dict(cfg_parallel_size=2, compile="blocks"), "compile"),
        (dict(cfg_parallel_size=2, pipeline_parallel_size=2, rebalance=True), "rebalance"),
        (dict(hsdp_shard_size=2, schedule="gpipe"), "schedule"),
        (dict(), "give hsdp_shard_size"),
        (dict(pipeline_parallel_size=2), "give hsdp_shard_size"),
        (dict(cfg_parallel_size=2, hsdp_shard_size=4), "is not 2, the number of ranks that hold the same stage"),
        (dict(cfg_parallel_size=4, hsdp_shard_size=2, hsdp_replicate_size=4), "is not 4"),
        (dict(cfg_parallel_size=2, hsdp_shard_size=1), "shards nothing"),
        (dict(hsdp_shard_size=0), "hsdp_shard_size=0"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(use_hsdp=True, **settings)


def test_sizes_without_use_hsdp_are_refused() -> None:
    with pytest.raises(ConfigError, match="hsdp_shard_size=2 is given, but use_hsdp is not"):
        ParallelConfig(hsdp_shard_size=2)


@pytest.mark.parametrize(
    ("settings", "world_size", "shard", "replicate"),
    [
        (dict(hsdp_shard_size=2), 2, 2, 1),
        (dict(hsdp_shard_size=2, hsdp_replicate_size=2), 4, 2, 2),
        (dict(hsdp_shard_size=2, pipeline_parallel_size=2), 4, 2, 1),
        (dict(cfg_parallel_size=2, ulysses_degree=2), 4, 4, 1),
        (dict(cfg_parallel_size=2, ulysses_degree=2, hsdp_shard_size=2), 4, 2, 2),
        (dict(cfg_parallel_size=2, data_parallel_size=2), 4, 2, 1),
    ],
)
def test_shards_and_their_copies_make_the_ranks_that_hold_a_stage(
    settings: dict[str, Any], world_size: int, shard: int, replicate: int
) -> None:
    config = ParallelConfig(use_hsdp=True, **settings)
    assert (config.world_size, config.hsdp_shard_size, config.hsdp_replicate_size) == (world_size, shard, replicate)
