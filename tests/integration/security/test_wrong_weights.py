#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A node with other weights that registers first keeps nobody out: two that agree outvote it, it is named, and draining it before a third one is there does the
same. Answers are right from then on, while it stays."""
import json, subprocess, threading

from door_cluster import EXPERTCTL, LAYER, Cluster, read_safetensors, wait_for
import peer

EPOCH_OF_REPLY, COPY_ERROR = 3, 11


class Liar:
    """A node that says it has loaded every expert, with digests of its own, and worked through each assignment."""

    def __init__(self, url, model):
        def lying(info):
            fields = peer.parse(info)
            every = range(fields[4][0] + fields.get(5, [0])[0])
            return tuple((n, v) for n in sorted(fields) if n not in (8, 9) for v in fields[n]) + ((8, list(every)), (9, b"LIAR" * len(every)))

        fields = peer.parse(model)
        self.models = [tuple((n, v) for n in sorted(fields) if n != 5 for v in fields[n]) + tuple((5, lying(layer)) for layer in fields[5])]
        self.peer = peer.Peer(url)
        assert self.peer.hello("node", node="liar").status == 0
        reply = self.peer.call(peer.REGISTER, peer.register_body("liar", "tcp://127.0.0.1:1", 7, self.models))
        assert reply.status == 0, reply.text()
        self.epoch = reply.fields[EPOCH_OF_REPLY][0]
        self.ended, self.error = threading.Event(), None
        self.thread = threading.Thread(target=self.beat)
        self.thread.start()

    def beat(self):
        try:
            while not self.ended.wait(0.1):
                epoch = peer.parse(self.epoch)
                reply = self.peer.call(peer.HEARTBEAT, peer.heartbeat_body("liar", 7, epoch=[(n, epoch[n][0]) for n in sorted(epoch)], models=self.models))
                assert reply.status == 0 and 2 not in reply.fields, reply.text()
                self.epoch = reply.fields[1][0]
        except Exception as error: # pylint: disable=broad-except
            self.error = error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        self.peer.close()


def copy_error(url):
    with peer.Peer(url) as operator:
        assert operator.hello().status == 0
        return operator.call(peer.CLUSTER_STATUS).fields.get(COPY_ERROR, [b""])[0].decode()


def model_of_node(c):
    """What any client can ask a node for."""
    with peer.Peer(c.node("solo")["rpc_url"]) as client:
        assert client.hello().status == 0
        wait_for("the node's model", lambda: 3 in client.call(peer.DESCRIBE).fields)
        return client.call(peer.DESCRIBE).fields[3][0]


def answer(c, where, batch):
    """Why there is none; "" for the oracle's answer, and no other may come."""
    command = [EXPERTCTL, "forward", *where, "--timeout", "2s", "--model", "demo", "--layer", str(LAYER), "--in", batch, "--out", c.path("y")]
    done = subprocess.run(command, capture_output=True, timeout=120)
    if done.returncode == 0:
        assert read_safetensors(c.path("y"))["y"] == c.oracle(batch), "an answer of other weights"
    return done.stderr.decode() or f"ended with {done.returncode}" if done.returncode else ""


def outvoted(c, model, drains):
    name = "drained" if drains else "outvoted"
    coordinator = c.coordinator("--copies=2", "--heartbeat-ms=200", "--admin-listen=tcp://127.0.0.1:0")
    url, where = coordinator["rpc_url"], ("--coordinator", coordinator["rpc_url"])
    batch = c.batch("batch", 8, 1)
    with Liar(url, model) as liar:
        c.node("n0", "--coordinator-url=" + url)
        wait_for("the difference to be said", lambda: "not used, of: n0 (" in copy_error(url))
        assert "(liar), no majority" in copy_error(url), copy_error(url)
        failure = answer(c, where, batch)
        assert "UNAVAILABLE" in failure or "DEADLINE" in failure, "one against one: the first is listed, and answers nothing: " + failure
        if drains:
            c.run(EXPERTCTL, "drain", "liar", "--admin", coordinator["admin_url"])
        else:
            c.node("n1", "--coordinator-url=" + url)
            wait_for("the majority", lambda: "not used, of: liar (" in copy_error(url))
        wait_for("an answer", lambda: answer(c, where, batch) == "")
        for _ in range(10):
            assert (failure := answer(c, where, batch)) == "", failure
        if drains:
            assert copy_error(url) == "", copy_error(url)
        else:
            doctor = c.run("/bin/sh", "-c", '"$@" || true', "sh", EXPERTCTL, "doctor", *where).stdout.decode()
            assert "not used, of: liar (" in doctor, doctor
        assert "copy-differs" in open(c.path("coordinator.log")).read()
        assert liar.error is None, liar.error
        print(f"wrong weights: {name} after", json.dumps(copy_error(url)))


with Cluster() as c:
    model = model_of_node(c)
    c.stop()
for drains in (False, True):
    with Cluster() as c:
        outvoted(c, model, drains)
        c.stop()
