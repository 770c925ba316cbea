"""The HTTP server in front of two ranks."""

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

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
        ({"prompt": "a", "negative_prompt": "b", "num_frames": 4}, "num_frames"),
    ],
)
def test_a_request_that_cannot_be_is_told_why(server: Server, body: Any, reason: str) -> None:
    status, text = server.post(body)
    assert status == 400
    assert reason in json.loads(text)["error"]["message"]


def test_steps_are_sent_as_they_are_done(server: Server) -> None:
    status, text = server.post({"prompt": "a", "seed": 1, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200
    assert [event.get("step") for event in events] == [*range(1, STEPS + 1), None]
    assert pixels(json.dumps(events[-1])) == pixels(server.post({"prompt": "a", "seed": 1})[1])


def test_it_is_healthy_and_ends_when_told_to(server: Server) -> None:
    with urllib.request.urlopen(f"{server.address}/health", timeout=20) as answer:
        assert json.loads(answer.read()) == {"status": "ok", "running": 0, "waiting": 0}
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)
