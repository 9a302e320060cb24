#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renders the Kubernetes overlays and checks the objects; the commands of the Job that fills the weights' volume are run.

There is no API server here, and `kubectl kustomize` lets unknown keys pass. So every key of every rendered object must stand in
SCHEMA, the part of the Kubernetes API that these manifests use, and the assertions below say what must be there. The test also
misspells each key of the rendered objects, one at a time, and expects the schema to notice every one.

usage: test_k8s.py SOURCE_DIR EXPERTD EXPERTD_COORDINATOR
Skipped without kubectl: the one of Debian 12 (1.20) is too old to know `components`.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap

import yaml

# A schema is: a type; a list [schema of the items]; {"*": schema} for a map with free keys; {key: schema} for fixed keys;
# a compiled pattern for text of that form.
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G)?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
FREE = {"*": str}
SELECTOR = {"matchLabels": FREE}
PORT_REF = NAME
PROBE = {"httpGet": {"path": str, "port": PORT_REF}, "periodSeconds": int, "timeoutSeconds": int, "failureThreshold": int,
         "initialDelaySeconds": int, "successThreshold": int}
RESOURCES = {key: QUANTITY for key in
             ("cpu", "memory", "storage", "hugepages-2Mi", "huawei.com/Ascend910", "huawei.com/Ascend310P", "huawei.com/npu")}
CONTAINER = {
    "name": NAME, "image": str, "command": [str], "args": [str],
    "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str},
                                                             "resourceFieldRef": {"resource": str}}}],
    "ports": [{"name": NAME, "containerPort": int}],
    "lifecycle": {"preStop": {"exec": {"command": [str]}}},
    "startupProbe": PROBE, "readinessProbe": PROBE, "livenessProbe": PROBE,
    "resources": {"requests": RESOURCES, "limits": RESOURCES},
    "securityContext": {"allowPrivilegeEscalation": bool, "readOnlyRootFilesystem": bool, "capabilities": {"drop": [str]}},
    "volumeMounts": [{"name": NAME, "mountPath": str, "readOnly": bool}],
}
POD = {
    "serviceAccountName": NAME, "automountServiceAccountToken": bool, "terminationGracePeriodSeconds": int,
    "nodeSelector": FREE,
    "tolerations": [{"key": str, "operator": str, "effect": str}],
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "runAsGroup": int, "fsGroup": int,
                        "fsGroupChangePolicy": str, "supplementalGroups": [int], "seccompProfile": {"type": str}},
    "topologySpreadConstraints": [{"maxSkew": int, "topologyKey": str, "whenUnsatisfiable": str, "labelSelector": SELECTOR}],
    "restartPolicy": str, "initContainers": [CONTAINER], "containers": [CONTAINER],
    "volumes": [{"name": NAME, "configMap": {"name": NAME}, "secret": {"secretName": NAME, "defaultMode": int},
                 "persistentVolumeClaim": {"claimName": NAME, "readOnly": bool},
                 "emptyDir": {"medium": str, "sizeLimit": QUANTITY}, "hostPath": {"path": str, "type": str}}],
}
META = {"name": NAME, "namespace": NAME, "labels": FREE, "annotations": FREE}
CLAIM = {"accessModes": [str], "resources": {"requests": RESOURCES}}
SCHEMA = {
    ("v1", "Namespace"): {},
    ("v1", "ConfigMap"): {"data": FREE},
    ("v1", "ServiceAccount"): {"automountServiceAccountToken": bool},
    ("v1", "PersistentVolumeClaim"): {"spec": CLAIM},
    ("v1", "Service"): {"spec": {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": FREE,
                                 "ports": [{"name": NAME, "port": int, "targetPort": PORT_REF}]}},
    ("apps/v1", "StatefulSet"): {"spec": {
        "serviceName": NAME, "replicas": int, "podManagementPolicy": str, "updateStrategy": {"type": str}, "selector": SELECTOR,
        "template": {"metadata": {"labels": FREE, "annotations": FREE}, "spec": POD},
        "volumeClaimTemplates": [{"apiVersion": str, "kind": str, "metadata": META, "spec": CLAIM}]}},
    ("batch/v1", "Job"): {"spec": {"backoffLimit": int, "template": {"metadata": {"labels": FREE}, "spec": POD}}},
    ("policy/v1", "PodDisruptionBudget"): {"spec": {"maxUnavailable": int, "minAvailable": int, "selector": SELECTOR}},
    ("networking.k8s.io/v1", "NetworkPolicy"): {"spec": {
        "podSelector": SELECTOR, "policyTypes": [str],
        "ingress": [{"from": [{"podSelector": SELECTOR, "namespaceSelector": SELECTOR}], "ports": [{"port": PORT_REF}]}]}},
}

