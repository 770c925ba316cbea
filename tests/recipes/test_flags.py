"""Help and wrong flags are answered at once: before torch and diffusers, which take seconds, are imported."""

import os
import subprocess
import sys

import pytest

from tests.recipes.launch import ROOT

RECIPES = (
    "custom_pipeline",
    "demo",
    "http_server",
    "image_to_video",
    "stream_video",
    "text_to_image",
    "text_to_video",
    "throughput",
)
STARTED = """
import runpy, sys
sys.modules["torch"] = sys.modules["diffusers"] = None  # an import of these raises
sys.path[0] = sys.argv[1].rpartition("/")[0]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
ANY = ["--model", "m", "--prompt", "a"]


def without_torch(recipe: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe where importing torch is an error."""
    command = [sys.executable, "-c", STARTED, str(ROOT / "recipes" / f"{recipe}.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_and_unknown_flags_are_answered_without_torch(recipe: str) -> None:
    asked = without_torch(recipe, "--help")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.startswith(f"usage: {recipe}.py")
    wrong = without_torch(recipe, "--halp")
    assert wrong.returncode == 2
    assert f"{recipe}.py: error: " in wrong.stderr


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("text_to_video", ["--output", "video.txt"], "--output video.txt: expected a file that ends in .mp4 or .gif"),
        ("image_to_video", ["--image", "no.png"], "--image no.png: "),
        ("stream_video", ["--levels", "1,x"], "--levels 1,x: expected numbers"),
    ],
)
def test_values_that_cannot_be_used_are_said_without_torch(recipe: str, flags: list[str], message: str) -> None:
    done = without_torch(recipe, *ANY, *flags)
    assert done.returncode == 1
    assert done.stderr.startswith(f"ConfigError: {message}")


def test_all_scripts_find_what_they_import() -> None:
    folders = [ROOT / "recipes", ROOT / "recipes" / "benchmarks"]
    scripts = [str(path) for folder in folders for path in sorted(folder.glob("*.py"))]
    code = "import runpy, sys; [runpy.run_path(script, run_name='imported') for script in sys.argv[1:]]"
    path = os.pathsep.join(map(str, [ROOT, *folders]))
    command = [sys.executable, "-c", code, *scripts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]


def test_these_tests_would_notice_torch() -> None:
    assert "import of torch halted" in without_torch("train_tiny_wan", "--help").stderr
