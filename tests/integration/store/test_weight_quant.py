#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Nodes that put a model's experts into smaller formats (weight_quant): bits as of the oracle, from files, from other nodes and from packed files; nodes of unlike
formats serve versions of their own, and never stand in for each other."""
import json, os, random, struct, subprocess, urllib.request

from door_cluster import BUILD, EXPERTCTL, EXPERTS, HIDDEN, LAYER, MODEL, Cluster, read_safetensors, safetensors, wait_for

EXPERTD = f"{BUILD}/server/expertd/expertd"
CLIENT, NODE = "client-token-1111", "node-token-22222222"
SIZES = {"int8-g32": 34 / 64, "int4-g32": 18 / 64, "mxfp4": 17 / 64, "q4_k": 20 / 64} # of 32 weights against bf16; q4_k has 8 bytes more for rows up to 256


def secure(c):
    return ["--token-file=" + c.write("client.token", CLIENT.encode()), "--node-token-file=" + c.write("node.token", NODE.encode())]


def start(c, name, url, quant, *options, **fields):
    model = {"name": "demo", "path": MODEL, "experts": "all", "weight_quant": quant} | fields
    config = c.write(name + ".yaml", f"models: [{json.dumps(model)}]\n".encode())
    return c.daemon(name, EXPERTD, "--config=" + config, "--node-name=" + name, "--coordinator-url=" + url, "--threads=1", "--numerics=portable", *secure(c), *options)


def metric(node, name):
    text = urllib.request.urlopen(node["probe_url"] + "/metrics", timeout=10).read().decode()
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[-1])


def loaded(node):
    wait_for("experts", lambda: metric(node, "expertd_experts_owned") > 0 and metric(node, "expertd_experts_loading") == 0)


def end(c, name):
    process = dict(c.processes)[name]
    process.terminate()
    assert process.wait(timeout=60) == 0
    c.processes = [p for p in c.processes if p[0] != name]


def forward(c, url, batch, *options, code=0):
    return c.run(EXPERTCTL, "forward", "--coordinator", url, "--token-file", c.path("client.token"), "--model", "demo", "--layer", str(LAYER), "--in", batch, "--out", c.path("y"),
                 "--timeout", "20s", *options, code=code)


ORACLES = {}


def answers_as_the_oracle(c, url, version, quant):
    batch = c.batch("batch", 40, 3)
    forward(c, url, batch, "--version", version)
    if quant not in ORACLES:
        ORACLES[quant] = c.oracle(batch, "--weight-quant", quant, "--numerics", "portable")
    assert read_safetensors(c.path("y"))["y"] == ORACLES[quant], f"{version}: other bits than the oracle's of {quant}"


def status(c, url):
    """Of a cluster with several versions it is a problem, and exits so."""
    command = [EXPERTCTL, "status", "--coordinator", url, "--token-file", c.path("client.token"), "--output", "json"]
    return json.loads(subprocess.run(command, capture_output=True, timeout=120).stdout)


def versions(c, url):
    return {m["version"] for m in status(c, url)["models"]}


ERRORS = {"int8-g32": (0.004, 0.02), "int4-g32": (0.07, 0.25), "mxfp4": (0.1, 0.25), "q4_k": (0.06, 0.25)} # from, to: the bound


def tells_its_errors(c, url, name, node, quant):
    """Log, status of the node and of the cluster, /status.json and the metric say the same."""
    shown = json.loads(c.run(EXPERTCTL, "status", "--node", node["rpc_url"], "--token-file", c.path("client.token"), "--output", "json").stdout)["nodes"][0]["layers"]
    weights, outputs = [[layer[key] for layer in shown] for key in ("weight_quant_error", "weight_quant_output_error")]
    text = urllib.request.urlopen(node["probe_url"] + "/metrics", timeout=10).read().decode()
    measured = {line.split('layer="')[1].split('"')[0] + line.split('of="')[1].split('"')[0]: float(line.split()[-1]) for line in text.splitlines()
                if line.startswith("expertd_weight_quant_error_ratio{")}
    if quant == "none":
        assert not measured and set(weights + outputs) == {None}, (measured, shown)
        assert not [line for line in c.log(name) if line["event"] == "weight-quant"]
        return
    low, high = ERRORS[quant]
    assert all(low < w < high and w < o < 3 * w for w, o in zip(weights, outputs)), (quant, shown)
    for layer in shown:
        for of, key in ("weights", "weight_quant_error"), ("outputs", "weight_quant_output_error"):
            assert abs(measured[f"{layer['layer']}{of}"] / layer[key] - 1) < 1e-12, (measured, layer)
    lines = [line for line in c.log(name) if line["event"] == "weight-quant"]
    assert lines, "no line tells of the errors" # a node that is slow to queue its experts ends its first pass more than once
    line, worst = lines[-1], max(shown, key=lambda layer: layer["weight_quant_error"])
    assert (line["weight_quant"], line["layer"], line["error"], line["output_error"]) == (quant, str(worst["layer"]), f"{max(weights):.4f}", f"{max(outputs):.4f}"), line
    whole = max(weights), max(outputs)
    wait_for("a heartbeat", lambda: whole in [(n["weight_quant_error"], n["weight_quant_output_error"]) for n in status(c, url)["nodes"]])


def unlike_nodes_are_versions_of_their_own(c):
    main = c.coordinator("--copies=1", "--heartbeat-ms=100", *secure(c))
    url = main["rpc_url"]
    cache = "--weight-cache-dir=" + c.path("cache")
    nodes = {"none": start(c, "n-none", url, "none", cache)}
    for quant in SIZES:
        nodes[quant] = start(c, "n-" + quant, url, quant, cache)
    for node in nodes.values():
        loaded(node)
    wait_for("all versions", lambda: len(versions(c, url)) == 1 + len(SIZES))
    files = next(v for v in versions(c, url) if len(v) == 16)
    names = {"none": files} | {quant: f"{files}-{quant}" for quant in SIZES}
    assert versions(c, url) == set(names.values()), versions(c, url)
    assert any(f"model demo is served in versions {files} (default) and {files}-int8-g32" == p for p in status(c, url)["problems"]), status(c, url)["problems"]
    whole = metric(nodes["none"], "expertd_weights_bytes")
    for quant, version in names.items():
        answers_as_the_oracle(c, url, version, quant)
        share = metric(nodes[quant], "expertd_weights_bytes") / whole
        assert abs(share / SIZES.get(quant, 1) - 1) < 0.05, (quant, share)
        tells_its_errors(c, url, "n-" + quant, nodes[quant], quant)
    assert len(set(ORACLES.values())) == 1 + len(SIZES)
    page = json.loads(urllib.request.urlopen(main["probe_url"] + "/status.json", timeout=10).read())
    said = [{n["name"]: round(n["weight_quant_error"] or 0, 9) for n in nodes_of["nodes"]} for nodes_of in (page, status(c, url))]
    assert said[0] == said[1], said
    generate = [EXPERTCTL, "generate", "--coordinator", url, "--token-file", c.path("client.token"), "--checkpoint", MODEL, "--model", "demo", "--prompt", "The ", "--bytes", "8", "--report",
                "json"]
    for quant, version in names.items():
        assert json.loads(c.run(*generate, "--weight-quant", quant).stderr)["version"] == version
    for quant, node in nodes.items(): # each has written its own files, and reads no other's
        wait_for("packed files", lambda n=node: metric(n, 'expertd_weight_cache_files_total{op="written"}') == metric(n, "expertd_experts_owned"))
        assert metric(node, 'expertd_weight_cache_files_total{op="read"}') == 0
    # without its nodes a version has nobody else
    end(c, "n-int8-g32")
    command = [EXPERTCTL, "forward", "--coordinator", url, "--token-file", c.path("client.token"), "--model", "demo", "--version", names["int8-g32"], "--layer", str(LAYER), "--in",
               c.batch("batch", 40, 3), "--out", c.path("y"), "--timeout", "1s"]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode != 0, "others answered for it"
    again = start(c, "n-int8-g32", url, "int8-g32", cache)
    loaded(again)
    assert metric(again, 'expertd_weight_cache_files_total{op="read"}') == metric(again, "expertd_experts_owned")
    tells_its_errors(c, url, "n-int8-g32", again, "int8-g32") # of packed experts those of a sample
    wait_for("its version", lambda: names["int8-g32"] in versions(c, url))
    answers_as_the_oracle(c, url, names["int8-g32"], "int8-g32")
    c.stop()


def files_from_nodes_of_another_format(c):
    url = c.coordinator("--copies=1", "--heartbeat-ms=100", *secure(c))["rpc_url"]
    loaded(start(c, "source", url, "mxfp4"))
    os.mkdir(c.path("mirror"))
    node = start(c, "mirror.node", url, "int4-g32", path=c.path("mirror"), weights_from="nodes")
    loaded(node)
    version = next(v for v in versions(c, url) if v.endswith("-int4-g32"))
    answers_as_the_oracle(c, url, version, "int4-g32")
    assert metric(node, 'expertd_weight_files_bytes_total{direction="received"}') > 0
    c.stop()


def write_small(c, name, tensors, **config):
    """One layer of two experts."""
    os.mkdir(c.path(name))
    c.write(name + "/model.safetensors", safetensors(tensors))
    c.write(name + "/config.json", json.dumps({"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": HIDDEN, "moe_intermediate_size": HIDDEN, "num_hidden_layers": 1,
                                               "num_experts": 2, "num_experts_per_tok": 1, "vocab_size": 32, "torch_dtype": "bfloat16", "num_attention_heads": 4,
                                               "norm_topk_prob": True} | config).encode())


def refuses_errors_beyond_the_bound(c):
    """Expert 1 has a column of large weights, which cost their neighbours their digits; expert 0 is served."""
    draw, tensors = random.Random(5), {"model.layers.0.mlp.gate.weight": ("BF16", [2, HIDDEN], bytes(4 * HIDDEN))}
    for e in range(2):
        for matrix in "gate_proj", "up_proj", "down_proj":
            values = [draw.gauss(0, 0.02) * (1000 if e == 1 and matrix == "up_proj" and i % HIDDEN % 32 == 7 else 1) for i in range(HIDDEN * HIDDEN)]
            halves = [struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in values]
            tensors[f"model.layers.0.mlp.experts.{e}.{matrix}.weight"] = ("BF16", [HIDDEN, HIDDEN], struct.pack(f"<{len(halves)}H", *halves))
    write_small(c, "outliers", tensors)
    for quant, words in ("int8-g32", "allowed 0.02: take weight_quant out"), ("int4-g32", "allowed 0.25: take int8-g32, or weight_quant out"):
        config = c.write("outliers.yaml", ("models: [" + json.dumps({"name": "demo", "path": c.path("outliers"), "weight_quant": quant}) + "]\n").encode())
        node = c.daemon("n-" + quant, EXPERTD, "--config=" + config)
        loaded(node)
        assert metric(node, "expertd_experts_owned") == 1 and metric(node, "expertd_experts_failed") == 1
        said = [line for line in c.log("n-" + quant) if line["event"] == "expert-load"]
        assert len(said) == 1 and (said[0]["layer"], said[0]["expert"]) == ("0", "1"), said
        assert words in said[0]["reason"] and "model.safetensors: tensor model.layers.0.mlp.experts.1.up_proj.weight" in said[0]["reason"], said
    c.stop()


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}}}}


def matrix(stem, quant):
    """HIDDEN by HIDDEN: bf16, fp8 with scales in blocks, or int4 in groups."""
    if quant is FP8:
        return {stem: ("F8_E4M3", [HIDDEN, HIDDEN], bytes([0x38]) * HIDDEN * HIDDEN), stem + "_scale_inv": ("F32", [1, 1], struct.pack("<f", 0.25))}
    if quant is INT4:
        return {stem + "_packed": ("I32", [HIDDEN, HIDDEN // 8], bytes([0x9A]) * (HIDDEN * HIDDEN // 2)),
                stem + "_scale": ("BF16", [HIDDEN, HIDDEN // 32], struct.pack("<H", 0x3C80) * (HIDDEN * HIDDEN // 32))}
    return {stem: ("BF16", [HIDDEN, HIDDEN], struct.pack("<H", 0x3C80) * HIDDEN * HIDDEN)}


def checkpoint(c, name, quant, layers, experts):
    """layers, experts: which layers, and which experts of each layer, are in quant's format; the others are in bf16."""
    os.mkdir(c.path(name))
    tensors = {}
    for layer, is_all in enumerate(layers):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = ("BF16", [len(experts), HIDDEN], bytes(2 * len(experts) * HIDDEN))
        for e, is_own in enumerate(experts):
            for word in "gate_proj", "up_proj", "down_proj":
                tensors |= matrix(f"model.layers.{layer}.mlp.experts.{e}.{word}.weight", quant if is_all or is_own else None)
    c.write(name + "/model.safetensors", safetensors(tensors))
    c.write(name + "/config.json", json.dumps({"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": HIDDEN, "moe_intermediate_size": HIDDEN, "num_hidden_layers": len(layers),
                                               "num_experts": len(experts), "num_experts_per_tok": 1, "vocab_size": 32, "torch_dtype": "bfloat16", "num_attention_heads": 4,
                                               "norm_topk_prob": True, "quantization_config": quant}).encode())
    return c.path(name)