failures = []


def check(condition, text):
    if not condition:
        failures.append(text)


def violations(value, schema, path):
    """Where value does not fit schema, as a list of texts."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{path}: {value!r} is not a map"]
        found = []
        for key, item in value.items():
            inner = schema.get("*") if "*" in schema else schema.get(key)
            if inner is None:
                found.append(f"{path}.{key}: no such key; known: {', '.join(sorted(schema))}")
            else:
                found += violations(item, inner, f"{path}.{key}")
        return found
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{path}: {value!r} is not a list"]
        return [v for i, item in enumerate(value) for v in violations(item, schema[0], f"{path}[{i}]")]
    if isinstance(schema, re.Pattern):
        good = isinstance(value, str) and schema.fullmatch(value) is not None
        return [] if good else [f"{path}: {value!r} does not look like {schema.pattern}"]
    good = isinstance(value, schema) and not (schema is int and isinstance(value, bool))
    return [] if good else [f"{path}: {value!r} is not a {schema.__name__}"]


def object_violations(obj):
    kind = (obj.get("apiVersion"), obj.get("kind"))
    if kind not in SCHEMA:
        return [f"{kind}: unknown kind"]
    schema = {"apiVersion": str, "kind": str, "metadata": META, **SCHEMA[kind]}
    name = obj.get("metadata", {}).get("name", "?") if isinstance(obj.get("metadata"), dict) else "?"
    return violations(obj, schema, f"{kind[1]}/{name}")


def fixed_keys(obj, schema):
    """(map, key) for every key whose name the API fixes."""
    if isinstance(obj, dict) and isinstance(schema, dict):
        for key, item in obj.items():
            if "*" not in schema:
                yield obj, key
                if key in schema:
                    yield from fixed_keys(item, schema[key])
    elif isinstance(obj, list) and isinstance(schema, list):
        for item in obj:
            yield from fixed_keys(item, schema[0])


def misspellings_are_noticed(objects, overlay):
    tried = 0
    for obj in objects:
        kind = obj["kind"]
        schema = {"apiVersion": str, "kind": str, "metadata": META, **SCHEMA[(obj["apiVersion"], kind)]}
        for place, key in list(fixed_keys(obj, schema)):
            items = list(place.items())
            place.clear()
            for k, v in items:
                place[k[:-1] if k == key else k] = v
            check(object_violations(obj), f"{overlay}: '{key[:-1]}' for '{key}' in {kind} went unnoticed")
            place.clear()
            place.update(items)
            tried += 1
    return tried


def render(source, folder):
    out = subprocess.run(["kubectl", "kustomize", os.path.join(source, "deploy/k8s", folder)], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if out.returncode != 0:
        failures.append(f"{folder} does not render: {out.stderr.strip()}")
        return []
    objects = [o for o in yaml.safe_load_all(out.stdout) if o]
    for obj in objects:
        for text in object_violations(obj):
            failures.append(f"{folder}: {text}")
        check(obj["kind"] == "Namespace" or obj["metadata"].get("namespace") == "expertd",
              f"{folder}: {obj['kind']} outside of the namespace")
    return objects


def named(objects, kind, name):
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    check(len(found) == 1, f"{kind}/{name}: {len(found)} of them, expected 1")
    return found[0] if found else None


def check_restricted(where, pod, may_see_host=False):
    """What a namespace that enforces the pod security standard `restricted` asks for, and a little more."""
    outer = pod.get("securityContext", {})
    check(outer.get("runAsNonRoot") is True and outer.get("runAsUser", 0) > 0 and
          outer.get("seccompProfile", {}).get("type") == "RuntimeDefault", f"{where}: pod security context is {outer}")
    check(pod.get("automountServiceAccountToken") is False, f"{where}: mounts an API token")
    for container in pod.get("initContainers", []) + pod["containers"]:
        context = container.get("securityContext", {})
        check(context.get("allowPrivilegeEscalation") is False and context.get("readOnlyRootFilesystem") is True and
              context.get("capabilities", {}).get("drop") == ["ALL"], f"{where}: security context is {context}")
    host = [v["name"] for v in pod["volumes"] if "hostPath" in v]
    check(may_see_host or not host, f"{where}: volumes {host} of the host are not admitted")


def check_container(where, pod, container, claims):
    for probe, path in (("startupProbe", "/startupz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
        http = container.get(probe, {}).get("httpGet", {})
        check(http.get("path") == path and http.get("port") == "probes", f"{where}: {probe} is {http}, expected {path} on probes")
    live, ready = container.get("livenessProbe", {}), container.get("readinessProbe", {})
    check(live.get("periodSeconds", 0) * live.get("failureThreshold", 0) > ready.get("periodSeconds", 0) *
          ready.get("failureThreshold", 0), f"{where}: must be taken out of service before it is killed")
    ports = {p["name"] for p in container.get("ports", [])}
    check({"rpc", "probes"} <= ports, f"{where}: ports are {ports}")
    resources = container.get("resources", {})
    for need in ("cpu", "memory"):
        check(need in resources.get("requests", {}), f"{where}: no {need} request")
    check("memory" in resources.get("limits", {}), f"{where}: no memory limit")
    volumes = {v["name"] for v in pod.get("volumes", [])}
    for mount in container.get("volumeMounts", []):
        check(mount["name"] in volumes | claims, f"{where}: mounts unknown volume {mount['name']}")


def config_of(objects, pod, volume, key):
    """The YAML file a pod gets from its config map; checks that the map's generated name is the one mounted."""
    mounts = [v["configMap"]["name"] for v in pod["volumes"] if v["name"] == volume]
    check(len(mounts) == 1, f"no config map volume {volume}")
    config = named(objects, "ConfigMap", mounts[0]) if mounts else None
    check(config is not None and key in config["data"], f"{volume} has no {key}")
    return yaml.safe_load(config["data"][key]) if config and key in config["data"] else {}


