# SPDX-License-Identifier: Apache-2.0
"""The layer on expertd: a daemon of this machine, over shared memory. Needs expertd's package and library on their paths."""
import json, os, subprocess, time

import expertd

from layer import draw_tokens, from_bf16, windows
from timing import timed

START_SECONDS = 300


class Service:
    """The program with a checkpoint of one layer, and a prepared call of it. Methods as RivalProcess has them."""

    def __init__(self, program, checkpoint, folder, shape, tokens, threads):
        self.log_path, ports = f"{folder}/expertd.log", f"{folder}/expertd.ports"
        if os.path.exists(ports):
            os.remove(ports)
        command = [program, "--node-name=bench", f"--model=bench={checkpoint}", f"--ports-file={ports}", "--listen=tcp://127.0.0.1:0", "--admin-listen=",
                   "--probe-address=127.0.0.1:0", "--door-listen=", f"--threads={threads}"]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "RUNTIME_DIRECTORY": folder})
        try:
            self._wait(lambda: os.path.exists(ports) and os.path.getsize(ports))
            with open(ports) as file:
                url = json.load(file)["rpc_url"]
            self.client = expertd.Client(nodes=[url], wait=START_SECONDS, deadline=120)
            self._wait(lambda: self._model().layers[0].copies_min > 0)
            self.drawn = draw_tokens(shape, tokens)
            self.buffers = [values.copy() for values in self.drawn]
            self.call = self.client.prepare("bench", 0, *self.buffers, dtype="bf16", deadline=120)
            self.call.run(1)
            self.numerics = self._model().numerics
        except BaseException:
            self.close()
            raise

    def _model(self):
        (model,) = self.client.models()
        return model

    def _wait(self, condition):
        end = time.monotonic() + START_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                with open(self.log_path) as file:
                    raise RuntimeError(f"expertd {'ended' if self.process.poll() is not None else 'is not ready'}:\n{file.read()[-2000:]}")
            time.sleep(0.02)

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
        self.process.terminate()
        self.process.wait()
