#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""New TLS files are in force without a restart: by reload, by themselves within a minute, at every listener, while calls go on. A broken file changes nothing."""
import json, os, re, socket, ssl, subprocess, time, urllib.request

from door_cluster import BUILD, EXPERTCTL, LAYER, SANITIZED, SOURCE, Cluster, wait_for

OPENSSL = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def make_ca(c, name):
    c.run(*OPENSSL, "-days", "90", "-subj", f"/CN={name}", "-keyout", c.path(name + ".key"), "-out", c.path(name + ".crt"))


def make_pair(c, days, ca="ca"):
    c.run(*OPENSSL, "-days", str(days), "-subj", "/CN=127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE", "-CA", c.path(ca + ".crt"), "-CAkey", c.path(ca + ".key"),
          "-keyout", c.path("new.key"), "-out", c.path("new.crt"))
    return open(c.path("new.crt"), "rb").read() + open(c.path("new.key"), "rb").read()


def shown(url):
    """The certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = url.split("://")[1].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as plain, context.wrap_socket(plain) as tls:
        return ssl.DER_cert_to_PEM_cert(tls.getpeercert(True)).encode()


def expiry(ports):
    return float(re.search(r'^expertd_tls_expiry_seconds\{key="tls_cert_key_file"\} (\S+)', page(ports, "/metrics"), re.M).group(1))


def findings(*where, code="certificate-ends"):
    said = json.loads(subprocess.run([EXPERTCTL, "doctor", *where, "-o", "json"], capture_output=True, timeout=120).stdout)
    return sorted(f["text"] for f in said["findings"] if f["code"] == code)


def page(ports, path):
    """Of the probe address; a status other than 200 is an error."""
    return urllib.request.urlopen(ports["probe_url"] + path, timeout=60).read().decode()


def refused(*where):
    return findings(*where, code="tls-refused")


with Cluster() as c:
    make_ca(c, "ca")
    first = make_pair(c, 2)
    files = {name: c.write(name + ".pem", first) for name in ("coordinator", "node")}
    ca = c.write("ca.pem", open(c.path("ca.crt"), "rb").read())
    tls = lambda name: [f"--tls-ca-file={ca}", f"--tls-cert-key-file={files[name]}", "--tls-server-name=127.0.0.1",
                        *(f"--{listener}listen=tls+tcp://127.0.0.1:0" for listener in ("", "admin-", "door-"))]
    daemons = {"coordinator": c.coordinator(*tls("coordinator"))}
    client = ("--tls-ca", ca, "--tls-server-name", "127.0.0.1")
    where = ("--coordinator", daemons["coordinator"]["rpc_url"], *client)
    daemons["node"] = c.node("n0", "--coordinator-url=" + daemons["coordinator"]["rpc_url"], *tls("node"))
    urls = lambda name: [daemons[name][key] for key in ("rpc_url", "admin_url", "door_url")]
    reload = lambda name, code=0: c.run(EXPERTCTL, "reload", "--admin", daemons[name]["admin_url"], *client, code=code)
    wait_for("the node", lambda: json.loads(subprocess.run([EXPERTCTL, "status", *where, "-o", "json"], capture_output=True).stdout or b"{}").get("models"))
    wait_for("all copies", lambda: subprocess.run([EXPERTCTL, "forward", *where, "--model", "demo", "--layer", str(LAYER), "--in", c.batch("batch", 8, 1), "--out", c.path("y")],
                                                  capture_output=True).returncode == 0)
    wait_for("a heartbeat that says it", lambda: findings(*where) == [f"{who}: a certificate in force ends in 1 days" for who in ("node n0", "the coordinator")])
    # A minute of as many calls as can be made is half of all this test's work. An interpreter without sanitizers cannot load a library with them.
    paced = ["/usr/bin/python3", f"{os.path.dirname(os.path.abspath(__file__))}/paced_calls.py", daemons["coordinator"]["rpc_url"], ca, str(LAYER)]
    bench = [EXPERTCTL, "bench", *where, "--model", "demo", "--layer", str(LAYER), "--seconds", "20", "-o", "json"]
    python = {**os.environ, "EXPERTD_LIBRARY": f"{BUILD}/client/libexpertd.so.0", "PYTHONPATH": f"{SOURCE}/client/python"}
    calls = subprocess.Popen(bench if SANITIZED else paced, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=python)
    by_itself = None if SANITIZED else ("node", "ca")

    # Two certificates after each other, the second of another authority that stands in ca.pem beside the first. The first connection gets each.
    make_ca(c, "ca2")
    c.write("ca.pem", open(c.path("ca.crt"), "rb").read() + open(c.path("ca2.crt"), "rb").read())
    for authority, days in ("ca", 30), ("ca2", 60):
        pair = make_pair(c, days, authority)
        for name in daemons:
            c.write(name + ".pem", pair)
            began = time.monotonic()
            if (name, authority) == by_itself:
                wait_for("a look at the files", lambda: "tls-renewed" in open(c.path("n0.log")).read(), 120)
            else:
                reload(name)
            for url in urls(name):
                assert shown(url) in pair, f"{name} at {url} shows another certificate {time.monotonic() - began:.1f} s after the file changed"
            left = expiry(daemons[name]) - time.time()
            assert days - 1 < left / 86400 <= days, (name, left / 86400)
        c.run(EXPERTCTL, "forward", *where, "--model", "demo", "--layer", str(LAYER), "--in", c.batch("batch", 8, 1), "--out", c.path("y"))
    wait_for("the node's heartbeat", lambda: findings(*where) == [])

    # Half a file, a key of another certificate: said in every place, and what is in force stays.
    assert refused(*where) == [] and all("expertd_tls_refused 0\n" in page(ports, "/metrics") for ports in daemons.values())
    for broken in pair[: len(pair) // 2], first.split(b"-----BEGIN PRIVATE")[0] + b"-----BEGIN PRIVATE" + pair.split(b"-----BEGIN PRIVATE")[1]:
        c.write("node.pem", broken)
        assert files["node"] in reload("node", code=1).stderr.decode()
        assert all(shown(url) in pair for url in urls("node"))
        wait_for("the node's heartbeat", lambda: refused(*where))
        alone = ("--node", daemons["node"]["rpc_url"], *client)
        for texts in refused(*where), refused(*alone):
            assert len(texts) == 1 and texts[0].startswith("node n0: a restart would fail") and files["node"] in texts[0], texts
        for which in where, alone:
            status = subprocess.run([EXPERTCTL, "status", *which], capture_output=True, timeout=120)
            assert status.returncode == 1 and files["node"] in (status.stdout + status.stderr).decode(), status
        assert "[+] tls: repair this file, a restart would fail: flag --tls-cert-key-file: " in page(daemons["node"], "/readyz?verbose")
        assert "expertd_tls_refused 1\n" in page(daemons["node"], "/metrics")
    c.write("node.pem", pair)
    os.chmod(c.path("coordinator.pem"), 0o644)
    assert files["coordinator"] in reload("coordinator", code=1).stderr.decode()
    wait_for("the coordinator's word", lambda: [text for text in refused(*where) if text.startswith("the coordinator: ") and "mode 0644" in text])
    assert files["coordinator"] in page(daemons["coordinator"], "/readyz?verbose")
    os.chmod(c.path("coordinator.pem"), 0o600)
    for name in daemons:
        reload(name)
        assert "expertd_tls_refused 0\n" in page(daemons[name], "/metrics")
    wait_for("all is good", lambda: refused(*where) == [])

    said = json.loads(calls.communicate(timeout=300)[0] or "0")
    count = said["calls"] if SANITIZED else said
    assert calls.returncode == 0 and count > 0, "a call failed"
    print(f"{count} calls through two renewals of two daemons, none failed")
    c.stop()
