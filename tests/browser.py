"""A headless Chromium for tests, driven through its DevTools protocol over pipes: no package is needed beside the browser.

The browser is the one that $CHROME names, a Chromium or Chrome on PATH, or the one that `playwright install chromium` has
put in its cache. Where there is none, tests that need it are skipped with a reason that says what to install: `make test`
cannot install a browser (that takes a package manager and root, or a download of 150 MB), and everything else about a
page is tested without one.
"""

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
PLAYWRIGHT = (
    "chromium-*/chrome-linux*/chrome",
    "chromium_headless_shell-*/*/*headless*shell",
    "chromium-*/*/*/*/Chromium",
)
TIMEOUT_SECONDS = 60.0
HOW_TO_GET_ONE = (
    "no Chromium was found, so the page was not opened: install one (`apt install chromium`, or `pip install playwright` and "
    "`playwright install chromium`), or name yours in $CHROME"
)

LAUNCH = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3])  # out of the way of 3 and 4
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """Path of a Chromium; None where there is none."""
    if named := os.environ.get("CHROME"):
        return shutil.which(named)
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    return next((str(path) for pattern in PLAYWRIGHT for path in sorted(cache.glob(pattern))), None)


class Page:
    """One page in the browser.

    Attributes:
        problems: errors in the console, exceptions, and whatever else the browser logged as an error.
        requests: every address that the page asked for.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._ids = itertools.count(1)
        self._left = b""
        self._loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self._call("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._take(self._message())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page's JavaScript."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def move_mouse(self, selector: str) -> None:
        """Rest the mouse on the middle of the first element that matches."""
        element = f"document.querySelector({selector!r})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # has scrolled
        box = self.evaluate(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])({element}.getBoundingClientRect())"
        )
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def prefer(self, scheme: str) -> None:
        """Ask for the light or the dark colours."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._take(answer)

    def _message(self) -> Any:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self._left:
            if not select.select([self._read], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError("the browser does not answer")
            self._left += os.read(self._read, 1 << 16)
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def _take(self, event: Any) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif (
            method == "Runtime.exceptionThrown"
            or (method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"))
            or (method == "Log.entryAdded" and about["entry"]["level"] == "error")
        ):
            self.problems.append(json.dumps(about))


@contextmanager
def open_browser(executable: str, profile: Path) -> Iterator[Page]:
    """Start a browser with one empty page; it ends with the context.

    Args:
        executable: from `find_browser`.
        profile: an empty folder for what the browser writes.
    """
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    arguments = [
        executable,
        "--headless",
        "--disable-gpu",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--window-size=1280,900",
        f"--user-data-dir={profile}",
        "--remote-debugging-pipe",  # commands come on descriptor 3, answers go to 4
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    ends = (to_browser, from_browser)
    command = [sys.executable, "-c", LAUNCH, *map(str, ends), *arguments]
    with open(profile / "log", "wb") as log:
        process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(from_us, to_us)
    finally:
        process.kill()
        process.wait(10)
        os.close(from_us)
        os.close(to_us)
