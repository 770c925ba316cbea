"""Muon: momentum whose steps are made orthogonal, for weights that are matrices or convolution kernels.

After Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). Small networks need far fewer steps
with it than with Adam.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def orthogonalize(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Matrices with the singular vectors of the given ones and singular values near one, by Newton-Schulz iterations.

    Args:
        matrices: (count, rows, columns).
        iterations: Steps of the quintic iteration; its coefficients are those of the paper.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    transposed = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if transposed else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay; a step changes a weight's elements by about `0.2 * lr`.

    Args:
        params: Weights of two or more dimensions; all but the first dimension are flattened.
        lr: Learning rate, comparable to one for AdamW.
        momentum: Decay of the momentum.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every weight that has a gradient. Weights of equal shape are treated together."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[tuple(p.shape)].append(p)
            for shape, weights in by_shape.items():
                gradients = [p.grad for p in weights]
                for p in weights:
                    if not self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                momenta = [self.state[p]["momentum"] for p in weights]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
                update = orthogonalize(torch.stack(ahead).flatten(2))
                scale = 0.2 * max(update.shape[1:]) ** 0.5
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list((update * (-group["lr"] * scale)).view(-1, *shape)))


_ADAM_NAMES = ("shared", "embed_tokens", "relative_attention_bias", "patch_embedding", "proj_out", "scale_shift_table")


def build_optimizers(modules: Iterable[nn.Module], muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices and kernels of the modules, AdamW for everything else.

    Args:
        modules: What to train; parameters that need no gradient are left out.
        muon_rate: Peak learning rate of Muon, kept in each group as `peak`.
        adam_rate: Peak learning rate of AdamW, likewise.
    """
    matrices, others = [], []
    for module in modules:
        for name, p in module.named_parameters():
            if p.requires_grad:
                inner = p.ndim >= 2 and p.numel() > p.shape[0] and not any(word in name for word in _ADAM_NAMES)
                (matrices if inner else others).append(p)
    muon = Muon(matrices, lr=muon_rate, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer, rate in ((muon, muon_rate), (adam, adam_rate)):
        for group in optimizer.param_groups:
            group["peak"] = rate
    return [muon, adam]


def set_rates(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    """Set every learning rate to a share of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = share * group["peak"]


def update(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """One step of every optimizer; gradients are freed."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
