"""From what was asked on the command line to the picture: capture once, cut as often as is to be compared."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dit_pipelining.api import split_model
from dit_pipelining.cli.arguments import DEFAULT_DEVICE, DEFAULT_STEPS
from dit_pipelining.cli.capturing import capturing
from dit_pipelining.costs.devices import DeviceProfile, find_device
from dit_pipelining.costs.machine import Machine, machine
from dit_pipelining.costs.measured import MeasuredProfile, read_profile
from dit_pipelining.costs.plan import plan_cut
from dit_pipelining.costs.timing import TimingChoice
from dit_pipelining.errors import ConfigError
from dit_pipelining.lowering.report import report_split
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.planning.components import Components, components_of
from dit_pipelining.planning.forecast import forecast
from dit_pipelining.planning.guidance import step_calls
from dit_pipelining.planning.inputs import build_inputs, read_inputs, with_dtype
from dit_pipelining.planning.memory import rank_memory
from dit_pipelining.planning.models import ModelSpec, SizeRequest, TransformerSpec, find_model, model_inputs
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.timeline import Load
from dit_pipelining.planning.weightless import build_weightless, transformer_class
from dit_pipelining.show.picture import Alternative, Picture, Target, alternative
from partitioners import ENVIRONMENT_VARIABLE, Component, PartitionError
from partitioners.errors import counted


@dataclass(frozen=True, kw_only=True)
class Question:
    """What was asked. None: the model's own, or the default.

    Attributes:
        model: preset, folder or file.
        stages: number of pipeline stages.
        partitioner, partition: what decides where to cut; the counts beat the partitioner.
        size: of what is generated.
        inputs: file that describes the inputs instead.
        dtype: of the weights, by its name in torch.
        device, ranks, topology, profile: what it is cut for, as in `ParallelConfig`; `device` stands for all ranks.
        requests, steps, guidance, replicas, schedule: what is run.
        text_encoder_tp_size: ranks over which text encoders are split.
        compare: partitioners to compare with.
    """

    model: str
    stages: int
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
    replicas: int = 1
    schedule: str = "rolling"
    text_encoder_tp_size: int = 1
    compare: tuple[str, ...] = ()

    @property
    def asked_ranks(self) -> str | None:
        """What the ranks are, where that was asked for: it limits their memory."""
        return self.ranks or self.device


@dataclass(frozen=True)
class _Setting:
    """What a question comes to, the same for all ways to cut."""

    question: Question
    model: ModelSpec
    profile: TimingChoice | None
    machine: Machine
    target: Target
    load: Load
    size: Size | None
    beside: Components

    @property
    def components(self) -> tuple[Component, ...]:
        return self.beside.for_partitioner(self.load.steps * self.load.calls_per_step, self.question.stages)


def study(question: Question) -> Picture:
    """Find out everything that was asked for.

    Raises:
        SplitError, PartitionError: something that was asked cannot be.
    """
    if question.inputs is not None and not question.size.is_empty:
        raise ConfigError("--inputs describes the inputs, and so their size; leave out either it or the sizes.")
    if question.inputs is not None and question.guidance == "batched":
        raise ConfigError(
            "--inputs describes the batch of a call: describe both branches there, without --cfg batched."
        )
    model = find_model(question.model)
    profile = _profile(question)
    machine, target = _machine(question, profile)
    known = model.transformers[0].known
    calls = step_calls(question.guidance, known, question.size.batch, question.replicas)
    load = Load(
        requests=question.requests,
        steps=question.steps or (known.defaults["steps"] if known else DEFAULT_STEPS),
        calls_per_step=calls.calls,
        replicas=question.replicas,
        schedule=question.schedule,
    )
    inputs = [_inputs(question, model, spec, calls.batch) for spec in model.transformers]
    size = inputs[0][1]
    beside = _components(question, model, size, target.devices[-1], machine)
    setting = _Setting(question, model, profile, machine, target, load, size, beside)
    splits = [_split(setting, spec, described) for spec, (described, _) in zip(model.transformers, inputs, strict=True)]
    alternatives = tuple(_alternative(setting, name, splits) for name in question.compare)
    return replace(_picture(setting, splits, _decided_by(question)), alternatives=alternatives)


def _profile(question: Question) -> TimingChoice | None:
    """What seconds are taken from; None: the data sheets of the ranks that were asked for."""
    if question.device is not None and question.ranks is not None:
        raise ConfigError("--device and --ranks both say what the ranks are; give one of them.")
    if question.profile is not None:
        return read_profile(question.profile)
    return None if question.asked_ranks else find_device(DEFAULT_DEVICE)


def _machine(question: Question, profile: TimingChoice | None) -> tuple[Machine, Target]:
    """The machine to cut for, and how it is shown. Where no device was named, memory does not limit the cut."""
    measured = profile if isinstance(profile, MeasuredProfile) else None
    usual = _usual_device(question, measured)
    found = machine(question.stages, question.asked_ranks, profile, question.topology)
    devices = tuple(rank.device or usual for rank in found.ranks)
    limits = (rank.memory_bytes or device.usable_bytes for rank, device in zip(found.ranks, devices, strict=True))
    links = (device.link(question.topology) for device in devices[:-1])
    source = f"as measured on {measured.device}" if measured else "from data sheets"
    return found, Target(devices, tuple(links), tuple(limits), source)


def _usual_device(question: Question, measured: MeasuredProfile | None) -> DeviceProfile:
    """Whose memory and links ranks have that were not described."""
    if question.device is not None or measured is None:
        return find_device(question.device or DEFAULT_DEVICE)
    try:
        return find_device(measured.device)
    except ConfigError:
        raise ConfigError(
            f"{question.profile} was measured on {measured.device!r}, whose memory and links are not known; name the known "
            "device that is most like it with --device."
        ) from None


def _inputs(
    question: Question, model: ModelSpec, spec: TransformerSpec, batch: int
) -> tuple[Mapping[str, Any], Size | None]:
    if question.inputs is not None:
        return read_inputs(question.inputs), None
    asked = question.size if batch == 1 and question.size.batch is None else replace(question.size, batch=batch)
    described, size = model_inputs(model, spec, asked)
    return with_dtype(described, question.dtype), size


def _components(
    question: Question, model: ModelSpec, size: Size | None, device: DeviceProfile, machine: Machine
) -> Components:
    known, parts = model.transformers[0].known, question.text_encoder_tp_size
    ranks = question.stages * question.replicas
    if parts > ranks:
        raise ConfigError(
            f"--text-encoder-tp-size {parts}: {counted(ranks, 'rank')} at most can run a call together; use {ranks} or less."
        )
    if model.source != "preset" or known is None or size is None:
        if parts > 1:
            raise ConfigError(
                f"--text-encoder-tp-size {parts}: text encoders are known for presets at a size only; leave it out."
            )
        return Components()
    measured = machine.timing if isinstance(machine.timing, MeasuredProfile) else None
    itemsize = getattr(torch, question.dtype).itemsize
    return components_of(known, size, itemsize, device, measured, encoder_parts=parts, topology=question.topology)


def _split(setting: _Setting, spec: TransformerSpec, described: Mapping[str, Any]) -> SplitModel:
    question = setting.question
    with capturing(spec):
        model = build_weightless(transformer_class(spec.model_class), spec.config, getattr(torch, question.dtype))
        return split_model(
            model,
            question.stages,
            build_inputs(described),
            partitioner=question.partitioner,
            counts=question.partition,
            ranks=question.asked_ranks,
            profile=setting.profile,
            topology=question.topology,
            components=setting.components,
        )


def _picture(setting: _Setting, splits: Sequence[SplitModel], decided_by: str) -> Picture:
    question, specs = setting.question, setting.model.transformers
    timelines = tuple(
        forecast(split, setting.target.devices, question.topology, setting.load, setting.beside) for split in splits
    )
    numbers = [len(spec.names) for spec in specs]
    return Picture(
        model=setting.model.name,
        source=setting.model.source,
        decided_by=decided_by,
        size=setting.size,
        dtype=question.dtype,
        target=setting.target,
        reports=tuple(
            report_split(split, spec.names, split.cut.costs if split.cut else None)
            for split, spec in zip(splits, specs, strict=True)
        ),
        timelines=timelines,
        memory=rank_memory(list(zip(splits, numbers, strict=True)), timelines[0].workload, setting.beside),
        components_known=setting.beside != Components(),
    )


def _alternative(setting: _Setting, name: str, splits: Sequence[SplitModel]) -> Alternative:
    """Cut the captured models in another way."""
    try:
        cuts = [
            plan_cut(split.graph, split.model, setting.machine, name, None, setting.components, environment={})
            for split in splits
        ]
    except PartitionError as error:
        return Alternative(name, problem=str(error))
    return alternative(_picture(setting, [split.cut_again(cut) for split, cut in zip(splits, cuts, strict=True)], name))


def _decided_by(question: Question) -> str:
    if question.partition is not None:
        return f"--partition {question.partition}"
    if (counts := os.environ.get(ENVIRONMENT_VARIABLE)) is not None:
        return f"{ENVIRONMENT_VARIABLE}={counts}"
    return question.partitioner
