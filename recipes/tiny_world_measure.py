"""Reads colour, shape, motion and background out of a video of the tiny world with plain image processing.

Objects are the pixels with much chroma (largest minus smallest of red, green, blue): no background has much. The colour of
an object is the nearest colour of the palette, its shape the template that overlaps its mask best after centre and area are
matched, its motion follows from the track of its centre and of its area.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tiny_world import BACKGROUNDS, COLOR_NAMES, COLORS, SHAPES, Scene, shape_distance

_MIN_CHROMA = 0.3
_PLAIN = ("black", "white", "gray", "navy", "sand")


@dataclass(frozen=True)
class Sighting:
    """What was seen of one object; a string is empty where nothing could be read.

    Args:
        color: The nearest colour name.
        shape: The best matching shape.
        motion: One of the world's motions, or "still".
    """

    color: str
    shape: str
    motion: str


def _unit_templates() -> dict[str, tuple[float, float]]:
    """Area and vertical centroid of each shape of unit radius."""
    axis = torch.linspace(-1.5, 1.5, 601)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    found = {}
    for shape in SHAPES:
        inside = shape_distance(shape, x, y) < 0
        found[shape] = (float(inside.sum()) * (3 / 600) ** 2, float(y[inside].mean()))
    return found


_TEMPLATES = _unit_templates()


def read_shape(masks: np.ndarray) -> str:
    """The shape that fits the masks (frames, height, width) best, frames weighted by the object's area; "" if all are empty."""
    scores = dict.fromkeys(SHAPES, 0.0)
    for mask in masks:
        area = int(mask.sum())
        if area < 30:
            continue
        rows, columns = mask.nonzero()
        points_y, points_x = torch.arange(mask.shape[0]).float()[:, None], torch.arange(mask.shape[1]).float()[None]
        target = torch.from_numpy(mask)
        for shape, (unit_area, unit_center) in _TEMPLATES.items():
            radius = (area / unit_area) ** 0.5
            x, y = (points_x - columns.mean()) / radius, (points_y - rows.mean()) / radius + unit_center
            template = shape_distance(shape, *torch.broadcast_tensors(x, y)) < 0
            scores[shape] += area * float((template & target).sum()) / float((template | target).sum())
    best = max(scores, key=lambda shape: scores[shape])
    return best if scores[best] > 0 else ""


