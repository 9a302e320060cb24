#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A virtual environment with transformers and torch for the CPU, made once below a build folder.

The package index has torch for CUDA only. Its CUDA libraries are larger than all the rest and nothing here calls them, so
torch is installed alone, with empty libraries in their place: each symbol that torch looks for is a function that
returns 100, cudaErrorNoDevice."""
import fcntl, glob, hashlib, os, re, subprocess, sys
from collections import defaultdict

TORCH = "torch==2.15.0"
PINS = ["transformers==5.23.0", "huggingface-hub==2.4.0", "tokenizers==0.23.3", "safetensors==0.8.0", "numpy==2.4.6", "scipy==1.17.1",
        "filelock==4.3.1", "typing-extensions==4.16.0", "sympy==1.14.0", "networkx==3.6.1", "jinja2==3.1.6", "fsspec==2026.9.0"]


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, **more)
    assert done.returncode == 0, f"{' '.join(command)}: {(done.stdout + done.stderr).strip()[-800:]}"
    return done.stdout


def stand_in_for_cuda(site):
    place = f"{site}/nvidia/cu13/lib"  # where torch's libraries look
    os.makedirs(place, exist_ok=True)
    needed, defined, wanted = set(), set(), defaultdict(set)
    for library in glob.glob(f"{site}/torch/lib/*.so"):
        text = run("readelf", "-d", "--dyn-syms", "--wide", library)
        needed |= set(re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv)[^\]]*)\]", text))
        for index, symbol, version in re.findall(r" (UND|\d+) ((?:cu|__cu|nccl|nv)\w+)(?:@+(\S+))?", text):
            if index == "UND":
                wanted[version].add(symbol)
            else:
                defined.add(symbol)
    for library in needed:  # versions are named after their library, but for one; symbols without a version may be anywhere
        version = "NVSHMEM" if library.startswith("libnvshmem") else library if library in wanted else None
        symbols = sorted(wanted["" if library.startswith("libnccl") else version] - defined)
        source = "".join(f"int {symbol}(void) {{ return 100; }}\n" for symbol in symbols)
        command = ["gcc", "-shared", "-fPIC", "-w", "-nostdlib", f"-Wl,-soname,{library}", "-o", f"{place}/{library}", "-x", "c", "-"]
        if version is not None:
            with open(f"{place}/map", "w") as f:
                f.write(f"{version} {{ global: *; }};\n")
            command.insert(1, f"-Wl,--version-script={place}/map")
        run(*command, input=source)


def python_with_transformers(folder):
    """The environment's Python; folder is made, or used as it is when it was made from these pins."""
    with open(__file__, "rb") as f:
        stamp = hashlib.sha256(f.read() + sys.version.encode()).hexdigest()
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = f"{folder}/bin/python"
        done = f"{folder}/made-from"
        if not os.path.exists(done) or open(done).read() != stamp:
            run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
            pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
            run(*pip, "--no-deps", TORCH)
            run(*pip, *PINS)
            stand_in_for_cuda(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
            with open(done, "w") as f:
                f.write(stamp)
    return python


if __name__ == "__main__":  # framework_venv.py FOLDER PROGRAM [ARG..]: the program in the environment
    interpreter = python_with_transformers(os.path.abspath(sys.argv[1]))
    os.execv(interpreter, [interpreter, *sys.argv[2:]])
