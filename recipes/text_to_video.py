r"""Text to video with any diffusers video pipeline, its transformer split over the launched processes.

    torchrun --nproc-per-node 2 recipes/text_to_video.py --model Wan-AI/Wan2.1-T2V-14B-Diffusers --dtype bfloat16 \
        --prompt "a cat walks on the moon" --pipeline-parallel-size 2 --output out.mp4

The result is the one that a single process gives with the same flags, bit for bit; with several prompts up to the
rounding of the smaller batch (see --microbatches).
"""

from common import call_arguments, check_output, load, parser, run, save_videos, video_flags


def main() -> None:
    flags = parser(__doc__ or "", "video.mp4")
    video_flags(flags)
    args = flags.parse_args()
    check_output(args.output, (".mp4", ".gif"))
    pipeline = load(args)
    names = ("width", "height", "num_frames", "num_inference_steps", "guidance_scale")
    videos = pipeline(**call_arguments(args, *names), output_type="np").frames
    save_videos(pipeline, videos, args)


if __name__ == "__main__":
    run(main)
