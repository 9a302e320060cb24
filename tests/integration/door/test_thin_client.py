#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/examples/thin_client.py as written, with pynng from the package index: the oracle's bits, and readable words when it is refused."""
import json, os, struct, subprocess, sys

from door_cluster import LAYER, SOURCE, Cluster

TOKENS = 5


def python_with_pynng(c):
    """A virtual environment's Python, which the package index must give."""
    venv = c.path("venv")
    for command in ([sys.executable, "-m", "venv", "--without-pip", venv],  # its own pip would take longer than all the rest
                    [sys.executable, "-m", "pip", "--python", f"{venv}/bin/python", "install", "--quiet", "--disable-pip-version-check", "--retries", "1",
                     "--timeout", "20", "pynng"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{' '.join(command)}: {(done.stdout + done.stderr).strip()[-400:]}"
    return f"{venv}/bin/python"


def thin_client(c, python, door, model, batch, token, code=0):
    environment = dict(os.environ, EXPERTD_TOKEN=token)
    command = [python, f"{SOURCE}/deploy/examples/thin_client.py", door, model, str(LAYER), batch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done
    return done


def main():
    with Cluster() as c:
        python = python_with_pynng(c)
        token = c.write("token", b"token-of-clients-1\n")
        nodes = c.write("nodes", b"token-of-nodes----1\n")
        coordinator = c.coordinator(f"--token-file={token}", f"--node-token-file={nodes}")
        c.node("a", f"--coordinator-url={coordinator['rpc_url']}", f"--token-file={token}", f"--node-token-file={nodes}")
        c.wait_serving("--coordinator", coordinator["rpc_url"], "--token-file", token)
        batch = c.batch("batch", TOKENS, 9)
        done = thin_client(c, python, coordinator["door_url"], "demo", batch, "token-of-clients-1")
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        y = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
        assert len(rows) == TOKENS and y == c.oracle(batch, "--out-dtype", "f32"), "other bits"
        done = thin_client(c, python, coordinator["door_url"], "demo", batch, "", code=1)
        assert "gRPC code 16: " in done.stderr and "token" in done.stderr, done
        done = thin_client(c, python, coordinator["door_url"], "other", batch, "token-of-clients-1", code=1)
        assert "gRPC code" in done.stderr and "other" in done.stderr, done
        c.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
