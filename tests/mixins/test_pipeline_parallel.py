"""The mixin without process groups: base classes, sends that are flushed, decode, what a forward must take."""

from typing import Any

import pytest
import torch
from torch import nn

from dit_pipelining.errors import SplitError, StageForwardError
from dit_pipelining.mixins import AsyncLatents, CFGParallelMixin, IntermediateTensors, PipelineParallelMixin
from dit_pipelining.mixins import pipeline_parallel as pp_module
from tests.mixins.pipelines import EulerScheduler, inputs


class Transfer:
    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


class BarePipeline(PipelineParallelMixin, CFGParallelMixin):
    pass


class Stages:
    """The pipeline group of one stage, with what the others send and get."""

    def __init__(self, stage: int, stages: int, *arriving: dict[str, Any]) -> None:
        self.world_size, self.is_first_rank, self.is_last_rank = stages, stage == 0, stage == stages - 1
        self.arriving, self.sent, self.events = list(arriving), [], []

    def isend_tensor_dict(self, tensors: dict[str, Any], dst: int | None = None) -> list[Transfer]:
        self.sent.append((tensors, dst))
        self.events.append("send")
        return [Transfer()]

    def irecv_tensor_dict(self, src: int | None = None) -> tuple[dict[str, Any], list[Transfer], list[Any]]:
        self.events.append("receive")
        return self.arriving.pop(0), [Transfer()], []


def play(patch: pytest.MonkeyPatch, stage: int, stages: int, *arriving: dict[str, Any], branches: int = 1) -> Stages:
    group = Stages(stage, stages, *arriving)
    patch.setattr(pp_module, "get_pipeline_parallel_world_size", lambda: stages)
    patch.setattr(pp_module, "get_pp_group", lambda: group)
    patch.setattr(pp_module, "is_pipeline_first_stage", lambda: stage == 0)
    patch.setattr(pp_module, "get_classifier_free_guidance_world_size", lambda: branches)
    return group


def test_the_cfg_mixin_must_be_there() -> None:
    with pytest.raises(TypeError, match=r"Alone inherits PipelineParallelMixin but not CFGParallelMixin.*Add it after"):

        class Alone(PipelineParallelMixin):
            pass


def test_the_cfg_mixin_must_come_after() -> None:
    with pytest.raises(TypeError, match=r"Swapped must inherit PipelineParallelMixin before CFGParallelMixin.*Swap"):

        class Swapped(CFGParallelMixin, PipelineParallelMixin):
            pass


def test_modules_and_further_subclasses_inherit_in_the_same_order() -> None:
    class Module(nn.Module, PipelineParallelMixin, CFGParallelMixin):
        def __init__(self) -> None:
            self._pp_send_work = []  # also before nn.Module's own
            super().__init__()

    class Further(Module):
        pass

    assert Further()._pp_send_work == []


def test_flushing_waits_for_all_sends_and_forgets_them() -> None:
    pipeline, transfers = BarePipeline(), [Transfer(), Transfer()]
    pipeline._sync_pp_send()
    assert pipeline._pp_send_work == []
    pipeline._pp_send_work = transfers
    pipeline._sync_pp_send()
    assert all(transfer.waited for transfer in transfers)
    assert pipeline._pp_send_work == []


def test_diffuse_flushes_on_return_and_keeps_its_name() -> None:
    transfer = Transfer()

    class Pipeline(PipelineParallelMixin, CFGParallelMixin):
        def diffuse(self) -> str:
            """Own words."""
            self._pp_send_work = [transfer]
            return "done"

    pipeline = Pipeline()
    assert (pipeline.diffuse(), transfer.waited, pipeline._pp_send_work) == ("done", True, [])
    assert (Pipeline.diffuse.__name__, Pipeline.diffuse.__doc__) == ("diffuse", "Own words.")


class Failing(Transfer):
    def wait(self) -> None:
        super().wait()
        raise RuntimeError("connection lost")


