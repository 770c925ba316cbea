r"""A hand-written Wan pipeline with its own transformers and denoising loop, its stages on the launched processes.

    torchrun --nproc-per-node 2 recipes/custom_pipeline.py --model recipes/tiny_wan --height 96 --width 96 --num-frames 25 \
        --num-inference-steps 10 --prompt "a red circle moves right on a black background" --output outputs/custom.mp4

The pipeline is in `custom_wan_pipeline.py`; `PORTING.md` explains what makes it a pipeline of stages. With two transformers
(Wan 2.2) the boundary ratio says which steps are whose; with 1.0 or 0.0 only one is loaded.
"""

import argparse
import os
import tempfile
from pathlib import Path

from common import DTYPES, check_output, dtype_of, run, save_video


def main() -> None:
    args = flags().parse_args()
    check_output(args.output, (".mp4", ".gif"))
    from custom_wan_pipeline import CustomWanPipeline  # torch and diffusers, which take seconds to import

    from dit_pipelining import mixins

    if "RANK" in os.environ:
        mixins.init_distributed_environment()
    else:  # started with python, as one process
        mixins.init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store")
    world = mixins.get_world_group()
    mixins.initialize_model_parallel(
        pipeline_parallel_size=args.pipeline_parallel_size or max(world.world_size // args.cfg_parallel_size, 1),
        cfg_parallel_size=args.cfg_parallel_size,
    )
    pipeline = CustomWanPipeline(args.model, dtype_of(args), args.boundary_ratio, args.partition)
    call = (
        "negative_prompt",
        "height",
        "width",
        "num_frames",
        "num_inference_steps",
        "guidance_scale",
        "guidance_scale_2",
    )
    given = {name: getattr(args, name) for name in call if getattr(args, name) is not None}
    video = pipeline(args.prompt, seed=args.seed, **given)
    stages = [transformer for transformer in (pipeline.transformer, pipeline.transformer_2) if transformer is not None]
    blocks = ", ".join(f"blocks {stage.start} to {stage.end - 1} of {len(stage.blocks)}" for stage in stages)
    line = mixins.get_pp_group()
    print(f"rank {world.rank}: stage {line.rank_in_group} of {line.world_size}, {blocks}")
    if video is not None and world.is_first_rank:
        print(f"video: {save_video(video, args.output, args.fps)}")
    world.barrier()
    mixins.destroy_distributed_env()


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a diffusers Wan pipeline")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--negative-prompt")
    for name in ("height", "width", "num-frames", "num-inference-steps"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--guidance-scale", type=float)
    parser.add_argument("--guidance-scale-2", type=float, help="of the second transformer; default: the first's")
    parser.add_argument("--boundary-ratio", type=float, help="default: the checkpoint's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fps", type=int, default=12)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--output", type=Path, default=Path("custom.mp4"))
    parser.add_argument("--pipeline-parallel-size", type=int, metavar="STAGES", help="default: all launched processes")
    parser.add_argument("--cfg-parallel-size", type=int, default=1, metavar="PIPELINES")
    parser.add_argument("--partition", help="blocks per stage, for example 8,12,12,8")
    return parser


if __name__ == "__main__":
    run(main)
