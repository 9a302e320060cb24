#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records one generate run of coordinator and two nodes and reads it back: every begin has its end, one trace id everywhere, a node's
work inside the client's exchange, the events are those of trace_spans.def; and with tracing off nothing of LTTng is in a process."""
import glob, os, re, shutil, subprocess, sys, tempfile, time

BUILD, SOURCE = sys.argv[1:3]
MODEL = f"{SOURCE}/deploy/demo-model/checkpoint"
EXPERTCTL = f"{BUILD}/client/cli/expertctl"
TOOLS = ["lttng-sessiond", "lttng", "babeltrace2"]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def wait_for(what, condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"waited 30 s for {what}")


class Cluster:
    def __init__(self, folder, env):
        self.folder, self.env, self.processes = folder, env, []

    def start(self, name, *command):
        log = open(f"{self.folder}/{name}.log", "wb")
        process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)
        self.processes.append((name, process))
        return process

    def daemon(self, name, program, *options):
        ports = f"{self.folder}/{name}.ports"
        process = self.start(name, program, "--listen", "tcp://127.0.0.1:0", "--admin-listen", "tcp://127.0.0.1:0", "--probe-address", "127.0.0.1:0", "--ports-file",
                             ports, *options)
        wait_for(f"{name} to listen", lambda: process.poll() is not None or (os.path.exists(ports) and os.path.getsize(ports)))
        assert process.poll() is None, f"{name} ended: " + open(f"{self.folder}/{name}.log").read()
        return process, re.search(r'"rpc_url": *"([^"]*)"', open(ports).read()).group(1)

    def run(self, *command):
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def stop(self, wanted):
        for name, process in reversed(self.processes):
            if name in wanted:
                process.terminate()
                code = process.wait(timeout=30)
                assert code == 0, f"{name} ended with {code}"
        self.processes = [p for p in self.processes if p[0] not in wanted]

    def kill(self):
        for _, process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def read_events(folder, trace):
    events = []
    line = re.compile(r"\[(\d+):(\d+):(\d+)\.(\d+)\] .*? expertd:(\w+)_(begin|end): .*?\{ (trace_hi.*) \}$")
    text = subprocess.run(["babeltrace2", trace], capture_output=True, text=True, check=True).stdout
    for at in text.splitlines():
        found = line.match(at)
        assert found, at
        h, m, s, ns, span, kind, fields = found.groups()
        values = dict(re.findall(r'(\w+) = ("[^"]*"|[-\w]+)', fields))
        values = {k: v.strip('"') if v[0] == '"' else int(v, 0) for k, v in values.items()}
        events.append(dict(values, span=span, kind=kind, at=((int(h) * 60 + int(m)) * 60 + int(s)) * 10**9 + int(ns)))
    return events


