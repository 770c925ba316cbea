"""Stock diffusers pipelines over several ranks give what one process gives, bit for bit."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist

from dit_pipelining.api import ParallelConfig, load_pipeline, parallelize
from dit_pipelining.runtime.attach import split_of
from tests import checkpoints
from tests.distributed import RankPool

CALLS: dict[str, dict[str, Any]] = {
    "wan": dict(prompt="a red cat", negative_prompt="blue", height=16, width=16, num_frames=9, max_sequence_length=16),
    "wan22": dict(prompt="a red cat", height=16, width=16, num_frames=9, max_sequence_length=16),
    "flux": dict(prompt="a blue circle", height=8, width=8, max_sequence_length=16),
    "sd3": dict(prompt="a green square", negative_prompt="red", height=16, width=16, max_sequence_length=16),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "wan": checkpoints.wan(root / "wan"),
        "wan22": checkpoints.wan(root / "wan22", experts=2),
        "flux": checkpoints.flux(root / "flux"),
        "sd3": checkpoints.sd3(root / "sd3"),
    }


def generate(pipeline: Any, name: str, **changes: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    options = {**CALLS[name], "num_inference_steps": 4, "output_type": "pt", **changes}
    result = pipeline(generator=torch.Generator().manual_seed(7), **options)
    output: torch.Tensor = result.frames if hasattr(result, "frames") else result.images
    return output


def loaded(folder: Path, name: str, config: dict[str, Any], changes: dict[str, Any], dtype: Any = None) -> torch.Tensor:
    pipeline = load_pipeline(folder, ParallelConfig(**config), torch_dtype=dtype)
    first = generate(pipeline, name, **changes)
    assert_holds_its_stage_only(pipeline)
    assert torch.equal(first, generate(pipeline, name, **changes))
    return first


def in_memory(folder: Path, name: str, config: dict[str, Any]) -> torch.Tensor:
    pipeline = parallelize(diffusers.DiffusionPipeline.from_pretrained(folder), ParallelConfig(**config))
    result = generate(pipeline, name)
    assert_holds_its_stage_only(pipeline)
    return result


def assert_holds_its_stage_only(pipeline: Any) -> None:
    for component in (pipeline.transformer, getattr(pipeline, "transformer_2", None)):
        if component is None:
            continue
        split = split_of(component)
        assert split is not None
        assert split.num_stages == dist.get_world_size()
        own = {id(parameter) for parameter in split.stages[dist.get_rank()].parameters()}
        for name, parameter in component.named_parameters():
            assert (parameter.device.type == "cpu") == (id(parameter) in own), name


@pytest.mark.parametrize(
    ("name", "stages"), [("wan", 2), ("wan", 3), ("wan22", 2), ("flux", 2), ("flux", 3), ("sd3", 2)]
)
def test_ranks_give_what_one_process_gives(ranks: RankPool, folders: dict[str, Path], name: str, stages: int) -> None:
    expected = generate(diffusers.DiffusionPipeline.from_pretrained(folders[name]), name)
    for result in ranks.run(stages, loaded, folders[name], name, dict(pipeline_parallel_size=stages), {}):
        assert torch.equal(result, expected)


def in_inference_mode(folder: Path, name: str) -> torch.Tensor:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    with torch.inference_mode():
        return generate(pipeline, name).clone()


@pytest.mark.parametrize("name", ["wan", "sd3"])
def test_a_call_in_inference_mode_gives_what_one_process_gives(
    ranks: RankPool, folders: dict[str, Path], name: str
) -> None:
    with torch.inference_mode():
        expected = generate(diffusers.DiffusionPipeline.from_pretrained(folders[name]), name)
    for result in ranks.run(2, in_inference_mode, folders[name], name):
        assert torch.equal(result, expected)


def with_a_rank_for_the_vae(folder: Path) -> tuple[Any, torch.Tensor]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=3, vae_placement="shared"))
    result = generate(pipeline, "wan")
    split = split_of(pipeline.transformer)
    assert split is not None
    return split.partition.counts, result


def test_a_rank_of_its_own_for_the_vae_gets_no_blocks(ranks: RankPool, folders: dict[str, Path]) -> None:
    expected = generate(diffusers.DiffusionPipeline.from_pretrained(folders["wan"]), "wan")
    for counts, result in ranks.run(3, with_a_rank_for_the_vae, folders["wan"]):
        assert counts == (2, 2, 0)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_a_pipeline_in_memory_gives_the_same(ranks: RankPool, folders: dict[str, Path], name: str) -> None:
    expected = generate(diffusers.DiffusionPipeline.from_pretrained(folders[name]), name)
    for result in ranks.run(2, in_memory, folders[name], name, dict(pipeline_parallel_size=2)):
        assert torch.equal(result, expected)


def test_bfloat16_weights_give_the_same(ranks: RankPool, folders: dict[str, Path]) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(folders["wan"], torch_dtype=torch.bfloat16)
    expected = generate(plain, "wan")
    config = dict(pipeline_parallel_size=2)
    for result in ranks.run(2, loaded, folders["wan"], "wan", config, {}, torch.bfloat16):
        assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("wan", "gpipe"), ("flux", "gpipe"), ("sd3", "gpipe"), ("wan", "rolling"), ("sd3", "rolling")],
)
def test_prompts_as_microbatches_give_what_each_gives_alone(
    ranks: RankPool, folders: dict[str, Path], name: str, schedule: str
) -> None:
    prompts = ["a red cat", "a blue dog", "the moon"]
    negative = CALLS[name].get("negative_prompt")
    changes: dict[str, Any] = dict(prompt=prompts, output_type="latent")
    if negative is not None:
        changes["negative_prompt"] = [negative] * len(prompts)
    plain = diffusers.DiffusionPipeline.from_pretrained(folders[name])
    expected = generate(plain, name, **changes)
    config = dict(pipeline_parallel_size=2, microbatches=len(prompts), schedule=schedule)
    for result in ranks.run(2, loaded, folders[name], name, config, changes):
        # The text encoders see the whole batch in both runs; in the transformer a smaller batch may round differently.
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_gpipe_without_microbatches_gives_what_one_process_gives(ranks: RankPool, folders: dict[str, Path]) -> None:
    expected = generate(diffusers.DiffusionPipeline.from_pretrained(folders["wan"]), "wan")
    config = dict(pipeline_parallel_size=2, schedule="gpipe")
    for result in ranks.run(2, loaded, folders["wan"], "wan", config, {}):
        assert torch.equal(result, expected)
