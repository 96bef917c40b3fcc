"""A real browser: headless Chromium, driven over a pipe by the DevTools protocol."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "about:blank")
SHIFTS = """new Promise(done => {
    let sum = 0;
    new PerformanceObserver(list => list.getEntries().forEach(entry => sum += entry.value))
        .observe({type: "layout-shift", buffered: true});
    setTimeout(() => done(sum), 100);
})"""


class Page:
    """A tab of the browser.

    Attributes:
        events: what the browser has sent, by name of the event.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = os.fdopen(requests, "wb"), os.fdopen(answers, "rb")
        self._sent, self._session, self._read = 0, "", b""
        self.events: dict[str, list[dict[str, Any]]] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._requests.write(json.dumps(message).encode() + b"\0")
        self._requests.flush()
        while (answer := self._next()).get("id") != self._sent:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            chunk = os.read(self._answers.fileno(), 1 << 16)
            assert chunk, "the browser has ended"
            self._read += chunk
        text, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.setdefault(message["method"], []).append(message["params"])
        return message

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Load a file in a window of `width` pixels, `scheme` light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + 60
        while "Page.loadEventFired" not in self.events:
            assert time.monotonic() < deadline
            self._next()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which is JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def problems(self) -> list[Any]:
        """Lines of the console, and exceptions, since the page was opened."""
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
        return [event for name in names for event in self.events.get(name, [])]

    def requests(self) -> list[str]:
        """Addresses that were loaded, without those that are in the page itself."""
        urls = [str(event["request"]["url"]) for event in self.events.get("Network.requestWillBeSent", [])]
        return [url for url in urls if not url.startswith("data:")]

    def close(self) -> None:
        """Close the pipes, which ends the browser."""
        with contextlib.suppress(OSError):
            self._requests.close()
        self._answers.close()


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """A tab of a new browser, whose files are in `profile`. Skips the test where no browser is installed."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    (child_in, requests), (answers, child_out) = os.pipe(), os.pipe()
    words = [program, f"--user-data-dir={profile}", *FLAGS]
    redirected = f'exec "$@" 3<&{child_in} 4>&{child_out}'  # the numbers that the protocol says
    process = subprocess.Popen(
        ["bash", "-c", redirected, "bash", *words], pass_fds=(child_in, child_out), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(child_in)
    os.close(child_out)
    try:
        page = Page(requests, answers)
        try:
            yield page
        finally:
            page.close()
        process.wait(30)
    finally:
        process.kill()
        process.wait()
