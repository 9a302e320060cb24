#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""In a TLS cluster nobody is led to show a token in plain text: a registration with tcp:// is refused by name, and nothing ever dials there."""
import socket, ssl

from door_cluster import EXPERTCTL, LAYER, Cluster
import peer

with Cluster() as c:
    c.make_certificates()
    token = c.write("client.token", b"client-token-" + b"x" * 24)
    tls = [f"--tls-ca-file={c.path('ca.pem')}", f"--tls-cert-key-file={c.path('service.pem')}", "--tls-server-name=127.0.0.1", f"--token-file={token}", "--listen=tls+tcp://127.0.0.1:0"]
    coordinator = c.coordinator(*tls)
    c.node("n0", "--coordinator-url=" + coordinator["rpc_url"], *tls)
    where = ("--coordinator", coordinator["rpc_url"], "--tls-ca", c.path("ca.pem"), "--tls-server-name", "127.0.0.1", "--token-file", token)
    c.wait_serving(*where)
    context = ssl.create_default_context(cafile=c.path("ca.pem"))
    context.check_hostname = False
    with socket.create_server(("127.0.0.5", 0)) as recorder, peer.Peer(coordinator["rpc_url"], tls=context) as rogue:
        recorder.setblocking(False)
        assert rogue.hello("node", token=open(token).read(), node="rogue").status == 0
        plain = f"tcp://127.0.0.5:{recorder.getsockname()[1]}"
        model = peer.model_info("demo", "v1", [peer.layer_info(LAYER, owned=range(16))])
        for url, code in ((plain, 7), ("shm:///tmp/x.sock", 3), ("loopback://x", 3), ("file:///etc/passwd", 3)):
            reply = rogue.call(peer.REGISTER, peer.register_body("rogue", url, 7, [model]))
            assert reply.status == code and url in reply.text() and "allowed" in reply.text(), (url, reply.status, reply.text())
        batch = c.batch("batch", 8, 1)
        c.run(EXPERTCTL, "forward", *where, "--model", "demo", "--layer", str(LAYER), "--in", batch, "--out", c.path("y"))
        try:
            recorder.accept()
            raise AssertionError("somebody dialed the plain address")
        except BlockingIOError:
            pass
    assert f"event=register-refused node=rogue reason=\"node rogue: the url '{plain}' is plain text" in open(c.path("coordinator.log")).read()
    c.stop()

# An operator says where nodes may be: nothing else gets into the table.
with Cluster() as c:
    coordinator = c.coordinator("--advertise-allow=127.0.0.0/30", "--advertise-allow=.svc")
    where = ("--coordinator", coordinator["rpc_url"])
    c.node("n0", "--coordinator-url=" + coordinator["rpc_url"])
    c.wait_serving(*where)
    with socket.create_server(("127.0.0.5", 0)) as recorder, peer.Peer(coordinator["rpc_url"]) as rogue:
        recorder.setblocking(False)
        assert rogue.hello("node", node="rogue").status == 0
        port = recorder.getsockname()[1]
        for url in f"tcp://127.0.0.5:{port}", f"tcp://127.0.0.1:1@127.0.0.5:{port}", f"tcp://127.0.0.1:1@localhost", f"tcp://localhost:{port}", f"tcp://[::ffff:127.0.0.1]:{port}":
            reply = rogue.call(peer.REGISTER, peer.register_body("rogue", url, 7, [model]))
            assert reply.status == 7 and url in reply.text() and "allowed hosts: 127.0.0.0/30, .svc" in reply.text(), (url, reply.status, reply.text())
        c.run(EXPERTCTL, "forward", *where, "--model", "demo", "--layer", str(LAYER), "--in", c.batch("batch", 8, 1), "--out", c.path("y"))
        try:
            recorder.accept()
            raise AssertionError("somebody dialed an address that is not allowed")
        except BlockingIOError:
            pass
        with peer.Peer(coordinator["rpc_url"]) as good:
            assert good.hello("node", node="good").status == 0
            reply = good.call(peer.REGISTER, peer.register_body("good", "tcp://n0.expertd.svc:1", 7, [model]))
            assert reply.status == 0, reply.text()
    assert f"'tcp://127.0.0.5:{port}' is outside this coordinator's advertise_allow" in open(c.path("coordinator.log")).read()
    c.stop()
