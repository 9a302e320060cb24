#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_log_calls.py SOURCE: every call of ep_log in the sources keeps the rules of lib/base/log.h that the compiler cannot check."""
import pathlib, re, sys

OURS = {"time", "level", "event", "truncated"} # each line's own
UNITS = re.compile(r"_(sec|secs|seconds|msec|msecs|millis|usec|usecs|micros|kb|mb|gb)$") # written _s, _ms, _us, _bytes
IGNORED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/\*.*?\*/|//[^\n]*', re.S)
faults, calls = [], 0


def end_of(text, at):
    """Behind the bracket that closes the one at `at`; texts and comments are blank in text."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise SystemExit("a bracket stays open")


def keys_of(text, macros):
    for name, body in macros.items():
        text = re.sub(rf"\b{name}\(", lambda _: body + "(", text)
    return re.findall(r"\bEP_KV\((\w*)", text)


def check(where, call, level_and_id, keys):
    ids = re.findall(r'"([^"]*)"', level_and_id)
    levels = set(re.findall(r"EP_LOG_(\w+)", level_and_id))
    for one in ids:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one):
            faults.append(f"{where}: event id '{one}' is not words-with-hyphens")
    if not ids or not levels:
        faults.append(f"{where}: no literal event id or level")
    for key in keys:
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", key) or UNITS.search(key):
            faults.append(f"{where}: key '{key}' is not snake_case with _s, _ms, _us or _bytes as units")
        if key in OURS or keys.count(key) > 1:
            faults.append(f"{where}: key '{key}' is in the line twice")
    if levels <= {"WARN", "ERROR"} and not {"reason", "hint"} & set(keys):
        faults.append(f"{where}: a warning or error without reason or hint: {call}")


source = pathlib.Path(sys.argv[1])
for path in sorted(p for folder in ("lib", "server", "client") for p in (source / folder).rglob("*.c")):
    text = path.read_text()
    blank = IGNORED.sub(lambda m: " " * len(m[0]), text)
    macros = {m[1]: m[2] for m in re.finditer(r"#define (\w+)\([^)]*\)((?:[^\n]*\\\n)*[^\n]*)", text) if "EP_KV(" in m[2]}
    for m in re.finditer(r"\bep_log\(", blank):
        end = end_of(blank, m.end() - 1)
        where, call = f"{path.relative_to(source)}:{text.count(chr(10), 0, m.start()) + 1}", text[m.start() : end]
        fields = re.search(r"\b(EP_KV|" + "|".join(macros or ["EP_KV"]) + r")\(", call)
        if fields is None:
            faults.append(f"{where}: no field")
            continue
        calls += 1
        check(where, call, call[: fields.start()], keys_of(call[fields.start() :], macros))
if calls < 60:
    faults.append(f"only {calls} calls were found")
print("\n".join(faults) or f"{calls} calls are right")
sys.exit(1 if faults else 0)
