#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Metrics, alert rules and dashboard against running daemons: promtool finds no fault, and every metric that a rule or a panel
names is one that the daemons really have.

usage: test_monitoring.py SOURCE_DIR EXPERTD EXPERTD_COORDINATOR EXPERTCTL CANN_HOME
"""
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

import yaml

PATIENCE_S = 60
failures = []


def check(condition, text):
    if not condition:
        failures.append(text)


class Daemon:
    """A daemon on free ports; its ports file is read once standard error says that it serves."""

    def __init__(self, directory, name, program, *args):
        self.ports = os.path.join(directory, name + ".json")
        self.process = subprocess.Popen(
            [program, "--probe-address", "127.0.0.1:0", "--listen", "tcp://127.0.0.1:0", "--ports-file", self.ports,
             "--log-format", "text", *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        log = b""
        while b"=serving" not in log:
            ready, _, _ = select.select([self.process.stderr], [], [], PATIENCE_S)
            data = os.read(self.process.stderr.fileno(), 65536) if ready else b""
            if not data:
                self.stop()
                sys.exit(f"{name} did not start: {log.decode()}")
            log += data
        with open(self.ports, encoding="utf-8") as file:
            self.urls = json.load(file)

    def metrics(self):
        with urllib.request.urlopen(self.urls["probe_url"] + "/metrics", timeout=PATIENCE_S) as reply:
            return reply.read().decode()

    def stop(self):
        self.process.kill()
        self.process.wait()


def names_of(text):
    """Metric names in an expression."""
    return set(re.findall(r"\b(?:expertd_[a-z0-9_]+)", text))


def check_dashboard(path):
    with open(path, encoding="utf-8") as file:
        dashboard = json.load(file)
    panels = dashboard["panels"]
    ids = [p["id"] for p in panels]
    check(len(ids) == len(set(ids)), "dashboard: two panels with one id")
    taken = {}
    expressions = [v["query"]["query"] for v in dashboard["templating"]["list"] if isinstance(v["query"], dict)]
    variables = {v["name"] for v in dashboard["templating"]["list"]} | {"__rate_interval"}
    for panel in panels:
        grid = panel["gridPos"]
        check(grid["x"] + grid["w"] <= 24, f"dashboard: {panel['title']} is wider than the page")
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                check((x, y) not in taken, f"dashboard: {panel['title']} covers {taken.get((x, y))}")
                taken[(x, y)] = panel["title"]
        targets = panel.get("targets", [])
        check(panel["type"] == "row" or targets, f"dashboard: {panel['title']} shows nothing")
        for target in targets:
            expressions.append(target["expr"])
            for variable in re.findall(r"\$(\w+)", target["expr"]):
                check(variable in variables, f"dashboard: {panel['title']} uses unknown ${variable}")
    return expressions


def main():
    promtool = shutil.which("promtool")
    if promtool is None:
        print("there is no promtool; deploy/install-deps --test installs it")
        return 1
    source, expertd, coordinator, expertctl, cann = sys.argv[1:6]
    folder = os.path.join(source, "deploy/monitoring")
    texts = {}
    daemons = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            pair = os.path.join(directory, "pair.pem")
            subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
                            "/CN=a", "-keyout", pair + ".key", "-out", pair], check=True, stderr=subprocess.DEVNULL)
            daemons.append(Daemon(directory, "coordinator", coordinator, "--tls-ca-file", pair, *DOORS))
            daemons.append(Daemon(directory, "node", expertd, *DOORS, "--node-name", "a", "--coordinator-url",
                                  daemons[0].urls["rpc_url"], "--model",
                                  "demo=" + os.path.join(source, "deploy/demo-model/checkpoint")))
            os.environ["ASCEND_HOME_PATH"] = cann  # an emulated device
            daemons.append(Daemon(directory, "device", expertd, *DOORS, "--node-name", "b", "--backend", "ascend", "--model",
                                  "demo=" + os.path.join(source, "deploy/demo-model/checkpoint")))
            # Load gives every series a value; the coordinator hears of it with a heartbeat.
            model = os.path.join(source, "deploy/demo-model/checkpoint")
            subprocess.run([expertctl, "generate", "--coordinator", daemons[0].urls["rpc_url"], "--model", "demo", "--checkpoint",
                            model, "--prompt", "The ", "--bytes", "4"], check=True, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
            deadline = time.monotonic() + PATIENCE_S
            while "expertd_layer_load_gini" not in texts.get("coordinator", "") and time.monotonic() < deadline:
                texts = {"coordinator": daemons[0].metrics(), "node": daemons[1].metrics(), "device": daemons[2].metrics()}
        finally:
            for daemon in daemons:
                daemon.stop()

    for name, text in texts.items():
        lint = subprocess.run([promtool, "check", "metrics"], input=text, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)
        check(lint.returncode == 0 and not lint.stdout.strip(), f"promtool check metrics, {name}: {lint.stdout}")
    for args in (["check", "config", "scrape.yaml"], ["check", "rules", "alerts.yaml"], ["test", "rules", "alerts-test.yaml"]):
        run = subprocess.run([promtool, *args], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             check=False)
        check(run.returncode == 0, f"promtool {' '.join(args)}: {run.stdout}")

    with open(os.path.join(folder, "alerts.yaml"), encoding="utf-8") as file:
        rules = [rule for group in yaml.safe_load(file)["groups"] for rule in group["rules"]]
    expressions = [rule["expr"] for rule in rules] + check_dashboard(os.path.join(folder, "dashboard.json"))
    known = set(re.findall(r"^# TYPE (\S+)", "\n".join(texts.values()), re.MULTILINE))
    for expression in expressions:
        for name in names_of(expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            check(name in known or base in known, f"no daemon has the metric {name}, used in: {expression}")
    verbs = subprocess.run([expertctl, "--help"], text=True, stdout=subprocess.PIPE, check=True).stdout
    for rule in rules:
        check(rule["labels"].get("severity") in ("page", "ticket"), f"{rule['alert']}: severity")
        check({"summary", "description"} <= rule["annotations"].keys(), f"{rule['alert']}: annotations")
        for verb in re.findall(r"`expertctl (\w+)", rule["annotations"]["description"]):
            check(re.search(rf"^ *{verb} ", verbs, re.MULTILINE), f"{rule['alert']} advises `expertctl {verb}`")
    print(f"{len(known)} metrics, {len(rules)} rules, {len(expressions)} expressions")
    for text in failures:
        print("FAILED " + text)
    return 1 if failures else 0


# The other doors of each daemon, on free ports too.
DOORS = ("--admin-listen", "tcp://127.0.0.1:0", "--door-listen", "tcp://127.0.0.1:0")

sys.exit(main())
