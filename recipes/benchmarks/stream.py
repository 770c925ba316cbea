"""How fast streams run: against the ideal on stages that sleep, and on one GPU with random weights.

    python recipes/benchmarks/stream.py --sleep [--stages 2 4] [--json FILE]
    python recipes/benchmarks/stream.py --gpu [--models 1.3b 14b] [--sizes 480p 512x512] [--json FILE]

`--sleep`: ranks over gloo whose stages sleep instead of computing, so that two cores carry four ranks. The ideal is one chunk
per stage time; what is lost is messages and Python.

`--gpu`: real configurations with random weights in bf16 on one GPU: frames per second, time to the first frame and latency
with 1 to 4 levels, without the VAE, with decoding, and from video to video, beside what StreamDiffusionV2 reports for one
H100 (video to video). Per stage a and b of `a + b * rows`; with these the schedule is played through for 2 and 4 GPUs.
The first chunks of each run load kernels and are not counted.
"""

import argparse
import os
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from random_models import random_transformer
from reporting import show, write

from dit_pipelining.api import SplitModel, StreamSpec, split_model
from dit_pipelining.planning.presets import preset
from dit_pipelining.stream.batch_scheduler import StreamBatchScheduler
from dit_pipelining.stream.executor import run_in_one_process
from dit_pipelining.stream.head import StreamInput
from dit_pipelining.stream.kv_cache import DistributedKVCache
from dit_pipelining.stream.links import make_stream_links
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.prompts import Prompts
from dit_pipelining.stream.rank import StreamRank
from dit_pipelining.stream.simulation import StageCost, fit_cost
from dit_pipelining.stream.stage import StreamStage
from dit_pipelining.stream.vae import StreamVAE

LEVELS = (1.0, 0.9375, 0.8333, 0.625)
FRAMES_PER_LATENT = 4
WINDOW = 6
WAIT_SECONDS = 120.0

# Frames per second with 1, 2, 3 and 4 levels on one H100, and on several, as the authors report them.
PUBLISHED = {
    ("1.3b", "480p"): (20.47, 17.97, 15.68, 13.95),
    ("1.3b", "512x512"): (26.21, 24.02, 21.51, 19.43),
    ("14b", "480p"): (12.68, 8.64, 6.49, 5.28),
}
PUBLISHED_SEVERAL = {2: 39.77, 4: 44.38}
SIZES = {"480p": (480, 832), "512x512": (512, 512)}
MODELS = {"1.3b": "wan2.1-t2v-1.3b", "14b": "wan2.1-t2v-14b"}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--sleep", action="store_true")
    flags.add_argument("--gpu", action="store_true")
    flags.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    flags.add_argument("--stage-ms", type=float, default=60.0, help="how long a stage sleeps")
    flags.add_argument("--chunks", type=int, default=10, help="that are timed")
    flags.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["1.3b", "14b"])
    flags.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["480p", "512x512"])
    flags.add_argument("--compile", action="store_true", help="also with torch.compile on the blocks")
    flags.add_argument("--json")
    args = flags.parse_args()
    if not args.sleep and not args.gpu:
        flags.error("give --sleep or --gpu")
    if args.gpu and not torch.cuda.is_available():
        flags.error("--gpu needs a GPU; --sleep runs anywhere")
    results: dict[str, Any] = {}
    if args.sleep:
        results["sleep"] = [sleeping(count, args.stage_ms / 1e3, args.chunks) for count in args.stages]
        show("stages that sleep", [{name: str(value) for name, value in row.items()} for row in results["sleep"]])
    if args.gpu:
        results["device"] = torch.cuda.get_device_name()
        results["gpu"] = list(on_gpu(args))
        report(results["gpu"])
    write(args.json, results)


# ---- stages that sleep ----------------------------------------------------------------------------------------------------

SMALL = (1, 4, 1, 8, 8)


def sleeping(num_stages: int, seconds: float, chunks: int) -> dict[str, Any]:
    """Frames per second of a line of sleeping stages against the ideal."""
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
    stage = _stages(_split(model, SMALL, text, num_stages), spec, SMALL, text, SleepingStage)[rank]
    stage.seconds_to_sleep = seconds
    links = make_stream_links([range(num_stages)], timeout, "gloo", torch.device("cpu"))
    noise = NoiseSource(0, SMALL, torch.float32, torch.device("cpu"))
    filling = spec.num_levels * num_stages
    with torch.no_grad():
        own = StreamRank(stage, rank, num_stages, links, noise, timeout.total_seconds())
        times = [time.perf_counter() for _ in own.run([iter([StreamInput()] * (chunks + 2 * filling))])]
    if rank == num_stages - 1:
        queue.put(times[filling : filling + chunks])
    dist.barrier()
    dist.destroy_process_group()


