"""Trains a causal variant of the embedded model's transformer that denoises in four steps, for `stream_video.py`.

    python recipes/train_causal_tiny_wan.py --output recipes/tiny_wan_causal        # one large GPU, below five minutes
    python recipes/train_causal_tiny_wan.py --device cpu --smoke --output /tmp/x     # through all parts on a CPU

A stream with policy `level` shows a chunk the keys and values that earlier chunks had at the same noise level. That is what
a whole clip at one noise level computes under a block-causal mask, so the mask is all that training needs:

1. flow matching under the mask, from the embedded model's weights, on videos that go on for two periods;
2. samples of that model with guidance, 24 steps: the teacher's pairs of noise and clean latents;
3. distillation: at each of the four levels the student, fed with its own prediction of the level before and fresh noise as
   the stream does it, learns the teacher's clean latents. Guidance is in the samples, so the student needs none.

VAE and text encoder stay as they are: only the transformer is saved, in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from contact_sheet import contact_sheet
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from evaluate_tiny_wan import ATTRIBUTES, adherence
from tiny_wan_forward import CompactPadding, embed_text, encode_all_frames, whole_sequence
from tiny_wan_models import FLOW_SHIFT, MAX_TEXT_LENGTH
from tiny_wan_muon import build_optimizers, set_rates, update
from tiny_wan_training import SMOKE, Plan, Stage, autocast, rate_at, save_losses
from tiny_world import caption, held_out_scenes, training_scene
from tiny_world_render import render
from torch.nn import functional as F
from tqdm import tqdm
from train_tiny_wan import CAPTIONS_PER_VIDEO, TEXT_POSITIONS, channels_last, dit_loss
from transformers import UMT5EncoderModel

from dit_pipelining.api import StreamSpec, open_stream
from dit_pipelining.stream.head import Source, StreamInput

LEVELS = (1.0, 0.9, 0.75, 0.5)
"""Quarters of the way, shifted by 3 as the model's scheduler shifts them."""

WINDOW = 6
"""Latent frames before its own that a chunk of one frame sees: as many as the embedded model was trained on, less one."""

PERIODS = 2.0
TEACHER_STEPS = 24
GUIDANCE = 6.0
CLIP = 25
"""Frames in which the evaluation reads the motion: one period."""

Text = tuple[torch.Tensor, torch.Tensor]
"""Token ids and their mask, (videos, positions)."""


class BlockCausalAttention(WanAttnProcessor):
    """Wan's attention under a mask.

    Args:
        mask: (tokens, tokens), true where a query sees a key.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.mask = mask[None, None]

    def __call__(self, attn: Any, hidden_states: Any, text: Any, mask: Any, rotary: Any) -> Any:
        return super().__call__(attn, hidden_states, text, self.mask, rotary)


def block_causal_mask(frames: int, tokens: int, window: int, device: torch.device) -> torch.Tensor:
    """Which tokens see which, for chunks of one latent frame of `tokens` tokens."""
    frame = torch.arange(frames * tokens, device=device) // tokens
    back = frame[:, None] - frame[None, :]
    return (back >= 0) & (back <= window)


def make_causal(transformer: WanTransformer3DModel, latents: torch.Tensor) -> None:
    """Let the transformer attend causally in clips shaped like `latents`."""
    _, _, frames, height, width = latents.shape
    mask = block_causal_mask(frames, height * width // 4, WINDOW, latents.device)
    for block in transformer.blocks:
        block.attn1.set_processor(BlockCausalAttention(mask))


@torch.no_grad()
def encode_pool(plan: Plan, pipe: WanPipeline, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised latents of `plan.pool` long videos, token ids and masks of their captions (pool, captions, positions)."""
    vae: AutoencoderKLWan = pipe.vae
    generator = torch.Generator(device).manual_seed(plan.seed + 1)
    rng = random.Random(plan.seed + 1)
    shape = (1, -1, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean, device=device).view(shape)
    std = torch.tensor(vae.config.latents_std, device=device).view(shape)
    latents, captions = [], []
    for start in tqdm(range(0, plan.pool, plan.pool_batch), desc="pool", mininterval=5.0):
        scenes = [training_scene(rng) for _ in range(min(plan.pool_batch, plan.pool - start))]
        captions += [caption(scene, rng) for scene in scenes for _ in range(CAPTIONS_PER_VIDEO)]
        video, _ = render(scenes, plan.num_frames, plan.size, generator, PERIODS)
        with autocast(device):
            encoded, _ = encode_all_frames(vae, video.contiguous(memory_format=torch.channels_last_3d))
        latents.append(((encoded.float() - mean) / std).to(torch.bfloat16 if device.type == "cuda" else torch.float32))
    text = pipe.tokenizer(
        captions, padding="max_length", max_length=TEXT_POSITIONS, truncation=True, return_tensors="pt"
    )
    sizes = (plan.pool, CAPTIONS_PER_VIDEO, TEXT_POSITIONS)
    pool = torch.cat(latents).contiguous()
    return pool, text.input_ids.view(sizes).to(device), text.attention_mask.view(sizes).to(device)


