#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A node's model files go to nodes, byte for byte, and to nobody else; what a hostile node asks for is refused by name and opens no file."""
import os, shutil

from door_cluster import BUILD, MODEL, Cluster
import peer

LIST, READ = 0x0801, 0x0802
NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED, OUT_OF_RANGE = 5, 7, 8, 11
PIECE = 1 << 20
CLIENT, NODE = "client-token-1111", "node-token-22222222"


def tokens(c, **given):
    return [f"--{role}token-file={c.write(role + 'token', text.encode())}" for role, text in given.items()]


def listed(node, *more):
    reply = node.call(LIST, peer.message((1, "demo"), *more))
    assert reply.status == 0, reply.text()
    files = [peer.parse(f) for f in reply.fields.get(3, [])]
    return reply.fields[1][0].decode(), reply.fields[2][0], {f[1][0].decode(): f.get(2, [0])[0] for f in files}


def read(node, version, name, offset, count):
    return node.call(READ, peer.message((1, "demo"), (2, version), (3, name), (4, offset), (5, count)))


def node_of(url, token, role="node"):
    node = peer.Peer(url)
    welcome = node.hello(role, token=token, node="asks")
    assert welcome.status == 0, welcome.text()
    return node


def gives_its_files(c, url):
    with node_of(url, NODE) as node:
        version, count, files = listed(node)
        assert count == len(files) and set(files) <= set(os.listdir(MODEL)) and "config.json" in files, files
        for name, size in files.items():
            want = open(f"{MODEL}/{name}", "rb").read()
            assert len(want) == size
            for offset in range(0, size, PIECE):
                reply = read(node, version, name, offset, min(PIECE, size - offset))
                assert reply.status == 0, reply.text()
                assert reply.tensors == want[offset : offset + PIECE], (name, offset)
                if len(reply.tensors) < 4096: # the sum of a larger one takes longer here than a ping may
                    assert reply.fields[1][0] == peer.crc32c(reply.tensors)
        assert listed(node, (3, count))[2] == {} and listed(node, (3, 0xFFFFFFFF))[2] == {}
        return version, files


def refuses_what_is_not_there(url, version, files):
    name, size = max(files.items(), key=lambda f: f[1])
    with node_of(url, NODE) as node:
        for wrong in "", ".", "../" + name, f"{MODEL}/{name}", "/etc/passwd", name + "x", "n" * 4000:
            reply = read(node, version, wrong, 0, 1)
            assert reply.status == NOT_FOUND and "has no file" in reply.text() or reply.status == 3, (wrong, reply.status, reply.text())
        for offset, count in (0, 0), (0, PIECE + 1), (0, 0xFFFFFFFF), (size, 1), (size - 1, 2), ((1 << 64) - 1, 1), ((1 << 64) - 1, 2), (1 << 63, PIECE):
            reply = read(node, version, name, offset, count)
            assert reply.status == OUT_OF_RANGE and f"inside its {size}" in reply.text(), (offset, count, reply.text())
        reply = read(node, "0123456789abcdef", name, 0, 1)
        assert reply.status == NOT_FOUND and f"served: demo version {version}" in reply.text(), reply.text()
        assert read(node, version, name, 0, 1).status == 0


def bounds_what_waits(url, version, files):
    """More reads at once than wait for the thread: some are refused, those that are answered are right, and the node lives."""
    name, size = max(files.items(), key=lambda f: f[1])
    count = min(size, PIECE)
    want = open(f"{MODEL}/{name}", "rb").read(count)
    with node_of(url, NODE) as node:
        calls = [node.start(READ, peer.message((1, "demo"), (2, version), (3, name), (4, 0), (5, count))) for _ in range(60)]
        replies = {}
        while len(replies) < len(calls):
            got = node.next_frame()
            replies[got.call] = got
        busy = [r for r in replies.values() if r.status != 0]
        assert busy and all(r.status == RESOURCE_EXHAUSTED for r in busy), [r.text() for r in busy]
        assert len(busy) < len(calls) and all(r.tensors == want for r in replies.values() if r.status == 0)


def refuses_clients(url, version, reason):
    with node_of(url, CLIENT, "client") as client:
        for reply in client.call(LIST, peer.message((1, "demo"))), read(client, version, "config.json", 0, 1):
            assert reply.status == PERMISSION_DENIED and "needs role node" in reply.text(), reply.text()
    with peer.Peer(url) as liar:
        assert reason in liar.hello("node", token=CLIENT).text()


def nobody_where_clients_pass_as_nodes(name, *options):
    with Cluster() as c:
        url = c.node(name, *tokens(c, **options[0]) if options else ())["rpc_url"]
        with node_of(url, CLIENT) as node:
            for reply in node.call(LIST, peer.message((1, "demo"))), read(node, "", "config.json", 0, 1):
                assert reply.status == PERMISSION_DENIED and "set node_token_file" in reply.text() and not reply.tensors, reply.text()
        c.stop()


def refuses_a_file_that_changed(c):
    copy = c.path("model")
    shutil.copytree(MODEL, copy)
    url = c.daemon("changed", f"{BUILD}/server/expertd/expertd", f"--model=demo={copy}", "--node-name=changed", *tokens(c, **{"": CLIENT, "node-": NODE}))["rpc_url"]
    with node_of(url, NODE) as node:
        version, _, files = listed(node)
        with open(f"{copy}/config.json", "ab") as file:
            file.write(b" ")
        reply = read(node, version, "config.json", 0, files["config.json"])
        assert reply.status != 0 and "config.json" in reply.text() and not reply.tensors, reply.text()


with Cluster() as c:
    url = c.node("gives", *tokens(c, **{"": CLIENT, "node-": NODE}), "--weight-serve-rate=32M")["rpc_url"]
    version, files = gives_its_files(c, url)
    refuses_what_is_not_there(url, version, files)
    bounds_what_waits(url, version, files)
    refuses_clients(url, version, "not for role node")
    refuses_a_file_that_changed(c)
    c.stop()
nobody_where_clients_pass_as_nodes("open")
nobody_where_clients_pass_as_nodes("shared", {"": CLIENT})
nobody_where_clients_pass_as_nodes("same", {"": CLIENT, "node-": CLIENT})
