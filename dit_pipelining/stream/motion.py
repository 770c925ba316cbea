"""MotionNoise: how much noise a chunk of a video to be changed gets, from how much moves in it."""

import torch


class MotionNoise:
    """Less noise where much moves: fast motion that is drawn anew breaks, while still pictures can change freely.

    As StreamDiffusionV2's motion-aware noise controller: the root of the mean squared difference of neighbouring frames,
    relative to `full_motion`, takes the scale from `most` to `least`; an average over time keeps it from jumping.

    Args:
        least, most: noise scales (sigma of the first level) of fast and of still video.
        full_motion: difference of pixels in [-1, 1] that counts as the fastest motion.
        smoothing: share of the present chunk in the average.
    """

    def __init__(self, least: float = 0.6, most: float = 0.9, full_motion: float = 0.2, smoothing: float = 0.3) -> None:
        self.least, self.most = least, most
        self.full_motion = full_motion
        self.smoothing = smoothing
        self._scale: float | None = None
        self._last: torch.Tensor | None = None

    def __call__(self, frames: torch.Tensor) -> float:
        """The noise scale of the next chunk.

        Args:
            frames: (batch, channels, frames, height, width) in [-1, 1]; the one before them is remembered.
        """
        known = frames if self._last is None else torch.cat([self._last, frames], dim=2)
        self._last = frames[:, :, -1:].clone()
        moved = 0.0
        if known.shape[2] > 1:
            moved = float(known.float().diff(dim=2).square().mean(dim=(0, 1, 3, 4)).sqrt().max())
        target = self.most - (self.most - self.least) * min(1.0, moved / self.full_motion)
        share = 1.0 if self._scale is None else self.smoothing
        self._scale = share * target + (1 - share) * (self._scale or 0.0)
        return self._scale
