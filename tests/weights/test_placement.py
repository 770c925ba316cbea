"""Encoders, decoders and what stays everywhere; and on which rank each lies."""

import diffusers
import pytest
import transformers

from dit_pipelining.weights.placement import ComponentSize, kind_of, place_components

GB = 10**9


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (diffusers.AutoencoderKLWan, "decoder"),
        (diffusers.AutoencoderOobleck, "decoder"),
        (transformers.SpeechT5HifiGan, "decoder"),
        (transformers.T5EncoderModel, "encoder"),
        (transformers.CLIPVisionModelWithProjection, "encoder"),
        (transformers.Qwen2_5_VLForConditionalGeneration, "encoder"),
        (diffusers.FluxControlNetModel, None),
        (diffusers.T2IAdapter, None),
        (diffusers.FluxTransformer2DModel, None),
        (diffusers.FlowMatchEulerDiscreteScheduler, None),
    ],
)
def test_kinds(cls: type, kind: str | None) -> None:
    assert kind_of(cls) == kind


def placed(world_size: int, output_ranks: list[int] | None = None, chosen: dict | None = None, **sizes: float) -> dict:
    components = {
        name: ComponentSize("decoder" if name.endswith("vae") else "encoder", int(size * GB))
        for name, size in sizes.items()
    }
    return place_components(components, world_size, output_ranks or list(range(world_size)), chosen)


def test_encoders_go_to_the_first_rank_and_vaes_to_the_last() -> None:
    assert placed(4, t5=9.5, clip=0.25, vae=0.17) == {"t5": 0, "clip": 0, "vae": 3}


def test_large_encoders_spread() -> None:
    assert placed(4, llama=16, t5=9.5, clip=0.25, clip_2=1.4, vae=0.17) == {
        "llama": 1,
        "t5": 0,
        "clip": 0,
        "clip_2": 0,
        "vae": 3,
    }
    assert placed(2, llama=16, t5=9.5, vae=0.17) == {"llama": 0, "t5": 1, "vae": 1}


def test_an_encoder_leaves_the_rank_of_a_large_vae() -> None:
    assert placed(2, [0], t5=9.5, vae=3) == {"t5": 1, "vae": 0}


def test_vaes_lie_where_results_are_returned() -> None:
    assert placed(4, [0, 2], t5=1, vae=1, audio_vae=1) == {"t5": 0, "vae": 2, "audio_vae": 2}


def test_the_users_choice_stands() -> None:
    assert placed(2, chosen={"t5": 0, "llama": 0, "vae": "all"}, t5=9, llama=9, vae=1) == {"t5": 0, "llama": 0}


def test_parts_of_an_encoder_count_on_each_of_their_ranks() -> None:
    def split(**sizes: float) -> dict:
        return {name: ComponentSize("encoder", int(size * GB), parts=2, ranks=2) for name, size in sizes.items()}

    assert place_components(split(llama=16, t5=9.5), 4, [3]) == {"llama": 0, "t5": 2}
    assert place_components(split(llama=16, t5=9.5), 2, [1]) == {"llama": 0, "t5": 0}
    both = split(t5=9.5) | {"vae": ComponentSize("decoder", 3 * GB), "clip": ComponentSize("encoder", GB)}
    assert place_components(both, 3, [2]) == {"t5": 0, "vae": 2, "clip": 2}


def test_components_of_no_size_stay_in_place() -> None:
    assert placed(2, a=0, b=0, vae=0) == {"a": 0, "b": 0, "vae": 1}
