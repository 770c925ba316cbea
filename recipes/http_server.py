r"""Images and videos over HTTP: many clients, one pipeline over several ranks, requests side by side.

    torchrun --nproc-per-node 2 recipes/http_server.py --model black-forest-labs/FLUX.1-dev --dtype bfloat16 --port 8000

    curl localhost:8000/v1/images/generations -d '{"prompt": "a cat", "size": "1024x1024", "seed": 7}'

POST /v1/images/generations takes an object as OpenAI's endpoint of that name does: `prompt`, `n`, `size`; beside them `seed`,
`negative_prompt`, `num_inference_steps`, `guidance_scale`, `num_frames` and `timeout` in seconds. It answers with
`{"created": ..., "data": [{"b64_json": ...}]}`: PNG files, or GIF files where the pipeline makes videos. With `"stream": true`
it answers with server-sent events: one per denoising step, then the result. GET /health says how many requests run and wait.

A request that cannot be gets status 400 and the reason, one too many 429, one whose time is over 504. So does what would be
larger than `--max-pixels`, since running out of memory within a stage ends the run for all. A request whose client goes is
cancelled. On SIGTERM and SIGINT the server takes no more requests and finishes those it has; torchrun gives it 30 seconds for
that (`--shutdown-timeout`).
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import json
import logging
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import CancelledError
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import uvicorn
from common import base_parser, load_with, parallel_config, run, seeded
from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import dit_pipelining
from dit_pipelining.config_checks import check_positive
from dit_pipelining.errors import QueueFullError

if TYPE_CHECKING:
    from dit_pipelining.runtime.serving import RequestQueue

KINDS: dict[str, type | tuple[type, ...]] = {
    "prompt": str,
    "n": int,
    "size": str,
    "seed": int,
    "negative_prompt": str,
    "num_inference_steps": int,
    "guidance_scale": (int, float),
    "num_frames": int,
    "timeout": (int, float),
    "stream": bool,
}
"""Fields of a request and what they hold."""

PASSED_ON = ("prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "num_frames")
SIZES = ("width", "height", "num_frames")

MAX_BODY = 2**20
"""Bytes of a request."""

RANGES: dict[str, tuple[float, float]] = {
    "n": (1, 16),
    "seed": (0, 2**63 - 16),  # the n-th image takes the n-th seed after it, and torch's seeds have 63 bits
    "num_inference_steps": (1, 1000),
    "num_frames": (1, 10_000),
    "guidance_scale": (0, 1000),
    "timeout": (0, 86_400),
}
"""Values of numbers that make sense; the pipeline knows more about its own."""


class RefusedError(Exception):
    """A request that cannot be; the message is for the client."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def main() -> None:
    flags = base_parser(__doc__ or "")
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, default=8000, help="0: any that is free; the server prints it")
    flags.add_argument("--max-in-flight", type=int, help="default: twice as many as processes")
    flags.add_argument("--max-waiting", type=int, default=64)
    flags.add_argument(
        "--max-pixels", type=int, default=100_000_000, help="width x height x frames of a request; default: %(default)s"
    )
    args = flags.parse_args()
    check_positive("--max-pixels", args.max_pixels)
    pipeline = load_with(args, parallel_config(args))
    pipeline.set_progress_bar_config(disable=True)
    own = inspect.signature(type(pipeline).__call__).parameters
    usual = {name: own[name].default for name in SIZES if name in own}
    flagged = {name: getattr(args, name) for name in ("width", "height", *PASSED_ON[1:4])}
    defaults = {name: value for name, value in [*usual.items(), *flagged.items()] if value is not None}
    with dit_pipelining.serve(pipeline, max_in_flight=args.max_in_flight, max_waiting=args.max_waiting) as queue:
        # torchrun passes these on to every rank. On the first one the server hears them, and its ranks end with it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if queue.leads:
            uvicorn.run(application(queue, defaults, args.max_pixels), host=args.host, port=args.port, log_level="info")


def application(queue: RequestQueue, defaults: dict[str, Any], max_pixels: int) -> Starlette:
    """The server in front of a queue."""

    async def generate(request: Request) -> Response:
        try:
            body = read(await received(request))
            call = call_of(body, defaults, max_pixels)
            if body.get("stream"):
                return StreamingResponse(events(queue, body, call), media_type="text/event-stream")
            return JSONResponse(await unless_client_goes(request, result(queue, body, call)))
        except RefusedError as error:
            return refusal(str(error), error.status)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "running": queue.running, "waiting": queue.waiting})

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = "; there are POST /v1/images/generations and GET /health"
        return refusal(f"{request.method} {request.url.path}: {error.detail}{known}", error.status_code)

    return Starlette(
        routes=[Route("/v1/images/generations", generate, methods=["POST"]), Route("/health", health, methods=["GET"])],
        exception_handlers={HTTPException: unknown},
    )


def refusal(message: str, status: int) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)


