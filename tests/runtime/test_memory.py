"""A rank holds the weights of its own stage, and nothing keeps those of the others alive."""

import gc
import threading
import time
import weakref

import diffusers
import pytest
import torch

from dit_pipelining.api import ParallelConfig, generate, parallelize, serve
from tests.distributed import RankPool

CONFIG = dict(num_layers=4, num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4)
CONFIG |= dict(text_dim=16, freq_dim=32, ffn_dim=32, patch_size=(1, 2, 2))


def weights_alive(rank: int) -> tuple[set[str], int]:
    """Names of the first weights that live after a call, without the garbage collector's help, and how many there were."""
    transformer = diffusers.WanTransformer3DModel(**CONFIG).eval()
    weights = {name: weakref.ref(parameter) for name, parameter in transformer.named_parameters()}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = diffusers.WanPipeline(None, None, None, scheduler, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)
    parallelize(pipeline, ParallelConfig(pipeline_parallel_size=2))
    call = dict(height=32, width=32, num_frames=5, num_inference_steps=2, guidance_scale=1.0, output_type="latent")
    gc.collect()
    gc.disable()
    try:
        pipeline(prompt_embeds=torch.ones(1, 8, 16), **call)
        return {name for name, weight in weights.items() if weight() is not None}, len(weights)
    finally:
        gc.enable()


def left_of_a_pipeline(how: str) -> tuple[int, set[str]]:
    """Weights that live, and threads that run, once nobody uses a pipeline any more."""
    before = set(threading.enumerate())
    transformer = diffusers.WanTransformer3DModel(**CONFIG).eval()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = diffusers.WanPipeline(None, None, None, scheduler, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)
    parallelize(pipeline, ParallelConfig(pipeline_parallel_size=2))
    weights = [weakref.ref(parameter) for parameter in transformer.parameters()]
    request = dict(height=32, width=32, num_frames=5, num_inference_steps=2, guidance_scale=1.0, output_type="latent")
    request["prompt_embeds"] = torch.ones(1, 8, 16)
    if how == "call":
        pipeline(**request)
    elif how == "generate":
        generate(pipeline, [request, request])
    else:
        with serve(pipeline) as queue:
            if queue.leads:
                queue.submit(**request).result(timeout=60)
        del queue
    weights += [weakref.ref(parameter) for parameter in transformer.parameters()]
    del pipeline, transformer, scheduler
    gc.collect()
    deadline = time.monotonic() + 20
    while started := {thread.name for thread in set(threading.enumerate()) - before} & {"stage", "request", "queue"}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return sum(weight() is not None for weight in weights), started


@pytest.mark.parametrize("how", ["call", "generate", "serve"])
def test_a_pipeline_that_nobody_uses_leaves_no_weights_and_no_threads(ranks: RankPool, how: str) -> None:
    assert ranks.run(2, left_of_a_pipeline, how) == [(0, set())] * 2


def test_weights_of_other_stages_are_freed_when_the_model_is_split(ranks: RankPool) -> None:
    (first, count), (last, _) = ranks.run(2, weights_alive, 0)
    assert len(first | last) == count
    assert {name.split(".")[1] for name in first if name.startswith("blocks.")} == {"0", "1"}
    assert {name.split(".")[1] for name in last if name.startswith("blocks.")} == {"2", "3"}
    assert len(first & last) < count / 8  # what the glue of both stages uses
