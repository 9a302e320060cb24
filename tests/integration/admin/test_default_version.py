#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A node with another checkpoint under the same name stops nobody: callers that name no version stay with the default until an operator moves it."""
import glob, json, shutil, struct, subprocess

from door_cluster import BUILD, EXPERTCTL, LAYER, MODEL, Cluster, read_safetensors, wait_for

TOKENS = 17


def models(where):
    done = subprocess.run([EXPERTCTL, "status", *where, "-o", "json"], capture_output=True, timeout=120)
    return {m["version"]: m for m in json.loads(done.stdout)["models"]}


with Cluster() as c:
    ports = c.coordinator("--heartbeat-ms=100", "--heartbeat-dead-count=3", "--admin-listen=tcp://127.0.0.1:0", "--restore-ms=1000")
    where, admin = ("--coordinator", ports["rpc_url"]), ("--admin", ports["admin_url"])
    batch = c.batch("batch", TOKENS, 7)

    def forward(*options, code=0):
        """Through the client, and through the open door: the same bits."""
        done = c.run(EXPERTCTL, "forward", "--model", "demo", "--layer", str(LAYER), "--in", batch, "--out", c.path("y"), *where, *options, code=code)
        if code:
            return done.stderr.decode()
        y = read_safetensors(c.path("y"))["y"]
        named = [v for k, v in zip(options, options[1:]) if k == "--version"]
        c.run(EXPERTCTL, "frame", "encode", "--method", "expertd.v1.Gateway/Forward", "-o", c.path("request.bin"), "--in", batch, "--model", "demo", "--layer", str(LAYER),
              *(("--version", named[0]) if named else ()))
        reply = c.run("nngcat", "--req", "--dial", ports["door_url"], "--recv-timeout", "60", "--file", c.path("request.bin"), "--raw").stdout
        c.write("reply.bin", reply)
        c.run(EXPERTCTL, "frame", "decode", c.path("reply.bin"), "--tensors-out", c.path("door.raw"))
        assert open(c.path("door.raw"), "rb").read() == y, "the door gives other bits"
        return y

    node = c.node("n0", "--admin-listen=tcp://127.0.0.1:0", "--coordinator-url=" + ports["rpc_url"])
    c.wait_serving(*where)
    right = c.oracle(batch)
    (first,) = models(where)
    assert forward() == right and models(where)[first]["is_default"]

    # The same model with a bit of every 512 bytes turned.
    stranger = c.path("stranger")
    shutil.copytree(MODEL, stranger)
    for shard in glob.glob(stranger + "/*.safetensors"):
        data = bytearray(open(shard, "rb").read())
        for i in range(8 + struct.unpack_from("<Q", data)[0], len(data), 512):
            data[i] ^= 4
        open(shard, "wb").write(data)
    c.daemon("n1", f"{BUILD}/server/expertd/expertd", f"--model=demo={stranger}", "--node-name=n1", "--coordinator-url=" + ports["rpc_url"])
    wait_for("the stranger's version", lambda: len(models(where)) == 2 and all(m["copies_min"] > 0 for m in models(where).values()))
    (second,) = set(models(where)) - {first}
    assert models(where)[first]["is_default"] and not models(where)[second]["is_default"]
    other = c.oracle(batch, model=stranger)
    assert other != right
    assert forward() == forward("--version", first) == right and forward("--version", second) == other
    doctor = json.loads(subprocess.run([EXPERTCTL, "doctor", *where, "-o", "json"], capture_output=True, timeout=120).stdout)
    said = [f["text"] for f in doctor["findings"] if f["code"] == "versions"]
    assert len(said) == 1 and f"{first} (default)" in said[0] and second in said[0], doctor
    assert f"{first} (default)" in c.run(EXPERTCTL, "status", *where, code=1).stdout.decode()

    listed = json.loads(c.run(EXPERTCTL, "table", "--model", "demo", "--version", second, *where, "-o", "json").stdout)["layers"]
    assert listed and {layer["version"] for layer in listed} == {second}
    assert forward("--version", "v9", code=1) and f"demo:{second}" in forward("--version", "v9", code=1)
    refused = c.run(EXPERTCTL, "model", "default", "demo", "v9", *admin, code=1).stderr.decode()
    assert "no model demo in version 'v9'" in refused and first in refused and second in refused, refused
    assert "ask the coordinator" in c.run(EXPERTCTL, "model", "default", "demo", second, "--admin", node["admin_url"], code=1).stderr.decode()
    assert json.loads(c.run(EXPERTCTL, "model", "default", "demo", second, *admin, "-o", "json").stdout) == {"model": "demo", "version": second, "before": first}
    assert forward() == forward("--version", second) == other and forward("--version", first) == right

    # Its only node goes: callers that name none get what there is.
    name, process = c.processes.pop()
    process.terminate()
    assert process.wait(timeout=60) == 0
    wait_for("the version to go", lambda: set(models(where)) == {first})
    assert models(where)[first]["is_default"] and forward() == right
    print(f"{first} and {second}: callers without a version kept the first, got the second when an operator said so, and the first when the second was gone")
    c.stop()
