"""Blocks move away from a slow rank between two calls, and the results stay what one process gives, bit for bit."""

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from dit_pipelining.api import ParallelConfig, generate, load_pipeline, parallelize
from dit_pipelining.runtime.attach import split_of
from tests import checkpoints
from tests.distributed import RankPool

CALL = dict(prompt="a red cat", height=16, width=16, num_frames=5, max_sequence_length=16, num_inference_steps=3)
LARGER = dict(CALL, height=32)
SLOW_SECONDS = 0.05


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("rebalance") / "wan", num_layers=6)


@pytest.fixture(scope="module")
def lora(wan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(wan)
    torch.manual_seed(3)
    pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    for name, parameter in pipeline.transformer.named_parameters():
        if "lora" in name:
            parameter.data.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    pipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(pipeline.transformer))
    return folder


def run(pipeline: Any, call: dict[str, Any] = CALL) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    frames: torch.Tensor = pipeline(generator=torch.Generator().manual_seed(7), output_type="latent", **call).frames
    return frames


def slow_down(pipeline: Any, stage: int) -> None:
    """Every block that runs on the ranks of this stage takes long."""
    if dist.get_rank() % 2 == stage:
        for block in pipeline.transformer.blocks:
            block.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))


def moved(folder: Path, lora: Path | None, source: str, config: dict[str, Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Blocks per stage and latents of four calls with the first stage slow, then of a larger call."""
    own = ParallelConfig(rebalance=True, **config)
    if source == "checkpoint":
        pipeline = load_pipeline(folder, own)
    else:
        pipeline = parallelize(diffusers.DiffusionPipeline.from_pretrained(folder), own)
    slow_down(pipeline, stage=0)
    results = [run(pipeline)]
    split = split_of(pipeline.transformer)
    assert split is not None
    counts = [split.partition.counts]
    moving = weakref.ref(pipeline.transformer.blocks[2].ffn.net[2].weight)  # the first stage's last block
    if lora is not None:
        pipeline.load_lora_weights(lora)
    for call in (CALL, CALL, LARGER):
        results.append(run(pipeline, call))
        split = split_of(pipeline.transformer)
        assert split is not None
        counts.append(split.partition.counts)
    gc.collect()
    assert moving() is None or dist.get_rank() % 2 == 1, "the weights of a moved block are still in memory"
    assert_holds_its_stage_only(pipeline.transformer, split.stages[dist.get_rank() % 2])
    return counts, results


def assert_holds_its_stage_only(model: Any, stage: Any) -> None:
    own = {id(parameter) for parameter in stage.parameters()}
    for name, parameter in model.named_parameters():
        assert (parameter.device.type == "cpu") == (id(parameter) in own), name


@pytest.mark.parametrize(
    ("source", "config", "with_lora"),
    [
        pytest.param("checkpoint", dict(pipeline_parallel_size=2), False, marks=pytest.mark.full),
        ("checkpoint", dict(pipeline_parallel_size=2), True),
        pytest.param("memory", dict(pipeline_parallel_size=2, schedule="gpipe"), False, marks=pytest.mark.full),
        ("memory", dict(pipeline_parallel_size=2, cfg_parallel_size=2), False),
    ],
)
def test_blocks_leave_a_slow_rank_and_no_bit_changes(
    ranks: RankPool, wan: Path, lora: Path, source: str, config: dict[str, Any], with_lora: bool
) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(wan)
    expected = [run(plain)]
    if with_lora:
        plain.load_lora_weights(lora)
    expected += [run(plain, call) for call in (CALL, CALL, LARGER)]
    world_size = config["pipeline_parallel_size"] * config.get("cfg_parallel_size", 1)
    found = ranks.run(world_size, moved, wan, lora if with_lora else None, source, config)
    for counts, results in found:
        assert counts == found[0][0]
        assert counts[0] == (3, 3)
        assert counts[1][0] < 3
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result, right)


def side_by_side(folder: Path, rebalance: bool) -> tuple[Any, list[torch.Tensor]]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2, rebalance=rebalance))
    slow_down(pipeline, stage=1)
    outputs: list[torch.Tensor] = []
    for _ in range(2):
        requests = [
            dict(CALL, prompt=prompt, generator=torch.Generator().manual_seed(i), output_type="latent")
            for i, prompt in enumerate(("a red cat", "a blue dog"))
        ]
        outputs += [output.frames for output in generate(pipeline, requests)]
    split = split_of(pipeline.transformer)
    assert split is not None
    return split.partition.counts, outputs


def test_requests_side_by_side_are_not_disturbed(ranks: RankPool, wan: Path) -> None:
    found = ranks.run(2, side_by_side, wan, True)
    without = ranks.run(2, side_by_side, wan, False)
    for (counts, outputs), (fixed, expected) in zip(found, without, strict=True):
        assert fixed == (3, 3)
        assert counts[1] < 3
        assert all(map(torch.equal, outputs, expected))
