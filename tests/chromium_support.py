"""Headless Chromium, driven through its debugging pipe."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE, WAIT_LIMIT_SECONDS

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)

CHROMIUM_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)

LAUNCHER = """
import os, sys
read_descriptor, write_descriptor = (os.dup(int(argument)) for argument in sys.argv[1:3])
for descriptor, number in ((read_descriptor, 3), (write_descriptor, 4)):
    os.dup2(descriptor, number)
    os.set_inheritable(number, True)  # dup2 does nothing if both are equal
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Program that moves two descriptors to 3 and 4, where the browser expects its pipe, and executes the browser."""

needs_chromium = pytest.mark.skipif(
    not CHROMIUM and not os.environ.get("CI"), reason="needs a browser: apt-get install chromium"
)


class Browser:
    """Connection to a browser through its debugging pipe."""

    def __init__(self, write_descriptor: int, read_descriptor: int) -> None:
        self._write_descriptor, self._read_descriptor = write_descriptor, read_descriptor
        self._message_id = 0
        self._buffer = b""

    def call(self, method: str, session: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a command. Return the messages up to the response: events, and the response as the last message."""
        self._message_id += 1
        message: dict[str, object] = {"id": self._message_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write_descriptor, json.dumps(message).encode() + b"\0")
        messages = [self._read()]
        while messages[-1].get("id") != self._message_id:
            messages.append(self._read())
        assert "error" not in messages[-1], messages[-1]
        return messages

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read_descriptor, 1 << 16)
            assert chunk, "the browser ended"
            self._buffer += chunk
        encoded_message, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(encoded_message)
        return message


class Tab:
    """Tab of the browser.

    Attributes:
        complaints: Script errors, and entries of the browser's log, such as violations of the content security policy.
        requests: Requested addresses, in order.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._session = ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command to the browser and return its result."""
        *events, response = self._browser.call(method, self._session, parameters)
        for event in events:
            if event.get("sessionId") == self._session:
                self._handle(event.get("method", ""), event["params"])
        return response["result"]  # type: ignore[no-any-return]  # JSON

    def _handle(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def close(self) -> None:
        """Close the tab."""
        self.call("Target.closeTarget", targetId=self._target)

    def open(self, url: str, *, script: bool = True) -> None:
        """Open an address, by default with scripts, and wait until the page is loaded."""
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def resize(self, width: int, height: int) -> None:
        """Emulate a screen of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def value(self, expression: str) -> Any:  # the type depends on the expression
        """Evaluate JavaScript in the page, even if scripts are disabled in the page, and return the value."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def text(self) -> str:
        """Return the visible text of the page."""
        return str(self.value("document.body.innerText"))

    def wait_for(self, expression: str, seconds: float = 15.0) -> None:
        """Wait until an expression is true in the page. Fail the test after *seconds* times `PATIENCE`, at least `WAIT_LIMIT_SECONDS`."""
        deadline = time.monotonic() + max(PATIENCE * seconds, WAIT_LIMIT_SECONDS)
        while not self.value(expression):
            assert time.monotonic() < deadline, (
                f"{expression} did not become true; the text of the page is {self.text()[:2000]}"
            )
            time.sleep(0.1)


@contextlib.contextmanager
def chromium(directory: Path) -> Iterator[Browser]:
    """Run a browser that can only connect to 127.0.0.1."""
    to_browser, from_browser = os.pipe(), os.pipe()
    browser_command = [CHROMIUM, *CHROMIUM_FLAGS, f"--user-data-dir={directory / 'browser'}"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(to_browser[0]), str(from_browser[1]), *browser_command],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(WAIT_LIMIT_SECONDS)
        os.close(to_browser[1])
        os.close(from_browser[0])
