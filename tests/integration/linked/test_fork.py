#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_fork.py BUILD SOURCE PROGRAM: children of a process that has clients, over each way that frames go."""
import os, re, signal, sys, urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../door")
from door_cluster import Cluster, wait_for


def connections(nodes):
    """At all of them now, of both lanes."""
    pages = [urllib.request.urlopen(node["probe_url"] + "/metrics", timeout=60).read().decode() for node in nodes]
    counts = [float(n) for page in pages for n in re.findall(r"^expertd_lane_connections\{.*\} (\S+)$", page, re.M)]
    assert len(counts) == 2 * len(nodes), pages
    return sum(counts)


def check_left_child(c, program, url, nodes):
    """The service sees that the process of a client has died, although a child of it lives."""
    before = connections(nodes)
    child = int(c.run(program, url, "left", code=-signal.SIGKILL).stdout)
    try:
        wait_for(f"the end of the dead client's connections, {before} were there", lambda: connections(nodes) <= before)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def main():
    program = sys.argv[3]
    with Cluster() as c:
        url = c.coordinator()["rpc_url"]
        nodes = [c.node(name, f"--coordinator-url={url}") for name in ("a", "b")]
        c.wait_serving("--coordinator", url)
        for lane in "uv", "nng":
            for lanes in "", "stream":
                environment = {"LIBEXPERTD_STREAM_LANE": lane, "LIBEXPERTD_LANES": lanes}
                for how in ("before", "after", "during") if lane == "uv" else ("before", "nng"):
                    os.environ.update(environment)
                    c.run(program, url, how)
                if lane == "uv":
                    check_left_child(c, program, url, nodes)
        c.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
