"""Unmodified diffusers pipelines over ranks give what one process gives: every step's latents, and the result."""

import pytest
import torch

from tests.distributed import RankPool

from . import CASES
from .compare import LAYOUTS, compare, plain

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

QUICK = ("pp2", "pp2-cfg2")


@pytest.fixture(scope="session")
def expected(ranks: RankPool) -> dict[str, list[torch.Tensor]]:
    """What the cases give in one process, each run once."""
    return {}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if name in NAMED and layout in QUICK else pytest.mark.full)
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


def test_the_quick_part_names_cases_that_are_there() -> None:
    assert set(NAMED) <= set(CASES)
    assert len(CASES) == len({case.name for case in CASES.values()})
