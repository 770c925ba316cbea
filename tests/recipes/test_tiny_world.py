"""The synthetic world draws what its captions say, and the measure reads it back."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from contact_sheet import contact_sheet
from PIL import Image
from tiny_world import (
    BACKGROUND_NAMES,
    COLOR_NAMES,
    HELD_OUT_COLOR_SHAPE,
    HELD_OUT_SHAPE_MOTION,
    MOTIONS,
    SHAPES,
    Object,
    Scene,
    caption,
    held_out_scenes,
    training_scene,
    vocabulary,
)
from tiny_world_measure import read_background, read_objects, score
from tiny_world_render import render


def draw(scenes: list[Scene], seed: int = 0) -> np.ndarray:
    video, coverage = render(scenes, 25, 96, torch.Generator().manual_seed(seed))
    assert video.shape == (len(scenes), 3, 25, 96, 96)
    assert coverage.shape == (len(scenes), 1, 25, 96, 96)
    return video.permute(0, 2, 3, 4, 1).numpy() / 2 + 0.5


def test_training_scenes_have_no_held_out_pair_and_cover_all_attributes() -> None:
    rng = random.Random(0)
    scenes = [training_scene(rng) for _ in range(3000)]
    objects = [o for scene in scenes for o in scene.objects]
    assert not any((o.color, o.shape) in HELD_OUT_COLOR_SHAPE for o in objects)
    assert not any((o.shape, o.motion) in HELD_OUT_SHAPE_MOTION for o in objects)
    assert {o.color for o in objects} == set(COLOR_NAMES)
    assert {o.shape for o in objects} == set(SHAPES)
    assert {o.motion for o in objects} == set(MOTIONS)
    assert {scene.background for scene in scenes} == set(BACKGROUND_NAMES)
    assert {len(scene.objects) for scene in scenes} == {1, 2}


def test_held_out_scenes_all_contain_a_pair_training_never_shows() -> None:
    scenes = held_out_scenes(96)
    assert all(any(o.held_out for o in scene.objects) for scene in scenes)
    assert sum(len(scene.objects) == 2 for scene in scenes) == 32
    assert scenes == held_out_scenes(96)
    assert scenes != held_out_scenes(96, seed=1)


def test_captions_use_only_words_of_the_vocabulary() -> None:
    rng = random.Random(0)
    words = set(vocabulary())
    for _ in range(500):
        text = caption(training_scene(rng), rng).replace(",", " ,")
        assert set(text.split()) <= words


def test_prompt_of_a_scene_names_every_attribute() -> None:
    scene = Scene((Object("orange", "star", "up"), Object("blue", "heart", "grows")), "navy")
    assert scene.prompt == "an orange star moves up and a blue heart grows on a navy background"


@pytest.mark.parametrize("motion", MOTIONS)
def test_measure_reads_back_each_shape_in_each_motion(motion: str) -> None:
    scenes = [Scene((Object("green", shape, motion),), "gray") for shape in SHAPES]
    seen = [read_objects(video, 1) for video in draw(scenes)]
    assert [(s[0].color, s[0].shape, s[0].motion) for s in seen] == [("green", shape, motion) for shape in SHAPES]


@pytest.mark.parametrize("background", BACKGROUND_NAMES)
def test_measure_reads_back_each_colour_on_each_background(background: str) -> None:
    videos = draw([Scene((Object(color, "circle", "left"),), background) for color in COLOR_NAMES])
    assert [read_objects(video, 1)[0].color for video in videos] == list(COLOR_NAMES)
    assert {read_background(video) for video in videos} == {background}


def test_two_objects_are_told_apart_and_scored_apart() -> None:
    scene = Scene((Object("red", "square", "left"), Object("cyan", "star", "grows")), "sand")
    (video,) = draw([scene])
    assert score(scene, video) == {"color": 1.0, "shape": 1.0, "motion": 1.0, "background": 1.0}
    asked = Scene((Object("red", "square", "right"), Object("pink", "star", "grows")), "black")
    assert score(asked, video) == {"color": 0.5, "shape": 1.0, "motion": 0.5, "background": 0.0}


def test_an_empty_video_scores_nothing_but_its_background() -> None:
    scene = Scene((Object("red", "square", "left"),), "black")
    empty = np.full((25, 96, 96, 3), 0.04)
    assert score(scene, empty) == {"color": 0.0, "shape": 0.0, "motion": 0.0, "background": 1.0}


def test_contact_sheet_lays_frames_out_in_rows(tmp_path: Path) -> None:
    frames = np.linspace(0, 1, 7)[:, None, None, None] * np.ones((1, 4, 6, 3))
    path = contact_sheet(frames, tmp_path / "new" / "sheet.png", columns=3, scale=2, gap=1)
    sheet = np.asarray(Image.open(path))
    assert sheet.shape == (3 * 9 - 1, 3 * 13 - 1, 3)
    assert (sheet[:8, :12] == 0).all()
    assert (sheet[18:, :12] == 255).all()


def test_contact_sheet_refuses_a_batch_of_videos(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass one video only"):
        contact_sheet(np.zeros((1, 5, 4, 4, 3)), tmp_path / "sheet.png")
