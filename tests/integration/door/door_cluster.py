# SPDX-License-Identifier: Apache-2.0
"""For tests of the open door: real daemons with the demo model, batches as safetensors files, the oracle's answer."""
import json, os, random, shutil, signal, struct, subprocess, sys, tempfile, time

import log_lines

BUILD, SOURCE = sys.argv[1:3]
MODEL = f"{SOURCE}/deploy/demo-model/checkpoint"
EXPERTCTL = f"{BUILD}/client/cli/expertctl"
SANITIZED = any(mark in open(f"{BUILD}/server/expertd/expertd", "rb").read() for mark in (b"__asan_init", b"__tsan_init"))
HIDDEN, EXPERTS, TOP_K, LAYER = 128, 16, 2, 2


class Cluster:
    """Processes and files of one test; all are gone at the end of the with block, however it ends."""

    def __enter__(self):
        self.folder, self.processes, self.log_forms = tempfile.mkdtemp(prefix="door-"), [], {}
        return self

    def __exit__(self, kind, *_):
        for name, process in self.processes:
            process.kill()
            process.wait()
            if kind is not None:
                print(f"---- {name}\n" + open(self.path(name + ".log")).read(), file=sys.stderr)
        shutil.rmtree(self.folder)

    def path(self, name):
        return f"{self.folder}/{name}"

    def write(self, name, data, mode=0o600):
        with open(os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
        return self.path(name)

    def daemon(self, name, program, *options):
        """Starts one on free ports: its ports file, {"rpc_url": ..., "door_url": ...}."""
        addresses = {"--listen": "tcp://127.0.0.1:0", "--admin-listen": "", "--probe-address": "127.0.0.1:0", "--door-listen": "tcp://127.0.0.1:0"}
        given = {o.split("=")[0] for o in options}
        command = [program, f"--ports-file={self.path(name)}", *options, *(f"{k}={v}" for k, v in addresses.items() if k not in given)]
        with open(self.path(name + ".log"), "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={"RUNTIME_DIRECTORY": self.folder, **os.environ})
        self.processes.append((name, process))
        self.log_forms[name] = dict(o.partition("=")[::2] for o in options).get("--log-format", "journal" if "JOURNAL_STREAM" in os.environ else "text")
        wait_for(f"{name} to listen", lambda: process.poll() is not None or (os.path.exists(self.path(name)) and os.path.getsize(self.path(name))))
        assert process.poll() is None, f"{name} ended with {process.returncode}"
        return json.load(open(self.path(name)))

    def coordinator(self, *options, name="coordinator"):
        return self.daemon(name, f"{BUILD}/server/coordinator/expertd-coordinator", "--min-nodes=1", *options)

    def node(self, name, *options):
        return self.daemon(name, f"{BUILD}/server/expertd/expertd", f"--model=demo={MODEL}", f"--node-name={name}", *options)

    def log(self, name):
        """The fields of each line so far."""
        return log_lines.read(self.path(name + ".log"), self.log_forms[name])

    def stop(self):
        for name, process in reversed(self.processes):
            process.terminate()
            assert process.wait(timeout=60) == 0, f"{name} ended with {process.returncode}"
            assert SANITIZED or self.log(name), "a daemon without a line" # sanitizers write there too

    def run(self, *command, code=0):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
        assert done.returncode == code, f"{' '.join(command)}\nended with {done.returncode}: {done.stdout[:2000]!r}{done.stderr.decode()}"
        return done

    def wait_serving(self, *where):
        wait_for("the service", lambda: subprocess.run([EXPERTCTL, "status", *where], capture_output=True, timeout=120).returncode == 0)

    def make_certificates(self):
        """ca.pem, and service and caller of it: .crt, .key and both in .pem. Of 127.0.0.1."""
        openssl = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"]
        self.run(*openssl, "-subj", "/CN=ca", "-keyout", self.path("ca.key"), "-out", self.path("ca.pem"))
        for name in "service", "caller":
            self.run(*openssl, "-subj", "/CN=127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE", "-CA", self.path("ca.pem"), "-CAkey", self.path("ca.key"), "-keyout",
                     self.path(name + ".key"), "-out", self.path(name + ".crt"))
            self.write(name + ".pem", open(self.path(name + ".crt"), "rb").read() + open(self.path(name + ".key"), "rb").read())

    def batch(self, name, tokens, seed):
        """x bf16, ids i32 with an inactive slot, scales f32."""
        draw = random.Random(seed)
        x = [draw.choice((0, 0x8000)) | 0x3E80 + draw.randrange(0x180) for _ in range(tokens * HIDDEN)]
        ids = [e for _ in range(tokens) for e in draw.sample(range(EXPERTS), TOP_K)]
        ids[3] = -1
        return self.write(name, safetensors({"x": ("BF16", [tokens, HIDDEN], struct.pack(f"<{len(x)}H", *x)),
                                             "expert_ids": ("I32", [tokens, TOP_K], struct.pack(f"<{len(ids)}i", *ids)),
                                             "expert_scales": ("F32", [tokens, TOP_K], struct.pack(f"<{len(ids)}f", *(draw.random() for _ in ids)))}))

    def oracle(self, batch, *options, model=MODEL):
        self.run(f"{BUILD}/tests/reference/ref_forward", "--model", model, "--layer", str(LAYER), "--in", batch, "--out", self.path("oracle"), *options)
        return read_safetensors(self.path("oracle"))["y"]


def wait_for(what, condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def safetensors(tensors):
    entries, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def read_safetensors(path):
    """name: bytes"""
    blob = open(path, "rb").read()
    start = 8 + struct.unpack_from("<Q", blob)[0]
    entries = json.loads(blob[8:start])
    return {name: blob[start + e["data_offsets"][0] : start + e["data_offsets"][1]] for name, e in entries.items() if name != "__metadata__"}
