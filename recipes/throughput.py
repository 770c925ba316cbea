r"""Many prompts from a file through one pipeline, several of them in flight; prints requests per minute.

    torchrun --nproc-per-node 2 recipes/throughput.py --model Wan-AI/Wan2.1-T2V-14B-Diffusers --dtype bfloat16 \
        --prompts prompts.txt --pipeline-parallel-size 2 --output videos/

The file has one request a line: a prompt, or a JSON object of arguments of the pipeline that beat the flags, and maybe a
"seed": {"prompt": "a cat", "width": 480, "num_inference_steps": 30, "seed": 7}. Each request writes its own file, `0000.mp4`
or `0000.png`, as soon as it is complete. Its pixels are those that the request gives alone, bit for bit.
"""

import argparse
import inspect
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import (
    base_parser,
    is_main_rank,
    load_with,
    numbered,
    parallel_config,
    report,
    run,
    save_video,
    seeded,
    video_flags,
)
from contact_sheet import contact_sheet
from PIL import Image

import dit_pipelining
from dit_pipelining.errors import ConfigError
from partitioners.errors import counted

CALL_FLAGS = ("negative_prompt", "width", "height", "num_frames", "num_inference_steps", "guidance_scale")
"""Flags that are arguments of a pipeline's call."""


def main() -> None:
    flags = base_parser(__doc__ or "")
    video_flags(flags)
    flags.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="one request a line, see above")
    flags.add_argument("--output", type=Path, default=Path("outputs"), metavar="FOLDER")
    flags.add_argument(
        "--max-in-flight", type=int, help="requests at a time; default: twice as many as processes, so that none waits"
    )
    args = flags.parse_args()
    requests = read_requests(args)
    check_folder(args.output)
    config = parallel_config(args)
    pipeline = load_with(args, config)
    check_arguments(pipeline, requests, args.prompts)
    in_flight = min(len(requests), 2 * config.line_size if args.max_in_flight is None else args.max_in_flight)
    with ThreadPoolExecutor(1) as writer:  # a video encoder must not hold up the next steps

        def write(index: int, output: Any) -> "Future[list[Path]] | None":
            return writer.submit(save, output, index, args) if is_main_rank() else None

        started = time.perf_counter()
        written = dit_pipelining.generate(pipeline, requests, max_in_flight=in_flight, on_output=write)
        paths = [path for each in written if each is not None for path in each.result()]
        seconds = time.perf_counter() - started
    if is_main_rank():
        report(pipeline)
        print("\n".join(str(path) for path in paths))
        print(
            f"{counted(len(requests), 'request')}, {in_flight} in flight, in {seconds:.1f} s with reading the transformer's "
            f"weights: {60 * len(requests) / seconds:.1f} requests/min"
        )


def read_requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The arguments of each request: those of its line, else those of the flags. Requests without a seed count theirs up.

    Raises:
        ConfigError: there is no request, or a line is broken.
    """
    try:
        lines = [line.strip() for line in args.prompts.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {args.prompts}: {error}.") from None
    common = {name: getattr(args, name) for name in CALL_FLAGS if getattr(args, name) is not None}
    requests = []
    for number, line in enumerate(lines, 1):
        if line:
            request = {**common, "output_type": "np", **_parse(line, f"{args.prompts}, line {number}")}
            seed = request.pop("seed", args.seed + len(requests))
            requests.append({**request, "generator": seeded(seed)})
    if not requests:
        raise ConfigError(f"--prompts {args.prompts}: the file is empty; it needs one prompt a line.")
    return requests


def _parse(line: str, place: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {"prompt": line}
    try:
        request: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: no JSON object: {error}.") from None
    if not isinstance(request.get("seed", 0), int):
        raise ConfigError(f"{place}: seed={request['seed']!r}: expected an integer.")
    return request


def check_arguments(pipeline: Any, requests: list[dict[str, Any]], path: Path) -> None:
    """Refuse arguments that the pipeline does not take, before anything is generated.

    Raises:
        ConfigError: names the first.
    """
    known = inspect.signature(type(pipeline).__call__).parameters
    for index, request in enumerate(requests):
        unknown = [name for name in request if name not in known]
        if unknown:
            raise ConfigError(
                f"{path}: request {index} has {', '.join(unknown)}, which {type(pipeline).__name__} does not take "
                f"(from its line or from a flag)."
            )


def check_folder(path: Path) -> None:
    """Make the folder of the results.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error}.") from None


def save(output: Any, index: int, args: argparse.Namespace) -> list[Path]:
    """Write the videos or images of one request."""
    name = args.output / f"{index:04d}"
    results = output.frames if hasattr(output, "frames") else output.images
    paths = []
    for i, result in enumerate(results):
        if hasattr(output, "frames"):
            paths.append(save_video(result, numbered(name.with_suffix(".mp4"), i, len(results)), args.fps))
            if args.contact_sheet:
                contact_sheet(result, paths[-1].with_suffix(".png"), scale=2)
        else:
            paths.append(numbered(name.with_suffix(".png"), i, len(results)))
            Image.fromarray((result * 255).round().astype("uint8")).save(paths[-1])
    return paths


if __name__ == "__main__":
    run(main)
