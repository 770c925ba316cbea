"""From what was asked on the command line to the picture: capture once, cut as often as is to be compared."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from dit_pipelining.cli.arguments import DEFAULT_STEPS
from dit_pipelining.cli.capturing import Capture, Captured, captured
from dit_pipelining.cli.plan_search import divides_of
from dit_pipelining.cli.target import machine_and_target
from dit_pipelining.config import ParallelConfig
from dit_pipelining.config_checks import early_counts_check
from dit_pipelining.costs.devices import DeviceProfile
from dit_pipelining.costs.inside import rank_costs
from dit_pipelining.costs.machine import Machine
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.costs.plan import CutPlan, plan_cut
from dit_pipelining.errors import ConfigError
from dit_pipelining.lowering.report import report_split
from dit_pipelining.planning.beside import Beside, beside_model
from dit_pipelining.planning.components import Components, components_of, with_tiles
from dit_pipelining.planning.degrees import Degrees, problem_inside
from dit_pipelining.planning.forecast import forecast
from dit_pipelining.planning.guidance import step_calls
from dit_pipelining.planning.inputs import read_inputs
from dit_pipelining.planning.memory import rank_memory
from dit_pipelining.planning.models import ModelSpec, SizeRequest, TransformerSpec, find_model, model_inputs
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.timeline import Load
from dit_pipelining.runtime.beside import others_of_each
from dit_pipelining.show.picture import Alternative, Picture, Target, alternative
from partitioners import ENVIRONMENT_VARIABLE, PartitionError
from partitioners.errors import counted

NO_VARIABLES: Mapping[str, str] = {}

NOT_SIMULATED = ("blocks", "microbatches")
"""Fields of a configuration that would change what is shown, and are not looked at."""

MOST_STAGE_CALLS = 500_000
"""Calls of stages that are simulated, at some 30 microseconds each."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What was asked. None: the model's own, or the default.

    Attributes:
        model: preset, folder or file.
        config: over which ranks it runs, what they are, and what decides where to cut.
        size: of what is generated.
        inputs: file that describes the inputs instead.
        dtype: of the weights, by its name in torch.
        requests, steps, guidance, schedule: what is run; the schedule is one of `SIMULATED_SCHEDULES`.
        compare: partitioners to compare with.
    """

    model: str
    config: ParallelConfig = field(default_factory=ParallelConfig)
    size: SizeRequest = field(default_factory=SizeRequest)
    inputs: Path | None = None
    dtype: str = "bfloat16"
    requests: int = 1
    steps: int | None = None
    guidance: str | None = None
    schedule: str = "rolling"
    compare: tuple[str, ...] = ()

    @property
    def degrees(self) -> Degrees:
        """The ranks along each dimension."""
        return Degrees.of(self.config)


@dataclass(frozen=True)
class _Setting:
    """What a question comes to, the same for all ways to cut."""

    question: Question
    transformers: Sequence[TransformerSpec]
    model: ModelSpec
    machine: Machine
    target: Target
    load: Load
    size: Size | None
    beside: Components
    not_counted: str


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
    config, degrees = question.config, question.degrees
    for name in NOT_SIMULATED:
        if (value := getattr(config, name)) != getattr(ParallelConfig, name):
            raise ConfigError(f"{name}={value!r} is not simulated; leave it out.")
    if config.partition is None:
        early_counts_check(None, degrees.pipeline)
    model = find_model(question.model)
    transformers = _cut_alike(model, config)
    machine, target = machine_and_target(config)
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
    inputs = [_inputs(question, model, spec, calls.batch) for spec in transformers]
    size = inputs[0][1]
    known_beside = beside_model(model)
    beside = _components(question, model, known_beside, size, target.devices[-1], machine)
    beside.placed(replace(config, partitioner="balanced"))  # what a run refuses is an error before anything is captured
    not_counted = _not_counted(known_beside, size, beside, config)
    setting = _Setting(question, transformers, model, machine, target, load, size, beside, not_counted)
    specs = zip(transformers, inputs, strict=True)
    models = [capture(spec, described, question.dtype) for spec, (described, _) in specs]
    for own in models:
        _check_inside(setting, own)
    picture = _picture(setting, models, config, os.environ)
    alternatives = tuple(_alternative(setting, models, name) for name in question.compare)
    return replace(picture, decided_by=_decided_by(question), alternatives=alternatives)


def _check_length(load: Load, stages: int) -> None:
    """Refuse a run whose simulation would take minutes."""
    calls = load.requests * load.steps * load.calls_per_step
    if calls * stages > MOST_STAGE_CALLS:
        most = max(MOST_STAGE_CALLS // (load.steps * load.calls_per_step * stages), 1)
        asked = f"{counted(load.requests, 'request')} of {counted(load.steps, 'step')} on {counted(stages, 'stage')}"
        raise ConfigError(f"{asked}: more than is simulated; use --requests {most} or less, or fewer --steps.")


def _cut_alike(model: ModelSpec, config: ParallelConfig) -> tuple[TransformerSpec, ...]:
    """The transformers, those in one that are alike and have the same blocks per stage."""
    config.check_components(name for spec in model.transformers for name in spec.names)
    return tuple(
        replace(spec, names=tuple(names))
        for spec in model.transformers
        for _, names in groupby(spec.names, key=config.counts_for)
    )


def _inputs(
    question: Question, model: ModelSpec, spec: TransformerSpec, batch: int
) -> tuple[Mapping[str, Any], Size | None]:
    if question.inputs is not None:
        return read_inputs(question.inputs), None
    asked = question.size if batch == 1 and question.size.batch is None else replace(question.size, batch=batch)
    described, size = model_inputs(model, spec, asked)
    return described, size


def _components(
    question: Question,
    model: ModelSpec,
    known: Beside | None,
    size: Size | None,
    device: DeviceProfile,
    machine: Machine,
) -> Components:
    if known is None:
        return Components()
    measured = machine.timing if isinstance(machine.timing, MeasuredProfile) else None
    dtype: torch.dtype = getattr(torch, question.dtype)
    found = components_of(known, size, dtype.itemsize, device, measured, question.config.topology)
    return with_tiles(found, known, model, size, dtype) if question.config.vae_patch_parallel_size > 1 else found


def _not_counted(known: Beside | None, size: Size | None, beside: Components, config: ParallelConfig) -> str:
    """What is left out of memory and time, in words."""
    if known is None:
        return "encoders and VAE, which are not known"
    missing = [f"{', '.join(known.missing)}, of which the folder has no config.json"] if known.missing else []
    decode = (
        ["decoding, which is not known"] if known.vae is not None and (size is None or known.decode is None) else []
    )
    unknown = config.vae_patch_parallel_size > 1 and not decode and not beside.tiles
    return "; ".join(missing + decode + ["sharing of the VAE's tiles, whose sizes are not known"] * unknown)


def _check_inside(setting: _Setting, own: Captured) -> None:
    """Check that the ranks can share the stages of a captured model."""
    degrees = setting.question.degrees
    if degrees.inside > 1 and (problem := problem_inside(degrees, divides_of(own.model, own.graph))):
        raise ConfigError(f"{degrees.flags()}: {problem}.")


def _picture(
    setting: _Setting,
    models: Sequence[Captured],
    config: ParallelConfig,
    environment: Mapping[str, str],
) -> Picture:
    """Cut the captured models, and look at what that gives."""
    question, specs, load = setting.question, setting.transformers, setting.load
    degrees = question.degrees
    named = {name: own.model for spec, own in zip(specs, models, strict=True) for name in spec.names}
    beside, others = setting.beside.placed(config, named), others_of_each(named, config)
    components = beside.for_partitioner(config, load.steps * load.calls_per_step)

    def cut(spec: TransformerSpec, own: Captured) -> CutPlan:
        return plan_cut(
            own.graph,
            own.model,
            setting.machine,
            config.partitioner,
            config.counts_for(spec.names[0]),
            components,
            environment,
            layout=degrees,
            shards=degrees.shards,
            others=others[spec.names[0]],
        )

    splits = [own.split(cut(spec, own)) for spec, own in zip(specs, models, strict=True)]
    timelines = tuple(
        forecast(split, setting.target.devices, config.topology, load, beside, degrees) for split in splits
    )
    numbers = [len(spec.names) for spec in specs]
    return Picture(
        model=setting.model.name,
        source=setting.model.source,
        decided_by=str(config.partitioner),
        size=setting.size,
        dtype=question.dtype,
        target=setting.target,
        reports=tuple(
            report_split(split, spec.names, rank_costs(own.graph, own.model, setting.machine, degrees, degrees.shards))
            for own, split, spec in zip(models, splits, specs, strict=True)
        ),
        timelines=timelines,
        memory=rank_memory(list(zip(splits, numbers, strict=True)), timelines[0].workload, beside, degrees),
        not_counted=setting.not_counted,
        degrees=degrees,
        places=beside.places,
    )


def _alternative(setting: _Setting, models: Sequence[Captured], name: str) -> Alternative:
    """Cut the captured models in another way."""
    try:
        config = replace(setting.question.config, partitioner=name, partition=None)
        return alternative(_picture(setting, models, config, NO_VARIABLES))
    except PartitionError as error:
        return Alternative(name, problem=str(error))


def _decided_by(question: Question) -> str:
    partition = question.config.partition
    if partition is not None:
        return f"--partition {partition}" if isinstance(partition, str) else f"partition={partition!r}"
    if (counts := os.environ.get(ENVIRONMENT_VARIABLE)) is not None:
        return f"{ENVIRONMENT_VARIABLE}={counts}"
    return str(question.config.partitioner)
