#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Nodes that fill their directory from storage that they share, alone or beside other nodes in the configured order: bits as of the oracle, and where the first source
fails the second one is asked."""
import os, shutil, signal

from door_cluster import EXPERTS, Cluster, wait_for
from test_weights_from_nodes import LAYERS, MIB, RECEIVED, EXPERTD, answers_as_the_oracle, coordinator, empty, end, ends_saying, metric, on_disk, ports, secure, spawn, start, \
    write_model


def all_of_it(node):
    wait_for("all of it", lambda: metric(node, "expertd_experts_owned") == LAYERS * EXPERTS)


def of_storage(c, name):
    return [line for line in c.log(name) if line["event"] == "weights-source" and "storage_path" in line]


def needs_no_other_node(c, model):
    """The second time not even the storage, unless files are missing."""
    storage = c.path("storage")
    config = c.write("s.yaml", f"models: [{{name: demo, path: {empty(c, 's.mirror')}, weights_from: storage, storage_path: {storage}}}]\n".encode())
    for is_there in True, False:
        if is_there:
            os.symlink(model, storage)
        else:
            os.unlink(storage)
        node = c.daemon("s", EXPERTD, "--config=" + config, "--threads=1", *secure(c))
        all_of_it(node)
        assert metric(node, RECEIVED) == 0
        answers_as_the_oracle(c, model, "--node", node["rpc_url"])
        end(c, "s", signal.SIGTERM)
        progress = [line for line in c.log("s") if line["event"] == "weights-fetch" and line.get("storage_path") == storage and "bytes_per_s" in line]
        assert bool(progress) == (not of_storage(c, "s")) == is_there, c.log("s")
    shutil.copy(c.path("s.mirror") + "/expertd-mirror", empty(c, "u.mirror"))
    ends_saying(c, spawn(c, "u", "tcp://127.0.0.1:1", c.path("u.mirror"), weights_from="storage", storage_path=storage), "u", "code=UNAVAILABLE", f"storage_path {storage}")


def takes_up_storage_that_comes_later(c, model):
    url = coordinator(c, "--heartbeat-ms=100")
    start(c, "a", url, model, "--weight-serve-rate=4M")
    folder, storage = empty(c, "n.mirror"), c.path("storage")
    spawn(c, "n", url, folder, experts="all")
    ports(c, "n")
    end(c, "n")
    end(c, "a")
    spawn(c, "m", url, folder, experts="all", weights_from="storage", storage_path=storage)
    node = ports(c, "m")
    assert metric(node, "expertd_experts_owned") < LAYERS * EXPERTS and len(of_storage(c, "m")) == 1, c.log("m")
    os.symlink(model, storage)
    all_of_it(node)
    answers_as_the_oracle(c, model, "--node", node["rpc_url"])
    c.stop()


def goes_on_from_storage(c, model, whole):
    """The only node dies while it gives."""
    url = coordinator(c, "--heartbeat-ms=100")
    start(c, "a", url, model, "--weight-serve-rate=24M")
    folder = empty(c, "n.mirror")
    spawn(c, "n", url, folder, experts="all", weights_from="nodes,storage", storage_path=model)
    wait_for("some of it", lambda: on_disk(folder) > 8 * MIB)
    end(c, "a")
    node = ports(c, "n")
    all_of_it(node)
    assert 8 * MIB < metric(node, RECEIVED) < whole, metric(node, RECEIVED)
    assert [line for line in c.log("n") if line["event"] == "weights-source" and line.get("node") == "a"] and not of_storage(c, "n"), c.log("n")
    answers_as_the_oracle(c, model, "--node", node["rpc_url"])
    c.stop()


def asks_nodes_where_storage_fails(c, model, other):
    url = coordinator(c, "--heartbeat-ms=100")
    start(c, "a", url, model)
    for name, storage in ("o", model), ("p", c.path("nothing")):
        spawn(c, name, url, empty(c, name + ".mirror"), experts="all", weights_from="storage,nodes", storage_path=storage)
        node = ports(c, name)
        all_of_it(node)
        assert (metric(node, RECEIVED) > 0) == bool(of_storage(c, name)) == (name == "p"), c.log(name)
        answers_as_the_oracle(c, model, "--node", node["rpc_url"])
        end(c, name, signal.SIGTERM)
    ends_saying(c, spawn(c, "q", url, c.path("p.mirror"), weights_from="nodes,storage", storage_path=other), "q", f"storage_path {other} has", "use an empty directory for the latter")
    ends_saying(c, spawn(c, "r", url, empty(c, "r.mirror"), weights_from="storage", storage_path=other, version="0123456789abcdef"), "r", "needed is 0123456789abcdef")
    assert os.listdir(c.path("r.mirror")) == [], "a mirror of the wrong version"
    ends_saying(c, spawn(c, "t", url, c.path("r.mirror"), weights_from="storage", storage_path=c.path("nothing")), "t", "storage_path " + c.path("nothing"))
    c.stop()


with Cluster() as files:
    first, size = write_model(files, "model", 1)
    second, _ = write_model(files, "other", 2, inner=64)
    with Cluster() as inner:
        needs_no_other_node(inner, first)
    with Cluster() as inner:
        takes_up_storage_that_comes_later(inner, first)
    with Cluster() as inner:
        goes_on_from_storage(inner, first, size)
    with Cluster() as inner:
        asks_nodes_where_storage_fails(inner, first, second)
