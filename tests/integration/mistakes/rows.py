# SPDX-License-Identifier: Apache-2.0
"""The table: what is typed or what a file says, the exit code, and what must be in the answer: the thing, its place, the next step. $NAME is filled in by world.py."""
import collections

Row = collections.namedtuple("Row", "group name command code wants file env user logs never")
ROWS = []
group = ""


def row(name, command, code, *wants, file=None, env=None, user=None, logs=False, never=()):
    """file: what $file holds. logs: the program runs on, and its log comes to say it. user: run as. never: what may not be in the answer."""
    ROWS.append(Row(group, name, command, code, wants, file, env or {}, user, logs, never))


def ctl(name, command, code, *wants, **more):
    row(name, "$expertctl " + command, code, *wants, **more)


DAEMON = " --listen=tcp://127.0.0.1:0 --probe-address=127.0.0.1:0 --admin-listen= --door-listen="


def node(name, options, *wants, code=1, **more):
    row(name, "$expertd " + options, code, *wants, **more)


def node_file(name, text, *wants, **more):
    node(name, "--config=$file", *wants, file=text, **more)


def node_model(name, model, *wants, **more):
    node(name, f"--model=demo={model}" + DAEMON, *wants, **more)


def coordinator(name, options, *wants, code=1, **more):
    row(name, "$coordinator " + options, code, *wants, **more)


FORWARD = "forward --model demo --layer 2 --in $folder/batch --out $folder/y "

OPEN = "--model=demo=$model" + DAEMON

