"""Trains the tiny text-to-video model from nothing and saves it in diffusers format.

First the VAE learns to reproduce videos of the tiny world; then a pool of videos is encoded, and the transformer and the
text encoder learn to denoise their latents by flow matching, with captions dropped now and then for classifier-free
guidance. About ten minutes on one large GPU:

    python recipes/train_tiny_wan.py --output recipes/tiny_wan

An interrupted run goes on from the checkpoints in `--work-dir`. `--device cpu --smoke` goes through all parts in a minute.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from tiny_wan_forward import CompactPadding, decode_all_frames, embed_text, encode_all_frames, whole_sequence
from tiny_wan_models import (
    MAX_TEXT_LENGTH,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
    save_pipeline,
)
from tiny_wan_muon import build_optimizers, set_rates, update
from tiny_wan_training import SMOKE, Plan, Stage, autocast, rate_at, save_losses
from tiny_world import caption, training_scene
from tiny_world_render import render
from torch.nn import functional as F
from tqdm import tqdm
from transformers import UMT5EncoderModel

TEXT_POSITIONS = 40
CAPTIONS_PER_VIDEO = 4
CAPTION_DROPOUT = 0.12
WORD_DROPOUT = 0.02
KL_WEIGHT = 1e-5


def channels_last(vae: AutoencoderKLWan) -> None:
    """Store the convolutions' weights with the channels last, as the GPU's matrix units want them."""
    for module in vae.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
            last = torch.channels_last if isinstance(module, torch.nn.Conv2d) else torch.channels_last_3d
            module.to(memory_format=last)


def vae_loss(vae: AutoencoderKLWan, video: torch.Tensor, coverage: torch.Tensor) -> torch.Tensor:
    """Weighted error of pixels and of their differences, plus a little of the latents' divergence from a normal distribution.

    The error is absolute plus squared: the absolute alone would rather leave small objects out, as it aims at the median.

    Args:
        vae: A VAE prepared by `whole_sequence`.
        video: (batch, 3, frames, height, width) in [-1, 1].
        coverage: Where objects are, (batch, 1, frames, height, width) in [0, 1]; pixels in and next to them count more.
    """
    with autocast(video.device):
        mean, log_variance = encode_all_frames(vae, video)
        latents = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        decoded = decode_all_frames(vae, latents)
    error = decoded.float() - video
    weight = 1 + 4 * F.max_pool3d(coverage, (1, 5, 5), stride=1, padding=(0, 2, 2))
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean() + error.diff(dim=2).abs().mean()
    mean, log_variance = mean.float(), log_variance.float()
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return (weight * (error.abs() + 2 * error.square())).mean() + 0.5 * edges + KL_WEIGHT * divergence


def train_vae(plan: Plan, device: torch.device, folder: Path, seconds: float | None) -> tuple[AutoencoderKLWan, Stage]:
    """The trained VAE, without latent statistics yet, and its stage."""
    torch.manual_seed(plan.seed)
    vae = build_vae().to(device)
    channels_last(vae)
    whole_sequence(vae)
    optimizers = build_optimizers([vae], plan.vae_rate, plan.adam_rate)
    stage = Stage("vae", folder, plan.vae_steps, seconds, {"vae": vae, "muon": optimizers[0], "adam": optimizers[1]})
    generator = torch.Generator(device).manual_seed(plan.seed + stage.step)
    rng = random.Random(plan.seed + stage.step)
    for step in stage.run():
        scenes = [training_scene(rng) for _ in range(plan.vae_batch)]
        video, coverage = render(scenes, plan.num_frames, plan.size, generator)
        set_rates(optimizers, rate_at(step, stage.steps, 100, 0.7))
        loss = vae_loss(vae, video.contiguous(memory_format=torch.channels_last_3d), coverage)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        update(optimizers)
        stage.record(loss.detach())
    return vae.requires_grad_(False).eval(), stage


@torch.no_grad()
def encode_pool(
    plan: Plan, vae: AutoencoderKLWan, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised latents of `plan.pool` videos and their captions; sets the latent statistics in the VAE's configuration.

    Returns:
        Latents (pool, channels, frames, height, width), token ids and their mask (pool, captions, positions).
    """
    generator = torch.Generator(device).manual_seed(plan.seed + 1)
    rng = random.Random(plan.seed + 1)
    tokenizer = build_tokenizer()
    latents: list[torch.Tensor] = []
    captions: list[str] = []
    for start in tqdm(range(0, plan.pool, plan.pool_batch), desc="pool", mininterval=5.0):
        scenes = [training_scene(rng) for _ in range(min(plan.pool_batch, plan.pool - start))]
        captions += [caption(scene, rng) for scene in scenes for _ in range(CAPTIONS_PER_VIDEO)]
        video, _ = render(scenes, plan.num_frames, plan.size, generator)
        with autocast(device):
            mean, _ = encode_all_frames(vae, video.contiguous(memory_format=torch.channels_last_3d))
        latents.append(mean.to(torch.bfloat16 if device.type == "cuda" else torch.float32).contiguous())
    pool = torch.cat(latents)
    sample = pool[:4096].float()
    mean, std = sample.mean(dim=(0, 2, 3, 4)), sample.std(dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    for part in pool.split(4096):
        part.copy_((part.float() - mean.view(1, -1, 1, 1, 1)) / std.view(1, -1, 1, 1, 1))
    text = tokenizer(captions, padding="max_length", max_length=TEXT_POSITIONS, truncation=True, return_tensors="pt")
    shape = (plan.pool, CAPTIONS_PER_VIDEO, TEXT_POSITIONS)
    return pool, text.input_ids.view(shape).to(device), text.attention_mask.view(shape).to(device)


def dit_loss(
    model: CompactPadding,
    text_encoder: UMT5EncoderModel,
    clean: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mean squared error of the predicted flow, noise minus clean latents, at random noise levels.

    Args:
        model: The transformer with compact padding.
        text_encoder: The text encoder.
        clean: Normalised latents.
        ids: Token ids of one caption each, ending with `</s>`, (batch, positions).
        mask: Which of them are tokens.
        generator: Source of randomness on the device.
    """
    batch, device = clean.shape[0], clean.device

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    ids = torch.where((uniform(*ids.shape) < WORD_DROPOUT) & (ids > 2), 2, ids)
    # A dropped caption is what the pipeline makes of the prompt "": one `</s>` and padding.
    dropped = uniform(batch, 1) < CAPTION_DROPOUT
    first = torch.arange(ids.shape[1], device=device)[None] == 0
    ids, mask = torch.where(dropped, first.long(), ids), torch.where(dropped, first.long(), mask)
    # Mostly the pipeline's own padding, sometimes less, so that a shorter `max_sequence_length` works as well.
    shorter = (TEXT_POSITIONS * (MAX_TEXT_LENGTH / TEXT_POSITIONS) ** uniform(batch)).round()
    padded = torch.where(uniform(batch) < 0.7, MAX_TEXT_LENGTH, shorter)
    normal = torch.randn(batch, generator=generator, device=device)
    sigma = torch.where(uniform(batch) < 0.1, uniform(batch), torch.sigmoid(normal + 0.5))
    noise = torch.randn(clean.shape, generator=generator, device=device)
    level = sigma.view(-1, 1, 1, 1, 1)
    with autocast(device):
        text = embed_text(text_encoder, ids, mask)
        flow = model((1 - level) * clean + level * noise, sigma * 1000, text, mask.sum(dim=1), padded)
    return F.mse_loss(flow.float(), noise - clean)


def train_dit(
    plan: Plan,
    pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    start: tuple[WanTransformer3DModel, UMT5EncoderModel] | None,
    folder: Path,
    seconds: float | None,
    compile_blocks: bool,
) -> tuple[WanTransformer3DModel, UMT5EncoderModel, Stage]:
    """The averaged transformer and text encoder, and their stage."""
    latents, all_ids, all_masks = pool
    device = latents.device
    torch.manual_seed(plan.seed + 2)
    if start is None:
        start = build_transformer(), build_text_encoder(len(build_tokenizer()))
    transformer, text_encoder = start[0].to(device).train(), start[1].to(device).train()
    averaged = copy.deepcopy(transformer).requires_grad_(False), copy.deepcopy(text_encoder).requires_grad_(False)
    model = CompactPadding(transformer)
    parameters = [p for p in (*transformer.parameters(), *text_encoder.parameters()) if p.requires_grad]
    shadow = [p for module in averaged for p in module.parameters()]
    optimizers = build_optimizers([transformer, text_encoder], plan.dit_rate, plan.adam_rate)
    state = {"transformer": transformer, "text_encoder": text_encoder}
    state |= {"muon": optimizers[0], "adam": optimizers[1]}
    state |= {"averaged_transformer": averaged[0], "averaged_text_encoder": averaged[1]}
    stage = Stage("dit", folder, plan.dit_steps, seconds, state)
    if compile_blocks:
        for block in transformer.blocks:
            block.compile(dynamic=False)
    generator = torch.Generator(device).manual_seed(plan.seed + 2 + stage.step)
    for step in stage.run():
        set_rates(optimizers, rate_at(step, stage.steps, 300, 0.6))
        chosen = torch.randint(len(latents), (plan.dit_batch,), generator=generator, device=device)
        which = torch.randint(CAPTIONS_PER_VIDEO, (plan.dit_batch,), generator=generator, device=device)
        loss = dit_loss(
            model, text_encoder, latents[chosen].float(), all_ids[chosen, which], all_masks[chosen, which], generator
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        update(optimizers)
        with torch.no_grad():
            torch._foreach_lerp_(shadow, parameters, 1 - min(plan.ema, (step + 1) / (step + 10)))
        stage.record(loss.detach())
    return averaged[0].eval(), averaged[1].eval(), stage


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("recipes/tiny_wan"), help="folder of the finished pipeline")
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/train_tiny_wan"), help="checkpoints and losses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="a few steps with small videos, to try the script")
    parser.add_argument("--vae-seconds", type=float, help="fit the VAE's steps into this time")
    parser.add_argument("--dit-seconds", type=float, help="fit the transformer's steps into this time")
    parser.add_argument("--dit-rate", type=float, help="peak learning rate of the transformer's matrices")
    parser.add_argument("--start-from", type=Path, help="a finished pipeline: keep its VAE, go on with its transformer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="do not compile the transformer's blocks on a GPU")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    plan = replace(SMOKE if options.smoke else Plan(), seed=options.seed)
    if options.dit_rate is not None:
        plan = replace(plan, dit_rate=options.dit_rate)
    start = None
    stages: list[Stage] = []
    if options.start_from is not None:
        pipe = WanPipeline.from_pretrained(options.start_from)
        vae, start = pipe.vae.to(device).requires_grad_(False).eval(), (pipe.transformer, pipe.text_encoder)
        channels_last(vae)
        whole_sequence(vae)
    else:
        vae, stage = train_vae(plan, device, options.work_dir, options.vae_seconds)
        stages.append(stage)
    pool = encode_pool(plan, vae, device)
    compile_blocks = device.type == "cuda" and not options.no_compile
    transformer, text_encoder, stage = train_dit(
        plan, pool, start, options.work_dir, options.dit_seconds, compile_blocks
    )
    stages.append(stage)
    save_pipeline(
        options.output, vae.cpu().to(memory_format=torch.contiguous_format), transformer.cpu(), text_encoder.cpu()
    )
    save_losses({stage.name: stage.losses for stage in stages}, options.work_dir)
    print(f"saved {options.output}; losses in {options.work_dir}")


if __name__ == "__main__":
    main()
