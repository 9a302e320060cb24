# SPDX-License-Identifier: Apache-2.0
"""The table: what is typed or what a file says, the exit code, and what must be in the answer: the thing, its place, the next step. $NAME is filled in by world.py."""
import collections

Row = collections.namedtuple("Row", "group name command code wants file env alien logs never ordered full")
ROWS = []
group = ""


def row(name, command, code, *wants, file=None, env=None, alien=False, logs=False, never=(), ordered=False, full=None):
    """file: what $file holds. $out is a file that may not be there afterwards. logs: the program runs on, and its log comes to say it. full: $folder/full is a file system with room for so many pages more, where mounts are allowed. alien: without root's right to files of others. never: what may not be in the answer. ordered: after
    all others, one by one."""
    ROWS.append(Row(group, name, command, code, wants, file, env or {}, alien, logs, never, ordered, full))


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


FORWARD = "forward --model demo --layer 2 --in $folder/batch --out $out "

group = "flags"
ctl("no command", "", 2, "no command given", "expertctl --help")
ctl("a misspelt command", "statsu", 2, "no command 'statsu'", "allowed: status table")
ctl("a misspelt flag", "forward --modle demo", 2, "'--modle'", "expertctl forward --help")
ctl("a flag without its value", "forward --model", 2, "'--model'", "requires an argument", "expertctl forward --help")
ctl("a word too many", "status now", 2, "'now'", "allowed: options only")
ctl("two ways to the service", "status --coordinator $coord_rpc --node $a_rpc", 2, "--coordinator $coord_rpc", "--node $a_rpc", "one of them")
ctl("a time in words", "status --timeout 5minutes", 2, "--timeout is '5minutes'", "allowed: 1ms..24h", "ms, s, m or h")
ctl("a layer in words", "table --layer two", 2, "--layer is 'two'", "whole number 0..")
ctl("no admin listener", "drain b", 2, "--admin is missing", "admin_listen", "tcp://host:port")
ctl("a policy without an admin listener", "policy set copies=2", 2, "--admin is missing", "admin_listen")
ctl("a policy without a value", "policy set copies --admin $coord_admin", 2, "'copies'", "allowed: copies=2")
ctl("a verb of the policy that is not there", "policy get", 2, "no verb 'get'", "allowed: show, set, unset")
ctl("a revision in words", "policy unset copies --expect-revision last", 2, "--expect-revision is 'last'", "whole number 0..")
ctl("sizes to tune that do not ascend", "tune --model demo --layer 2 --tokens 64,16", 2, "--tokens is '64,16'", "allowed: 2..16 ascending")
ctl("rounds that prove nothing", "tune --model demo --layer 2 --rounds 5", 2, "--rounds is '5'", "6..64")
ctl("a plan of nobody", "plan", 2, "--admin is missing", "admin_listen", "tcp://host:port")
PLAN = "plan --model $model/config.json --nodes 4 "
ctl("a plan for nodes without a model", "plan --nodes 4 --zipf 1", 2, "--nodes is given without --model")
ctl("a plan for no nodes", PLAN.replace("4", "0") + "--zipf 1", 2, "--nodes is '0'", "allowed: a whole number 1..4096")
ctl("a plan for nobody's number of nodes", PLAN.replace("--nodes 4", "--zipf 1"), 2, "--nodes is missing")
ctl("a plan of less than even load", PLAN + "--zipf -1", 2, "--zipf is '-1'", "allowed: a number 0..8")
ctl("a plan of two loads", PLAN + "--zipf 1 --trace $folder/text", 2, "--trace and --zipf are both given", "one of them")
ctl("a plan of no load", PLAN, 2, "--trace and --zipf are both missing", "one of them")
ctl("a plan of more copies than nodes", PLAN + "--zipf 1 --copies 5", 2, "--copies is '5'", "allowed: 1..4", "--nodes")
ctl("a seed where nothing is drawn", PLAN + "--trace $folder/text --seed 1", 2, "--seed is given with --trace")
ctl("more nodes at once than there are on a host", PLAN + "--zipf 1 --nodes-per-host 2 --nodes-at-once 3", 2, "--nodes-at-once is '3'", "allowed: 1..2", "--nodes-per-host")
ctl("figures of a machine without a model", "plan --measured $folder/text", 2, "--measured is given without --model")
ctl("an order to nodes that are not there", PLAN + "--zipf 1 --apply", 2, "--apply and --model are both given", "one of them")
ctl("a plan from a file of a coordinator", PLAN + "--zipf 1 --admin $coord_admin", 2, "--admin and --model are both given", "one of them")
ctl("a plan from a file with a time to answer", PLAN + "--zipf 1 --timeout 5s", 2, "--timeout and --model are both given", "one of them")
ctl("a checkpoint that is the service's", "model show --checkpoint $model --version v9", 2, "--version and --checkpoint are both given", "one of them")
ctl("a checkpoint at a coordinator", "model show --checkpoint $model --coordinator $coord_rpc", 2, "--coordinator and --checkpoint are both given", "one of them")
ctl("a checkpoint at a node", "model show --node $a_rpc --checkpoint $model", 2, "--node and --checkpoint are both given", "one of them")
ctl("a checkpoint behind TLS", "model show --checkpoint $model --tls-ca $folder/ca.pem", 2, "--tls-ca and --checkpoint are both given", "one of them")
ctl("a checkpoint with a time to answer", "model show --checkpoint $model --timeout 5s", 2, "--timeout and --checkpoint are both given", "one of them")
ctl("a checkpoint without checksums", "model show --no-payload-crc --checkpoint $model", 2, "--no-payload-crc and --checkpoint are both given", "one of them")
ctl("no checkpoint, wherever the service is", "model show --checkpoint $folder/nothing", 1, "$folder/nothing", env={"EXPERTCTL_COORDINATOR": "tls+tcp://127.0.0.1:7410"}, never=("--tls-ca",))
ctl("no model", "forward --layer 2 --in $folder/batch --out $folder/y", 2, "--model is missing", "expertctl status")
ctl("no input", "forward --model demo --layer 2 --out $folder/y", 2, "--in and --random are both missing", "one of them")
ctl("constant experts of random tokens", "forward --model demo --layer 2 --random 2 --const-experts 1", 2, "--const-experts is given without --in", "const_alpha1, const_alpha2 and const_v")
ctl("a misspelt word", "forward --mode fast", 2, "--mode is 'fast'", "allowed: auto, decode, prefill")
ctl("noise without logits", FORWARD + "--noise-temperature 1", 2, "--noise-temperature", "without --logits")
ctl("a seed for no draw", FORWARD + "--logits $folder --gate-seed 3", 2, "--gate-seed is given without --noise-temperature")
ctl("a verb that is not there", "trace rekord", 2, "no verb 'rekord'", "allowed: record, snapshot, report, export")
ctl("model default without its names", "model default --admin $coord_admin", 2, "NAME is missing", "expertctl status")
ctl("a port that is none, for a context", "context add far --coordinator tcp://127.0.0.1:99999", 2, "--coordinator is 'tcp://127.0.0.1:99999'", "port 1..65535")
ctl("a context that is not there", "status --context nobody", 2, "'nobody'", "context")
ctl("a context that is not there, in use", "context use nobody", 1, "'nobody'", "context")
ctl("a lane in the environment that is none", FORWARD + "--coordinator $coord_rpc", 1, "LIBEXPERTD_LANES is 'strem'", "allowed: stream", env={"LIBEXPERTD_LANES": "strem"})
ctl("tracing that is neither on nor off", FORWARD + "--coordinator $coord_rpc", 2, "EXPERTD_TRACING is 'of'", "allowed: auto, off", env={"EXPERTD_TRACING": "of"})
ctl("a level of the CPU that is none", FORWARD + "--coordinator $coord_rpc", 2, "EXPERTD_CPU_FEATURES is 'sse'", "allowed on this CPU: portable", env={"EXPERTD_CPU_FEATURES": "sse"})
row("libexpertd: a level of the CPU that is none", "$tls_client $coord_rpc $folder/ca.pem localhost $folder/client.token $folder/client.pem EXPERTD_CPU_FEATURES", 1, "EXPERTD_CPU_FEATURES is 'sse'", "allowed on this CPU: portable", env={"EXPERTD_CPU_FEATURES": "sse"})
ctl("a misspelt variable of expertctl", "status --coordinator $coord_rpc", 1, "EXPERTCTL_TIMEOTU", "EXPERTCTL_TIMEOUT", env={"EXPERTCTL_TIMEOTU": "5"})
ctl("a variable's value of expertctl", "status --coordinator $coord_rpc", 2, "EXPERTCTL_TIMEOUT", "'soon'", "allowed: ", env={"EXPERTCTL_TIMEOUT": "soon"})
node("a misspelt flag of a daemon", "--lisen=tcp://127.0.0.1:0", "'--lisen=tcp://127.0.0.1:0'", "--help")
node("a word that is no flag", "serve", "'serve' is not a flag", "--help")
node("a number in words", "--threads=many", "flag --threads", "'many'", "allowed: 0..")
node("a model without its name", "--model=$model", "flag --model", "'$model' has no '='", "name=path")
node("a variable's value", "--model=demo=$model", "EXPERTD_THREADS", "'abc'", "allowed: 0..", env={"EXPERTD_THREADS": "abc"})
node("a misspelt variable", "--model=demo=$model --check-config", "environment EXPERTD_THREDS", "is ignored", "did you mean EXPERTD_THREADS", code=0, env={"EXPERTD_THREDS": "4"})

