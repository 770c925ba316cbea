"""Stages of a stream that are replayed as CUDA graphs give the bits of those that run plainly.

A CUDA graph runs the kernels that it saw again, on the same addresses, and no Python. That is played here on the CPU: a tape
notes every operation and its tensors, and a replay runs the operations on these very tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dit_pipelining.lowering import cuda_graph
from dit_pipelining.stream.head import StreamInput
from dit_pipelining.stream.spec import StreamSpec
from dit_pipelining.torch_internals import DispatchMode, storage_key, tree_flatten
from tests.stream import harness, reference

CHUNKS = 24
NEW_TENSORS = ("aten.lift_fresh", "aten._local_scalar_dense", "aten.nonzero")
"""Operations that a recording must not have: data that comes from the host, or goes there."""


class Tape(DispatchMode):
    """Stands for a `torch.cuda.CUDAGraph`."""

    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not str(func).startswith(NEW_TENSORS)
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        Tape.replays += 1
        for func, args, kwargs, before in self.calls:
            mine = {storage_key(own) for own in tree_flatten((args, kwargs))[0] if isinstance(own, torch.Tensor)}
            results = func(*args, **kwargs)
            for old, new in zip(tree_flatten(before)[0], tree_flatten(results)[0], strict=True):
                if isinstance(old, torch.Tensor) and storage_key(old) not in mine:  # else a view, or written in place
                    old.copy_(new)


@pytest.fixture
def _taped(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def recorded(tape: Tape, **_: Any) -> Iterator[None]:
        with tape:
            yield

    def layout(arguments: Any) -> Any:
        return tuple((tuple(own.shape), own.dtype) for own in arguments)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
    monkeypatch.setattr(cuda_graph, "_layout", layout)  # takes tensors of a GPU only
    monkeypatch.setattr(Tape, "replays", 0)


def inputs() -> list[StreamInput]:
    """A changed video with new prompts, a new beginning, and noise that is not always the same."""
    videos = reference.video(CHUNKS)
    prompts = {12: reference.text(20), 13: reference.text(21)}
    scales = [1.0, 0.8, 1.0, 1.0]
    return [
        StreamInput(videos[chunk], scales[chunk % 4], prompts.get(chunk), first=chunk == 17) for chunk in range(CHUNKS)
    ]


def streamed(own: StreamSpec, graphs: bool, counts: tuple[int, ...]) -> list[list[torch.Tensor]]:
    made = harness.stages(reference.model(), own, counts)
    for stage in made if graphs else ():
        stage.module.cuda_graphs = True
        for program in list(stage.module.programs.values()):
            stage.module.add_program(program)
    changes = harness.Script({10: own.levels[:1]} if own.policy == "level" else {})
    return harness.run(made, [inputs() for _ in range(own.streams)], changes)[0]


@pytest.mark.usefixtures("_taped")
@pytest.mark.parametrize(
    "more",
    [
        dict(levels=(1.0, 0.6), window=2, sinks=2),
        dict(levels=(1.0,), window=2, streams=2, guidance_scale=3.0),
        dict(levels=(1.0, 0.6), window=2, sinks=2, policy="clean", streams=2),
    ],
    ids=["sinks", "streams and guidance", "clean"],
)
def test_replayed_stages_give_the_bits_of_plain_ones(more: dict[str, Any]) -> None:
    own = StreamSpec(frames_per_chunk=2, **more)
    with torch.no_grad():
        expected, given = (streamed(own, graphs, (1, 3)) for graphs in (False, True))
    assert Tape.replays > 5
    for one, other in zip(expected, given, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