def check(events, trace_id):
    spans = re.findall(r"^EP_TRACE_SPAN\((\w+),", open(f"{SOURCE}/lib/observe/trace_spans.def").read(), re.M)
    seen = {e["span"] for e in events}
    assert seen == set(spans) - {"gateway"}, (seen, spans)
    # LTTng switches events on one after the other, also in a process that starts while a session records: a span that is open just
    # then may lose an end. From the first whole forward on nothing may be missing.
    begun, steady = {}, None
    for e in events:
        if e["span"] == "forward" and e["kind"] == "begin":
            begun[e["call"]] = e["at"]
        elif e["span"] == "forward" and e["call"] in begun:
            steady = begun[e["call"]]
            break
    assert steady is not None, "no whole forward"
    open_spans, done = {}, []
    for e in events:
        key = (e["span"], e["node"], e["call"], e["sub"])
        if e["kind"] == "begin":
            assert key not in open_spans, f"begun twice: {key}"
            open_spans[key] = e
        elif key in open_spans:
            done.append((open_spans.pop(key), e))
        else:
            assert e["at"] < steady, f"an end without begin: {key}"
    late = [key for key, e in open_spans.items() if e["at"] >= steady]
    assert not late, f"without end: {late[:5]}"
    done = [(b, e) for b, e in done if b["at"] >= steady]
    ids = {(e["trace_hi"], e["trace_lo"]) for e in events} - {(0, 0)}
    assert ids == {(int(trace_id[:16], 16), int(trace_id[16:], 16))}, ids
    assert {e["node"] for e in events if e["span"] == "serve"} == {"a", "b"}
    forwards = {b["call"]: (b, e) for b, e in done if b["span"] == "forward"}
    exchanges = {b["call"]: (b, e) for b, e in done if b["span"] == "exchange"}
    jobs = {b["call"]: (b, e) for b, e in done if b["span"] == "job"}
    for begin, end in done:
        if begin["span"] == "exchange" and begin["parent"] in forwards:
            outer = forwards[begin["parent"]]
            assert outer[0]["at"] <= begin["at"] and end["at"] <= outer[1]["at"]
        elif begin["span"] in ("serve", "reply", "queue", "decode") and begin["call"] in exchanges:
            outer = exchanges[begin["call"]]
            assert outer[0]["at"] <= begin["at"] <= outer[1]["at"], (begin, outer)
            if begin["span"] == "serve":
                assert begin["parent"] == outer[0]["parent"]
            if begin["span"] == "queue":
                assert end["parent"] in jobs
        elif begin["span"] == "kernel" and begin["call"] in jobs:
            assert jobs[begin["call"]][0]["at"] <= begin["at"] and end["at"] <= jobs[begin["call"]][1]["at"]
    assert len(exchanges) > 20 and len(forwards) > 20, "the client was recorded from its first calls on, or nearly so"
    return len(events)


def mapped(pid, word):
    return word in open(f"/proc/{pid}/maps").read()


def main(folder):
    env = dict(os.environ, LTTNG_HOME=folder)
    env.pop("LTTNG_UST_REGISTER_TIMEOUT", None)
    cluster = Cluster(folder, env)
    try:
        cluster.start("sessiond", "lttng-sessiond", "--no-kernel")
        wait_for("the session daemon", lambda: subprocess.run(["lttng", "--no-sessiond", "list"], env=env, capture_output=True).returncode == 0)
        coordinator, url = cluster.daemon("coordinator", f"{BUILD}/server/coordinator/expertd-coordinator", "--min-nodes", "2")
        nodes = [cluster.daemon(n, f"{BUILD}/server/expertd/expertd", "--node-name", n, "--coordinator-url", url, "--model",
                                f"demo={MODEL}")[0] for n in "ab"]
        for process in [coordinator, *nodes]:
            assert mapped(process.pid, "libexpertd-trace.so"), "the probes are not loaded"
        off, _ = cluster.daemon("off", f"{BUILD}/server/expertd/expertd", "--node-name", "off", "--model", f"demo={MODEL}", "--tracing", "off")
        assert not mapped(off.pid, "lttng") and not mapped(off.pid, "libexpertd-trace"), "tracing is off and LTTng is there"
        wait_for("a table", lambda: subprocess.run([EXPERTCTL, "status", "--coordinator", url], env=env, capture_output=True).returncode == 0)
        cluster.run("lttng", "create", "s", f"--output={folder}/trace")
        cluster.run("lttng", "enable-channel", "-u", "--subbuf-size=1M", "--num-subbuf=8", "ch")
        cluster.run("lttng", "enable-event", "-u", "-c", "ch", "expertd:*")
        cluster.run("lttng", "start")
        done = cluster.run(EXPERTCTL, "generate", "--coordinator", url, "--checkpoint", MODEL, "--model", "demo", "--prompt", "The file ",
                           "--bytes", "60", "--traceparent", TRACEPARENT)
        assert f"trace id {TRACEPARENT[3:35]}" in done.stderr, done.stderr
        cluster.stop({"a", "b", "off", "coordinator"})
        cluster.run("lttng", "stop")
        cluster.run("lttng", "destroy")
        print(check(read_events(folder, f"{folder}/trace"), TRACEPARENT[3:35]), "events, all matched")
        cluster.stop({"sessiond"})
    finally:
        cluster.kill()


if __name__ == "__main__":
    if any(shutil.which(t) is None for t in TOOLS) or not glob.glob(f"{BUILD}/lib/observe/libexpertd-trace.so.0"):
        print("LTTng is not installed")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as place:
        main(place)
