#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The progress of a build: one line rewritten on a terminal, else a line each half minute; the command's end and its whole output in the log."""
import os, pty, subprocess, sys, tempfile

SHOW = sys.argv[1] + "/deploy/show-build"
BUILD = ["sh", "-c", "printf '[1/3] one\\n[2/3] %0100d\\nwarning: odd\\n[3/3] three\\n' 0; echo lost >&2; exit 7"]

with tempfile.TemporaryDirectory() as folder:
    log = folder + "/build.log"

    def piped(seconds):
        """seconds: since the start; bash takes its clock from there."""
        done = subprocess.run([SHOW, log, *BUILD], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"SECONDS": seconds}, timeout=60)
        assert done.returncode == 7, done
        assert sorted(open(log).read().splitlines()) == sorted(["[1/3] one", "[2/3] " + 100 * "0", "warning: odd", "[3/3] three", "lost"]), open(log).read()
        return done.stdout.decode()

    assert piped("0") == "", "a line before half a minute is over"
    assert piped("30") == "[1/3] one\n", "one line each half minute"

    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(SHOW, [SHOW, log, *BUILD])
    said = b""
    try:
        while chunk := os.read(terminal, 4096):
            said += chunk
    except OSError:  # the other end is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    clear = b"\r\x1b[K"
    lines = said.split(clear)
    assert lines[0] == b"" and lines[1] == b"[1/3] one" and lines[2].startswith(b"[2/3] 000") and len(lines[2]) < 80 and lines[3:] == [b"[3/3] three", b""], said