group = "files"
MODELS = "models:\n  - name: demo\n    path: $model\n"
node_file("a bracket too few", "listen: [tcp://127.0.0.1:0\n" + MODELS, "$file:2", "did not find expected ',' or ']'", "begins in line 1")
node_file("a tab for blanks", "models:\n\t- name: demo\n", "$file:2: column 1", "not YAML", "a tab; YAML is indented with blanks")
node_file("a misspelt key", MODELS + "thread: 4\n", "$file:4", "unknown key 'thread'", "did you mean 'threads'")
node_file("a coordinator's key", MODELS + "copies: 2\n", "$file:4", "unknown key 'copies'", "expertd --help lists those of this program")
node_file("a misspelt key of a model", "models:\n  - name: demo\n    paht: $model\n", "$file:3", "unknown key 'paht'", "did you mean 'path'")
node_file("a list for a value", MODELS + "threads: [1, 2]\n", "$file:4", "threads", "single value")
node_file("a value for a list", "models: $model\n", "$file:1", "models", "a list is expected")
node_file("a word for a number", MODELS + "threads: four\n", "$file:4", "threads", "'four'", "allowed: 0..")
node_file("a number out of range", MODELS + "prefill_share_percent: 150\n", "$file:4", "'150'", "allowed: 0..90 percent")
node_file("a unit we do not know", MODELS + "weight_bytes_max: 10GB\n", "$file:4", "weight_bytes_max: '10GB'", "with K, M, G or T")
node_file("yes for true", MODELS + "merge_callers: yes\n", "$file:4", "'yes'", "allowed: true, false")
node_file("a key twice", "threads: 1\n" + MODELS + "threads: 2\n", "$file:5", "threads", "twice, first at line 1")
node_file("a model twice", MODELS + "  - name: demo\n    path: $model\n" + "listen: [tcp://127.0.0.1:0]\nprobe_address: 127.0.0.1:0\nadmin_listen: ''\ndoor_listen: ''\n",
          "model demo", "twice in models", "take one out")
