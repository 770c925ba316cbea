r"""Text to video with any diffusers video pipeline, its transformer split over the launched processes.

    torchrun --nproc-per-node 2 recipes/text_to_video.py --model Wan-AI/Wan2.1-T2V-14B-Diffusers --dtype bfloat16 \
        --prompt "a cat walks on the moon" --pipeline-parallel-size 2 --output out.mp4

The result is the one that a single process gives with the same flags, bit for bit; with several prompts up to the
rounding of the smaller batch (see --microbatches).
"""

from common import call_arguments, check_output, is_main_rank, load, numbered, parser, run, save_video
from contact_sheet import contact_sheet

from dit_pipelining.runtime.report import print_split


def main() -> None:
    flags = parser(__doc__ or "", "video.mp4")
    flags.add_argument("--num-frames", type=int)
    flags.add_argument("--fps", type=int, default=16, help="of the file; the model does not know it")
    flags.add_argument("--contact-sheet", action="store_true", help="also save the frames side by side, as PNG")
    args = flags.parse_args()
    check_output(args.output, (".mp4", ".gif"))
    pipeline = load(args)
    names = ("width", "height", "num_frames", "num_inference_steps", "guidance_scale")
    videos = pipeline(**call_arguments(args, *names), output_type="np").frames
    if is_main_rank():
        print_split(pipeline)
        for i, frames in enumerate(videos):
            path = save_video(frames, numbered(args.output, i, len(videos)), args.fps)
            print(f"video: {path}")
            if args.contact_sheet:
                print(f"frames: {contact_sheet(frames, path.with_suffix('.png'), scale=2)}")


if __name__ == "__main__":
    run(main)
