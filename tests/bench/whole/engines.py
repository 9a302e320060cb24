# SPDX-License-Identifier: Apache-2.0
"""Engines that hold a whole model, each in processes of its own. What they share: what (name and version), missing (why it is not there; None while it is),
generate(prompts, new) -> {"stamps": [[seconds of each token] of each prompt], "tokens"}, and close."""
import concurrent.futures, http.client, json, os, socket, subprocess, time

from process import RivalProcess
from service import Daemon

HERE = os.path.dirname(os.path.abspath(__file__))
START_SECONDS = 900


class Transformers:
    """served: with its experts on an expertd of this machine, which has a coordinator; else all in one process. dense: what all else is computed in."""

    def __init__(self, python, build, source, folder, work, model, threads, served, dense):
        self.daemons, self.worker = [], None
        url = None
        try:
            if served:
                coordinator = Daemon(f"{build}/server/coordinator/expertd-coordinator", work, "--min-nodes=1")
                self.daemons.append(coordinator)
                url = coordinator.url
                self.daemons.append(Daemon(f"{build}/server/expertd/expertd", work, "--node-name=bench", f"--coordinator-url={url}", f"--model=bench={folder}/bf16",
                                           f"--threads={threads}"))
            job = dict(folder=folder, url=url, threads=threads, model=vars(model), dense=dense)
            os.environ["PYTHONPATH"] = os.pathsep.join([f"{source}/client/python", f"{HERE}/../rivals"])
            self.worker = RivalProcess(python, f"{HERE}/transformers_worker.py", job)
        except BaseException:
            self.close()
            raise
        self.what = self.worker.what

    @property
    def missing(self):
        return self.worker.missing

    def generate(self, prompts, new, **more):
        return self.worker.ask(prompts=prompts, new=new, **more)

    def close(self):
        if self.worker is not None:
            self.worker.__exit__()
        for daemon in reversed(self.daemons):
            daemon.close()


class _Connection(http.client.HTTPConnection):
    """Over a Unix socket."""

    def __init__(self, path, timeout=START_SECONDS):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class LlamaServer:
    """llama.cpp's own server, as its users start it, with room for so many sequences at once."""

    missing = None

    def __init__(self, program, path, work, context, sequences, threads):
        self.socket, self.log_path = f"{work}/llama.sock", f"{work}/llama-server.log"
        if os.path.exists(self.socket):
            os.remove(self.socket)
        command = [program, "--model", path, "--host", self.socket, "--ctx-size", str(context), "--kv-unified", "--parallel", str(sequences), "--threads", str(threads),
                   "--no-webui", "--offline"]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + START_SECONDS
            while self.missing is None and not self._answers():
                if self.process.poll() is not None or time.monotonic() > end:
                    self.missing = self._last_words()
                time.sleep(0.05)
            self.what = self._version(program)
        except BaseException:
            self.close()
            raise

    def _version(self, program):
        said = subprocess.run([program, "--version"], capture_output=True, text=True)
        return "llama.cpp " + (said.stdout + said.stderr).strip().splitlines()[0].removeprefix("version: ")

    def _last_words(self):
        with open(self.log_path, errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        wrong = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
        return f"ended with {self.process.poll()}: " + (wrong[:1] or lines[-1:] or ["it says nothing"])[0]

    def _answers(self):
        try:
            connection = _Connection(self.socket, 5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _stream(self, prompt, new):
        """(stamps, tokens)"""
        connection, stamps, tokens = _Connection(self.socket), [], []
        try:
            connection.request("POST", "/completion", json.dumps(dict(prompt=prompt, n_predict=new, temperature=0, ignore_eos=True, cache_prompt=False, stream=True,
                                                                      return_tokens=True)), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read(300)!r}")
            line = b""
            for line in filter(bytes.strip, answer):
                if line.startswith(b"data: {"):
                    found = json.loads(line[6:]).get("tokens", [])
                    tokens += found
                    stamps += [time.monotonic()] * len(found)
            if len(tokens) != new:
                raise RuntimeError(f"{len(tokens)} of {new} tokens came: {line[:200]!r}")
        finally:
            connection.close()
        return stamps, tokens

    def generate(self, prompts, new):
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            try:
                found = list(pool.map(lambda prompt: self._stream(prompt, new), prompts))
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                self.missing = f"{type(error).__name__}: {error}"
                return {}
        return dict(stamps=[stamps for stamps, _ in found], tokens=[tokens for _, tokens in found])

    def close(self):
        self.process.terminate()
        self.process.wait()
