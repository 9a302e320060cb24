#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Nodes without a model's files get what they need of them from nodes that have them: bits as of the oracle; killed in the middle they go on; a source that dies,
lies or has another version is left for another one."""
import json, os, random, signal, struct, subprocess, sys, time, urllib.request

from door_cluster import BUILD, EXPERTCTL, EXPERTS, HIDDEN, LAYER, TOP_K, Cluster, read_safetensors, safetensors, wait_for
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../security")
import peer # pylint: disable=wrong-import-position

EXPERTD = f"{BUILD}/server/expertd/expertd"
LAYERS, INNER, MIB = LAYER + 1, 1024, 1 << 20
LIST, READ = 0x0801, 0x0802
CLIENT, NODE = "client-token-1111", "node-token-22222222"
SANE = bytes(0x3B + (b & 1) + (b & 0x80) for b in range(256)) # high bytes of small bf16 numbers


def numbers(draw, count):
    data = bytearray(2 * count)
    data[0::2] = draw.randbytes(count)
    data[1::2] = draw.randbytes(count).translate(SANE)
    return bytes(data)


def write_model(c, name, seed, inner=INNER):
    """A Mixtral, with INNER of 36 MiB, in two files; its directory and the bytes of all files."""
    draw, files, folder, whole = random.Random(seed), [{}, {}], c.path(name), {}
    os.mkdir(folder)
    for layer in range(LAYERS):
        block, file = f"model.layers.{layer}.block_sparse_moe.", files[0] # opening it reads samples of 16 places: what is left is many pieces
        files[1][block + "gate.weight"] = ("BF16", [EXPERTS, HIDDEN], numbers(draw, EXPERTS * HIDDEN))
        for e in range(EXPERTS):
            for matrix, shape in ("w1", [inner, HIDDEN]), ("w2", [HIDDEN, inner]), ("w3", [inner, HIDDEN]):
                file[f"{block}experts.{e}.{matrix}.weight"] = ("BF16", shape, numbers(draw, inner * HIDDEN))
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for file, tensors in zip(names, files):
        whole[file] = safetensors(tensors)
    whole["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": {t: names[i] for i in range(2) for t in files[i]}}).encode()
    whole["config.json"] = json.dumps({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": inner,
                                       "num_hidden_layers": LAYERS, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_attention_heads": 4, "num_key_value_heads": 4,
                                       "vocab_size": 32, "torch_dtype": "bfloat16"}).encode()
    for file, data in whole.items():
        with open(f"{folder}/{file}", "wb") as out:
            out.write(data)
    return folder, sum(len(d) for d in whole.values())


def secure(c):
    return ["--token-file=" + c.write("client.token", CLIENT.encode()), "--node-token-file=" + c.write("node.token", NODE.encode())]


def coordinator(c, *options):
    return c.coordinator("--copies=1", *secure(c), *options)["rpc_url"]


def start(c, name, url, path, *options, **fields):
    """A node; fields: more of its model."""
    model = json.dumps({"name": "demo", "path": path} | fields)
    config = c.write(name + ".yaml", f"models: [{model}]\n".encode())
    return c.daemon(name, EXPERTD, "--config=" + config, "--node-name=" + name, "--coordinator-url=" + url, "--threads=1", *secure(c), *options)


def spawn(c, name, url, path, **fields):
    """The same, not waited for."""
    config = c.write(name + ".yaml", f"models: [{json.dumps({'name': 'demo', 'path': path, 'weights_from': 'nodes'} | fields)}]\n".encode())
    with open(c.path(name + ".log"), "ab") as log:
        process = subprocess.Popen([EXPERTD, "--config=" + config, "--node-name=" + name, "--coordinator-url=" + url, "--threads=1", "--listen=tcp://127.0.0.1:0", "--admin-listen=",
                                    "--door-listen=", "--probe-address=127.0.0.1:0", "--log-format=text", f"--ports-file={c.path(name)}", *secure(c)], stdout=log, stderr=log)
    c.processes.append((name, process))
    c.log_forms[name] = "text"
    return process


def end(c, name, how=signal.SIGKILL):
    process = dict(c.processes)[name]
    process.send_signal(how)
    process.wait()
    c.processes = [p for p in c.processes if p[0] != name]


def metric(node, name):
    text = urllib.request.urlopen(node["probe_url"] + "/metrics", timeout=10).read().decode()
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[-1])


SENT, RECEIVED = (f'expertd_weight_files_bytes_total{{direction="{d}"}}' for d in ("sent", "received"))


def ports(c, name):
    wait_for(f"{name} to listen", lambda: os.path.exists(c.path(name)) and os.path.getsize(c.path(name)))
    return json.load(open(c.path(name)))


def on_disk(folder):
    """Bytes of files that are not whole."""
    def blocks(path):
        try:
            return os.stat(path).st_blocks
        except FileNotFoundError: # it is whole now
            return 0
    return 512 * sum(blocks(f"{folder}/{f}") for f in os.listdir(folder) if f.endswith(".part"))


def noted(folder):
    """Pieces, of 1 MiB, that the mirror's journals and whole files have."""
    sizes = {f: os.path.getsize(f"{folder}/{f}") for f in os.listdir(folder)}
    whole = sum(-(-size // MIB) for f, size in sizes.items() if not f.endswith((".part", ".pieces")) and f != "expertd-mirror")
    return whole + sum((size - 24) // 20 for f, size in sizes.items() if f.endswith(".pieces"))


ORACLES = {} # of a model


def answers_as_the_oracle(c, model, *where):
    batch = c.batch("batch", 40, 3)
    c.run(EXPERTCTL, "forward", *where, "--token-file", c.path("client.token"), "--model", "demo", "--layer", str(LAYER), "--in", batch, "--out", c.path("y"), "--timeout", "30s")
    if os.path.realpath(model) not in ORACLES:
        ORACLES[os.path.realpath(model)] = c.oracle(batch, model=model)
    assert read_safetensors(c.path("y"))["y"] == ORACLES[os.path.realpath(model)], "other bits than the oracle's"


def empty(c, name):
    os.mkdir(c.path(name))
    return c.path(name)


def joins_and_serves_its_part(c, model, whole):
    url = coordinator(c, "--heartbeat-ms=100", "--heartbeat-dead-count=100", "--min-nodes=3", "--loading-nodes-max=1")
    for name in "abc":
        start(c, name, url, model)
    c.wait_serving("--coordinator", url, "--token-file", c.path("client.token"))
    turns = sorted((line["time"], line["state"]) for name in "abc" for line in c.log(name) if line["event"] == "assignment" and line["epoch"] == "1")
    assert [state for _, state in turns] == ["taken", "loaded"] * 3, turns
    d = start(c, "d", url, empty(c, "d.mirror"), weights_from="nodes")
    wait_for("its part", lambda: metric(d, "expertd_experts_owned") > 0 and metric(d, "expertd_experts_loading") == 0)
    assert metric(d, "expertd_experts_owned") < LAYERS * EXPERTS
    got = metric(d, RECEIVED)
    assert 0 < got < whole * 0.9, (got, whole)
    answers_as_the_oracle(c, model, "--coordinator", url)
    answers_as_the_oracle(c, model, "--coordinator", url)
    c.stop()
    print(f"joined: {got / MIB:.1f} of {whole / MIB:.1f} MiB")


def goes_on_after_kills(c, model, whole):
    """Of the node itself; of the source it fetches from; of the last source."""
    url = coordinator(c, "--heartbeat-ms=100")
    nodes = {name: start(c, name, url, model, "--weight-serve-rate=24M") for name in "ab"}
    folder = empty(c, "e.mirror")
    spawn(c, "e", url, folder, experts="all")
    wait_for("some of it", lambda: on_disk(folder) > 8 * MIB)
    end(c, "e")
    if os.path.exists(c.path("e")):
        os.remove(c.path("e"))
    here, before = noted(folder), sum(metric(n, SENT) for n in nodes.values())
    assert 0 < here and before < whole, f"{before} of {whole} bytes, {here} pieces: it was done before it was killed"
    spawn(c, "e", url, folder, experts="all")
    e = ports(c, "e")
    wait_for("all of it", lambda: metric(e, "expertd_experts_owned") == LAYERS * EXPERTS)
    sent = sum(metric(n, SENT) for n in nodes.values())
    assert sent - before <= whole - (here - 4) * MIB, f"{sent} bytes for {whole}, {here} pieces of them: what was here came again" # a file's last piece is short
    answers_as_the_oracle(c, model, "--node", e["rpc_url"])
    end(c, "e", signal.SIGTERM)
    print(f"killed after {before / MIB:.1f} MiB, {here} pieces noted: {sent / MIB:.1f} of {whole / MIB:.1f} MiB in all")

    folder = empty(c, "f.mirror")
    spawn(c, "f", url, folder, experts="all")
    wait_for("some of it", lambda: on_disk(folder) > 8 * MIB)
    dying = next(line["node"] for line in c.log("f") if line["event"] == "weights-fetch" and line.get("state") is None)
    end(c, dying)
    left = lambda: [line for line in c.log("f") if line["event"] == "weights-source" and line["node"] == dying]
    wait_for("it to be left", left)
    assert left()[0]["model"] == "demo" and left()[0]["effect"] == "another node is asked", c.log("f")
    f = ports(c, "f")
    end(c, next(name for name in nodes if name != dying))
    wait_for("it to say so", lambda: [line for line in c.log("f") if line["event"] == "expert-load" and "no node gives" in line["reason"]])
    assert not [line for line in c.log("f") if line["level"] == "error"], c.log("f")
    assert metric(f, "expertd_experts_loading") > 0 and metric(f, "expertd_experts_failed") == 0
    start(c, "again", url, model)
    wait_for("all of it", lambda: metric(f, "expertd_experts_owned") == LAYERS * EXPERTS)
    answers_as_the_oracle(c, model, "--node", f["rpc_url"])
    c.stop()


def version_of(url):
    with peer.Peer(url) as node:
        assert node.hello("node", token=NODE, node="asks").status == 0
        reply = node.call(LIST, peer.message((1, "demo")))
        assert reply.status == 0, reply.text()
        return reply.fields[1][0].decode(), peer.message(*((n, v) for n in sorted(reply.fields) for v in reply.fields[n]))


def register(url, name, at):
    with peer.Peer(url) as node:
        assert node.hello("node", token=NODE, node=name).status == 0
        assert node.call(peer.REGISTER, peer.register_body(name, at, 7)).status == 0


def ends_saying(c, process, name, *words):
    assert process.wait(timeout=60) != 0
    c.processes = [p for p in c.processes if p[0] != name]
    text = open(c.path(name + ".log")).read()
    assert all(w in text for w in words), text


def refuses_a_list_with_paths(c):
    url = coordinator(c, "--heartbeat-ms=1000", "--heartbeat-dead-count=100")
    with peer.Service({LIST: peer.message((1, "0123456789abcdef"), (2, 1), (3, ((1, "../x"), (2, 5))))}, node="a0") as liar:
        register(url, "a0", liar.url)
        folder = empty(c, "l.mirror")
        ends_saying(c, spawn(c, "l", url, folder), "l", "a file called '../x'", "node a0")
        assert os.listdir(folder) == [], os.listdir(folder)
    c.stop()


def leaves_one_that_lists_slowly(c, model):
    """A file at a time, of many: it may not use up the time that there is for all nodes."""
    def one_file():
        time.sleep(0.2)
        return peer.message((1, "0123456789abcdef"), (2, 10000), (3, ((1, "x"), (2, 5))))

    url = coordinator(c, "--heartbeat-ms=1000", "--heartbeat-dead-count=100")
    with peer.Service({LIST: one_file}, node="a2") as slow:
        register(url, "a2", slow.url)
        start(c, "b", url, model)
        spawn(c, "k", url, empty(c, "k.mirror"))
        ports(c, "k")
        said = [line["reason"] for line in c.log("k") if line["event"] == "weights-source" and line["node"] == "a2"]
        assert len(said) == 1 and "no answer from a2" in said[0], said
    c.stop()


def refuses_others(c, model, other):
    url = coordinator(c, "--heartbeat-ms=1000", "--heartbeat-dead-count=100")
    with peer.Service({READ: peer.message((1, 1))}, node="a1") as liar: # the right list, and no bytes; it is asked first
        register(url, "a1", liar.url)
        nodes = start(c, "right", url, model), start(c, "wrong", url, other)
        wait_for("both to be registered", lambda: all(metric(n, "expertd_experts_owned") > 0 for n in nodes))
        (right, liar.answers[LIST]), (wrong, _) = (version_of(n["rpc_url"]) for n in nodes)
        assert right != wrong
        ends_saying(c, spawn(c, "g", url, empty(c, "g.mirror")), "g", right, wrong, "as version of this model")
        spawn(c, "h", url, empty(c, "h.mirror"), version=right, experts="all")
        h = ports(c, "h")
        wait_for("all of it", lambda: metric(h, "expertd_experts_owned") == LAYERS * EXPERTS)
        said = {line["node"]: line["reason"] for line in c.log("h") if line["event"] == "weights-source"}
        assert f"served: demo version {wrong}" in said["wrong"], said
        assert "it gave 0 bytes" in said["a1"], said
        answers_as_the_oracle(c, model, "--node", h["rpc_url"])
    ends_saying(c, spawn(c, "i", url, c.path("model"), version=right), "i", "allowed: an empty directory")
    c.stop()


def ends_while_it_waits(c, number):
    process = spawn(c, "w", coordinator(c), empty(c, "w.mirror"))
    wait_for("it to wait", lambda: [line for line in c.log("w") if line["event"] == "weights-fetch" and line["state"] == "waiting"])
    process.send_signal(number)
    assert process.wait(timeout=120) == 0
    c.stop()


def config_refuses(c, model):
    def check(words, *options, **fields):
        config = c.write("bad.yaml", ("models: [" + json.dumps({"name": "demo", "path": model, "weights_from": "nodes"} | fields) + "]\n").encode())
        done = subprocess.run([EXPERTD, "--check-config", "--config=" + config, *options], capture_output=True, timeout=60)
        assert done.returncode != 0 and words in done.stderr.decode(), done.stderr.decode()

    with_url = "--coordinator-url=tcp://127.0.0.1:1"
    check("needs coordinator_url", *secure(c))
    check("needs node_token_file", with_url)
    check("needs node_token_file", with_url, secure(c)[0])
    check("cannot be with listed experts", with_url, *secure(c), experts="0-3")
    check("'f00d', allowed: 16 hexadecimal digits", with_url, *secure(c), version="f00d")
    check("allowed: 0 (no limit), 1M..64T", with_url, *secure(c), "--weight-serve-rate=1000K")
    check("allowed: files, nodes, storage, nodes,storage, storage,nodes", with_url, *secure(c), weights_from="nodes,files")
    check("'storage' needs storage_path", weights_from="storage")
    check("'nodes' is without storage, and storage_path is set", with_url, *secure(c), storage_path=model)
    check("'files' is without storage, and storage_path is set", weights_from="files", storage_path=model)
    check("'storage,nodes' needs coordinator_url", *secure(c), weights_from="storage,nodes", storage_path=model)


def gives_files_before_a_mirror(c, model):
    """A node has the files, and after them a mirror of the same, with what it has of it so far, in another format: it gives what the files have."""
    url = coordinator(c)
    start(c, "a", url, model, "--weight-serve-rate=2M")
    entries = [{"name": "demo", "path": model}, {"name": "demo", "path": empty(c, "b.mirror"), "weights_from": "nodes", "weight_quant": "int8-g32"}]
    config = c.write("b.yaml", f"models: {json.dumps(entries)}\n".encode())
    b = c.daemon("b", EXPERTD, "--config=" + config, "--node-name=b", "--coordinator-url=" + url, "--threads=1", *secure(c))
    size = max(os.path.getsize(f"{model}/{f}") for f in os.listdir(model))
    (file,) = [f for f in os.listdir(model) if os.path.getsize(f"{model}/{f}") == size]
    with peer.Peer(b["rpc_url"]) as node:
        assert node.hello("node", token=NODE, node="asks").status == 0
        for offset in range(0, size - MIB, MIB):
            reply = node.call(READ, peer.message((1, "demo"), (3, file), (4, offset), (5, MIB)))
            assert reply.status == 0, f"{offset} of {size}: {reply.text()}"
    assert noted(c.path("b.mirror")) < size // MIB - 4, "the mirror has all: this proves nothing"


def main():
    with Cluster() as c:
        model, whole = write_model(c, "model", 1)
        other, _ = write_model(c, "other", 2, inner=64)
        config_refuses(c, model)
        with Cluster() as inner:
            joins_and_serves_its_part(inner, model, whole)
        with Cluster() as inner:
            goes_on_after_kills(inner, model, whole)
        with Cluster() as inner:
            gives_files_before_a_mirror(inner, model)
        for how in signal.SIGTERM, signal.SIGINT:
            with Cluster() as inner:
                ends_while_it_waits(inner, how)
        with Cluster() as inner:
            refuses_a_list_with_paths(inner)
        with Cluster() as inner:
            leaves_one_that_lists_slowly(inner, model)
        with Cluster() as inner:
            os.symlink(model, inner.path("model"))
            refuses_others(inner, model, other)


if __name__ == "__main__":
    main()
