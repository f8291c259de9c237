"""A headless Chromium, driven over the WebDriver protocol with nothing but the standard library.

Needs Debian's packages chromium and chromium-driver, or any Chromium or Chrome with its chromedriver on the path.
"""

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import urllib.request
from pathlib import Path

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that WebDriver gives elements
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars",
)  # fmt: skip
KEYS = {
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "Left": "\ue012",
    "Up": "\ue013",
    "Right": "\ue014",
    "Down": "\ue015",
    "Tab": "\ue004",
}


def missing():
    """Why there is no browser to test with; None if there is one."""
    if not any(map(shutil.which, _BROWSERS)):
        return "there is no chromium; `make test-report` installs it"
    if shutil.which("chromedriver") is None:
        return "there is no chromedriver (Debian's package chromium-driver); `make test-report` installs it"
    return None


class Browser:
    """Context manager: one window. Everything but `open` is about the page in it."""

    def __enter__(self):
        self._directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._log = open(Path(self._directory.name) / "driver.log", "w+")  # closed in __exit__
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        for line in self._driver.stdout:  # it says so when it listens
            if "started successfully" in line:
                break
        self._address, self._session = f"http://127.0.0.1:{port}", ""
        options = {
            "binary": next(filter(None, map(shutil.which, _BROWSERS))),
            "args": [*_FLAGS, f"--user-data-dir={self._directory.name}/profile"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}, "browserName": "chrome"}
        try:
            found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self.__exit__()
            raise
        self._session = f"/session/{found['sessionId']}"
        return self

    def __exit__(self, *_):
        if self._session:
            self._call("DELETE", "", {})
        self._driver.terminate()
        self._driver.wait()
        self._driver.stdout.close()
        self._log.close()
        self._directory.cleanup()

    def _call(self, method, path, content=None):
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._address + self._session + path, body, method=method)
        request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by a proxy: it is this machine
        try:
            with opener.open(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def devtools(self, command, **parameters):
        """A command of Chromium's own protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    # ---- the page ------------------------------------------------------------------------------------------------

    def look_like(self, width=1280, height=900, scheme="light", phone=False, scale=1):
        """The size of the window, and whether the reader prefers light or dark pages."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def scripts(self, on):
        """Switch JavaScript on or off, for pages that are opened next."""
        self.devtools("Emulation.setScriptExecutionDisabled", value=not on)

    def open(self, path):
        self._call("POST", "/url", {"url": Path(path).absolute().as_uri()})

    def run(self, script, *arguments):
        """The value that a script returns; its arguments are ``arguments[0]``, and so on."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, selector):
        return self._call("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]

    def click(self, selector):
        self._call("POST", f"/element/{self.find(selector)}/click", {})

    def press(self, selector, *keys):
        """Press keys in an element, which gets the focus."""
        text = "".join(KEYS.get(key, key) for key in keys)
        self._call("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def text(self, selector):
        return self._call("GET", f"/element/{self.find(selector)}/text")

    def complaints(self):
        """Errors and warnings of the console since the last call, among them everything that the page tried to load."""
        found = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path, whole=False):
        found = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def _clip(self, whole):
        if not whole:
            return {}
        size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def print(self, path):
        """Print to a PDF."""
        Path(path).write_bytes(base64.b64decode(self._call("POST", "/print", {"background": True})))
