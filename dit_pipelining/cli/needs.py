"""What a model needs of a machine, for `dit-pipelining doctor MODEL`: memory of each rank as `show` tells it, how many GPUs."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from dit_pipelining.cli.capturing import Capture, once_each
from dit_pipelining.cli.checks import BAD, GOOD, NOTE, Finding
from dit_pipelining.cli.study import Question, study
from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.devices import DEVICES, GIB
from dit_pipelining.costs.machine import machine
from dit_pipelining.lowering.names import data_size
from dit_pipelining.planning.degrees import ALONE, Degrees
from dit_pipelining.planning.memory import RankMemory
from dit_pipelining.show.picture import Picture
from partitioners import DoesNotFitError, PartitionError, TooManyStagesError

SPARE_STAGES = 4
"""How many more stages than an even share of all weights asks for are tried: blocks are not divisible."""


def needs(question: Question, kind: str | None = None, capture: Capture | None = None) -> Iterator[Finding]:
    """What a model needs in all, and of each rank.

    Args:
        question: about the model. Where its degrees name one rank, the smallest number of stages that fit is looked for;
            what it runs on does not matter.
        kind: of the GPUs, as `costs.machine` describes them (`"rtx4090"`, `"24GB"`). Default: those of this machine, or
            each known kind where there are none.
        capture: makes the captured transformers. Default: captures anew.

    Raises:
        SplitError: the model or the kind is not known, or the model cannot be spread by these degrees.
    """
    machine(question.degrees.pipeline, kind)  # what cannot be read is an error before anything is captured
    capture = capture or once_each()
    whole = study(replace(question, config=ParallelConfig()), capture)
    (memory,) = whole.memory
    parts = f"weights {data_size(memory.weights)}, activations {data_size(memory.activations)}"
    has_components = memory.encoders or memory.vae
    parts += f", encoders {data_size(memory.encoders)}, VAE {data_size(memory.vae)}" if has_components else ""
    beside = f", without {whole.not_counted}" if whole.not_counted else ""
    size = "" if whole.size is None else f"at {whole.size}, in {whole.dtype}"
    yield Finding(f"{whole.model} needs", GOOD, f"{parts}{beside}", size)
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{min(torch.cuda.mem_get_info(index)[1] for index in range(here)) / GIB:.1f}GB" if here else None
    own = found if kind is None else kind
    kinds = [name for name in DEVICES if name != "cpu"] if own is None else [own]
    alone = question.degrees == ALONE
    alike: dict[Finding, list[str]] = {}
    for each in kinds:
        picture = _on_fewest(question, each, memory, capture) if alone else as_asked(question, each, capture)
        finding = _too_small(whole) if picture is None else _each_rank(picture, question.degrees)
        if kind is None and not here and finding.state == BAD:
            finding = replace(finding, state=NOTE)  # about kinds that nobody asked for
        if kind is None and here and picture is not None and picture.degrees.size > here:
            finding = replace(finding, state=BAD, text=f"{finding.text}; here are {here}", hint=_smaller(whole))
        alike.setdefault(finding, []).append(each)
    for finding, names in alike.items():
        yield replace(finding, what=f"GPUs ({', '.join(names)})")


def _each_rank(picture: Picture, asked: Degrees) -> Finding:
    """What the ranks of each stage need."""
    number, copies = picture.degrees.size, picture.degrees.data
    ranks = "ranks" if picture.degrees.inside > 1 else "rank"
    each = ", ".join(
        f"{ranks} {picture.ranks_of(place)} {data_size(own.total)} (activations {data_size(own.activations)})"
        for place, own in enumerate(picture.memory)
    )
    text = f"{number}: {each}" + (f", the same in all {copies} copies" if copies > 1 else "")
    if short := max(picture.shortfalls):
        return Finding("", BAD, f"{text}; {data_size(short)} too little", _relief(picture))
    return Finding("", GOOD, text, f"pipeline_parallel_size={number}" if asked == ALONE and number > 1 else "")


def _too_small(whole: Picture) -> Finding:
    return Finding("", BAD, "too small, however many there are", _relief(whole))


def as_asked(question: Question, kind: str | None, capture: Capture) -> Picture:
    """The cut over these ranks, of any memory where no kind is given; if it does not fit, the one that lacks least."""
    config = replace(question.config, ranks=kind)
    try:
        return study(replace(question, config=config), capture)
    except DoesNotFitError as error:
        return study(replace(question, config=replace(config, partition=error.counts)), capture)


def _on_fewest(question: Question, kind: str, whole: RankMemory, capture: Capture) -> Picture | None:
    """The cut over the smallest number of GPUs whose ranks all fit; None if they are too small for any number."""
    usable = machine(1, kind).ranks[0].memory_bytes
    assert usable is not None  # every kind says what it has
    fixed = whole.activations + whole.requests  # which more stages do not make smaller
    room = usable - fixed
    if room <= 0:
        return None
    least = math.ceil(whole.weights / usable)
    for number in range(least, math.ceil((whole.total - fixed) / room) + SPARE_STAGES):
        try:
            picture = study(
                replace(question, config=replace(question.config, pipeline_parallel_size=number, ranks=kind)), capture
            )
        except TooManyStagesError:
            return None
        except PartitionError:
            continue
        if not any(picture.shortfalls):
            return picture
    return None


def _relief(picture: Picture) -> str:
    """What makes the fullest rank's largest part smaller."""
    fullest = max(picture.memory, key=lambda own: own.total)
    if fullest.encoders > max(fullest.weights, fullest.activations):
        return "--text-encoder-tp-size N splits text encoders over N ranks"
    if fullest.weights > fullest.activations:
        return "more stages, --tensor-parallel-size or --use-hsdp leave less weights on each"
    return _smaller(picture)


def _smaller(picture: Picture) -> str:
    if picture.size is None:
        return "smaller inputs need less"
    is_video = picture.size.frames > 1
    return f"a smaller {'--height, --width or --num-frames' if is_video else '--height or --width'} needs less"
