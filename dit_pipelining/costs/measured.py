"""Measured profiles: seconds of a model's parts on a machine, kept in a JSON file.

`dit-pipelining profile` writes them; `partitioner="balanced"` and `dit-pipelining show` read them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dit_pipelining.costs.model_costs import Section, node_flops
from dit_pipelining.errors import ConfigError

FORMAT = 1
"""Raised when a key changes its meaning or goes; new keys do not raise it."""


@dataclass(frozen=True)
class Measured:
    """One measured part.

    Attributes:
        seconds: of one call.
        flops: of that call; turns the time into that of another size. 0: not known, the time is taken as it is.
    """

    seconds: float
    flops: int = 0

    def scaled(self, flops: int) -> float:
        """Seconds of a call with this many FLOPs."""
        return self.seconds * flops / self.flops if self.flops and flops else self.seconds


@dataclass(frozen=True)
class MeasuredProfile:
    """What a model's parts take on a machine.

    For another size than the measured one, seconds are scaled by FLOPs (the VAE's by pixels).

    Attributes:
        model: as it was asked for, such as a preset.
        model_class: of the transformer.
        device: as torch names it.
        dtype: of the weights, such as `bfloat16`.
        size: `height`, `width` (pixels), `frames`, `batch`; empty where the inputs were described by a file.
        blocks: by kind, see `block_kinds`.
        prologue, epilogue: the glue before and after the blocks.
        vae_encode_seconds, vae_decode_seconds: of one whole encode and decode at `size`; None: not measured.
        text_encode_seconds: of all text encoders for one prompt; None: not measured.
        versions: of torch, diffusers, CUDA and what else may matter.
    """

    model: str
    model_class: str
    device: str
    dtype: str
    blocks: Mapping[str, Measured]
    prologue: Measured
    epilogue: Measured
    size: Mapping[str, int] = field(default_factory=dict)
    vae_encode_seconds: float | None = None
    vae_decode_seconds: float | None = None
    text_encode_seconds: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def seconds(self, section: Section) -> float:
        """Seconds of a part of the model; glue between blocks runs at the mean rate of the blocks.

        Raises:
            ConfigError: the profile lacks a kind of block.
        """
        if section.place != "block":
            return (self.prologue if section.place == "prologue" else self.epilogue).scaled(section.flops)
        total = 0.0
        for node in section.nodes:
            if "block" in node.meta:
                total += self._block(section.kinds[node]).scaled(node_flops(node))
            else:
                total += node_flops(node) * self._seconds_per_flop
        return total

    def vae_seconds(self, pixels: int | None = None) -> tuple[float, float]:
        """Seconds of one VAE encode and one decode; 0 where not measured.

        Args:
            pixels: height x width x frames x batch. Default: the measured ones.
        """
        measured = 1
        for length in self.size.values():
            measured *= length
        scale = 1.0 if pixels is None or not self.size else pixels / measured
        return (self.vae_encode_seconds or 0.0) * scale, (self.vae_decode_seconds or 0.0) * scale

    @property
    def _seconds_per_flop(self) -> float:
        flops = sum(block.flops for block in self.blocks.values())
        return sum(block.seconds for block in self.blocks.values()) / flops if flops else 0.0

    def _block(self, kind: str) -> Measured:
        if kind not in self.blocks:
            raise ConfigError(
                f"the profile of {self.model} on {self.device} has no block of kind {kind!r}; it has "
                f"{', '.join(self.blocks)}. Measure this model with `dit-pipelining profile`."
            )
        return self.blocks[kind]

    def save(self, path: Path) -> None:
        """Write the JSON file that `read_profile` reads."""
        path.write_text(json.dumps(self.as_data(), indent=2) + "\n", encoding="utf-8")

    def as_data(self) -> dict[str, Any]:
        """What the file holds."""
        return {"format": FORMAT, **asdict(self)}


def read_profile(path: Path) -> MeasuredProfile:
    """A profile from its file.

    Raises:
        ConfigError: there is no such file, or it holds something else; says what is wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the profile {path} cannot be read: {error}.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"{path} is no profile of format {FORMAT}; write one with `dit-pipelining profile`.")
    known = MeasuredProfile.__dataclass_fields__
    facts = {name: value for name, value in data.items() if name in known}
    try:
        facts["blocks"] = {kind: _measured(part) for kind, part in facts["blocks"].items()}
        facts["prologue"], facts["epilogue"] = _measured(facts["prologue"]), _measured(facts["epilogue"])
        for name in ("vae_encode_seconds", "vae_decode_seconds", "text_encode_seconds"):
            if facts.get(name) is not None:
                facts[name] = _measured({"seconds": facts[name]}).seconds
        return MeasuredProfile(**facts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the profile {path} is not complete: {type(error).__name__}: {error}. Write it again with "
            "`dit-pipelining profile`."
        ) from None


def _measured(part: Mapping[str, Any]) -> Measured:
    seconds, flops = part["seconds"], part.get("flops", 0)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
        raise ValueError(f"{seconds!r} is no number of seconds")
    if not isinstance(flops, int) or flops < 0:
        raise ValueError(f"{flops!r} is no number of FLOPs")
    return Measured(float(seconds), flops)
