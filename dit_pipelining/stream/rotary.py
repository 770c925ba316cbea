"""Rotary tables of frames that do not start at 0, without end."""

from collections.abc import Sequence

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

Table = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each (rows, tokens, 1, channels)."""

ROTARY_THETA = 10000.0
"""Of Wan's rotary embedding; its class has no other."""


def rotary_table(rotary: Table, first_frames: Sequence[int], frames: int, chunks: int = 1) -> Table:
    """The rotary tables of several rows.

    Args:
        rotary: the model's own for one chunk, (1, tokens, 1, channels): rows and columns of the picture are right in it.
        first_frames: position of each row's first frame.
        frames: of one chunk.
        chunks: how many chunks follow each other in a row.
    """
    channels, tokens = rotary[0].shape[-1], rotary[0].shape[1]
    time_channels = channels - 4 * (channels // 6)  # as WanRotaryPosEmbed divides them
    rows, span = len(first_frames), frames * chunks
    positions = torch.tensor(
        [first + frame for first in first_frames for frame in range(span)], dtype=torch.float64
    ).to(rotary[0].device, non_blocking=True)
    angles = get_1d_rotary_pos_embed(
        time_channels, positions, ROTARY_THETA, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64
    )
    tables = []
    for own, angle in zip(rotary, angles, strict=True):
        space = own[..., time_channels:].view(1, 1, tokens, -1).expand(rows, chunks, tokens, -1)
        time = angle.to(own.dtype).repeat_interleave(tokens // frames, dim=0).view(rows, chunks, tokens, -1)
        tables.append(torch.cat([time, space], dim=-1).view(rows, chunks * tokens, 1, channels))
    return tables[0], tables[1]
