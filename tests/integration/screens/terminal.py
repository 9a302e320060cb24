# SPDX-License-Identifier: Apache-2.0
"""A pseudo-terminal with a program on it, and what a person would see there."""
import fcntl, os, re, select, signal, struct, subprocess, termios, time

PATIENCE_S = 60
ESCAPES = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Screen:
    """Characters where the program put them. A character beyond the last column is remembered: the line was wider than the terminal."""

    def __init__(self, columns, rows):
        self.columns, self.rows, self.main, self.cursor_shown, self.too_wide = columns, rows, None, True, []
        self.lines, self.row, self.column, self.rest, self.scrolled = [""], 0, 0, "", []

    def put(self, character):
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1
        if self.column > self.columns:
            self.too_wide.append(self.lines[self.row])

    def new_line(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")
        if self.row == self.rows: # the first one leaves at the top
            self.scrolled.append(self.lines.pop(0))
            self.row -= 1

    def escape(self, private, numbers, what):
        if private and numbers == "1049":
            if what == "h":
                self.main, self.lines, self.row, self.column = (self.lines, self.row, self.column), [""], 0, 0
            elif self.main is not None:
                (self.lines, self.row, self.column), self.main = self.main, None
        elif private and numbers == "25":
            self.cursor_shown = what == "h"
        elif what == "H":
            self.row, self.column = 0, 0
        elif what == "K":
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif what == "J":
            self.lines = self.lines[: self.row] + [self.lines[self.row][: self.column]]
        else:
            raise AssertionError(f"an escape that a terminal of ours does not know: {private}{numbers}{what}")

    def feed(self, data):
        text = self.rest + data
        at = 0
        while at < len(text):
            escape = ESCAPES.match(text, at)
            if escape:
                self.escape(*escape.groups())
                at = escape.end()
                continue
            if text[at] == "\x1b":
                break # the rest is still to come
            if text[at] == "\r":
                self.column = 0
            elif text[at] == "\n":
                self.new_line()
            else:
                self.put(text[at])
            at += 1
        self.rest = text[at:]

    def text(self):
        return "\n".join(self.scrolled + self.lines) if self.main is None else "\n".join(self.lines)


class Terminal:
    """A program with a terminal of its own, which is killed at the end of the with block."""

    def __init__(self, *command, columns=80, rows=24, env=None, before=""):
        self.master, self.slave = os.openpty()
        self.screen, self.raw = Screen(columns, rows), ""
        self.resize(columns, rows)
        self.screen.feed(before)
        self.modes = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(command, stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True,
                                        env=dict(env or os.environ, TERM="xterm"), preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def resize(self, columns, rows):
        self.screen.columns, self.screen.rows = columns, rows
        self.screen.row = min(self.screen.row, rows - 1)
        self.screen.lines = self.screen.lines[:rows]
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self):
        """What has come, if anything has; within a twentieth of a second."""
        if select.select([self.master], [], [], 0.05)[0]:
            data = os.read(self.master, 65536).decode(errors="replace")
            self.raw += data
            self.screen.feed(data)

    def wait_for(self, what, condition):
        end = time.monotonic() + PATIENCE_S
        while not condition(self.screen.text()):
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.screen.text()}"
            assert time.monotonic() < end, f"waited {PATIENCE_S} s for {what}:\n{self.screen.text()}"
            self.read()

    def type(self, keys):
        os.write(self.master, keys)

    def end(self):
        """Waits for the program's end: its exit code."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"does not end:\n{self.screen.text()}"
            self.read()
        while select.select([self.master], [], [], 0)[0]: # what it left
            self.read()
        return self.process.returncode

    def is_restored(self):
        return self.screen.main is None and self.screen.cursor_shown and termios.tcgetattr(self.slave) == self.modes


def show(*command, columns=80, rows=24, codes=(0,), env=None):
    """What stands on a terminal after a command, which may not have been wider."""
    with Terminal(*command, columns=columns, rows=rows, env=env) as terminal:
        code = terminal.end()
        text = terminal.screen.text()
        assert code in codes, f"{command} ended with {code}:\n{text}"
        assert not terminal.screen.too_wide, f"{command}: wider than {columns}: {terminal.screen.too_wide[0]!r}"
        return text
