#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who has the token that nodes show, and knows a node's name, address and incarnation, can neither take its place nor speak for it. The node itself, killed
and started anew, is back soon."""
import time

from door_cluster import BUILD, Cluster, wait_for
import peer

with Cluster() as c:
    coordinator = c.coordinator()
    where = ("--coordinator", coordinator["rpc_url"])
    node = c.node("n0", "--coordinator-url=" + coordinator["rpc_url"])
    c.wait_serving(*where)
    log = lambda: open(c.path("coordinator.log")).read()
    with peer.Peer(coordinator["rpc_url"], source="127.0.0.2") as thief:
        assert thief.hello("node", node="n0").status == 0
        incarnation = peer.parse(thief.call(peer.CLUSTER_STATUS).fields[4][0])[5][0]
        model = peer.model_info("demo", "v1", [peer.layer_info(0)])
        for number in (incarnation, 7):
            for url in (node["rpc_url"], "tcp://127.0.0.1:1"):
                for more in ((), ((7, "guess"),)):
                    reply = thief.call(peer.REGISTER, peer.register_body("n0", url, number, [model], more))
                    assert reply.status == 6 and "n0 is in use by a live node" in reply.text(), (reply.status, reply.text())
        for state in ("draining", "leaving"):
            for more in ((), ((9, "guess"),)):
                reply = thief.call(peer.HEARTBEAT, peer.heartbeat_body("n0", incarnation, state, more=more))
                assert reply.status == 7 and "without the secret" in reply.text(), (reply.status, reply.text())
    assert "event=register-refused node=n0" in log()
    c.wait_serving(*where)
    assert "state=draining" not in log() and log().count("node-registered") == 1, log()

    c.processes.pop()[1].kill()
    begin = time.monotonic()
    c.node("n0", "--coordinator-url=" + coordinator["rpc_url"])
    wait_for("the node to be back", lambda: log().count("node-registered") == 2)
    print(f"identity: a killed node was registered again after {time.monotonic() - begin:.1f} s")
    c.wait_serving(*where)
    c.stop()

# Where clients' tokens open nodes' doors too, it is said at the start.
with Cluster() as c:
    token = c.write("client.token", b"client-token-" + b"x" * 24)
    c.coordinator("--token-file=" + token)
    assert 'event=node-token-missing reason="node_token_file is not set"' in open(c.path("coordinator.log")).read()
    checked = c.run(f"{BUILD}/server/coordinator/expertd-coordinator", "--check-config", "--token-file=" + token)
    assert b"node_token_file is not set" in checked.stderr + checked.stdout, checked
    c.stop()
