#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Strangers that open more connections than there are places, at each port, and say nothing: others get in, and who spoke keeps its place."""
import re, urllib.request

from door_cluster import EXPERTCTL, LAYER, Cluster
import peer

MOST = 32
OTHERS = ("127.0.0.2",), ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")  # one address, and several that fill it together


def strangers(url, sources, count):
    return [peer.connect(url, source=sources[n % len(sources)]) for n in range(count)]


def flood(c, node, sources):
    held = strangers(node["rpc_url"], sources, 2 * MOST) + strangers(node["admin_url"], sources, 2 * MOST) + strangers(node["door_url"], sources, 2 * MOST)
    with peer.Peer(node["rpc_url"]) as other, peer.DoorPeer(node["door_url"]) as caller:
        assert other.hello().status == 0 and other.call(peer.NODE_STATUS).status == 0
        assert caller.call(peer.HEALTH_CHECK).status == 0
        held += strangers(node["rpc_url"], sources, 2 * MOST) + strangers(node["door_url"], sources, 2 * MOST)
        assert other.call(peer.NODE_STATUS).status == 0, "who said Hello keeps its place"
        assert caller.call(peer.HEALTH_CHECK).status == 0, "who sent a request keeps its place"
    c.run(EXPERTCTL, "forward", "--node", node["rpc_url"], "--model", "demo", "--layer", str(LAYER), "--in", c.path("batch"), "--out", c.path("y"))
    c.run(EXPERTCTL, "config", "--admin", node["admin_url"])
    for one in held:
        one.close()


with Cluster() as c:
    coordinator = c.coordinator()
    node = c.node("n0", "--coordinator-url=" + coordinator["rpc_url"], f"--connections-max={MOST}", "--admin-listen=tcp://127.0.0.1:0")
    client = ("--coordinator", coordinator["rpc_url"])
    c.wait_serving(*client)
    c.batch("batch", 8, 1)
    for sources in OTHERS:
        flood(c, node, sources)
    c.wait_serving(*client)
    log = open(c.path("n0.log")).read()
    assert re.search(r"event=audit-refused peer=127\.0\.0\.2:\d+ .*reason=connections", log), log
    refused = lambda reason: int(re.search(rf'expertd_rpc_refused_total{{reason="{reason}"}} (\d+)', metrics)[1])
    metrics = urllib.request.urlopen(node["probe_url"] + "/metrics", timeout=10).read().decode()
    print(f"connections: {refused('connections')} strangers turned away at listen and admin_listen, {refused('slow')} at the door")
    assert refused("connections") > 3 * MOST and refused("slow") > 3 * MOST
    assert "state=suspect" not in open(c.path("coordinator.log")).read()
    c.stop()