node_file("no model", "threads: 1\n", "models", "no model to serve", "--model name=path")
node_file("a key without a value", MODELS + "backend:\n", "$file:4", "backend", 'write ""')
node_file("a name that steers a terminal", MODELS + 'node_name: "a\\e[31m"\n', "node_name", "'a\\x1b[31m'", "control character", never=["\x1b"])
node_file("a backend we do not have", MODELS + "backend: gpu\n", "$file:4", "'gpu'", "allowed: cpu, ascend, reference")
node("a directory for the file", "--config=$folder/directory", "config file $folder/directory", "not a regular file")
node("no such file", "--config=$folder/none.yaml", "$folder/none.yaml", "No such file", "--print-config-sample")
coordinator("more than allowed", "--config=$file", "$file:1", "copies", "'65'", "allowed: 1..64", file="copies: 65\n")
coordinator("two keys against each other", "--min-nodes=7 --nodes-max=3", "min_nodes", "7 is above nodes_max, which is 3", "--min-nodes")
coordinator("static without a map", "--placement=static", "placement", "needs expert_map_file")

group = "secrets"
ctl("a token for all to read", "status --coordinator $coord_rpc --token-file $folder/open.token", 2, "$folder/open.token", "mode 0644", "chmod 0600", never=["0123456789abcdef"])
ctl("an empty token file", "status --coordinator $coord_rpc --token-file $folder/empty.token", 2, "first line of --token-file $folder/empty.token", "0 characters", "allowed: 1..1024")
ctl("no token file", "status --coordinator $coord_rpc --token-file $folder/none.token", 2, "$folder/none.token", "No such file", "--token-file")
ctl("a directory for a token file", "status --coordinator $coord_rpc --token-file $folder/directory", 2, "$folder/directory", "regular file")
ctl("a token of somebody else", "status --coordinator $coord_rpc --token-file $folder/secret.token", 2, "$folder/secret.token", "Permission denied", "user $uid", alien=True)
OPEN = "--model=demo=$model" + DAEMON
node("a daemon's token for all to read", OPEN + " --token-file=$folder/open.token", "flag --token-file", "$folder/open.token", "mode 0644", "chmod 0600")
node("a daemon's empty token file", OPEN + " --token-file=$folder/empty.token", "$folder/empty.token", "is empty", "16..1024 characters")
node("a token that is too short", OPEN + " --token-file=$folder/short.token", "line 1 of $folder/short.token", "5 characters", "allowed: 16..1024")
node("no such token file of a daemon", OPEN + " --token-file=$folder/none.token", "flag --token-file", "$folder/none.token", "No such file")
node("a token that the service's user may not read", OPEN + " --token-file=$folder/secret.token", "flag --token-file", "$folder/secret.token", "Permission denied", "user $uid", alien=True)
PAIR = OPEN + " --tls-ca-file=$folder/ca.pem --tls-cert-key-file="
node("a key for all to read", PAIR + "$folder/open-key.pem", "flag --tls-cert-key-file", "$folder/open-key.pem", "mode 0644", "chmod 0600")
node("a certificate without its key", PAIR + "$folder/no-key.pem", "$folder/no-key.pem", "no key", "into this one file")
node("another certificate's key", PAIR + "$folder/mixed.pem", "$folder/mixed.pem", "does not belong")
node("a certificate that has ended", PAIR + "$folder/expired.pem", "$folder/expired.pem", "until 2024-01-01", "expired")
node("no CA in the file", OPEN + " --tls-ca-file=$folder/text", "flag --tls-ca-file", "$folder/text", "no certificate in PEM form")

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
row("libexpertd: another CA", "$tls_client $tls_coord_rpc $folder/other-ca.pem localhost $folder/client.token $folder/client.pem CN=ca", 1, "$tls_coord_rpc", "CN=ca", "$folder/other-ca.pem", "tls_ca_file")
row("libexpertd: another server name", "$tls_client $tls_coord_rpc $folder/ca.pem expertd.example $folder/client.token $folder/client.pem tls_server_name", 1, "$tls_coord_rpc", "expertd.example", "localhost", "tls_server_name")
row("libexpertd: a node for a coordinator", "$tls_client $tls_node_rpc $folder/ca.pem localhost $folder/client.token $folder/client.pem served", 1, "$tls_node_rpc", "which is node t", "7410")
row("libexpertd: a wrong token", "$tls_client $tls_coord_rpc $folder/ca.pem localhost $folder/wrong.token $folder/client.pem wrong", 1, "$tls_coord_rpc", "token is wrong")
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
ctl("a port out of range", "status --coordinator tcp://127.0.0.1:74100", 2, "74100", "65535")
ctl("the probe port for rpc", "status --coordinator $coord_probe", 3, "$coord_probe", "probe port of the coordinator", "calls go to $coord_rpc")
ctl("a node's probe port for rpc", "status --node $a_probe", 3, "$a_probe", "probe port of node a", "calls go to $a_rpc")
ctl("the door for rpc", "status --coordinator $coord_door", 3, "$coord_door", "door_listen", "7410")
ctl("the admin port for rpc", "status --coordinator $coord_admin", 1, "$coord_admin", "admin_listen", "7410")
ctl("the rpc port for orders", "reload --admin $coord_rpc", 1, "$coord_rpc", "admin_listen", "7412")
ctl("the probe port for orders", "reload --admin $coord_probe", 3, "$coord_probe", "probe port of the coordinator", "orders to $coord_admin")
ctl("the door for a batch", FORWARD + "--node $a_door", 3, "$a_door", "door_listen", "7420")
ctl("a node for a coordinator", "status --coordinator $a_rpc", 1, "$a_rpc", "which is node a", "by default a coordinator listens on port 7410")
ctl("a coordinator for a node", "status --node $coord_rpc", 1, "$coord_rpc", "which is a coordinator", "a node on 7420")
ctl("a port of somebody who speaks for hours", "status --coordinator $slow", 3, "$slow", "7410")
ctl("a port of somebody else", "status --coordinator $ssh", 3, "$ssh", "SSH-2.0", "7410")
ctl("doctor at the probe port", "doctor --coordinator $coord_probe", 1, "$coord_probe", "probe", "Do: ", "$coord_rpc")
ctl("doctor at a node and at a probe port, which is silent for 5 s", "doctor --node $a_rpc --node $a_probe", 1, "$a_probe", "probe", "Do: ", never=["clock"])
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
node("a node at somebody who says nothing", OPEN + " --coordinator-url=$silent", "coordinator", "no Hello within ", " ms; the next dial waits longer", logs=True)
node("a node at nobody", OPEN + " --coordinator-url=$down", "coordinator", "$down", "refused", logs=True)

