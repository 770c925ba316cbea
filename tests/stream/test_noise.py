"""Noise belongs to its stream, chunk and level, whoever draws it and in whatever order."""

from itertools import product

import torch

from dit_pipelining.stream.noise import KEPT, NoiseSource

SHAPE = (1, 4, 2, 16, 16)
KEYS = list(product(range(2), range(3), range(3)))


def source(seed: int = 0, dtype: torch.dtype = torch.float32) -> NoiseSource:
    return NoiseSource(seed, SHAPE, dtype, torch.device("cpu"))


def test_noise_does_not_depend_on_what_was_drawn_before() -> None:
    one, other = source(), source()
    forwards = {key: one(*key).clone() for key in KEYS}
    assert len(KEYS) > KEPT  # some are drawn anew
    assert all(torch.equal(other(*key), forwards[key]) for key in reversed(KEYS))
    assert all(torch.equal(one(*key), forwards[key]) for key in KEYS)


def test_each_stream_chunk_and_level_has_noise_of_its_own() -> None:
    drawn = torch.stack([source()(*key).flatten() for key in KEYS])
    correlation = torch.corrcoef(drawn) - torch.eye(len(KEYS))
    assert correlation.abs().max() < 0.12  # 2,048 numbers each: five standard deviations
    assert not torch.equal(source(1)(0, 0, 0), source(0)(0, 0, 0))


def test_noise_is_normal_for_late_chunks_too() -> None:
    drawn = torch.cat([source()(0, 2**40 + chunk, 3).flatten() for chunk in range(8)])
    assert abs(drawn.mean()) < 0.04
    assert abs(drawn.std() - 1) < 0.03
