#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package as users have it: its C table held to the headers, the wheel built and installed into a fresh environment, the manual's first call,
cases.py there against a coordinator and two nodes, and group_cases.py."""
import os, re, shutil, subprocess, sys, zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + "/../door")
from door_cluster import BUILD, SOURCE, Cluster

PYTHON = "/usr/bin/python3"  # Debian's, which has Debian's NumPy


def make_environment(c):
    """A fresh environment with the wheel, and NumPy from Debian."""
    tree, wheels, venv = c.path("tree"), c.path("wheels"), c.path("venv")
    shutil.copytree(f"{SOURCE}/client/python", tree, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))  # a build writes into its tree
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check"]
    c.run(*pip, "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", wheels, tree)
    (wheel,) = os.listdir(wheels)
    assert wheel == "expertd-0.1.0-py3-none-any.whl", wheel
    modules = {f"expertd/{name}" for name in os.listdir(f"{SOURCE}/client/python/expertd") if name.endswith((".py", "py.typed"))} | {"expertd_engines.py"}
    packed = {name for name in zipfile.ZipFile(f"{wheels}/{wheel}").namelist() if ".dist-info/" not in name}
    assert packed == modules, packed ^ modules
    c.run(PYTHON, "-m", "venv", "--without-pip", "--system-site-packages", venv)
    c.run(*pip, "--python", f"{venv}/bin/python", "install", "--quiet", "--no-index", "--no-deps", f"{wheels}/{wheel}")
    return f"{venv}/bin/python"


def check_c_table(c, python):
    """Fields, sizes, offsets and numbers of _c.py as the headers and the compiler have them."""
    c.run(python, f"{HERE}/c_table.py", "fields", f"{SOURCE}/lib/include")
    source = c.run(python, f"{HERE}/c_table.py", "c").stdout
    c.run("cc", "-I", f"{SOURCE}/lib/include", "-o", c.path("table"), c.write("table.c", source))
    said, wanted = c.run(python, f"{HERE}/c_table.py", "python").stdout, c.run(c.path("table")).stdout
    assert said == wanted and said.count(b"\n") > 150, "\n".join(set(said.decode().split("\n")) ^ set(wanted.decode().split("\n")))


def check_manual(c, python, url):
    """The first call of the manual, and its group, as they stand there."""
    call, group = re.findall(r"```python\n(.*?)```", open(f"{SOURCE}/deploy/manual/python.md").read(), re.S)[:2]
    assert "tcp://127.0.0.1:7410" in call and "tcp://127.0.0.1:7500" in group
    said = c.run(python, "-c", call.replace("tcp://127.0.0.1:7410", url)).stdout
    assert said == b"(4, 128) float32\n", said
    said = c.run(python, "-c", group.replace("tcp://127.0.0.1:7500", "tcp://127.0.0.1:0"), "0", "1").stdout
    assert said == b"0 True\n", said


def run_cases(python, program="cases.py", **environment):
    environment = {"TEST_TOKEN": "token-of-clients-1", "TEST_NODES": "", **os.environ, **environment}
    done = subprocess.run([python, "-X", "faulthandler", f"{HERE}/{program}", BUILD, SOURCE], env=environment, timeout=280)
    assert done.returncode == 0, f"{program} ended with {done.returncode}"


def check_tls(c, python, token):
    c.make_certificates()
    tls = [f"--tls-ca-file={c.path('ca.pem')}", f"--tls-cert-key-file={c.path('service.pem')}", "--tls-server-name=127.0.0.1", f"--token-file={token}",
           "--listen=tls+tcp://127.0.0.1:0"]
    url = c.coordinator(*tls, name="private")["rpc_url"]
    c.node("c", f"--coordinator-url={url}", *tls)
    c.wait_serving("--coordinator", url, "--tls-ca", c.path("ca.pem"), "--tls-server-name", "127.0.0.1", "--token-file", token)
    run_cases(python, TEST_URL=url, TEST_CA=c.path("ca.pem"))


def main():
    os.environ["LD_LIBRARY_PATH"] = f"{BUILD}/client"
    with Cluster() as c:
        python = make_environment(c)
        check_c_table(c, python)
        token = c.write("token", b"token-of-clients-1\n")
        nodes = c.write("nodes", b"token-of-nodes----1\n")
        tokens = f"--token-file={token}", f"--node-token-file={nodes}"
        url = c.coordinator("--copies=2", "--min-nodes=2", *tokens)["rpc_url"]
        for name in "a", "b":
            c.node(name, f"--coordinator-url={url}", *tokens)
        c.wait_serving("--coordinator", url, "--token-file", token)
        run_cases(python, TEST_URL=url, TEST_NODES=" ".join(str(p.pid) for n, p in c.processes if n in "ab"))
        check_tls(c, python, token)
        run_cases(python, "group_cases.py", TEST_URL="", TEST_CA=c.path("ca.pem"))
    with Cluster() as c:
        url = c.coordinator()["rpc_url"]
        c.node("a", f"--coordinator-url={url}")
        c.wait_serving("--coordinator", url)
        check_manual(c, make_environment(c), url)
        c.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