group = "tls"
TLS = "--tls-ca $folder/ca.pem --tls-server-name localhost --tls-cert-key $folder/client.pem --token-file $folder/client.token "
CA = "--tls-ca $folder/ca.pem --tls-server-name localhost "
at = lambda what: f"status --coordinator {what} "
ctl("no --tls-ca", at("$tls_coord_rpc"), 2, "$tls_coord_rpc", "--tls-ca and --tls-server-name")
ctl("another CA", at("$tls_coord_rpc") + TLS.replace("/ca.pem", "/other-ca.pem"), 3, "$tls_coord_rpc", "localhost", "CN=ca", "$folder/other-ca.pem", "--tls-ca")
ctl("another server name", at("$tls_coord_rpc") + TLS.replace("localhost", "expertd.example"), 3, "$tls_coord_rpc", "localhost", "expertd.example", "--tls-server-name")
ctl("a certificate that ended", at("$tls_expired") + CA, 3, "$tls_expired", "expired", "2024-01-01", "renew")
ctl("a certificate of tomorrow", at("$tls_future") + CA, 3, "$tls_future", "not valid before", "2039-01-01", "clock")
ctl("no own certificate", at("$tls_coord_rpc") + CA + "--token-file $folder/client.token", 3, "$tls_coord_rpc", "asks for a certificate", "--tls-cert-key")
ctl("an own certificate of another CA", at("$tls_coord_rpc") + TLS.replace("client.pem", "foreign.pem"), 3, "$tls_coord_rpc", "$folder/foreign.pem", "CN=other-ca", "refused")
ctl("an own certificate that ended", at("$tls_coord_rpc") + TLS.replace("client.pem", "expired.pem"), 3, "$tls_coord_rpc", "$folder/expired.pem", "2024-01-01", "renew")
ctl("plain words to a TLS port", at("tcp://127.0.0.1:$tls_coord_rpc_port"), 3, "tcp://127.0.0.1:$tls_coord_rpc_port", "TLS", "tls+tcp://")
ctl("TLS to a plain port", at("tls+tcp://127.0.0.1:$coord_rpc_port") + CA, 3, "tls+tcp://127.0.0.1:$coord_rpc_port", "without TLS", "tcp://")
ctl("TLS to a port that is not ours", at("tls+tcp://127.0.0.1:$taken_port") + CA + "--timeout 3", 3, "tls+tcp://127.0.0.1:$taken_port", "nobody speaks TLS there", "the port of listen")
ctl("no CA file", at("$tls_coord_rpc") + "--tls-ca $folder/none.pem --tls-server-name localhost", 1, "$folder/none.pem", "no such file", "--tls-ca")
ctl("a CA file without a certificate", at("$tls_coord_rpc") + "--tls-ca $folder/text --tls-server-name localhost", 1, "$folder/text", "no certificate", "--tls-ca")
ctl("an own certificate without its key", at("$tls_coord_rpc") + TLS.replace("client.pem", "no-key.pem"), 1, "$folder/no-key.pem", "key", "--tls-cert-key")
ctl("forward with another CA", FORWARD + "--coordinator $tls_coord_rpc " + TLS.replace("/ca.pem", "/other-ca.pem"), 3, "$tls_coord_rpc", "$folder/other-ca.pem", "--tls-ca")
ctl("doctor with another CA", "doctor --coordinator $tls_coord_rpc " + TLS.replace("/ca.pem", "/other-ca.pem"), 1, "$tls_coord_rpc", "CN=ca", "$folder/other-ca.pem", "Do: ")
ctl("doctor with plain words", "doctor --coordinator tcp://127.0.0.1:$tls_coord_rpc_port", 1, "tcp://127.0.0.1:$tls_coord_rpc_port", "TLS", "Do: ", "tls+tcp://")
ctl("no token", at("$tls_coord_rpc") + TLS.replace("--token-file $folder/client.token ", ""), 1, "$tls_coord_rpc", "token is missing", "--token-file")
ctl("a wrong token", at("$tls_coord_rpc") + TLS.replace("client.token", "wrong.token"), 1, "$tls_coord_rpc", "token is wrong", "token_file (--token-file)")
ADMIN = "--admin $tls_coord_admin --tls-ca $folder/ca.pem --tls-server-name localhost --tls-cert-key $folder/client.pem "
ctl("a client's token for an operator's call", "reload " + ADMIN + "--admin-token-file $folder/client.token", 1, "$tls_coord_admin", "good for role client", "admin_token_file")
ctl("no operator's token", "reload " + ADMIN, 1, "$tls_coord_admin", "token is missing", "--admin-token-file")
row("libexpertd: another CA", "$tls_client $tls_coord_rpc $folder/other-ca.pem localhost $folder/client.token $folder/client.pem", 1, "$tls_coord_rpc", "CN=ca", "$folder/other-ca.pem", "tls_ca_file")
row("libexpertd: another server name", "$tls_client $tls_coord_rpc $folder/ca.pem expertd.example $folder/client.token $folder/client.pem", 1, "$tls_coord_rpc", "expertd.example", "localhost", "tls_server_name")
row("libexpertd: a wrong token", "$tls_client $tls_coord_rpc $folder/ca.pem localhost $folder/wrong.token $folder/client.pem", 1, "$tls_coord_rpc", "token is wrong")
JOIN = OPEN + " --coordinator-url=$tls_coord_rpc --tls-server-name=localhost --token-file=$folder/client.token --node-token-file=$folder/node.token"
OURS = " --tls-ca-file=$folder/ca.pem --tls-cert-key-file=$folder/service.pem"
node("a node with another CA", JOIN + OURS.replace("/ca.pem", "/other-ca.pem"), "coordinator", "$tls_coord_rpc", "CN=ca", "$folder/other-ca.pem", "tls_ca_file", logs=True)
node("a node with another server name", JOIN.replace("localhost", "expertd.example") + OURS, "coordinator", "$tls_coord_rpc", "expertd.example", "localhost", "tls_server_name", logs=True)
node("a node without a certificate", JOIN + " --tls-ca-file=$folder/ca.pem", "coordinator", "$tls_coord_rpc", "asks for a certificate", "tls_cert_key_file", logs=True)
node("a node with a foreign certificate", JOIN + OURS.replace("service.pem", "foreign.pem"), "coordinator", "$tls_coord_rpc", "$folder/foreign.pem", "CN=other-ca", logs=True)
node("a node with a client's token", JOIN.replace(" --node-token-file=$folder/node.token", "") + OURS, "coordinator", "$tls_coord_rpc", "good for role client", "node_token_file", logs=True)
node("a node with plain words to a TLS port", OPEN + " --coordinator-url=tcp://127.0.0.1:$tls_coord_rpc_port", "tcp://127.0.0.1:$tls_coord_rpc_port", "TLS", "tls+tcp://", logs=True)
node("a node with TLS to a plain port", JOIN.replace("$tls_coord_rpc", "tls+tcp://127.0.0.1:$coord_rpc_port") + OURS, "tls+tcp://127.0.0.1:$coord_rpc_port", "without TLS", "tcp://", logs=True)