# ---- one GPU --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One measurement: frames per second, seconds to the first frame, latency of a chunk."""

    fps: float
    first_frame: float
    latency: float


def on_gpu(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = torch.device("cuda", 0)
    torch.backends.cudnn.benchmark = True
    with torch.no_grad():
        vae = AutoencoderKLWan().to(device, torch.bfloat16).eval()
        for module in vae.modules():  # as the GPU's matrix units want convolutions
            if isinstance(module, torch.nn.Conv3d):
                module.to(memory_format=torch.channels_last_3d)
            elif isinstance(module, torch.nn.Conv2d):
                module.to(memory_format=torch.channels_last)
        for name in args.models:
            model = random_transformer(preset(MODELS[name]), device).eval()
            for compiled in (False, True) if args.compile else (False,):
                if compiled:
                    for block in model.blocks:
                        block.compile()
                for size in args.sizes:
                    if (name, size) in PUBLISHED:
                        yield measured(model, vae, name, size, compiled, args.chunks)
            del model
            torch.cuda.empty_cache()


def measured(model: Any, vae: AutoencoderKLWan, name: str, size: str, compiled: bool, chunks: int) -> dict[str, Any]:
    """All numbers of levels for one model and size."""
    height, width = SIZES[size]
    shape = (1, 16, 1, height // 8, width // 8)
    device = model.device
    text = torch.randn(1, 512, 4096, device=device, dtype=model.dtype)
    split = _split(model, shape, text, 1)
    found: dict[str, Any] = {"model": name, "size": size, "compiled": compiled, "levels": []}
    samples: list[tuple[int, float]] = []
    for count in range(1, len(LEVELS) + 1):
        spec = StreamSpec(levels=LEVELS[:count], window=WINDOW)
        (stage,) = _stages(split, spec, shape, text, StreamStage)
        _timed(stage, None, count + 4)  # kernels, and keys and values up to the window
        alone = _timed(stage, None, chunks)
        samples += stage.seconds()
        decoded = _timed(stage, StreamVAE(vae), chunks)
        changed = _timed(stage, StreamVAE(vae), chunks, _frames(size, device))
        row = {
            "levels": count,
            "dit": vars(alone),
            "decoded": vars(decoded),
            "video_to_video": vars(changed),
            "published": PUBLISHED[name, size][count - 1],
        }
        found["levels"].append(row)
    found["cost"] = vars(fit_cost(samples))
    found["vae_seconds"] = _vae_seconds(vae, shape, _frames(size, device))
    found["predicted"] = predicted(StageCost(**found["cost"]), found["vae_seconds"]["decode"])
    return found


def _frames(size: str, device: torch.device) -> torch.Tensor:
    """The four frames of a chunk of random video, and the one before the first."""
    return torch.rand(1, 3, 1 + FRAMES_PER_LATENT, *SIZES[size], device=device, dtype=torch.bfloat16) * 2 - 1


def _encoded(vae: StreamVAE, frames: torch.Tensor, chunks: int) -> Iterator[StreamInput]:
    """Chunks of a video that is encoded as it comes."""
    for chunk in range(chunks):
        latents = vae.encode_chunk(frames[:, :, 1:] if chunk else frames[:, :, :1])
        yield StreamInput(vae.normalise(latents.float()), noise_scale=0.9)


def _timed(stage: StreamStage, vae: StreamVAE | None, chunks: int, frames: torch.Tensor | None = None) -> Run:
    """Run a stream from its beginning; events on the GPU tell when each chunk was there, so the host may run ahead.

    With a VAE every chunk is decoded; with frames these are encoded and changed, else chunks are made of noise.
    """
    levels, filling = stage.spec.num_levels, stage.spec.num_levels + WINDOW
    noise = NoiseSource(0, stage.shape, torch.float32, stage.device)
    count = chunks + filling + levels
    inputs = [StreamInput()] * count if vae is None or frames is None else _encoded(vae, frames, count)
    torch.cuda.synchronize()
    began = torch.cuda.Event(enable_timing=True)
    began.record()
    events = []
    for chunk in run_in_one_process([stage], [iter(inputs)], noise):
        if vae is not None:
            vae.decode_chunk(vae.denormalise(chunk.latents))
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    torch.cuda.synchronize()
    times = [began.elapsed_time(event) / 1e3 for event in events]
    steady = times[filling : len(times) - levels]
    rate = (len(steady) - 1) / (steady[-1] - steady[0])
    # A chunk starts when the tick of the chunk `levels` before it ends.
    latency = statistics.median(times[k] - times[k - levels] for k in range(filling, len(times) - levels))
    return Run(FRAMES_PER_LATENT * rate, times[0], latency)


def _vae_seconds(vae: AutoencoderKLWan, shape: tuple[int, ...], frames: torch.Tensor) -> dict[str, float]:
    """Seconds of a chunk, alone on the GPU."""
    stream = StreamVAE(vae)
    latents = torch.randn(shape, device=vae.device, dtype=vae.dtype)
    stream.encode_chunk(frames[:, :, :1])
    times: dict[str, list[float]] = {"decode": [], "encode": []}
    for _ in range(8):
        for name, own in times.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            if name == "decode":
                stream.decode_chunk(latents)
            else:
                stream.encode_chunk(frames[:, :, 1:])
            torch.cuda.synchronize()
            own.append(time.perf_counter() - began)
    return {name: statistics.median(own[3:]) for name, own in times.items()}


def predicted(cost: StageCost, decode: float) -> dict[str, Any]:
    """What 2 and 4 GPUs would give with 1 and 4 levels: blocks divided evenly, the VAE where it is best."""
    found = {}
    for gpus in (2, 4):
        for count in (1, 4):
            spec = StreamSpec(levels=LEVELS[:count], window=WINDOW)
            share = replace(cost, fixed=cost.fixed / gpus, per_row=cost.per_row / gpus)
            inline = [share] * (gpus - 1) + [replace(share, per_finish=decode)]
            # As the balancer does it: the rank of the VAE takes fewer blocks, so that all take equally long.
            total = cost.fixed + cost.per_row * count
            fair = (total + decode) / gpus
            last = max(0.0, fair - decode) / total
            others = (1 - last) / (gpus - 1)
            parts = [others] * (gpus - 1) + [last]
            balanced = [StageCost(cost.fixed * part, cost.per_row * part) for part in parts]
            balanced[-1] = replace(balanced[-1], per_finish=decode)
            for kind, stages in (("even", inline), ("balanced", balanced)):
                choice = StreamBatchScheduler(stages, spec).forecast(spec)
                found[f"{gpus} GPUs, {count} levels, {kind}"] = {"fps": choice.fps, "latency": choice.latency}
    return found


def report(found: list[dict[str, Any]]) -> None:
    rows = []
    for own in found:
        for level in own["levels"]:
            row = {
                "model": f"{own['model']} {own['size']}" + (" compiled" if own["compiled"] else ""),
                "levels": str(level["levels"]),
            }
            for name in ("dit", "decoded", "video_to_video"):
                row[f"{name.replace('_', ' ')} fps"] = f"{level[name]['fps']:.2f}"
            for name in ("decoded", "video_to_video"):
                run = level[name]
                row[f"{name.replace('_', ' ')}: first frame, latency ms"] = (
                    f"{1e3 * run['first_frame']:.0f}, {1e3 * run['latency']:.0f}"
                )
            rows.append({**row, "published fps": f"{level['published']:.2f}"})
    show("one GPU, random weights, bf16", rows)
    for own in found:
        cost = own["cost"]
        print(
            f"{own['model']} {own['size']}: a {1e3 * cost['fixed']:.2f} ms, b {1e3 * cost['per_row']:.2f} ms per row; "
            f"a chunk's decode {1e3 * own['vae_seconds']['decode']:.1f} ms, encode {1e3 * own['vae_seconds']['encode']:.1f} ms"
        )
        for name, value in own["predicted"].items():
            print(f"  predicted {name}: {value['fps']:.2f} fps, latency {value['latency']:.3f} s")
    print("published for several GPUs: " + ", ".join(f"{gpus}: {fps} fps" for gpus, fps in PUBLISHED_SEVERAL.items()))


def _split(model: Any, shape: tuple[int, ...], text: torch.Tensor, num_stages: int) -> SplitModel:
    example = dict(
        hidden_states=torch.zeros(shape, device=model.device, dtype=model.dtype),
        timestep=torch.zeros(1, device=model.device),
        encoder_hidden_states=text,
        return_dict=False,
    )
    return split_model(model, num_stages, example, partitioner="uniform")


def _stages(split: SplitModel, spec: StreamSpec, shape: tuple[int, ...], text: torch.Tensor, cls: Any) -> list[Any]:
    prompts = Prompts([text], in_flight=spec.passes * split.num_stages)
    caches = DistributedKVCache(spec)
    return [cls(split, index, spec, shape, prompts, caches, text.device) for index in range(split.num_stages)]


if __name__ == "__main__":
    main()
