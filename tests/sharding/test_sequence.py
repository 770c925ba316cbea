"""Models whose tokens are split over ranks give what diffusers' unsplit models give."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import AttentionBackendName

from dit_pipelining.api import split_model
from dit_pipelining.comm.layout import Layout
from dit_pipelining.errors import ConfigError, InputError
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.sharding.groups import SequenceGroups, make_sequence_groups
from dit_pipelining.sharding.sequence import apply_sequence_parallel, check_sequence_parallel
from tests.distributed import RankPool
from tests.zoo import CASES, build_inputs, build_model
from tests.zoo.case import Case, full, grid_ids, keep_first, randn

EVEN = [
    "WanTransformer3D",
    "FluxTransformer",
    "QwenImageTransformer",
    "SD3Transformer",
    "HunyuanVideoTransformer",
    "LTXTransformer",
]
ODD: dict[str, dict[str, Any]] = {  # 15 or 45 tokens of the image, 7 of the text, 4 or 5 of them no padding
    "WanTransformer3D": dict(hidden_states=randn(1, 4, 3, 6, 10), encoder_hidden_states=randn(1, 7, 16)),
    "FluxTransformer": dict(
        hidden_states=randn(1, 15, 4),
        img_ids=grid_ids(1, 3, 5, dtype=torch.float32),
        encoder_hidden_states=randn(1, 7, 32),
        txt_ids=full((7, 3), 0.0),
    ),
    "QwenImageTransformer": dict(
        hidden_states=randn(1, 15, 16),
        img_shapes=[(1, 3, 5)],
        encoder_hidden_states=randn(1, 7, 16),
        encoder_hidden_states_mask=keep_first([5], 7, torch.int64),
    ),
    "SD3Transformer": dict(hidden_states=randn(2, 4, 9, 5), encoder_hidden_states=randn(2, 7, 32)),
    "HunyuanVideoTransformer": dict(
        hidden_states=randn(2, 4, 3, 3, 5),
        timestep=full((2,), 44.0),
        encoder_hidden_states=randn(2, 7, 16),
        pooled_projections=randn(2, 8),
        encoder_attention_mask=keep_first([7, 4], 7, torch.float32),
        guidance=full((2,), 6000.0),
    ),
    "LTXTransformer": dict(
        hidden_states=randn(2, 45, 4),
        num_frames=3,
        height=3,
        width=5,
        encoder_hidden_states=randn(2, 7, 16),
        encoder_attention_mask=keep_first([7, 4], 7),
    ),
    "CogVideoXTransformer": dict(hidden_states=randn(2, 3, 4, 6, 10)),
}
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def odd(name: str) -> Case:
    return replace(CASES[name], inputs=CASES[name].inputs | ODD[name])


def groups(ring: int, ulysses: int) -> SequenceGroups:
    layout = Layout(ring=ring, ulysses=ulysses)
    return make_sequence_groups(layout, dist.get_rank(), torch.device("cpu"), timedelta(seconds=60))


def sizes(split: SplitModel) -> list[tuple[tuple[int, ...], int]]:
    [crossing] = split.boundaries
    return [(value.shape, value.bytes) for value in crossing]


def check_families(names: list[str], ring: int, ulysses: int, uneven: bool) -> dict[str, bool]:
    """Compare the model, and the model in two stages, with diffusers' own; gives whether they have its very bits."""
    shared = groups(ring, ulysses)
    bits = {}
    for name in names:
        case = odd(name) if name in ODD and uneven else CASES[name]
        expected = build_model(case)(**build_inputs(case))[0]
        model = build_model(case)
        apply_sequence_parallel(model, shared, uneven=uneven)
        whole = model(**build_inputs(case))[0]
        stages = split_model(model, 2, build_inputs(case), partitioner="uniform")(**build_inputs(case))[0]
        for output in (whole, stages):
            torch.testing.assert_close(output, expected, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
        bits[name] = torch.equal(whole, expected) and torch.equal(stages, expected)
    return bits


@pytest.mark.parametrize(
    ("ring", "ulysses", "names"),
    [(1, 2, EVEN), (2, 1, EVEN), (2, 2, EVEN[:2]), pytest.param(2, 2, EVEN[2:], marks=pytest.mark.full)],
    ids=["ulysses", "ring", "both", "both for the other families"],
)
def test_split_tokens_give_what_all_tokens_give(ranks: RankPool, ring: int, ulysses: int, names: list[str]) -> None:
    ranks.run(ring * ulysses, check_families, names, ring, ulysses, False)


@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [pytest.param(1, 2, marks=pytest.mark.full), pytest.param(2, 1, marks=pytest.mark.full), (2, 2)],
)
def test_any_number_of_tokens_can_be_split(ranks: RankPool, ring: int, ulysses: int) -> None:
    ranks.run(ring * ulysses, check_families, list(ODD), ring, ulysses, True)


MORE = [
    "WanTransformer3D@i2v",
    "WanTransformer3D@ti2v",
    "WanTransformer3D@batch",
    "FluxTransformer@controlnet",
    "Flux2Transformer",
    "QwenImageTransformer@batch-mask",
    "QwenImageTransformer@controlnet",
    "QwenImageTransformer@edit-zero-cond-t",
    "SD3Transformer@controlnet",
    "SD35Transformer",
    "HunyuanVideoTransformer@batch-mask",
    "HunyuanVideoI2VTransformer",
    "CogVideoXTransformer",
    "CogVideoX15Transformer",
    "LTX2Transformer",
    "LTX2Transformer@isolated",
    "ChronoEditTransformer3D",
    "HeliosTransformer3D",
    "MiniMaxH3Transformer",
]