async def received(request: Request) -> bytes:
    """The body of a request.

    Raises:
        RefusedError: it is too long. It is read to its end, without being kept, since clients listen only then.
    """
    text, size = b"", 0
    async for chunk in request.stream():
        size += len(chunk)
        text = text + chunk if size <= MAX_BODY else b""
    if size > MAX_BODY:
        raise RefusedError(f"the body has {size} bytes; at most {MAX_BODY} are taken", status=413)
    return text


async def unless_client_goes(request: Request, answer: Coroutine[Any, Any, Any]) -> Any:
    """What comes of it; it is cancelled when the client goes before."""

    async def client_goes() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, going = asyncio.ensure_future(answer), asyncio.ensure_future(client_goes())
    await asyncio.wait([answering, going], return_when=asyncio.FIRST_COMPLETED)
    going.cancel()
    answering.cancel()  # nothing, where it is done
    return await answering


def read(text: bytes) -> dict[str, Any]:
    """The fields of a request.

    Raises:
        RefusedError: it is no object of such fields; says why.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError("the body is not an object")
    unknown = [name for name in body if name not in KINDS]
    if unknown:
        raise RefusedError(f"unknown fields {', '.join(map(repr, unknown))}; known are {', '.join(KINDS)}")
    for name, value in body.items():
        wrong = not isinstance(value, KINDS[name]) or (isinstance(value, bool) and KINDS[name] is not bool)
        if wrong:
            raise RefusedError(f"{name}={value!r} is of the wrong kind")
    if not body.get("prompt"):
        raise RefusedError("there is no prompt")
    for name, (least, most) in RANGES.items():
        if name in body and not least <= body[name] <= most:
            raise RefusedError(f"{name}={body[name]!r}: from {least} to {most}")
    if "size" in body and not re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", body["size"]):
        raise RefusedError(f"size={body['size']!r}: expected WIDTHxHEIGHT, such as 1024x1024")
    return body


def call_of(body: dict[str, Any], defaults: dict[str, Any], max_pixels: int) -> dict[str, Any]:
    """The arguments of the pipeline's call.

    Raises:
        RefusedError: they ask for too many pixels.
    """
    call = defaults | {name: body[name] for name in PASSED_ON if name in body}
    if "size" in body:
        call["width"], call["height"] = map(int, body["size"].split("x"))
    sizes = {name: call[name] for name in SIZES if name in call}
    if prod(sizes.values()) > max_pixels:
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise RefusedError(f"{asked} are more than the {max_pixels} pixels that this server makes")
    return call


def submit(queue: RequestQueue, body: dict[str, Any], call: dict[str, Any], on_step: Any = None) -> list[Any]:
    seed = body.get("seed", random.randrange(2**31))
    futures: list[Any] = []
    try:
        for i in range(body.get("n", 1)):
            generator = seeded(seed + i)
            futures.append(queue.submit(timeout=body.get("timeout"), on_step=on_step, generator=generator, **call))
    except QueueFullError as error:
        for future in futures:
            future.cancel()
        raise RefusedError(str(error), status=429) from None
    return futures


async def result(queue: RequestQueue, body: dict[str, Any], call: dict[str, Any], on_step: Any = None) -> Any:
    futures = submit(queue, body, call, on_step)
    try:
        outputs = [await asyncio.wrap_future(future) for future in futures]
    except TimeoutError as error:
        raise RefusedError(str(error), status=504) from None
    except (CancelledError, asyncio.CancelledError):
        raise RefusedError("the request was cancelled", status=503) from None
    except (ValueError, TypeError) as error:
        raise RefusedError(f"the pipeline refuses it: {error}") from None
    except Exception as error:
        logging.getLogger("uvicorn.error").exception("a request failed")
        raise RefusedError(f"{type(error).__name__}: {error}", status=500) from None
    finally:
        for future in futures:
            future.cancel()  # those that are left when one fails, or the client goes
    return {"created": int(time.time()), "data": [{"b64_json": encoded(output)} for output in outputs]}


async def events(queue: RequestQueue, body: dict[str, Any], call: dict[str, Any]) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def on_step(done: int, total: int | None) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, {"type": "progress", "step": done, "steps": total})

    answer = asyncio.ensure_future(result(queue, body, call, on_step))
    try:
        while not (answer.done() and steps.empty()):
            step = asyncio.ensure_future(steps.get())
            await asyncio.wait([answer, step], return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                yield event(step.result())
            else:
                step.cancel()
        try:
            yield event({"type": "result", **answer.result()})
        except RefusedError as error:
            yield event({"type": "error", "error": {"message": str(error)}})
    finally:
        answer.cancel()


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def encoded(output: Any) -> str:
    """The first image of a pipeline's output as PNG, or its first video as GIF, in base64."""
    file = io.BytesIO()
    if hasattr(output, "images"):
        output.images[0].save(file, format="PNG")
    else:
        frames = [Image.fromarray((np.asarray(frame) * 255).round().astype("uint8")) for frame in output.frames[0]]
        frames[0].save(file, format="GIF", save_all=True, append_images=frames[1:], duration=60, loop=0)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    run(main)
