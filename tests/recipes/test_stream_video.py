"""The live video recipe as a user runs it."""

import time
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import stream_video
from stream_files import camera_frames

from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.goals import StreamGoals
from dit_pipelining.stream.head import Pending
from tests import checkpoints
from tests.recipes.launch import run

SIZE = ["--height", "64", "--width", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.wan(tmp_path_factory.mktemp("stream") / "wan", num_layers=2))


def test_a_video_file_is_changed_over_two_processes(model: str, tmp_path: Path) -> None:
    given = np.random.default_rng(0).integers(0, 255, (18, 80, 64, 3), dtype=np.uint8)
    imageio.imwrite(tmp_path / "in.mp4", given, fps=16)
    output = tmp_path / "out.mp4"
    flags = ["--model", model, "--prompt", "a red cat", "--video", str(tmp_path / "in.mp4"), "--motion", *SIZE]
    (tmp_path / "goals.yaml").write_text("slo: {target_fps: 10000}")
    flags += ["--config", str(tmp_path / "goals.yaml")]
    flags += ["--levels", "0.9,0.5", "--window", "2", "--prompt-at", "2:a blue dog", "--output", str(output)]
    done = run("stream_video.py", 2, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    frames = imageio.imread(output)
    assert frames.shape == (17, 64, 64, 3)  # the 18th frame fills no chunk
    assert frames.std() > 1
    assert "17  frames" in done.stdout
    assert "\nslo.target_fps=10000 was missed" in done.stdout
    assert "stage 0" in done.stdout
    assert "stage 1" in done.stdout


@pytest.mark.full
def test_levels_are_chosen_by_measuring(model: str, tmp_path: Path) -> None:
    output = tmp_path / "out.mp4"
    flags = ["--model", model, "--prompt", "a red cat", *SIZE, "--num-frames", "9", "--output", str(output)]
    done = run("stream_video.py", 1, *flags, "--levels", "1,0.5", "--window", "2", "--target-fps", "0.01")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "chosen: 2 levels" in done.stdout
    assert len(imageio.imread(output)) == 9
    done = run("stream_video.py", 1, *flags, "--levels", "1,0.5", "--window", "2", "--target-fps", "1e6")
    assert done.returncode == 1
    assert "no choice gives 1e+06 frames/s" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--levels", "1,x"], "--levels 1,x: expected numbers"),
        (["--levels", "0.5,1"], r"levels=\(0.5, 1.0\): expected falling numbers"),
        (["--prompt-at", "a red cat"], "--prompt-at 'a red cat': expected a chunk's number"),
        (["--video", "nowhere.mp4"], "--video nowhere.mp4: there is no such file"),
        (["--window", "3", "--frames-per-chunk", "2"], "window=3: expected latent frames that are whole chunks of 2"),
        (["--frames-per-chunk", "1", "2"], "--frames-per-chunk: several are a choice for --target-fps"),
        (["--frames-per-chunk", "1", "0", "--target-fps", "9"], "--frames-per-chunk=0"),
        (["--adaptive-steps"], "--adaptive-steps needs --target-fps"),
    ],
)
def test_flags_that_cannot_be_used_are_said(
    monkeypatch: pytest.MonkeyPatch, model: str, flags: list[str], message: str, tmp_path: Path
) -> None:
    output = ["--output", str(tmp_path / "a.mp4")]
    monkeypatch.setattr("sys.argv", ["stream_video.py", "--model", model, "--prompt", "a", *SIZE, *flags, *output])
    with pytest.raises(ConfigError, match=message):
        stream_video.main()


def test_the_environment_says_how_many_levels_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    args = stream_video.flags().parse_args(["--model", "wan", "--prompt", "a", "--levels", "1,0.8,0.6,0.4"])
    monkeypatch.setenv("DIFFUSION_STREAM_BATCH_STEPS", "2")
    assert stream_video.spec_of(args, stream_video.goals_of(args)).levels == (1.0, 0.6)
    monkeypatch.setenv("DIFFUSION_STREAM_BATCH_STEPS", "5")
    with pytest.raises(
        ConfigError, match=r"DIFFUSION_STREAM_BATCH_STEPS=5 .*: name as many noise levels with --levels"
    ):
        stream_video.spec_of(args, stream_video.goals_of(args))


def test_flags_and_a_file_make_goals_together(tmp_path: Path) -> None:
    (tmp_path / "goals.yaml").write_text("slo: {target_fps: 9, max_ttff_ms: 800}")
    given = ["--model", "wan", "--prompt", "a", "--config", str(tmp_path / "goals.yaml")]
    plain, adaptive, faster = ([], ["--adaptive-steps"], ["--target-fps", "12"])
    found = [stream_video.goals_of(stream_video.flags().parse_args(given + more)) for more in (plain, adaptive, faster)]
    assert found == [StreamGoals(None, 9, 800), StreamGoals(None, 9, 800, True), StreamGoals(None, 12, 800)]


def test_of_a_cameras_frames_the_newest_are_taken(tmp_path: Path) -> None:
    shades = np.arange(0, 240, 10, dtype=np.uint8)
    film = np.broadcast_to(shades[:, None, None, None], (len(shades), 48, 64, 3))
    imageio.imwrite(tmp_path / "film.mp4", film, fps=16)
    frames = camera_frames(str(tmp_path / "film.mp4"), 32, 32)
    seen = []
    for frame in frames:
        time.sleep(0.05)
        if not isinstance(frame, Pending):
            assert frame.shape == (3, 32, 32)
            seen.append(float(frame.mean()))
    assert 0 < len(seen) < len(shades)  # a slow viewer misses some
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(230 / 127.5 - 1, abs=0.05)
