"""Hand-written pipelines over gloo ranks against one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dit_pipelining.mixins import get_pp_group
from tests.distributed import RankPool
from tests.mixins.pipelines import EulerScheduler, LinearPipeline, ThreeBranchPipeline, TuplePipeline, inputs, on_groups


def over_ranks(ranks: RankPool, stages: int, branches: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return ranks.run(stages * branches, on_groups, stages, branches, function, *args)


def alone(ranks: RankPool, function: Callable[..., Any], *args: Any) -> Any:
    return over_ranks(ranks, 1, 1, function, *args)[0]


def predict(do_true_cfg: bool, num_layers: int, output_slice: int | None = None) -> Any:
    pipeline = LinearPipeline(num_layers)
    negative = {"x": inputs(101)} if do_true_cfg else None
    noise_pred = pipeline.predict_noise_maybe_with_cfg(
        do_true_cfg, 7.5, {"x": inputs(100)}, negative, cfg_normalize=False, output_slice=output_slice
    )
    pipeline._sync_pp_send()
    return noise_pred


@pytest.mark.parametrize(
    ("stages", "branches", "do_true_cfg", "num_layers", "output_slice"),
    [
        pytest.param(2, 1, False, 4, None, id="pp2"),
        pytest.param(2, 1, True, 4, None, id="pp2, branches in turn"),
        pytest.param(2, 2, True, 4, None, id="pp2 x cfg2"),
        pytest.param(3, 1, False, 6, None, id="pp3"),
        pytest.param(1, 2, True, 4, None, id="cfg2"),
        pytest.param(2, 2, True, 4, 5, id="pp2 x cfg2, sliced"),
        pytest.param(2, 1, True, 4, 5, id="pp2, sliced"),
    ],
)
def test_the_last_stage_predicts_what_one_process_does(
    ranks: RankPool, stages: int, branches: int, do_true_cfg: bool, num_layers: int, output_slice: int | None
) -> None:
    expected = alone(ranks, predict, do_true_cfg, num_layers, output_slice)
    results = over_ranks(ranks, stages, branches, predict, do_true_cfg, num_layers, output_slice)
    for rank, result in enumerate(results):
        if rank % stages == stages - 1:
            assert torch.equal(result, expected)
        else:
            assert result is None


def step(do_true_cfg: bool) -> Any:
    pipeline = LinearPipeline()
    latents: Any = inputs(100)
    negative = {"x": inputs(101)} if do_true_cfg else None
    noise_pred = pipeline.predict_noise_maybe_with_cfg(do_true_cfg, 7.5, {"x": latents}, negative, cfg_normalize=False)
    latents = pipeline.scheduler_step_maybe_with_cfg(noise_pred, 500, latents, do_true_cfg)
    kind = type(latents).__name__
    pipeline._sync_pp_send()
    return kind, torch.as_tensor(latents), pipeline.scheduler.steps


@pytest.mark.parametrize(
    ("stages", "branches", "do_true_cfg"), [(2, 1, False), (2, 1, True), (2, 2, True), (3, 1, True)]
)
def test_only_the_last_stage_steps_and_the_first_gets_its_latents(
    ranks: RankPool, stages: int, branches: int, do_true_cfg: bool
) -> None:
    _, expected, _ = alone(ranks, step, do_true_cfg)
    for rank, (kind, latents, steps) in enumerate(over_ranks(ranks, stages, branches, step, do_true_cfg)):
        stage = rank % stages
        assert steps == (stage == stages - 1)
        assert kind == ("AsyncLatents" if stage == 0 else "Tensor")
        # What a stage in between holds only has the right shape.
        assert torch.equal(latents, expected) or stage not in (0, stages - 1)


def loop(make: type[LinearPipeline], steps: int, guided: bool, num_layers: int = 4) -> Any:
    pipeline = make(num_layers)
    latents = pipeline.diffuse(inputs(3), steps, inputs(4) if guided else None)
    return latents, len(pipeline._pp_send_work), get_pp_group().sent


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(("stages", "branches"), [(2, 1), (2, 2), (3, 1), (4, 1)])
def test_ten_steps_give_the_latents_of_one_process(ranks: RankPool, stages: int, branches: int, guided: bool) -> None:
    expected, _, _ = alone(ranks, loop, LinearPipeline, 10, guided)
    for rank, (latents, pending, _) in enumerate(over_ranks(ranks, stages, branches, loop, LinearPipeline, 10, guided)):
        assert pending == 0
        if rank % stages in (0, stages - 1):
            assert torch.equal(latents, expected)


def test_a_hop_is_one_message_once_the_layout_is_known(ranks: RankPool) -> None:
    first, last = over_ranks(ranks, 2, 1, loop, LinearPipeline, 40, True)
    # Two branches forth and the latents back in each step; their layouts are announced WINDOW times and described once.
    assert (first[2].messages, first[2].extras) == (80, 13)
    assert (last[2].messages, last[2].extras) == (40, 13)


def uneven() -> Any:
    pipeline = LinearPipeline(6)
    return loop(LinearPipeline, 3, False, 6)[0], (pipeline.transformer.start, pipeline.transformer.end)


def test_uneven_layers_by_the_environment(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = alone(ranks, uneven)
    results = over_ranks(ranks, 3, 1, with_environment, {"VLLM_PP_LAYER_PARTITION": "3,1,2"}, uneven)
    assert [layers for _, layers in results] == [(0, 3), (3, 4), (4, 6)]
    assert torch.equal(results[0][0], expected)


def with_environment(values: dict[str, str], function: Callable[..., Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        return function()


def predict_three(output_slice: int | None) -> Any:
    pipeline = ThreeBranchPipeline()
    branches = [{"x": inputs(seed, batch)} for seed, batch in ((1, 2), (2, 2), (3, 2))]
    scale = {"text": 5.0, "image": 2.0}
    results = [
        pipeline.predict_noise_with_multi_branch_cfg(True, scale, branches, output_slice=output_slice) for _ in range(3)
    ]
    pipeline._sync_pp_send()
    return results


@pytest.mark.parametrize(("stages", "branches"), [(2, 1), (2, 2), (1, 3), (1, 4)])
def test_three_branches(ranks: RankPool, stages: int, branches: int) -> None:
    expected = alone(ranks, predict_three, None)[0]
    for rank, results in enumerate(over_ranks(ranks, stages, branches, predict_three, None)):
        for result in results:
            assert torch.equal(result, expected) if rank % stages == stages - 1 else result is None


def video_and_audio(steps: int) -> Any:
    pipeline = TuplePipeline()
    video, audio = inputs(5), inputs(6, dim=8)
    for t in range(steps):
        noise_pred = pipeline.predict_noise_maybe_with_cfg(
            True, 3.0, {"x": video}, {"x": video + inputs(7)}, cfg_normalize=False
        )
        video, audio = pipeline.scheduler_step_maybe_with_cfg(noise_pred, (t, t), (video, audio), True)
    pipeline._sync_pp_send()
    return torch.as_tensor(video), torch.as_tensor(audio)


@pytest.mark.parametrize(("stages", "branches"), [(2, 1), (2, 2), (3, 1)])
def test_video_and_audio_with_a_composite_scheduler(ranks: RankPool, stages: int, branches: int) -> None:
    expected = alone(ranks, video_and_audio, 4)
    for rank, result in enumerate(over_ranks(ranks, stages, branches, video_and_audio, 4)):
        if rank % stages in (0, stages - 1):
            assert torch.equal(result[0], expected[0])
            assert torch.equal(result[1], expected[1])


def distilled(own_noise: bool) -> Any:
    pipeline = LinearPipeline()
    generator = torch.Generator().manual_seed(8 + own_noise * get_pp_group().rank)
    latents: Any = inputs(9)
    timesteps = [1000.0, 750.0, 500.0, 250.0]
    for t, following in zip(timesteps, [*timesteps[1:], None], strict=True):
        noise_pred = pipeline.predict_noise_maybe_with_cfg(False, 1.0, {"x": latents}, None)
        latents = pipeline.predict_clean(noise_pred, t, latents)
        if following is not None:
            latents = pipeline.add_noise(latents, torch.randn(latents.shape, generator=generator), following)
    pipeline._sync_pp_send()
    return torch.as_tensor(latents)


def test_a_distilled_loop_works_off_the_last_stage(ranks: RankPool) -> None:
    expected = alone(ranks, distilled, False)
    first, _, last = over_ranks(ranks, 3, 1, distilled, False)
    assert torch.equal(first, expected)
    assert torch.equal(last, expected)
    # Without a common seed, the last stage's noise counts.
    first, last = over_ranks(ranks, 2, 1, distilled, True)
    assert torch.equal(first, last)
    assert not torch.equal(first, expected)


class SecondBranchFirst(LinearPipeline):
    """The last stage does not begin its first branch before the first stage has begun its second."""

    def predict_noise(self, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if get_pp_group().is_first_rank and self.calls == 2:
            dist.send(torch.ones(1), 1)
        if get_pp_group().is_last_rank and self.calls == 1:
            dist.recv(torch.zeros(1), 0)
        return super().predict_noise(**kwargs)


def test_both_branches_are_in_flight(ranks: RankPool) -> None:
    first, last = over_ranks(ranks, 2, 1, loop, SecondBranchFirst, 1, True)
    assert torch.equal(first[0], last[0])


class Vae:
    def __init__(self, distributed: bool) -> None:
        self.calls, self.distributed = 0, distributed

    def is_distributed_enabled(self) -> bool:
        return self.distributed

    def decode(self, z: torch.Tensor, return_dict: bool = True) -> tuple[torch.Tensor]:
        self.calls += 1
        return (z + 1,)


def decode(distributed: bool) -> Any:
    pipeline = LinearPipeline()
    pipeline.vae = Vae(distributed)  # type: ignore[attr-defined]  # after __init__
    latents = pipeline.diffuse(inputs(1), 2)
    before = latents.clone()
    return pipeline.vae.decode(latents)[0], pipeline.vae.calls, before  # type: ignore[attr-defined]


def test_the_first_stage_alone_decodes(ranks: RankPool) -> None:
    (image, calls, latents), (none, no_calls, _) = over_ranks(ranks, 2, 1, decode, False)
    assert torch.equal(image, latents + 1)
    assert (calls, none, no_calls) == (1, None, 0)


def test_a_distributed_vae_decodes_the_first_stage_s_latents_on_every_stage(ranks: RankPool) -> None:
    results = over_ranks(ranks, 3, 1, decode, True)
    assert [calls for _, calls, _ in results] == [1, 1, 1]
    assert not torch.equal(results[1][2], results[0][2])
    assert all(torch.equal(image, results[0][2] + 1) for image, _, _ in results)


def without_guidance(scale: float, negative: bool) -> Any:
    pipeline = LinearPipeline()
    negative_kwargs = {"x": inputs(101)} if negative else None
    result = pipeline.predict_noise_maybe_with_cfg(True, scale, {"x": inputs(100)}, negative_kwargs)
    pipeline._sync_pp_send()
    return result


@pytest.mark.parametrize(("scale", "negative"), [(0.5, True), (1.0, True), (5.0, False)])
@pytest.mark.parametrize(("stages", "branches"), [(1, 2), (2, 2)])
def test_no_scale_or_no_negative_prompt_falls_back_to_what_one_pipeline_does(
    ranks: RankPool, stages: int, branches: int, scale: float, negative: bool
) -> None:
    expected = alone(ranks, without_guidance, scale, negative)
    results = over_ranks(ranks, stages, branches, without_guidance, scale, negative)
    assert all(torch.equal(result, expected) for result in results[stages - 1 :: stages])


def renoised() -> Any:
    pipeline = LinearPipeline()
    mine, default = EulerScheduler(), pipeline.scheduler
    generator = torch.Generator().manual_seed(1)
    noise_pred = pipeline.predict_noise_maybe_with_cfg(False, 1.0, {"x": inputs(1)}, None)
    latents = pipeline.scheduler_step_maybe_with_cfg(noise_pred, 1, inputs(1), False, mine, generator)
    pipeline._sync_pp_send()
    return torch.as_tensor(latents), mine.steps, default.steps


def test_a_request_s_scheduler_and_generator(ranks: RankPool) -> None:
    expected, *_ = alone(ranks, renoised)
    first, last = over_ranks(ranks, 2, 1, renoised)
    assert torch.equal(first[0], expected)
    assert (first[1:], last[1:]) == ((0, 0), (1, 0))
