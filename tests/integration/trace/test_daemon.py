#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A session daemon that does not answer keeps no node from starting, and one that is slow loses none."""
import os, signal, threading, time

from recording import EXPERTCTL, EXPERTD, MODEL, run_test

ROUNDS = 3


def main(cluster, folder):
    daemon = cluster.session_daemon()
    daemon.send_signal(signal.SIGSTOP)
    cluster.env["LTTNG_UST_REGISTER_TIMEOUT"] = "-1"  # for ever, where a program waits at all
    cluster.daemon("patient", EXPERTD, "--node-name", "patient", "--model", f"demo={MODEL}")
    daemon.send_signal(signal.SIGCONT)
    cluster.wait_registered(1)
    cluster.stop("patient")

    del cluster.env["LTTNG_UST_REGISTER_TIMEOUT"]
    node, url = cluster.daemon("node", EXPERTD, "--node-name", "node", "--model", f"demo={MODEL}")
    cluster.wait_registered(1)
    over = threading.Event()

    def slow():
        while not over.is_set():
            daemon.send_signal(signal.SIGSTOP)
            time.sleep(0.04)
            daemon.send_signal(signal.SIGCONT)
            time.sleep(0.002)

    for number in range(ROUNDS):
        over.clear()
        slowing = threading.Thread(target=slow)
        slowing.start()
        cluster.record(f"slow-{number}")
        over.set()
        slowing.join()
        cluster.run(EXPERTCTL, "generate", "--node", url, "--checkpoint", MODEL, "--model", "demo", "--prompt", "The ", "--bytes", "2")
        events = cluster.recorded(f"slow-{number}")
        assert any(e["span"] == "serve" for e in events), f"recording {number}: the node is lost"
    cluster.stop("node")
    cluster.stop("sessiond")


run_test(main)
