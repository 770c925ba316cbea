"""The noise scale of a chunk falls with what moves in it."""

import pytest
import torch

from dit_pipelining.stream.motion import MotionNoise

STILL = torch.zeros(1, 3, 4, 8, 8)


def moving(by: float) -> torch.Tensor:
    """A chunk whose picture changes by so much from frame to frame."""
    return by * torch.tensor([1.0, 0.0, 1.0, 0.0]).view(1, 1, 4, 1, 1).expand(1, 3, 4, 8, 8)


def test_still_video_gets_most_noise_and_fast_video_least() -> None:
    assert MotionNoise(0.6, 0.9)(STILL) == 0.9
    assert MotionNoise(0.6, 0.9, full_motion=0.2)(moving(0.5)) == pytest.approx(0.6)
    assert MotionNoise(0.6, 0.9, full_motion=0.2)(moving(0.1)) == pytest.approx(0.75)


def test_a_change_between_two_chunks_counts_and_the_scale_does_not_jump() -> None:
    noise = MotionNoise(0.6, 0.9, full_motion=0.2, smoothing=0.5)
    assert noise(STILL) == 0.9
    assert noise(STILL + 1) == pytest.approx(0.75)  # a cut: half of the way to 0.6
    assert noise(STILL + 1) == pytest.approx(0.825)  # still again
