"""What is told about how a pipeline was spread over ranks."""

from typing import Any

import pytest

from dit_pipelining import ParallelConfig
from dit_pipelining.runtime.report import describe_layout


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (dict(), "1 rank: 1 stage"),
        (dict(cfg_parallel_size=2, pipeline_parallel_size=3), "6 ranks: 2 replicas (cfg) x 3 stages"),
        (dict(data_parallel_size=2, ulysses_degree=4), "8 ranks: 2 copies (data) x 1 stage x 4 token shards (ulysses)"),
        (
            dict(pipeline_parallel_size=2, ring_degree=2, tensor_parallel_size=2, vae_patch_parallel_size=4),
            "8 ranks: 2 stages x 2 token shards (ring) x 2 head shards (tensor); the VAE's tiles over 4 ranks",
        ),
        (
            dict(ulysses_degree=2, use_hsdp=True, text_encoder_tp_size=2),
            "2 ranks: 1 stage x 2 token shards (ulysses); each block's weights over 2 ranks (hsdp); "
            "each text encoder over 2 ranks",
        ),
        (
            dict(pipeline_parallel_size=2, text_encoder_tp_size={"text_encoder": 1, "text_encoder_2": 2}),
            "2 ranks: 2 stages; text_encoder_2 over 2 ranks",
        ),
        (
            dict(use_hsdp=True, hsdp_shard_size=2, hsdp_replicate_size=2),
            "4 ranks: 4 replicas (cfg) x 1 stage; each block's weights over 2 ranks (hsdp)",
        ),
    ],
)
def test_the_layout_is_told_with_all_its_dimensions(sizes: dict[str, Any], told: str) -> None:
    assert describe_layout(ParallelConfig(**sizes)) == told
