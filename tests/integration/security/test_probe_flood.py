#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Idle, dribbling and never-reading connections at the probes' port, from the address of the one who probes too: every probe is answered at once, and a
request has 5 s in all, however its bytes come."""
import socket, statistics, threading, time, urllib.request

from door_cluster import Cluster, wait_for
import peer

IDLE, HEAD, ANSWER = range(3) # nothing sent; a header that never ends, a byte each 0.2 s; whole requests whose answers are not read
BOUND_S = 1 # a kubelet's patience by default, for the median; machines that run tests are busy, so one may take three times as long


class Dribbler(threading.Thread):
    """A byte more to each of its connections, five times a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.connections, self.ended = [], threading.Event()

    def run(self):
        while not self.ended.wait(0.2):
            for one in list(self.connections):
                try:
                    one.send(b"a")
                except OSError:
                    pass

    def stop(self):
        self.ended.set()
        self.join()


def open_one(url, number, kind, dribbler):
    one = peer.connect(url, source=f"127.0.0.{1 + number % 2}")
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    try:
        if kind == HEAD:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: ")
            dribbler.connections.append(one)
        elif kind == ANSWER:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    except OSError: # it has lost its place already
        pass
    return one


def probe(url, path):
    begin = time.monotonic()
    assert urllib.request.urlopen(url + path, timeout=60).status == 200
    return time.monotonic() - begin


def flood(url, what, kinds, count):
    """Probes while connections of these kinds, in turn, come and stay."""
    dribbler, held, times = Dribbler(), [], []
    dribbler.start()
    for number in range(count):
        held.append(open_one(url, number, kinds[number % len(kinds)], dribbler))
        if number % 16 == 15 or number == count - 1:
            times += (probe(url, path) for path in ("/livez", "/readyz", "/metrics"))
    for _ in range(10): # and once all are there
        times += (probe(url, path) for path in ("/livez", "/metrics"))
    print(f"{what}: {count} connections, {len(times)} probes, median {statistics.median(times) * 1e3:.1f} ms, longest {max(times) * 1e3:.1f} ms", flush=True)
    assert statistics.median(times) < BOUND_S and max(times) < 3 * BOUND_S, sorted(times)
    assert sum(peer.is_closed(one) for one in held) >= count - 64, "more are held than there are places"
    dribbler.stop()
    for one in held:
        one.close()


def dribble_to_the_end(url):
    """With nobody else there, so that no newcomer has the daemon look."""
    dribbler = Dribbler()
    held = [open_one(url, number, HEAD, dribbler) for number in range(4)]
    begin = time.monotonic()
    dribbler.start()
    wait_for("connections that dribble to be closed", lambda: all(peer.is_closed(one) for one in held))
    print(f"a header that never ends is closed after {time.monotonic() - begin:.1f} s")
    dribbler.stop()
    for one in held:
        one.close()


with Cluster() as c:
    coordinator = c.coordinator()
    node = c.node("n0", "--coordinator-url=" + coordinator["rpc_url"])
    c.wait_serving("--coordinator", coordinator["rpc_url"])
    for name, ports in ("coordinator", coordinator), ("n0", node):
        url = ports["probe_url"]
        flood(url, f"{name}, idle", [IDLE], 64)
        flood(url, f"{name}, idle", [IDLE], 300)
        flood(url, f"{name}, headers that never end", [HEAD], 300)
        flood(url, f"{name}, answers not read", [ANSWER], 300)
        flood(url, f"{name}, each kind", [IDLE, HEAD, ANSWER], 300)
        dribble_to_the_end(url)
        assert "event=probe-held peer=127.0.0." in open(c.path(name + ".log")).read(), "the log names nobody"
    c.stop()
