#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The manual's list of model types is that of the table in the code. test_readme.py EXPERTCTL PAGE [--write]"""
import json, re, subprocess, sys, textwrap

BEGIN, END = "<!-- model types: tests/integration/models/test_readme.py --write -->\n", "<!-- end of model types -->\n"


def text(types):
    def named(t):
        return f"{t['models']} (`{t['type']}`)"

    def paragraph(head, items):
        return textwrap.fill(f"{head}: {'; '.join(items)}.", 150, break_on_hyphens=False) + "\n"

    served = [t for t in types if "refused" not in t and "models" in t]
    return (paragraph("Experts and router", [named(t) for t in served if t["router"] == "computed"]) + "\n" +
            paragraph("Experts only, for a caller that routes", [f"{named(t)}: {t['router']}" for t in served if t["router"] != "computed"]) + "\n" +
            paragraph("Not served", [f"{t.get('models', t['type'])}: {t['refused']}" for t in types if "refused" in t]))


def main():
    expertctl, page = sys.argv[1:3]
    types = json.loads(subprocess.run([expertctl, "model", "types", "-o", "json"], capture_output=True, text=True, timeout=60, check=True).stdout)
    with open(page) as f:
        before = f.read()
    assert before.count(BEGIN) == 1 and before.count(END) == 1, f"{page} has no place for the model types"
    after = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: BEGIN + text(types) + END, before, flags=re.S)
    if sys.argv[3:] == ["--write"]:
        with open(page, "w") as f:
            f.write(after)
    elif after != before:
        print(f"the model types of {page} are not the code's; write them with: {' '.join(sys.argv)} --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
