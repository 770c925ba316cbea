"""Guidance without process groups: rules, branches, fallbacks; other pipelines are played by a fake group."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from dit_pipelining.mixins import CFGParallelMixin, IntermediateTensors, cfg_parallel, parallel_state
from dit_pipelining.mixins.branches import _warned
from dit_pipelining.mixins.cfg_parallel import _dispatch_branches, _get_cfg_world_size_or_one, _wrap
from tests.mixins.pipelines import CompositeScheduler, EulerScheduler, inputs


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flags: list[Any] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        self.flags.append(self.do_true_cfg)
        return (x * 2,)


class Pipeline(CFGParallelMixin):
    def __init__(self) -> None:
        self.transformer = Transformer()
        self.scheduler: Any = EulerScheduler()


class OtherPipelines:
    """The CFG group of one rank, in which every rank holds the prediction of its branch."""

    def __init__(self, predictions: list[torch.Tensor]) -> None:
        self.predictions, self.gathers = predictions, 0

    def all_gather(self, input_: torch.Tensor, dim: int = 0, separate_tensors: bool = False) -> list[torch.Tensor]:
        assert separate_tensors
        self.gathers += 1
        return [*self.predictions]


@pytest.fixture(autouse=True)
def _warn_anew() -> None:
    _warned.clear()


def play(patch: pytest.MonkeyPatch, size: int, rank: int, group: Any) -> None:
    patch.setattr(cfg_parallel, "get_classifier_free_guidance_world_size", lambda: size)
    patch.setattr(cfg_parallel, "get_classifier_free_guidance_rank", lambda: rank)
    patch.setattr(cfg_parallel, "get_cfg_group", lambda: group)


POSITIVE, NEGATIVE = inputs(1), inputs(2)


def test_branches_run_in_turn_without_groups() -> None:
    pipeline = Pipeline()
    result = pipeline.predict_noise_maybe_with_cfg(True, 5.0, {"x": POSITIVE}, {"x": NEGATIVE}, cfg_normalize=False)
    assert torch.equal(result, 2 * NEGATIVE + 5.0 * (2 * POSITIVE - 2 * NEGATIVE))


def test_without_guidance_only_the_prompt_s_branch_runs() -> None:
    pipeline = Pipeline()
    assert torch.equal(pipeline.predict_noise_maybe_with_cfg(False, 7.5, {"x": POSITIVE}, None), 2 * POSITIVE)
    assert len(pipeline.transformer.flags) == 1


def test_the_result_gets_the_positive_prediction_s_norm_by_default() -> None:
    result = Pipeline().predict_noise_maybe_with_cfg(True, 5.0, {"x": POSITIVE}, {"x": NEGATIVE})
    torch.testing.assert_close(result.norm(dim=-1), (2 * POSITIVE).norm(dim=-1))


def test_output_slice_cuts_each_prediction() -> None:
    pipeline = Pipeline()
    for negative in ({"x": NEGATIVE}, None):
        result = pipeline.predict_noise_maybe_with_cfg(
            negative is not None, 3.0, {"x": POSITIVE}, negative, cfg_normalize=False, output_slice=7
        )
        assert result.shape == (2, 7)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_pipeline_computes_its_branch_and_combines_both(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    group = OtherPipelines([2 * POSITIVE, 2 * NEGATIVE])
    play(monkeypatch, 2, rank, group)
    pipeline = Pipeline()
    # The first rank need not have the other's inputs.
    negative = None if rank == 0 else {"x": NEGATIVE}
    result = pipeline.predict_noise_maybe_with_cfg(True, 5.0, {"x": POSITIVE}, negative, cfg_normalize=False)
    assert torch.equal(result, 2 * NEGATIVE + 5.0 * (2 * POSITIVE - 2 * NEGATIVE))
    assert (group.gathers, len(pipeline.transformer.flags)) == (1, 1)


def test_branches_are_dealt_in_turns() -> None:
    assert _dispatch_branches(3, 2) == [[0, 2], [1]]
    assert _dispatch_branches(3, 3) == [[0], [1], [2]]
    assert _dispatch_branches(4, 2) == [[0, 2], [1, 3]]
    assert _dispatch_branches(4, 3) == [[0, 3], [1], [2]]
    assert _dispatch_branches(2, 3) == [[0], [1], []]


def test_the_transformer_knows_whether_branches_alternate() -> None:
    pipeline = Pipeline()
    pipeline.predict_noise_maybe_with_cfg(True, 4.0, {"x": POSITIVE}, {"x": NEGATIVE})
    pipeline.predict_noise_maybe_with_cfg(False, 1.0, {"x": POSITIVE}, None)
    assert pipeline.transformer.flags == [True, True, False]


def test_tuples_are_combined_one_by_one() -> None:
    positive, negative = (POSITIVE, POSITIVE[:, :3]), (NEGATIVE, NEGATIVE[:, :3])
    result = Pipeline().combine_cfg_noise(positive, negative, 3.0)
    assert isinstance(result, tuple)
    for got, one, other in zip(result, positive, negative, strict=True):
        assert torch.equal(got, other + 3.0 * (one - other))
    assert torch.equal(Pipeline().combine_cfg_noise(POSITIVE, NEGATIVE, 3.0), result[0])


def test_an_override_gets_tuples_and_the_extra_context() -> None:
    seen = []

    class Own(Pipeline):
        def combine_cfg_noise(
            self, positive: Any, negative: Any, scale: Any, normalize: Any, kwargs: Any = None
        ) -> Any:
            seen.append((type(positive), type(negative), scale, normalize, kwargs))
            return super().combine_cfg_noise(positive, negative, scale, normalize)

    for kwargs in (None, {"step": 1}):
        Own().predict_noise_maybe_with_cfg(True, 2.0, {"x": POSITIVE}, {"x": NEGATIVE}, False, None, kwargs)
    assert seen == [(tuple, tuple, 2.0, False, None), (tuple, tuple, 2.0, False, {"step": 1})]


def test_two_branches_of_many_have_the_rule_of_two_and_more_need_one() -> None:
    pipeline = Pipeline()
    branches = [{"x": POSITIVE}, {"x": NEGATIVE}]
    result = pipeline.predict_noise_with_multi_branch_cfg(True, 2.0, branches)
    assert torch.equal(result, 2 * NEGATIVE + 2.0 * (2 * POSITIVE - 2 * NEGATIVE))
    assert torch.equal(pipeline.predict_noise_with_multi_branch_cfg(False, 2.0, branches), 2 * POSITIVE)
    with pytest.raises(NotImplementedError, match=r"3 branches.*override combine_multi_branch_cfg_noise"):
        pipeline.predict_noise_with_multi_branch_cfg(True, 2.0, [*branches, {"x": POSITIVE}])


def test_no_negative_prompt_warns_once_and_is_no_guidance(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(Pipeline().predict_noise_maybe_with_cfg(True, 5.0, {"x": POSITIVE}, None), 2 * POSITIVE)
    assert [record.getMessage() for record in caplog.records if "negative" in record.getMessage()] == [
        "There is no guidance: do_true_cfg is set, but there is no negative prompt (negative_kwargs is None)."
    ]


@pytest.mark.parametrize("scale", [0.5, 1, 1.0])
def test_a_scale_of_one_or_less_is_not_shared_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scale: float
) -> None:
    group = OtherPipelines([])
    play(monkeypatch, 2, 1, group)
    with caplog.at_level(logging.WARNING):
        result = Pipeline().predict_noise_maybe_with_cfg(True, scale, {"x": POSITIVE}, {"x": NEGATIVE}, False)
    assert group.gathers == 0
    assert "CFG parallel is not used" in caplog.text
    assert torch.equal(result, 2 * NEGATIVE + scale * (2 * POSITIVE - 2 * NEGATIVE))


def test_validity_is_asked_about_several_pipelines_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = Pipeline()
    assert pipeline.check_cfg_parallel_validity(1.0, False)
    play(monkeypatch, 2, 0, None)
    with caplog.at_level(logging.WARNING):
        assert pipeline.check_cfg_parallel_validity(2.0, True)
        assert not caplog.records
        assert not pipeline.check_cfg_parallel_validity(1.0, True)
        assert not pipeline.check_cfg_parallel_validity(2.0, False)
    assert "true_cfg_scale <= 1" in caplog.records[0].getMessage()
    assert "no negative prompt" in caplog.records[1].getMessage()


def test_more_pipelines_than_branches_warn(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    group = OtherPipelines([2 * POSITIVE, 2 * NEGATIVE, 2 * NEGATIVE])
    play(monkeypatch, 3, 2, group)
    with caplog.at_level(logging.WARNING):
        Pipeline().predict_noise_maybe_with_cfg(True, 5.0, {"x": POSITIVE}, {"x": NEGATIVE})
    assert "cfg_parallel_size=3 is more than the 2 branches" in caplog.text


def test_only_a_group_that_does_not_exist_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not parallel_state.is_cfg_group_initialized()
    assert _get_cfg_world_size_or_one() == 1

    class Broken:
        @property
        def world_size(self) -> int:
            raise AssertionError("broken")

    monkeypatch.setattr(parallel_state, "_CFG", Broken())
    assert parallel_state.is_cfg_group_initialized()
    with pytest.raises(AssertionError, match="broken"):
        _get_cfg_world_size_or_one()


def test_a_pipeline_may_call_its_transformer_otherwise() -> None:
    class Own(CFGParallelMixin):
        def predict_noise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x + 1

    video, audio = Own().predict_noise_maybe_with_cfg(True, 2.0, {"x": POSITIVE}, {"x": NEGATIVE}, cfg_normalize=False)
    assert torch.equal(video, NEGATIVE + 2.0 * (POSITIVE - NEGATIVE))
    assert audio.shape == video.shape
    assert _wrap(video) == (video,)


def test_intermediate_tensors_pass_unwrapped() -> None:
    pipeline, tensors = Pipeline(), IntermediateTensors({})
    pipeline.transformer = lambda: tensors  # type: ignore[assignment]
    assert pipeline.predict_noise() is tensors


def test_a_scheduler_of_the_request_comes_first_and_draws_from_the_generator() -> None:
    pipeline, own = Pipeline(), EulerScheduler()
    generator = torch.Generator().manual_seed(0)
    latents = pipeline.scheduler_step_maybe_with_cfg(POSITIVE, 1, NEGATIVE, True, own, generator)
    noise = torch.randn(NEGATIVE.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(latents, NEGATIVE - 0.1 * POSITIVE + noise)
    assert (own.steps, pipeline.scheduler.steps) == (1, 0)


def test_a_composite_scheduler_steps_video_and_audio() -> None:
    pipeline = Pipeline()
    pipeline.scheduler = CompositeScheduler()
    video, audio = pipeline.scheduler_step_maybe_with_cfg(
        (POSITIVE, POSITIVE[:, :2]), (1, 2), (NEGATIVE, NEGATIVE[:, :2]), True
    )
    assert torch.equal(video, NEGATIVE - 0.1 * POSITIVE)
    assert torch.equal(audio, video[:, :2])


def test_no_scheduler_and_one_without_step_are_errors() -> None:
    pipeline = Pipeline()
    with pytest.raises(TypeError, match="callable step"):
        pipeline.scheduler_step(POSITIVE, 1, NEGATIVE, per_request_scheduler=object())
    pipeline.scheduler = None
    with pytest.raises(ValueError, match="No scheduler is available"):
        pipeline.scheduler_step(POSITIVE, 1, NEGATIVE)


def test_a_pipeline_writes_its_own_loop() -> None:
    with pytest.raises(NotImplementedError, match="Pipeline must implement diffuse"):
        Pipeline().diffuse()
