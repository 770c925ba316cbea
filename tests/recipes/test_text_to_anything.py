"""The recipes as a user runs them: two processes write what one process writes."""

from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

from tests import checkpoints
from tests.recipes.launch import run


def output_of(recipe: str, processes: int, output: Path, *flags: str) -> np.ndarray:
    done = run(recipe, processes, "--pipeline-parallel-size", str(processes), "--output", str(output), *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    return imageio.imread(output)


SIZE = ["--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "2"]


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("model") / "wan")


@pytest.fixture(scope="module")
def flags(wan: Path) -> list[str]:
    """Of a small video."""
    return ["--model", str(wan), "--prompt", "a red cat", *SIZE]


@pytest.fixture(scope="module")
def alone(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The video as one process writes it."""
    return output_of("text_to_video.py", 1, tmp_path_factory.mktemp("alone") / "one.mp4", *flags)


def test_a_video_over_two_processes_is_that_of_one(flags: list[str], alone: np.ndarray, tmp_path: Path) -> None:
    assert alone.shape == (5, 32, 32, 3)
    assert np.array_equal(output_of("text_to_video.py", 2, tmp_path / "two.mp4", *flags), alone)


@pytest.mark.full
def test_a_video_over_two_replicas_of_two_stages_is_that_of_one_process(
    flags: list[str], alone: np.ndarray, tmp_path: Path
) -> None:
    spread = ["--pipeline-parallel-size", "2", "--cfg-parallel-size", "2", "--output", str(tmp_path / "four.mp4")]
    tiles = ["--vae-patch-parallel-size", "3", "--vae-use-tiling"]
    done = run("text_to_video.py", 4, *flags, *spread, *tiles)
    assert done.returncode == 0, done.stderr[-3000:]
    assert np.array_equal(imageio.imread(tmp_path / "four.mp4"), alone)
    assert "vae_patch_parallel_size switches the tiling of AutoencoderKLWan on" in done.stderr


@pytest.mark.full
def test_a_video_with_a_text_encoder_over_two_ranks_is_that_of_one_process(
    flags: list[str], alone: np.ndarray, tmp_path: Path
) -> None:
    two = output_of("text_to_video.py", 2, tmp_path / "two.mp4", *flags, "--text-encoder-tp-size", "2")
    assert np.abs(two.astype(int) - alone.astype(int)).max() <= 1  # rounding to bytes, and a video's compression


@pytest.mark.full
def test_a_video_over_ranks_that_share_tokens_is_that_of_one_process(
    flags: list[str], alone: np.ndarray, tmp_path: Path
) -> None:
    spread = ["--usp", "2", "--ulysses-mode", "anything", "--output", str(tmp_path / "four.mp4")]
    done = run("text_to_video.py", 4, *flags, *spread)  # the other two: stages
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 ranks: 2 stages x 2 token shards (ulysses)\ntransformer: 4 blocks over 2 stages" in done.stdout
    difference = np.abs(imageio.imread(tmp_path / "four.mp4").astype(int) - alone.astype(int))
    assert difference.max() <= 1  # rounding to bytes, and a video's compression


@pytest.fixture
def configured(flags: list[str], tmp_path: Path) -> list[str]:
    """Flags of two stages by a file."""
    config = tmp_path / "parallel.yaml"
    config.write_text("strategy: pipeline\npipeline_stages: 2\npartition: 3,1\n")
    return [*flags, "--config", str(config), "--output", str(tmp_path / "two.mp4")]


@pytest.mark.full
def test_a_file_says_how_the_ranks_are_used(configured: list[str]) -> None:
    done = run("text_to_video.py", 2, *configured)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("2 ranks: 2 stages\ntransformer: 4 blocks over 2 stages (3,1)")


def test_a_flag_beats_the_file_and_a_wrong_one_is_one_line_of_the_first_rank_and_the_cause_in_torchruns_report(
    configured: list[str],
) -> None:
    done = run("text_to_video.py", 2, *configured, "--partition", "1,1")
    assert done.returncode == 1
    assert sum(line.startswith("WrongSumError: ") for line in done.stderr.splitlines()) == 1
    assert "WrongSumError: " in done.stderr.rpartition("Root Cause")[2]


def test_an_image_over_two_processes_is_that_of_one(tmp_path: Path) -> None:
    model = checkpoints.flux(tmp_path / "flux")
    flags = [
        "--model",
        str(model),
        "--prompt",
        "a red cat",
        "--height",
        "16",
        "--width",
        "16",
        "--num-inference-steps",
        "2",
    ]
    alone = output_of("text_to_image.py", 1, tmp_path / "one.png", *flags)
    assert np.array_equal(output_of("text_to_image.py", 2, tmp_path / "two.png", *flags), alone)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--pipeline-parallel-size", "2"], "--nproc-per-node 2"),
        (["--model", "/nowhere/at-all"], "neither a folder nor a hub id"),
        (["--height", "36"], "ValueError: `height` and `width` have to be divisible by 16 but are 36 and"),
    ],
)
def test_a_wrong_flag_ends_with_one_line(wan: Path, wrong: list[str], message: str) -> None:
    done = run("text_to_video.py", 1, "--model", str(wan), "--prompt", "a", *wrong)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
