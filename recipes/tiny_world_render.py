"""Draws scenes of the tiny world as videos, a batch at a time, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tiny_world import BACKGROUND_NAMES, BACKGROUNDS, COLOR_NAMES, COLORS, MOTIONS, SHAPES, Scene, shape_distance

_CANDIDATES = 24


def _uniform(
    low: torch.Tensor | float, high: torch.Tensor | float, shape: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator, device=generator.device)


def _tracks(
    motion: torch.Tensor,
    paired: torch.Tensor,
    num_frames: int,
    size: int,
    generator: torch.Generator,
    periods: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centres (batch, candidate, frame, xy) in pixels and radii (batch, candidate, frame) of random tracks in the frame.

    Objects that share the frame with another one (`paired`) are smaller and travel less far.
    """
    batch = motion.shape[0]
    unit = size / 96
    shape = (batch, _CANDIDATES)
    small = paired.view(batch, 1).float()
    radius = _uniform(11.5 - 2.5 * small, 15.0 - 3.0 * small, shape, generator) * unit
    travel = _uniform(34 - 4 * small, 46 - 6 * small, shape, generator) * unit
    orbit = _uniform(14 - 2 * small, 20 - 5 * small, shape, generator) * unit
    # Orbits start near the top. If they started anywhere, both senses would look alike on average, and a model would learn
    # the sense last of all.
    start_angle = _uniform(-0.5 * math.pi - 0.6, -0.5 * math.pi + 0.6, shape, generator)
    along = torch.linspace(0, periods, num_frames, device=motion.device)
    u = torch.where(along <= 1, along, 1 - (along % 2 - 1).abs())  # there and back again
    offset = torch.zeros(*shape, num_frames, 2, device=motion.device)
    scale = torch.ones(*shape, num_frames, device=motion.device)
    directions = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
    for index, name in enumerate(MOTIONS):
        chosen = motion == index
        if name in directions:
            step = torch.tensor(directions[name], device=motion.device)
            offset[chosen] = travel[chosen][..., None, None] * (u[:, None] - 0.5) * step
        elif name in ("clockwise", "counterclockwise"):
            turn = (
                2 * math.pi * along * (1 if name == "clockwise" else -1)
            )  # y points down, so a growing angle is clockwise
            angle = start_angle[chosen][..., None] + turn
            offset[chosen] = orbit[chosen][..., None, None] * torch.stack([angle.cos(), angle.sin()], dim=-1)
        else:
            scale[chosen] = 0.55 + 0.9 * (u if name == "grows" else 1 - u)
    radii = radius[..., None] * scale
    reach = 1.2 * radii[..., None]
    low = (reach - offset).amax(dim=2)
    high = size - (reach + offset).amax(dim=2)
    start = low + (high - low).clamp_min(0) * torch.rand(*shape, 2, generator=generator, device=motion.device)
    return start[:, :, None] + offset, radii


def _background(names: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """Still backgrounds, (batch, 3, size, size) in [0, 1]."""
    batch, device = names.shape[0], names.device
    palette = torch.tensor([BACKGROUNDS[name] for name in BACKGROUND_NAMES], device=device)
    image = palette[names].view(batch, 3, 1, 1).repeat(1, 1, size, size)
    pixel = (torch.arange(size, device=device) + 0.5) * 96 / size
    phase = _uniform(0.0, 24.0, (batch, 2), generator)
    rows = (torch.remainder(pixel + phase[:, :1], 24) < 12).float()
    columns = (torch.remainder(pixel + phase[:, 1:], 24) < 12).float()
    textures = {
        "striped": (0.18 + 0.26 * rows)[:, None, :, None].expand(batch, 3, size, size),
        "checkered": (0.28 + 0.26 * (rows[:, :, None] - columns[:, None, :]).abs())[:, None].expand(batch, 3, -1, -1),
        "gradient": (0.1 + 0.7 * pixel / 96).view(1, 1, size, 1).expand(batch, 3, size, size),
    }
    for name, texture in textures.items():
        chosen = names == BACKGROUND_NAMES.index(name)
        image[chosen] = texture[chosen]
    return image


def render(
    scenes: Sequence[Scene], num_frames: int, size: int, generator: torch.Generator, periods: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw each scene at random positions, sizes and speeds.

    Args:
        scenes: What to draw.
        num_frames: Frames per video.
        size: Height and width in pixels.
        generator: Source of randomness; its device is where the videos are drawn.
        periods: How far the motions go: 1 is once across or around; then back again, or around once more.

    Returns:
        Videos of shape (batch, 3, num_frames, size, size) in [-1, 1], and the objects' coverage of each pixel in [0, 1],
        (batch, 1, num_frames, size, size).
    """
    device, batch = generator.device, len(scenes)
    second = [scene.objects[-1] for scene in scenes]
    objects = [[scene.objects[0] for scene in scenes], second]
    paired = torch.tensor([len(scene.objects) == 2 for scene in scenes], device=device)
    motions = [torch.tensor([MOTIONS.index(o.motion) for o in layer], device=device) for layer in objects]
    tracks = [_tracks(motion, paired, num_frames, size, generator, periods) for motion in motions]
    gap = (tracks[0][0] - tracks[1][0]).norm(dim=-1) - 1.1 * (tracks[0][1] + tracks[1][1])
    # Of several random placements take the one with the widest gap, so that two objects rarely cover each other.
    best = torch.where(paired, gap.amin(dim=2).argmax(dim=1), torch.zeros_like(motions[0]))
    names = torch.tensor([BACKGROUND_NAMES.index(scene.background) for scene in scenes], device=device)
    video = _background(names, size, generator)[:, :, None].repeat(1, 1, num_frames, 1, 1)
    coverage = torch.zeros(batch, 1, num_frames, size, size, device=device)
    palette = torch.tensor([COLORS[name] for name in COLOR_NAMES], device=device)
    pixel = torch.arange(size, device=device) + 0.5
    for layer, (centers, radii) in enumerate(tracks):
        shapes = torch.tensor([SHAPES.index(o.shape) for o in objects[layer]], device=device)
        colors = palette[torch.tensor([COLOR_NAMES.index(o.color) for o in objects[layer]], device=device)]
        for index, shape in enumerate(SHAPES):
            chosen = ((shapes == index) & (paired if layer else True)).nonzero()[:, 0]
            center, radius = centers[chosen, best[chosen]], radii[chosen, best[chosen], :, None, None]
            x = (pixel.view(1, 1, 1, size) - center[..., 0, None, None]) / radius
            y = (pixel.view(1, 1, size, 1) - center[..., 1, None, None]) / radius
            x, y = torch.broadcast_tensors(x, y)
            alpha = (0.5 - shape_distance(shape, x, y) * radius).clamp(0, 1)[:, None]
            video[chosen] = video[chosen] * (1 - alpha) + alpha * colors[chosen].view(-1, 3, 1, 1, 1)
            coverage[chosen] = torch.maximum(coverage[chosen], alpha)
    return video * 2 - 1, coverage
