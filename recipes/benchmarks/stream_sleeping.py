"""A line of stages that sleep, over gloo: frames per second against the ideal, one chunk per stage time."""

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diffusers import WanTransformer3DModel
from stream_stages import split_of, stages_of

from dit_pipelining.stream.head import StreamInput
from dit_pipelining.stream.links import make_stream_links
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.rank import StreamRank
from dit_pipelining.stream.spec import StreamSpec
from dit_pipelining.stream.stage import StreamStage

LEVELS = (1.0, 0.9375, 0.8333, 0.625)
SHAPE = (1, 4, 1, 8, 8)
WAIT_SECONDS = 120.0


def sleeping(num_stages: int, seconds: float, chunks: int) -> dict[str, Any]:
    """Chunks per second of a line of stages that take `seconds` each, and the share of the ideal."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    arguments = (num_stages, seconds, chunks, port, queue)
    processes = [context.Process(target=_sleep_rank, args=(rank, *arguments)) for rank in range(num_stages)]
    for process in processes:
        process.start()
    times = queue.get(timeout=WAIT_SECONDS + 2 * seconds * (chunks + 3 * len(LEVELS) * num_stages))
    for process in processes:
        process.join(60)
    rate = (len(times) - 1) / (times[-1] - times[0])
    return {
        "stages": num_stages,
        "stage ms": 1e3 * seconds,
        "chunks/s": round(rate, 3),
        "ideal": round(1 / seconds, 3),
        "share": round(rate * seconds, 3),
    }


class SleepingStage(StreamStage):
    """A stage that takes the time it is told to, whatever its rows."""

    seconds_to_sleep = 0.0

    def execute_micro_step(self, *arguments: Any) -> list[torch.Tensor]:
        until = time.perf_counter() + self.seconds_to_sleep
        outputs = super().execute_micro_step(*arguments)
        time.sleep(max(0.0, until - time.perf_counter()))
        return outputs


def _sleep_rank(rank: int, num_stages: int, seconds: float, chunks: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(num_stages))
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", timeout=timeout)
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=32,
        num_layers=num_stages,
        rope_max_seq_len=32,
    ).eval()
    spec = StreamSpec(levels=LEVELS)
    text = torch.zeros(1, 8, 12)
    stage = stages_of(split_of(model, SHAPE, text, [1] * num_stages), spec, SHAPE, text, [rank], SleepingStage)[0]
    stage.seconds_to_sleep = seconds
    links = make_stream_links([range(num_stages)], timeout, "host", torch.device("cpu"))
    noise = NoiseSource(0, SHAPE, torch.float32, torch.device("cpu"))
    filling = spec.num_levels * num_stages
    with torch.no_grad():
        own = StreamRank(stage, rank, num_stages, links, noise, timeout.total_seconds())
        times = [time.perf_counter() for _ in own.run([iter([StreamInput()] * (chunks + 2 * filling))])]
    if rank == num_stages - 1:
        queue.put(times[filling : filling + chunks])
    dist.barrier()
    dist.destroy_process_group()