group = "models"
node_model("no such directory", "$folder/nothing", "'$folder/nothing'", "flag --model", "No such file")
node_model("a file for a directory", "$folder/text", "'$folder/text'", "not a directory", "config.json")
node_model("no config.json", "$folder/no-config", "model demo", "config.json", "$folder/no-config")
node_model("a config.json that is no JSON", "$folder/bad-json", "model demo in $folder/bad-json: config.json", "line 8", "expected near")
node_model("a shard that is not there", "$folder/no-shard", "model demo", "model-00002-of-00003.safetensors", "$folder/no-shard")
node_model("a shard that is cut", "$folder/cut-shard", "model demo in $folder/cut-shard", "model-00002-of-00003.safetensors", "cut short, copy it again")
node_model("a shard of noise", "$folder/noise", "model demo in $folder/noise", "model-00001-of-00003.safetensors", "no safetensors file")
node_model("more experts per token than experts", "$folder/top-k", "model demo in $folder/top-k: config.json", "num_experts_per_tok is 17", "allowed 1..16")
node_model("no tensors", "$folder/no-tensors", "model demo", "$folder/no-tensors", "model.safetensors")
node_model("a quantisation we do not read", "$folder/aqlm", "model demo in $folder/aqlm: config.json", "aqlm", "allowed: none, fp8")
node_model("fewer experts than tensors", "$folder/few-experts", "model demo in $folder/few-experts: config.json", "12 experts", "experts.12", "allowed experts 0..11")
node_model("a model without experts", "$folder/dense", "model demo in $folder/dense: config.json", "num_local_experts is 0", "allowed 1..65535")
node_model("an index that names another tensor", "$folder/strange", "model demo in $folder/strange: model.safetensors.index.json", "experts.3.w4.weight", "is not in model-0000")
node_file("experts that the model has not", MODELS + "    experts: 0-16\n", "$file:4", "expert 16", "allowed: 0..15", code=1)
node_file("experts the wrong way round", MODELS + "    experts: 9-3\n", "$file:4", "'9-3'", "0-3,5")
node_file("assigned by nobody", MODELS + "    experts: assigned\n", "$file:4", "'assigned'", "coordinator_url")
STORED = "models:\n  - name: demo\n    path: $folder/directory\n    weights_from: storage\n    storage_path: $folder/nothing\n"
NODES_TOO = dict(file=STORED.replace("from: storage", "from: 'storage,nodes'") + "coordinator_url: tcp://127.0.0.1:1\ntoken_file: $folder/client.token\nnode_token_file: $folder/node.token\n")
node("storage that is not there", "--config=$file --check-config", "$file:5", "models[0].storage_path", "model demo in $folder/nothing", "No such file", file=STORED)
node("storage without a shard", "--config=$file --check-config", "$file:5", "model-00002-of-00003.safetensors", "$folder/no-shard", file=STORED.replace("nothing", "no-shard"))
node("storage of another version", "--config=$file --check-config", "$file:5", "it has version ", "asks for 0123456789abcdef", file=STORED.replace("$folder/nothing", "$model") + "    version: 0123456789abcdef\n")
node("storage that is not there, beside a mirror", "--config=$file --check-config", "level=warn", "storage_path=$folder/nothing", "No such file", "path does not hold", code=0,
     file=STORED.replace("directory", "mirror"))
