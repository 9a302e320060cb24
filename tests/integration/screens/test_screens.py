#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an operator sees on terminals of several sizes, and what a pipe gets instead: every command against a real cluster."""
import json, os, re, signal, subprocess

from door_cluster import BUILD, EXPERTCTL, LAYER, MODEL, Cluster, read_safetensors, wait_for
from terminal import Terminal, show

NODES = [f"expertd-{i}.expertd.a-namespace.svc.cluster.local" for i in range(2)]


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return f"{crc ^ 0xFFFFFFFF:08x}"


def piped(*command, codes=(0,)):
    """Not a terminal: whole lines, no escapes."""
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode in codes, (command, done.returncode, done.stdout, done.stderr)
    assert b"\x1b" not in done.stdout + done.stderr and b"\r" not in done.stdout + done.stderr, (command, done.stdout)
    return done.stdout.decode()


def check_help():
    """Of each command and verb: no line is wider, and no example was broken by wrapping."""
    names = re.findall(r"^  (\w+) +\S", piped(EXPERTCTL, "--help").split("Commands:")[1].split("\n\n")[0], re.M)
    verbs = ["frame encode", "frame decode", "trace record", "trace report", "trace export", "trace snapshot", "model default", "model show", "context add"]
    for name in ["--help", *sorted(set(names) - {"help"}), *verbs]:
        text = piped(EXPERTCTL, *(name.split() if name.startswith("-") else [*name.split(), "--help"]))
        assert all(len(line) <= 80 for line in text.splitlines()), (name, [line for line in text.splitlines() if len(line) > 80])
        examples = text.split("\nExamples:\n")[1].split("\n\n")[0].splitlines() if "\nExamples:\n" in text else []
        assert all(line.startswith("  ") for line in examples), (name, examples)
    assert len(names) > 15, names


def check_widths(commands):
    """name: (command, words of its headings that 80 columns have, headings that only a pipe is sure to have, exit codes); a pipe's are of stdout"""
    for command, headings, whole, codes in commands:
        for columns in 80, 40, 200, 20:
            text = show(*command, columns=columns, codes=codes)
            assert columns < 80 or all(word in text for word in headings), (command, columns, text)
        text = piped(*command, codes=codes)
        assert all(word in text for word in headings + whole), (command, text)


def check_status(where):
    text = show(EXPERTCTL, "status", *where)
    rows = [line.split() for line in text.splitlines() if " serving " in line]
    assert len({row[0] for row in rows}) == 2, f"the names are cut so that they are the same: {text}"
    rows = [line.split() for line in piped(EXPERTCTL, "status", *where).splitlines() if " serving " in line]
    assert sorted(row[0] for row in rows) == NODES and all(row[2].isdigit() and row[3] == "0" and len(row) == 9 for row in rows), rows


