"""Forward hooks that a caller puts on modules see and change what they do in the unsplit model, wherever they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from dit_pipelining.api import split_model
from dit_pipelining.errors import ConfigError, SplitError
from tests.capture.toy import DIM, Block, Toy, hidden, randn, run_apart
from tests.same import assert_same


class Pair(nn.Module):
    """Two results of a parameterless module of the model's own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x), x


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Model(Toy):
    """Glue of modules of all kinds: linear ones, ones of the model's own, with and without parameters, one inside another."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.condition = Projection()
        self.pair = Pair()
        self.norm = Projection()

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        sine, same = self.pair(self.text(encoder_hidden_states))
        context = self.condition(sine) + same
        x = self.run_blocks(self.proj_in(hidden_states), context)
        return self.proj_out(self.norm(x))


def inputs() -> dict[str, Any]:
    return dict(hidden_states=randn(2, 4, DIM), encoder_hidden_states=randn(2, 4, DIM, seed=1))


class Watch:
    """A hook that notes what a module gives and what it makes of that."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.seen: list[Any] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.seen.append(output)
        if isinstance(output, tuple):
            return tuple(tensor * self.factor for tensor in output)
        return output * self.factor


NAMES = ["proj_in", "text", "condition", "condition.linear", "pair", "blocks.0", "blocks.2.linear", "norm", "proj_out"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", [True, False], ids=["before the split", "after it"])
def test_a_hook_sees_and_changes_what_it_does_in_the_model(name: str, before: bool) -> None:
    model = Model()
    steps = [inputs() for _ in range(2)]  # two steps of one prompt
    steps[1]["encoder_hidden_states"] = steps[0]["encoder_hidden_states"]
    with torch.no_grad():
        plain = model(**steps[0])
        watch = Watch(1.5)
        handle = model.get_submodule(name).register_forward_hook(watch)
        expected, seen = [model(**step) for step in steps], list(watch.seen)
        if not before:
            handle.remove()
        split = split_model(model, 3, steps[0])
        if not before:
            assert_same(split(**steps[0]), plain)
            handle = model.get_submodule(name).register_forward_hook(watch)
        watch.seen.clear()
        assert_same([split(**step) for step in steps], expected)
        assert_same(watch.seen[-2:] if name == "pair" else watch.seen, seen)  # which every stage may compute
        assert_same(run_apart(split, steps[0]), expected[0])
        handle.remove()
        assert_same(split(**steps[0]), plain)


def test_a_pre_hook_gives_a_module_other_arguments() -> None:
    model = Model()
    with torch.no_grad():
        split = split_model(model, 2, inputs())
        for name in NAMES:
            handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
            assert_same(split(**inputs()), model(**inputs()))
            handle.remove()


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
@pytest.mark.parametrize("before", [True, False], ids=["before the split", "after it"])
def test_a_hook_on_all_modules_at_once_is_refused_until_it_is_removed(register: Any, before: bool) -> None:
    def watch(*_: Any) -> None: ...

    model = Model()
    with torch.no_grad():
        expected = model(**inputs())
        split = split_model(model, 2, inputs())
        handle = register(watch)
        try:
            with pytest.raises(ConfigError, match=r"watch.* is a forward hook on all modules at once"):
                split_model(model, 2, inputs()) if before else split(**inputs())
        finally:
            handle.remove()
        assert_same(split(**inputs()), expected)


def test_a_counter_of_torch_with_hooks_on_all_modules_counts_what_it_counts_in_the_model() -> None:
    model = Model()
    counts = []
    with torch.no_grad():
        split = split_model(model, 2, inputs())
        for run in (model, split):
            with FlopCounterMode(display=False) as counter:
                run(**inputs())
            counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def halved(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    own = layer.forward
    return lambda x: own(x) / 2


def test_a_forward_that_is_exchanged_acts_from_the_next_call_on() -> None:
    model = Model()
    with torch.no_grad():
        plain = model(**inputs())
        split = split_model(model, 2, (given := inputs()))
        assert_same(split(**given), plain)
        for name in ("text", "condition", "norm", "blocks.1"):
            layer = model.get_submodule(name)
            if name == "blocks.1":
                own = layer.forward
                layer.forward = lambda *args, own=own: own(*args) / 2
            else:
                layer.forward = halved(layer)  # type: ignore[method-assign]
            assert_same(split(**given), model(**given))
            del layer.forward
            assert_same(split(**given), plain)


class Doubled(Pair):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(2 * x), x


def test_a_module_of_the_glue_that_is_exchanged_acts_from_the_next_call_on() -> None:
    model = Model()
    with torch.no_grad():
        split = split_model(model, 2, inputs())
        model.pair = Doubled()
        assert_same(split(**inputs()), model(**inputs()))


def test_blocks_that_are_taken_out_no_longer_run() -> None:
    model = Model()
    with torch.no_grad():
        split = split_model(model, 2, inputs())
        del model.blocks[1]
        assert_same(split(**inputs()), model(**inputs()))


class HandsContextOn(Block):
    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> Any:
        return super().forward(x, context), context


class Handing(Toy):
    def __init__(self) -> None:
        super().__init__(block=HandsContextOn)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x, context = hidden_states, self.text(hidden_states)
        for block in self.blocks:
            x, context = block(x, context)
        return x + context


class Nested(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Toy()
        self.stack.forward = self.stack.run_blocks  # type: ignore[method-assign]
        self.blocks = nn.ModuleList()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.stack(hidden_states)
        return x


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [(Handing(), "blocks.1", "inside of the block"), (Nested(), "stack", "contains blocks")],
    ids=["a block that hands an argument on", "a module around blocks"],
)
def test_hooks_that_stages_would_pass_by_are_refused(model: nn.Module, name: str, reason: str) -> None:
    with torch.no_grad():
        split = split_model(model, 2, hidden())
        handle = model.get_submodule(name).register_forward_hook(Watch(2.0))
        with pytest.raises(ConfigError, match=reason):
            split(**hidden())
        handle.remove()
        assert_same(split(**hidden()), model(**hidden()))


def test_a_hook_that_changes_a_shape_or_writes_into_what_is_kept_is_refused() -> None:
    model = Model()
    with torch.no_grad():
        split = split_model(model, 2, inputs(), counts=(1, 2))
        handle = model.blocks[0].register_forward_hook(lambda _, args, output: output.double())
        with pytest.raises(SplitError, match=r"made .* torch.float64, where the model"):
            split(**inputs())
        handle.remove()
        given = inputs()
        handle = model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0], args[1].mul_(2)))
        with pytest.raises(SplitError, match="return new tensors"):
            split(**given)
        handle.remove()
        assert_same(split(**given), model(**given))
