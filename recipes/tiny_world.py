"""A synthetic world of moving shapes with captions: what the tiny text-to-video model is trained on.

A scene has one or two objects on a background. Every object has a shape, a colour and a motion. Some pairs of attributes
never occur together in training (`HELD_OUT_COLOR_SHAPE`, `HELD_OUT_SHAPE_MOTION`), so that an evaluation can ask for
combinations the model has never seen. Scenes are drawn from signed distance functions, a whole batch at a time, on any
device.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.10, 0.12),
    "orange": (0.97, 0.52, 0.08),
    "yellow": (0.96, 0.90, 0.15),
    "green": (0.15, 0.72, 0.22),
    "cyan": (0.10, 0.80, 0.88),
    "blue": (0.15, 0.25, 0.95),
    "purple": (0.52, 0.15, 0.80),
    "pink": (1.00, 0.42, 0.72),
}
MOTIONS = ("left", "right", "up", "down", "clockwise", "counterclockwise", "grows", "shrinks")
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (0.04, 0.04, 0.04),
    "white": (0.95, 0.95, 0.95),
    "gray": (0.50, 0.50, 0.50),
    "navy": (0.06, 0.08, 0.24),
    "sand": (0.84, 0.78, 0.66),
    "striped": (0.30, 0.30, 0.30),
    "checkered": (0.40, 0.40, 0.40),
    "gradient": (0.45, 0.45, 0.45),
}
COLOR_NAMES = tuple(COLORS)
BACKGROUND_NAMES = tuple(BACKGROUNDS)

HELD_OUT_COLOR_SHAPE = frozenset((COLOR_NAMES[i], shape) for i, shape in enumerate(SHAPES))
HELD_OUT_SHAPE_MOTION = frozenset((shape, MOTIONS[(i + 2) % len(MOTIONS)]) for i, shape in enumerate(SHAPES))

HEIGHT = WIDTH = 96
NUM_FRAMES = 25
FPS = 12

_MOTION_PHRASES = {
    "left": ("moves left", "moves to the left", "slides left", "moving left"),
    "right": ("moves right", "moves to the right", "slides right", "moving right"),
    "up": ("moves up", "rises", "flies up", "moving up"),
    "down": ("moves down", "falls", "sinks down", "moving down"),
    "clockwise": ("circles clockwise", "moves clockwise", "moving clockwise"),
    "counterclockwise": ("circles counterclockwise", "moves counterclockwise", "moving counterclockwise"),
    "grows": ("grows", "gets bigger", "growing"),
    "shrinks": ("shrinks", "gets smaller", "shrinking"),
}
_BACKGROUND_PHRASES = (" on a {} background", " over a {} background", ", {} background", " against a {} background")


@dataclass(frozen=True)
class Object:
    """One moving shape.

    Args:
        color: A key of `COLORS`.
        shape: One of `SHAPES`.
        motion: One of `MOTIONS`.
    """

    color: str
    shape: str
    motion: str

    @property
    def held_out(self) -> bool:
        """Whether training never shows this object: its colour and shape, or its shape and motion, are a held-out pair."""
        return (self.color, self.shape) in HELD_OUT_COLOR_SHAPE or (self.shape, self.motion) in HELD_OUT_SHAPE_MOTION


@dataclass(frozen=True)
class Scene:
    """One or two objects of different colours on a background.

    Args:
        objects: The objects; a later one is drawn over an earlier one.
        background: A key of `BACKGROUNDS`.
    """

    objects: tuple[Object, ...]
    background: str

    @property
    def prompt(self) -> str:
        """The plain caption that names every attribute, as used in evaluation."""
        parts = [f"{_article(o.color)} {o.color} {o.shape} {_MOTION_PHRASES[o.motion][0]}" for o in self.objects]
        return " and ".join(parts) + f" on a {self.background} background"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


ALL_OBJECTS = tuple(Object(c, s, m) for c in COLOR_NAMES for s in SHAPES for m in MOTIONS)
TRAINING_OBJECTS = tuple(o for o in ALL_OBJECTS if not o.held_out)


def training_scene(rng: random.Random, two_objects: float = 0.4) -> Scene:
    """Draw a scene without held-out pairs; with probability `two_objects` it has two objects."""
    first = rng.choice(TRAINING_OBJECTS)
    objects = (first,)
    if rng.random() < two_objects:
        second = rng.choice(TRAINING_OBJECTS)
        while second.color == first.color:
            second = rng.choice(TRAINING_OBJECTS)
        objects = (first, second)
    return Scene(objects, rng.choice(BACKGROUND_NAMES))


def held_out_scenes(count: int, seed: int = 0) -> list[Scene]:
    """Scenes that training never shows, for evaluation.

    A third each: one object with a held-out pair of colour and shape, one object with a held-out pair of shape and motion,
    and two objects of which one has a held-out pair (and the other none, in either order).

    Args:
        count: How many scenes.
        seed: Seed of the choice; the same seed gives the same scenes.
    """
    rng = random.Random(seed)
    new_look = [o for o in ALL_OBJECTS if (o.color, o.shape) in HELD_OUT_COLOR_SHAPE]
    new_motion = [o for o in ALL_OBJECTS if (o.shape, o.motion) in HELD_OUT_SHAPE_MOTION]
    scenes: list[Scene] = []
    for index in range(count):
        first = rng.choice(new_motion if index % 3 == 1 or index % 6 == 5 else new_look)
        objects = [first]
        if index % 3 == 2:
            objects.append(rng.choice([o for o in TRAINING_OBJECTS if o.color != first.color]))
            rng.shuffle(objects)
        scenes.append(Scene(tuple(objects), rng.choice(BACKGROUND_NAMES)))
    return scenes


def caption(scene: Scene, rng: random.Random) -> str:
    """A caption of the scene in varied words; now and then it leaves an attribute out, as people do."""
    parts = []
    for o in scene.objects:
        noun = o.shape if rng.random() > 0.04 else "shape"
        color = f"{o.color} " if rng.random() > 0.04 else ""
        motion = f" {rng.choice(_MOTION_PHRASES[o.motion])}" if rng.random() > 0.06 else ""
        article = "the" if rng.random() < 0.3 else _article(color or noun)
        parts.append(f"{article} {color}{noun}{motion}")
    background = rng.choice(_BACKGROUND_PHRASES).format(scene.background) if rng.random() > 0.1 else ""
    return rng.choice((" and ", " and ", " while ", ", ")).join(parts) + background


def vocabulary() -> list[str]:
    """Every word and punctuation mark a caption can contain, sorted."""
    text = [
        " ".join(SHAPES),
        " ".join(COLOR_NAMES),
        " ".join(BACKGROUND_NAMES),
        "a an the shape and while on over against",
    ]
    text += [phrase for phrases in _MOTION_PHRASES.values() for phrase in phrases]
    return sorted({"background", ",", "."}.union(*(line.split() for line in text)))


def shape_distance(shape: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance to a shape of about unit radius around the origin, negative inside; `y` points down.

    Distances are exact near the edges, which is what anti-aliasing needs.

    Args:
        shape: One of `SHAPES`.
        x: Horizontal coordinates.
        y: Vertical coordinates, of the same shape.
    """
    if shape == "circle":
        return torch.hypot(x, y) - 1.0
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.88
    if shape == "triangle":
        inradius = 0.62
        return torch.maximum(y, math.sqrt(3) / 2 * x.abs() - 0.5 * y) - inradius
    if shape == "star":
        sector = 2 * math.pi / 5
        angle = torch.remainder(torch.atan2(x, -y) + sector / 2, sector) - sector / 2
        radius = torch.hypot(x, y)
        px, py = radius * torch.cos(angle), radius * torch.sin(angle).abs()
        outer, inner = 1.2, 0.52
        edge_x, edge_y = inner * math.cos(sector / 2) - outer, inner * math.sin(sector / 2)
        length = math.hypot(edge_x, edge_y)
        return ((px - outer) * edge_y - py * edge_x) / length
    if shape == "cross":
        x, y = x.abs(), y.abs()
        return torch.minimum(torch.maximum(x - 1.0, y - 0.36), torch.maximum(x - 0.36, y - 1.0))
    if shape == "heart":
        half = 0.82
        x, y = x.abs(), y + 0.05
        diamond = (x + y.abs() - half) / math.sqrt(2)
        lobe = torch.hypot(x - half / 2, y + half / 2) - half / math.sqrt(2)
        return torch.minimum(diamond, lobe)
    raise ValueError(f"no shape is called {shape!r}; choose one of {', '.join(SHAPES)}")