node("storage that is not there, beside nodes", "--config=$file --check-config", "level=warn", "storage_path=$folder/nothing", "No such file", "nodes are asked", code=0, **NODES_TOO)
ctl("doctor with storage that is not there", "doctor --config $file --program $expertd --node $lone_rpc", 1, "$file:5", "storage_path", "$folder/nothing", "Do: ", file=STORED)
ctl("doctor with storage that is not there, beside nodes", "doctor --config $file --program $expertd --node $lone_rpc", 1, "storage_path $folder/nothing", "No such file", "nodes are asked", "Do: ", **NODES_TOO)
node("less memory than an expert", OPEN + " --weight-bytes-max=1KiB", "weight_bytes_max", "1024", "at least")

group = "state"
coordinator("no such directory for state", "--state-dir=$folder/none" + DAEMON, "flag --state-dir", "$folder/none", "make the directory")
coordinator("a file for the state's directory", "--state-dir=$folder/text" + DAEMON, "flag --state-dir", "$folder/text", "not a directory")
coordinator("state that may not be written", "--state-dir=$folder/state-alien" + DAEMON, "flag --state-dir", "$folder/state-alien", "Permission denied", "user $uid", alien=True)
coordinator("state in use", "--state-dir=$state_used" + DAEMON, "$state_used", "in use by another coordinator", "process ")
coordinator("damaged state", "--state-dir=$folder/state-damaged" + DAEMON, "$folder/state-damaged/coordinator.db", "damaged", "move")

