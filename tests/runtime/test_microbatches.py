"""Cutting a call's inputs along the batch."""

import gc

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from dit_pipelining.runtime.microbatches import Cutter, Fits, gives_batch, merge


def test_only_what_has_a_batch_is_cut() -> None:
    call = {
        "hidden_states": torch.arange(8.0).reshape(4, 2),
        "timestep": torch.arange(4),
        "img_ids": torch.zeros(6, 3),
        "residuals": [torch.ones(4, 1), torch.ones(4, 1)],
        "kwargs": {"mask": torch.ones(4, 5), "scale": 0.5},
        "return_dict": False,
    }
    first, second = Cutter("hidden_states", 2).cut(call)
    assert torch.equal(second["hidden_states"], call["hidden_states"][2:])
    assert second["timestep"].tolist() == [2, 3]
    assert second["img_ids"] is call["img_ids"]
    assert [r.shape[0] for r in first["residuals"]] == [2, 2]
    assert first["kwargs"]["mask"].shape == (2, 5)
    assert first["kwargs"]["scale"] == 0.5


def test_lists_with_one_entry_per_sample_are_cut() -> None:
    call = {
        "x": [torch.zeros(1), torch.ones(1)],
        "t": torch.tensor([0.1, 0.2]),
        "caption": [torch.zeros(3), torch.ones(2)],
    }
    first, second = Cutter("x", 2).cut(call)
    assert len(first["x"]) == 1
    assert second["t"].tolist() == [torch.tensor(0.2).item()]
    assert second["caption"][0].shape == (2,)


def test_a_batch_that_does_not_divide_is_cut_into_fewer_parts() -> None:
    call = {"hidden_states": torch.zeros(4, 1)}
    assert len(Cutter("hidden_states", 6).cut(call)) == 2
    assert len(Cutter("hidden_states", 3).cut({"hidden_states": torch.zeros(1, 1)})) == 1


def test_outputs_are_merged_in_their_own_structure() -> None:
    one, other = torch.zeros(1, 2), torch.ones(1, 2)
    assert torch.equal(merge([(one,), (other,)])[0], torch.cat([one, other]))
    merged = merge([Transformer2DModelOutput(sample=one), Transformer2DModelOutput(sample=other)])
    assert isinstance(merged, Transformer2DModelOutput)
    assert merged.sample.shape == (2, 2)
    assert len(merge([([one],), ([other],)])[0]) == 2


def test_the_slices_of_a_tensor_are_the_same_objects_until_it_changes_or_dies() -> None:
    cutter = Cutter("x", 2)
    call = {"x": torch.zeros(2, 3), "prompt": torch.ones(2, 4)}
    first, again = cutter.cut(call)[1], cutter.cut({**call, "x": torch.zeros(2, 3)})[1]
    assert again["prompt"] is first["prompt"]
    call["prompt"].mul_(2)
    assert torch.equal(cutter.cut(call)[1]["prompt"], torch.full((1, 4), 2.0))
    del call, first, again
    gc.collect()
    assert not cutter._slices


def test_a_batch_that_cannot_be_told_from_another_dimension_stays_whole() -> None:
    call = {"x": torch.zeros(3, 5), "positions": torch.zeros(3, 3, 7)}
    assert len(Cutter("x", 3).cut(call)) == 1


def test_latents_with_as_many_channels_as_samples_are_cut() -> None:
    assert len(Cutter("x", 2).cut({"x": torch.zeros(4, 4, 2), "t": torch.zeros(4)})) == 2


def needs(**shapes: tuple[int, ...]) -> Fits:
    """A forward that takes inputs of these shapes only."""
    return lambda whole, part, size: all(tuple(part[name].shape) == shape for name, shape in shapes.items())


def test_the_reading_of_the_inputs_is_the_one_that_the_forward_takes() -> None:
    call = {"x": torch.zeros(2, 5), "layers": torch.arange(6.0).reshape(3, 2, 1), "table": torch.zeros(4, 2)}
    first, second = Cutter("x", 2, needs(x=(1, 5), layers=(3, 1, 1), table=(4, 1))).cut(call)
    assert first["layers"].flatten().tolist() == [0, 2, 4]
    assert second["layers"].flatten().tolist() == [1, 3, 5]
    first, _ = Cutter("x", 2, needs(x=(1, 5), layers=(3, 2, 1))).cut(call)
    assert first["table"] is call["table"]
    assert len(Cutter("x", 2, needs(x=(2, 5))).cut(call)) == 1


def test_sizes_of_each_sample_are_cut_and_lists_of_numbers_are_not() -> None:
    call = {"x": torch.zeros(2, 5), "img_shapes": [[(1, 4, 4)], [(1, 2, 2)]], "skip_layers": [7, 8]}
    _, second = Cutter("x", 2).cut(call)
    assert second["img_shapes"] == [[(1, 2, 2)]]
    assert second["skip_layers"] == [7, 8]


def test_lists_with_a_tensor_per_sample_are_cut_where_the_forward_wants_it() -> None:
    call = {"x": torch.zeros(2, 5), "images": [torch.zeros(3), torch.ones(4)]}
    _, second = Cutter("x", 2, lambda whole, part, size: len(part["images"]) == size).cut(call)
    assert [image.shape[0] for image in second["images"]] == [4]


def test_a_call_with_a_cache_stays_whole() -> None:
    class Cache:
        pass

    assert len(Cutter("x", 2).cut({"x": torch.zeros(2, 5), "cache": Cache()})) == 1


def test_an_output_is_merged_only_if_all_of_it_has_the_batch() -> None:
    assert gives_batch((torch.zeros(1, 2), None, {"sample": torch.zeros(1)}), 1)
    assert gives_batch([torch.zeros(7), torch.zeros(5)], 2)
    assert not gives_batch((torch.zeros(1, 2), torch.zeros(())), 1)
    assert not gives_batch([torch.zeros(2, 7)], 2)