group = "addresses"
ctl("nobody there", "status --coordinator $down", 3, "$down", "refused", "start it")
ctl("nobody there, nothing said", "status", 3, "tcp://127.0.0.1:7410", "refused", "start it", env={"EXPERTCTL_COORDINATOR": ""})
ctl("a host nobody knows", "status --coordinator tcp://no-such-host.invalid:7410", 3, "tcp://no-such-host.invalid:7410", "the host's name cannot be resolved")
ctl("no scheme", "status --coordinator 127.0.0.1:7410", 2, "'127.0.0.1:7410'", "allowed: tcp://host:port")
ctl("no port", "status --coordinator tcp://127.0.0.1", 2, "'tcp://127.0.0.1'", "tcp://host:port")
ctl("a port out of range", "status --coordinator tcp://127.0.0.1:74100", 1, "74100", "65535")
ctl("the probe port for rpc", "status --coordinator $coord_probe", 3, "$coord_probe", "probe port of the coordinator", "calls go to $coord_rpc")
ctl("a node's probe port for rpc", "status --node $a_probe", 3, "$a_probe", "probe port of node a", "calls go to $a_rpc")
ctl("the door for rpc", "status --coordinator $coord_door", 3, "$coord_door", "door_listen", "7410")
ctl("the admin port for rpc", "status --coordinator $coord_admin", 1, "$coord_admin", "admin_listen", "7410")
ctl("the rpc port for orders", "reload --admin $coord_rpc", 1, "$coord_rpc", "admin_listen", "7412")
ctl("the probe port for orders", "reload --admin $coord_probe", 3, "$coord_probe", "probe port of the coordinator", "orders to $coord_admin")
ctl("the door for a batch", FORWARD + "--node $a_door", 3, "$a_door", "door_listen", "7420")
ctl("a node for a coordinator", "status --coordinator $a_rpc", 1, "$a_rpc", "which is node a", "by default a coordinator listens on port 7410")
ctl("a coordinator for a node", "status --node $coord_rpc", 1, "$coord_rpc", "which is a coordinator", "a node on 7420")
ctl("a port of somebody else", "status --coordinator $ssh", 3, "$ssh", "SSH-2.0", "7410")
ctl("doctor at the probe port", "doctor --coordinator $coord_probe", 1, "$coord_probe", "probe", "Do: ", "$coord_rpc")
ctl("doctor at the door", "doctor --node $a_door", 1, "$a_door", "door_listen", "Do: ")
node("a port in use", "--model=demo=$model --listen=$taken --probe-address=127.0.0.1:0 --admin-listen= --door-listen=", "listen: cannot listen on $taken", "in use", "ss -ltnp")
node("a probe port in use", "--model=demo=$model --listen=tcp://127.0.0.1:0 --probe-address=127.0.0.1:$taken_port --admin-listen= --door-listen=", "probe_address: cannot listen on 127.0.0.1:$taken_port", "in use", "ss -ltnp")
node("an admin port in use", "--model=demo=$model --listen=tcp://127.0.0.1:0 --probe-address=127.0.0.1:0 --admin-listen=$taken --door-listen=", "admin_listen: cannot listen on $taken", "in use", "ss -ltnp")
node("a door's port in use", "--model=demo=$model --listen=tcp://127.0.0.1:0 --probe-address=127.0.0.1:0 --admin-listen= --door-listen=$taken", "door_listen: cannot listen on $taken", "in use", "ss -ltnp")
node("an address of another host", "--model=demo=$model --listen=tcp://192.0.2.1:0 --insecure --probe-address=127.0.0.1:0 --admin-listen= --door-listen=", "listen: cannot listen on tcp://192.0.2.1:0", "not an address of this host")
node("a name to listen on that nobody knows", "--model=demo=$model --listen=tcp://no-such-host.invalid:0 --insecure --probe-address=127.0.0.1:0 --admin-listen= --door-listen=", "listen: cannot listen on tcp://no-such-host.invalid:0", "cannot be resolved")
node("open to the world", "--model=demo=$model --listen=tcp://0.0.0.0:0", "flag --listen", "'tcp://0.0.0.0:0'", "insecure: true")
node("a listener without a scheme", "--model=demo=$model --listen=127.0.0.1:7420", "flag --listen", "'127.0.0.1:7420'", "tcp://host:port")
node("a probe address with a scheme", "--model=demo=$model --probe-address=http://127.0.0.1:0", "'http://127.0.0.1:0'", "IPv4:port")
node("a node at a probe port", OPEN + " --coordinator-url=$coord_probe", "coordinator", "$coord_probe", "probe", "$coord_rpc", logs=True)
node("a node at a node", OPEN + " --coordinator-url=$a_rpc", "coordinator", "$a_rpc", "which is node a", "7410", logs=True)
node("a node at a door", OPEN + " --coordinator-url=$coord_door", "coordinator", "$coord_door", "door_listen", logs=True)
node("a node at an admin port", OPEN + " --coordinator-url=$coord_admin", "coordinator", "$coord_admin", "admin_listen", logs=True)
node("a node at nobody", OPEN + " --coordinator-url=$down", "coordinator", "$down", "refused", logs=True)
