# SPDX-License-Identifier: Apache-2.0
"""A rival's process (worker.py), stopped whenever it is not asked."""
import json, os, signal, subprocess, tempfile

import numpy as np


class RivalProcess:
    """what: its name and version; missing: why it is not there, None while it is. A context manager."""

    def __init__(self, python, worker, job):
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "PYTHONWARNINGS": "ignore"}
        self.said = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen([python, worker, json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True,
                                        env=environment)
        self.missing = None
        self.what = self._answer().get("what")

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.said.seek(0)
            last = self.said.read().strip().splitlines()[-1:]
            answer = dict(missing=": ".join([f"ended with {code}", *last]))
        else:
            answer = json.loads(line)
        self.missing = answer.get("missing")
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)
        return answer

    def ask(self, **command):
        """The answer; missing says why there is none."""
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except OSError:  # it is gone; its answer says why
            pass
        return self._answer()

    def run(self, tokens):
        """Median milliseconds; None: missing says why."""
        return None if self.missing else self.ask(tokens=tokens).get("ms")

    def result(self, tokens, path):
        """float32 of the first tokens, None: missing says why."""
        self.ask(tokens=tokens, result=path)
        return None if self.missing else np.fromfile(path, np.float32)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for stream in self.process.stdin, self.process.stdout, self.said:
            stream.close()