coordinator("a disk without room for state", "--state-dir=$folder/full" + DAEMON, "start-failed", "$folder/full/lock", "No space left", "make room on the disk of state_dir", full=0)
coordinator("a disk with too little room for state", "--state-dir=$folder/full" + DAEMON, "start-failed", "$folder/full/coordinator.db", "disk is full", "make room on the disk of state_dir", full=2)
node("a disk without room for the ports file", OPEN + " --ports-file=$folder/full/ports", "node-start", "ports_file $folder/full/ports", "No space left", "make room on that disk", full=0)
node("a disk without room for packed experts", OPEN + " --weight-cache-dir=$folder/full", "weight-cache", "$folder/full", "No space left", "make room on that disk", full=0, logs=True)

group = "versions"
ctl("a version nobody has", FORWARD + "--version v9 --coordinator $coord_rpc", 1, "no model demo:v9", "it has: demo:")
ctl("constant experts without their tables", FORWARD + "--const-experts 1 --coordinator $coord_rpc", 2, "there is no tensor const_alpha1 in ", "[N,H] of x's type", "leave the option out")
ctl("a version nobody has, to show", "model show --model demo --version v9 --coordinator $coord_rpc", 1, "v9", "demo")
ctl("a version nobody has, for all", "model default demo v9 --admin $coord_admin", 1, "'v9'", "demo", "known")
ctl("the table of a version nobody has", "table --model demo --version v9 --coordinator $coord_rpc", 1, "no model 'demo' version v9", "the table has demo version ")
ctl("other weights under the same name", "doctor --coordinator $coord_rpc", 1, "model demo is served in versions ", "(default)", "Do: ", "expertctl model default")

