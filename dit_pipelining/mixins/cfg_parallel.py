"""Guidance for hand-written pipelines: predict its branches, here or over several pipelines, combine them, step."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from dit_pipelining.mixins import denoised
from dit_pipelining.mixins.branches import (
    CfgRanks,
    Prediction,
    Tensors,
    as_tuple,
    branches_of,
    dispatch_branches,
    from_tuple,
    gather_branches,
    sliced,
    warn_once,
)
from dit_pipelining.mixins.intermediate_tensors import IntermediateTensors
from dit_pipelining.mixins.parallel_state import (
    GroupNotInitializedError,
    get_cfg_group,
    get_classifier_free_guidance_rank,
    get_classifier_free_guidance_world_size,
)

logger = logging.getLogger("dit_pipelining.mixins")

# Names that code written for this contract imports.
_wrap = as_tuple
_unwrap = from_tuple
_dispatch_branches = dispatch_branches


def _get_cfg_world_size_or_one() -> int:
    """Number of pipelines that share the branches; 1 where there are no groups. What else is wrong with them shows."""
    try:
        return get_classifier_free_guidance_world_size()
    except GroupNotInitializedError:
        return 1


class CFGParallelMixin:
    """Guidance for a pipeline with `self.transformer` and `self.scheduler`.

    With one pipeline its branches run one after the other; with `cfg_parallel_size` pipelines each computes some of them,
    all gather, and every rank combines and steps alike. Subclasses write `diffuse` and may override any method below;
    they need not call `super().__init__()`.
    """

    def predict_noise(self, *args: Any, **kwargs: Any) -> Prediction | IntermediateTensors:
        """One branch: `self.transformer(...)`'s first output, or its intermediate tensors on a stage that is not the last.

        Override it for another transformer, or to return a tuple (video and audio).
        """
        result = self.transformer(*args, **kwargs)  # type: ignore[attr-defined]
        return result if isinstance(result, IntermediateTensors) else result[0]

    def predict_noise_maybe_with_cfg(
        self,
        do_true_cfg: bool,
        true_cfg_scale: float,
        positive_kwargs: dict[str, Any],
        negative_kwargs: dict[str, Any] | None,
        cfg_normalize: bool = True,
        output_slice: int | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Prediction | None:
        """The prediction of a step, with guidance if there is any; the same on every rank that has it.

        Args:
            do_true_cfg: whether to compute both branches and combine them.
            true_cfg_scale: scale of the guidance; a number, or a tensor that broadcasts against the prediction.
            positive_kwargs: of `predict_noise` for the branch of the prompt.
            negative_kwargs: for that of the negative prompt; without them there is no guidance (and a warning). Only the
                rank that computes the branch needs them.
            cfg_normalize: give the result the norm of the positive prediction, see `cfg_normalize_function`.
            output_slice: keep the first so many tokens of each prediction (dimension 1).
            kwargs: passed on to `combine_cfg_noise` as `kwargs` if given.

        Returns:
            a tensor, or a tuple where `predict_noise` gives one; None on a stage that is not the last.
        """
        self._mark_guidance(do_true_cfg)
        ranks = self._usable_cfg_ranks(true_cfg_scale) if do_true_cfg else CfgRanks()
        if do_true_cfg and negative_kwargs is None and not (ranks.world_size > 1 and ranks.rank == 0):
            self._warn_no_negative_prompt()
            # The other pipelines still gather. Both branches the same is no guidance: p + scale * (p - p).
            negative_kwargs, do_true_cfg = positive_kwargs, ranks.world_size > 1
        if not do_true_cfg:
            return self._predict_one(positive_kwargs, output_slice)
        branches = [positive_kwargs, negative_kwargs or {}]
        predictions = self._predict_branches(branches, output_slice, ranks)
        if predictions is None:
            return None
        positive, negative = predictions
        if kwargs is None:  # overrides without the argument are common
            return self.combine_cfg_noise(positive, negative, true_cfg_scale, cfg_normalize)
        return self.combine_cfg_noise(positive, negative, true_cfg_scale, cfg_normalize, kwargs=kwargs)

    def predict_noise_with_multi_branch_cfg(
        self,
        do_true_cfg: bool,
        true_cfg_scale: float | dict[str, float],
        branches_kwargs: Sequence[dict[str, Any]],
        cfg_normalize: bool = False,
        output_slice: int | None = None,
    ) -> Prediction | None:
        """`predict_noise_maybe_with_cfg` for any number of branches, shared out over the pipelines in turns.

        Args:
            do_true_cfg: whether to compute more than the first branch.
            true_cfg_scale: passed on to `combine_multi_branch_cfg_noise`.
            branches_kwargs: of `predict_noise` for each branch; the prompt's is the first.
            cfg_normalize: passed on.
            output_slice: keep the first so many tokens of each prediction (dimension 1).

        Returns:
            a tensor, or a tuple where `predict_noise` gives one; None on a stage that is not the last.
        """
        self._mark_guidance(do_true_cfg)
        if not do_true_cfg:
            return self._predict_one(branches_kwargs[0], output_slice)
        predictions = self._predict_branches(branches_kwargs, output_slice, self._cfg_ranks())
        if predictions is None:
            return None
        return self.combine_multi_branch_cfg_noise(
            [from_tuple(prediction) for prediction in predictions], true_cfg_scale, cfg_normalize
        )

    def combine_cfg_noise(
        self,
        positive_noise_pred: Prediction,
        negative_noise_pred: Prediction,
        true_cfg_scale: float,
        cfg_normalize: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> Prediction:
        """For each tensor: negative + scale * (positive - negative).

        Override it for another rule, for example guidance of the video and none of the audio. Predictions of
        `predict_noise_maybe_with_cfg` arrive as tuples, also those of one tensor; tensors are taken as well.

        Args:
            positive_noise_pred: prediction of the prompt's branch.
            negative_noise_pred: prediction of the negative prompt's.
            true_cfg_scale: scale of the guidance.
            cfg_normalize: apply `cfg_normalize_function`.
            kwargs: for overrides.

        Returns:
            a tensor for one tensor, else a tuple.
        """
        combined = []
        for positive, negative in zip(as_tuple(positive_noise_pred), as_tuple(negative_noise_pred), strict=True):
            guided = negative + true_cfg_scale * (positive - negative)
            combined.append(self.cfg_normalize_function(positive, guided) if cfg_normalize else guided)
        return from_tuple(tuple(combined))

    def combine_multi_branch_cfg_noise(
        self,
        predictions: list[Prediction],
        true_cfg_scale: float | dict[str, float],
        cfg_normalize: bool = False,
    ) -> Prediction:
        """The rule of `combine_cfg_noise` for two branches; override it for more.

        Raises:
            NotImplementedError: there are other than two predictions, or a scale for each: no rule is known.
        """
        if len(predictions) != 2 or isinstance(true_cfg_scale, dict):
            raise NotImplementedError(
                f"{type(self).__name__} has {len(predictions)} branches of guidance with the scale {true_cfg_scale!r}: "
                "override combine_multi_branch_cfg_noise(predictions, true_cfg_scale, cfg_normalize) with its rule"
            )
        positive, negative = predictions
        return CFGParallelMixin.combine_cfg_noise(self, positive, negative, true_cfg_scale, cfg_normalize)

    def cfg_normalize_function(self, noise_pred: torch.Tensor, comb_pred: torch.Tensor) -> torch.Tensor:
        """The combined prediction with the norm of the positive one along the last dimension; both (batch, ..., dim)."""
        norm = torch.norm(noise_pred, dim=-1, keepdim=True)
        return comb_pred * (norm / torch.norm(comb_pred, dim=-1, keepdim=True))

    def check_cfg_parallel_validity(self, true_cfg_scale: float, has_neg_prompt: bool) -> bool:
        """Whether several pipelines have branches to share: the scale is above 1 and there is a negative prompt.

        Always True for one pipeline. Where it is not, a warning says so, and predictions fall back to what one pipeline
        computes.
        """
        if _get_cfg_world_size_or_one() == 1:
            return True
        if true_cfg_scale <= 1:
            logger.warning("CFG parallel is NOT working correctly when true_cfg_scale <= 1.")
            return False
        if not has_neg_prompt:
            logger.warning(
                "CFG parallel is NOT working correctly when there is no negative prompt or negative prompt embeddings."
            )
            return False
        return True

    def diffuse(self, *args: Any, **kwargs: Any) -> Any:
        """The denoising loop, which each pipeline writes: per step, predict and step with the `..._maybe_with_cfg` methods."""
        raise NotImplementedError(f"{type(self).__name__} must implement diffuse, its denoising loop")

    def scheduler_step(
        self,
        noise_pred: Prediction,
        t: Any,
        latents: Any,
        per_request_scheduler: Any | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """The latents after a step.

        Args:
            noise_pred: prediction; a tuple for a composite scheduler (video and audio).
            t: timestep, or a tuple of them.
            latents: latents, or a tuple of them.
            per_request_scheduler: takes the place of `self.scheduler`, for requests that keep one of their own.
            generator: for schedulers that draw noise; seed it alike on all ranks.

        Raises:
            ValueError: there is no scheduler.
            TypeError: it has no method `step`.
        """
        scheduler = self._scheduler(per_request_scheduler)
        if not callable(getattr(scheduler, "step", None)):
            raise TypeError(
                f"per_request_scheduler must provide a callable step(...) method; {type(scheduler)} has none."
            )
        draws = {} if generator is None else {"generator": generator}
        return scheduler.step(noise_pred, t, latents, return_dict=False, **draws)[0]

    def scheduler_step_maybe_with_cfg(
        self,
        noise_pred: Any,
        t: Any,
        latents: Any,
        do_true_cfg: bool,
        per_request_scheduler: Any | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """`scheduler_step`, on every rank: they have the same prediction, so nothing needs to be sent."""
        return self.scheduler_step(
            noise_pred, t, latents, per_request_scheduler=per_request_scheduler, generator=generator
        )

    def predict_clean(self, noise_pred: Any, t: Any, latents: Any, per_request_scheduler: Any | None = None) -> Any:
        """The clean latents that a prediction means, for distilled loops; see `denoised.predict_clean`."""
        return denoised.predict_clean(self._scheduler(per_request_scheduler), noise_pred, t, latents)

    def add_noise(self, clean: Any, noise: Any, t: Any, per_request_scheduler: Any | None = None) -> Any:
        """Clean latents with noise up to timestep `t`, for distilled loops; see `denoised.add_noise`."""
        return denoised.add_noise(self._scheduler(per_request_scheduler), clean, noise, t)

    def _scheduler(self, per_request_scheduler: Any | None) -> Any:
        scheduler = per_request_scheduler if per_request_scheduler is not None else getattr(self, "scheduler", None)
        if scheduler is None:
            raise ValueError("No scheduler is available. Set self.scheduler or pass per_request_scheduler.")
        return scheduler

    def _mark_guidance(self, do_true_cfg: bool) -> None:
        """Tell cache hooks on the transformer whether branches alternate: they keep one state for each then."""
        transformer = getattr(self, "transformer", None)
        if transformer is not None:
            transformer.do_true_cfg = do_true_cfg

    def _cfg_ranks(self) -> CfgRanks:
        size = _get_cfg_world_size_or_one()
        return CfgRanks() if size == 1 else CfgRanks(size, get_classifier_free_guidance_rank(), get_cfg_group())

    def _usable_cfg_ranks(self, true_cfg_scale: Any) -> CfgRanks:
        """The pipelines to share the two branches over: only this one where the scale gives no guidance."""
        ranks = self._cfg_ranks()
        if ranks.world_size > 1 and isinstance(true_cfg_scale, int | float) and true_cfg_scale <= 1:
            warn_once(
                f"CFG parallel is not used: true_cfg_scale is {true_cfg_scale}, and a scale of 1 or less is no guidance. "
                "Each pipeline computes both branches."
            )
            return CfgRanks()
        return ranks

    def _warn_no_negative_prompt(self) -> None:
        warn_once(
            "There is no guidance: do_true_cfg is set, but there is no negative prompt (negative_kwargs is None)."
        )

    def _predict_one(self, kwargs: dict[str, Any], output_slice: int | None) -> Prediction | None:
        predictions = self._predict_branches([kwargs], output_slice, CfgRanks())
        return None if predictions is None else from_tuple(predictions[0])

    def _predict_branches(
        self, branches_kwargs: Sequence[dict[str, Any]], output_slice: int | None, ranks: CfgRanks
    ) -> list[Tensors] | None:
        """Predictions of all branches; None on a stage that is not the last."""
        own = branches_of(len(branches_kwargs), ranks)
        predictions = self._run_branches([branches_kwargs[branch] for branch in own])
        if predictions is None:
            return None
        cut = [sliced(as_tuple(prediction), output_slice) for prediction in predictions]
        return cut if ranks.world_size == 1 else gather_branches(cut, len(branches_kwargs), ranks)

    def _run_branches(self, branches_kwargs: Sequence[dict[str, Any]]) -> list[Any] | None:
        """Predictions of the branches that this pipeline computes, one after the other."""
        return [self.predict_noise(**kwargs) for kwargs in branches_kwargs]
