"""What depends on neither latents nor time is computed once for all steps of a denoising loop, and never too rarely."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dit_pipelining.api import SplitModel, split_model
from tests.capture.toy import DIM, Toy, randn
from tests.same import assert_same
from tests.zoo import CASES
from tests.zoo.case import build_inputs, build_model


class Counted(nn.Linear):
    """A linear layer that counts its calls and notes its results; with a hook on it, it would run at every call."""

    __module__ = nn.Linear.__module__  # recorded as one call, as torch's own layers are

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.calls = 0
        self.results: list[weakref.ref[torch.Tensor]] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result = super().forward(input)
        self.calls += 1
        self.results.append(weakref.ref(result))
        return result


class Conditioned(Toy):
    """A text projection that is the same at every step, and a time projection that is not."""

    def __init__(self) -> None:
        super().__init__(2)
        self.text, self.time = Counted(), Counted()

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states, self.text(text) + self.time(timestep))


def step(i: int) -> dict[str, torch.Tensor]:
    """New latents and a new time, as every denoising step has."""
    return dict(hidden_states=randn(1, 4, DIM, seed=i), timestep=randn(1, 1, DIM, seed=100 + i))


def prompt(seed: int = 50) -> torch.Tensor:
    return randn(1, 4, DIM, seed=seed)


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def split_and_counters(model: Conditioned, text: torch.Tensor) -> tuple[SplitModel, Counted, Counted]:
    split = split_model(model, 2, step(0) | dict(text=text), partitioner="uniform")
    return split, model.text, model.time


def test_a_step_invariant_value_is_computed_once_in_a_loop() -> None:
    model, text = Conditioned(), prompt()
    split, texts, times = split_and_counters(model, text)
    expected = [model(**step(i), text=text) for i in range(5)]
    texts.calls = times.calls = 0
    for i in range(5):
        assert_same(split(**step(i), text=text), expected[i])
    assert texts.calls == 1
    assert times.calls == 5


def test_every_prompt_is_kept_while_prompts_alternate() -> None:
    """The conditional and the unconditional call of each step."""
    model, one, other = Conditioned(), prompt(50), prompt(51)
    split, texts, _ = split_and_counters(model, one)
    for i in range(3):
        split(**step(i), text=one)
        split(**step(i), text=other)
    assert texts.calls == 2
    for text in (one, other):
        assert_same(split(**step(0), text=text), model(**step(0), text=text))


def test_a_prompt_changed_in_place_is_computed_again() -> None:
    model, text = Conditioned(), prompt()
    split, texts, _ = split_and_counters(model, text)
    before = split(**step(0), text=text)
    text.mul_(2)
    after = split(**step(0), text=text)
    assert texts.calls == 2
    assert not torch.equal(after, before)
    assert_same(after, model(**step(0), text=text))


def test_a_prompt_changed_through_a_view_is_computed_again() -> None:
    model, text = Conditioned(), prompt()
    split, _, _ = split_and_counters(model, text)
    split(**step(0), text=text)
    text[0, 0].zero_()
    assert_same(split(**step(0), text=text), model(**step(0), text=text))


def test_an_equal_prompt_in_another_tensor_is_computed_again() -> None:
    model, text = Conditioned(), prompt()
    split, texts, _ = split_and_counters(model, text)
    split(**step(0), text=text)
    split(**step(1), text=text.clone())
    assert texts.calls == 2


def test_a_prompt_at_the_address_of_a_dead_one_is_computed_again() -> None:
    model = Conditioned()
    split = split_model(model, 2, step(0) | dict(text=prompt()), partitioner="uniform")
    for seed in range(30):  # each one dies before the next is made, which mostly gets its id and its memory
        text = prompt(seed)
        assert_same(split(**step(0), text=text), model(**step(0), text=text))
        del text


def test_changed_weights_are_seen() -> None:
    model, text = Conditioned(), prompt()
    split, _, _ = split_and_counters(model, text)
    split(**step(0), text=text)
    model.text.weight.mul_(2)
    assert_same(split(**step(0), text=text), model(**step(0), text=text))


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_seen(assign: bool) -> None:
    model, text = Conditioned(), prompt()
    split, _, _ = split_and_counters(model, text)
    before = split(**step(0), text=text)
    split.stages[0].load_state_dict({n: t * 2 for n, t in split.stages[0].state_dict().items()}, assign=assign)
    after = split(**step(0), text=text)
    assert not torch.equal(after, before)
    assert_same(after, model(**step(0), text=text))


def test_what_is_kept_goes_when_the_prompt_dies() -> None:
    model, text = Conditioned(), prompt()
    split, texts, _ = split_and_counters(model, text)
    split(**step(0), text=text)
    split(**step(1), text=text)
    assert texts.calls == 1
    assert kept_results(split) == 1
    del text
    gc.collect()
    assert kept_results(split) == 0


def kept_results(split: SplitModel) -> int:
    programs = [program for stage in split.stages for program in stage.programs.values()]
    return sum(len(group.kept._kept) for program in programs for group in program.groups if group.kept.inputs)


def test_the_size_of_what_is_kept_is_known_before_it_is_there() -> None:
    """A text projection for each prompt, and rotary tables for all, against the tensors that a Wan's stages keep."""
    case = CASES["WanTransformer3D"]
    inputs = build_inputs(case)
    split = split_model(build_model(case), 2, inputs)
    prompts = [torch.randn_like(inputs["encoder_hidden_states"]) for _ in range(3)]
    for text in prompts:
        split(**{**inputs, "encoder_hidden_states": text})
    for stage in split.stages:
        for_each, for_all = stage.kept_bytes(split.graph)
        assert for_each > 0
        assert for_all > 0
        held = [
            tensor.nbytes
            for group in stage.programs[id(split.graph)].groups
            for entry in group.kept._kept.values()
            for tensor in entry.results
        ]
        assert sum(held) == len(prompts) * for_each + for_all


