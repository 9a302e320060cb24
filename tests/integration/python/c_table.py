#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""c_table.py c|python: what expertd._c says of C, as a C program that prints what the compiler says, or as the same lines from Python."""
import ctypes, sys

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


def main():
    if sys.argv[1] == "python":
        for expression, value in facts():
            print(expression, value)
        return
    print('#include <stddef.h>\n#include <stdio.h>\n#include "expertd/client.h"\n#define ONE(...) +1\nint main(void)\n{')
    for expression, _ in facts():
        print(f'    printf("%s %ld\\n", "{expression}", (long)({expression}));')
    print("}")


if __name__ == "__main__":
    main()
