"""Frames from files and cameras, and into files, one by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import torch
from PIL import Image

from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.head import PENDING, Pending

KEPT_FRAMES = 4
"""Frames of a camera that wait; older ones are dropped."""


def video_frames(path: Path, height: int, width: int) -> Iterator[torch.Tensor]:
    """The frames of a file, (3, height, width) in [-1, 1], cut to the shape from the middle.

    Raises:
        ConfigError: the file cannot be read.
    """
    with _reader(str(path), f"--video {path}") as reader:
        for frame in reader:
            yield _fitted(frame, height, width)


def camera_frames(name: str, height: int, width: int) -> Iterator[torch.Tensor | Pending]:
    """The frames of a camera, without end; `PENDING` while there is none. Of frames that wait, the oldest go.

    Raises:
        ConfigError: there is no such camera.
    """
    with _reader(name, f"--camera {name}") as reader:
        latest: deque[np.ndarray] = deque(maxlen=KEPT_FRAMES)
        grabbing = threading.Thread(target=latest.extend, args=(reader,), daemon=True)
        grabbing.start()
        while True:
            alive = grabbing.is_alive()  # asked first: what it grabbed last is still there when it has ended
            try:
                frame = latest.popleft()
            except IndexError:
                if not alive:
                    return
                yield PENDING
            else:
                yield _fitted(frame, height, width)


class FrameWriter:
    """Writes frames to an mp4 file as they come.

    Args:
        path: of the file.
        fps: at which it is shown.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self._writer: Any = imageio.get_writer(str(path), fps=fps, macro_block_size=1)

    def write(self, frames: np.ndarray) -> None:
        """Add frames, (frames, height, width, 3) of uint8."""
        for frame in frames:
            self._writer.append_data(frame)

    def close(self) -> None:
        self._writer.close()


def _reader(name: str, flag: str) -> Any:
    try:
        return imageio.get_reader(name)
    except (OSError, ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"{flag}: {error}") from None


def _fitted(frame: np.ndarray, height: int, width: int) -> torch.Tensor:
    image = Image.fromarray(np.asarray(frame)).convert("RGB")
    scale = max(width / image.width, height / image.height)
    resized = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (resized.width - width) // 2, (resized.height - height) // 2
    pixels = np.asarray(resized.crop((left, top, left + width, top + height)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 127.5 - 1
