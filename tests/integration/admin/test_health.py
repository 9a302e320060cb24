#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""/readyz, metrics, expertctl status and expertctl doctor say the same about a service through its outages: a table of what each said."""
import json, re, subprocess, urllib.error, urllib.request

from door_cluster import EXPERTCTL, Cluster, wait_for


def get(url):
    try:
        return 200, urllib.request.urlopen(url, timeout=60).read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def say(command, *where):
    done = subprocess.run([EXPERTCTL, command, *where, "-o", "json"], capture_output=True, timeout=120)
    said = json.loads(done.stdout)
    assert (done.returncode == 0) == said["healthy"], (done.returncode, said)
    return said


class Service:
    """One coordinator; what four mouths say of it at one moment: the codes, and whether calls can be answered."""

    def __init__(self, ports):
        self.ports, self.where = ports, ("--coordinator", ports["rpc_url"])

    def look(self):
        ready, _ = get(self.ports["probe_url"] + "/readyz")
        metrics = get(self.ports["probe_url"] + "/metrics")[1]
        problems = re.findall(r'expertd_coordinator_problems\{code="([a-z-]+)",severity="(error|warning)"\} (\d+)', metrics)
        value = lambda name: int(re.search(rf"^{name} (\d+)", metrics, re.M).group(1))
        doctor = say("doctor", *self.where)
        return {
            "readyz": ready == 200,
            "ready": value("expertd_coordinator_ready") == 1,
            "metrics": sorted(code for code, _, count in problems for _ in range(int(count))),
            "status": len(say("status", *self.where)["problems"]),
            "doctor": sorted(f["code"] for f in doctor["findings"] if f["code"] in {code for code, *_ in problems}),
            "healthy": doctor["healthy"],
            "nodes": (value("expertd_coordinator_nodes"), value("expertd_coordinator_nodes_expected")),
        }

    def expect(self, outage, codes, ready, nodes):
        """Until it is so: each look but the last may have met the state before."""
        looks = []

        def is_so():
            looks.append(self.look())
            return looks[-1]["metrics"] == sorted(codes) and looks[-1] == self.look()

        try:
            wait_for(outage, is_so)
        finally:
            said = looks[-1]
            print(f"{outage:45} readyz {said['readyz']!s:5} status {said['status']} problems, metrics {said['metrics']}, doctor {said['doctor']}, nodes {said['nodes']}", flush=True)
        assert said["readyz"] == said["ready"] == ready, said
        assert said["doctor"] == said["metrics"] and said["status"] == len(codes), said
        assert said["nodes"] == nodes and said["healthy"] == (not codes), said


with Cluster() as c:
    ports = c.coordinator("--heartbeat-ms=100", "--heartbeat-dead-count=3", "--restore-ms=1000", "--copies=2", "--min-nodes=2",
                          "--admin-listen=tcp://127.0.0.1:0")
    service = Service(ports)
    processes = {}

    def start(name):
        c.node(name, "--coordinator-url=" + ports["rpc_url"])
        processes[name] = c.processes[-1][1]

    def end(name, order):
        order(processes[name])
        processes[name].wait(timeout=60)
        c.processes = [(n, p) for n, p in c.processes if n != name]

    kill, stop = subprocess.Popen.kill, subprocess.Popen.terminate
    service.expect("no node yet", ["min-nodes"], False, (0, 2))
    start("n0")
    service.expect("one node of two", ["min-nodes"], False, (1, 2))
    start("n1")
    service.expect("both nodes", [], True, (2, 2))
    start("n2")
    service.expect("three nodes", [], True, (3, 3))
    end("n2", kill)
    service.expect("one of three killed", ["node-lost"], True, (2, 3))
    checks = get(ports["probe_url"] + "/readyz?verbose")[1]
    assert "and its experts were given to others\n" in checks, checks
    end("n1", stop)
    service.expect("another one stopped in order", ["few-copies", "node-lost"], True, (1, 2))
    end("n0", kill)
    service.expect("the last one killed", ["node-lost", "node-lost", "nothing-served"], False, (0, 2))
    start("n3")
    start("n4")
    service.expect("two new ones", ["node-lost", "node-lost"], True, (2, 4))
    for gone in "n0", "n2":
        c.run(EXPERTCTL, "drain", gone, "--admin", ports["admin_url"])
    service.expect("the lost ones are given up", [], True, (2, 2))
    start("n0")
    service.expect("a node that was given up comes back", ["node-drained"], True, (2, 2))
    c.stop()