def train_causal(
    plan: Plan, pipe: WanPipeline, pool: tuple[torch.Tensor, ...], folder: Path, seconds: float | None, compiled: bool
) -> tuple[WanTransformer3DModel, Stage]:
    """The averaged causal transformer, and its stage of training; the text encoder stays as it is."""
    latents, ids, masks = pool
    device = latents.device
    transformer = copy.deepcopy(pipe.transformer).to(device).train()
    averaged = copy.deepcopy(transformer).requires_grad_(False)
    make_causal(transformer, latents)
    model = CompactPadding(transformer)
    optimizers = build_optimizers([transformer], plan.dit_rate, plan.adam_rate)
    state = {"transformer": transformer, "averaged": averaged, "muon": optimizers[0], "adam": optimizers[1]}
    stage = Stage("causal", folder, plan.dit_steps, seconds, state)
    _compile(transformer, compiled)
    generator = torch.Generator(device).manual_seed(plan.seed + 2 + stage.step)
    for step in stage.run():
        set_rates(optimizers, rate_at(step, stage.steps, 100, 0.6))
        chosen = torch.randint(len(latents), (plan.dit_batch,), generator=generator, device=device)
        which = torch.randint(CAPTIONS_PER_VIDEO, (plan.dit_batch,), generator=generator, device=device)
        loss = dit_loss(
            model, pipe.text_encoder, latents[chosen].float(), ids[chosen, which], masks[chosen, which], generator
        )
        loss.backward()
        _step(transformer, averaged, optimizers, plan, step)
        stage.record(loss.detach())
    return averaged.eval(), stage


@torch.no_grad()
def teacher_samples(
    plan: Plan,
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    pool: tuple[torch.Tensor, ...],
    count: int,
    compiled: bool,
) -> tuple[torch.Tensor, torch.Tensor, Text]:
    """Noise, the clean latents that the causal model makes of it with guidance, and the captions it was told."""
    latents, ids, masks = pool
    device = latents.device
    transformer = copy.deepcopy(transformer)
    make_causal(transformer, latents)
    model = CompactPadding(transformer)
    _compile(transformer, compiled)
    generator = torch.Generator(device).manual_seed(plan.seed + 3)
    noises, cleans, told = [], [], []
    steps = torch.linspace(1, 0, TEACHER_STEPS + 1).tolist()
    sigmas = [FLOW_SHIFT * u / (1 + (FLOW_SHIFT - 1) * u) for u in steps]
    for start in tqdm(range(0, count, plan.dit_batch), desc="teacher", mininterval=5.0):
        size = min(plan.dit_batch, count - start)
        chosen = torch.randint(len(latents), (size,), generator=generator, device=device)
        which = torch.randint(CAPTIONS_PER_VIDEO, (size,), generator=generator, device=device)
        own = ids[chosen, which], masks[chosen, which]
        x = noise = torch.randn(latents[chosen].shape, generator=generator, device=device)
        with autocast(device):
            told_text, empty = _embedded(text_encoder, own), _embedded(text_encoder, _dropped(own))
        for sigma, following in pairwise(sigmas):
            flow, without = _flow(model, x, sigma, told_text), _flow(model, x, sigma, empty)
            x = x + (following - sigma) * (without + GUIDANCE * (flow - without))
        noises.append(noise.to(latents.dtype))
        cleans.append(x.to(latents.dtype))
        told.append(own)
    captions = torch.cat([own[0] for own in told]), torch.cat([own[1] for own in told])
    return torch.cat(noises), torch.cat(cleans), captions


def distill(
    plan: Plan,
    start: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    samples: tuple[torch.Tensor, torch.Tensor, Text],
    folder: Path,
    seconds: float | None,
    compiled: bool,
) -> tuple[WanTransformer3DModel, Stage]:
    """The averaged student, and its stage of training."""
    noises, cleans, (ids, masks) = samples
    device = noises.device
    student = copy.deepcopy(start).requires_grad_(True).train()
    averaged = copy.deepcopy(start).requires_grad_(False)
    make_causal(student, noises)
    model = CompactPadding(student)
    optimizers = build_optimizers([student], plan.dit_rate / 2, plan.adam_rate / 2)
    state = {"student": student, "averaged": averaged, "muon": optimizers[0], "adam": optimizers[1]}
    stage = Stage("distill", folder, plan.dit_steps, seconds, state)
    _compile(student, compiled)
    generator = torch.Generator(device).manual_seed(plan.seed + 4 + stage.step)
    for step in stage.run():
        set_rates(optimizers, rate_at(step, stage.steps, 100, 0.6))
        chosen = torch.randint(len(noises), (plan.dit_batch,), generator=generator, device=device)
        with torch.no_grad(), autocast(device):
            text = _embedded(text_encoder, (ids[chosen], masks[chosen]))
        x, clean = noises[chosen].float(), cleans[chosen].float()
        level = step % len(LEVELS)
        with torch.no_grad():
            for sigma, following in pairwise(LEVELS[: level + 1]):
                own = x - sigma * _flow(model, x, sigma, text)
                x = (1 - following) * own + following * torch.randn(x.shape, generator=generator, device=device)
        sigma = LEVELS[level]
        loss = F.mse_loss(_flow(model, x, sigma, text), (x - clean) / sigma)
        loss.backward()
        _step(student, averaged, optimizers, plan, step)
        stage.record(loss.detach(), every=21)  # no multiple of the number of levels, so that all are seen
    return averaged.eval(), stage


