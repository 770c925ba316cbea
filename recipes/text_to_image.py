r"""Text to image with any diffusers image pipeline, its transformer split over the launched processes.

    torchrun --nproc-per-node 2 recipes/text_to_image.py --model black-forest-labs/FLUX.1-dev --dtype bfloat16 \
        --prompt "a cat on the moon" --pipeline-parallel-size 2 --output out.png

The result is the one that a single process gives with the same flags, bit for bit; with several prompts up to the
rounding of the smaller batch (see --microbatches).
"""

from common import call_arguments, check_output, load, parser, run, save_images


def main() -> None:
    args = parser(__doc__ or "", "image.png").parse_args()
    check_output(args.output, (".png", ".jpg", ".webp"))
    pipeline = load(args)
    names = ("width", "height", "num_inference_steps", "guidance_scale")
    images = pipeline(**call_arguments(args, *names)).images
    save_images(pipeline, images, args)


if __name__ == "__main__":
    run(main)
