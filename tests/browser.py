"""Drive a real Chromium without a display, over the pipe of its DevTools protocol: keys, sizes, colours, messages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 30.0
# The browser reads commands from descriptor 3 and writes answers to 4; a process can only place them in itself.
_LAUNCH = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The browser that RAGKV_CHROMIUM names, else the first of the usual names on the path."""
    chosen = os.environ.get("RAGKV_CHROMIUM")
    names = (chosen,) if chosen else NAMES
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """One tab, without network. Use as a context manager; `events` are the protocol's messages since `open`."""

    def __init__(self, binary: str, profile: Path) -> None:
        child_reads, self._writes = os.pipe()
        self._reads, child_writes = os.pipe()
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
        offline = "--host-resolver-rules=MAP * ~NOTFOUND"
        command = [binary, *options, offline, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(child_reads), str(child_writes), *command],
            pass_fds=(child_reads, child_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_reads)
        os.close(child_writes)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict] = []

    def __enter__(self) -> Browser:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._writes)  # the browser ends when its pipe does
        os.close(self._reads)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **parameters: object) -> dict:
        """Send one command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reads], [], [], max(deadline - time.monotonic(), 0.0))
            chunk = os.read(self._reads, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError(f"the browser said nothing for {DEADLINE_S} s, or ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, width: int, height: int = 800, dark: bool = False) -> None:
        """Load a file in a window of `width` x `height` CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + DEADLINE_S
        while not self.ask("location.href.startsWith('file:') && document.readyState === 'complete'"):
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.02)

    def ask(self, expression: str) -> object:
        """The value of a JavaScript expression in the page, which the page's own policy does not hinder."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self) -> bytes:
        """The whole page, not only the window, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])
