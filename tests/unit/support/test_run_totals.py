#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/run ends with its totals, however it ends: wrong options, builds that fail, tests that fail, signals; and it says what it
chose. tests/format says why it fails.

Runs copies of them in an empty directory, where cmake, ctest and the other steps are stand-ins of a few lines.

usage: test_run_totals.py SOURCE_DIR
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

PATIENCE_S = 60
TOTALS = re.compile(r"tests: (\d+) passed, (\d+) failed, (\d+) skipped")
CTEST = """
echo "asked: $*"
echo '1/3 Test  #1: a ..........   Passed    0.01 sec'
echo '2/3 Test  #2: b ..........***Skipped   0.01 sec'
echo '3/3 Test  #3: c ..........{third}    0.01 sec'
exit {code}
"""
GOOD = CTEST.format(third="   Passed", code=0)
BAD = CTEST.format(third="***Failed ", code=8)
HANG = "echo hangs >\"$READY\"; exec sleep 1000"

failures = []


def script(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\n" + text + "\n")
    os.chmod(path, 0o755)


class Tree:
    def __init__(self, source, where, cmake="exit 0", ctest=GOOD, fuzz="[ $2 = 0 ] || echo '9 0 0' >build/fuzz/totals", quickstart="exit 0"):
        self.where = where
        self.ready = where + "/ready"
        os.makedirs(where + "/tests")
        os.makedirs(where + "/.ci")
        os.makedirs(where + "/build/fuzz")
        shutil.copy(source + "/tests/run", where + "/tests/run")
        shutil.copy(source + "/.ci/run", where + "/.ci/run")
        for name, text in (("bin/cmake", cmake), ("bin/ctest", ctest), ("tests/fuzz/run", fuzz), ("deploy/quickstart", quickstart),
                           ("deploy/install-deps", "exit 0"), ("tests/bare", ctest), ("bin/date", "echo 009")):
            script(f"{where}/{name}", text)
        with open(where + "/build/ctest-release.log", "w", encoding="utf-8") as old:  # of a run before: not counted
            old.write("1/1 Test  #1: old ..........   Passed    0.01 sec\n")

    def start(self, program, args):
        env = {**os.environ, "PATH": f"{self.where}/bin:{os.environ['PATH']}", "READY": self.ready,
               "GIT_CEILING_DIRECTORIES": os.path.dirname(self.where)}
        return subprocess.Popen([f"{self.where}/{program}", *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                env=env, text=True, start_new_session=True)


def expect(what, process, code, totals, part=""):
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    lines = output.splitlines() or [""]
    found = TOTALS.fullmatch(lines[-1])
    counts = tuple(int(n) for n in found.groups()) if found else None
    if process.returncode != code or counts != totals or part not in output:
        failures.append(f"{what}: exit code {process.returncode}, totals {counts}; expected {code}, {totals} and '{part}' in:\n{output}")


def git(where, *args):
    subprocess.run(["git", "-C", where, "-c", "user.name=a", "-c", "user.email=a@example.org", *args], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)


def check_turns(plain, shallow):
    """By the number of commits where all are there, else by the day, which is the 9th; a turn that is asked for by neither."""
    def expect_turn(what, tree, turn, said, *args):
        expect(what, tree.start("tests/run", ["--only", "release", *args]), 0, (2, 0, 1), f"test, turn {turn} of 8{said}\n")
        expect(what, tree.start("tests/run", ["--only", "release", *args]), 0, (2, 0, 1), f" -U -I {turn},,8 ")

    day = " by the day, for the commits are not all here"
    expect_turn("a turn without git", plain, 2, day)
    expect_turn("a turn that is asked for", plain, 8, "", "--turn", "8")
    git(plain.where, "init")
    expect_turn("a turn without a commit", plain, 2, day)
    for count in range(3):
        git(plain.where, "commit", "--allow-empty", "-m", str(count))
    expect_turn("a turn by commits", plain, 4, "")
    git(shallow.where, "clone", "--bare", "--depth", "1", f"file://{plain.where}", shallow.where + "/.git")
    expect_turn("a turn of a shallow clone", shallow, 2, day)


def check_format(source, tree):
    """tests/format tells why it fails, also where clang-format names no place."""
    shutil.copy(source + "/tests/format", tree.where + "/tests/format")
    for folder in ("client", "lib", "server"):
        os.makedirs(f"{tree.where}/{folder}")
    with open(tree.where + "/lib/a.c", "w", encoding="utf-8") as file:
        file.write("int a;\n")
    for says, part in (("echo 'a library is missing' >&2; exit 9", "names no place:\na library is missing\n"),
                       ("echo 'lib/a.c:1:1: error: code should be clang-formatted' >&2; exit 1", "lib/a.c:1:1: error: code")):
        script(tree.where + "/bin/clang-format-14", says)
        process = tree.start("tests/format", ["--check"])
        output, _ = process.communicate(timeout=PATIENCE_S)
        if process.returncode != 1 or part not in output:
            failures.append(f"tests/format: exit code {process.returncode}; expected 1 and '{part}' in:\n{output}")


def main():
    source = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="run-totals-") as top:
        def tree(name, **steps):
            return Tree(source, f"{top}/{name}", **steps)

        good = tree("good")
        expect("all of it", good.start(".ci/run", []), 0, (3 * 2 + 9 + 1, 0, 3))
        expect("one build", good.start("tests/run", ["--no-install", "--only", "asan", "--jobs", "3", "--filter", "x"]), 0, (2, 0, 1))
        for args, part in ((["--turn", "3"], "-U -I 3,,8 -LE ^(turns)$"), (["--filter", "x"], " -R x\n"), (["--quick"], " -L ^(unit|"),
                           (["--bare", "--turn", "2", "--jobs", "5"], "--only release --jobs 5 --turn 2\n"), (["--bare", "--quick"], " --quick\n"),
                           (["--bare", "--long", "--filter", "x"], " --filter x --long\n")):
            expect(" ".join(args), good.start("tests/run", ["--only", "release", *args]), 0, (2, 0, 1), part)
        for args, part in ((["--only"], "'--only' needs a value"), (["--filter"], "'--filter' needs a value"), (["--jobs"], "'--jobs' needs a value"),
                           (["--only", ""], "'--only' needs a value"), (["--only", "asam"], "'asam' is no build, allowed: release"),
                           (["--jobs", "many"], "'many' is no number"), (["--jobs", "0"], "'0' is no number"), (["--turn", "9"], "'9' is no turn"),
                           (["--no-install", "--nonsense"], "unknown option '--nonsense'")):
            expect(" ".join(args), good.start("tests/run", args), 2, (0, 1, 0), part)

        expect("--quick of another build", good.start("tests/run", ["--only", "asan", "--quick"]), 2, (0, 1, 0),
               "--quick is of the release build, --only 'asan'")
        expect("--quick of release", good.start("tests/run", ["--quick", "--only", "release"]), 0, (2, 0, 1), " -L ^(unit|")
        check_turns(good, tree("shallow"))
        check_format(source, tree("format"))

        expect("a build fails", tree("no-build", cmake="exit 1").start(".ci/run", []), 1, (2 + 9, 3, 1))
        expect("a test fails", tree("bad", ctest=BAD).start(".ci/run", []), 1, (3 + 9 + 1, 3, 3), "failed: c")
        expect("no test is found", tree("none", ctest="exit 8").start("tests/run", ["--only", "release"]), 1, (0, 1, 0))
        expect("a fuzzer does not build", tree("fuzz", fuzz="exit 1").start("tests/run", ["--only", "fuzz"]), 1, (0, 1, 0))
        expect("no quick start", tree("quick", quickstart="exit 1").start("tests/run", ["--only", "quickstart"]), 1, (0, 1, 0))

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            for step in ("cmake", "ctest"):
                cut = tree(f"cut-{step}-{number.name}", **{step: HANG})
                os.mkfifo(cut.ready)
                process = cut.start("tests/run", ["--bare", "--only", "release"] if step == "ctest" else ["--only", "asan"])
                with open(cut.ready, encoding="utf-8") as ready:  # until the step is on
                    ready.read()
                process.send_signal(number)
                part = "cut off in " if step == "cmake" else "cut off in release: "  # a build may begin before its step
                expect(f"{number.name} in {step}", process, 1, (0, 1, 0), part)
    for text in failures:
        print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # a shell cannot trap what was ignored when it began
        signal.signal(number, signal.SIG_DFL)
    sys.exit(main())
