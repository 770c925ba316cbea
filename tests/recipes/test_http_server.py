"""The HTTP server in front of two ranks."""

import asyncio
import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import http_server
import pytest
from PIL import Image
from starlette.requests import Request
from starlette.types import Message, Receive

from dit_pipelining.errors import QueueFullError
from tests import checkpoints

ROOT = Path(__file__).parents[2]
STEPS = 2


class Server:
    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    def post(self, body: Any) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"{self.address}/v1/images/generations", data, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = checkpoints.flux(tmp_path_factory.mktemp("http") / "flux")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["recipes/http_server.py", "--model", str(folder), "--port", "0", "--max-waiting", "64"]
    command += ["--width", "16", "--height", "16", "--num-inference-steps", str(STEPS)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its ranks can be ended with it
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                yield Server(process, found.group(1))
                break
        else:
            raise AssertionError("the server did not start")
    finally:
        with suppress(ProcessLookupError):  # they have ended, as they should
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pixels(answer: str) -> bytes:
    image = Image.open(io.BytesIO(base64.b64decode(json.loads(answer)["data"][0]["b64_json"])))
    assert image.size == (16, 16)
    return image.tobytes()


def test_twenty_clients_at_once_get_what_each_gets_alone(server: Server) -> None:
    bodies = [{"prompt": "a red cat" if i % 2 else "the moon", "seed": i % 5} for i in range(20)]
    with ThreadPoolExecutor(20) as clients:
        answers = list(clients.map(server.post, bodies))
    assert [status for status, _ in answers] == [200] * 20
    alone = {json.dumps(body): pixels(server.post(body)[1]) for body in bodies[:10]}
    assert all(pixels(text) == alone[json.dumps(body)] for body, (_, text) in zip(bodies, answers, strict=True))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not JSON"),
        ([], "not an object"),
        ({}, "no prompt"),
        ({"prompt": 3}, "prompt=3"),
        ({"prompt": "a", "sise": "16x16"}, "sise"),
        ({"prompt": "a", "size": "16"}, "WIDTHxHEIGHT"),
        ({"prompt": "a", "n": 0}, "n=0"),
        ({"prompt": "a", "num_inference_steps": 0}, "num_inference_steps=0"),
        ({"prompt": "a", "timeout": -1}, "timeout=-1"),
        ({"prompt": "a", "seed": 2**64}, "seed="),
        ({"prompt": "a", "guidance_scale": float("nan")}, "guidance_scale=nan"),
        (b"\xff", "not JSON"),
        ({"prompt": "a", "negative_prompt": "b", "num_frames": 4}, "num_frames"),
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"prompt=a&n=1", "not JSON"),
        (b'{"prompt": "a", "\\ud800": 1}', "unknown fields '\\ud800'"),
        ({"prompt": None}, "prompt=None"),
        ({"prompt": "a", "n": 10**6}, "n=1000000: from 1 to 16"),
        ({"prompt": "a", "n": 2.0}, "n=2.0"),
        ({"prompt": "a", "num_inference_steps": -1}, "num_inference_steps=-1"),
        ({"prompt": "a", "size": "1\u0666x16"}, "WIDTHxHEIGHT"),
        ({"prompt": "a", "size": "16384x16384"}, "width=16384 x height=16384 are more than the 100000000 pixels"),
    ],
)
def test_a_request_that_cannot_be_is_told_why(server: Server, body: Any, reason: str) -> None:
    status, text = server.post(body)
    assert status == 400
    assert reason in json.loads(text)["error"]["message"]


def test_a_body_that_is_too_long_is_told_so(server: Server) -> None:
    status, text = server.post({"prompt": "a" * 5_000_000})
    assert status == 413
    assert "at most 1048576" in json.loads(text)["error"]["message"]


def test_an_answer_is_cancelled_when_its_client_goes() -> None:
    async def leaves() -> Message:
        return {"type": "http.disconnect"}

    async def stays() -> Message:
        return await asyncio.Future()

    async def answered(receive: Receive, answer: Coroutine[Any, Any, Any]) -> Any:
        return await http_server.unless_client_goes(Request({"type": "http"}, receive), answer)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(answered(leaves, stays()))
    assert asyncio.run(answered(stays, asyncio.sleep(0, "an image"))) == "an image"


def test_images_that_the_queue_took_are_cancelled_when_it_is_full_for_the_rest() -> None:
    class Queue:
        taken: ClassVar[list[Future[Any]]] = []

        def submit(self, **_: Any) -> Future[Any]:
            if len(self.taken) == 2:
                raise QueueFullError("the queue is full")
            self.taken.append(Future())
            return self.taken[-1]

    queue: Any = Queue()
    with pytest.raises(http_server.RefusedError, match="the queue is full") as refused:
        http_server.submit(queue, {"n": 3}, {"prompt": "a"})
    assert refused.value.status == 429
    assert [future.cancelled() for future in queue.taken] == [True, True]


def test_what_a_request_meets_by_itself_is_told_to_its_client() -> None:
    class Queue:
        def submit(self, **_: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(RuntimeError("out of memory"))
            return future

    queue: Any = Queue()
    with pytest.raises(http_server.RefusedError, match="RuntimeError: out of memory") as refused:
        asyncio.run(http_server.result(queue, {}, {"prompt": "a"}))
    assert refused.value.status == 500


def test_steps_are_sent_as_they_are_done(server: Server) -> None:
    status, text = server.post({"prompt": "a", "seed": 1, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200
    assert [event.get("step") for event in events] == [*range(1, STEPS + 1), None]
    assert pixels(json.dumps(events[-1])) == pixels(server.post({"prompt": "a", "seed": 1})[1])


def health(server: Server) -> Any:
    with urllib.request.urlopen(f"{server.address}/health", timeout=20) as answer:
        return json.loads(answer.read())


def test_another_method_or_path_is_a_4xx(server: Server) -> None:
    for path, expected in (("v1/images/generations", 405), ("v1/images", 404)):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{server.address}/{path}", timeout=20)
        assert error.value.code == expected
        assert f"/{path}: " in json.loads(error.value.read())["error"]["message"]


def test_it_is_healthy_and_finishes_what_it_has_when_it_is_told_to_end(server: Server) -> None:
    assert health(server) == {"status": "ok", "running": 0, "waiting": 0}
    bodies = [{"prompt": "the moon", "seed": i, "num_inference_steps": 40} for i in range(6)]
    with ThreadPoolExecutor(len(bodies)) as clients:
        answers = [clients.submit(server.post, body) for body in bodies]
        while sum(map(health(server).get, ("running", "waiting"))) < len(bodies):
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        drained = [answer.result(timeout=100) for answer in answers]
    assert [status for status, _ in drained] == [200] * len(bodies)
    assert len({pixels(text) for _, text in drained}) == len(bodies)
    server.process.wait(60)
    with pytest.raises(urllib.error.URLError):
        health(server)