@pytest.mark.full
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2)])
def test_variants_of_the_families_give_what_all_tokens_give(ranks: RankPool, ring: int, ulysses: int) -> None:
    ranks.run(ring * ulysses, check_families, MORE, ring, ulysses, True)


def boundary_sizes() -> dict[str, Any]:
    shared = groups(1, 2)
    found = {}
    for name in ("WanTransformer3D", "FluxTransformer", "HunyuanVideoTransformer"):
        plain = split_model(build_model(CASES[name]), 2, build_inputs(CASES[name]), partitioner="uniform")
        model = build_model(CASES[name])
        apply_sequence_parallel(model, shared)
        parts = split_model(model, 2, build_inputs(CASES[name]), partitioner="uniform")
        found[name] = sizes(plain), sizes(parts)
    return found


def test_ranks_send_their_part_of_the_tokens_to_the_next_stage(ranks: RankPool) -> None:
    for found in ranks.run(2, boundary_sizes):
        for name, (whole, parts) in found.items():
            tokens = [(size, part) for (shape, size), (own, part) in zip(whole, parts, strict=True) if shape != own]
            assert tokens, name
            assert all(size == 2 * part for size, part in tokens), name
            # What else crosses does not grow with the number of tokens: modulations of the timestep.
            same = [shape for (shape, _), (own, _) in zip(whole, parts, strict=True) if shape == own]
            assert all(len(shape) == 2 or shape[1] in (1, 6) for shape in same), name
        whole, parts = found["FluxTransformer"]
        assert sum(size for _, size in whole) == 2 * sum(size for _, size in parts)


def second_call() -> None:
    model, plain = build_model(CASES["FluxTransformer"]), build_model(CASES["FluxTransformer"])
    apply_sequence_parallel(model, groups(1, 2), uneven=True)
    split = split_model(model, 2, build_inputs(CASES["FluxTransformer"]))
    for case in (CASES["FluxTransformer"], odd("FluxTransformer"), CASES["FluxTransformer"]):
        inputs = build_inputs(case)
        torch.testing.assert_close(split(**inputs), plain(**inputs), **TOLERANCE)


def test_sizes_may_change_from_call_to_call(ranks: RankPool) -> None:
    ranks.run(2, second_call)


def refusals() -> list[str]:
    shared = groups(1, 2)
    found = []
    model = build_model(CASES["FluxTransformer"])
    apply_sequence_parallel(model, shared)
    with pytest.raises(ConfigError) as again:
        apply_sequence_parallel(model, shared)
    found.append(str(again.value))
    for tokens in (15, 1):
        inputs = build_inputs(CASES["FluxTransformer"])
        inputs["hidden_states"] = inputs["hidden_states"][:, :tokens]
        with pytest.raises(InputError) as size:
            split_model(model, 2, inputs)
        found.append(str(size.value))
    model.transformer_blocks[0].attn.processor._attention_backend = AttentionBackendName.FLEX
    with pytest.raises(ConfigError) as backend:
        model.transformer_blocks[0].attn(torch.zeros(1, 4, 32), torch.zeros(1, 4, 32))
    found.append(str(backend.value))
    return found


def test_what_cannot_be_split_says_what_to_do(ranks: RankPool) -> None:
    for again, odd_size, too_few, backend in ranks.run(2, refusals):
        assert "split over ranks already" in again
        assert "hidden_states: 15 tokens cannot be split evenly over ring_degree=1 x ulysses_degree=2" in odd_size
        assert 'ulysses_mode="anything"' in odd_size
        assert "hidden_states: 1 tokens cannot be split over 2 ranks" in too_few
        assert "transformer_blocks.0.attn" in backend
        assert "scaled_dot_product_attention" in backend


def test_heads_that_cannot_be_shared_name_the_degrees_that_can() -> None:
    model = build_model(CASES["QwenImageTransformer"])  # 4 heads
    check_sequence_parallel(model, ulysses_degree=4)
    with pytest.raises(
        ConfigError, match=r"the 4 heads of QwenImage.* Degrees that work: 1, 2, 4; ring_degree takes any"
    ):
        check_sequence_parallel(model, ulysses_degree=3)
    with pytest.raises(ConfigError, match=r"beside tensor_parallel_size=2\. Degrees that work: 1, 2;"):
        check_sequence_parallel(model, ulysses_degree=4, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("HunyuanVideoTokenReplaceTransformer", "the tokens of the first frame apart"),
        ("LTX2Transformer@guided", "rotary tables have the heads before the tokens"),
        ("PixArtTransformer2D", "no plan for splitting its tokens"),
    ],
)
def test_models_that_cannot_be_split_by_tokens_say_why(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_sequence_parallel(build_model(CASES[name]), ulysses_degree=1)


def test_an_attention_backend_without_torch_s_attention_is_refused() -> None:
    model: Any = build_model(CASES["FluxTransformer"])
    model.single_transformer_blocks[1].attn.processor._attention_backend = AttentionBackendName.FLEX
    with pytest.raises(ConfigError, match=r"single_transformer_blocks\.1\.attn uses the attention backend 'flex'"):
        check_sequence_parallel(model, ulysses_degree=1)
