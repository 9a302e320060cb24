#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_structs.py BUILD SOURCE SAME SHORTER LONGER: one program, built against the headers as they are, against older and against newer ones, gets the same
from this library, and the library touches nothing behind its structs."""
import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../door")
from door_cluster import Cluster


def main():
    same, shorter, longer = sys.argv[3:]
    with Cluster() as c:
        url = c.coordinator()["rpc_url"]
        c.node("a", f"--coordinator-url={url}")
        c.wait_serving("--coordinator", url)
        wanted = c.run(same, url).stdout
        assert wanted.count(b"\n") == 8, wanted
        assert c.run(shorter, url).stdout == wanted, "a program of an older header got something else"
        lines = c.run(longer, url).stdout.splitlines(keepends=True)
        assert lines[0] == b"config: refused\n" and lines[2] == b"args: refused\n", lines[:3]
        assert b"".join([lines[1], *lines[3:]]) == wanted, "a program of a newer header got something else"
        c.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
