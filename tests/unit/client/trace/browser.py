# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over its DevTools pipe (messages end with a NUL byte)."""
import base64, json, os, select, subprocess, time

PATIENCE_S = 60
KEYS = {"Escape": 27, "Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "End": 35, "Home": 36, "PageDown": 34}


class Browser:
    """In a profile of its own below folder. Everything that went wrong in a page is in errors; so is a URL that does not begin as one of origins."""

    def __init__(self, program, folder, width=1280, height=800, origins=("file:",)):
        self.origins = (*origins, "about:")
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()
        spare = [os.dup(theirs_read), os.dup(theirs_write)]  # above 4, so that neither is overwritten below
        while min(spare) < 5:
            spare = [os.dup(fd) for fd in spare]

        def place():
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        self.log = open(f"{folder}/chromium.log", "wb")
        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
             f"--window-size={width},{height}", "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, close_fds=False, preexec_fn=place)
        for fd in (theirs_read, theirs_write, *spare):
            os.close(fd)
        self.read_end, self.write_end, self.buffer, self.number, self.errors, self.session = ours_read, ours_write, b"", 0, [], None
        try:
            self.tab(width, height)
        except BaseException:
            self.close()
            raise

    def tab(self, width=1280, height=800):
        """A new one, which all that follows is about; returns the one before, for show. Both go on."""
        before, self.session = self.session, None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.size(width, height)
        return before

    def show(self, session):
        self.session = session
        self.ask("Page.bringToFront")

    def message(self):
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no word from the browser within {PATIENCE_S} s"
            some = os.read(self.read_end, 1 << 16)
            assert some, "the browser ended"
            self.buffer += some
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def ask(self, method, **params):
        self.number += 1
        request = {"id": self.number, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        data = json.dumps(request).encode() + b"\0"
        while data:
            data = data[os.write(self.write_end, data):]
        while True:
            said = self.message()
            if said.get("id") == self.number:
                assert "error" not in said, (method, params, said["error"])
                return said["result"]
            if said.get("method") == "Runtime.exceptionThrown" or (said.get("method") == "Log.entryAdded" and
                                                                   said["params"]["entry"]["level"] == "error"):
                self.errors.append(json.dumps(said["params"])[:2000])
            elif said.get("method") == "Network.requestWillBeSent" and not said["params"]["request"]["url"].startswith(self.origins):
                self.errors.append("asks the network for " + said["params"]["request"]["url"])

    def run(self, script):
        """The value of an expression in the page."""
        said = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, (script, said["exceptionDetails"])
        return said["result"].get("value")

    def wait(self, condition):
        end = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            assert time.monotonic() < end, f"waited {PATIENCE_S} s for {condition}; {self.errors}"
            time.sleep(0.02)

    def open(self, url):
        self.ask("Page.navigate", url="about:blank")  # a new document also where only the part behind '#' differs
        self.ask("Page.navigate", url=url)
        self.wait("document.getElementById('report') !== null && document.getElementById('report').dataset.ready === '1'")

    def size(self, width, height):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, on):
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}])

    def click(self, selector):
        """A click of the mouse near the left end of what is there, for long texts are cut; scrolled to if need be."""
        x, y = self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}}); "
                        "const r = e.getBoundingClientRect(); return [r.x + Math.min(r.width, 40) / 2, r.y + r.height / 2]; })()")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" else "left", clickCount=1)

    def press(self, key):
        text = {} if key in KEYS else {"text": key}
        if key == "Enter":
            text = {"text": "\r"}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key if key in KEYS else "",
                     windowsVirtualKeyCode=KEYS.get(key, ord(key[0].upper())), **(text if kind == "keyDown" else {}))

    def picture(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for fd in (self.read_end, self.write_end):
            os.close(fd)
        self.log.close()