@pytest.mark.parametrize("transfer", [Transfer(), Failing()])
def test_diffuse_flushes_on_error_and_raises_the_first(transfer: Transfer) -> None:
    class Pipeline(PipelineParallelMixin, CFGParallelMixin):
        def diffuse(self) -> None:
            self._pp_send_work = [transfer]
            raise KeyError("the cause")

    pipeline = Pipeline()
    with pytest.raises(KeyError, match="the cause"):
        pipeline.diffuse()
    assert transfer.waited
    assert pipeline._pp_send_work == []


def test_diffuse_returns_latents_that_are_there() -> None:
    tensor = torch.ones(2)

    class Pipeline(PipelineParallelMixin, CFGParallelMixin):
        def diffuse(self) -> Any:
            return AsyncLatents({"latents": tensor}, [], []), {"audio": AsyncLatents({"latents": tensor}, [], [])}

    latents, others = Pipeline().diffuse()
    assert latents is tensor
    assert others["audio"] is tensor


class Vae:
    def __init__(self, distributed: bool = False) -> None:
        self.calls, self.distributed = 0, distributed

    def decode(self, z: torch.Tensor) -> tuple[torch.Tensor]:
        """Own words."""
        self.calls += 1
        return (z + 1,)

    def is_distributed_enabled(self) -> bool:
        return self.distributed


class DecodingPipeline(PipelineParallelMixin, CFGParallelMixin):
    def __init__(self, distributed: bool = False) -> None:
        self.vae = Vae(distributed)


@pytest.mark.parametrize(
    ("stage", "stages", "distributed", "decodes"),
    [(0, 1, False, 1), (0, 2, False, 1), (1, 2, False, 0), (1, 2, True, 1)],
)
def test_decode_runs_where_the_latents_are(
    monkeypatch: pytest.MonkeyPatch, stage: int, stages: int, distributed: bool, decodes: int
) -> None:
    play(monkeypatch, stage, stages)
    pipeline, z = DecodingPipeline(distributed), torch.ones(2, 3)
    output = pipeline.vae.decode(z)
    assert pipeline.vae.calls == decodes
    if decodes:
        assert torch.equal(output[0], z + 1)
    else:
        assert output == (None,)
        assert output.sample is None  # type: ignore[attr-defined]
    assert (pipeline.vae.decode.__name__, pipeline.vae.decode.__doc__) == ("decode", "Own words.")


def test_a_vae_is_guarded_once_whoever_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Further(DecodingPipeline):
        def __init__(self) -> None:
            super().__init__()

    play(monkeypatch, 0, 2)
    pipeline = Further()
    guarded = pipeline.vae.decode
    assert guarded.__wrapped__.__func__ is Vae.decode  # type: ignore[attr-defined]
    latents = AsyncLatents({"latents": torch.ones(2)}, [], [])
    assert torch.equal(pipeline.vae.decode(latents)[0], torch.full((2,), 2.0))


def test_one_stage_is_the_cfg_mixin_s() -> None:
    class Pipeline(PipelineParallelMixin, CFGParallelMixin):
        def __init__(self) -> None:
            self.transformer = lambda x: (2 * x,)  # takes no intermediate_tensors
            self.scheduler = EulerScheduler()

    pipeline, x = Pipeline(), inputs(1)
    noise_pred = pipeline.predict_noise_maybe_with_cfg(True, 3.0, {"x": x}, {"x": x - 1}, cfg_normalize=False)
    assert torch.equal(noise_pred, 2 * (x - 1) + 3.0 * (2 * x - 2 * (x - 1)))
    assert torch.equal(pipeline.scheduler_step_maybe_with_cfg(noise_pred, 1, x, True), x - 0.1 * noise_pred)


class Stage(PipelineParallelMixin, CFGParallelMixin):
    """Adds one to what it gets, on any stage; writes down when."""

    def __init__(self, group: Stages) -> None:
        self.group = group

    def predict_noise(self, x: torch.Tensor, intermediate_tensors: IntermediateTensors | None = None) -> Any:
        self.group.events.append("compute")
        x = (x if intermediate_tensors is None else intermediate_tensors["hidden_states"]) + 1
        return x if self.group.is_last_rank else IntermediateTensors({"hidden_states": x})


