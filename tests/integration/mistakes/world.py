# SPDX-License-Identifier: Apache-2.0
"""What the mistakes are made against: two running clusters, one of them behind TLS and tokens, TLS servers whose certificates are out of their time, and a folder of
broken files. `names` has all that a row may say with $."""
import glob, json, os, shutil, socket, ssl, string, struct, subprocess, threading, time

from door_cluster import BUILD, EXPERTCTL, LAYER, MODEL, SANITIZED, Cluster, read_safetensors, safetensors, wait_for

EXPERTD = f"{BUILD}/server/expertd/expertd"
COORDINATOR = f"{BUILD}/server/coordinator/expertd-coordinator"
SOMEBODY = 65534


class World(Cluster):
    def __enter__(self):
        super().__enter__()
        self.names = {"folder": self.folder, "model": MODEL, "expertctl": EXPERTCTL, "expertd": EXPERTD, "coordinator": COORDINATOR, "uid": str(os.geteuid()),
                      "tls_client": f"{BUILD}/tests/integration/mistakes/mistakes_client"}
        self.sockets = []
        return self

    def __exit__(self, *why):
        for listener in self.sockets:
            listener.close()
        if os.path.exists(self.path("state-alien")):
            os.chmod(self.path("state-alien"), 0o700)
        super().__exit__(*why)

    def fill(self, text):
        return string.Template(text).substitute(self.names)

    def name_ports(self, prefix, ports):
        for key, value in ports.items():
            if key.endswith("_url") and isinstance(value, str):
                self.names[prefix + key.removesuffix("_url")] = value.replace("http://", "tcp://")
                self.names[prefix + key.removesuffix("_url") + "_port"] = value.rsplit(":", 1)[-1]

    def start_clusters(self):
        """plain_*, and tls_* with certificates of callers and tokens of three roles; node b of the plain one is there to be drained."""
        self.name_ports("coord_", self.coordinator("--admin-listen=tcp://127.0.0.1:0", "--heartbeat-ms=100"))
        at = "--coordinator-url=" + self.names["coord_rpc"]
        for name in "ab":
            self.name_ports(f"{name}_", self.node(name, at, "--admin-listen=tcp://127.0.0.1:0"))
        tls = [f"--{key}-file={self.path(name)}" for key, name in (("tls-ca", "ca.pem"), ("tls-cert-key", "service.pem"), ("token", "client.token"), ("node-token", "node.token"),
                                                                   ("admin-token", "admin.token"))]
        tls += ["--tls-server-name=localhost", "--tls-client-certs", "--listen=tls+tcp://127.0.0.1:0", "--admin-listen=tls+tcp://127.0.0.1:0", "--door-listen=tls+tcp://127.0.0.1:0"]
        self.tls_options = tls
        self.name_ports("tls_coord_", self.daemon("tls-coordinator", COORDINATOR, "--min-nodes=1", *tls))
        self.name_ports("tls_node_", self.daemon("tls-node", EXPERTD, f"--model=demo={MODEL}", "--node-name=t", "--coordinator-url=" + self.names["tls_coord_rpc"], *tls))
        config = self.write("lone.yaml", self.fill("models:\n  - name: demo\n    path: $model\ndrain_ms: 1000\n").encode())
        self.name_ports("lone_", self.daemon("lone", EXPERTD, f"--config={config}", "--node-name=lone", "--admin-listen=tcp://127.0.0.1:0"))
        self.write("lone.yaml", b"drain_ms: soon\n")
        self.name_ports("static_", self.daemon("static", COORDINATOR, "--min-nodes=1", "--placement=static", f"--expert-map-file={self.path('map2.json')}", "--node-order=x",
                                               "--node-order=why"))
        self.daemon("x", EXPERTD, f"--model=demo={MODEL}", "--node-name=x", "--coordinator-url=" + self.names["static_rpc"])
        self.daemon("stranger", EXPERTD, f"--model=demo={self.path('other-weights')}", "--node-name=stranger", at)
        wait_for("the plain cluster", lambda: self.forwards("--coordinator", self.names["coord_rpc"]))
        wait_for("the other weights", lambda: self.status().count('"version"') == 2)
        wait_for("the node of the static map", lambda: '"x"' in self.status("static_rpc"))
        secure = ("--tls-ca", self.path("ca.pem"), "--tls-server-name", "localhost", "--tls-cert-key", self.path("client.pem"), "--token-file", self.path("client.token"))
        wait_for("the cluster behind TLS", lambda: self.forwards("--coordinator", self.names["tls_coord_rpc"], *secure))

    def status(self, name="coord_rpc"):
        return subprocess.run([EXPERTCTL, "status", "--coordinator", self.names[name], "-o", "json"], capture_output=True, timeout=60).stdout.decode()

    def forwards(self, *where):
        return subprocess.run([EXPERTCTL, "forward", *where, "--model", "demo", "--layer", str(LAYER), "--in", self.path("batch"), "--out", self.path("y")],
                              capture_output=True, timeout=60).returncode == 0

    # ---- files ----

    def make_files(self):
        self.batch("batch", 8, 1)
        for role in "client", "node", "admin":
            self.write(f"{role}.token", f"{role}-token-0123456789abcdef0123456789\n".encode())
        self.write("wrong.token", b"nobodys-token-0123456789abcdef0123456\n")
        self.write("empty.token", b"")
        self.write("short.token", b"short\n")
        self.write("open.token", b"0123456789abcdef0123456789abcdef\n", 0o644)
        os.chmod(self.path("open.token"), 0o644)
        self.write("secret.token", b"0123456789abcdef0123456789abcdef\n")
        self.make_alien("secret.token")
        self.write("text", b"this is no tensor file, no certificate and no JSON\n", 0o644)
        os.mkdir(self.path("directory"))
        os.mkdir(self.path("mirror"))
        self.write("mirror/expertd-mirror", b"")
        os.mkdir(self.path("full"))

    def make_alien(self, name):
        """It can be read by somebody else only."""
        if os.geteuid() == 0:
            os.chown(self.path(name), SOMEBODY, SOMEBODY)
        else:
            os.chmod(self.path(name), 0)

    def make_batches(self):
        """Batches that are wrong in one thing each, by file name."""
        entries = json.loads((lambda blob: blob[8 : 8 + struct.unpack_from("<Q", blob)[0]])(open(self.path("batch"), "rb").read()))
        data = read_safetensors(self.path("batch"))
        good = {name: (entry["dtype"], entry["shape"], data[name]) for name, entry in entries.items()}
        ids = lambda *first: ("I32", [8, 2], struct.pack("<16i", *first, *(3, 4) * 7))
        wrong = {"no-x": {"x": None}, "thin-x": {"x": ("BF16", [8, 64], data["x"][: 8 * 64 * 2])}, "int-x": {"x": ("I64", [8, 16], data["x"][: 8 * 16 * 8])},
                 "few-ids": {"expert_ids": ("I32", [7, 2], data["expert_ids"][:56])}, "float-ids": {"expert_ids": ("F32", [8, 2], data["expert_ids"])},
                 "large-id": {"expert_ids": ids(5, 17)}, "twice-id": {"expert_ids": ids(5, 5)}, "minus-id": {"expert_ids": ids(5, -3)}, "nan-x": {"x": ("BF16", [8, 128], data["x"][:262] + b"\xc0\x7f" + data["x"][264:])}, "k3-scales": {"expert_scales": ("F32", [8, 3], bytes(96))}}
        for name, change in wrong.items():
            self.write(name, safetensors({key: value for key, value in (good | change).items() if value is not None}))
        self.write("cut-batch", open(self.path("batch"), "rb").read()[:-100])

    def make_models(self):
        """Checkpoints that are wrong in one thing each; the good files are links to keep them small."""

        def make(name, change):
            folder = self.path(name)
            shutil.copytree(MODEL, folder)
            change(folder)

        def rewrite(file, change):
            def write(folder):
                text = open(f"{folder}/{file}").read()
                assert change(text) != text, (file, text)
                open(f"{folder}/{file}", "w").write(change(text))
            return write

        shard = "model-00002-of-00003.safetensors"
        config = lambda before, after: rewrite("config.json", lambda text: text.replace(before, after))
        make("no-config", lambda folder: os.unlink(f"{folder}/config.json"))
        make("bad-json", config('"head_dim": 32,', '"head_dim": 32'))
        make("no-shard", lambda folder: os.unlink(f"{folder}/{shard}"))
        make("cut-shard", lambda folder: os.truncate(f"{folder}/{shard}", os.path.getsize(f"{folder}/{shard}") - 1000))
        make("aqlm", config('"use_cache": true,', '"use_cache": true, "quantization_config": {"quant_method": "aqlm", "bits": 4},'))
        make("few-experts", config('"num_local_experts": 16', '"num_local_experts": 12'))
        make("noise", lambda folder: open(f"{folder}/model-00001-of-00003.safetensors", "wb").write(b"this is no tensor file, and much too short for one"))
        make("top-k", config('"num_experts_per_tok": 2', '"num_experts_per_tok": 17'))
        make("dense", config('"num_local_experts": 16', '"num_local_experts": 0'))
        make("strange", rewrite("model.safetensors.index.json", lambda text: text.replace("block_sparse_moe.experts.3.w2", "block_sparse_moe.experts.3.w4", 1)))
        make("no-tensors", lambda folder: [os.unlink(path) for path in glob.glob(folder + "/*.safetensors*")])

        def turn_bits(folder):
            for path in glob.glob(folder + "/*.safetensors"):
                data = bytearray(open(path, "rb").read())
                for i in range(8 + struct.unpack_from("<Q", data)[0], len(data), 512):
                    data[i] ^= 4
                open(path, "wb").write(data)

        make("other-weights", turn_bits)

    def make_maps(self):
        """Expert maps, in the format of vllm-ascend."""
        devices = lambda *lists: [{"device_id": i, "device_expert": list(experts)} for i, experts in enumerate(lists)]
        whole = lambda layers, *lists: {"moe_layer_count": layers, "layer_list": [{"layer_id": l, "device_count": len(lists), "device_list": devices(*lists)} for l in range(layers)]}
        for name, content in (("map", whole(4, range(16))), ("map2", whole(4, range(8), range(8, 16))), ("map15", whole(4, range(15)))):
            self.write(name + ".json", json.dumps(content).encode())
        wrong = whole(4, range(16))
        wrong["layer_list"][0]["device_count"] = 2
        self.write("count.json", json.dumps(wrong).encode())
        self.write("negative.json", json.dumps(whole(4, [0, -1])).encode())
        self.write("broken.json", b'{"moe_layer_count": 2,\n"layer_list": [}\n')

    def make_states(self):
        for name in "state-damaged", "state-alien":
            os.mkdir(self.path(name), 0o700)
        self.make_alien("state-alien")
        self.write("state-damaged/coordinator.db", b"SQLite format 3\0" + b"garbage " * 2000)
        self.names["state_used"] = self.path("state-used")
        os.mkdir(self.path("state-used"))
        self.coordinator_with_state = self.daemon("keeper", COORDINATOR, "--state-dir=" + self.path("state-used"))

    # ---- certificates ----

    def openssl(self, *words):
        self.run("openssl", *words)

    def make_ca(self, name):
        self.openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "90", "-subj", f"/CN={name}", "-keyout", self.path(name + ".key"),
                     "-out", self.path(name + ".pem"))

    def make_pair(self, name, host, ca="ca", begin=None, end=None):
        """NAME.pem: certificate and key of this host. begin, end: YYMMDDHHMMSSZ, else from now on."""
        self.openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={host}", "-keyout", self.path("new.key"), "-out", self.path("new.csr"))
        self.write("ca.cnf", self.fill("[ca]\ndefault_ca=d\n[d]\ndatabase=$folder/index\nnew_certs_dir=$folder\nserial=$folder/serial\ndefault_md=sha256\npolicy=p\nx509_extensions=e\n"
                                       f"unique_subject=no\n[p]\ncommonName=supplied\n[e]\nbasicConstraints=critical,CA:FALSE\nsubjectAltName=DNS:{host}\n").encode())
        self.write("index", b"")
        self.write("serial", b"1000\n")
        dates = (["-startdate", begin] if begin else []) + ["-enddate", end or "401231235959Z"]
        self.openssl("ca", "-batch", "-notext", "-config", self.path("ca.cnf"), "-cert", self.path(ca + ".pem"), "-keyfile", self.path(ca + ".key"), "-in", self.path("new.csr"),
                     "-out", self.path("new.crt"), *dates)
        self.write(name + ".crt", open(self.path("new.crt"), "rb").read(), 0o644)
        self.write(name + ".pem", open(self.path("new.crt"), "rb").read() + open(self.path("new.key"), "rb").read())

    def make_certificates(self):
        self.make_ca("ca")
        self.make_ca("other-ca")
        self.make_pair("service", "localhost")
        self.make_pair("client", "caller")
        self.make_pair("foreign", "caller", ca="other-ca")
        self.make_pair("expired", "localhost", begin="200101000000Z", end="240101000000Z")
        self.make_pair("future", "localhost", begin="390101000000Z")
        pem = lambda name: open(self.path(name + ".pem"), "rb").read()
        self.write("open-key.pem", pem("service"), 0o644)
        os.chmod(self.path("open-key.pem"), 0o644)
        self.write("no-key.pem", open(self.path("service.crt"), "rb").read())
        key = lambda name: pem(name)[pem(name).index(b"-----BEGIN PRIVATE") :]
        self.write("mixed.pem", open(self.path("service.crt"), "rb").read() + key("client"))

    def serve_tls(self, name):
        """A TLS server with this pair, which ends each connection after the handshake: for certificates that our daemons would refuse to start with."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path(name + ".pem"))
        listener = socket.create_server(("127.0.0.1", 0))
        self.sockets.append(listener)
        self.names[f"tls_{name}"] = f"tls+tcp://127.0.0.1:{listener.getsockname()[1]}"

        def serve(plain):
            try:
                with plain, context.wrap_socket(plain, server_side=True) as tls:
                    tls.recv(1)
            except OSError:
                pass

        def accept():
            try:
                while True:
                    plain = listener.accept()[0]
                    plain.settimeout(20)
                    threading.Thread(target=serve, args=(plain,), daemon=True).start()
            except OSError:
                pass

        threading.Thread(target=accept, daemon=True).start()

    def take_ports(self):
        """Ports with somebody else on them: one that says nothing, one that greets as an SSH server does, one that speaks HTTP, a byte a second; and one with nobody."""
        silent, ssh, slow = (socket.create_server(("127.0.0.1", 0)) for _ in range(3))
        nobody = socket.socket()  # bound, so that no daemon gets the port, but not listening
        nobody.bind(("127.0.0.1", 0))
        self.names["down"] = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        self.sockets += [silent, ssh, slow, nobody]
        self.names["taken"] = self.names["silent"] = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        self.names["taken_port"] = str(silent.getsockname()[1])
        self.names["slow"] = f"tcp://127.0.0.1:{slow.getsockname()[1]}"
        self.names["ssh"] = f"tcp://127.0.0.1:{ssh.getsockname()[1]}"

        def greet():
            try:
                while True:
                    with ssh.accept()[0] as peer:
                        peer.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                        peer.settimeout(1)
                        peer.recv(100)
            except OSError:
                pass

        def dribble(peer):
            try:
                with peer:
                    for byte in b"HTTP/1.0 200 OK\r\n" + 1000 * b"x":
                        peer.sendall(bytes([byte]))
                        time.sleep(1)
            except OSError:
                pass

        def take():
            try:
                while True:
                    threading.Thread(target=dribble, args=(slow.accept()[0],), daemon=True).start()
            except OSError:
                pass

        threading.Thread(target=greet, daemon=True).start()
        threading.Thread(target=take, daemon=True).start()
