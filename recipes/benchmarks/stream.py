r"""Real-time video through stages: frames per second, time to the first frame, latency.

    python recipes/benchmarks/stream.py --sleep                       # sleeping stages on a CPU against the ideal
    python recipes/benchmarks/stream.py --gpu --models 1.3b --json results.json
    torchrun --nproc-per-node 2 recipes/benchmarks/stream.py --gpu --models 1.3b --json results.json

On one GPU with random weights, for one to four noise levels: the transformer alone, with every chunk decoded, and video to
video, where every chunk is encoded too; what a tick costs by rows; and what several GPUs would give by simulation. Beside it
what StreamDiffusionV2 reports, whose geometry is taken: a chunk is one latent frame, four frames of video, of 832x480 or
512x512; it sees six latent frames, its own and three of the stream's beginning among them.

Under torchrun the stages are on as many GPUs, cut by a simulation of what one GPU was measured to take; the first rank
encodes, the last one decodes. Every row is written as it comes.
"""

import argparse
import os

import torch
from reporting import show, write
from stream_gpu import MODELS, MODES, SIZES, Workload, on_one_gpu, table
from stream_ranks import on_several_gpus
from stream_sleeping import sleeping

CARD = "one H100"
DEVICE = torch.device("cuda", 0)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--sleep", action="store_true")
    flags.add_argument("--gpu", action="store_true")
    flags.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    flags.add_argument("--stage-ms", type=float, default=60.0, help="how long a stage sleeps")
    flags.add_argument("--chunks", type=int, default=8, help="that are timed")
    flags.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["1.3b", "14b"])
    flags.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["480p", "512x512"])
    flags.add_argument("--levels", type=int, nargs="+", choices=(1, 2, 3, 4), default=[1, 2, 3, 4])
    flags.add_argument("--compile", nargs="+", choices=MODES, default=["blocks-cudagraphs"], help="see ParallelConfig")
    flags.add_argument("--transport", choices=("peer", "host", "nccl"), default="peer", help="between several GPUs")
    flags.add_argument("--json")
    args = flags.parse_args()
    if not args.sleep and not args.gpu:
        flags.error("give --sleep or --gpu")
    if args.gpu and not torch.cuda.is_available():
        flags.error("--gpu needs a GPU; --sleep runs anywhere")
    if args.sleep:
        rows = [sleeping(count, args.stage_ms / 1e3, args.chunks) for count in args.stages]
        show("stages that sleep", [{name: str(value) for name, value in row.items()} for row in rows])
        write(args.json, {"sleep": rows})
    if args.gpu:
        on_gpus(args)


def on_gpus(args: argparse.Namespace) -> None:
    torch.backends.cudnn.benchmark = True
    found = []
    for name in args.models:
        sizes = tuple(size for size in args.sizes if size in MODELS[name].published)
        for mode in args.compile:
            workload = Workload(name, sizes, tuple(args.levels), args.chunks, mode)
            several = "WORLD_SIZE" in os.environ
            rows = on_several_gpus(workload, args.transport) if several else on_one_gpu(workload, DEVICE)
            for row in rows:
                found.append(row)
                print(row, flush=True)
                write(args.json, {"device": torch.cuda.get_device_name(), "rows": found})
        torch.cuda.empty_cache()
    if not found:  # the last of several ranks has them
        return
    show(f"{torch.cuda.get_device_name()}, random weights, bf16; published: {CARD}", table(found))


if __name__ == "__main__":
    main()