@torch.no_grad()
def evaluate(pipe: WanPipeline, prompts: int, device: torch.device, size: int, sheet: Path | None) -> None:
    """Stream videos of unseen prompts and print how well they follow them, as `evaluate_tiny_wan.py` measures it.

    One stream shows them all, one after the other: each begins anew with its own prompt.
    """
    scenes = held_out_scenes(prompts)
    pipe = pipe.to(device)
    pipe.transformer.float()
    latents = 1 + (CLIP - 1) // 4
    stream = open_stream(pipe, StreamSpec(levels=LEVELS, window=WINDOW), height=size, width=size, prompt="")

    def source() -> Source:
        for scene in tqdm(scenes, desc="evaluation", mininterval=5.0):
            yield StreamInput(prompt=stream.embed(scene.prompt), first=True)
            yield from [StreamInput()] * (latents - 1)

    frames = [chunk.frames.cpu() for chunk in stream.run([source()])]
    videos = torch.cat(frames).view(prompts, CLIP, size, size, 3).numpy()
    for group, figures in adherence(scenes, videos, workers=1).items():
        print(f"{group:24s} " + "  ".join(f"{name} {figures[name]:6.1%}" for name in ATTRIBUTES), flush=True)
    if sheet is not None:
        rows = videos[:12, :: CLIP // 8]
        contact_sheet(rows.reshape(-1, size, size, 3), sheet, columns=rows.shape[1])
        print(f"wrote {sheet}: " + "; ".join(scene.prompt for scene in scenes[:12]), flush=True)


def _flow(
    model: CompactPadding, x: torch.Tensor, sigma: float, text: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    embedded, lengths = text
    times = torch.full((len(x),), sigma * 1000, device=x.device)
    padded = torch.full((len(x),), float(MAX_TEXT_LENGTH), device=x.device)
    with autocast(x.device):
        return model(x, times, embedded, lengths, padded).float()


def _embedded(text_encoder: UMT5EncoderModel, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = text
    return embed_text(text_encoder, ids, mask), mask.sum(dim=1)


def _dropped(text: Text) -> Text:
    """What the pipeline makes of the prompt "": one `</s>` and padding."""
    first = (torch.arange(text[0].shape[1], device=text[0].device)[None] == 0).long().expand_as(text[0])
    return first, first


def _step(model: Any, averaged: Any, optimizers: Any, plan: Plan, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    update(optimizers)
    with torch.no_grad():
        weight = 1 - min(plan.ema, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), weight)


def _compile(transformer: WanTransformer3DModel, compiled: bool) -> None:
    if compiled:
        for block in transformer.blocks:
            block.compile(dynamic=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("recipes/tiny_wan"), help="where it starts from")
    parser.add_argument("--output", type=Path, default=Path("recipes/tiny_wan_causal"))
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/train_causal_tiny_wan"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="a few steps with small videos, to try the script")
    parser.add_argument(
        "--causal-seconds", type=float, default=60.0, help="fit the flow matching's steps into this time"
    )
    parser.add_argument("--samples", type=int, default=4096, help="of the teacher")
    parser.add_argument("--distill-seconds", type=float, default=60.0)
    parser.add_argument("--evaluate", type=int, default=24, help="unseen prompts to measure at the end")
    parser.add_argument("--sheet", type=Path, help="write frames of the first twelve of them here")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    plan = replace(Plan(), pool=12288, dit_rate=1e-3, dit_batch=192, num_frames=49)
    if options.smoke:
        plan = replace(SMOKE, num_frames=9)
    samples = plan.dit_batch if options.smoke else options.samples
    compiled = device.type == "cuda" and not options.no_compile
    pipe = WanPipeline.from_pretrained(options.model)
    pipe.vae.to(device).requires_grad_(False).eval()
    pipe.text_encoder.to(device).requires_grad_(False).eval()
    channels_last(pipe.vae)
    whole_sequence(pipe.vae)
    pool = encode_pool(plan, pipe, device)
    teacher, first = train_causal(plan, pipe, pool, options.work_dir, options.causal_seconds, compiled)
    pairs = teacher_samples(plan, teacher, pipe.text_encoder, pool, samples, compiled)
    student, second = distill(
        plan, teacher, pipe.text_encoder, pairs, options.work_dir, options.distill_seconds, compiled
    )
    student.to(torch.bfloat16).save_pretrained(options.output)
    save_losses({stage.name: stage.losses for stage in (first, second)}, options.work_dir)
    print(f"saved {options.output}; losses in {options.work_dir}", flush=True)
    if options.evaluate:
        finished = WanPipeline.from_pretrained(options.model, transformer=student.cpu())
        evaluate(finished, options.evaluate, device, plan.size if options.smoke else 96, options.sheet)


if __name__ == "__main__":
    main()
