# SPDX-License-Identifier: Apache-2.0
"""Lines of the daemons' log in each form of log_format, read strictly: what a log tool could not read ends the test."""
import json, re

FIELD = re.compile(r'([a-z][a-z0-9_]*)=(?:"((?:[^"\\]|\\["\\])*)"|([!#-&(-<>-\[\]-~]+))')


def pairs_of_logfmt(line):
    """key=value with one blank between; values bare ASCII without signs that a reader could take for more, or quoted with \\" and \\\\."""
    at = 0
    while True:
        field = FIELD.match(line, at)
        assert field, f"no field at '{line[at : at + 80]}' of {line}"
        yield field[1], field[3] if field[2] is None else re.sub(r"\\(.)", r"\1", field[2])
        at = field.end()
        if at == len(line):
            return
        assert line[at] == " ", f"no blank before '{line[at : at + 80]}' of {line}"
        at += 1


def fields_of(pairs):
    pairs = list(pairs)
    fields = dict(pairs)
    assert len(fields) == len(pairs), f"a key twice in {pairs}"
    return fields


def parse(line, form):
    """The fields of one line. form: text, journal or json."""
    if form == "json":
        fields = json.loads(line, object_pairs_hook=fields_of)
        assert all(re.fullmatch("[a-z][a-z0-9_]*", key) and isinstance(value, (str, int)) for key, value in fields.items()), line
    else:
        assert form == "text" or re.match("<[3467]>", line), line
        fields = fields_of(pairs_of_logfmt(line if form == "text" else line[3:]))
    assert re.fullmatch("[a-z0-9-]+", fields["event"]), line
    if form != "journal":
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fields["time"]) and fields["level"] in ("error", "warn", "info", "debug"), line
    return fields


def read(path, form):
    """All lines of a log; the last one, too, has its end."""
    text = open(path, "rb").read().decode() # else it is no UTF-8
    assert text == "" or text.endswith("\n"), text[-200:]
    return [parse(line, form) for line in text.split("\n")[:-1]]
