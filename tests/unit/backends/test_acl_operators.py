#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The operators' half of lib/backends/ascend/acl_symbols.h against prototypes restated from the vendor's documents
(acl_operator_prototypes.h), and these against a toolkit's own headers below EP_CANN_INCLUDE, if that is set: the folder with aclnn/ and
aclnnop/. Their headers are C++: CXX, or c++, compiles them then. Arguments: source folder, C compiler."""
import os, re, shlex, subprocess, sys, tempfile

SOURCE, CC = sys.argv[1:3]
CXX = os.environ.get("CXX", "c++")
HERE = f"{SOURCE}/tests/unit/backends"
OURS = f"{SOURCE}/lib/backends/ascend/acl_symbols.h"
PROTOTYPES = f"{HERE}/acl_operator_prototypes.h"

# const of what a parameter points to is left out: generated headers differ in it, and calls do not.
VENDOR = """
#include <cstdint>
#include <type_traits>
#include "%(header)s"
#include "%(prototypes)s"
template <class T> struct plain { using type = T; };
template <class T> struct plain<const T> : plain<T> {};
template <class T> struct plain<T *> { using type = typename plain<T>::type *; };
template <class R, class... A> struct plain<R(A...)> { using type = typename plain<R>::type(typename plain<A>::type...); };
#define SAME(name, result, parameters) using their_##name = result parameters; \\
    static_assert(std::is_same<plain<decltype(name)>::type, plain<their_##name>::type>::value, #name);
%(list)s(SAME)
"""


def read(path):
    with open(path) as file:
        return file.read()


def planted(text, old, new):
    """Wherever the lines of old are broken; they are a macro's."""
    changed, count = re.subn(r"[\s\\]+".join(re.escape(word) for word in old.split()), lambda _: new, text, count=1)
    assert count == 1, f"'{old}' is not there; plant the mistake elsewhere"
    return changed


def compiled(compiler, files, program, *options):
    """Whether program, beside files {name: text}, compiles; and what the compiler said."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
            with open(f"{folder}/{name}", "w") as file:
                file.write(text)
        done = subprocess.run(shlex.split(compiler) + ["-fsyntax-only", f"-I{folder}", *options, f"{folder}/{program}"],
                              capture_output=True, text=True, timeout=300)
        return done.returncode == 0, done.stderr


def product_agrees(ours):
    files = {"backends/ascend/acl_symbols.h": ours, "acl_operator_prototypes.h": read(PROTOTYPES), "check.c": read(f"{HERE}/acl_operator_check.c")}
    return compiled(CC, files, "check.c", "-std=gnu11", "-Wall", "-Werror", f"-I{SOURCE}/lib/include")


def vendor_agrees(include, header, name, prototypes):
    files = {"acl_operator_prototypes.h": prototypes, "check.cpp": VENDOR % {"header": header, "prototypes": "acl_operator_prototypes.h", "list": name}}
    return compiled(CXX, files, "check.cpp", "-std=c++17", "-isystem", include, "-isystem", f"{include}/aclnn")


def check_product():
    good, text = product_agrees(read(OURS))
    assert good, text
    for old, new in (("int64_t split_item, int64_t group_type,", "int64_t split_item, int32_t group_type,"),
                     ("double alpha, double limit,", "float alpha, double limit,"),
                     ("int64_t approximate, bool activate_left,", "bool activate_left, int64_t approximate,"),
                     ("const ep_acl_tensor *bias, const ep_acl_tensor *offset,", "const ep_acl_tensor *bias,"),
                     ("X(aclnnSwiGlu,", "X(aclnnSwiGluV9,"),
                     ("const int64_t *strides, int64_t offset,", "const int64_t *strides, int32_t offset,")):
        good, text = product_agrees(planted(read(OURS), old, new))
        assert not good, f"acl_symbols.h with '{new}' passes"


def check_vendor(include):
    prototypes = read(PROTOTYPES)
    compared = []
    for header, name in re.findall(r'H\("([^"]+)", (\w+)\)', prototypes):
        if not os.path.exists(f"{include}/{header}"):
            continue
        good, text = vendor_agrees(include, header, name, prototypes)
        assert good, f"{header}: {text}"
        at = prototypes.index(f"#define {name}(X)")
        wrong = prototypes[:at] + re.sub(r"uint64_t (\*?)(\w*[sS]ize)", r"uint32_t \1\2", prototypes[at:], count=1)
        good, text = vendor_agrees(include, header, name, wrong)
        assert not good, f"a restated {header} with another type passes"
        compared.append(header)
    assert compared, f"EP_CANN_INCLUDE={include} has none of the headers, want aclnn/ and aclnnop/ there"
    print("compared with the toolkit's: " + ", ".join(compared))


def main():
    check_product()
    include = os.environ.get("EP_CANN_INCLUDE", "")
    if include == "":
        print("EP_CANN_INCLUDE is not set: no toolkit's headers were compared")
    else:
        check_vendor(include)


if __name__ == "__main__":
    main()