def check_config(where, config, pod):
    check(config.get("listen", [""])[0].startswith("tls+tcp://"), f"{where}: listens without TLS")
    check("insecure" not in config, f"{where}: is insecure")
    check(str(config.get("admin_listen", "")).startswith("tcp://127.0.0.1:"), f"{where}: admin listener beyond the pod")
    for key in ("token_file", "node_token_file", "admin_token_file", "tls_ca_file", "tls_cert_key_file"):
        check(key in config, f"{where}: {key} is not set")
    check(config.get("tls_server_name"), f"{where}: dials without a server name")
    mounts = [m["mountPath"] for m in pod["containers"][0]["volumeMounts"]]
    for key, value in config.items():
        if key.endswith("_file"):
            check(any(value.startswith(m + "/") for m in mounts), f"{where}: {key} {value} is in no mounted volume")


def check_overlay(objects, overlay):
    node = named(objects, "StatefulSet", "expertd")
    coordinator = named(objects, "StatefulSet", "expertd-coordinator")
    if node is None or coordinator is None:
        return
    for stateful, role in ((node, "node"), (coordinator, "coordinator")):
        where = f"{overlay}/{stateful['metadata']['name']}"
        spec, pod = stateful["spec"], stateful["spec"]["template"]["spec"]
        labels = spec["template"]["metadata"]["labels"]
        check(spec["selector"]["matchLabels"].items() <= labels.items(), f"{where}: selector does not fit its pods")
        check(labels.get("app.kubernetes.io/component") == role, f"{where}: component label is {labels}")
        service = named(objects, "Service", spec["serviceName"])
        check(service and service["spec"]["selector"].items() <= labels.items(), f"{where}: its service selects other pods")
        ports = {p["name"] for p in pod["containers"][0].get("ports", [])}
        check(service and all(p["targetPort"] in ports for p in service["spec"]["ports"]), f"{where}: service port unknown")
        budget = named(objects, "PodDisruptionBudget", stateful["metadata"]["name"])
        check(budget and budget["spec"]["maxUnavailable"] == 1 and
              budget["spec"]["selector"]["matchLabels"].items() <= labels.items(), f"{where}: disruption budget")
        claims = {c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", [])}
        check_container(where, pod, pod["containers"][0], claims)
        check_restricted(where, pod, may_see_host=overlay == "ascend")

    pod = node["spec"]["template"]["spec"]
    container = pod["containers"][0]
    service = named(objects, "Service", "expertd")
    check(service and service["spec"].get("clusterIP") == "None" and service["spec"].get("publishNotReadyAddresses") is True,
          f"{overlay}: the nodes' service must be headless and name nodes that are not ready")
    keys = {s["topologyKey"]: s for s in pod.get("topologySpreadConstraints", [])}
    check("kubernetes.io/hostname" in keys and "topology.kubernetes.io/zone" in keys, f"{overlay}: spread over {set(keys)}")
    labels = node["spec"]["template"]["metadata"]["labels"]
    for key, spread in keys.items():
        check(spread["labelSelector"]["matchLabels"].items() <= labels.items() and
              spread["whenUnsatisfiable"] in ("DoNotSchedule", "ScheduleAnyway"), f"{overlay}: spread over {key}")
    stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    check(stop[:2] == ["expertctl", "drain"] and "--wait" in stop, f"{overlay}: preStop is {stop}")
    config = config_of(objects, pod, "config", "expertd.yaml")
    check_config(f"{overlay}/expertd.yaml", config, pod)
    limit = int(stop[stop.index("--timeout") + 1].rstrip("s")) if "--timeout" in stop else 0
    check(0 < limit and limit + int(config["drain_ms"].rstrip("s")) < pod["terminationGracePeriodSeconds"],
          f"{overlay}: preStop {limit} s and drain_ms {config['drain_ms']} exceed the grace period")
    check("--admin" in stop and stop[stop.index("--admin") + 1] == config["admin_listen"], f"{overlay}: preStop dials {stop}")
    weights = [m for m in container["volumeMounts"] if m["name"] == "weights"]
    check(weights and weights[0].get("readOnly") is True and
          all(m["path"].startswith(weights[0]["mountPath"] + "/") for m in config["models"]), f"{overlay}: weights volume")
    env = {e["name"]: e for e in container["env"]}
    check("$(POD_NAME).expertd.$(POD_NAMESPACE)" in env["EXPERTD_ADVERTISE_URL"]["value"], f"{overlay}: advertised URL")
    check(list(env).index("POD_NAME") < list(env).index("EXPERTD_ADVERTISE_URL"), f"{overlay}: $(POD_NAME) is used before it is set")
    check(env["EXPERTD_BACKEND"]["value"] == overlay, f"{overlay}: backend is {env['EXPERTD_BACKEND']}")

    pod = coordinator["spec"]["template"]["spec"]
    config = config_of(objects, pod, "config", "coordinator.yaml")
    check_config(f"{overlay}/coordinator.yaml", config, pod)
    claims = {c["metadata"]["name"] for c in coordinator["spec"].get("volumeClaimTemplates", [])}
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    check("state" in claims and mounts.get("state") == config.get("state_dir"), f"{overlay}: the coordinator's state is not kept")
    service = named(objects, "Service", "expertd-coordinator")
    check(service and service["spec"].get("publishNotReadyAddresses") is True,
          f"{overlay}: nodes cannot find a coordinator that is not ready, which it is only once it has nodes")
    check(coordinator["spec"].get("podManagementPolicy") == "Parallel", f"{overlay}: a coordinator without nodes could not be changed")
    check(config.get("copies", 1) >= 2, f"{overlay}: one copy of each expert: a rolling update would lose calls")


def bytes_of(quantity):
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)B?", quantity).groups()
    return int(number) << {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]


