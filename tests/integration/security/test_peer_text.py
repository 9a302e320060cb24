#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a peer says reaches logs, terminals and JSON as text, whatever bytes it is made of; names with control characters or blanks are refused."""
import json, subprocess

from door_cluster import EXPERTCTL, Cluster
import peer

BAD = ["n\x1b[31m", "n\x9b31m".encode().decode(), "n\nx", "n x", "n\u202ex", "n\udcff"] # the last one: a byte that is no UTF-8


def check_printable(data, where):
    text = data.decode() # else it is no UTF-8
    bad = [c for c in text if (ord(c) < 0x20 and c != "\n") or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2028"]
    assert not bad, (where, bad, text[-500:])


with Cluster() as c:
    coordinator = c.coordinator()
    where = ("--coordinator", coordinator["rpc_url"])
    c.node("n0", "--coordinator-url=" + coordinator["rpc_url"])
    c.wait_serving(*where)
    for name in BAD:
        with peer.Peer(coordinator["rpc_url"]) as stranger:
            reply = stranger.hello("node", node=name)
            assert reply.status == 3 and "peer's node name has byte 0x" in reply.text(), (name, reply.status, reply.text())
    with peer.Peer(coordinator["rpc_url"]) as rogue:
        assert rogue.hello("node", node="n1").status == 0
        layers = [peer.layer_info(0)]
        for name in BAD:
            for url, host, model, version in (("tcp://127.0.0.1:1" + name, "h", "m", "v"), ("tcp://127.0.0.1:1", name, "m", "v"), ("tcp://127.0.0.1:1", "h", name, "v"),
                                              ("tcp://127.0.0.1:1", "h", "m", name)):
                body = peer.register_body("n1", url, 7, [peer.model_info(model, version, layers)], ((6, host),))
                reply = rogue.call(peer.REGISTER, body)
                assert reply.status == 3 and "has byte 0x" in reply.text(), (url, host, model, version, reply.status, reply.text())
        body = peer.register_body("n1", "tcp://127.0.0.1:1", 7, [peer.model_info("m", "v", layers)])
        assert rogue.call(peer.REGISTER, body).status == 0
        for text in BAD: # not a name: it is shown, without what steers
            rogue.call(peer.HEARTBEAT, peer.heartbeat_body("n1", 7, text, more=((6, text),)))
            for form in ("table", "json"):
                for command in ("status", "doctor", "stats"):
                    done = subprocess.run([EXPERTCTL, command, *where, "-o", form], capture_output=True, timeout=60)
                    check_printable(done.stdout + done.stderr, command)
                    if form == "json" and done.stdout:
                        json.loads(done.stdout)
    log = open(c.path("coordinator.log"), "rb").read()
    check_printable(log, "log")
    assert all(line[:2] == b"20" for line in log.splitlines()), "a peer's newline began a line"
    c.stop()
