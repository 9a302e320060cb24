#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Strangers that announce large messages and do not send them, and clients that send byte by byte: operators, nodes and other clients do not notice."""
import re, statistics, time, urllib.error, urllib.request

from door_cluster import EXPERTCTL, LAYER, SANITIZED, Cluster, wait_for
import peer

MIB = 1 << 20
CONNECTIONS = 160  # 134 of 16 MiB were more than a pool


def tokens(c):
    """Options of daemons whose every role has a token, and their operator's and client's."""
    files = {role: c.write(role + ".token", (role + "-token-" + "x" * 24).encode()) for role in ("client", "node", "operator")}
    return files, [f"--token-file={files['client']}", f"--node-token-file={files['node']}", f"--admin-token-file={files['operator']}"]


def calls(c, node_url, token_file, batch, count):
    """Seconds of so many calls by another client, one process each: the median."""
    times = []
    for _ in range(count):
        begin = time.monotonic()
        c.run(EXPERTCTL, "forward", "--node", node_url, "--token-file", token_file, "--model", "demo", "--layer", str(LAYER), "--in", batch, "--out", c.path("y"))
        times.append(time.monotonic() - begin)
    return statistics.median(times)


def flood_door(url, source):
    """So many announce 16 MiB behind the SP hello and send 16 bytes."""
    held = []
    for _ in range(CONNECTIONS):
        one = peer.DoorPeer(url, source=source)
        one.begin(16 * MIB, b"\x80\0\0\1" + b"x" * 12)
        held.append(one)
    return held


def dribblers(url, token, source):
    """Clients with a token that announce a frame of 8 MiB each."""
    held = []
    for _ in range(74):
        one = peer.Peer(url, source=source)
        assert one.hello(token=token).status == 0
        one.send(peer.frame(peer.REQUEST, peer.FORWARD, one.last_call + 1, peer.request_header(), claim_header=64, claim_tensors=8 * MIB, deadline_us=peer.NO_DEADLINE)[:200])
        held.append(one)
    return held


def dribble(held):
    """A byte from each; how many the daemon has closed."""
    closed = 0
    for one in held:
        try:
            one.sock.sendall(b"x")
        except OSError:
            pass
        closed += peer.is_closed(one.sock)
    return closed


def refusals(log, source):
    return len(re.findall(rf"event=audit-refused peer={re.escape(source)}:\d+ .*reason=slow", log))


with Cluster() as c:
    files, secure = tokens(c)
    client_token = open(files["client"]).read()
    coordinator = c.coordinator(*secure, "--admin-listen=tcp://127.0.0.1:0")
    node = c.node("n0", "--coordinator-url=" + coordinator["rpc_url"], *secure)
    operator = ("--admin", coordinator["admin_url"], "--admin-token-file", files["operator"])
    client = ("--coordinator", coordinator["rpc_url"], "--token-file", files["client"])
    c.wait_serving(*client)
    pids = [process.pid for _, process in c.processes]
    batch = c.batch("batch", 8, 1)
    quiet = calls(c, node["rpc_url"], files["client"], batch, 9)
    before = [peer.resident_bytes(pid) for pid in pids]

    strangers = flood_door(coordinator["door_url"], "127.0.0.2") + flood_door(node["door_url"], "127.0.0.2")
    slow = dribblers(node["rpc_url"], client_token, "127.0.0.3") + dribblers(coordinator["rpc_url"], client_token, "127.0.0.3")
    end, rounds, busy, closed = time.monotonic() + 90, 0, [], 0
    while closed < len(slow) or rounds < 5:
        assert time.monotonic() < end, f"{closed} of {len(slow)} slow connections were closed in 90 s"
        closed = dribble(slow)
        busy.append(calls(c, node["rpc_url"], files["client"], batch, 3))
        c.run(EXPERTCTL, "status", *client)
        c.run(EXPERTCTL, "config", *operator)
        rounds += 1
    after = [peer.resident_bytes(pid) for pid in pids]
    wait_for("the strangers at the doors to be turned away", lambda: all(peer.is_closed(one.sock) for one in strangers))
    logs = {name: open(c.path(name + ".log")).read() for name, _ in c.processes}
    for name, log in logs.items():
        assert refusals(log, "127.0.0.2") > 0 or refusals(log, "127.0.0.3") > 0, f"{name} names no peer:\n{log}"
    assert SANITIZED or "state=suspect" not in logs["coordinator"] and "node-forgotten" not in logs["coordinator"], logs["coordinator"]
    grown = [a - b for a, b in zip(after, before)]
    print(f"held memory: {len(strangers)} strangers, {len(slow)} slow clients, closed in {rounds} rounds; memory grew by {[g >> 20 for g in grown]} MiB; call {quiet * 1e3:.1f} ms quiet, "
          f"{statistics.median(busy) * 1e3:.1f} ms beside them")
    assert SANITIZED or max(grown) < 160 * MIB, grown # 468 connections announced 6 GiB
    c.run(EXPERTCTL, "status", *client)
    c.stop()


