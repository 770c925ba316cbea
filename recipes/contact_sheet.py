"""Puts frames of a video side by side in one picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def contact_sheet(
    frames: np.ndarray, path: str | Path, *, columns: int = 9, count: int | None = None, scale: int = 1, gap: int = 2
) -> Path:
    """Save evenly spaced frames of a video as one PNG, left to right and top to bottom.

    Args:
        frames: Video of shape (frames, height, width, 3): floats in [0, 1] or uint8.
        path: File to write; its folder is made if absent.
        columns: Frames in a row.
        count: How many frames to show, first and last included; all if `None`.
        scale: Whole-number enlargement of each frame, without smoothing.
        gap: White pixels between frames.

    Returns:
        The path that was written.

    Raises:
        ValueError: If `frames` is not a video of that shape.
    """
    frames = np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise ValueError(
            f"a video of shape (frames, height, width, 3) is needed, not {frames.shape}; pass one video only"
        )
    if frames.dtype != np.uint8:
        frames = (np.clip(frames, 0, 1) * 255).round().astype(np.uint8)
    if count is not None and count < len(frames):
        frames = frames[np.linspace(0, len(frames) - 1, count).round().astype(int)]
    frames = frames.repeat(scale, axis=1).repeat(scale, axis=2)
    number, height, width, _ = frames.shape
    columns = min(columns, number)
    rows = -(-number // columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for index, frame in enumerate(frames):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = frame
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet).save(path, optimize=True)
    return path
