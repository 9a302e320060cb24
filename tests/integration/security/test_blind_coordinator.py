#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A coordinator that did not run for longer than it waits for nodes forgets none of them and publishes no other table."""
import os, signal, time

from door_cluster import EXPERTCTL, LAYER, Cluster, wait_for

STOPPED_S = 3 # the longest that a node may be silent below is 1.3 s

with Cluster() as c:
    coordinator = c.coordinator("--min-nodes=2", "--heartbeat-ms=100", "--heartbeat-dead-count=3", "--restore-ms=1000")
    for name in ("n0", "n1"):
        c.node(name, "--coordinator-url=" + coordinator["rpc_url"])
    where = ("--coordinator", coordinator["rpc_url"])
    c.wait_serving(*where)
    log = lambda: open(c.path("coordinator.log")).read()
    wait_for("both nodes to serve", lambda: all(f"node={n} state=serving" in log() for n in ("n0", "n1")))
    before = log()
    batch = c.batch("batch", 8, 1)
    pid = c.processes[0][1].pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S) # the fault itself: how long it is stopped
    os.kill(pid, signal.SIGCONT)
    wait_for("it to notice", lambda: "coordinator-blind" in log())
    for _ in range(20):
        c.run(EXPERTCTL, "forward", *where, "--model", "demo", "--layer", str(LAYER), "--in", batch, "--out", c.path("y"))
    c.wait_serving(*where) # the nodes have registered again: to them it was gone
    after = log()[len(before) :]
    assert "node-forgotten" not in after and "suspect" not in after and "table-published" not in after, after
    print("blind coordinator:", next(line for line in after.splitlines() if "coordinator-blind" in line)[30:])
    c.stop()
