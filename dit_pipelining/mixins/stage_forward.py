"""What a stage's forward must take and give, checked before ranks wait for each other."""

import inspect
from collections.abc import Callable
from typing import Any

from dit_pipelining.errors import StageForwardError
from dit_pipelining.mixins.intermediate_tensors import IntermediateTensors

TRANSFORMERS = ("transformer", "transformer_2")
KEYWORD = "intermediate_tensors"


def check_stage_forward(pipeline: Any) -> None:
    """Check that what a stage receives reaches the transformer's forward.

    `predict_noise` must take `intermediate_tensors`. If it is the mixin's, or takes them among `**kwargs` and so passes them
    on, the forward of the pipeline's transformers must take them too.

    Raises:
        StageForwardError: says whose signature lacks it.
    """
    predict_noise = pipeline.predict_noise
    checked = tuple(id(getattr(pipeline, name, None)) for name in TRANSFORMERS)
    if pipeline.__dict__.get("_stages_checked") == checked:
        return  # it is asked at each step
    if not _takes(predict_noise):
        raise StageForwardError(
            f"{type(pipeline).__name__}.predict_noise takes no {KEYWORD}, so no stage but the first gets anything to work on. "
            f"Add the argument {KEYWORD}=None and pass it to the transformer."
        )
    # Where predict_noise names the argument it does something of its own with it.
    for name in () if _names(predict_noise) else TRANSFORMERS:
        transformer = getattr(pipeline, name, None)
        forward = getattr(transformer, "forward", transformer)
        if callable(forward) and not _takes(forward):
            raise StageForwardError(
                f"the forward of {name} ({type(transformer).__name__}) takes no {KEYWORD}, so it cannot run as a stage. Add "
                f'the argument {KEYWORD}=None, continue from {KEYWORD}["hidden_states"] where it is given, and return '
                'IntermediateTensors({"hidden_states": ...}) unless get_pp_group().is_last_rank; or split the unmodified '
                "transformer with dit_pipelining.api.load_pipeline."
            )
    pipeline.__dict__["_stages_checked"] = checked


def intermediate_tensors_of(result: Any, pipeline: Any) -> IntermediateTensors:
    """What a stage that is not the last returned."""
    if isinstance(result, IntermediateTensors):
        return result
    raise StageForwardError(
        f"{type(pipeline).__name__}.predict_noise returned {type(result).__name__} on a stage that is not the last. Return "
        'IntermediateTensors({"hidden_states": ...}) unless get_pp_group().is_last_rank.'
    )


def prediction_of(result: Any, pipeline: Any) -> Any:
    """What the last stage returned."""
    if not isinstance(result, IntermediateTensors):
        return result
    raise StageForwardError(
        f"{type(pipeline).__name__}.predict_noise returned IntermediateTensors on the last stage. Return the prediction where "
        "get_pp_group().is_last_rank."
    )


def _takes(function: Callable[..., Any]) -> bool:
    parameters = _parameters(getattr(function, "__func__", function))
    return KEYWORD in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _names(function: Callable[..., Any]) -> bool:
    return KEYWORD in _parameters(getattr(function, "__func__", function))


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)
