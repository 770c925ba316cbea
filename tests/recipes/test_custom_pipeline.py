"""The hand-written pipeline against diffusers' own, as one process and as stages."""

from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from custom_transformer import StagedWanTransformer, stream_weights
from custom_wan_pipeline import CustomWanPipeline
from diffusers import WanPipeline

from dit_pipelining.errors import CheckpointError
from tests import checkpoints
from tests.distributed import RankPool
from tests.mixins.pipelines import on_groups
from tests.recipes.test_text_to_anything import run

CALL: dict[str, Any] = dict(
    prompt="a red cat", negative_prompt="a dog", height=32, width=32, num_frames=5, num_inference_steps=3
)
SCALES: dict[str, Any] = dict(guidance_scale=4.0, guidance_scale_2=2.0)


@pytest.fixture(scope="module")
def two_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("wan") / "wan", experts=2)


def generate(folder: Path, boundary_ratio: float | None = None) -> Any:
    pipeline = CustomWanPipeline(folder, boundary_ratio=boundary_ratio)
    experts = [pipeline.transformer, pipeline.transformer_2]
    held = [None if expert is None else (expert.start, expert.end) for expert in experts]
    return pipeline(**CALL, **SCALES), held


def reference(folder: Path, boundary_ratio: float | None) -> np.ndarray:
    """Diffusers' own video; with one expert, as a pipeline that has but that one."""
    pipeline, scales = WanPipeline.from_pretrained(folder), dict(SCALES)
    if boundary_ratio is not None:
        pipeline.register_to_config(boundary_ratio=None)
        scales["guidance_scale_2"] = None
    if boundary_ratio == 1.0:
        pipeline.transformer, scales["guidance_scale"] = pipeline.transformer_2, SCALES["guidance_scale_2"]
    generator = torch.Generator().manual_seed(0)
    video: np.ndarray = pipeline(**CALL, **scales, generator=generator, output_type="np").frames[0]
    return video


@pytest.mark.parametrize(
    ("ratio", "held"),
    [(None, [(0, 4), (0, 4)]), pytest.param(0.0, [(0, 4), None], marks=pytest.mark.full), (1.0, [None, (0, 4)])],
)
def test_it_generates_what_diffusers_does(
    ranks: RankPool, two_experts: Path, ratio: float | None, held: list[Any]
) -> None:
    ((video, loaded),) = ranks.run(1, on_groups, 1, 1, generate, two_experts, ratio)
    assert loaded == held
    np.testing.assert_allclose(video, reference(two_experts, ratio), atol=1e-5)


@pytest.mark.parametrize(("stages", "branches"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.full)])
def test_stages_generate_what_one_process_does(ranks: RankPool, two_experts: Path, stages: int, branches: int) -> None:
    ((expected, _),) = ranks.run(1, on_groups, 1, 1, generate, two_experts)
    results = ranks.run(stages * branches, on_groups, stages, branches, generate, two_experts)
    for rank, (video, held) in enumerate(results):
        assert held[0] != (0, 4)
        if rank % stages == 0:
            assert np.array_equal(video, expected)
        else:
            assert video is None


def test_the_recipe_runs_under_torchrun(tmp_path: Path) -> None:
    model = checkpoints.wan(tmp_path / "wan")
    size = ["--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "2"]
    output = tmp_path / "custom.mp4"
    flags = ["--model", str(model), "--prompt", "a red cat", *size, "--partition", "3,1", "--output", str(output)]
    done = run("custom_pipeline.py", 2, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0: stage 0 of 2, blocks 0 to 2 of 4" in done.stdout
    assert "rank 1: stage 1 of 2, blocks 3 to 3 of 4" in done.stdout
    assert imageio.imread(output).shape == (5, 32, 32, 3)


def missing_expert(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        CustomWanPipeline(folder, boundary_ratio=0.5)
    return str(error.value)


def test_a_boundary_without_a_second_transformer_is_named(ranks: RankPool, tmp_path: Path) -> None:
    (text,) = ranks.run(1, on_groups, 1, 1, missing_expert, checkpoints.wan(tmp_path / "wan"))
    assert "a boundary ratio of 0.5 needs transformer_2" in text


CONFIG: dict[str, Any] = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=32,
    freq_dim=32,
    ffn_dim=48,
    num_layers=4,
    eps=1e-6,
    rope_max_seq_len=32,
)


def stage_weights(folder: Path) -> Any:
    transformer = StagedWanTransformer(CONFIG)
    weights = list(stream_weights(folder / "transformer", transformer))
    filled = transformer.load_weights(weights)
    assert filled == set(dict(transformer.named_parameters()))
    texts = []
    for wrong in (
        [pair for pair in weights if "attn1.to_k.weight" not in pair[0]],
        [("blocks_0.weight", weights[0][1])],
    ):
        with pytest.raises(CheckpointError) as error:
            transformer.load_weights(wrong)
        texts.append(str(error.value))
    try:
        transformer(torch.zeros(1, 4, 1, 4, 4), torch.tensor([1]), torch.zeros(1, 3, 32))
        texts.append("ran")
    except ValueError as error:
        texts.append(str(error))
    return sorted(name for name, _ in weights), texts


def test_a_stage_reads_and_needs_only_its_own_tensors(ranks: RankPool, two_experts: Path) -> None:
    (names, texts), (names_2, texts_2) = ranks.run(2, on_groups, 2, 1, stage_weights, two_experts)
    assert "patch_embedding.weight" in names
    assert "proj_out.weight" not in names
    assert not any(name.startswith(("blocks.2.", "blocks.3.")) for name in names)
    assert {name.split(".")[1] for name in names_2 if name.startswith("blocks.")} == {"2", "3"}
    for missing, unknown, _ in (texts, texts_2):
        assert "lacks 2 of this stage's tensors" in missing
        assert "self_attention.to_qkv.weight[1]" in missing
        assert "blocks_0.weight of the checkpoint has no place" in unknown
    assert texts[2] == "ran"
    assert "stage 1 of 2 was called without intermediate_tensors" in texts_2[2]
