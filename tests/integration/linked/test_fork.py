#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_fork.py BUILD SOURCE PROGRAM: children of a process that has clients, over each way that frames go."""
import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../door")
from door_cluster import Cluster


def main():
    program = sys.argv[3]
    with Cluster() as c:
        url = c.coordinator()["rpc_url"]
        for name in "a", "b":
            c.node(name, f"--coordinator-url={url}")
        c.wait_serving("--coordinator", url)
        for lane in "uv", "nng":
            for lanes in "", "stream":
                environment = {"LIBEXPERTD_STREAM_LANE": lane, "LIBEXPERTD_LANES": lanes}
                for how in ("before", "after", "during") if lane == "uv" else ("before", "nng"):
                    os.environ.update(environment)
                    c.run(program, url, how)
        c.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
