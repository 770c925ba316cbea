"""Pipeline parallelism for hand-written pipelines: the stages of one transformer on several ranks.

Every rank runs the whole denoising loop. Predictions pass down the stages, latents go from the last stage back to the first:

- `predict_noise_maybe_with_cfg`: a stage posts the receives of all branches, computes one after the other and sends each on
  as soon as it has it, so that all branches are in flight. The last stage returns the prediction, the others None.
- `scheduler_step_maybe_with_cfg`, and `predict_clean` and `add_noise` of distilled loops: the last stage computes them and
  sends the latents to rank 0, which goes on and waits when it uses them. Stages between keep what they had: they only look at
  its shape.

The helpers that ask for groups are looked up in this module by name, so that tests can replace them.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from dit_pipelining.mixins.async_latents import LATENTS, AsyncLatents, resolved
from dit_pipelining.mixins.branches import CfgRanks
from dit_pipelining.mixins.cfg_parallel import CFGParallelMixin
from dit_pipelining.mixins.intermediate_tensors import AsyncIntermediateTensors, Handle
from dit_pipelining.mixins.parallel_state import (
    GroupNotInitializedError,
    get_cfg_group,
    get_classifier_free_guidance_rank,
    get_classifier_free_guidance_world_size,
    get_pipeline_parallel_world_size,
    get_pp_group,
    is_pipeline_first_stage,
)
from dit_pipelining.mixins.stage_forward import check_stage_forward, intermediate_tensors_of, prediction_of
from dit_pipelining.mixins.vae_guard import guard_vae_decode


class PipelineParallelMixin:
    """Stages for a pipeline that inherits this before `CFGParallelMixin`.

    Subclasses write `diffuse` as without it. Their transformer's forward takes `intermediate_tensors` and returns
    `IntermediateTensors` unless it is the last stage's. With one stage everything is `CFGParallelMixin`'s. Subclasses need not
    call `super().__init__()`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_bases(cls)
        if "__init__" in cls.__dict__:
            cls.__init__ = _guards_vae(cls.__init__)  # type: ignore[method-assign]
        if "diffuse" in cls.__dict__:
            cls.diffuse = _flushes(cls.__dict__["diffuse"])  # type: ignore[attr-defined]

    @property
    def _pp_send_work(self) -> list[Handle]:
        """Sends that nobody has waited for yet."""
        return self.__dict__.setdefault("_pp_sends", [])

    @_pp_send_work.setter
    def _pp_send_work(self, work: list[Handle]) -> None:
        self.__dict__["_pp_sends"] = work

    def _sync_pp_send(self) -> None:
        """Wait for all pending sends."""
        pending, self._pp_send_work = self._pp_send_work, []
        for handle in pending:
            handle.wait()

    def scheduler_step_maybe_with_cfg(
        self,
        noise_pred: Any,
        t: Any,
        latents: Any,
        do_true_cfg: bool,
        per_request_scheduler: Any | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """The latents after a step: computed on the last stage, `AsyncLatents` on the first, `latents` on those between."""
        step = super().scheduler_step_maybe_with_cfg  # type: ignore[misc]
        return self._hand_back(
            lambda: step(noise_pred, t, latents, do_true_cfg, per_request_scheduler, generator), stand_in=latents
        )

    def predict_clean(self, noise_pred: Any, t: Any, latents: Any, per_request_scheduler: Any | None = None) -> Any:
        """`CFGParallelMixin`'s, from the last stage's prediction; elsewhere as after a step."""
        compute = super().predict_clean  # type: ignore[misc]
        return self._hand_back(lambda: compute(noise_pred, t, latents, per_request_scheduler), stand_in=latents)

    def add_noise(self, clean: Any, noise: Any, t: Any, per_request_scheduler: Any | None = None) -> Any:
        """`CFGParallelMixin`'s, with the last stage's noise: stages may draw their own without a common seed."""
        compute = super().add_noise  # type: ignore[misc]
        return self._hand_back(lambda: compute(clean, noise, t, per_request_scheduler), stand_in=noise)

    def _hand_back(self, compute: Callable[[], Any], stand_in: Any) -> Any:
        """Latents that the last stage computes and the first goes on from."""
        if _stages() == 1:
            return compute()
        group = get_pp_group()
        if group.is_last_rank:
            latents = compute()
            self._pp_send_work = [*self._pp_send_work, *group.isend_tensor_dict(_named(latents), dst=0)]
            return latents
        if group.is_first_rank:
            message, handles, steps_after = group.irecv_tensor_dict(src=group.world_size - 1)
            if not isinstance(stand_in, tuple | list):
                return AsyncLatents(message, handles, steps_after)
            return tuple(AsyncLatents(message, handles, steps_after, _name(i)) for i in range(len(stand_in)))
        return stand_in

    def _cfg_ranks(self) -> CfgRanks:
        if _stages() == 1:
            return super()._cfg_ranks()  # type: ignore[misc]
        size = get_classifier_free_guidance_world_size()
        return CfgRanks() if size == 1 else CfgRanks(size, get_classifier_free_guidance_rank(), get_cfg_group())

    def _run_branches(self, branches_kwargs: Sequence[dict[str, Any]]) -> list[Any] | None:
        if _stages() == 1:
            return super()._run_branches(branches_kwargs)  # type: ignore[misc]
        check_stage_forward(self)
        self._sync_pp_send()
        group = get_pp_group()
        received: list[AsyncIntermediateTensors | None] = [
            None if group.is_first_rank else AsyncIntermediateTensors(*group.irecv_tensor_dict())
            for _ in branches_kwargs
        ]
        predictions = []
        for kwargs, tensors in zip(branches_kwargs, received, strict=True):
            result = self.predict_noise(**kwargs, intermediate_tensors=tensors)  # type: ignore[attr-defined]
            if group.is_last_rank:
                predictions.append(prediction_of(result, self))
            else:
                sends = group.isend_tensor_dict(intermediate_tensors_of(result, self).tensors)
                self._pp_send_work = [*self._pp_send_work, *sends]
        return predictions if group.is_last_rank else None


def _stages() -> int:
    """Number of stages; 1 where there are no groups."""
    try:
        return get_pipeline_parallel_world_size()
    except GroupNotInitializedError:
        return 1


def _name(index: int) -> str:
    return f"{LATENTS}.{index}"


def _named(latents: Any) -> dict[str, torch.Tensor]:
    if isinstance(latents, tuple | list):
        return {_name(i): tensor for i, tensor in enumerate(latents)}
    return {LATENTS: latents}


def _check_bases(cls: type) -> None:
    name = cls.__name__
    if not issubclass(cls, CFGParallelMixin):
        raise TypeError(
            f"{name} inherits PipelineParallelMixin but not CFGParallelMixin, whose predictions and scheduler steps it spreads "
            f"over stages. Add it after PipelineParallelMixin: class {name}(PipelineParallelMixin, CFGParallelMixin)."
        )
    mro = cls.__mro__
    if mro.index(PipelineParallelMixin) > mro.index(CFGParallelMixin):
        raise TypeError(
            f"{name} must inherit PipelineParallelMixin before CFGParallelMixin, or its methods would never be called. Swap "
            f"the base classes: class {name}(PipelineParallelMixin, CFGParallelMixin)."
        )


def _guards_vae(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _guard_vae(self)

    return wrapped


def _flushes(diffuse: Callable[..., Any]) -> Callable[..., Any]:
    """A denoising loop after which no send is pending, however it ends, and whose result is there."""

    @wraps(diffuse)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        _guard_vae(self)  # one that came after __init__
        if _stages() > 1:
            check_stage_forward(self)
        try:
            result = resolved(diffuse(self, *args, **kwargs))
        except BaseException as error:
            try:
                self._sync_pp_send()
            except Exception as another:  # what ended the loop is the cause; a send that fails now is an effect
                error.add_note(f"afterwards, a pending send failed: {another}")
            raise
        self._sync_pp_send()
        return result

    return wrapped


def _guard_vae(pipeline: Any) -> None:
    vae = getattr(pipeline, "vae", None)
    if callable(getattr(vae, "decode", None)):
        guard_vae_decode(
            vae,
            stages=lambda: _stages(),
            is_first_stage=lambda: is_pipeline_first_stage(),
            broadcast=lambda latents: get_pp_group().broadcast(latents, src=0),
        )