group = "calls"
CALL = "--coordinator $coord_rpc"
ctl("a model nobody has", FORWARD.replace("demo", "demmo") + CALL, 1, "no model demmo", "it has: demo:")
ctl("a layer nobody has", FORWARD.replace("--layer 2", "--layer 7") + CALL, 1, "model demo", "no MoE layer 7", "within 0..3")
ctl("a file that is not there", FORWARD.replace("batch", "none") + CALL, 1, "$folder/none", "cannot open", "No such file")
ctl("a file of something else", FORWARD.replace("batch", "text") + CALL, 1, "$folder/text", "no safetensors file")
ctl("a file that is cut", FORWARD.replace("batch", "cut-batch") + CALL, 1, "$folder/cut-batch: tensor expert_ids", "beyond the data", "cut short")
ctl("no x", FORWARD.replace("batch", "no-x") + CALL, 1, "$folder/no-x", "no tensor x", "x [T,H]", "this file has ")
ctl("rows of another width", FORWARD.replace("batch", "thin-x") + CALL, 1, "x has hidden 64", "layer 2 of model demo has 128")
ctl("x of a wrong type", FORWARD.replace("batch", "int-x") + CALL, 1, "x has type i64", "allowed bf16, f16, f32, i8")
ctl("ids of fewer tokens", FORWARD.replace("batch", "few-ids") + CALL, 1, "$folder/few-ids", "expert_ids", "[7,2]", "[8,K]")
ctl("ids of a wrong type", FORWARD.replace("batch", "float-ids") + CALL, 1, "expert_ids has type f32", "allowed i32, i64")
ctl("an id out of range", FORWARD.replace("batch", "large-id") + CALL, 1, "expert id 17", "token 0, slot 1", "allowed 0..15")
ctl("an id twice", FORWARD.replace("batch", "twice-id") + CALL, 1, "expert id 5", "token 0, slot 1", "already in slot 0", "--allow-duplicates")
ctl("a negative id", FORWARD.replace("batch", "minus-id") + CALL, 1, "expert id -3", "token 0, slot 1", "allowed 0..15")
ctl("scales of a wrong shape", FORWARD.replace("batch", "k3-scales") + CALL, 1, "$folder/k3-scales", "expert_scales has shape [8,3]", "allowed: [8,2]")
ctl("an x that is no number", FORWARD.replace("batch", "nan-x") + "--nan reject " + CALL, 1, "x is nan at token 1, element 3", "finite")
ctl("a split of fewer tokens", FORWARD + "--split 3,4 " + CALL, 2, "--split adds up to 7", "allowed: 8")
ctl("a folder that is not there, for the result", FORWARD.replace("$out", "$folder/none/y") + CALL, 1, "$folder/none/y", "cannot create", "No such file")
ctl("a reload of a broken file", "reload --admin $lone_admin", 1, "$folder/lone.yaml:1", "drain_ms", "'soon'", "allowed: 0..")
ctl("doctor with a broken file", "doctor --config $folder/lone.yaml --program $expertd --node $lone_rpc", 1, "$folder/lone.yaml:1", "drain_ms", "'soon'")
ctl("a gateway at a node", FORWARD + "--gateway --node $a_rpc", 2, "--gateway", "coordinator")
ctl("no node up", FORWARD + "--node $down", 3, "$down", "refused")
ctl("coordinator down", FORWARD + "--coordinator $down", 3, "$down", "refused", "start")
ctl("a key the policy has not", "policy set hegde_permille=5 --admin $coord_admin", 1, "no key 'hegde_permille'", "allowed: decode_tokens_max, copies")
ctl("a value the policy does not take", "policy set hedge_permille=2000 --admin $coord_admin", 1, "hedge_permille: '2000' is out of range", "allowed: 0..1000")
ctl("a key of the policy that is not used here", "policy set spare_copies=2 --admin $coord_admin", 1, "spare_copies", "placement: balanced")
ctl("a policy that somebody changed", "policy set copies=1 --expect-revision 99 --admin $coord_admin", 1, "99 was expected", "expertctl policy show")
ctl("a policy at a node", "policy show --admin $a_admin", 1, "a node has no policy", "coordinator")
ctl("a layer to tune that is not there", "tune --model demo --layer 77 " + CALL, 1, "no layer 77 of model 'demo'")
ctl("an unknown node drained", "drain nobody --admin $coord_admin", 1, "no node 'nobody'", "known: a, b")
ctl("a node drained at another", "drain b --admin $a_admin", 1, "this is node a", "coordinator")
ctl("a node drained that has no coordinator", "drain --admin $lone_admin", 1, "node lone", "coordinator_url", "SIGTERM")
ctl("no node named at the coordinator", "drain --admin $coord_admin", 1, "drains the NODE that is named", "known: a, b")
ctl("a plan of a model that is not there", "plan --model $folder/none.json --nodes 4 --zipf 1", 1, "$folder/none.json", "No such file")
ctl("a plan of no model", "plan --model $folder/text --nodes 4 --zipf 1", 1, "$folder/text", "line 1 column 4")
ctl("a plan by a load that is not there", PLAN + "--trace $folder/none.json", 1, "$folder/none.json", "No such file")
ctl("a plan by no load", PLAN + "--trace $folder/text", 1, "$folder/text", "line 1 column 4")
ctl("a plan by the load of another model", PLAN + "--trace $file", 1, "$file", "layer 0 has experts 8, the model 16", "another model",
    file='{"layers": [{"model": "m", "version": "v", "layer": 0, "experts": 8, "load": []}]}')
ctl("a plan by figures that are not there", PLAN + "--zipf 1 --measured $folder/none.json", 1, "$folder/none.json", "No such file")
ctl("a plan by a file without figures", PLAN + "--zipf 1 --measured $file", 1, "$file", 'has no "machine": layer 0 is not whole', "expertctl tune -o json",
    file='{"machine": null, "machine_why": "layer 0 is not whole on one node"}')
ctl("a plan of quantised weights", "plan --model $file --nodes 4 --zipf 1", 1, "$file", "quantised", "--weight-bits",
    file='{"model_type": "mixtral", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2, '
         '"num_attention_heads": 4, "vocab_size": 256, "hidden_act": "silu", "quantization_config": {"quant_method": "fp8"}}')
