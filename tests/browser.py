"""A headless Chromium, driven by the WebDriver protocol (W3C) of Debian's chromium-driver."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Chromium and its driver by the names that distributions give them.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
# The protocol's name of a reference to an element.
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"tab": "\ue004", "right": "\ue014", "left": "\ue012", "space": " "}
START_SECONDS = 60
SCRIPT_SECONDS = 240


def missing() -> str | None:
    """Says which program is not installed; None if all are."""
    if not any(map(shutil.which, BROWSERS)):
        return f"no Chromium is installed: none of {', '.join(BROWSERS)}"
    return None if shutil.which(DRIVER) else f"{DRIVER} is not installed"


class Browser:
    """One window.

    Attributes:
      session: the address of its WebDriver session.
    """

    def __init__(self, session: str):
        self.session = session

    def command(self, path: str, **arguments: Any) -> Any:
        """Sends a command of the protocol and returns its value."""
        return call(f"{self.session}/{path}", arguments)

    def open(self, page: Path) -> None:
        """Opens a file as a double click does."""
        self.command("url", url=page.resolve().as_uri())

    def resize(self, width: int, height: int) -> None:
        """Makes the page ``width`` by ``height`` pixels, as a screen of that size shows it."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Prefers ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def devtools(self, command: str, params: dict[str, Any]) -> Any:
        """Sends a command of Chromium's own protocol."""
        return self.command("goog/cdp/execute", cmd=command, params=params)

    def run(self, script: str, *arguments: Any) -> Any:
        """Returns what the body of a JavaScript function returns."""
        return self.command("execute/sync", script=script, args=arguments)

    def press(self, *keys: str) -> None:
        """Presses keys one after the other: names of ``KEYS``, or characters."""
        pressed = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        self.command("actions", actions=[{"type": "key", "id": "keyboard", "actions": pressed}])

    def type_into(self, selector: str, text: str) -> None:
        """Replaces what stands in a field."""
        found = self.command("element", using="css selector", value=selector)[ELEMENT]
        self.command(f"element/{found}/clear")
        if text:
            self.command(f"element/{found}/value", text=text)

    def text(self, selector: str) -> str:
        """Returns the visible text of an element."""
        return self.run("return document.querySelector(arguments[0]).innerText", selector)


@contextlib.contextmanager
def browser(log: Path) -> Iterator[Browser]:
    """Opens a window and closes it in the end; what the driver says goes into the file ``log``."""
    name = next(filter(None, map(shutil.which, BROWSERS)))
    with open(log, "wb") as file:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=file, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{_port(log, driver)}/session"
        # In containers processes are root's, who gets no sandbox, and /dev/shm is small.
        arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        chrome = {"binary": name, "args": arguments}
        timeouts = {"script": 1000 * SCRIPT_SECONDS}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": chrome, "timeouts": timeouts}}
        made = call(address, {"capabilities": capabilities})
        session = f"{address}/{made['sessionId']}"
        try:
            yield Browser(session)
        finally:
            call(session, None, method="DELETE")
    finally:
        driver.terminate()
        driver.wait()


def call(address: str, arguments: Any, method: str = "POST") -> Any:
    """Sends one request to the driver; RuntimeError with its message if it fails."""
    data = None if arguments is None else json.dumps(arguments).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    request.method = method
    try:
        with urllib.request.urlopen(request, timeout=SCRIPT_SECONDS + 60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from None


def _port(log: Path, driver: subprocess.Popen) -> str:
    """The port that the driver says it listens on."""
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends and driver.poll() is None:
        _, found, port = log.read_text().partition("started successfully on port ")
        if found and "." in port:
            return port.split(".")[0]
        time.sleep(0.05)
    raise RuntimeError(f"{DRIVER} did not start: {log.read_text()}")
