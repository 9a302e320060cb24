#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A registration of 2,000 layers with 65,000 experts each is refused by its numbers before it costs anything; the largest one that is taken costs others little.
What many nodes hold together, and no client could take, is not published: the table before is served on, and status says so."""
import threading, time

from door_cluster import EXPERTCTL, SANITIZED, Cluster, wait_for
import peer


def layers(count, experts):
    return [peer.layer_info(number, experts=experts) for number in range(count)]


def body(version, count, experts):
    return peer.Prepared(peer.REGISTER, peer.register_body("huge", "tcp://127.0.0.1:1", 7, [peer.model_info("huge", version, layers(count, experts))]))


def node_call(url, name, request):
    """Calls again as a node does when its connection ends: a busy machine may keep this program from answering pings."""
    for left in reversed(range(5)):
        try:
            with peer.Peer(url, timeout=120) as node:
                assert node.hello("node", node=name).status == 0
                return node.reply_to(request.send(node))
        except ConnectionError:
            if left == 0:
                raise


refused = [(body("v1", count, experts), count) for count, experts in ((2000, 65000), (6000, 65000), (32800, 1))]
real, largest = body("v1", 61, 384), body("v2", 8, 65000)

with Cluster() as c:
    coordinator = c.coordinator()
    c.node("n0", "--coordinator-url=" + coordinator["rpc_url"])
    where = ("--coordinator", coordinator["rpc_url"])
    c.wait_serving(*where)
    pid = c.processes[0][1].pid
    before = peer.resident_bytes(pid)
    for body, count in refused:
        reply = node_call(coordinator["rpc_url"], "huge", body)
        assert reply.status == 8 and "clients take up to 4194304" in reply.text(), (count, reply.status, reply.text())
    assert node_call(coordinator["rpc_url"], "huge", real).status == 0
    with peer.Peer(coordinator["rpc_url"], timeout=120) as other:
        assert other.hello().status == 0
        replies, took = [], 0
        stranger = threading.Thread(target=lambda: replies.append(node_call(coordinator["rpc_url"], "huge", largest)))
        stranger.start()
        while stranger.is_alive():
            begin = time.monotonic()
            assert other.call(peer.CLUSTER_STATUS).status == 0 # waits for the state's lock
            took = max(took, time.monotonic() - begin)
        assert replies and replies[0].status == 0, replies and replies[0].text()
    grown = peer.resident_bytes(pid) - before
    print(f"huge register: beside the largest one that is taken every answer comes in {took * 1e3:.0f} ms; memory grew by {grown >> 20} MiB")
    assert SANITIZED or grown < 256 << 20, grown
    log = open(c.path("coordinator.log")).read()
    assert "event=register-refused node=huge" in log and (SANITIZED or "node=n0 state=suspect" not in log), log
    c.stop()

NODES, EVERY = 6, range(65000)
held = [peer.model_info("held", "v1", [peer.layer_info(number, experts=len(EVERY), owned=EVERY) for number in range(9)])]

with Cluster() as c:
    coordinator = c.coordinator(f"--min-nodes={NODES}", "--heartbeat-ms=10000", "--admin-listen=tcp://127.0.0.1:0")
    url = coordinator["rpc_url"]
    log = lambda: open(c.path("coordinator.log")).read()
    for n in range(NODES):
        last = node_call(url, f"h{n}", peer.Prepared(peer.REGISTER, peer.register_body(f"h{n}", f"tcp://127.0.0.1:{n + 1}", 7, held)))
        assert last.status == 0, last.text()
    epoch = peer.parse(last.fields[3][0])
    for n in range(NODES):
        reply = node_call(url, f"h{n}", peer.Prepared(peer.HEARTBEAT, peer.heartbeat_body(f"h{n}", 7, epoch=[(k, v[0]) for k, v in epoch.items()])))
        assert reply.status == 0, reply.text()
    wait_for("the table", lambda: "table-published" in log())
    tables = log().count("table-published")
    c.run(EXPERTCTL, "drain", "h0", "--admin", coordinator["admin_url"]) # while experts move all that is held would be listed
    with peer.Peer(url, timeout=120) as client:
        assert client.hello().status == 0
        reason = client.call(peer.CLUSTER_STATUS).fields.get(9, [b""])[0].decode()
        assert "6 nodes, 1 models, 9 layers" in reason and "clients take up to 4194304" in reason, reason
        client.start(peer.WATCH)
        table = client.next_frame()
        assert table.kind == peer.REPLY_MORE and len(table.header) < 4 << 20, (table.kind, table.status, len(table.header))
    assert "event=placement-failed reason=\"the new table of 6 nodes" in log() and log().count("table-published") == tables, log()
    print("huge register:", reason)
    c.stop()
