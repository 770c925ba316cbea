"""Calls of a VAE's parts that are noted down first, so that the tiles they belong to can be computed elsewhere.

[Note: deferred tiles]
A VAE's own tiling is a loop over tiles that calls the VAE's parts (`post_quant_conv`, `decoder`, ...), followed by code
that blends what they gave. While a `Recorder` is active, each part is stood in for by an object that notes the call down
and returns a `Deferred`. Taking a slice of deferred tiles and `torch.cat` are noted down too, since that is what loops do
to a tile that is made frame by frame. Calls that use each other's results, or the same list (the feature cache of Wan's
convolutions), belong to one tile and make up one `Job`. Everything else that is done to a deferred value, asking for its
shape included, needs it: all jobs are then run, by whoever the recorder was given, and the code goes on with real tensors.

So the loop, the blending, and what a tile is, are the VAE's own; nothing here knows one VAE from another, but for one
rule: a part that takes a `conv_cache` (CogVideoX, Mochi) returns the next one beside its result. A `conv_cache` and what
is in a list stay where the job ran.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dit_pipelining.errors import SplitError
from dit_pipelining.sharding.tile_jobs import FUNCTIONS, Job, Result, Step
from dit_pipelining.torch_internals import tree_flatten, tree_map, version


class Carried:
    """A `conv_cache` that a call returned."""

    def __init__(self, job: Job, result: Result) -> None:
        self.job = job
        self.result = result
        job.hold(self, travels=False)


class Deferred:
    """Stands for a tensor that a job gives; what is noted down makes another one, all other uses have the job run first."""

    def __init__(self, recorder: "Recorder", job: Job, result: Result) -> None:
        self._recorder = recorder
        self.job = job
        self.result = result
        job.hold(self, travels=True)

    @property
    def value(self) -> Any:
        """The tensor; runs all jobs that wait, if its own has not run."""
        if self.job.values is None:
            self._recorder.flush()
        assert self.job.values is not None
        return self.job.values[self.result]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.cat:
            waiting = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Deferred)]
            return waiting[0]._recorder.call("torch.cat", args, kwargs)
        return func(*tree_map(real, args), **tree_map(real, kwargs))

    def __getitem__(self, index: Any) -> Any:
        if self.job.values is not None:  # the VAE blends edges line by line: thousands of slices per call
            return self.value[index]
        return self._recorder.call("operator.getitem", (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self.value[index] = real(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def __reduce__(self) -> Any:
        return self.value.__reduce__()


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Deferred, *others: Any) -> Any:
        return getattr(self.value, name)(*map(real, others))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "matmul"):
    for _form in (f"__{_name}__", f"__r{_name}__", f"__i{_name}__"):
        if hasattr(torch.Tensor, _form):
            setattr(Deferred, _form, _operator(_form))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "len", "iter", "bool", "float", "int"):
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))


def parts_of(vae: nn.Module) -> dict[str, nn.Module]:
    """A VAE's parts that can be called, by name."""
    containers = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return {name: part for name, part in vae.named_children() if not isinstance(part, containers)}


def real(value: Any) -> Any:
    """The tensor that a deferred value stands for; anything else as it is."""
    return value.value if isinstance(value, Deferred) else value


def without_deferred(output: Any) -> Any:
    """What a VAE returns, with tensors in place of deferred ones, those in a distribution's attributes included."""

    def replaced(leaf: Any) -> Any:
        for name, value in getattr(leaf, "__dict__", {}).items():
            if isinstance(value, Deferred):
                setattr(leaf, name, value.value)
        return leaf

    return tree_map(lambda leaf: leaf.value if isinstance(leaf, Deferred) else replaced(leaf), output)


