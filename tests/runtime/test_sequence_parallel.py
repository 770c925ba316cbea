"""Pipelines whose calls are split by tokens, within stages and replicas, give what one process gives."""

from math import prod
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist

from dit_pipelining.api import ParallelConfig, generate, load_pipeline, parallelize, serve
from dit_pipelining.errors import ConfigError, InputError
from dit_pipelining.runtime.attach import split_of
from tests import checkpoints
from tests.distributed import RankPool
from tests.pipelines import CASES
from tests.pipelines.case import build_pipeline, call_pipeline
from tests.pipelines.compare import plain

TOLERANCE = dict(rtol=1e-5, atol=1e-5)
CALLS: dict[str, dict[str, Any]] = {
    "sd3": dict(prompt="a green square", negative_prompt="red", height=16, width=16, max_sequence_length=16),
    "wan": dict(prompt="a red cat", negative_prompt="blue", height=16, width=32, num_frames=9, max_sequence_length=16),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {"sd3": checkpoints.sd3(root / "sd3"), "wan": checkpoints.wan(root / "wan")}


def arguments(name: str, seed: int | None = 7) -> dict[str, Any]:
    generator = {} if seed is None else dict(generator=torch.Generator().manual_seed(seed))
    return {**CALLS[name], "num_inference_steps": 3, "output_type": "pt", **generator}


def result_of(output: Any) -> torch.Tensor:
    result: torch.Tensor = output.frames if hasattr(output, "frames") else output.images
    return result


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def expected(folder: Path, name: str, seed: int = 7) -> torch.Tensor:
    return result_of(quiet(diffusers.DiffusionPipeline.from_pretrained(folder))(**arguments(name, seed)))


def loaded(folder: Path, name: str, config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """What a call gives; what one gives whose noise nobody seeded; the bytes between stages: of a cut, and sent in a call."""
    pipeline = quiet(load_pipeline(folder, ParallelConfig(**config)))
    first = result_of(pipeline(**arguments(name)))
    split = split_of(pipeline.transformer)
    assert split is not None
    sent: list[int] = []
    isend = dist.isend
    dist.isend = lambda tensor, *args, **kwargs: sent.append(tensor.nbytes) or isend(tensor, *args, **kwargs)
    try:
        unseeded = result_of(pipeline(**arguments(name, seed=None)))
    finally:
        dist.isend = isend
    return first, unseeded, sum(value.bytes for boundary in split.boundaries for value in boundary), sum(sent)


def test_stages_that_share_tokens_give_what_one_process_gives(ranks: RankPool, folders: dict[str, Path]) -> None:
    wanted = expected(folders["wan"], "wan")
    config = dict(pipeline_parallel_size=2, ulysses_degree=2)
    found = ranks.run(4, loaded, folders["wan"], "wan", config)
    for first, unseeded, *_ in found:
        torch.testing.assert_close(first, wanted, **TOLERANCE)
        assert torch.equal(unseeded, found[0][1])
    assert not torch.equal(found[0][1], found[0][0])
    _, _, whole, sent_whole = ranks.run(2, loaded, folders["wan"], "wan", dict(pipeline_parallel_size=2))[0]
    tokens = 3 * 1 * 2 * 24 * 4  # frames, rows and columns of patches; channels of 4 bytes
    assert [whole - crossing for _, _, crossing, _ in found] == [tokens // 2] * 4
    calls = 3 * 2  # steps, branches of guidance
    assert sent_whole == calls * whole
    assert [sent for *_, sent in found] == [calls * (whole - tokens // 2)] * 2 + [0] * 2


def several(folder: Path, config: dict[str, Any]) -> list[torch.Tensor]:
    pipeline = quiet(parallelize(diffusers.DiffusionPipeline.from_pretrained(folder), ParallelConfig(**config)))
    results = [result_of(output) for output in generate(pipeline, [arguments("sd3", seed) for seed in (7, 8)])]
    with serve(pipeline) as queue:
        if queue.leads:
            results += [result_of(queue.submit(**arguments("sd3", seed)).result(timeout=100)) for seed in (7, 8)]
    return results


def test_requests_side_by_side_share_tokens(ranks: RankPool, folders: dict[str, Path]) -> None:
    wanted = [expected(folders["sd3"], "sd3", seed) for seed in (7, 8)]
    config = dict(ring_degree=2, cfg_parallel_size=2, ulysses_mode="anything")
    first, *others = ranks.run(4, several, folders["sd3"], config)
    assert [len(first), *map(len, others)] == [4, 2, 2, 2]
    for results in (first[:2], first[2:], *others):
        for result, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, other, **TOLERANCE)


def by_torchs_schedule(folder: Path) -> torch.Tensor:
    config = dict(schedule="gpipe", microbatches=2, pipeline_parallel_size=2, ulysses_degree=2, ulysses_mode="anything")
    return result_of(quiet(load_pipeline(folder, ParallelConfig(**config)))(**arguments("sd3")))


def test_microbatches_in_torchs_schedule_share_tokens(ranks: RankPool, folders: dict[str, Path]) -> None:
    wanted = expected(folders["sd3"], "sd3")
    for result in ranks.run(4, by_torchs_schedule, folders["sd3"]):
        torch.testing.assert_close(result, wanted, **TOLERANCE)


def refused(folder: Path) -> tuple[str, str]:
    with pytest.raises(ConfigError) as heads:
        load_pipeline(folder, ParallelConfig(ulysses_degree=3))
    pipeline = quiet(load_pipeline(folder, ParallelConfig(ring_degree=3)))
    with pytest.raises(InputError) as tokens:
        pipeline(**{**arguments("wan"), "num_frames": 5})  # 2 x 1 x 2 tokens
    return str(heads.value), str(tokens.value)


def test_what_does_not_divide_is_said_before_anything_runs(ranks: RankPool, tmp_path: Path) -> None:
    folder = checkpoints.wan(tmp_path / "wan")
    for heads, tokens in ranks.run(3, refused, folder):
        assert "ulysses_degree=3" in heads
        assert "Degrees that work: 1, 2" in heads
        assert 'Use ulysses_mode="anything"' in tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rebalance=True), "several must move alike"),
        (dict(compile="blocks"), "does not see the exchange"),
        (dict(ulysses_mode="both"), "expected one of strict, anything"),
        (dict(ulysses_degree=0), "expected an integer of at least 1"),
    ],
)
def test_configurations_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**{"pipeline_parallel_size": 2, "ulysses_degree": 2, **changes})


