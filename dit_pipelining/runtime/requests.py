"""Several requests side by side on one pipeline."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from diffusers import ConfigMixin, ModularPipeline
from diffusers.modular_pipelines import LoopSequentialPipelineBlocks, ModularPipelineBlocks
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from dit_pipelining.comm.gathering import gather_results
from dit_pipelining.config_checks import check_positive
from dit_pipelining.errors import InputError
from dit_pipelining.runtime.attach import rolling_of
from dit_pipelining.runtime.bars import Advance, Bars
from dit_pipelining.runtime.rolling import Rolling

OnOutput = Callable[[int, Any], Any]
"""Takes a request's number and output; what it returns is kept in place of the output."""


def run_requests(
    pipeline: Any, requests: Sequence[Mapping[str, Any]], max_in_flight: int | None, on_output: OnOutput | None
) -> list[Any]:
    """Run calls of the pipeline side by side; results in order, each what the call alone returns.

    Every request runs the pipeline's own code on a shallow copy of the pipeline with schedulers and guiders of its own. On
    a pipeline that is not spread over ranks they run one after the other.
    """
    if not isinstance(requests, Sequence) or isinstance(requests, str):
        raise InputError(
            f"requests is {type(requests).__name__}: expected a list of dicts of the pipeline's arguments, for example "
            "[dict(prompt='a cat'), dict(prompt='a dog')]."
        )
    if on_output is not None and not callable(on_output):
        raise InputError(f"on_output={on_output!r}: expected a function of the number and the output of a request.")
    rolling = rolling_of(pipeline)
    if rolling is None:
        return _run(pipeline, None, requests, range(len(requests)), max_in_flight, on_output)
    copies = rolling.mesh.copies
    with rolling.call(f"generate with a {type(pipeline).__name__}", _arguments(requests, max_in_flight)):
        own = range(copies.index(rolling.mesh.world_rank), len(requests), len(copies))
        results = _run(pipeline, rolling, requests, own, max_in_flight, on_output)
        if len(copies) == 1:
            return results
        shared = gather_results(results, rolling.copies_group, rolling.device)
        return [shared[index % len(copies)][index // len(copies)] for index in range(len(requests))]


def _run(
    pipeline: Any,
    rolling: Rolling | None,
    requests: Sequence[Mapping[str, Any]],
    own: Sequence[int],
    max_in_flight: int | None,
    on_output: OnOutput | None,
) -> list[Any]:
    """Run those of the requests that have these numbers."""
    for index, request in enumerate(requests):
        if not isinstance(request, Mapping):
            raise InputError(
                f"request {index} is {type(request).__name__}: each request is a dict of the pipeline's arguments, for "
                "example dict(prompt='a cat')."
            )
    if max_in_flight is not None:
        check_positive("max_in_flight", max_in_flight)
    shown = not getattr(pipeline, "_progress_bar_config", {}).get("disable", False)  # false on rank 0 only, if at all
    display = _display(len(own)) if shown else None
    with display or nullcontext():
        functions = [
            request_call(
                pipeline,
                requests[index],
                _bars(display, f"request {index}"),
                functools.partial(on_output, index) if on_output else None,
            )
            for index in own
        ]
        if rolling is None:
            return [function() for function in functions]
        return rolling.run(functions, max_in_flight)


def _arguments(requests: Sequence[Mapping[str, Any]], max_in_flight: int | None) -> dict[str, Any]:
    """What is compared over the ranks: every argument of every request, by a name that says which."""
    arguments: dict[str, Any] = {"the number of requests": len(requests), "max_in_flight": max_in_flight}
    for index, request in enumerate(requests):
        own = request if isinstance(request, Mapping) else {"all": request}
        arguments |= {f"{name} of request {index}": value for name, value in own.items()}
    return arguments


def request_call(
    pipeline: Any,
    request: Mapping[str, Any],
    progress_bar: Callable[..., Any],
    on_output: Callable[[Any], Any] | None = None,
) -> Callable[[], Any]:
    """One call of the pipeline's own code, on a shallow copy of the pipeline with schedulers of its own.

    Args:
        pipeline: a diffusers pipeline.
        request: arguments of the call.
        progress_bar: stands in for the pipeline's.
        on_output: takes the output; what it returns is the result.
    """
    own = copy.copy(pipeline)
    for name, component in pipeline.components.items():
        if isinstance(component, ConfigMixin) and not isinstance(component, nn.Module):  # schedulers, guiders
            setattr(own, name, copy.deepcopy(component))
    own.__dict__["progress_bar"] = progress_bar
    if isinstance(own, ModularPipeline):
        own._blocks = copy.deepcopy(own._blocks)
        _give_bars(own._blocks, progress_bar)

    def run() -> Any:
        output = own(**request)
        return output if on_output is None else on_output(output)

    return run


def _give_bars(blocks: ModularPipelineBlocks, progress_bar: Callable[..., Any]) -> None:
    """Let the loops of a modular pipeline, which have bars of their own, use this one."""
    for block in getattr(blocks, "sub_blocks", {}).values():
        _give_bars(block, progress_bar)
    if isinstance(blocks, LoopSequentialPipelineBlocks):
        blocks.__dict__["progress_bar"] = progress_bar


def _bars(display: Progress | None, title: str) -> Bars:
    """Of a request, in a common display."""

    def begin(total: int | None) -> Advance:
        if display is None:
            return lambda steps: None
        return functools.partial(display.advance, display.add_task(title, total=total))

    return Bars(begin)


def _display(requests: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, transient=requests > 20)