def said(url, path, words):
    try:
        return words in urllib.request.urlopen(url + path, timeout=10).read().decode()
    except urllib.error.HTTPError as error: # not ready
        return words in error.read().decode()


def begin(token, url, source):
    """A connection that announces 15 MiB, and the 14 MiB that it will send: all that is taken of them is charged."""
    one = peer.Peer(url, source=source, timeout=60)
    assert one.hello(token=token).status == 0
    head = peer.frame(peer.REQUEST, peer.FORWARD, one.last_call + 1, peer.request_header(), claim_header=64, claim_tensors=15 * MIB, deadline_us=peer.NO_DEADLINE)[:128]
    one.sock.setblocking(False)
    return one, memoryview(head + b"x" * (14 * MIB))


def fill(token, url, sources, done):
    """Three connections of each address send until done. One that is closed, for it does not end its frame, begins anew."""
    held = [(source, *begin(token, url, source)) for source in sources for _ in range(3)]
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "no share is exhausted"
        for i, (source, one, rest) in enumerate(held):
            try:
                held[i] = source, one, rest[one.sock.send(rest[: 1 << 20]) :] if rest else rest
            except BlockingIOError:
                continue
            except OSError:
                pass
            if peer.is_closed(one.sock):
                one.close()
                held[i] = source, *begin(token, url, source)
    return held


# One address takes all that it may have, and another's calls go on. With four of them the clients' share is used up: readiness,
# log and metric say so, and who needs none of it is served.
with Cluster() as c:
    files, secure = tokens(c)
    client_token = open(files["client"]).read()
    node = c.node("n0", *secure, "--buffer-bytes-max=67108864", "--admin-listen=tcp://127.0.0.1:0")
    metric = 'expertd_buffer_share_refused_total{share="%s"} 0\n'
    probe = node["probe_url"]
    batch = c.batch("batch", 8, 1)
    held = fill(client_token, node["rpc_url"], ["127.0.0.4"], lambda: not said(probe, "/metrics", metric % "client_address"))
    calls(c, node["rpc_url"], files["client"], batch, 3)
    assert said(probe, "/metrics", metric % "clients"), "one address used up what all clients have"
    exhausted = "event=pool-exhausted share=client_address .* held_most_by=127.0.0.4 "
    wait_for("the log to name the address", lambda: re.search(exhausted, open(c.path("n0.log")).read()))
    held += fill(client_token, node["rpc_url"], [f"127.0.0.{n}" for n in range(4, 8)], lambda: not said(probe, "/metrics", metric % "clients"))
    wait_for("readiness to say so", lambda: said(probe, "/readyz?verbose", "exhausted: share clients"))
    wait_for("the log to say so", lambda: "event=pool-exhausted share=clients " in open(c.path("n0.log")).read())
    assert said(probe, "/readyz?verbose", "[+] buffers"), "operators and nodes have memory"
    c.run(EXPERTCTL, "config", "--admin", node["admin_url"], "--admin-token-file", files["operator"])
    for _, one, _ in held:
        one.close()
    c.stop()
