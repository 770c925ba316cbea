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


def inputs(device: torch.device) -> list[StreamInput]:
    """A changed video with new prompts, a new beginning, and noise that is not always the same."""
    videos = reference.video(CHUNKS)
    prompts = {12: reference.text(20).to(device), 13: reference.text(21).to(device)}
    scales = [1.0, 0.8, 1.0, 1.0]
    return [
        StreamInput(videos[chunk], scales[chunk % 4], prompts.get(chunk), first=chunk == 17) for chunk in range(CHUNKS)
    ]


def streamed(own: StreamSpec, graphs: bool, device: torch.device = harness.CPU) -> list[list[torch.Tensor]]:
    made = harness.stages(reference.model().to(device), own, (1, 3))
    for stage in made if graphs else ():
        stage.module.cuda_graphs = True
        for program in list(stage.module.programs.values()):
            stage.module.add_program(program)
    changes = harness.Script({10: own.levels[:1]} if own.policy == "level" else {})
    return harness.run(made, [inputs(device) for _ in range(own.streams)], changes)[0]


SPECS = [
    StreamSpec(frames_per_chunk=2, levels=(1.0, 0.6), window=2, sinks=2),
    StreamSpec(frames_per_chunk=2, levels=(1.0,), window=2, streams=2, guidance_scale=3.0),
    StreamSpec(frames_per_chunk=2, levels=(1.0, 0.6), window=2, sinks=2, policy="clean", streams=2),
]
each_spec = pytest.mark.parametrize("own", SPECS, ids=["sinks", "streams and guidance", "clean"])


def same_bits(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for s, t in zip(one, other, strict=True) for a, b in zip(s, t, strict=True))


@pytest.mark.usefixtures("_taped")
@each_spec
def test_replayed_stages_give_the_bits_of_plain_ones(own: StreamSpec) -> None:
    with torch.no_grad():
        expected, given = (streamed(own, graphs) for graphs in (False, True))
    assert Tape.replays > 5
    assert same_bits(given, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
@each_spec
def test_stages_on_a_gpu_give_the_same_bits_replayed(own: StreamSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    replay = cuda_graph._Recording.replay
    monkeypatch.setattr(cuda_graph._Recording, "replay", lambda *given: replays.append(1) or replay(*given))
    with torch.no_grad():
        expected, given = (streamed(own, graphs, torch.device("cuda", 0)) for graphs in (False, True))
    assert len(replays) > 5
    assert same_bits(given, expected)
