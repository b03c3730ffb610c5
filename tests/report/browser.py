"""A headless Chromium, driven over a pipe: open a page, ask it things, hear what it complains about."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)
# The browser reads commands from descriptor 3 and writes answers to 4, whatever numbers the pipes have here.
_START = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 100); os.dup2(w, 101); os.dup2(100, 3);"
    "os.dup2(101, 4); os.closerange(5, 200); os.execvp(sys.argv[3], sys.argv[3:])"
)
_WAIT = 60.0


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="fedshift-browser-")
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        start = (sys.executable, "-c", _START, str(commands), str(answers))
        self._process = subprocess.Popen(
            [*start, program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """Ends the process that was started here, and no other."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        os.write(self._commands, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + _WAIT
        while (answer := self._receive(deadline)).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def listen(self, seconds: float = 0.05) -> None:
        """Takes in events for a moment."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.events.append(self._receive(deadline))
            except TimeoutError:
                return

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise TimeoutError("the browser has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str, width: int = 1160, height: int = 900, *, dark: bool = False) -> Page:
        return Page(self, url, width, height, dark)


class Page:
    """A tab. `complaints` are console errors, exceptions, blocked loads and dialogs."""

    def __init__(self, browser: Browser, url: str, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        browser.events.clear()
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self._call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def ask(self, expression: str) -> Any:
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str, seconds: float = _WAIT) -> None:
        deadline = time.monotonic() + seconds
        while not self.ask(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.05)

    def choose(self, selector: str, file: Path) -> None:
        """Gives a file to a file field, as somebody who clicks on it does."""
        root = self._call("DOM.getDocument")["root"]["nodeId"]
        field = self._call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._call("DOM.setFileInputFiles", nodeId=field, files=[str(file)])

    def picture(self, path: Path) -> None:
        """A screenshot of the whole page, to look at."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def complaints(self) -> list[str]:
        self._browser.listen()
        found = []
        for event in self._browser.events:
            method, params = event.get("method"), event.get("params", {})
            is_error = (
                (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"))
                or (method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"))
                or method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening")
            )
            found += [json.dumps(params)[:400]] if is_error else []
        return found

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)
