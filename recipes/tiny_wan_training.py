"""What both stages of training the tiny model share: the plan, checkpoints, the learning rate and progress."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm


@dataclass(frozen=True)
class Plan:
    """Sizes of a training run.

    Args:
        vae_steps: Optimiser steps of the VAE.
        vae_batch: Videos per VAE step.
        vae_rate: Peak learning rate of the VAE's kernels (Muon).
        pool: Videos whose latents the transformer learns from.
        pool_batch: Videos encoded at once.
        dit_steps: Optimiser steps of the transformer and the text encoder.
        dit_batch: Latents per step.
        dit_rate: Peak learning rate of the matrices of transformer and text encoder (Muon).
        adam_rate: Peak learning rate of everything else (AdamW).
        ema: Decay of the moving average of the weights.
        num_frames: Frames per video, 1 + 4k.
        size: Height and width in pixels.
        seed: Seed of everything random.
    """

    vae_steps: int = 1200
    vae_batch: int = 32
    vae_rate: float = 3e-3
    pool: int = 49152
    pool_batch: int = 256
    dit_steps: int = 5000
    dit_batch: int = 256
    dit_rate: float = 2e-3
    adam_rate: float = 1e-3
    ema: float = 0.998
    num_frames: int = 25
    size: int = 96
    seed: int = 0


SMOKE = Plan(vae_steps=3, vae_batch=2, pool=8, pool_batch=4, dit_steps=3, dit_batch=4, ema=0.5, num_frames=5, size=32)
"""A run of seconds on a CPU that goes through every part of the script; its model has learned nothing."""


def rate_at(step: int, steps: int, warmup: int, decay: float) -> float:
    """Share of the peak learning rate: a linear rise over `warmup` steps, constant, then half a cosine to zero.

    Args:
        step: Step to answer for, from 0.
        steps: Steps in all.
        warmup: Steps of the rise; at most a tenth of all.
        decay: Share of the steps that the fall takes.
    """
    warmup = max(1, min(warmup, steps // 10))
    fall = (step - (1 - decay) * steps) / max(1.0, decay * steps)
    return min(1.0, (step + 1) / warmup) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, fall))))


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 for matrix work on a GPU; nothing on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


class Stage:
    """One stage of training: its step counter, losses, checkpoints and progress bar.

    Args:
        name: Name in the progress bar and of the checkpoint file.
        folder: Where checkpoints are written.
        steps: Steps planned.
        seconds: Time limit; after a few steps the number of steps is cut to what fits. No limit if `None`.
        state: Objects with `state_dict` and `load_state_dict`, by name.
    """

    _MEASURE_FROM, _MEASURE_TO = 41, 121  # both right after a recorded loss, which waits for the device
    _CHECKPOINT_SECONDS = 60.0

    def __init__(self, name: str, folder: Path, steps: int, seconds: float | None, state: dict[str, Any]) -> None:
        self.name, self.steps, self.seconds, self.state = name, steps, seconds, state
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        self.path = folder / f"{name}.pt"
        if self.path.exists():
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            for key, value in state.items():
                value.load_state_dict(saved["state"][key])
            self.step, self.steps, self.losses = saved["step"], saved["steps"], [tuple(x) for x in saved["losses"]]
            self.seconds = None

    def save(self) -> None:
        """Write a checkpoint; a run that is interrupted while writing keeps the one before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "state": {key: value.state_dict() for key, value in self.state.items()},
            "step": self.step,
            "steps": self.steps,
            "losses": self.losses,
        }
        torch.save(content, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def run(self) -> Iterator[int]:
        """Yields the steps that are left, 0-based; call `record` in each. Checkpoints once a minute and at the end."""
        started = last_saved = time.monotonic()
        warm = 0.0
        first = self.step
        with tqdm(total=self.steps, initial=self.step, desc=self.name, mininterval=5.0) as bar:
            while self.step < self.steps:
                yield self.step
                self.step += 1
                bar.update()
                now = time.monotonic()
                if self.losses:
                    bar.set_postfix(loss=f"{self.losses[-1][1]:.4f}", refresh=False)
                if self.step - first == self._MEASURE_FROM:
                    warm = now
                if self.seconds is not None and self.step - first == self._MEASURE_TO:
                    per_step = (now - warm) / (self._MEASURE_TO - self._MEASURE_FROM)
                    fitting = self.step + int((self.seconds - (now - started)) / per_step)
                    self.steps = bar.total = max(self.step, min(self.steps, fitting))
                if now - last_saved > self._CHECKPOINT_SECONDS:
                    self.save()
                    last_saved = now
        if self.step > first:
            self.save()

    def record(self, loss: torch.Tensor, every: int = 20) -> None:
        """Keep the loss of this step if it is its turn; reading it waits for the device."""
        if self.step % every == 0 or self.step == self.steps - 1:
            self.losses.append((self.step, float(loss)))


def save_losses(curves: dict[str, list[tuple[int, float]]], folder: Path) -> None:
    """Write losses as `losses.json` and, where matplotlib is installed, their curves as `losses.png`.

    Args:
        curves: Steps and losses of each stage.
        folder: Where to write; made if absent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: [[step, round(loss, 5)] for step, loss in losses] for name, losses in curves.items()}
    (folder / "losses.json").write_text(json.dumps(rounded))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed, so the losses are in losses.json only")
        return
    figure = Figure(figsize=(9, 3))
    for axes, (name, losses) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        steps, values = torch.tensor(losses).unbind(dim=1)
        width = min(9, len(values))
        smooth = values.unfold(0, width, 1).mean(dim=1)
        axes.plot(steps, values, alpha=0.35, linewidth=0.8)
        axes.plot(steps[width // 2 : width // 2 + len(smooth)], smooth, linewidth=1.5)
        axes.set(title=name, xlabel="step", ylabel="loss", yscale="log")
    figure.tight_layout()
    figure.savefig(folder / "losses.png", dpi=80)
