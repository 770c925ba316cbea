"""Groups of a launch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dit_pipelining.errors import ConfigError, WorldSizeError
from dit_pipelining.mixins import parallel_state
from dit_pipelining.mixins.parallel_state import (
    GroupNotInitializedError,
    destroy_distributed_env,
    get_cfg_group,
    get_classifier_free_guidance_rank,
    get_classifier_free_guidance_world_size,
    get_data_parallel_rank,
    get_dp_group,
    get_pipeline_parallel_rank,
    get_pipeline_parallel_world_size,
    get_pp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    model_parallel_is_initialized,
)
from tests.distributed import RankPool
from tests.mixins.pipelines import parallel


def places() -> dict[str, Any]:
    with parallel(stages=2, branches=2):
        pp, cfg = get_pp_group(), get_cfg_group()
        gathered = cfg.all_gather(torch.tensor([dist.get_rank()]), separate_tensors=True)
        return {
            "pp": (pp.ranks, pp.rank_in_group, pp.is_first_rank, pp.is_last_rank, pp.next_rank, pp.prev_rank),
            "pipeline": (get_pipeline_parallel_rank(), is_pipeline_first_stage(), is_pipeline_last_stage()),
            "cfg": (cfg.ranks, get_classifier_free_guidance_rank(), get_classifier_free_guidance_world_size()),
            "ends": (pp.first_rank, pp.last_rank, get_pipeline_parallel_world_size()),
            "dp": (get_dp_group().world_size, get_data_parallel_rank()),
            "world": get_world_group().ranks,
            "gathered": [int(tensor) for tensor in gathered],
            "joined": cfg.all_gather(torch.tensor([dist.get_rank()])).tolist(),  # type: ignore[union-attr]
        }


def test_stages_are_innermost_and_cfg_groups_go_across(ranks: RankPool) -> None:
    of = ranks.run(4, places)
    assert of[0]["pp"] == ([0, 1], 0, True, False, 1, 1)
    assert of[3]["pp"] == ([2, 3], 1, False, True, 2, 2)
    assert of[2]["pipeline"] == (0, True, False)
    assert of[3]["pipeline"] == (1, False, True)
    assert of[2]["cfg"] == ([0, 2], 1, 2)
    assert of[3]["ends"] == (2, 3, 2)
    assert of[1]["dp"] == (1, 0)
    assert of[1]["world"] == [0, 1, 2, 3]
    assert of[1]["gathered"] == of[3]["gathered"] == of[3]["joined"] == [1, 3]


def start_and_end() -> Any:
    seen = []
    for _ in range(2):
        with parallel(stages=2):
            seen.append(model_parallel_is_initialized())
        seen.append(model_parallel_is_initialized())
    return seen, parallel_state._WORLD, dist.is_initialized()


def test_groups_can_be_made_again_and_a_default_group_that_was_there_stays(ranks: RankPool) -> None:
    assert ranks.run(2, start_and_end) == [([True, False, True, False], None, True)] * 2


def test_a_process_alone_starts_and_ends_its_own_default_group(tmp_path: Any) -> None:
    init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", backend="gloo")
    try:
        initialize_model_parallel(pipeline_parallel_size=1)
        assert get_pp_group().is_first_rank
        assert get_pp_group().is_last_rank
    finally:
        destroy_distributed_env()
    assert not dist.is_initialized()


@pytest.mark.parametrize("ask", [get_pp_group, get_cfg_group, get_dp_group, get_world_group, is_pipeline_first_stage])
def test_asking_for_a_group_too_early_says_what_to_call(ask: Any) -> None:
    with pytest.raises(
        GroupNotInitializedError, match=r"call (initialize_model_parallel|init_distributed_environment)"
    ):
        ask()


def refused() -> list[str]:
    texts = []
    init_distributed_environment()
    try:
        for error, degrees in (
            (WorldSizeError, dict(pipeline_parallel_size=3)),
            (ConfigError, dict(pipeline_parallel_size=0)),
            (ConfigError, dict(pipeline_parallel_size=2, tensor_parallel_size=2)),
            (ConfigError, dict(pipeline_parallel_size=2, ulysses_degree=2)),
        ):
            with pytest.raises(error) as caught:
                initialize_model_parallel(**degrees)
            texts.append(str(caught.value))
        initialize_model_parallel(pipeline_parallel_size=2)
        with pytest.raises(ConfigError, match="exist already"):
            initialize_model_parallel(pipeline_parallel_size=2)
    finally:
        destroy_distributed_env()
    return texts


def test_wrong_degrees_are_refused_before_anything_waits(ranks: RankPool) -> None:
    product, zero, tensor, ulysses = ranks.run(2, refused)[1]
    assert "pipeline_parallel_size 3 is not the number of ranks, 2" in product
    assert "pipeline_parallel_size=0" in zero
    assert "tensor_parallel_size is 2" in tensor
    assert "dit_pipelining.sharding" in ulysses
