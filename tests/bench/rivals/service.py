# SPDX-License-Identifier: Apache-2.0
"""The layer on expertd: a daemon of this machine, over shared memory. Needs expertd's package and library on their paths."""
import json, os, subprocess, time

import expertd

from layer import draw_tokens, from_bf16, windows
from timing import timed

START_SECONDS = 300


class Daemon:
    """A program of expertd on ports of its own. url: where it is called."""

    def __init__(self, program, folder, *options):
        name = os.path.basename(program)
        self.log_path, ports = f"{folder}/{name}.log", f"{folder}/{name}.ports"
        if os.path.exists(ports):
            os.remove(ports)
        command = [program, f"--ports-file={ports}", "--listen=tcp://127.0.0.1:0", "--admin-listen=", "--probe-address=127.0.0.1:0", "--door-listen=", *options]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "RUNTIME_DIRECTORY": folder})
        try:
            self.wait(lambda: os.path.exists(ports) and os.path.getsize(ports))
            with open(ports) as file:
                self.url = json.load(file)["rpc_url"]
        except BaseException:
            self.close()
            raise

    def wait(self, condition):
        end = time.monotonic() + START_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                with open(self.log_path) as file:
                    raise RuntimeError(f"expertd {'ended' if self.process.poll() is not None else 'is not ready'}:\n{file.read()[-2000:]}")
            time.sleep(0.02)

    def close(self):
        self.process.terminate()
        self.process.wait()


class Service(Daemon):
    """The node with a checkpoint, and a prepared call of one layer of it. Methods as RivalProcess has them."""

    def __init__(self, program, checkpoint, folder, shape, tokens, threads, layer=0):
        super().__init__(program, folder, "--node-name=bench", f"--model=bench={checkpoint}", f"--threads={threads}")
        try:
            self.client = expertd.Client(nodes=[self.url], wait=START_SECONDS, deadline=120)
            self.wait(lambda: self._model().layers[layer].copies_min > 0)
            self.drawn = draw_tokens(shape, tokens)
            self.buffers = [values.copy() for values in self.drawn]
            self.call = self.client.prepare("bench", layer, *self.buffers, dtype="bf16", deadline=120)
            self.call.run(1)
            self.numerics = self._model().numerics
        except BaseException:
            self.close()
            raise

    def _model(self):
        (model,) = self.client.models()
        return model

    def run(self, tokens):
        """Median milliseconds of calls with so many tokens."""
        return timed(self.passes(tokens))

    def passes(self, tokens):
        """A prepared call has fixed buffers: what a pass is of is copied there."""
        places = windows(tokens, len(self.drawn[0]))

        def compute():
            at = next(places)
            for buffer, values in zip(self.buffers, self.drawn):
                buffer[:tokens] = values[at]
            return self.call.run(tokens)

        return compute

    def result(self, tokens):
        return from_bf16(self.passes(tokens)()[:tokens])

    def close(self):
        if hasattr(self, "client"):
            self.client.close()
        super().close()
