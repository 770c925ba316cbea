"""From what was asked on the command line to the picture: capture once, cut as often as is to be compared."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dit_pipelining.cli.arguments import DEFAULT_STEPS
from dit_pipelining.cli.capturing import Capture, Captured, captured
from dit_pipelining.cli.plan_search import divides_of
from dit_pipelining.config_checks import early_counts_check
from dit_pipelining.costs.devices import DEFAULT_DEVICE, DeviceProfile, find_device, known_device
from dit_pipelining.costs.inside import rank_costs
from dit_pipelining.costs.machine import Machine, machine
from dit_pipelining.costs.measured import MeasuredProfile, read_profile
from dit_pipelining.costs.plan import plan_cut
from dit_pipelining.costs.timing import TimingChoice
from dit_pipelining.costs.together import Others, others_of
from dit_pipelining.errors import ConfigError
from dit_pipelining.lowering.report import report_split
from dit_pipelining.planning.beside import Beside, beside_model
from dit_pipelining.planning.components import Components, components_of
from dit_pipelining.planning.degrees import ALONE, Degrees, problem_inside
from dit_pipelining.planning.forecast import forecast
from dit_pipelining.planning.guidance import step_calls
from dit_pipelining.planning.inputs import read_inputs
from dit_pipelining.planning.memory import rank_memory
from dit_pipelining.planning.models import ModelSpec, SizeRequest, TransformerSpec, find_model, model_inputs
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.timeline import Load
from dit_pipelining.show.picture import Alternative, Picture, Target, alternative
from partitioners import ENVIRONMENT_VARIABLE, Component, PartitionError
from partitioners.errors import counted

NO_VARIABLES: Mapping[str, str] = {}

MOST_STAGE_CALLS = 500_000
"""Calls of stages that are simulated, at some 30 microseconds each."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What was asked. None: the model's own, or the default.

    Attributes:
        model: preset, folder or file.
        degrees: pipeline stages, and the ranks that share them or run them again.
        partitioner, partition: what decides where to cut; the counts beat the partitioner.
        size: of what is generated.
        inputs: file that describes the inputs instead.
        dtype: of the weights, by its name in torch.
        device, ranks, topology, profile: what it is cut for, as in `ParallelConfig`; `device` stands for all ranks.
        requests, steps, guidance, schedule: what is run.
        text_encoder_tp_size: ranks over which text encoders are split.
        compare: partitioners to compare with.
    """

    model: str
    degrees: Degrees = ALONE
    partitioner: str = "balanced"
    partition: str | None = None
    size: SizeRequest = field(default_factory=SizeRequest)
    inputs: Path | None = None
    dtype: str = "bfloat16"
    device: str | None = None
    ranks: str | None = None
    topology: str = "auto"
    profile: Path | None = None
    requests: int = 1
    steps: int | None = None
    guidance: str | None = None
    schedule: str = "rolling"
    text_encoder_tp_size: int = 1
    compare: tuple[str, ...] = ()

    @property
    def asked_ranks(self) -> str | None:
        """What the ranks are, where that was asked for: it limits their memory."""
        return self.device if self.ranks is None else self.ranks


@dataclass(frozen=True)
class _Setting:
    """What a question comes to, the same for all ways to cut."""

    question: Question
    model: ModelSpec
    machine: Machine
    target: Target
    load: Load
    size: Size | None
    beside: Components
    not_counted: str

    @property
    def components(self) -> tuple[Component, ...]:
        return self.beside.for_partitioner(self.load.steps * self.load.calls_per_step, self.question.degrees)


def study(question: Question, capture: Capture = captured) -> Picture:
    """Find out everything that was asked for.

    Args:
        question: what was asked.
        capture: makes the captured transformers; several questions about one model can share them.

    Raises:
        SplitError, PartitionError: something that was asked cannot be.
    """
    if question.inputs is not None and not question.size.is_empty:
        raise ConfigError("--inputs describes the inputs, and so their size; leave out either it or the sizes.")
    if question.inputs is not None and question.guidance == "batched":
        raise ConfigError(
            "--inputs describes the batch of a call: describe both branches there, without --cfg batched."
        )
    degrees = question.degrees
    early_counts_check(question.partition, degrees.pipeline)
    model = find_model(question.model)
    profile = _profile(question)
    machine, target = _machine(question, profile)
    known = model.transformers[0].known
    calls = step_calls(question.guidance, known, question.size.batch, degrees.cfg)
    load = Load(
        requests=math.ceil(question.requests / degrees.data),
        steps=question.steps or (known.defaults["steps"] if known else DEFAULT_STEPS),
        calls_per_step=calls.calls,
        replicas=degrees.cfg,
        schedule=question.schedule,
    )
    _check_length(load, degrees.pipeline)
    inputs = [_inputs(question, model, spec, calls.batch) for spec in model.transformers]
    size = inputs[0][1]
    known_beside = beside_model(model)
    beside = _components(question, known_beside, size, target.devices[-1], machine)
    setting = _Setting(question, model, machine, target, load, size, beside, _not_counted(known_beside, size))
    specs = zip(model.transformers, inputs, strict=True)
    models = [capture(spec, described, question.dtype) for spec, (described, _) in specs]
    for own in models:
        _check_inside(setting, own)
    picture = _picture(setting, models, question.partitioner, question.partition, os.environ)
    alternatives = tuple(_alternative(setting, models, name) for name in question.compare)
    return replace(picture, decided_by=_decided_by(question), alternatives=alternatives)


def _check_length(load: Load, stages: int) -> None:
    """Refuse a run whose simulation would take minutes."""
    calls = load.requests * load.steps * load.calls_per_step
    if calls * stages > MOST_STAGE_CALLS:
        most = max(MOST_STAGE_CALLS // (load.steps * load.calls_per_step * stages), 1)
        asked = f"{counted(load.requests, 'request')} of {counted(load.steps, 'step')} on {counted(stages, 'stage')}"
        raise ConfigError(f"{asked}: more than is simulated; use --requests {most} or less, or fewer --steps.")


def _profile(question: Question) -> TimingChoice | None:
    """What seconds are taken from; None: the data sheets of the ranks that were asked for."""
    if question.device is not None and question.ranks is not None:
        raise ConfigError("--device and --ranks both say what the ranks are; give one of them.")
    if question.profile is not None:
        return read_profile(question.profile)
    return find_device(DEFAULT_DEVICE) if question.asked_ranks is None else None


def _machine(question: Question, profile: TimingChoice | None) -> tuple[Machine, Target]:
    """The machine to cut for, and how it is shown. Where no device was named, memory does not limit the cut."""
    measured = profile if isinstance(profile, MeasuredProfile) else None
    if measured is not None and question.device is None and known_device(measured.device) is None:
        raise ConfigError(
            f"{question.profile} was measured on {measured.device!r}, whose memory and links are not known; name the known "
            "device that is most like it with --device."
        )
    found = machine(question.degrees.pipeline, question.asked_ranks, profile, question.topology)
    devices = tuple(map(found.device_of, found.ranks))
    limits = (rank.memory_bytes or device.usable_bytes for rank, device in zip(found.ranks, devices, strict=True))
    links = (device.link(question.topology) for device in devices[:-1])
    source = f"as measured on {measured.device}" if measured else "from data sheets"
    return found, Target(devices, tuple(links), tuple(limits), source)


def _inputs(
    question: Question, model: ModelSpec, spec: TransformerSpec, batch: int
) -> tuple[Mapping[str, Any], Size | None]:
    if question.inputs is not None:
        return read_inputs(question.inputs), None
    asked = question.size if batch == 1 and question.size.batch is None else replace(question.size, batch=batch)
    described, size = model_inputs(model, spec, asked)
    return described, size


def _components(
    question: Question, known: Beside | None, size: Size | None, device: DeviceProfile, machine: Machine
) -> Components:
    parts = question.text_encoder_tp_size
    if known is None:
        if parts > 1:
            raise ConfigError(
                f"--text-encoder-tp-size {parts}: a transformer alone has no text encoders; leave it out."
            )
        return Components()
    measured = machine.timing if isinstance(machine.timing, MeasuredProfile) else None
    itemsize = getattr(torch, question.dtype).itemsize
    return components_of(known, size, itemsize, device, measured, encoder_parts=parts, topology=question.topology)


def _not_counted(known: Beside | None, size: Size | None) -> str:
    """What is left out of memory and time, in words."""
    if known is None:
        return "encoders and VAE, which are not known"
    missing = [f"{', '.join(known.missing)}, of which the folder has no config.json"] if known.missing else []
    decode = (
        ["decoding, which is not known"] if known.vae is not None and (size is None or known.decode is None) else []
    )
    return "; ".join(missing + decode)


def _check_inside(setting: _Setting, own: Captured) -> None:
    """Check that the ranks can share the stages of a captured model."""
    degrees = setting.question.degrees
    if degrees.inside > 1 and (problem := problem_inside(degrees, divides_of(own.model, own.graph))):
        raise ConfigError(f"{degrees.flags()}: {problem}.")


def _others(setting: _Setting, models: Sequence[Captured], index: int) -> Others:
    """What the ranks hold beside the transformer of this index."""
    degrees, numbers = setting.question.degrees, [len(spec.names) for spec in setting.model.transformers]
    numbers[index] -= 1
    others = [own.model for own, number in zip(models, numbers, strict=True) for _ in range(number)]
    return others_of(models[index].model, others, degrees.pipeline, degrees, degrees.shards)


def _picture(
    setting: _Setting,
    models: Sequence[Captured],
    partitioner: str,
    counts: str | None = None,
    environment: Mapping[str, str] = NO_VARIABLES,
) -> Picture:
    """Cut the captured models, and look at what that gives."""
    question, specs, degrees = setting.question, setting.model.transformers, setting.question.degrees
    splits = [
        own.split(
            plan_cut(
                own.graph,
                own.model,
                setting.machine,
                partitioner,
                counts,
                setting.components,
                environment,
                layout=degrees,
                shards=degrees.shards,
                others=_others(setting, models, index),
            )
        )
        for index, own in enumerate(models)
    ]
    timelines = tuple(
        forecast(split, setting.target.devices, question.topology, setting.load, setting.beside, degrees)
        for split in splits
    )
    numbers = [len(spec.names) for spec in specs]
    return Picture(
        model=setting.model.name,
        source=setting.model.source,
        decided_by=partitioner,
        size=setting.size,
        dtype=question.dtype,
        target=setting.target,
        reports=tuple(
            report_split(split, spec.names, rank_costs(own.graph, own.model, setting.machine, degrees, degrees.shards))
            for own, split, spec in zip(models, splits, specs, strict=True)
        ),
        timelines=timelines,
        memory=rank_memory(list(zip(splits, numbers, strict=True)), timelines[0].workload, setting.beside, degrees),
        not_counted=setting.not_counted,
        degrees=degrees,
    )


def _alternative(setting: _Setting, models: Sequence[Captured], name: str) -> Alternative:
    """Cut the captured models in another way."""
    try:
        return alternative(_picture(setting, models, name))
    except PartitionError as error:
        return Alternative(name, problem=str(error))


def _decided_by(question: Question) -> str:
    if question.partition is not None:
        return f"--partition {question.partition}"
    if (counts := os.environ.get(ENVIRONMENT_VARIABLE)) is not None:
        return f"{ENVIRONMENT_VARIABLE}={counts}"
    return question.partitioner