def check_top(where, node_pid):
    top = [EXPERTCTL, "top", "--interval", "100ms", *where]
    has_view = lambda text: "rows/s" in text and "\nNODE " in text and "HOTTEST LAYERS" in text and "HOTTEST EXPERTS" in text
    ways = {"q": lambda t: t.type(b"q"), "^C": lambda t: t.type(b"\x03"), "end of input": lambda t: t.type(b"\x04"), "SIGTERM": lambda t: t.process.send_signal(signal.SIGTERM),
            "SIGHUP": lambda t: t.process.send_signal(signal.SIGHUP)}
    for way, end in ways.items():
        with Terminal(*top, before="what stood here before\r\n$ ") as terminal:
            terminal.wait_for("a view", has_view)
            assert not terminal.is_restored(), "nothing was changed, so nothing can be restored"
            end(terminal)
            code = terminal.end()
            assert code == 0 and terminal.is_restored(), (way, code, terminal.screen.text())
            assert terminal.screen.text().startswith("what stood here before\n$ "), (way, terminal.screen.text())
            assert not terminal.screen.too_wide, (way, terminal.screen.too_wide)

    with Terminal(*top) as terminal: # other sizes; the headings stay, and nothing scrolls
        views = lambda: terminal.raw.count("\x1b[J")
        for columns, rows in (80, 24), (40, 10), (200, 50), (80, 12), (20, 5):
            terminal.resize(columns, rows)
            for count in 2, 1: # what was on its way when the size changed is over
                last = views()
                terminal.wait_for(f"views of {columns}x{rows}", lambda _: views() > last + count)
                text, wide, scrolled = terminal.screen.text(), terminal.screen.too_wide[:], terminal.screen.scrolled[:]
                terminal.screen.too_wide.clear()
                terminal.screen.scrolled.clear()
            assert not wide and not scrolled and text.count("\n") < rows, (columns, rows, wide, scrolled, text)
            assert "\nNODE " in text and "STATE" in text and (columns < 200 or "URL" in text) and (rows < 10 or "HOTTEST LAYERS" in text), text
        terminal.type(b"q")
        assert terminal.end() == 0 and terminal.is_restored()

    with Terminal(*top) as terminal: # two nodes in one row: the second is reached
        terminal.resize(80, 4)
        terminal.wait_for("a short view", lambda text: "1-2 shown" not in text and "\nNODE " in text)
        terminal.process.send_signal(signal.SIGTSTP)
        wait_for("the stop", lambda: open(f"/proc/{terminal.process.pid}/stat").read().rsplit(")", 1)[1].split()[0] == "T")
        terminal.read()
        assert terminal.is_restored(), "stopped, and the terminal is not the shell's"
        terminal.process.send_signal(signal.SIGCONT)
        terminal.wait_for("the view again", lambda text: terminal.screen.main is not None and "\nNODE " in text)
        terminal.type(b"q")
        assert terminal.end() == 0 and terminal.is_restored()

    os.kill(node_pid, signal.SIGSTOP) # an hour until an answer is given up
    try:
        with Terminal(EXPERTCTL, "top", "--timeout", "3600s", *where) as terminal:
            blocked = lambda: int(re.search(r"SigBlk:\s*(\w+)", open(f"/proc/{terminal.process.pid}/status").read()).group(1), 16)
            wait_for("top to take signals", lambda: blocked() & 1 << signal.SIGINT - 1)
            terminal.type(b"\x03")
            assert terminal.end() == 0 and terminal.is_restored()
    finally:
        os.kill(node_pid, signal.SIGCONT)

    view = json.loads(piped(*top, "--once", "-o", "json"))
    assert sorted(n["name"] for n in view["nodes"]) == NODES and view["seconds"] > 0 and view["coordinator_error"] is None, view
    assert all(n["rows_per_s"] >= 0 and n["requests_in_flight"] >= 0 for n in view["nodes"] if n["state"] == "serving"), view
    for options in (), ("-o", "json"):
        stream = subprocess.Popen([*top, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        lines = [stream.stdout.readline() for _ in range(20 if not options else 3)]
        stream.send_signal(signal.SIGTERM)
        rest, _ = stream.communicate(timeout=60)
        assert stream.returncode == 0 and b"\x1b" not in b"".join(lines) + rest, (stream.returncode, lines)
        assert not options or all(json.loads(line)["nodes"] for line in lines), lines


def check_random(c, coordinator, node):
    forward = [EXPERTCTL, "forward", "--model", "demo", "--layer", str(LAYER), "--random", "5", "-o", "json"]
    ways = [("--coordinator", coordinator), ("--coordinator", coordinator, "--gateway"), ("--node", node), ("--node", node, "--out", c.path("y"))]
    said = [json.loads(piped(*forward, *way)) for way in ways]
    assert len({s["y"]["crc32c"] for s in said}) == 1, said
    assert said[0]["x"] == {"shape": [5, 128], "dtype": "bf16", "seed": 1} and said[0]["y"]["shape"] == [5, 128], said[0]
    assert said[0]["node_names"] and set(said[0]["node_names"]) <= set(NODES) and said[1]["nodes"] > 0 and said[2]["node_names"] == NODES[:1], said
    assert crc32c(read_safetensors(c.path("y"))["y"]) == said[3]["y"]["crc32c"], said[3]
    other = json.loads(piped(*forward, "--seed", "2", *ways[0]))
    assert other["x"]["seed"] == 2 and other["y"]["crc32c"] != said[0]["y"]["crc32c"], other
    text = show(*forward[:-2], "--seed", "2", *ways[0])
    for word in "[5,128] bf16, random with seed 2", other["y"]["crc32c"], " ms, 1 call, ", "nodes ":
        assert word in text, (word, text)
    for options, words in (("--layer", "77"), "there is no layer 77 of model 'demo'; the table has demo version "), (("--model", "none"), "there is no model 'none'"), \
            (("--version", "v9"), "there is no model 'demo' version v9; the table has demo version "):
        error = c.run(*forward, *ways[0], *options, code=1).stderr.decode()
        assert words in error, error


def check_loading(c):
    """A node alone: on a terminal the progress is one line, else it is in the log."""
    node = [f"{BUILD}/server/expertd/expertd", f"--model=a-model-of-a-long-name-which-takes-much-of-a-line={MODEL}", "--node-name=alone", "--listen=tcp://127.0.0.1:0",
            "--admin-listen=", "--probe-address=", "--door-listen="]
    with Terminal(*node, columns=60) as terminal:
        terminal.wait_for("the experts", lambda _: "state=serving" in terminal.raw)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 0, terminal.raw
        drawn = [re.sub(r"\x1b\[K", "", part) for part in re.split(r"[\r\n]+", terminal.raw) if part.startswith("loading ")]
        assert drawn and all(len(line) < 60 for line in drawn), drawn
        assert "100 %" in drawn[-1], drawn
    with open(c.path("alone"), "wb") as log:
        alone = subprocess.Popen(node, stdout=log, stderr=log)
        c.processes.append(("alone", alone))
    wait_for("the experts", lambda: b"state=serving" in open(c.path("alone"), "rb").read())
    alone.terminate()
    assert alone.wait(timeout=60) == 0
    log = open(c.path("alone"), "rb").read()
    assert b"\x1b" not in log and b"\r" not in log and re.search(rb" event=expert-loading model=\S*-a-line percent=100 ", log), log


check_help()
with Cluster() as c:
    ports = c.coordinator("--copies=2", "--min-nodes=2", "--heartbeat-dead-count=100", "--admin-listen=tcp://127.0.0.1:0")
    coordinator = ports["rpc_url"]
    nodes = [c.node(name, f"--coordinator-url={coordinator}") for name in NODES]
    where = ("--coordinator", coordinator)
    c.wait_serving(*where)
    check_random(c, coordinator, nodes[0]["rpc_url"])
    bench = [EXPERTCTL, "bench", *where, "--model", "demo", "--layer", str(LAYER), "--tokens", "4"]
    ctl = lambda *arguments: (EXPERTCTL, *arguments)
    check_widths([
        (ctl("status", *where), ["NODE", "STATE", "ROWS SERVED", "SPEED", "LAST SEEN", "MODEL", "COPIES", "healthy"], ["HOST", "URL", "NUMERICS"], (0,)),
        (ctl("status", "--node", nodes[0]["rpc_url"]), ["NODE", "STATE", "ROWS SERVED", "FAILED", "LAYER", "healthy"], ["WEIGHTS", "UPTIME", "URL"], (0,)),
        (ctl("status", "--coordinator", "tcp://127.0.0.1:1"), [], [], (3,)),
        (ctl("table", *where, "--layer", "0"), ["LAYER", "EXPERT", "NODES"], ["MODEL", "VERSION"], (0,)),
        (ctl("model", "show", *where), ["LAYER", "ACTIVATION", "ALPHA", "BETA", "LIMIT"], ["MODEL", "HIDDEN", "SHARED INNER"], (0,)),
        (ctl("stats", *where, "--experts"), ["MODEL", "LAYER", "SLOTS", "MAX/MEAN", "GINI", "EXPERT", "SHARE"], ["VERSION", "EXPERTS"], (0,)),
        (ctl("plan", "--admin", ports["admin_url"]), ["NODE", "COPIES", "TO LOAD", "LAYER", "/MEAN", "/BOUND"], ["VERSION", "GIVEN UP"], (0,)),
        (ctl("config", "--admin", ports["admin_url"]), ["KEY", "VALUE"], ["ORIGIN", "RELOAD", "flag --listen"], (0,)),
        (ctl("doctor", *where), ["healthy"], [], (0,)),
        (ctl("doctor", "--coordinator", "tcp://127.0.0.1:1", "--timeout", "3s"), ["error ", "Do: "], [], (1,)),
        (ctl("top", "--once", "--interval", "100ms", *where), ["NODE", "STATE", "ROWS/S", "CALLS/S", "FAIL/S", "HOTTEST LAYERS", "HOTTEST EXPERTS"], ["HEDGE/S", "URL"], (0,)),
        (tuple(bench) + ("--seconds", "0.05"), ["CALLS", "TOKENS/S", "P50 US", "P99 US", "MEAN OF A CALL", "WAITED FOR"], ["BYTES/TOKEN", "RE-ROUTED"], (0,)),
        (ctl("rpc", "list", *where), ["SERVICE", "METHOD"], ["IDEMPOTENT"], (0,)),
        (ctl("forward", *where, "--model", "demo", "--layer", "0", "--random", "3"), ["layer", "CRC32C"], ["nodes"], (0,)),
    ])
    check_status(where)
    load = subprocess.Popen([*bench, "--seconds", "3600"], stdout=subprocess.DEVNULL)
    c.processes.append(("bench", load))
    open(c.path("bench.log"), "w").close()
    check_top(where, c.processes[1][1].pid)
    load.kill()
    load.wait()
    c.processes.pop()
    check_loading(c)
    c.processes.pop()
    c.stop()