def try_config(c, model, *more):
    config = c.write("try.yaml", ("models: [" + json.dumps({"name": "demo"} | model) + "]\n").encode())
    return subprocess.run([EXPERTD, "--config=" + config, "--listen=tcp://127.0.0.1:0", "--admin-listen=", "--door-listen=", "--probe-address=127.0.0.1:0", *more], capture_output=True,
                          timeout=60)


def refuses_what_is_quantised(c):
    fp8, second = checkpoint(c, "fp8", FP8, [True], [False, False]), checkpoint(c, "second", FP8, [False, True], [False, False])
    os.mkdir(c.path("fetched"))
    stored = {"path": c.path("fetched"), "weights_from": "storage", "storage_path": fp8}
    for words, model in ("the routed ones of layer 0 are in f8e4m3-block128 already: take weight_quant out", {"path": fp8, "weight_quant": "mxfp4"}), \
                        ("the routed ones of layer 1 are in f8e4m3-block128 already: take weight_quant out", {"path": second, "weight_quant": "mxfp4"}), \
                        ("the routed ones of layer 0 are in f8e4m3-block128 already: take weight_quant out", stored | {"weight_quant": "mxfp4"}), \
                        ("allowed: none, int8-g32, int4-g32, mxfp4, q4_k", {"path": MODEL, "weight_quant": "int8"}):
        for more in [["--check-config"], []]:
            done = try_config(c, model, *more)
            assert done.returncode != 0 and words in done.stderr.decode(), (more, done.stderr.decode())
    # one expert that its layer's first does not tell: a check says what the node would
    one = checkpoint(c, "one", FP8, [False], [False, True])
    done = try_config(c, {"path": one, "weight_quant": "mxfp4"}, "--check-config")
    told = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0 and "unreadable=1" in told and "is f8e4m3-block128, down f8e4m3-block128; weight_quant mxfp4 is for bf16, f16 and f32: take it out" in told, told


def a_family_counts_for_layers_behind_the_first(c):
    """w4a8 computes a model whose first layer is in bf16 and the second in int4: that is no lack of it."""
    for name, layers, lacks in ("all", [False, False], True), ("behind", [False, True], False):
        path = checkpoint(c, name, INT4, layers, [False, False])
        c.daemon(name + ".node", EXPERTD, "--model=demo=" + path, "--numerics=w4a8", "--threads=1")
        told = [line for line in c.log(name + ".node") if line.get("event") == "numerics"]
        assert len(told) == lacks and all("computed as with bf16dp" in line["effect"] for line in told), told
    c.stop()


for part in (unlike_nodes_are_versions_of_their_own, files_from_nodes_of_another_format, refuses_errors_beyond_the_bound, refuses_what_is_quantised,
             a_family_counts_for_layers_behind_the_first):
    with Cluster() as cluster:
        part(cluster)
