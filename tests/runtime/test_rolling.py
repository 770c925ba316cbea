"""Calls in flight, replicas, and requests side by side: the bits of one process, one call after the other."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist

from dit_pipelining.api import ParallelConfig, generate, load_pipeline
from dit_pipelining.runtime.attach import EXECUTOR, rolling_of
from tests import checkpoints
from tests.distributed import RankPool, RanksFailedError

SIZE = dict(height=16, width=16, num_frames=9, max_sequence_length=16, output_type="latent")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("rolling") / "wan")


def requests() -> list[dict[str, Any]]:
    """Different in prompt, size, steps, guidance and seed."""
    return [
        dict(prompt="a red cat", num_inference_steps=3, guidance_scale=5.0, **SIZE),
        dict(prompt="a blue dog", num_inference_steps=5, guidance_scale=1.0, **{**SIZE, "width": 32}),
        dict(prompt="the moon", negative_prompt="red", num_inference_steps=4, guidance_scale=3.0, **SIZE),
        dict(prompt="a circle", num_inference_steps=2, guidance_scale=4.0, **{**SIZE, "num_frames": 5}),
    ]


def seeded(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**call, "generator": torch.Generator().manual_seed(seed)} for seed, call in enumerate(calls)]


def rolled(folder: Path, config: dict[str, Any], max_in_flight: int | None) -> list[torch.Tensor]:
    pipeline = load_pipeline(folder, ParallelConfig(**config))
    outputs = [output.frames for output in generate(pipeline, seeded(requests()), max_in_flight=max_in_flight)]
    again = [output.frames for output in generate(pipeline, seeded(requests()), max_in_flight=max_in_flight)]
    assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))
    assert all(type(output) is torch.Tensor for output in outputs)
    return outputs


@pytest.mark.parametrize(
    ("stages", "replicas", "max_in_flight"), [(2, 1, None), (3, 1, None), (1, 2, None), (2, 2, None), (2, 1, 2)]
)
def test_requests_side_by_side_give_what_each_gives_alone(
    ranks: RankPool, wan: Path, stages: int, replicas: int, max_in_flight: int | None
) -> None:
    plain = diffusers.DiffusionPipeline.from_pretrained(wan)
    plain.set_progress_bar_config(disable=True)
    expected = [plain(**call).frames for call in seeded(requests())]
    config = dict(pipeline_parallel_size=stages, cfg_parallel_size=replicas)
    for results in ranks.run(stages * replicas, rolled, wan, config, max_in_flight):
        assert len(results) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def order_of_events(folder: Path) -> list[str]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    pipeline.set_progress_bar_config(disable=True)
    rolling = rolling_of(pipeline)
    assert rolling is not None
    events: list[str] = []
    submit, wait = rolling.submit, rolling._wait

    def logged_submit(*args: Any) -> Any:
        events.append("submit")
        return submit(*args)

    def logged_wait(*args: Any) -> None:
        events.append("wait")
        wait(*args)

    rolling.submit, rolling._wait = logged_submit, logged_wait  # type: ignore[method-assign]
    pipeline(**seeded(requests())[0])
    return events


def test_both_branches_of_a_step_are_in_flight_before_one_is_waited_for(ranks: RankPool, wan: Path) -> None:
    for events in ranks.run(2, order_of_events, wan):
        assert events == ["submit", "submit", "wait", "wait"] * 3


def replicas_used(folder: Path) -> list[int]:
    pipeline = load_pipeline(folder, ParallelConfig(cfg_parallel_size=2))
    pipeline.set_progress_bar_config(disable=True)
    rolling = rolling_of(pipeline)
    assert rolling is not None
    chosen: list[int] = []
    choose = rolling._next_replica

    def logged(*args: Any) -> int:
        chosen.append(choose(*args))
        return chosen[-1]

    rolling._next_replica = logged  # type: ignore[method-assign]
    pipeline(**seeded(requests())[0])
    return chosen


def test_the_branches_of_a_step_run_on_different_replicas(ranks: RankPool, wan: Path) -> None:
    for chosen in ranks.run(2, replicas_used, wan):
        assert chosen == [0, 1] * 3


def batched_guidance(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    pipeline = load_pipeline(folder, ParallelConfig(**config))
    return sd3_image(pipeline)


def sd3_image(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    call = dict(prompt="a red cat", height=16, width=16, num_inference_steps=3, max_sequence_length=16)
    images: torch.Tensor = pipeline(generator=generator, output_type="latent", **call).images
    return images


def test_a_batch_with_both_branches_is_cut_over_replicas(ranks: RankPool, tmp_path: Path) -> None:
    folder = checkpoints.sd3(tmp_path / "sd3")
    expected = sd3_image(diffusers.DiffusionPipeline.from_pretrained(folder))
    for result in ranks.run(4, batched_guidance, folder, dict(pipeline_parallel_size=2, cfg_parallel_size=2)):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)  # half the batch can round differently


def failing_block(folder: Path) -> None:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    pipeline.set_progress_bar_config(disable=True)
    call = seeded(requests())[0]
    pipeline(**call)
    if dist.get_rank() == 1:
        split = pipeline.transformer.__dict__[EXECUTOR].split
        block = pipeline.transformer.get_submodule(str(split.graph.blocks[-1].target))

        def fail(*_: Any) -> None:
            raise ValueError("the last block is broken")

        block.register_forward_hook(fail)
    pipeline(**call)


def test_an_error_in_a_stage_ends_all_ranks_with_its_message(ranks: RankPool, wan: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(2, failing_block, wan)
    of_rank_0, of_rank_1 = str(caught.value).split("\nrank 1:\n", 1)
    assert "RemoteRankError: rank 1 failed: ValueError: the last block is broken" in of_rank_0
    assert "RemoteRankError" not in of_rank_1


def failing_request(folder: Path) -> None:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    calls = seeded(requests())

    def stop(*_: Any) -> None:
        raise KeyError("stopped by a callback")

    calls[1]["callback_on_step_end"] = stop
    generate(pipeline, calls)


def test_an_error_in_one_request_ends_all(ranks: RankPool, wan: Path) -> None:
    with pytest.raises(RanksFailedError, match="stopped by a callback"):
        ranks.run(2, failing_request, wan)