def test_a_middle_stage_posts_all_receives_first_and_sends_each_branch_as_soon_as_it_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = play(monkeypatch, 1, 3, {"hidden_states": torch.ones(2)}, {"hidden_states": torch.zeros(2)})
    pipeline = Stage(group)
    stale = torch.full((2,), 9.0)
    assert pipeline.predict_noise_maybe_with_cfg(True, 3.0, {"x": stale}, {"x": stale}) is None
    assert group.events == ["receive", "receive", "compute", "send", "compute", "send"]
    assert [tensors["hidden_states"].tolist() for tensors, _ in group.sent] == [[2, 2], [1, 1]]
    assert len(pipeline._pp_send_work) == 2


def test_the_last_stage_combines_steps_and_sends_the_latents_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    group = play(monkeypatch, 1, 2, {"hidden_states": torch.ones(2)}, {"hidden_states": torch.zeros(2)})
    pipeline = Stage(group)
    pipeline.scheduler = EulerScheduler()  # type: ignore[attr-defined]
    noise_pred = pipeline.predict_noise_maybe_with_cfg(
        True, 3.0, {"x": torch.zeros(2)}, {"x": torch.zeros(2)}, cfg_normalize=False
    )
    assert noise_pred.tolist() == [4, 4]
    latents = pipeline.scheduler_step_maybe_with_cfg(noise_pred, 1, torch.ones(2), True)
    assert group.sent[-1][0]["latents"] is latents
    assert group.sent[-1][1] == 0


def test_the_first_stage_goes_on_with_latents_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(2)
    group = play(monkeypatch, 0, 2, {"latents": tensor})
    latents = Stage(group).scheduler_step_maybe_with_cfg(None, 1, torch.zeros(2), False)
    assert type(latents) is AsyncLatents
    assert latents._resolve() is tensor


class NoStage(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        return (hidden_states,)


class Forwarding(PipelineParallelMixin, CFGParallelMixin):
    def __init__(self, transformer: nn.Module) -> None:
        self.transformer, self.loops = transformer, 0

    def diffuse(self) -> None:
        self.loops += 1


def test_a_transformer_that_cannot_be_a_stage_is_refused_before_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    group = play(monkeypatch, 0, 2)
    pipeline = Forwarding(NoStage())
    for _ in range(2):  # not only the first time
        with pytest.raises(
            StageForwardError, match=r"the forward of transformer \(NoStage\) takes no intermediate_tensors"
        ):
            pipeline.diffuse()
        with pytest.raises(TypeError, match="load_pipeline"):
            pipeline.predict_noise_maybe_with_cfg(False, 1.0, {"hidden_states": torch.ones(1)}, None)
    assert (pipeline.loops, group.sent) == (0, [])
    assert issubclass(StageForwardError, SplitError)


def test_both_transformers_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class AStage(nn.Module):
        def forward(self, hidden_states: torch.Tensor, intermediate_tensors: Any = None) -> Any:
            return (hidden_states,)

    play(monkeypatch, 0, 2)
    pipeline = Forwarding(AStage())
    pipeline.diffuse()
    pipeline.transformer_2 = NoStage()  # type: ignore[attr-defined]
    with pytest.raises(StageForwardError, match="transformer_2"):
        pipeline.diffuse()


def test_a_predict_noise_that_drops_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropping(PipelineParallelMixin, CFGParallelMixin):
        def predict_noise(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x

    play(monkeypatch, 0, 2)
    with pytest.raises(StageForwardError, match=r"Dropping\.predict_noise takes no intermediate_tensors"):
        Dropping().predict_noise_maybe_with_cfg(False, 1.0, {"x": torch.ones(1)}, None)


@pytest.mark.parametrize(
    ("stage", "result", "message"),
    [
        (0, torch.ones(1), "returned Tensor on a stage that is not the last"),
        (1, IntermediateTensors({}), "returned IntermediateTensors on the last stage"),
    ],
)
def test_the_wrong_kind_of_result_is_named(
    monkeypatch: pytest.MonkeyPatch, stage: int, result: Any, message: str
) -> None:
    class Wrong(PipelineParallelMixin, CFGParallelMixin):
        def predict_noise(self, **_: Any) -> Any:
            return result

    play(monkeypatch, stage, 2, {})
    with pytest.raises(StageForwardError, match=message):
        Wrong().predict_noise_maybe_with_cfg(False, 1.0, {}, None)
