#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nngcat with frames of `expertctl frame encode` at the doors of node and coordinator: the oracle's bits; readable words for broken requests, for
the wrong token, over TLS too."""
import json, re, struct, subprocess, urllib.request

from door_cluster import EXPERTCTL, HIDDEN, LAYER, TOP_K, Cluster, read_safetensors, safetensors

TOKENS = 33
GATEWAY, FORWARD, CHECK = "expertd.v1.Gateway/Forward", "expertd.v1.ExpertService/Forward", "expertd.v1.Health/Check"


def encode(c, method, *options):
    c.run(EXPERTCTL, "frame", "encode", "--method", method, "-o", c.path("request.bin"), *options)
    return open(c.path("request.bin"), "rb").read()


def nngcat(c, door, request, form="--raw", *options):
    path = c.write("sent.bin", request)
    reply = c.run("nngcat", "--req", "--dial", door, "--recv-timeout", "60", *options, "--file", path, form).stdout
    c.write("reply.bin", reply)
    return reply


def decode(c, *options, code=0):
    done = c.run(EXPERTCTL, "frame", "decode", c.path("reply.bin"), *options, code=code)
    return json.loads(done.stdout), done.stderr.decode()


def refused(c, door, request, words, *options):
    """In `frame decode` and, as text, in what nngcat itself prints."""
    nngcat(c, door, request, "--raw", *options)
    said, stderr = decode(c, code=1)
    assert words in stderr and words in said["status"]["text"] and said["frame"]["status"] != 0, (words, said, stderr)
    assert words.encode() in nngcat(c, door, request, "--ascii", *options), words


def not_frames(ports):
    with urllib.request.urlopen(ports["probe_url"] + "/metrics", timeout=60) as reply:
        return int(re.search(r'^\w+_door_refused_total\{reason="not_a_frame"\} (\d+)$', reply.read().decode(), re.M)[1])


def check_gateway(c, door, batch):
    for asked, oracle in ((), ()), (("--out-dtype", "f32", "--wire", "f32"), ("--out-dtype", "f32", "--wire", "f32")), (("--weight-on", "input"), ("--weight-on-input",)):
        nngcat(c, door, encode(c, GATEWAY, "--in", batch, "--model", "demo", "--layer", str(LAYER), *asked))
        said, _ = decode(c, "--tensors-out", c.path("y.raw"))
        assert said["message"]["tokens"] == TOKENS and said["frame"]["method"] == GATEWAY, said
        assert open(c.path("y.raw"), "rb").read() == c.oracle(batch, *oracle), f"other bits with {asked}"
    # The same request written field by field, its tensors named one by one.
    fields = {"model": "demo", "layer": LAYER, "tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "x_dtype": 1, "ids_dtype": 6, "scales_dtype": 3, "out_dtype": 1}
    names = [word for name in ("x", "expert_ids", "expert_scales") for word in ("--tensor", name)]
    nngcat(c, door, encode(c, GATEWAY, "--json", json.dumps(fields), "--tensors", batch, *names))
    decode(c, "--tensors-out", c.path("y.raw"))
    assert open(c.path("y.raw"), "rb").read() == c.oracle(batch), "other bits with fields by hand"


def check_node(c, door, batch):
    """Rows of the first two tokens' slots are the oracle's uncombined rows."""
    tensors = read_safetensors(batch)
    ids = struct.unpack("<4i", tensors["expert_ids"][:16])
    slots = [(i // TOP_K, expert) for i, expert in enumerate(ids) if expert >= 0]
    rows = c.oracle(batch, "--uncombined")
    wanted = b"".join(rows[i * HIDDEN * 2 : (i + 1) * HIDDEN * 2] for i, expert in enumerate(ids) if expert >= 0)
    path = c.write("rows", safetensors({"x": ("BF16", [2, HIDDEN], tensors["x"][: 2 * HIDDEN * 2]),
                                        "slots": ("I32", [len(slots), 2], b"".join(struct.pack("<2i", *s) for s in slots))}))
    fields = {"model": "demo", "layer": LAYER, "rows": 2, "slots": len(slots), "hidden": HIDDEN, "x_dtype": 1, "reply_dtype": 1}
    c.write("fields.json", json.dumps(fields).encode())
    request = encode(c, FORWARD, "--json-file", c.path("fields.json"), "--tensors", path, "--tensor", "x", "--tensor", "slots", "--call-id", "18446744073709551615")
    nngcat(c, door, request)
    said, _ = decode(c, "--tensors-out", c.path("rows.raw"))
    assert said["frame"]["call_id"] == "18446744073709551615" and said["message"]["slots"] == len(slots), said
    assert open(c.path("rows.raw"), "rb").read() == wanted, "other rows"
    fields["layer"] = 99
    refused(c, door, encode(c, FORWARD, "--json", json.dumps(fields), "--tensors", path, "--tensor", "x", "--tensor", "slots"), "layer 99")


def check_broken(c, ports):
    door = ports["door_url"]
    request = encode(c, CHECK)
    assert decode_request(c)["message"] == {"service": ""}
    nngcat(c, door, request)
    assert decode(c)[0]["message"]["detail"] == "serving"
    refused(c, door, request[:40], "ends at offset 40, allowed is 64 or more")
    refused(c, door, request[:64], "offset 28")
    refused(c, door, request[:30] + bytes([request[30] ^ 4]) + request[31:], "CRC32C")
    refused(c, door, request[:-1] + bytes([request[-1] ^ 1]), "CRC32C")
    before = not_frames(ports)
    refused(c, door, b"GET / HTTP/1.1", "this is no request frame")
    assert not_frames(ports) == before + 2, "asked twice"
    refused(c, door, encode(c, "expertd.v1.Coordinator/RegisterNode"), "needs role node")
    refused(c, door, encode(c, "expertd.v1.Admin/Drain"), "needs role operator")
    refused(c, door, encode(c, "expertd.v1.Health/Watch"), "streams its replies")
    refused(c, door, encode(c, CHECK, "--deadline-us", "0"), "no time left")


def decode_request(c):
    return json.loads(c.run(EXPERTCTL, "frame", "decode", c.path("request.bin")).stdout)


def check_token(c, door, token, other):
    refused(c, door, encode(c, CHECK), "missing")
    refused(c, door, encode(c, CHECK, "--token-file", other), "wrong")
    nngcat(c, door, encode(c, CHECK, "--token-file", token, "--metadata", "tenant=tests"))
    said, _ = decode(c)
    assert said["message"]["detail"] == "serving", said
    said = decode_request(c)
    assert said["metadata"] == [{"key": "tenant", "value": "tests"}, {"key": "authorization", "value": "(a token)"}], said


def check_tls(c):
    c.make_certificates()
    node = c.node("private", "--door-listen=tls+tcp://127.0.0.1:0", "--tls-client-certs", f"--tls-ca-file={c.path('ca.pem')}", f"--tls-cert-key-file={c.path('service.pem')}")
    c.wait_serving("--node", node["rpc_url"])
    door = node["door_url"]
    assert door.startswith("tls+tcp://"), door
    known = ("--cacert", c.path("ca.pem"), "--cert", c.path("caller.crt"), "--key", c.path("caller.key"))
    plain = encode(c, CHECK, "--no-payload-crc")
    nngcat(c, door, plain, "--raw", *known)
    assert decode(c)[0]["message"]["detail"] == "serving"
    refused(c, door, encode(c, CHECK), "payload_crc is off", *known)
    # Without a certificate of our CA there is no answer at all, and the door goes on.
    c.write("sent.bin", plain)
    stranger = ["nngcat", "--req", "--dial", door, "--recv-timeout", "2", "--cacert", c.path("ca.pem"), "--file", c.path("sent.bin"), "--raw"]
    done = subprocess.run(stranger, capture_output=True, timeout=60)
    assert done.returncode != 0 and done.stdout == b"", done
    nngcat(c, door, plain, "--raw", *known)
    assert decode(c)[0]["message"]["detail"] == "serving"


def main():
    with Cluster() as c:
        coordinator = c.coordinator()
        node = c.node("a", f"--coordinator-url={coordinator['rpc_url']}")
        c.wait_serving("--coordinator", coordinator["rpc_url"])
        batch = c.batch("batch", TOKENS, 5)
        check_gateway(c, coordinator["door_url"], batch)
        check_node(c, node["door_url"], batch)
        for ports in coordinator, node:
            check_broken(c, ports)
        refused(c, node["door_url"], encode(c, "expertd.v1.Coordinator/ClusterStatus"), "not served by this process")
        c.stop()
    with Cluster() as c:
        token, other = c.write("token", b"token-of-clients-1\n"), c.write("other", b"token-of-nobody--1\n")
        node = c.node("guarded", f"--token-file={token}")
        c.wait_serving("--node", node["rpc_url"], "--token-file", token)
        check_token(c, node["door_url"], token, other)
        c.stop()
    with Cluster() as c:
        check_tls(c)
        c.stop()


if __name__ == "__main__":
    main()
