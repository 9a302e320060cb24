#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""c_table.py c|python|fields HEADERS: what expertd._c says of C, as a C program that prints what the compiler says, or as the same lines from Python.
fields: that no struct of the headers has a field that it has not; one in the padding at the end changes no size."""
import ctypes, glob, re, sys

from expertd import _c, errors


def facts():
    """(C expression, Python's value)"""
    for name, struct in _c.STRUCTS.items():
        yield f"sizeof({name})", ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            member = getattr(struct, field)
            yield f"offsetof({name}, {field})", member.offset
            yield f"sizeof((({name} *)0)->{field})", member.size
    for kind, words in _c.ENUMS.items():
        for word, number in words.items():
            yield f"(long){_c.PREFIXES.get(kind, kind)}{word.upper()}", number
    for code, error in sorted(errors.BY_CODE.items()):
        yield f"(long)EP_ERR_{error.name}", code
    yield "(long)EP_TENSOR_RANK_MAX", _c.RANK_MAX
    yield "(long)EP_HEDGE_BY_POLICY", _c.HEDGE_BY_POLICY
    # and that none is missing: every code but OK and UNKNOWN
    yield "0L EP_ERR_MAP(ONE)", len(errors.BY_CODE) + 2


def fields_of(text, name):
    """Of the struct in the header, in their order."""
    body = re.search(r"typedef struct %s \{(.*?)\} %s;" % (name, name), re.sub(r"/\*.*?\*/", "", text, flags=re.S), re.S).group(1)
    return [re.search(r"\(\*(\w+)\)|(\w+)\s*(?:\[[^]]*\])*\s*$", line).group(1, 2) for line in body.split(";")[:-1]]


def check_fields(headers):
    text = "".join(open(path).read() for path in sorted(glob.glob(headers + "/expertd/*.h")))
    for name, struct in _c.STRUCTS.items():
        there, here = [a or b for a, b in fields_of(text, name)], [field for field, *_ in struct._fields_]
        assert there == here, f"{name} has the fields {there}, expertd._c {here}"


def main():
    if sys.argv[1] == "fields":
        return check_fields(sys.argv[2])
    if sys.argv[1] == "python":
        for expression, value in facts():
            print(expression, value)
        return
    print('#include <stddef.h>\n#include <stdio.h>\n#include "expertd/client.h"\n#include "expertd/group.h"\n#define ONE(...) +1\nint main(void)\n{')
    for expression, _ in facts():
        print(f'    printf("%s %ld\\n", "{expression}", (long)({expression}));')
    print("}")


if __name__ == "__main__":
    main()