# ---- every family, over ranks -------------------------------------------------------------------------------------------

FAMILIES = [
    "WanPipeline",
    "WanPipeline@two experts",
    "WanImageToVideoPipeline",
    "FluxPipeline",
    "FluxControlNetPipeline",
    "Flux2Pipeline",
    "QwenImagePipeline",
    "StableDiffusion3Pipeline",
    "StableDiffusion3ControlNetPipeline",
    "HunyuanVideoPipeline",
    "LTXPipeline",
    "LTX2Pipeline",
    "CogVideoXPipeline",
]
LAYOUTS: dict[str, dict[str, int]] = {
    "pp2-cfg2-u2": dict(pipeline_parallel_size=2, cfg_parallel_size=2, ulysses_degree=2),
    "pp2-r2-u2": dict(pipeline_parallel_size=2, ring_degree=2, ulysses_degree=2),
    "pp2-u2": dict(pipeline_parallel_size=2, ulysses_degree=2),
    "pp2-r2": dict(pipeline_parallel_size=2, ring_degree=2),
    "cfg2-u2": dict(cfg_parallel_size=2, ulysses_degree=2),
    "r2-u2": dict(ring_degree=2, ulysses_degree=2),
}
ON_FOUR = [layout for layout, degrees in LAYOUTS.items() if prod(degrees.values()) == 4]


def spread(name: str, layout: str) -> list[torch.Tensor]:
    config = ParallelConfig(**LAYOUTS[layout], ulysses_mode="anything")
    return call_pipeline(CASES[name], parallelize(build_pipeline(CASES[name]), config))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout"),
    # The videos of these cases have three tokens, too few for four ranks.
    [
        (name, layout)
        for name in FAMILIES
        for layout in ON_FOUR
        if layout != "r2-u2" or not name.startswith(("Wan", "Cog"))
    ],
)
def test_every_family_in_every_layout_gives_what_one_process_gives(ranks: RankPool, name: str, layout: str) -> None:
    [wanted] = ranks.run(1, plain, name)
    for outputs in ranks.run(4, spread, name, layout):
        for output, other in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(output, other, rtol=2e-5, atol=1e-5)


@pytest.mark.full
def test_stages_replicas_and_parts_of_the_tokens_go_together_on_eight_ranks() -> None:
    name, ranks = "FluxPipeline@true_cfg", RankPool(8)
    try:
        [wanted] = ranks.run(1, plain, name)
        for layout in ("pp2-cfg2-u2", "pp2-r2-u2"):
            for outputs in ranks.run(8, spread, name, layout):
                for output, other in zip(outputs, wanted, strict=True):
                    torch.testing.assert_close(output, other, rtol=2e-5, atol=1e-5)
    finally:
        ranks.close()
