#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The runtime half of lib/backends/ascend/acl_symbols.h against the vendor's own headers, which the wheel of torch_npu brings.
Arguments: build folder, source folder, C compiler."""
import os, shlex, subprocess, sys, tempfile, zipfile

BUILD, SOURCE, CC = sys.argv[1:4]
WHEEL = "torch_npu==2.14.0"
INSIDE = "torch_npu/include/third_party/acl/inc/"


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def headers():
    """The folder of acl/acl_rt.h; downloaded once for each build folder."""
    kept = f"{BUILD}/tests/acl-headers"
    if not os.path.exists(f"{kept}/{INSIDE}acl/acl_rt.h"):
        os.makedirs(kept, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as scratch:
            done = run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
                        "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64", "--retries", "1", "--timeout", "60", "-d", scratch, WHEEL])
            assert done.returncode == 0, f"pip download {WHEEL}: {(done.stdout + done.stderr).strip()[-400:]}"
            with zipfile.ZipFile(f"{scratch}/{os.listdir(scratch)[0]}") as wheel:
                names = [n for n in wheel.namelist() if n.startswith(INSIDE + "acl/")]
                wheel.extractall(scratch, names)
            os.rename(f"{scratch}/torch_npu", f"{kept}/torch_npu")
    return f"{kept}/{INSIDE}"


def agrees(vendor, changes=()):
    """Whether the check compiles and passes, with changes made to a copy of our header."""
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(f"{folder}/backends/ascend")
        with open(f"{SOURCE}/lib/backends/ascend/acl_symbols.h") as file:
            text = file.read()
        for old, new in changes:
            assert old in text, f"acl_symbols.h has no '{old}'; plant the mistake elsewhere"
            text = text.replace(old, new, 1)
        with open(f"{folder}/backends/ascend/acl_symbols.h", "w") as file:
            file.write(text)
        program = f"{folder}/check"
        built = run(shlex.split(CC) + ["-std=gnu11", "-Wall", "-Werror", "-Wno-unused-const-variable", "-Wno-strict-prototypes", "-o", program,
                    f"-I{folder}", f"-I{SOURCE}/lib/include", "-isystem", vendor, "-isystem", f"{vendor}acl",
                    f"{SOURCE}/tests/unit/backends/acl_header_check.c"])
        if built.returncode != 0:
            return False, built.stderr
        ran = run([program])
        return ran.returncode == 0, ran.stdout


def main():
    vendor = headers()
    good, text = agrees(vendor)
    assert good, text
    print(text.strip())
    for old, new in (("X(EP_ACL_BF16, ACL_BF16, 27)", "X(EP_ACL_BF16, ACL_BF16, 26)"),
                     ("X(aclrtSetDevice, ep_acl_code, (int32_t device)", "X(aclrtSetDevice, ep_acl_code, (int64_t device)"),
                     ("ACL_ERROR_RT_MEMORY_ALLOCATION, 207001", "ACL_ERROR_RT_MEMORY_ALLOCATION, 207002"),
                     ("typedef unsigned ep_acl_memcpy_kind", "typedef int ep_acl_memcpy_kind"),
                     ("X(aclrtStreamWaitEvent, ep_acl_code, (ep_acl_stream stream, ep_acl_event event)",
                      "X(aclrtStreamWaitEvent, ep_acl_code, (ep_acl_event event, const void *stream)")):
        good, text = agrees(vendor, [(old, new)])
        assert not good, f"a header with '{new}' passes"


if __name__ == "__main__":
    main()
