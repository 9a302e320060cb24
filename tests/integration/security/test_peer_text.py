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


def check_command(command, *arguments):
    """Both forms of what a command prints."""
    shown = ""
    for form in "json", "table":
        done = subprocess.run([EXPERTCTL, command, *arguments, *(("-o", "json") if form == "json" else ())], capture_output=True, timeout=60)
        check_printable(done.stdout + done.stderr, command)
        if form == "json" and done.stdout:
            json.loads(done.stdout)
        shown += (done.stdout + done.stderr).decode()
    return shown


def spoken_to_by_peers(c, form):
    coordinator = c.coordinator(f"--log-format={form}")
    assert "admin_url" not in coordinator, coordinator # it is off, and the gateway's own listener is nobody else's
    where = ("--coordinator", coordinator["rpc_url"])
    c.node("n0", "--coordinator-url=" + coordinator["rpc_url"], f"--log-format={form}")
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
    for text in BAD if form == "text" else (): # not a name: it is shown, without what steers
        with peer.Peer(coordinator["rpc_url"]) as rogue: # a connection for each: what the commands take is too long for it without pongs
            assert rogue.hello("node", node="n1").status == 0
            assert rogue.call(peer.HEARTBEAT, peer.heartbeat_body("n1", 7, text, more=((6, text),))).status == 0
        for command in ("status", "doctor", "stats"):
            check_command(command, *where)
    check_printable(open(c.path("coordinator.log"), "rb").read(), "log")
    refused = [line for line in c.log("coordinator") if line["event"] in ("audit-refused", "register-refused")]
    assert len(refused) >= len(BAD), "peers were refused without a line"
    assert all(line["peer"].startswith("127.0.0.1:") and "has byte 0x" in line["detail"] for line in refused if line["event"] == "audit-refused"), refused
    assert {r"n\x0ax", "n x", r"n\xff"} <= {line["node"] for line in refused if line["event"] == "audit-refused"}, refused
    assert {line["node"] for line in refused if line["event"] == "register-refused"} == {"n1"}, refused
    c.stop()


for form in ("text", "json", "journal"):
    with Cluster() as c:
        spoken_to_by_peers(c, form)

# A service that has been taken over, and whoever asks it.
for text in BAD:
    cluster = peer.message((2, text), (3, 1), (4, ((1, 0), (2, text), (3, text), (4, text), (8, text))), *((n, text) for n in (7, 8, 9, 11, 12)))
    config = peer.message((1, text), (2, text), (3, ((1, text), (2, text), (3, text))))
    answers = {peer.CLUSTER_STATUS: cluster, peer.DRAIN: peer.message((1, text), (2, "drained"), (4, text)), peer.RELOAD: peer.message((1, text), (2, text)), peer.GET_CONFIG: config,
               peer.NODE_STATUS: (5, text), peer.WATCH: (5, text), peer.LIST_SERVICES: (5, text)}
    with peer.Service(answers, node=text) as wrong:
        for arguments in (("status", "--coordinator", wrong.url), ("status", "--node", wrong.url), ("doctor", "--coordinator", wrong.url), ("top", "--once", "--coordinator", wrong.url),
                          ("config", "--admin", wrong.url), ("reload", "--admin", wrong.url), ("drain", "n0", "--admin", wrong.url), ("rpc", "list", "--node", wrong.url)):
            shown = check_command(*arguments)
            assert "\\x" in shown or text == "n x", (arguments, shown)
