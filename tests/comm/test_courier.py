"""Transfers that both sides post when the data is there."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dit_pipelining.api import ParallelConfig, generate, load_pipeline
from dit_pipelining.comm.courier import Courier
from dit_pipelining.comm.links import make_links
from tests import checkpoints
from tests.distributed import RankPool

TIMEOUT = timedelta(seconds=60)


def logged_transfers() -> tuple[list[str], list[float]]:
    """Rank 0 sends three tensors to rank 1; which group each side posted on, and what arrived."""
    notices, data = (dist.new_group([0, 1], timeout=TIMEOUT, backend="gloo") for _ in range(2))
    courier = Courier(notices, data, torch.device("cpu"))
    log: list[str] = []

    def logging(post: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
            log.append("notice" if group is notices else "data")
            return post(tensor, group)

        return call

    tensors = [torch.full((2,), float(own) if dist.get_rank() == 0 else 0.0) for own in range(1, 4)]
    if dist.get_rank() == 0:
        works = [courier.send(own, logging(lambda t, group: dist.isend(t, 1, group=group))) for own in tensors]
    else:
        works = [courier.receive(own, logging(lambda t, group: dist.irecv(t, 0, group=group))) for own in tensors]
    for work in works:
        work.wait()
    return log, [float(own[0]) for own in tensors]


def test_both_sides_post_each_tensor_after_its_notice(ranks: RankPool) -> None:
    for log, values in ranks.run(2, logged_transfers):
        assert log == ["notice", "data"] * 3
        assert values == [1.0, 2.0, 3.0]


def failing_transfer() -> str:
    notices, data = (dist.new_group([0, 1], timeout=TIMEOUT, backend="gloo") for _ in range(2))

    def broken(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        raise RuntimeError("the cable is cut")

    with pytest.raises(RuntimeError) as raised:
        Courier(notices, data, torch.device("cpu")).send(torch.zeros(1), broken).wait()
    return str(raised.value)


def test_what_a_transfer_raises_is_raised_where_it_is_waited_for(ranks: RankPool) -> None:
    assert set(ranks.run(2, failing_transfer)) == {"the cable is cut"}


def latents(folder: Path, couriers: bool) -> list[torch.Tensor]:
    """Of two guided requests at once, on stages whose tensors take groups of their own or not."""
    with pytest.MonkeyPatch.context() as patch:
        if couriers:
            patch.setattr("dit_pipelining.runtime.rolling.make_links", over_other_groups)
        pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2, cfg_parallel_size=2))
        pipeline.set_progress_bar_config(disable=True)
        size = dict(height=16, width=16, num_frames=5, max_sequence_length=16, output_type="latent")
        request = dict(prompt="a red cat", num_inference_steps=3, guidance_scale=4.0, **size)
        calls = [dict(request, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        return [result.frames for result in generate(pipeline, calls)]


def over_other_groups(mesh: Any, timeout: timedelta, device: torch.device, _: Any) -> Any:
    return make_links(mesh, timeout, device, "gloo")


def test_a_pipeline_gives_the_same_over_couriers(ranks: RankPool, tmp_path: Path) -> None:
    folder = checkpoints.wan(tmp_path / "wan")
    with_couriers, without = (ranks.run(4, latents, folder, couriers) for couriers in (True, False))
    for own, expected in zip(with_couriers, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
