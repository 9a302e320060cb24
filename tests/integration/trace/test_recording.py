#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records generate runs of a coordinator and two nodes and reads them back, once with a client that routes and once through the
gateway: every begin has its end, one trace id in all processes, each span inside what called it, the events are those of
trace_spans.def, the text is the reference's; and with tracing off nothing of LTTng is in a process."""
import re

from recording import BUILD, COORDINATOR, EXPERTCTL, EXPERTD, MODEL, SOURCE, mapped, match, run_test, wait_for

TRACES = {"direct": "0af7651916cd43dd8448eb211c80319c", "gateway": "4bf92f3577b34da6a3ce929d0e0e4736"}
PARENT = 0xb7ad6b7169203331
PROMPT = ["--prompt", "The file ", "--bytes", "60"]
ALL_SPANS = set(re.findall(r"^EP_TRACE_SPAN\((\w+),", open(f"{SOURCE}/lib/observe/trace_spans.def").read(), re.M))
ALL_SPANS -= {"load"} # all experts are there before the recording begins


def inside(inner, outer):
    return outer[0]["at"] <= inner[0]["at"] and inner[1]["at"] <= outer[1]["at"]


def check_nodes(pairs, exchanges, jobs):
    """A node's work: begun inside the exchange, and its parent is the layer call that the exchange belongs to."""
    for pair in pairs:
        begin, end = pair
        if begin["span"] in ("serve", "reply", "queue", "decode"):
            outer = exchanges[begin["call"]]
            assert outer[0]["at"] <= begin["at"] <= outer[1]["at"], (begin, outer)
            if begin["span"] == "serve":
                assert begin["parent"] == outer[0]["parent"]
            if begin["span"] == "queue":
                assert end["parent"] in jobs
        elif begin["span"] == "kernel":
            assert inside(pair, jobs[begin["call"]])


def of(pairs, span):
    return {b["call"]: (b, e) for b, e in pairs if b["span"] == span}


def check(events, trace, spans, processes):
    """Pairs of all spans of the run's whole calls, after what holds for both kinds of run was checked."""
    forwards = [e for e in events if e["span"] == "forward" and e["trace"] == trace]
    begins = [e for e in forwards if e["kind"] == "begin"]
    # A command's last words on the wire may come after the recording ended: until the last call began nothing is missing.
    pairs, _ = match(events, begins[0]["at"], begins[-1]["at"])
    assert {e["trace"] for e in events} - {"0" * 32} == {trace}
    assert {e["span"] for e in events} == spans, {e["span"] for e in events} ^ spans
    names = {}
    for e in events:
        if e["trace"] == trace:
            names.setdefault(e["pid"], set()).add(e["node"])
    assert len(names) == processes, names
    assert all(e["status"] == 0 for e in events if e["kind"] == "end")
    assert {b["node"] for b, e in pairs if b["span"] == "serve"} == {"a", "b"}
    exchanges = {c: p for c, p in of(pairs, "exchange").items()}
    calls = of(pairs, "forward")
    for call, pair in exchanges.items():
        assert inside(pair, calls[pair[0]["parent"]])
    return pairs, exchanges, calls


def check_direct(events):
    pairs, exchanges, calls = check(events, TRACES["direct"], ALL_SPANS - {"gateway"}, 3)
    assert all(b["parent"] == PARENT for b, e in calls.values())
    check_nodes(pairs, exchanges, of(pairs, "job"))
    assert len(calls) > 100, len(calls)
    return len(events)


def check_gateway(events):
    pairs, exchanges, calls = check(events, TRACES["gateway"], ALL_SPANS, 4)
    gateways = of(pairs, "gateway")
    thin = {c: p for c, p in calls.items() if p[0]["node"] == "-"}
    inner = {c: p for c, p in calls.items() if p[0]["node"] == "gateway"}
    assert len(thin) > 100 and len(thin) + len(inner) == len(calls)
    assert abs(len(thin) - len(gateways)) <= 1 and abs(len(inner) - len(gateways)) <= 1
    assert all(b["parent"] == PARENT for b, e in thin.values())
    for call, pair in gateways.items(): # the client's exchange holds the gateway's span, that holds the layer call
        assert pair[0]["parent"] == exchanges[call][0]["parent"] and pair[0]["parent"] in thin
        assert exchanges[call][0]["peer"] == "gateway" and exchanges[call][0]["at"] <= pair[0]["at"]
    for call, pair in inner.items():
        assert pair[0]["parent"] in gateways and gateways[pair[0]["parent"]][0]["at"] <= pair[0]["at"]
    routed = {c: p for c, p in exchanges.items() if p[0]["node"] == "gateway"}
    assert all(p[0]["parent"] in inner for p in routed.values())
    check_nodes(pairs, routed, of(pairs, "job"))
    return len(events)


def main(cluster, folder):
    cluster.session_daemon()
    coordinator, url = cluster.daemon("coordinator", COORDINATOR, "--min-nodes", "2")
    for process in [coordinator, *(cluster.node(n, url) for n in "ab")]:
        wait_for("the probes", lambda pid=process.pid: mapped(pid, "libexpertd-trace.so"))
    off, _ = cluster.daemon("off", EXPERTD, "--node-name", "off", "--model", f"demo={MODEL}", "--tracing", "off")
    assert not mapped(off.pid, "lttng") and not mapped(off.pid, "libexpertd-trace"), "tracing is off and LTTng is there"
    wait_for("a table", lambda: cluster.is_good(EXPERTCTL, "status", "--coordinator", url))
    cluster.wait_registered(3)
    texts = {cluster.run(f"{BUILD}/tests/reference/ref_generate", "--model", MODEL, *PROMPT).stdout}
    events = {}
    for form, trace in TRACES.items():
        cluster.record(form)
        done = cluster.run(EXPERTCTL, "generate", "--coordinator", url, "--checkpoint", MODEL, "--model", "demo", *PROMPT,
                           "--traceparent", f"00-{trace}-{PARENT:016x}-01", *(["--gateway"] if form == "gateway" else []),
                           env=cluster.waiting)
        assert f"trace id {trace}" in done.stderr, done.stderr
        texts.add(done.stdout)
        events[form] = cluster.recorded(form)
    assert len(texts) == 1 and len(texts.pop()) == 69, texts
    print("direct:", check_direct(events["direct"]), "events; gateway:", check_gateway(events["gateway"]), "events; all matched")
    cluster.stop("a", "b", "off", "coordinator")
    cluster.stop("sessiond")


run_test(main)
