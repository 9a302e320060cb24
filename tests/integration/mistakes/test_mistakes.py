#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Types every mistake of the table (rows.py) and reads the answer: it names the thing, its place and the next step. Each row that fails is printed with its whole
answer; `--show [WORD]` as the last arguments prints the answers of all rows (with that word in their name or group)."""
import concurrent.futures, os, shlex, string, subprocess, sys, time

from rows import ROWS
from world import SANITIZED, World

SHOW = sys.argv[3:4] == ["--show"]
ONLY = sys.argv[4] if len(sys.argv) > 4 else ""
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
PATIENCE_S = 120 if SANITIZED else 30


def environment(world, row):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("EXPERTCTL_", "EXPERTD_", "LIBEXPERTD_"))}
    return env | {"HOME": world.folder, "XDG_CONFIG_HOME": world.folder} | row.env


def command_of(world, row, number):
    names = world.names | {"out": world.path(f"row{number}.out")}
    if row.file is not None:
        names["file"] = world.write(f"row{number}.yaml", world.fill(row.file).encode(), 0o644)
    fill = lambda text: string.Template(text).substitute(names)
    command = [fill(word) for word in shlex.split(row.command)]
    if row.alien and os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    if row.full is not None:
        mount = f'mount -t tmpfs -o size={4 * (row.full + 1)}k,mode=0755 none "$0" && head -c 4096 /dev/zero > "$0/taken" && exec "$@"'
        command = [*NAMESPACE, "sh", "-c", mount, world.path("full"), *command]
    return command, [fill(text) for text in row.wants]


def run(world, row, number):
    """The command, its answer, and what is wrong with it."""
    command, wants = command_of(world, row, number)
    began = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=PATIENCE_S, env=environment(world, row), cwd=world.folder)
        code, answer = done.returncode, done.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired as late:
        code, answer = "none, it runs on", (late.stdout or b"").decode("utf-8", "replace")
    faults = [] if code == row.code else [f"exit code {code}, not {row.code}"]
    faults += [f'no "{want}"' for want in wants if want not in answer]
    faults += [f'"{secret}" is in it' for secret in row.never if secret in answer]
    faults += ["it left a result"] if os.path.exists(world.path(f"row{number}.out")) else []
    return command, answer, faults, time.monotonic() - began


class Logged:
    """A daemon that runs on, and what its log comes to say."""

    def __init__(self, world, row, number):
        self.command, self.wants = command_of(world, row, number)
        self.path = world.path(f"row{number}.log")
        with open(self.path, "wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment(world, row))
        world.processes.append((f"row{number}", self.process))
        self.began = time.monotonic()

    def look(self, until):
        """In one line of the log all must stand: it is one answer."""
        while True:
            answer = open(self.path, encoding="utf-8", errors="replace").read()
            missing = min(([f'no "{want}"' for want in self.wants if want not in line] for line in answer.splitlines() or [""]), key=len)
            if not missing or self.process.poll() is not None or time.monotonic() > until:
                break
            time.sleep(0.05)
        return self.command, answer, missing, time.monotonic() - self.began

    def end(self):
        self.process.kill()
        self.process.wait()


def main():
    began = time.monotonic()
    with World() as world:
        world.make_files()
        world.make_batches()
        world.make_models()
        world.make_maps()
        world.make_certificates()
        world.make_states()
        world.take_ports()
        for name in "expired", "future":
            world.serve_tls(name)
        world.start_clusters()
        print(f"{time.monotonic() - began:.1f} s until all stands", flush=True)
        mounts = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", world.path("full")], capture_output=True).returncode == 0
        rows = [(number, row) for number, row in enumerate(ROWS) if ONLY in f"{row.group}: {row.name}" and (mounts or row.full is None)]
        logged = {number: Logged(world, row, number) for number, row in rows if row.logs}
        until = time.monotonic() + PATIENCE_S
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = dict(pool.map(lambda pair: (pair[0], run(world, pair[1], pair[0])), [pair for pair in rows if not pair[1].logs and not pair[1].ordered]))
        for number, daemon in logged.items():
            results[number] = daemon.look(until)
            daemon.end()
        results |= {number: run(world, row, number) for number, row in rows if row.ordered}
        failed = 0
        for number, row in rows:
            command, answer, faults, seconds = results[number]
            failed += bool(faults)
            if faults or SHOW:
                print(f"\n{'FAILED' if faults else 'ok'} {row.group}: {row.name} ({seconds:.1f} s)\n$ {shlex.join(command)}\n{answer.rstrip()}")
                print("".join(f"    {fault}\n" for fault in faults), end="")
        print("" if mounts else "\nno full disks: mounts are not allowed here", end="")
        print(f"\n{len(rows)} mistakes, {failed} without a good answer, {time.monotonic() - began:.1f} s")
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