ctl("a plan of more spare copies than there is room for", PLAN + "--zipf 1 --spare-copies 49", 1, "--spare-copies is 49", "allowed: 0..48", "layer 0", "16 experts")
ctl("a map into a folder that is not there", PLAN + "--zipf 1 --write-map $folder/none/map.json", 1, "$folder/none/map.json", "No such file")
ctl("a plan asked of a node", "plan --admin $a_admin", 1, "a node places nothing", "ask the coordinator")
ctl("an expert map of two versions", "plan --write-map $folder/two.json --admin $coord_admin", 1, "--write-map: demo version ", "an expert map is of one model")
ctl("statistics of a model nobody has", "stats --model demmo " + CALL, 1, "model 'demmo'", "there are loads of: demo:")
ctl("the table of a model nobody has", "table --model demmo " + CALL, 1, "no model 'demmo'", "the table has demo version ")
ctl("generate with another checkpoint's name", "generate --model demmo --checkpoint $model --prompt a --bytes 4 " + CALL, 1, "no model 'demmo'", "it has: demo version ")
ctl("generate without a checkpoint's directory", "generate --model demo --checkpoint $folder/nothing --prompt a --bytes 4 " + CALL, 1, "$folder/nothing", "No such file")

group = "maps"
MAP = "--placement=static --expert-map-file="
coordinator("no such map", MAP + "$folder/none.json" + DAEMON, "flag --expert-map-file", "$folder/none.json", "No such file")
coordinator("a map that is no JSON", MAP + "$folder/broken.json" + DAEMON, "$folder/broken.json:2", "unexpected token")
coordinator("a map with a wrong count", MAP + "$folder/count.json" + DAEMON, "$folder/count.json", "layer_id 0", "device_count")
coordinator("a map with a negative expert", MAP + "$folder/negative.json" + DAEMON, "$folder/negative.json", "device_id 0", "-1")
coordinator("fewer nodes than devices", MAP + "$folder/map2.json --node-order=a" + DAEMON, "node_order", "1 nodes", "2 devices", "$folder/map2.json")
ctl("a map that names a node nobody knows", "status --coordinator $static_rpc", 1, "expert map $folder/map2.json", "device 1 is node why", "not registered")
ctl("doctor, and a map that names a node nobody knows", "doctor --coordinator $static_rpc", 1, "expert map $folder/map2.json", "node why", "Do: ")
coordinator("a map without static", "--expert-map-file=$folder/map.json" + DAEMON, "expert_map_file", "placement: static")

group = "frames"
ctl("a method nobody has", "frame encode --method expertd.v1.Gateway/Foward -o $folder/frame", 2, "'expertd.v1.Gateway/Foward'", "expertctl frame list")
ctl("no method", "frame encode -o $folder/frame", 2, "--method is missing", "expertctl frame list")
ctl("a frame that is none", "frame decode $folder/text", 1, "$folder/text ends at offset 51", "a frame has 64 bytes or more")
ctl("no frame file", "frame decode $folder/none", 1, "$folder/none", "No such file")
ctl("a batch for a method that takes none", "frame encode --method expertd.v1.Health/Check --in $folder/batch -o $folder/frame", 2, "--in", "expertd.v1.Gateway/Forward only", "--method is expertd.v1.Health/Check")

row("words at the door", "nngcat --req --dial $a_door --recv-timeout 10 --data hello --raw", 0, "the message has 5 bytes and begins with 'hello'", "a frame begins with 'EPD1'", "expertctl frame encode")

group = "traces"
ctl("no lttng", "trace record -d 100ms -o $folder/rec1", 3, "lttng", "lttng-tools", env={"PATH": "/nonexistent"})
ctl("a folder that is full", "trace record -d 100ms -o $folder", 1, "$folder", "empty or new folder", "--output")
ctl("no recording", "trace report $folder/none", 1, "$folder/none", "No such file")
ctl("a folder without a recording", "trace report $folder/directory", 1, "$folder/directory", "recording")
ctl("no snapshot running", "trace snapshot take -o $folder/snap", 1, "flight recorder", "trace snapshot start")

group = "orders"  # one after another, at last
ctl("a node drained", "drain b --admin $coord_admin", 0, "node b is ", "copies to move", ordered=True)
ctl("a node drained twice", "drain b --admin $coord_admin", 0, "node b is ", "copies to move", ordered=True)
ctl("doctor, and a node drained", "doctor --coordinator $coord_rpc", 1, "node b", "Do: ", "--undo", ordered=True)
ctl("a drain taken back that never was", "drain a --undo --admin $coord_admin", 0, "node a is serving", ordered=True)