def check_cache(objects):
    """Packed experts outlive a pod, in a directory that the daemon makes: it refuses one that the volume's group may write."""
    node = named(objects, "StatefulSet", "expertd")["spec"]
    container = node["template"]["spec"]["containers"][0]
    env = {e["name"]: e.get("value", "") for e in container["env"]}
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    claims = [c for c in node.get("volumeClaimTemplates", []) if c["metadata"]["name"] == "cache"]
    check(len(claims) == 1 and os.path.dirname(env.get("EXPERTD_WEIGHT_CACHE_DIR", "")) == mounts.get("cache"),
          f"cpu: packed experts are in {env.get('EXPERTD_WEIGHT_CACHE_DIR')}, in no volume of {mounts}")
    for claim in claims:
        check(claim["spec"]["accessModes"] == ["ReadWriteOnce"], "cpu: several nodes share the volume of packed experts")
        check(bytes_of(env["EXPERTD_WEIGHT_CACHE_BYTES"]) < bytes_of(claim["spec"]["resources"]["requests"]["storage"]),
              "cpu: weight_cache_bytes is more than the volume has")


def run_job(pod, source_dir, models, daemon):
    """The pod's containers one after the other, on these two directories; the exit code of the first that fails, or 0."""
    places = {"source": source_dir, "weights": models}
    for container in pod["initContainers"] + pod["containers"]:
        words = container["command"] + container["args"]
        for mount in container["volumeMounts"]:
            words = [w.replace(mount["mountPath"] + "/", places[mount["name"]] + "/") for w in words]
        env = {e["name"]: e["value"] for e in container["env"]}
        env["PATH"] = os.path.dirname(daemon) + ":" + os.environ["PATH"]
        run = subprocess.run(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if run.returncode != 0:
            return run.returncode, run.stdout
    return 0, run.stdout


def check_weights(source, common, objects, node, daemon):
    """The Job puts the model, which the nodes' configuration names, into the claim that they mount: whole, or not at all."""
    space = named(common, "Namespace", "expertd")
    check(space and space["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") == "restricted", "the namespace admits any pod")
    claim = named(common, "PersistentVolumeClaim", "expertd-weights")
    check(claim and claim["spec"]["accessModes"] == ["ReadWriteMany"], "the Job cannot write what many nodes read")
    pod = named(objects, "Job", "expertd-weights")["spec"]["template"]["spec"]
    check_restricted("weights", pod)
    check(pod.get("restartPolicy") in ("Never", "OnFailure"), "weights: a Job's pods are not started again for ever")
    claims = {v["name"]: v["persistentVolumeClaim"] for v in pod["volumes"]}
    check(claims["weights"] == {"claimName": "expertd-weights"}, f"weights: writes into {claims['weights']}")
    check(claims["source"].get("readOnly") is True, "weights: may write what it copies from")
    for container in pod["initContainers"] + pod["containers"]:
        model = "/models/" + {e["name"]: e["value"] for e in container["env"]}["MODEL"]
        check([m["path"] for m in config_of(node, named(node, "StatefulSet", "expertd")["spec"]["template"]["spec"], "config",
                                            "expertd.yaml")["models"]] == [model], f"weights: the nodes serve another model than {model}")
        check({"memory", "cpu"} <= container["resources"]["requests"].keys(), f"weights: {container['name']} asks for no memory or CPU")
    with tempfile.TemporaryDirectory() as work:
        models, origin = os.path.join(work, "models"), os.path.join(work, "source")
        os.mkdir(models)
        shutil.copytree(os.path.join(source, "deploy/demo-model/checkpoint"), os.path.join(origin, "model"))
        shard = os.path.join(origin, "model/model-00002-of-00003.safetensors")
        config = os.path.join(origin, "model/config.json")
        for damaged in (shard, config):
            os.rename(damaged, os.path.join(work, "away"))
            status, text = run_job(pod, origin, models, daemon)
            check(status != 0 and os.path.basename(damaged) in text and not os.path.exists(os.path.join(models, "model")),
                  f"weights: a checkpoint without {damaged} is put in place, or the reason is not said: {status} {text}")
            os.rename(os.path.join(work, "away"), damaged)
        for _ in range(2):  # a second run finds it in its place
            status, text = run_job(pod, origin, models, daemon)
            same = subprocess.run(["diff", "-r", os.path.join(origin, "model"), os.path.join(models, "model")], check=False)
            check(status == 0 and same.returncode == 0 and os.listdir(models) == ["model"],
                  f"weights: {status} {text}, and there is {os.listdir(models)}")


def check_readme(source, weights):
    """The kustomization in README that fetches by other means renders, and changes just the container that does."""
    with open(os.path.join(source, "deploy/k8s/README.md"), encoding="utf-8") as file:
        example = re.search(r"^(    resources: \[.*weights\]\n(?:    .*\n)+)", file.read(), re.MULTILINE)
    check(example is not None, "README has no example of fetching weights by other means")
    with tempfile.TemporaryDirectory() as work:
        there = os.path.relpath(os.path.join(source, "deploy/k8s/weights"), os.path.realpath(work))
        with open(os.path.join(work, "kustomization.yaml"), "w", encoding="utf-8") as file:
            file.write(textwrap.dedent(example.group(1) if example else "").replace("../weights", there))
        objects = render(source, work)
    for obj, original in zip(objects, weights):
        pod, theirs = (o["spec"]["template"]["spec"] for o in (obj, original))
        fetch, *others = pod["initContainers"]
        check(not others and "example.com" in fetch["image"] and ".part" in fetch["args"][-1], f"README's example fetches with {fetch}")
        check([v["name"] for v in pod["volumes"]] == ["weights"], "README's example waits for a volume that it does not need")
        check([m["name"] for m in fetch["volumeMounts"]] == ["weights"], f"README's example mounts {fetch['volumeMounts']}")
        check(pod["containers"] == theirs["containers"], "README's example changes more than the container that fetches")


def check_resources(source, objects, overlay):
    container = named(objects, "StatefulSet", "expertd")["spec"]["template"]["spec"]["containers"][0]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    check(limits == requests, f"{overlay}: requests and limits differ, so cores are not the node's own")
    accelerators = [k for k in limits if k.startswith("huawei.com/")]
    if overlay == "ascend":
        check(accelerators == ["huawei.com/Ascend910"] and "hugepages-2Mi" in limits, f"{overlay}: limits are {limits}")
        check_npu(source, named(objects, "StatefulSet", "expertd")["spec"]["template"]["spec"], container)
    else:
        check(not accelerators, f"{overlay}: asks for {accelerators}")
        threads = [e.get("valueFrom", {}).get("resourceFieldRef") for e in container["env"] if e["name"] == "EXPERTD_THREADS"]
        check(threads == [{"resource": "limits.cpu"}], f"{overlay}: threads are {threads}, expected the CPU limit")


def check_npu(source, pod, container):
    """Pod and systemd drop-in let the same devices' group in and give the vendor's libraries the same environment."""
    lines = [line.strip() for line in open(os.path.join(source, "deploy/systemd/examples/ascend.conf"), encoding="utf-8")]
    unit = dict(word.split("=", 1) for line in lines if line.startswith("Environment=") for word in line.removeprefix("Environment=").split())
    env = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    check({name: env.get(name) for name in unit} == unit, f"ascend: pod and drop-in differ: {env} and {unit}")
    paths = env.get("LD_LIBRARY_PATH", "").split(":")
    driver = "/usr/local/Ascend/driver/lib64"
    wanted = [env.get("ASCEND_HOME_PATH", "?") + "/lib64", driver, driver + "/common", driver + "/driver"]
    check(set(wanted) <= set(paths), f"ascend: LD_LIBRARY_PATH lacks {set(wanted) - set(paths)}")
    check(pod["securityContext"].get("supplementalGroups") == [1000] and "SupplementaryGroups=HwHiAiUser" in lines, "ascend: the devices' group")
    mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
    for path in ("/usr/local/Ascend/driver", "/etc/ascend_install.info", env.get("ASCEND_PROCESS_LOG_PATH"), "/dev/shm"):
        check(path in mounts, f"ascend: nothing is mounted at {path}")
    check("readOnly" not in mounts.get(env.get("ASCEND_PROCESS_LOG_PATH"), {}), "ascend: the vendor's logs cannot be written")
    for device in ("davinci_manager", "devmm_svm", "hisi_hdc", *(f"davinci{i}" for i in range(8))):
        check(f"DeviceAllow=/dev/{device} rw" in lines, f"ascend.conf lets /dev/{device} not in")


def check_keys(objects, daemons):
    """Each key of the pods' config files is an option of the daemon that reads it."""
    for name, key in (("expertd", "expertd.yaml"), ("expertd-coordinator", "coordinator.yaml")):
        pod = named(objects, "StatefulSet", name)["spec"]["template"]["spec"]
        text = subprocess.run([daemons[name], "--help"], text=True, stdout=subprocess.PIPE, check=True).stdout
        for option in config_of(objects, pod, "config", key):
            flag = "--" + {"models": "model"}.get(option, option.replace("_", "-"))
            check(re.search(re.escape(flag) + r"[=\s]", text), f"{key}: {name} has no key '{option}'")
        for variable in (e["name"] for e in pod["containers"][0].get("env", []) if e["name"].startswith("EXPERTD_")):
            flag = "--" + variable.removeprefix("EXPERTD_").lower().replace("_", "-")
            check(re.search(re.escape(flag) + r"[=\s]", text), f"{name} has no option for {variable}")


def main():
    if shutil.which("kubectl") is None:
        print("skipped: this machine has no kubectl, and the one of Debian 12 (1.20) cannot read components")
        return 77
    source, daemons = sys.argv[1], {"expertd": sys.argv[2], "expertd-coordinator": sys.argv[3]}
    common, weights = render(source, "common"), render(source, "weights")
    rendered = {"common": common, "weights": weights}
    for overlay in ("cpu", "ascend"):
        objects = rendered[overlay] = render(source, "overlays/" + overlay)
        if objects:
            check_overlay(objects, overlay)
            check_resources(source, objects, overlay)
            check_keys(objects, daemons)
    if common and weights and rendered["cpu"]:
        check_cache(rendered["cpu"])
        check_weights(source, common, weights, rendered["cpu"], daemons["expertd"])
    check_readme(source, weights)
    for name, objects in rendered.items():
        if not failures:
            print(f"{name}: {len(objects)} objects, {misspellings_are_noticed(objects, name)} misspellings noticed")
    for text in failures:
        print("FAILED " + text)
    return 1 if failures else 0


sys.exit(main())
