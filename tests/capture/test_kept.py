"""Results that are kept while the same inputs come again: when they are computed anew, and when they go."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dit_pipelining.capture.kept import KeptFunction


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


class Counted:
    """A function of two tensors and a weight that counts its calls."""

    def __init__(self, function: Any = lambda root, one, other: (one + other,)) -> None:
        self.calls = 0
        self.function = function

    def __call__(self, root: nn.Module, *inputs: torch.Tensor) -> Any:
        self.calls += 1
        return self.function(root, *inputs)


def kept_function(counted: Counted, weights: tuple[str, ...] = ()) -> KeptFunction:
    return KeptFunction(("one", "other"), weights, counted)


def leaves(one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(one=one, other=other)


def test_a_result_is_computed_once_for_the_same_tensors() -> None:
    counted = Counted()
    kept, inputs = kept_function(counted), leaves(torch.ones(2), torch.ones(2))
    first = kept.get(nn.Module(), inputs)
    assert kept.get(nn.Module(), inputs)[0] is first[0]
    inputs["one"].add_(1)
    assert torch.equal(kept.get(nn.Module(), inputs)[0], torch.full((2,), 3.0))
    assert counted.calls == 2


def test_a_long_lived_input_gathers_nothing_from_short_lived_ones() -> None:
    kept, shared = kept_function(Counted()), torch.ones(2)
    gc.collect()  # what other tests have left
    before = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    for _ in range(50):
        kept.get(nn.Module(), leaves(shared, torch.ones(2)))
    gc.collect()
    assert not kept._kept
    assert weakref.getweakrefcount(shared) == 0
    assert len(weakref.finalize._registry) == before  # type: ignore[attr-defined]


def test_a_result_that_is_a_view_of_its_input_does_not_keep_it_alive() -> None:
    kept = kept_function(Counted(lambda root, one, other: (one[:1], [other.view(1, 2)])))
    inputs = leaves(torch.ones(2), torch.ones(2))
    assert torch.equal(kept.get(nn.Module(), inputs)[1][0], torch.ones(1, 2))
    died = [weakref.ref(tensor) for tensor in inputs.values()]
    inputs.clear()
    gc.collect()
    assert [reference() for reference in died] == [None, None]
    assert not kept._kept


def test_the_id_of_a_dead_input_never_finds_its_result() -> None:
    kept = kept_function(Counted())
    old = leaves(torch.zeros(2), torch.zeros(2))
    kept.get(nn.Module(), old)
    entry = kept._kept[id(old["one"]), id(old["other"])]
    new = leaves(torch.ones(2), torch.ones(2))
    kept._kept[id(new["one"]), id(new["other"])] = entry  # as if the new tensors lay where the old ones did
    assert torch.equal(kept.get(nn.Module(), new)[0], torch.full((2,), 2.0))
    del old, entry
    gc.collect()
    assert torch.equal(kept.get(nn.Module(), new)[0], torch.full((2,), 2.0))
    assert len(kept._kept) == 1


def test_a_weight_that_was_exchanged_is_noticed_even_at_the_same_address() -> None:
    root = nn.Module()
    counted = Counted(lambda root, one, other: (one * root.scale,))
    kept, inputs = kept_function(counted, ("scale",)), leaves(torch.ones(2), torch.ones(2))
    ids = set()
    for value in range(20):
        tensor = torch.tensor(float(value))
        root.scale = None  # a freed weight's id and version come again at once
        root.scale = nn.Parameter(tensor, requires_grad=False)
        ids.add(id(root.scale))
        assert torch.equal(kept.get(root, inputs)[0], torch.full((2,), float(value)))
    assert counted.calls == 20
    assert len(ids) < 20


def test_several_threads_may_ask_at_once() -> None:
    kept, shared = kept_function(Counted()), torch.ones(2)
    wrong: list[Any] = []

    def ask(seed: int) -> None:
        with torch.no_grad():
            for i in range(300):
                other = torch.full((2,), float(seed * 1000 + i))
                for _ in range(2):
                    if not torch.equal(kept.get(nn.Module(), leaves(shared, other))[0], shared + other):
                        wrong.append((seed, i))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    assert not kept._kept
