"""What a model needs of a machine, for `dit-pipelining doctor MODEL`: weights, activations of each rank, how many GPUs."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from dit_pipelining.cli.checks import BAD, GOOD, NOTE, Finding, gib
from dit_pipelining.cli.study import Question, study
from dit_pipelining.costs.devices import DEVICES, GIB
from dit_pipelining.costs.machine import machine
from dit_pipelining.planning.memory import RankMemory
from dit_pipelining.show.picture import Picture
from partitioners import PartitionError, TooManyStagesError

SPARE_STAGES = 4
"""How many more stages than an even share of all weights asks for are tried: blocks are not divisible."""

SMALLER = "a smaller --height, --width or --num-frames needs less"


def needs(question: Question, kind: str | None = None) -> Iterator[Finding]:
    """What a model needs in all, and how many GPUs of a kind.

    Args:
        question: about the model; its number of stages and what it runs on do not matter.
        kind: of the GPUs, as `costs.machine` describes them (`"rtx4090"`, `"24GB"`). Default: those of this machine, or
            each known kind where there are none.

    Raises:
        SplitError: the model or the kind is not known.
    """
    whole = study(replace(question, stages=1))
    (memory,) = whole.memory
    beside = "" if whole.components_known else "; text encoders and VAE, which are not known, come on top"
    parts = f"weights {gib(memory.weights)}, activations {gib(memory.activations)}"
    parts += f", text encoders {gib(memory.encoders)}, VAE {gib(memory.vae)}" if whole.components_known else ""
    yield Finding(f"{whole.model} needs", GOOD, f"{parts}{beside}", _size(whole))
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{min(torch.cuda.mem_get_info(index)[1] for index in range(here)) / GIB:.1f}GB" if here else None
    kinds = [kind or found] if kind or found else [name for name in DEVICES if name != "cpu"]
    alike: dict[Finding, list[str]] = {}
    for own in kinds:
        assert own is not None
        picture = _on_fewest(question, own, memory)
        alike.setdefault(_finding(picture, None if kind or not here else here), []).append(own)
    for finding, names in alike.items():
        yield replace(finding, what=f"GPUs ({', '.join(names)})")


def _finding(picture: Picture | None, here: int | None) -> Finding:
    if picture is None:
        return Finding("", NOTE if here is None else BAD, "too small, however many there are", SMALLER)
    number = len(picture.memory)
    each = ", ".join(f"{gib(own.total)} (activations {own.activations / GIB:.1f})" for own in picture.memory)
    if here is None or number <= here:
        return Finding("", GOOD, f"{number}: {each}", f"pipeline_parallel_size={number}" if number > 1 else "")
    return Finding("", BAD, f"{number}: {each}; here are {here}", SMALLER)


def _on_fewest(question: Question, kind: str, whole: RankMemory) -> Picture | None:
    """The cut over the smallest number of GPUs whose ranks all fit; None if they are too small for any number."""
    usable = machine(1, kind).ranks[0].memory_bytes
    assert usable is not None  # every kind says what it has
    room = usable - whole.activations  # which more stages do not make smaller
    if room <= 0:
        return None
    least = math.ceil(whole.weights / usable)
    for number in range(least, math.ceil((whole.total - whole.activations) / room) + SPARE_STAGES):
        try:
            picture = study(replace(question, stages=number, ranks=kind, partitioner="vae-aware"))
        except TooManyStagesError:
            return None
        except PartitionError:
            picture = None
        if picture is not None and max(own.total for own in picture.memory) <= usable:
            return picture
    return None


def _size(picture: Picture) -> str:
    size = picture.size
    return "" if size is None else f"at {size.width}x{size.height}, {size.frames} frames, in {picture.dtype}"
