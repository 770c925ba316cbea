"""The image-to-video recipe over two processes writes what diffusers makes in one."""

from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from diffusers.utils import export_to_video
from PIL import Image

from tests import checkpoints
from tests.recipes.launch import run

SIZE = dict(height=32, width=32, num_frames=9, num_inference_steps=2)
FLAGS = [text for name, value in SIZE.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = torch.randint(0, 256, (40, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "first.png"
    Image.fromarray(pixels.numpy()).save(path)
    return path


@pytest.mark.parametrize("checkpoint", [pytest.param("image to video", marks=pytest.mark.full), "text to video"])
def test_a_video_from_an_image_over_two_processes_is_that_of_diffusers(
    checkpoint: str, picture: Path, tmp_path: Path
) -> None:
    options, flags = {}, []
    if checkpoint == "image to video":
        model = checkpoints.wan_image_to_video(tmp_path / "wan")
    else:
        model = checkpoints.wan(tmp_path / "wan")
        options = {"expand_timesteps": True}
        flags = ["--pipeline-class", "WanImageToVideoPipeline", "--expand-timesteps"]
    pipeline = WanImageToVideoPipeline.from_pretrained(model, **options)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    video = pipeline(image=Image.open(picture), prompt="a red cat", generator=generator, **SIZE).frames[0]
    export_to_video(list(video), str(tmp_path / "one.mp4"), fps=16)

    two = tmp_path / "two.mp4"
    flags += [
        "--model",
        str(model),
        "--image",
        str(picture),
        "--prompt",
        "a red cat",
        "--seed",
        "3",
        "--output",
        str(two),
    ]
    done = run("image_to_video.py", 2, *flags, *FLAGS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert np.array_equal(imageio.imread(two), imageio.imread(tmp_path / "one.mp4"))


def test_a_pipeline_without_images_says_which_class_to_name(picture: Path, tmp_path: Path) -> None:
    model = checkpoints.wan(tmp_path / "wan")
    done = run("image_to_video.py", 1, "--model", str(model), "--image", str(picture), "--prompt", "a")
    assert done.returncode == 1
    assert "WanPipeline takes no image" in done.stderr
    assert "Traceback" not in done.stderr
