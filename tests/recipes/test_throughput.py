"""The throughput recipe: requests from a file, each with the pixels that diffusers gives it alone."""

import argparse
import json
from pathlib import Path
from typing import Any

import diffusers
import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from diffusers.utils import export_to_video
from throughput import check_arguments, read_requests

from dit_pipelining.errors import ConfigError
from tests import checkpoints
from tests.recipes.launch import run


def alone(model: Path, seed: int, **call: Any) -> Any:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(generator=torch.Generator().manual_seed(seed), output_type="np", **call)


def test_each_request_of_a_file_writes_the_video_it_gives_alone(tmp_path: Path) -> None:
    model = checkpoints.wan(tmp_path / "wan")
    size = dict(height=16, width=16, num_frames=5, num_inference_steps=2)
    own = dict(prompt="a blue dog", num_inference_steps=3, width=32)
    lines = ["a red cat", json.dumps({**own, "seed": 9}), "", "the moon"]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    flags = [text for name, value in size.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--model", str(model), "--prompts", str(tmp_path / "prompts.txt"), "--seed", "4", "--max-in-flight", "2"]
    done = run("throughput.py", 2, *flags, "--output", str(tmp_path / "videos"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3 requests, 2 in flight" in done.stdout
    assert "requests/min" in done.stdout
    calls = [(4, dict(prompt="a red cat", **size)), (9, {**size, **own}), (6, dict(prompt="the moon", **size))]
    for index, (seed, call) in enumerate(calls):
        export_to_video(list(alone(model, seed, **call).frames[0]), str(tmp_path / "alone.mp4"), fps=16)
        written = imageio.imread(tmp_path / "videos" / f"{index:04d}.mp4")
        assert np.array_equal(written, imageio.imread(tmp_path / "alone.mp4"))


@pytest.mark.full
def test_images_are_written_as_png(tmp_path: Path) -> None:
    model = checkpoints.flux(tmp_path / "flux")
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog\n")
    flags = ["--model", str(model), "--prompts", str(tmp_path / "prompts.txt"), "--output", str(tmp_path / "images")]
    done = run("throughput.py", 1, *flags, "--height", "16", "--width", "16", "--num-inference-steps", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    for seed, prompt in enumerate(["a red cat", "a blue dog"]):
        image = alone(model, seed, prompt=prompt, height=16, width=16, num_inference_steps=2).images[0]
        written = imageio.imread(tmp_path / "images" / f"{seed:04d}.png")
        assert np.array_equal(written, (image * 255).round().astype("uint8"))


def arguments(path: Path) -> argparse.Namespace:
    names = ("negative_prompt", "width", "height", "num_frames", "num_inference_steps", "guidance_scale")
    return argparse.Namespace(prompts=path, seed=0, **dict.fromkeys(names))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "is empty"),
        ('a cat\n{"prompt": ', "line 2: no JSON object"),
        ('{"prompt": "a", "seed": 1.5}', "seed=1.5"),
    ],
)
def test_a_broken_file_of_requests_says_where(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_requests(arguments(path))


def test_an_argument_that_the_pipeline_does_not_take_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('a cat\n{"prompt": "a", "num_frame": 5}')
    pipeline = diffusers.DiffusionPipeline.from_pretrained(checkpoints.wan(tmp_path / "wan"))
    with pytest.raises(ConfigError, match="request 1 has num_frame, which WanPipeline"):
        check_arguments(pipeline, read_requests(arguments(path)), path)
