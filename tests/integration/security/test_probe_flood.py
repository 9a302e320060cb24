#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Idle, dribbling and never-reading connections at the probes' port, from the address of the one who probes too: every probe is answered at once."""
import socket, time, urllib.request

from door_cluster import Cluster
import peer

FLOOD = 300
BOUND_S = 5 # a kubelet's patience is 1 s by default; machines that run tests are busy


def open_one(url, number):
    """A third each: idle, half a request, a whole request whose answer is not read."""
    one = peer.connect(url, source=f"127.0.0.{1 + number % 2}")
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    if number % 3 > 0:
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + (b"\r\n" if number % 3 == 2 else b""))
    return one


def probe(url, path):
    begin = time.monotonic()
    assert urllib.request.urlopen(url + path, timeout=60).status == 200
    return time.monotonic() - begin


with Cluster() as c:
    coordinator = c.coordinator()
    node = c.node("n0", "--coordinator-url=" + coordinator["rpc_url"])
    c.wait_serving("--coordinator", coordinator["rpc_url"])
    for url in (coordinator["probe_url"], node["probe_url"]):
        held, worst = [], 0
        for number in range(FLOOD):
            held.append(open_one(url, number))
            for one in held[-20:]: # a byte more of a header that never ends
                try:
                    one.send(b"a")
                except OSError:
                    pass
            if number % 20 == 19:
                worst = max(worst, *(probe(url, path) for path in ("/livez", "/readyz", "/metrics")))
        assert worst < BOUND_S, worst
        assert sum(peer.is_closed(one) for one in held) > FLOOD / 2, "nobody lost its place"
        print(f"probe flood: {FLOOD} connections, longest probe {worst * 1e3:.0f} ms")
        for one in held:
            one.close()
    c.stop()
