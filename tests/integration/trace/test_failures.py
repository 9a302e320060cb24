#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records calls that end badly: a node that stalls until the deadline, directly and behind the gateway, and a node that is killed.
Every span of the processes that live has its end, and the ends say what happened."""
import re, signal

from recording import COORDINATOR, EXPERTCTL, MODEL, break_while_running, match, run_test, trace_id, wait_for

DEADLINE_EXCEEDED, UNAVAILABLE, CONNECTION_LOST = 4, 14, 36
ROW_BYTES = 256  # of one token: more than the pings of a connection until it counts as silent
SHORT_S = "1.5"  # a peer that sends nothing is called dead after 2 s, counted from its last word before it stopped: either may come first
LONG_S = "5"


def has_unread_rows(ports_file):
    """Whether a request waits, unread, in a socket of the node that listens there."""
    port = int(re.search(r'"rpc_url": *"[^"]*:([0-9]+)"', open(ports_file).read()).group(1))
    sockets = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    return any(int(s[1].split(":")[1], 16) == port and s[3] == "01" and int(s[4].split(":")[1], 16) >= ROW_BYTES for s in sockets)


def statuses(events, trace, pid, span):
    return [e["status"] for e in events if e["trace"] == trace and e["pid"] == pid and (e["span"], e["kind"]) == (span, "end")]


def check(events, coordinator, a, b, commands):
    first = min(e["at"] for e in events if e["span"] == "forward")
    # The short runs in between do not wait for the session daemon: they join while the recording goes on, event by event.
    watched = {a.pid, coordinator.pid} | {command.pid for command in commands.values()}
    match([e for e in events if e["pid"] in watched], first, None)
    # The killed node's last words are what it was at when it died: the call that then failed.
    _, left = match([e for e in events if e["pid"] == b.pid], first, 0)
    failed = [e for e in events if e["pid"] == commands[3].pid and e["span"] == "forward" and e["kind"] == "begin"][-1]
    assert all(e["at"] >= failed["at"] for e in left), left
    for number, command in commands.items():
        ends = statuses(events, trace_id(number), command.pid, "forward")
        assert len(ends) > 5 and not any(ends[:-1]) and ends[-1] in (DEADLINE_EXCEEDED, UNAVAILABLE), (number, ends[-3:])
        assert any(statuses(events, trace_id(number), command.pid, "exchange"))
    for span in ("gateway", "forward", "exchange"):
        ends = statuses(events, trace_id(2), coordinator.pid, span)
        assert len(ends) > 5 and any(ends), (span, ends)
    assert CONNECTION_LOST in statuses(events, trace_id(3), commands[3].pid, "exchange")


def main(cluster, folder):
    cluster.session_daemon()
    coordinator, url = cluster.daemon("coordinator", COORDINATOR, "--min-nodes", "2")
    a, b = (cluster.node(n, url) for n in "ab")
    wait_for("a table", lambda: cluster.is_good(EXPERTCTL, "status", "--coordinator", url))
    cluster.wait_registered(3)
    cluster.record("failures")

    def settled():
        """The node has taken up its work again: a whole run succeeds."""
        b.send_signal(signal.SIGCONT)
        wait_for("the node to go on", lambda: cluster.is_good(EXPERTCTL, "generate", "--coordinator", url, "--checkpoint", MODEL,
                                                              "--model", "demo", "--prompt", "The ", "--bytes", "4"))

    def stall():
        b.send_signal(signal.SIGSTOP)

    def kill():
        wait_for("a call under way", lambda: has_unread_rows(f"{folder}/b.ports"))
        b.kill()

    commands = {1: break_while_running(cluster, url, 1, stall, SHORT_S)}
    settled()
    commands[2] = break_while_running(cluster, url, 2, stall, SHORT_S, "--gateway")
    settled()
    cluster.waiting["LIBEXPERTD_LANES"] = "stream"  # what waits in shared memory cannot be seen
    commands[3] = break_while_running(cluster, url, 3, stall, LONG_S, later=kill)
    b.wait()
    cluster.processes = [p for p in cluster.processes if p[0] != "b"]
    cluster.stop("a", "coordinator")  # what they still had to end has ended
    events = cluster.recorded("failures")
    check(events, coordinator, a, b, commands)
    print(len(events), "events, all matched")
    cluster.stop("sessiond")


run_test(main)
