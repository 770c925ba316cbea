r"""Image to video with any diffusers pipeline that takes both, its transformer split over the launched processes.

    torchrun --nproc-per-node 2 recipes/image_to_video.py --model Wan-AI/Wan2.1-I2V-14B-480P-Diffusers --dtype bfloat16 \
        --image cat.png --prompt "the cat jumps" --pipeline-parallel-size 2 --output out.mp4

A checkpoint that serves several tasks names one class in its index; name the other with --pipeline-class: Wan 2.2 TI2V 5B
is run by WanImageToVideoPipeline, LTX-Video by LTXImageToVideoPipeline. With --expand-timesteps a text-to-video Wan starts
from an image as Wan 2.2 TI2V does: the image is the first latent frame, and the time of its tokens is 0. The embedded model
was not trained for that, and does it:

    torchrun --nproc-per-node 2 recipes/image_to_video.py --model recipes/tiny_wan --expand-timesteps \
        --pipeline-class WanImageToVideoPipeline --image recipes/tiny_wan_pictures/first.png \
        --prompt "a red circle moves right" --height 96 --width 96 --num-frames 25 --num-inference-steps 25 --guidance-scale 6

The result is the one that a single process gives with the same flags, bit for bit; with several prompts up to the
rounding of the smaller batch (see --microbatches).
"""

import inspect
from pathlib import Path
from typing import Any

from common import call_arguments, check_output, load, parser, run, save_videos, video_flags
from PIL import Image, UnidentifiedImageError

from dit_pipelining.errors import ConfigError


def main() -> None:
    flags = parser(__doc__ or "", "video.mp4")
    video_flags(flags)
    flags.add_argument("--image", required=True, type=Path, help="where the video starts; resized to width x height")
    flags.add_argument("--pipeline-class", default="DiffusionPipeline", help="default: the one the checkpoint names")
    flags.add_argument("--expand-timesteps", action="store_true", help="see above; default: as the checkpoint says")
    args = flags.parse_args()
    check_output(args.output, (".mp4", ".gif"))
    image = open_image(args.image)
    options = {"expand_timesteps": True} if args.expand_timesteps else {}
    pipeline = load(args, pipeline_class=pipeline_class(args.pipeline_class), **options)
    check_takes_image(pipeline)
    names = ("width", "height", "num_frames", "num_inference_steps", "guidance_scale")
    videos = pipeline(image=image, **call_arguments(args, *names), output_type="np").frames
    save_videos(pipeline, videos, args)


def open_image(path: Path) -> Image.Image:
    """The image in RGB.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Image.open(path).convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise ConfigError(f"--image {path}: {error}.") from None


def pipeline_class(name: str) -> type:
    """The diffusers pipeline class of this name.

    Raises:
        ConfigError: there is none.
    """
    import diffusers

    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        raise ConfigError(
            f"--pipeline-class {name}: diffusers {diffusers.__version__} has no such pipeline; an example is "
            "WanImageToVideoPipeline."
        )
    return found


def check_takes_image(pipeline: Any) -> None:
    """Refuse a pipeline for other tasks.

    Raises:
        ConfigError: its call has no argument `image`.
    """
    if "image" not in inspect.signature(type(pipeline).__call__).parameters:
        raise ConfigError(
            f"{type(pipeline).__name__} takes no image. Name a class that does and fits the checkpoint, for example "
            "--pipeline-class WanImageToVideoPipeline."
        )


if __name__ == "__main__":
    run(main)