def read_motion(masks: np.ndarray) -> str:
    """The motion of an object from its masks (frames, height, width); "" if it is missing from most frames.

    Growth and shrinking are a change of the radius by more than a third between the first and the last fifth of the
    frames. A track that comes back near its start after a path of a quarter of the frame's width is a circle, whose sense
    is the sign of the enclosed area. Otherwise the larger component of the displacement decides.
    """
    size = masks.shape[-1]
    seen = [mask for mask in masks if mask.sum() >= 12]
    if len(seen) < 0.6 * len(masks):
        return ""
    radii = np.sqrt([mask.sum() for mask in seen])
    centers = np.array([[np.mean(axis) for axis in mask.nonzero()[::-1]] for mask in seen]) / size
    end = max(1, len(seen) // 5)
    growth = radii[-end:].mean() / radii[:end].mean()
    if growth > 4 / 3:
        return "grows"
    if growth < 3 / 4:
        return "shrinks"
    net = centers[-1] - centers[0]
    path = np.linalg.norm(np.diff(centers, axis=0), axis=1).sum()
    if path > 0.25 and np.linalg.norm(net) < 0.4 * path:
        x, y = (centers - centers.mean(axis=0)).T
        enclosed = (x * np.roll(y, -1) - y * np.roll(x, -1)).sum()
        return "clockwise" if enclosed > 0 else "counterclockwise"
    if np.linalg.norm(net) < 0.12:
        return "still"
    horizontal = abs(net[0]) > abs(net[1])
    return ("right" if net[0] > 0 else "left") if horizontal else ("down" if net[1] > 0 else "up")


def read_objects(video: np.ndarray, count: int) -> list[Sighting]:
    """The `count` most visible objects, told apart by their colour.

    Args:
        video: Frames in [0, 1], (frames, height, width, 3).
        count: How many objects to look for.
    """
    chroma = video.max(axis=-1) - video.min(axis=-1)
    palette = np.array([COLORS[name] for name in COLOR_NAMES])
    # Compare directions of chroma, not brightness, so that anti-aliased edges count for the colour of their inside.
    tint = video - video.min(axis=-1, keepdims=True)
    tint = tint / np.maximum(chroma, 1e-6)[..., None]
    tints = palette - palette.min(axis=1, keepdims=True)
    tints = tints / tints.max(axis=1, keepdims=True)
    nearest = np.square(tint[..., None, :] - tints).sum(axis=-1).argmin(axis=-1)
    strength = np.ptp(palette, axis=1)[nearest]
    inside = chroma > np.maximum(_MIN_CHROMA, 0.5 * strength)
    sightings = []
    for _ in range(count):
        color = int(np.bincount(nearest[inside], minlength=len(palette)).argmax()) if inside.any() else -1
        if color < 0 or (inside & (nearest == color)).sum() < 12 * len(video):
            break
        masks = inside & (nearest == color)
        sightings.append(Sighting(COLOR_NAMES[color], read_shape(masks), read_motion(masks)))
        inside = inside & ~masks
    return sightings


def read_background(video: np.ndarray) -> str:
    """The background, from the pixels far from any object in (frames, height, width, 3) with values in [0, 1]; "" if none."""
    covered = (video.max(axis=-1) - video.min(axis=-1)) > _MIN_CHROMA
    near = torch.nn.functional.max_pool2d(torch.from_numpy(covered[:, None]).float(), 7, stride=1, padding=3)
    weight = 1.0 - near.numpy()[:, 0, :, :, None]
    visible = weight.sum(axis=0)[..., 0] > 0
    if visible.mean() < 0.2:
        return ""
    image = (video * weight).sum(axis=0) / np.maximum(weight.sum(axis=0), 1)
    gray = np.ma.masked_array(image.mean(axis=-1), mask=~visible)
    if gray.std() < 0.055:
        mean = np.median(image[visible], axis=0)
        return min(_PLAIN, key=lambda name: float(np.abs(mean - np.array(BACKGROUNDS[name])).sum()))
    rows = gray.mean(axis=1)
    if (gray - rows[:, None]).std() > 0.6 * gray.std():
        return "checkered"
    return "gradient" if abs(np.ma.corrcoef(rows, np.arange(len(rows)))[0, 1]) > 0.85 else "striped"


def score(scene: Scene, video: np.ndarray) -> dict[str, float]:
    """Shares of the scene's objects whose colour, shape and motion the video shows, and whether the background is right.

    A sighting is compared with the object of its colour; sightings of other colours are compared with the objects that are
    left, in the order of size.

    Args:
        scene: What was asked for.
        video: Frames in [0, 1], (frames, height, width, 3).
    """
    seen = read_objects(video, len(scene.objects))
    pairs: list[tuple[int, Sighting]] = []
    open_objects = list(range(len(scene.objects)))
    rest = []
    for sighting in seen:
        same = [index for index in open_objects if scene.objects[index].color == sighting.color]
        if same:
            open_objects.remove(same[0])
            pairs.append((same[0], sighting))
        else:
            rest.append(sighting)
    pairs += list(zip(open_objects, rest, strict=False))
    totals = {"color": 0.0, "shape": 0.0, "motion": 0.0}
    for index, sighting in pairs:
        wanted = scene.objects[index]
        totals["color"] += sighting.color == wanted.color
        totals["shape"] += sighting.shape == wanted.shape
        totals["motion"] += sighting.motion == wanted.motion
    result = {name: total / len(scene.objects) for name, total in totals.items()}
    result["background"] = float(read_background(video) == scene.background)
    return result
