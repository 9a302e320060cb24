#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the probes come from: installed programs load the library of their own prefix, a program linked to libexpertd.so is recorded
when the library is preloaded, and prepared calls allocate nothing while a session records them."""
import glob, os

from recording import ARGUMENTS, BUILD, MODEL, mapped, match, run_test, wait_for

CMAKE, CLIENT, ALLOCATIONS, SANITIZED = ARGUMENTS[2:6]
CALLS = 20
CANCELLED = 1


def one(pattern):
    found = glob.glob(pattern, recursive=True)
    assert len(found) == 1, (pattern, found)
    return found[0]


def installed(cluster, folder):
    """The node of the installed prefix; what it maps is the installed library."""
    prefix = f"{folder}/prefix"
    cluster.run(CMAKE, "--install", BUILD, "--prefix", prefix)
    library = one(f"{prefix}/**/libexpertd-trace.so.0")
    node, url = cluster.daemon("node", one(f"{prefix}/**/bin/expertd"), "--node-name", "installed", "--model", f"demo={MODEL}")
    wait_for("the installed library", lambda: mapped(node.pid, os.path.realpath(library)))
    cluster.wait_registered(1)
    return prefix, url, library


def check_installed(cluster, prefix, url):
    cluster.record("installed")
    cluster.run(one(f"{prefix}/**/bin/expertctl"), "generate", "--node", url, "--checkpoint", MODEL, "--model", "demo", "--prompt", "The ",
                "--bytes", "8", env=cluster.waiting)
    events = cluster.recorded("installed")
    assert {e["node"] for e in events if e["span"] == "serve"} == {"installed"}
    assert any(e["span"] == "forward" for e in events), "the installed expertctl is not recorded"


def check_preloaded(cluster, url, library):
    env = dict(cluster.waiting, LD_PRELOAD=library, ASAN_OPTIONS="verify_asan_link_order=0")
    cluster.record("preloaded")
    cluster.run(CLIENT, url, str(CALLS), env=env)
    events = cluster.recorded("preloaded")
    pairs, _ = match([e for e in events if e["node"] == "-"], None, None)
    ends = [e["status"] for b, e in pairs if b["span"] == "forward"]
    assert ends[:-1] == [0] * CALLS and ends[-1] in (0, CANCELLED), ends
    traces = {b["trace"] for b, e in pairs if b["span"] == "forward"}
    assert len(traces) == CALLS + 1, "each call without a traceparent has a trace of its own"
    assert traces >= {e["trace"] for e in events if e["span"] == "serve"}


def check_allocations(cluster, library):
    # Its nodes are a fork of it: LTTng asks for a library of its own then.
    env = dict(cluster.waiting, LD_PRELOAD=f"liblttng-ust-fork.so.1 {library}", EP_TEST_RECORDED="1")
    cluster.record("allocations")
    print(cluster.run(ALLOCATIONS, env=env).stdout, end="")
    cluster.run("lttng", "stop", "allocations")
    cluster.run("lttng", "destroy", "allocations")


def main(cluster, folder):
    cluster.session_daemon()
    prefix, url, library = installed(cluster, folder)
    check_installed(cluster, prefix, url)
    check_preloaded(cluster, url, library)
    if SANITIZED == "":
        check_allocations(cluster, library)
    cluster.stop("node")
    cluster.stop("sessiond")


run_test(main)
