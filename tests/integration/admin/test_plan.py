#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""expertctl plan says what would move and changes nothing; --apply moves it while calls go on, none fails and every bit is the oracle's; the
placement written as an expert map is the one that a second service has from it."""
import json, re, struct, urllib.request

from door_cluster import EXPERTCTL, EXPERTS, HIDDEN, LAYER, MODEL, TOP_K, Cluster, safetensors, read_safetensors, wait_for

NODES, SLOTS = 4, 4096  # the coordinator judges by 1024 slots a node: fewer, as while some are not told yet, are not taken
LIGHT, HEAVY = 174, 338  # of 256: one node has 1.08 of the mean, which the coordinator leaves alone, and an exchange makes all equal


def table(c, where):
    return json.loads(c.run(EXPERTCTL, "table", *where, "-o", "json").stdout)


def placement(c, where):
    return [layer["nodes_of_expert"] for layer in table(c, where)["layers"]]


def plan(c, admin, *options):
    return json.loads(c.run(EXPERTCTL, "plan", *admin, *options, "-o", "json").stdout)


def balance(c, where, ports):
    """Busiest over mean and over bound, of the layer with load: expertctl stats and /metrics say the same."""
    layers = json.loads(c.run(EXPERTCTL, "stats", *where, "-o", "json").stdout)["layers"]
    (said,) = [(l["node_busiest_over_mean"], l["node_busiest_over_bound"]) for l in layers if "node_busiest_over_mean" in l]
    page = urllib.request.urlopen(ports["probe_url"] + "/metrics", timeout=60).read().decode()
    gauges = sorted(re.findall(r'^expertd_placement_busiest_over_(mean|bound)\{model="demo",version="\w+"\} (\S+)$', page, re.M))
    assert [(name, f"{float(value):.6f}") for name, value in gauges] == [("bound", f"{said[1]:.6f}"), ("mean", f"{said[0]:.6f}")], (gauges, said)
    return {"busiest_over_mean": said[0], "busiest_over_bound": said[1]}


def load_batch(c, slots_of_expert):
    """A batch that gives each expert so many slots: the slots in order, cut into TOP_K parts that stand side by side."""
    slots = [e for e, count in enumerate(slots_of_expert) for _ in range(count)]
    tokens = len(slots) // TOP_K
    ids = [slots[t + k * tokens] for t in range(tokens) for k in range(TOP_K)]
    return c.write("load", safetensors({"x": ("BF16", [tokens, HIDDEN], bytes(tokens * HIDDEN * 2)),
                                        "expert_ids": ("I32", [tokens, TOP_K], struct.pack(f"<{len(ids)}i", *ids)),
                                        "expert_scales": ("F32", [tokens, TOP_K], struct.pack(f"<{len(ids)}f", *([0.5] * len(ids))))}))


def start(c, *options):
    ports = c.coordinator("--heartbeat-ms=100", "--admin-listen=tcp://127.0.0.1:0", f"--min-nodes={NODES}", *options)
    nodes = [c.node(f"n{n}", "--admin-listen=tcp://127.0.0.1:0", "--coordinator-url=" + ports["rpc_url"]) for n in range(NODES)]
    c.wait_serving("--coordinator", ports["rpc_url"])
    return ("--coordinator", ports["rpc_url"]), ("--admin", ports["admin_url"]), ports, nodes


def forward(c, where, batch):
    c.run(EXPERTCTL, "forward", "--model", "demo", "--layer", str(LAYER), "--in", batch, "--out", c.path("y"), *where)
    return read_safetensors(c.path("y"))["y"]


with Cluster() as c:
    where, admin, ports, nodes = start(c, "--placement=balanced")
    assert "a node places nothing: ask the coordinator" in c.run(EXPERTCTL, "plan", "--admin", nodes[0]["admin_url"], code=1).stderr.decode()
    c.run(EXPERTCTL, "policy", "set", "hedge_permille=0", *admin)  # rows of a second send would count as load too
    quiet = plan(c, admin)
    assert quiet["policy"] == "balanced" and not any(l["load_known"] for l in quiet["layers"]) and quiet["sum"]["copies_to_load"] == 0, quiet

    before = placement(c, where)
    of_node = [[e for e in range(EXPERTS) if before[LAYER][e] == [f"n{n}"]] for n in range(NODES)]
    assert [len(of) for of in of_node] == [EXPERTS // NODES] * NODES, before
    slots = [SLOTS // EXPERTS] * EXPERTS
    slots[of_node[1][0]], slots[of_node[2][0]] = HEAVY, LIGHT
    forward(c, where, load_batch(c, slots))
    wait_for("the load to be known", lambda: plan(c, admin)["layers"][LAYER]["load_known"])

    dry = plan(c, admin, "--write-map", c.path("plan.json"))
    layer = dry["layers"][LAYER]
    busiest = (HEAVY + SLOTS // NODES - SLOTS // EXPERTS) / (SLOTS / NODES)
    assert all(abs(layer["before"][name] - busiest) < 0.02 for name in ("busiest_over_mean", "busiest_over_bound")), layer  # passes count a little
    assert layer["after"]["busiest_over_bound"] < 1.05 and layer["copies_to_load"] == layer["copies_given_up"] == 2, layer
    assert dry["sum"]["bytes_to_load"] == layer["bytes_to_load"] > 0 and not dry["applied"] and dry["sum"]["copies_to_load"] == 2, dry
    assert sum(n["copies_to_load"] for n in dry["nodes"]) == 2 and [n["node"] for n in dry["nodes"]] == ["n0", "n1", "n2", "n3"], dry
    assert balance(c, where, ports) == layer["before"]
    assert placement(c, where) == before and plan(c, admin) == dry, "a plan alone changed something"
    text = c.run(EXPERTCTL, "plan", *admin).stdout.decode()
    assert "2 copies to load" in text and f"{layer['before']['busiest_over_mean']:.3f} of the mean, after 1.0" in text, text

    batch = c.batch("batch", 4, 7)
    right = c.oracle(batch)
    epoch = table(c, where)["epoch"]["number"]
    assert forward(c, where, batch) == right
    done = plan(c, admin, "--apply")
    assert done["applied"] and done["sum"] == dry["sum"], done
    calls, now = 0, None
    while now is None or now["loading"] or now["sum"]["copies_to_load"] or now["sum"]["copies_given_up"]:
        assert forward(c, where, batch) == right, "other bits while copies moved"
        calls, now = calls + 1, plan(c, admin)
        assert calls < 200, now
    assert table(c, where)["epoch"]["number"] > epoch and forward(c, where, batch) == right
    after = placement(c, where)
    moved = [e for e in range(EXPERTS) if after[LAYER][e] != before[LAYER][e]]
    assert len(moved) == 2 and [a for l, a in enumerate(after) if l != LAYER] == [b for l, b in enumerate(before) if l != LAYER], (before, after)
    assert now["layers"][LAYER]["before"] == now["layers"][LAYER]["after"] == layer["after"], now
    assert balance(c, where, ports) == layer["after"]
    assert not plan(c, admin, "--apply")["applied"], "nothing was left to do"
    (said,) = [line for line in c.log("coordinator") if line.get("event") == "plan-applied"]
    assert said["copies_to_load"] in ("2", 2) and said["policy"] == "balanced", said

    # What was planned, what is written now, and what is in force are one placement.
    wrote = c.run(EXPERTCTL, "plan", "--write-map", c.path("map.json"), *admin).stderr.decode()
    assert "its devices are the 4 nodes in order of name, n0 first" in wrote and "equal counts" not in wrote, wrote
    assert json.load(open(c.path("map.json"))) == json.load(open(c.path("plan.json")))
    expert_map = open(c.path("map.json"), "rb").read()
    lost = c.run(EXPERTCTL, "plan", "--write-map", "/nonexistent/map.json", *admin, code=1).stderr.decode()
    assert "cannot write the expert map /nonexistent/map.json: No such file or directory" in lost, lost

    # The load of all layers, as it was counted, on machines that do not exist yet: four of them are what is here.
    load = load_batch(c, slots)
    for other in range(len(after)):
        if other != LAYER:
            c.run(EXPERTCTL, "forward", "--model", "demo", "--layer", str(other), "--in", load, "--out", c.path("y"), *where)
    stats = lambda: c.run(EXPERTCTL, "stats", "--experts", *where, "-o", "json").stdout
    wait_for("the load of all layers", lambda: [l["slots"] >= SLOTS for l in json.loads(stats())["layers"]] == [True] * len(after))
    offline = ("plan", "--model", MODEL + "/config.json", "--nodes", str(NODES), "--trace", c.write("stats.json", stats()))
    four = json.loads(c.run(EXPERTCTL, *offline, "--write-map", c.path("four.json"), "-o", "json").stdout)
    assert [l["layer"] for l in four["layers"]] == list(range(len(after))) and "zipf" not in four["assumptions"] and four["trace"], four
    assert abs(four["layers"][LAYER]["uniform"]["busiest_over_mean"] - busiest) < 0.05, four["layers"][LAYER]
    assert four["uniform"]["node_bytes_max"] == dry["nodes"][0]["bytes_before"] and four["balanced"]["worst_busiest_over_bound"] < 1.05, four
    assert [len(d["device_expert"]) for l in json.load(open(c.path("four.json")))["layer_list"] for d in l["device_list"]] == [EXPERTS // NODES] * NODES * len(after)
    assert "assumed: 256 tokens a step" in c.run(EXPERTCTL, *offline).stdout.decode()
    c.stop()

with Cluster() as c:
    where, admin, _, _ = start(c, "--placement=static", "--expert-map-file=" + c.write("map.json", expert_map))
    assert placement(c, where) == after, "the map gives another placement"
    static = plan(c, admin, "--write-map", c.path("again.json"))
    assert static["policy"] == "static" and static["sum"]["copies_to_load"] == static["sum"]["copies_given_up"] == 0, static
    assert json.load(open(c.path("again.json"))) == json.loads(expert_map)
    assert "the expert map alone decides" in c.run(EXPERTCTL, "plan", *admin).stdout.decode()
    c.stop()
print(f"the plan of 2 copies was made in {calls} polls with a call each, all with the oracle's bits; its expert map gave a second service the same placement")