class Recorder:
    """Notes down the calls of a VAE's parts, and has them run when a result is needed.

    Args:
        vae: whose own methods are called while `active`.
        run: computes several jobs, in order where that matters, and gives each its results. The state of the last one must
            be left on this rank, where the VAE's code may go on with it.

    Attributes:
        parts: those that are stood in for, by name.
    """

    def __init__(self, vae: nn.Module, run: Callable[[list[Job]], None]) -> None:
        self._vae = vae
        self._run = run
        self.parts: dict[str, nn.Module] = {}
        self._waiting: list[Job] = []
        self._gone: list[Any] = []
        """Lists whose content is on another rank."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Stand in for the VAE's parts."""
        for name, part in parts_of(self._vae).items():
            self._vae._modules[name] = _StandIn(self, name, part)  # type: ignore[assignment]
            self.parts[name] = part
        try:
            yield
        finally:
            self._vae._modules.update(self.parts)
            self._waiting, self._gone = [], []

    def call(self, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, carries: bool = False) -> Any:
        """Note a call down.

        Args:
            target: of a `Step`.
            args: with deferred values.
            kwargs: with deferred values.
            carries: it returns a `conv_cache` too.
        """
        leaves, _ = tree_flatten((args, kwargs))
        lists = [value for value in (*args, *kwargs.values()) if target not in FUNCTIONS and _is_state(value)]
        jobs = [job for job in self._waiting if any(_belongs(value, job) for value in (*leaves, *lists))]
        if len(jobs) > 1 and target in FUNCTIONS:  # no tile, but what is made of tiles
            self.flush()
            jobs = []
        for other in jobs[1:]:  # calls on one frame meet the state of the frames before
            self._waiting.remove(other)
            jobs[0].append(other)
        if not jobs and target in FUNCTIONS:
            return FUNCTIONS[target](*tree_map(real, args), **tree_map(real, kwargs))
        if any(one is other for one in lists for other in self._gone):
            raise _went_elsewhere(target)
        if not jobs:
            jobs = [Job()]
            self._waiting.append(jobs[0])
        job = jobs[0]

        def own(value: Any) -> Any:
            """Lists of state stay the same objects."""
            if any(value is known for known in lists):
                return value
            return tree_map(lambda leaf: _reference(leaf, job, target), value)

        step = Step(target, tuple(map(own, args)), {key: own(value) for key, value in kwargs.items()})
        job.add(step, lists)
        number = len(job.steps) - 1
        if carries:
            return Deferred(self, job, Result(number, 0)), Carried(job, Result(number, 1))
        return Deferred(self, job, Result(number))

    def flush(self) -> None:
        """Have all jobs run that wait."""
        jobs, self._waiting = self._waiting, []
        for job in jobs:
            if any(version(tensor) != before for tensor, before in job.tensors):
                raise SplitError(
                    f"{type(self._vae).__name__} has written to the input of a tile before it used the result; use "
                    "vae_patch_parallel_size=1."
                )
        if jobs:
            self._run(jobs)
        self._gone += [own for job in jobs if not job.ran_here for own in job.lists]


class _StandIn:
    """In place of a part of the VAE: notes calls down, and is the part in all other respects."""

    def __init__(self, recorder: Recorder, name: str, part: nn.Module) -> None:
        self._recorder = recorder
        self._name = name
        self._part = part
        self._carries = "conv_cache" in inspect.signature(part.forward).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.call(self._name, args, kwargs, carries=self._carries)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def _is_state(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(leaf, Deferred | Carried) for leaf in value)


def _belongs(value: Any, job: Job) -> bool:
    if isinstance(value, Deferred | Carried):
        return value.job is job
    return isinstance(value, list) and any(value is own for own in job.lists)


def _reference(leaf: Any, job: Job, target: str) -> Any:
    if not isinstance(leaf, Deferred | Carried):
        return leaf
    if leaf.job is job:
        return leaf.result
    if isinstance(leaf, Deferred):
        return leaf.value
    if leaf.job.values is None or leaf.result not in leaf.job.values:
        raise _went_elsewhere(target)
    return leaf.job.values[leaf.result]


def _went_elsewhere(target: str) -> SplitError:
    return SplitError(
        f"the VAE goes back to a tile that another rank has computed (a call of its {target!r}); use "
        "vae_patch_parallel_size=1."
    )
