"""What guidance makes of a step."""

import pytest

from dit_pipelining.planning.guidance import StepCalls, step_calls
from dit_pipelining.planning.presets import preset


@pytest.mark.parametrize(
    ("mode", "model", "batch", "replicas", "expected"),
    [
        (None, "wan2.2-t2v-a14b", None, 1, (2, 1)),
        (None, "flux.1-dev", None, 1, (1, 1)),
        (None, "pixart-sigma-1024", None, 1, (1, 2)),
        (None, None, None, 1, (1, 1)),
        ("none", "wan2.2-t2v-a14b", None, 1, (1, 1)),
        ("batched", "wan2.2-t2v-a14b", None, 1, (1, 2)),
        ("batched", "wan2.2-t2v-a14b", None, 2, (2, 1)),
        ("batched", None, None, 3, (1, 2)),
        ("two-calls", None, None, 2, (2, 1)),
        (None, "pixart-sigma-1024", 4, 1, (1, 4)),
        (None, "pixart-sigma-1024", 4, 2, (2, 2)),
    ],
)
def test_calls_and_their_batch(mode, model, batch, replicas, expected):
    known = preset(model) if model else None
    assert step_calls(mode, known, batch, replicas) == StepCalls(*expected)
