"""A global table in a file of its own, as some models keep rotary embeddings."""

import torch

TABLES: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
ROWS: list[torch.Tensor] = []


def table(x: torch.Tensor) -> torch.Tensor:
    """Angles for the last dimension of `x`, made once per length."""
    length = x.shape[-1]
    if length not in TABLES:
        angles = torch.arange(length, device=x.device) * x.new_full((), 0.5)
        TABLES[length] = angles.cos(), angles.sin()
        ROWS.append(angles)
    cos, sin = TABLES[length]
    return cos + sin
