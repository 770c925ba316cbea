"""The shipped checkpoint loads and generates; training's shortcuts give what the pipeline itself computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from tiny_wan_forward import (
    CompactPadding,
    decode_all_frames,
    embed_text,
    encode_all_frames,
    whole_sequence,
)
from tiny_wan_training import Stage, rate_at
from tiny_world import HEIGHT, NUM_FRAMES, WIDTH, vocabulary
from tiny_world_measure import read_background, read_objects
from train_causal_tiny_wan import block_causal_mask
from train_causal_tiny_wan import main as train_causal
from train_tiny_wan import main as train
from transformers import AutoTokenizer

from dit_pipelining.api import ParallelConfig, StreamSpec, load_pipeline, open_stream
from dit_pipelining.stream.head import StreamInput
from tests.distributed import RankPool

CHECKPOINT = Path(__file__).parents[2] / "recipes" / "tiny_wan"


@pytest.fixture
def pipe() -> WanPipeline:
    pipe = WanPipeline.from_pretrained(CHECKPOINT)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: WanPipeline, prompt: str, num_frames: int, steps: int) -> np.ndarray:
    return pipe(
        prompt,
        height=HEIGHT,
        width=WIDTH,
        num_frames=num_frames,
        num_inference_steps=steps,
        guidance_scale=6.0,
        generator=torch.Generator().manual_seed(3),
    ).frames[0]


def few_latents(pipe: Any) -> torch.Tensor:
    latents: torch.Tensor = pipe(
        "a red circle moves left on a black background",
        height=HEIGHT,
        width=WIDTH,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=6.0,
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
    ).frames
    return latents


def latents_of_a_rank(folder: Path, stages: int) -> torch.Tensor:
    pipe = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=stages))
    pipe.set_progress_bar_config(disable=True)
    return few_latents(pipe)


def test_checkpoint_is_small_and_has_enough_blocks_to_split(pipe: WanPipeline) -> None:
    size = sum(path.stat().st_size for path in CHECKPOINT.rglob("*") if path.is_file())
    assert size <= 25_000_000
    assert len(pipe.transformer.blocks) == 12


def test_checkpoint_loads_in_float32_without_extra_arguments(pipe: WanPipeline) -> None:
    for component in (pipe.transformer, pipe.vae, pipe.text_encoder):
        assert {parameter.dtype for parameter in component.parameters()} == {torch.float32}


def test_few_frames_in_few_steps_are_finite_and_the_same_each_time(pipe: WanPipeline) -> None:
    first = generate(pipe, "a red circle moves left on a black background", 5, 3)
    again = generate(pipe, "a red circle moves left on a black background", 5, 3)
    other = generate(pipe, "a blue square moves up on a white background", 5, 3)
    assert first.shape == (5, HEIGHT, WIDTH, 3)
    assert np.isfinite(first).all()
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_two_ranks_give_the_latents_of_one_process_bit_for_bit(pipe: WanPipeline, ranks: RankPool) -> None:
    expected = few_latents(pipe)
    results = ranks.run(2, latents_of_a_rank, CHECKPOINT, 2)
    assert len(results) == 2
    for latents in results:
        assert torch.equal(latents, expected)


def test_video_shows_what_the_prompt_asks_for(pipe: WanPipeline) -> None:
    video = generate(pipe, "a purple square moves right on a sand background", NUM_FRAMES, 12)
    (seen,) = read_objects(video, 1)
    assert (seen.color, seen.shape, seen.motion) == ("purple", "square", "right")
    assert read_background(video) == "sand"


def test_the_causal_transformer_streams_what_each_prompt_asks_for() -> None:
    causal = WanTransformer3DModel.from_pretrained(CHECKPOINT.with_name("tiny_wan_causal"))
    pipe = WanPipeline.from_pretrained(CHECKPOINT, transformer=causal)
    spec = StreamSpec(levels=(1.0, 0.9, 0.75, 0.5), window=6, streams=2)
    prompts = ["a red circle moves right on a black background", "a purple square moves right on a sand background"]
    stream = open_stream(pipe, spec, height=HEIGHT, width=WIDTH, prompt=prompts)
    chunks = 1 + (NUM_FRAMES - 1) // 4
    shown = list(stream.run([iter([StreamInput()] * chunks) for _ in prompts]))
    seen = []
    for number in range(2):
        video = torch.cat([chunk.frames for chunk in shown if chunk.stream == number]).cpu().numpy()
        assert len(video) == NUM_FRAMES
        (own,) = read_objects(video[5:], 1)  # the first chunks are often empty
        seen.append((own.color, own.shape, own.motion, read_background(video[5:])))
    assert seen == [("red", "circle", "right", "black"), ("purple", "square", "right", "sand")]


def test_tokenizer_knows_every_word_of_the_world_and_marks_others_unknown() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT / "tokenizer")
    assert tokenizer.unk_token_id not in tokenizer(" ".join(vocabulary())).input_ids
    ids = tokenizer("A wobbly Circle,", padding="max_length", max_length=8).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<unk>", "circle", ",", "</s>", "<pad>", "<pad>", "<pad>"]


def test_latent_statistics_are_those_of_the_world(pipe: WanPipeline) -> None:
    from evaluate_tiny_wan import world_videos
    from tiny_world import held_out_scenes

    with torch.no_grad():
        latents = pipe.vae.encode(world_videos(held_out_scenes(24), seed=5)).latent_dist.mode()
    mean = torch.tensor(pipe.vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(pipe.vae.config.latents_std).view(1, -1, 1, 1, 1)
    normal = (latents - mean) / std
    assert normal.mean().abs() < 0.2
    assert 0.7 < normal.std() < 1.3


def test_whole_sequence_passes_equal_the_chunked_ones_of_the_vae() -> None:
    vae = AutoencoderKLWan.from_pretrained(CHECKPOINT / "vae")
    video = torch.rand(2, 3, 9, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        latents = vae.encode(video).latent_dist.mode()
        decoded = vae.decode(latents).sample
        whole_sequence(vae)
        torch.testing.assert_close(encode_all_frames(vae, video)[0], latents, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(decode_all_frames(vae, latents).clamp(-1, 1), decoded, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("padded_length", [48, 512])
def test_compact_padding_equals_padding_with_zeros(pipe: WanPipeline, padded_length: int) -> None:
    prompts = ["a red circle moves left and a blue star grows", ""]
    text, _ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=padded_length)
    tokens = pipe.tokenizer(prompts, padding="max_length", max_length=20, return_tensors="pt")
    latents = torch.randn(2, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    timestep = torch.tensor([700.0, 300.0])
    with torch.no_grad():
        expected = pipe.transformer(latents, timestep, text, return_dict=False)[0]
        short = embed_text(pipe.text_encoder, tokens.input_ids, tokens.attention_mask)
        lengths = tokens.attention_mask.sum(dim=1)
        model = CompactPadding(pipe.transformer)
        got = model(latents, timestep, short, lengths, torch.full((2,), padded_length))
        wrong = model(latents, timestep, short, lengths, torch.full((2,), 20))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert (wrong - expected).abs().max() > 1e-2


def test_learning_rate_rises_stays_and_falls_to_zero() -> None:
    rates = [rate_at(step, 100, 10, 0.5) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:51] == pytest.approx([1.0] * 42)
    assert rates[75] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)


def test_interrupted_stage_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    stage = Stage("layer", tmp_path, 6, None, {"layer": layer})
    for step in stage.run():
        stage.record(torch.tensor(float(step)), every=1)
        if step == 3:
            stage.save()
            break
    resumed_layer = torch.nn.Linear(2, 2)
    resumed = Stage("layer", tmp_path, 6, None, {"layer": resumed_layer})
    assert torch.equal(resumed_layer.weight, layer.weight)
    assert list(resumed.run()) == [3, 4, 5]
    assert resumed.losses == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.full
def test_training_script_makes_a_pipeline_that_loads(tmp_path: Path) -> None:
    train(["--device", "cpu", "--smoke", "--output", str(tmp_path / "model"), "--work-dir", str(tmp_path / "work")])
    pipe = WanPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    assert np.isfinite(generate(pipe, "a red circle", 5, 2)).all()
    assert len(pipe.vae.config.latents_std) == pipe.vae.config.z_dim
    assert (tmp_path / "work" / "losses.json").exists()


def test_a_causal_clip_sees_its_chunk_and_a_window_before_it() -> None:
    mask = block_causal_mask(frames=4, tokens=2, window=1, device=torch.device("cpu"))
    seen = [sorted({int(token) // 2 for token in row.nonzero()}) for row in mask]
    assert seen == [[0], [0], [0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [2, 3]]


def test_causal_training_goes_through_all_parts(tmp_path: Path) -> None:
    output = tmp_path / "causal"
    work = ["--work-dir", str(tmp_path / "work")]
    train_causal(
        ["--model", str(CHECKPOINT), "--device", "cpu", "--smoke", "--evaluate", "1", "--output", str(output), *work]
    )
    made, base = (WanTransformer3DModel.from_pretrained(folder) for folder in (output, CHECKPOINT / "transformer"))
    pairs = zip(made.parameters(), base.parameters(), strict=True)
    assert all(one.shape == other.shape for one, other in pairs)
    assert any(not torch.equal(one, other) for one, other in zip(made.parameters(), base.parameters(), strict=True))
