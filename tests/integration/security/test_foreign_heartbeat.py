#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who has a node's token, and reads a node's incarnation in ClusterStatus, cannot speak for it on a connection of another name."""
from door_cluster import Cluster
import peer

with Cluster() as c:
    coordinator = c.coordinator()
    c.node("n0", "--coordinator-url=" + coordinator["rpc_url"])
    where = ("--coordinator", coordinator["rpc_url"])
    c.wait_serving(*where)
    with peer.Peer(coordinator["rpc_url"]) as stranger:
        assert stranger.hello("node", node="n1").status == 0
        status = stranger.call(peer.CLUSTER_STATUS)
        victim = peer.parse(status.fields[4][0])
        assert victim[2] == [b"n0"]
        for state in ("draining", "leaving", "degraded"):
            reply = stranger.call(peer.HEARTBEAT, peer.heartbeat_body("n0", victim[5][0], state))
            assert reply.status == 7 and "'n1' may not send a heartbeat of 'n0'" in reply.text(), (reply.status, reply.text())
        reply = stranger.call(peer.REGISTER, peer.register_body("n0", "tcp://127.0.0.1:1", 7))
        assert reply.status == 7 and "'n1' may not register 'n0'" in reply.text(), (reply.status, reply.text())
    c.wait_serving(*where)
    assert "state=draining" not in open(c.path("coordinator.log")).read()
    c.stop()
