#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A node stalls while each expert has another copy: the report names the copy whose answer was used, and no failure. Of the same
recording with a stream cut off and with a garbled one the rest is reported."""
import glob, json, os, re, shutil, signal

from terminal import show
from recording import COORDINATOR, EXPERTCTL, break_while_running, match, run_test, trace_id, wait_for


def check_events(events, command):
    """Exchanges whose answer was not used, as (begin, end); and of calls that b held up, whose rows all came from a, the number."""
    pairs, _ = match([e for e in events if e["pid"] == command.pid], None, None)
    assert all(e["status"] == 0 for b, e in pairs if b["span"] in ("forward", "exchange"))
    exchanges = [p for p in pairs if p[0]["span"] == "exchange"]
    lost = [b for b, e in exchanges if e["rows"] == 0]
    held_up = set()
    for begin in lost:  # another one, of another node, was used
        others = {b["peer"]: b for b, e in exchanges if e["parent"] == begin["parent"] and e["rows"] > 0}
        assert set(others) - {begin["peer"]}, (begin, others)
        if begin["peer"] == "b" and set(others) == {"a"} and others["a"]["at"] > begin["at"]:
            held_up.add(f"{begin['parent']:016x}")
    assert held_up, lost
    return lost, held_up


def report(cluster, rec, code=0):
    done = cluster.run(EXPERTCTL, "trace", "report", rec, "-o", "json", "--top", "10000", code=code)
    return done.stderr, json.loads(done.stdout) if code == 0 else None


def check_report(cluster, rec, lost, held_up):
    words, said = report(cluster, rec)
    assert not words, words
    calls = {q["call"]: q for q in said["slowest"]}
    for call in held_up:
        assert calls[call]["slowest_peer"] == "a" and calls[call]["critical_path_ns"]["late"] > 0, calls[call]
    for peer in said["peers"]:
        assert peer["unused"] == sum(e["peer"] == peer["name"] for e in lost) and peer["failed"] == 0, peer
    assert not said["failures"] and said["calls"]["unused"] == len(lost) and said["calls"]["count"] == said["requests"], said["calls"]
    assert max(said["peers"], key=lambda p: p["late_ns"])["name"] == "b", said["peers"]
    assert sum(s["total_ns"] for s in said["critical_path"]) == said["requests_ns"]
    assert cluster.run(EXPERTCTL, "trace", "report", rec).stdout.startswith(said["summary"] + "\n"), said["summary"]
    return said


def copy_with(rec, name, breaking):
    """A copy in which breaking(path, bytes) was done to the largest stream; that stream's name."""
    copy = f"{rec}-{name}"
    shutil.copytree(rec, copy)
    stream = max((f for f in glob.glob(f"{copy}/**/ch_*", recursive=True) if f.count("/index/") == 0), key=os.path.getsize)
    breaking(stream, os.path.getsize(stream))
    return copy, stream


def cut(path, size):
    os.truncate(path, size - 4096 - 100)


def garble(path, _size):
    """The last packet's magic number: what is wrong inside of events may read as other events, for CTF has no checksum."""
    with open(path, "r+b") as f:
        f.seek(f.read().rfind(bytes.fromhex("c11ffcc1")))
        f.write(b"\xff" * 4)


def check_broken(cluster, rec, whole):
    for name, breaking in (("cut", cut), ("garbled", garble)):
        copy, stream = copy_with(rec, name, breaking)
        words, said = report(cluster, copy)
        print(words.strip())
        assert "trace report: warning: " in words and f"{stream} is skipped: " in words, words
        assert [s["file"] for s in said["recordings"][0]["skipped"]] == [stream]
        assert 0 < said["events"] < whole["events"], (said["events"], whole["events"])
        for other in glob.glob(f"{copy}/**/ch_*", recursive=True):
            if "/index/" not in other and os.path.getsize(other):
                os.truncate(other, 50)
        words, _ = report(cluster, copy, code=1)
        assert copy in words, words


def check_screens(rec):
    for columns in 80, 40, 200:
        text = show(EXPERTCTL, "trace", "report", rec, "--top", "3", columns=columns)
        assert re.search(r"^[0-9a-f]{32}\b", text, re.M), text
        assert columns < 80 or all(word in text for word in ("STAGE", "SHARE %", "PEER", "WAITED MS", "TRACE ID", "MOSTLY", "EXPERT")), text


def main(cluster, folder):
    cluster.session_daemon()
    coordinator, url = cluster.daemon("coordinator", COORDINATOR, "--min-nodes", "2", "--copies", "2")
    a, b = (cluster.node(n, url) for n in "ab")
    wait_for("two copies of each expert", lambda: cluster.is_good(EXPERTCTL, "status", "--coordinator", url))
    cluster.wait_registered(3)
    cluster.record("rec")
    command = break_while_running(cluster, url, 1, lambda: b.send_signal(signal.SIGSTOP), "20", codes=(0,))
    b.send_signal(signal.SIGCONT)
    lost, held_up = check_events(cluster.recorded("rec"), command)
    rec = f"{folder}/rec"
    whole = check_report(cluster, rec, lost, held_up)
    check_screens(rec)
    check_broken(cluster, rec, whole)
    print(whole["events"], "events;", len(lost), "answers not used,", len(held_up), "calls held up")
    cluster.stop("a", "b", "coordinator")
    cluster.stop("sessiond")


run_test(main)
