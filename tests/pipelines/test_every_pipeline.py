"""Unmodified diffusers pipelines over ranks give what one process gives: every step's latents, and the result."""

import pytest
import torch

from tests.distributed import RankPool

from . import CASES
from .compare import assert_close, compare, plain, plain_requests, spread_requests
from .coverage import NOT_RUN, dit_pipelines

NAMED = (
    "WanPipeline",
    "WanPipeline@two experts",
    "WanImageToVideoPipeline",
    "WanImageToVideoPipeline@expand_timesteps",
    "WanVACEPipeline",
    "FluxPipeline",
    "FluxKontextPipeline",
    "FluxFillPipeline",
    "FluxControlNetPipeline",
    "StableDiffusion3Pipeline",
    "QwenImagePipeline",
    "HunyuanVideoPipeline",
    "CogVideoXPipeline",
    "LTXPipeline",
    "LTX2Pipeline",
    "MochiPipeline",
    "PixArtSigmaPipeline",
    "SanaPipeline",
    "Lumina2Pipeline",
    "HiDreamImagePipeline",
    "AuraFlowPipeline",
    "ZImagePipeline",
    "CogView4Pipeline",
    "ChromaPipeline",
    "AllegroPipeline",
    "DiTPipeline",
)
"""One or two of each family, run by `make test`; all others take `make test-all`."""

QUICK = ("pp2-cfg2",)

WITH_STAGES_ALONE = ("FluxControlNetPipeline",)
"""What people add to a pipeline, run by `make test` without replicas too."""

LAYOUTS = ("pp2", "pp3", "cfg2", "pp2-cfg2")

WITH_REQUESTS = (
    "FluxPipeline",
    "ZImagePipeline",
    "LTX2Pipeline",
    "Flux2KleinKVPipeline",
    "WanPipeline@two experts",
    "HunyuanImagePipeline",
)
"""One call a step, latents in a list, two modalities, a cache, two transformers, a guider with momentum."""

WITH_MICROBATCHES = ("ZImagePipeline", "HiDreamImagePipeline", "QwenImagePipeline@two images", "FluxPipeline")
"""Inputs in lists, the batch in another dimension, sizes of each sample, no batch."""


@pytest.fixture(scope="session")
def expected(ranks: RankPool) -> dict[str, list[torch.Tensor]]:
    """What the cases give in one process, each run once."""
    return {}


def is_quick(name: str, layout: str) -> bool:
    return (name in NAMED and layout in QUICK) or (name in WITH_STAGES_ALONE and layout == "pp2")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if is_quick(name, layout) else pytest.mark.full)
        for name in CASES
        for layout in LAYOUTS
    ],
)
def test_ranks_give_what_one_process_gives(
    ranks: RankPool, expected: dict[str, list[torch.Tensor]], name: str, layout: str
) -> None:
    if name not in expected:
        [expected[name]] = ranks.run(1, plain, name)
    compare(ranks, CASES[name], layout, expected[name])


@pytest.mark.parametrize("name", WITH_REQUESTS)
def test_requests_side_by_side_give_what_they_give_alone(ranks: RankPool, name: str) -> None:
    [expected] = ranks.run(1, plain_requests, name)
    for layout, world in (("pp2", 2), ("pp2-cfg2", 4)):
        cut = CASES[name].cut and layout != "pp2"
        for outputs in ranks.run(world, spread_requests, name, layout):
            assert_close(outputs, expected, CASES[name].tolerance if cut else 0.0)


@pytest.mark.parametrize("name", WITH_MICROBATCHES)
def test_microbatches_give_what_the_batch_gives(
    ranks: RankPool, expected: dict[str, list[torch.Tensor]], name: str
) -> None:
    if name not in expected:
        [expected[name]] = ranks.run(1, plain, name)
    compare(ranks, CASES[name], "pp2-mb2", expected[name])


def test_the_quick_part_names_cases_that_are_there() -> None:
    assert set(NAMED) <= set(CASES)
    assert len(CASES) == len({case.name for case in CASES.values()})


def test_every_pipeline_with_a_transformer_has_a_case_or_a_reason() -> None:
    covered = {case.pipeline_class for case in CASES.values()}
    assert len(dit_pipelines()) > 140
    assert not covered & set(NOT_RUN)
    assert dit_pipelines() - covered - set(NOT_RUN) == set()
