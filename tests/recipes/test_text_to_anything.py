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


def test_a_video_over_two_processes_is_that_of_one(tmp_path: Path) -> None:
    model = checkpoints.wan(tmp_path / "wan")
    size = ["--height", "32", "--width", "32", "--num-frames", "9", "--num-inference-steps", "2"]
    flags = ["--model", str(model), "--prompt", "a red cat", *size]
    alone = output_of("text_to_video.py", 1, tmp_path / "one.mp4", *flags)
    assert alone.shape == (9, 32, 32, 3)
    assert np.array_equal(output_of("text_to_video.py", 2, tmp_path / "two.mp4", *flags), alone)


def test_a_video_over_two_replicas_of_two_stages_is_that_of_one_process(tmp_path: Path) -> None:
    model = checkpoints.wan(tmp_path / "wan")
    size = ["--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "2"]
    flags = ["--model", str(model), "--prompt", "a red cat", *size]
    alone = output_of("text_to_video.py", 1, tmp_path / "one.mp4", *flags)
    spread = ["--pipeline-parallel-size", "2", "--cfg-parallel-size", "2", "--output", str(tmp_path / "four.mp4")]
    tiles = ["--vae-patch-parallel-size", "3", "--vae-use-tiling"]
    done = run("text_to_video.py", 4, *flags, *spread, *tiles)
    assert done.returncode == 0, done.stderr[-3000:]
    assert np.array_equal(imageio.imread(tmp_path / "four.mp4"), alone)
    assert "vae_patch_parallel_size switches the tiling of AutoencoderKLWan on" in done.stderr


@pytest.mark.full
def test_a_video_with_a_text_encoder_over_two_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    model = checkpoints.wan(tmp_path / "wan")
    size = ["--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "2"]
    flags = ["--model", str(model), "--prompt", "a red cat", *size]
    alone = output_of("text_to_video.py", 1, tmp_path / "one.mp4", *flags)
    two = output_of("text_to_video.py", 2, tmp_path / "two.mp4", *flags, "--text-encoder-tp-size", "2")
    assert np.abs(two.astype(int) - alone.astype(int)).max() <= 1  # rounding to bytes, and a video's compression


@pytest.mark.full
def test_a_video_over_ranks_that_share_tokens_is_that_of_one_process(tmp_path: Path) -> None:
    model = checkpoints.wan(tmp_path / "wan")
    size = ["--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "2"]
    flags = ["--model", str(model), "--prompt", "a red cat", *size]
    alone = output_of("text_to_video.py", 1, tmp_path / "one.mp4", *flags)
    spread = ["--usp", "2", "--ulysses-mode", "anything", "--output", str(tmp_path / "four.mp4")]
    done = run("text_to_video.py", 4, *flags, *spread)  # the other two: stages
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 blocks over 2 stages" in done.stdout
    difference = np.abs(imageio.imread(tmp_path / "four.mp4").astype(int) - alone.astype(int))
    assert difference.max() <= 1  # rounding to bytes, and a video's compression


def test_a_file_says_how_the_ranks_are_used_and_flags_beat_it(tmp_path: Path) -> None:
    model = checkpoints.wan(tmp_path / "wan")
    config = tmp_path / "parallel.yaml"
    config.write_text("strategy: pipeline\npipeline_stages: 2\npartition: 3,1\n")
    size = ["--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "1"]
    flags = [
        "--model",
        str(model),
        "--prompt",
        "a",
        "--config",
        str(config),
        "--output",
        str(tmp_path / "two.mp4"),
        *size,
    ]
    done = run("text_to_video.py", 2, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 blocks over 2 stages (3,1)" in done.stdout
    done = run("text_to_video.py", 2, *flags, "--partition", "1,1")
    assert done.returncode == 1
    assert "WrongSumError: " in done.stderr


def test_a_wrong_sum_is_one_line_of_the_first_rank_and_the_cause_in_torchruns_report(tmp_path: Path) -> None:
    model = checkpoints.wan(tmp_path / "wan")
    size = ["--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "1"]
    done = run("text_to_video.py", 2, "--model", str(model), "--prompt", "a", "--partition", "1,1", *size)
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
    ("flags", "message"),
    [
        (["--pipeline-parallel-size", "2"], "--nproc-per-node 2"),
        (["--model", "/nowhere/at-all"], "neither a folder nor a hub id"),
    ],
)
def test_a_wrong_flag_ends_with_one_line(tmp_path: Path, flags: list[str], message: str) -> None:
    model = ["--model", str(checkpoints.wan(tmp_path / "wan"))]
    done = run("text_to_video.py", 1, *model, "--prompt", "a", *flags)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
