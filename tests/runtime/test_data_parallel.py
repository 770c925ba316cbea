"""Copies of a pipeline share the requests of `generate`; every rank gets all results."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from dit_pipelining import ParallelConfig, generate, load_pipeline
from dit_pipelining.errors import ConfigError, WorldSizeError
from tests import checkpoints
from tests.distributed import RankPool

PROMPTS = ["a red cat", "a blue circle", "a green square", "nothing", "a red cat in a blue circle"]


def requests() -> list[dict[str, Any]]:
    size = dict(height=16, width=16, num_inference_steps=3, max_sequence_length=16, output_type="pt")
    return [
        dict(prompt=prompt, generator=torch.Generator().manual_seed(seed), **size)
        for seed, prompt in enumerate(PROMPTS)
    ]


def images(folder: Path, sizes: dict[str, int]) -> tuple[list[torch.Tensor], list[int]]:
    pipeline = load_pipeline(folder, ParallelConfig(**sizes))
    pipeline.set_progress_bar_config(disable=True)
    ran: list[int] = []

    def note(index: int, output: Any) -> Any:
        ran.append(index)
        return output.images

    assert generate(pipeline, []) == []
    [only] = generate(pipeline, requests()[:1])  # which leaves nothing to the second copy
    found = generate(pipeline, requests(), on_output=note)
    assert torch.equal(only.images, found[0])
    return found, ran


@pytest.mark.parametrize("stages", [1, 2])
def test_requests_are_shared_and_results_are_those_of_one_process(ranks: RankPool, tmp_path: Path, stages: int) -> None:
    folder = checkpoints.sd3(tmp_path / "sd3")
    single = diffusers.DiffusionPipeline.from_pretrained(folder)
    single.set_progress_bar_config(disable=True)
    expected = [single(**own).images for own in requests()]
    found = ranks.run(2 * stages, images, folder, dict(pipeline_parallel_size=stages, data_parallel_size=2))
    for rank, (results, ran) in enumerate(found):
        assert [torch.equal(own, other) for own, other in zip(results, expected, strict=True)] == [True] * len(PROMPTS)
        assert sorted(ran) == [[0, 2, 4], [1, 3]][rank // stages]


def test_a_launch_of_copies_that_were_not_asked_for_says_how_to_ask() -> None:
    with pytest.raises(WorldSizeError, match="data_parallel_size=2"):
        ParallelConfig(pipeline_parallel_size=2).check_world_size(4)


def test_sizes_that_do_not_make_the_launch_are_spelt_out() -> None:
    config = ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size=2, ring_degree=3)
    with pytest.raises(
        WorldSizeError, match="cfg_parallel_size=1 x pipeline_parallel_size=2 x ring_degree=3 x tensor_parallel_size=2"
    ):
        config.check_world_size(8)


@pytest.mark.parametrize("name", ["data_parallel_size", "tensor_parallel_size", "ulysses_degree", "ring_degree"])
def test_sizes_are_positive_integers(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ParallelConfig(**{name: 0})