def test_a_split_that_is_dropped_keeps_nothing() -> None:
    model, text = Conditioned(), prompt()
    split = split_model(model, 2, step(0) | dict(text=text), partitioner="uniform")
    split(**step(0), text=text)
    del split
    gc.collect()
    assert [reference() for reference in model.text.results] == [None]  # although the prompt lives on
    assert text.shape == (1, 4, DIM)


def test_calls_that_record_gradients_keep_nothing() -> None:
    model, text = Conditioned(), prompt()
    split, texts, _ = split_and_counters(model, text)
    with torch.enable_grad():
        split(**step(0), text=text)
        split(**step(1), text=text)
    assert texts.calls == 2


def test_inference_tensors_keep_nothing_since_their_writes_are_not_counted() -> None:
    model = Conditioned()
    with torch.inference_mode():
        text = prompt()
        split, _, _ = split_and_counters(model, text)
        split(**step(0), text=text)
        text.mul_(2)
        assert_same(split(**step(0), text=text), model(**step(0), text=text))


class TwoPrompts(Toy):
    """Each prompt is projected by itself; what depends on both is computed from both."""

    def __init__(self) -> None:
        super().__init__(2)
        self.image = nn.Linear(DIM, DIM)
        self.both = nn.Linear(DIM, DIM)

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        text, image = self.text(text), self.image(image)
        x = self.blocks[0](hidden_states, text)
        return self.blocks[1](x + image, self.both(text + image))


def test_values_of_different_inputs_are_kept_apart() -> None:
    model, text, image = TwoPrompts(), prompt(50), prompt(51)
    split = split_model(
        model, 2, dict(hidden_states=step(0)["hidden_states"], text=text, image=image), partitioner="uniform"
    )
    for i in range(3):
        hidden = step(i)["hidden_states"]
        other = prompt(60 + i)
        assert_same(split(hidden, text, other), model(hidden, text, other))
        assert_same(split(hidden, other, image), model(hidden, other, image))


class FromNothing(Toy):
    """A table made of shapes and a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        table = torch.arange(hidden_states.shape[1])[:, None] * self.scale
        return self.run_blocks(hidden_states, table)


def test_a_table_made_of_a_buffer_follows_the_buffer() -> None:
    model = FromNothing()
    inputs = dict(hidden_states=randn(1, 4, DIM))
    split = split_model(model, 2, inputs, partitioner="uniform")
    split(**inputs)
    model.scale.fill_(3)
    assert_same(split(**inputs), model(**inputs))
