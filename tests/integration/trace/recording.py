# SPDX-License-Identifier: Apache-2.0
"""What the tests of recordings share: processes under a session daemon of the test's own, and reading a recording back."""
import fcntl, glob, os, re, shutil, signal, struct, subprocess, sys, tempfile, termios, time

TOOLS = ["lttng-sessiond", "lttng", "babeltrace2"]
ARGUMENTS = sys.argv[1:]
BUILD, SOURCE = ARGUMENTS[:2]
MODEL = f"{SOURCE}/deploy/demo-model/checkpoint"
EXPERTCTL = f"{BUILD}/client/cli/expertctl"
EXPERTD = f"{BUILD}/server/expertd/expertd"
COORDINATOR = f"{BUILD}/server/coordinator/expertd-coordinator"
PATIENCE_S = 60
PIPE_BYTES, TEXT_BYTES = 4096, 14


def wait_for(what, condition):
    for _ in range(PATIENCE_S * 20):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"waited {PATIENCE_S} s for {what}")


def mapped(pid, word):
    return word in open(f"/proc/{pid}/maps").read()


class Cluster:
    """Processes with one environment and folder. Everything it started is gone when run_test returns."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        self.env = dict(os.environ, LTTNG_HOME=folder)
        self.env.pop("LTTNG_UST_REGISTER_TIMEOUT", None)
        # A command is over soon: it waits until it is told what to record. Bounded, and no wait without a session daemon.
        self.waiting = dict(self.env, LTTNG_UST_REGISTER_TIMEOUT="20000")

    def start(self, name, *command, env=None):
        log = open(f"{self.folder}/{name}.log", "wb")
        process = subprocess.Popen(command, env=env or self.env, stdout=log, stderr=log)
        self.processes.append((name, process))
        return process

    def text(self, name):
        return open(f"{self.folder}/{name}.log", errors="replace").read()

    def daemon(self, name, program, *options):
        ports = f"{self.folder}/{name}.ports"
        process = self.start(name, program, "--listen", "tcp://127.0.0.1:0", "--admin-listen", "tcp://127.0.0.1:0",
                             "--probe-address", "127.0.0.1:0", "--door-listen", "", "--ports-file", ports, *options)
        wait_for(f"{name} to listen", lambda: process.poll() is not None or (os.path.exists(ports) and os.path.getsize(ports)))
        assert process.poll() is None, f"{name} ended: " + self.text(name)
        return process, re.search(r'"rpc_url": *"([^"]*)"', open(ports).read()).group(1)

    def node(self, name, coordinator_url, *options):
        return self.daemon(name, EXPERTD, "--node-name", name, "--coordinator-url", coordinator_url, "--model", f"demo={MODEL}",
                           *options)[0]

    def run(self, *command, env=None, code=0):
        done = subprocess.run(command, env=env or self.env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == code, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
        return done

    def is_good(self, *command):
        return subprocess.run(command, env=self.env, capture_output=True).returncode == 0

    def session_daemon(self):
        daemon = self.start("sessiond", "lttng-sessiond", "--no-kernel")
        wait_for("the session daemon", lambda: self.is_good("lttng", "--no-sessiond", "list"))
        return daemon

    def wait_registered(self, count):
        """Until that many processes have told the session daemon their events."""
        def registered():
            lines = self.run("lttng", "list", "--userspace").stdout
            return sum("expertd:forward_begin" in part for part in lines.split("PID:")) >= count
        wait_for(f"{count} processes to register", registered)

    def record(self, name):
        self.run("lttng", "create", name, f"--output={self.folder}/{name}")
        self.run("lttng", "enable-channel", "-u", "--subbuf-size=1M", "--num-subbuf=8", "ch")
        self.run("lttng", "add-context", "-u", "-c", "ch", "-t", "vpid", "-t", "vtid", "-t", "procname")
        self.run("lttng", "enable-event", "-u", "-c", "ch", "expertd:*")
        self.run("lttng", "start")

    def recorded(self, name):
        """Ends the recording; its events by time."""
        self.run("lttng", "stop", name)
        self.run("lttng", "destroy", name)
        return read_events(f"{self.folder}/{name}")

    def stop(self, *wanted):
        for name, process in reversed(self.processes):
            if name in wanted:
                process.terminate()
                code = process.wait(timeout=PATIENCE_S)
                assert code == 0, f"{name} ended with {code}: {self.text(name)}"
        self.processes = [p for p in self.processes if p[0] not in wanted]

    def kill(self):
        for _, process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def trace_id(number):
    return f"{number:032x}"


def full(pipe):
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, struct.pack("i", 0)))[0] == PIPE_BYTES


def break_while_running(cluster, url, number, breaking, timeout, *options, later=lambda: None, codes=(3, 4)):
    """A generate run that stands still after some bytes, as nobody takes its text; breaking(), and it goes on; later(). The
    process, ended with one of the codes."""
    text, out = os.pipe()
    fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(out, b" " * (PIPE_BYTES - TEXT_BYTES))
    command = subprocess.Popen([EXPERTCTL, "generate", "--coordinator", url, "--checkpoint", MODEL, "--model", "demo",
                                "--prompt", "The ", "--bytes", "200", "--stream", "--report", "none", "--timeout", timeout,
                                "--traceparent", f"00-{trace_id(number)}-00f067aa0ba902b7-01", *options],
                               env=cluster.waiting, stdout=out, stderr=subprocess.PIPE)
    os.close(out)
    cluster.processes.append((f"generate-{number}", command))
    wait_for("the text", lambda: command.poll() is not None or full(text))
    breaking()
    os.read(text, PIPE_BYTES)
    later()
    words = command.communicate(timeout=60)[1].decode()
    os.close(text)
    assert command.returncode in codes, (command.returncode, words)
    cluster.processes.pop()
    return command


EVENT = re.compile(r"\[(\d+):(\d+):(\d+)\.(\d+)\] .*? expertd:(\w+)_(begin|end): .*?\{ vpid = (\d+), .*? \}, \{ (trace_hi.*) \}$")


def read_events(trace):
    events = []
    text = subprocess.run(["babeltrace2", trace], capture_output=True, text=True, check=True).stdout
    for at in text.splitlines():
        found = EVENT.match(at)
        assert found, at
        h, m, s, ns, span, kind, pid, fields = found.groups()
        values = dict(re.findall(r'(\w+) = ("[^"]*"|[-\w]+)', fields))
        values = {k: v.strip('"') if v[0] == '"' else int(v, 0) for k, v in values.items()}
        values["trace"] = f"{values['trace_hi']:016x}{values['trace_lo']:016x}"
        events.append(dict(values, span=span, kind=kind, pid=int(pid), at=((int(h) * 60 + int(m)) * 60 + int(s)) * 10**9 + int(ns)))
    return events


def match(events, since, until):
    """Pairs (begin, end) of all spans that begin in [since, until]: none of those may lack an end, and no end a begin.
    None: no bound. Returns also the begins without an end, outside of that time."""
    open_spans, pairs = {}, []
    for e in events:
        key = (e["pid"], e["span"], e["call"], e["sub"])
        if e["kind"] == "begin":
            assert key not in open_spans, f"begun twice: {key}"
            open_spans[key] = e
        elif key in open_spans:
            pairs.append((open_spans.pop(key), e))
        else:
            assert since is not None and e["at"] < since, f"an end without begin: {e}"
    inside = [e for e in open_spans.values() if (since is None or e["at"] >= since) and (until is None or e["at"] <= until)]
    assert not inside, f"without end: {inside[:5]}"
    return pairs, list(open_spans.values())


def run_test(main):
    """main(cluster, folder) with a folder of its own; 77 where root cannot be somebody else."""
    if any(shutil.which(t) is None for t in TOOLS) or not glob.glob(f"{BUILD}/lib/observe/libexpertd-trace.so.0"):
        print(f"one of {TOOLS} or the recording library is not there; deploy/install-deps --test installs them")
        sys.exit(1)
    if os.geteuid() == 0:  # root's session daemon is one for the whole machine: be somebody else
        become = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
        if subprocess.run([*become, "true"], capture_output=True).returncode != 0:
            print("skipped: this machine gives root no user namespaces")
            sys.exit(77)
        os.execvp(become[0], [*become, sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(folder)
        try:
            main(cluster, folder)
        except BaseException:
            for name, _ in cluster.processes:
                if os.path.exists(f"{folder}/{name}.log"):
                    print(f"---- {name}\n" + cluster.text(name)[-3000:], file=sys.stderr)
            raise
        finally:
            cluster.kill()
