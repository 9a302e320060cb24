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
SERVE = ["fastapi==0.136.3", "starlette==1.10.0", "uvicorn==0.54.0", "openai==3.57.0", "psutil==7.2.2"]  # of transformers serve
# What writes quantised checkpoints, and what it imports.
TOOLS = ["llmcompressor==0.14.0.1", "compressed-tensors==0.20.0", "auto-round==0.16.1", "gguf==0.19.0",
         "accelerate==1.15.0", "certifi==2026.10.19.post1", "charset-normalizer==3.5.3", "datasets==5.2.0", "dill==0.4.1", "httpx==0.28.1",
         "loguru==0.7.3", "multiprocess==0.70.19", "nvidia-ml-py==13.615.71", "pandas==3.1.1", "pillow==13.0.0", "psutil==7.2.2",
         "py-cpuinfo==9.0.0", "pyarrow==26.0.1", "pydantic==2.14.4", "pydantic-core==2.50.5", "annotated-types==0.8.0",
         "typing-inspection==0.4.5", "python-dateutil==4.0.0", "requests==2.34.2", "six==1.17.0", "urllib3==2.8.0", "xxhash==4.1.0",
         "idna==3.20"]


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


def made_once(folder, make, *sources):
    """The Python of a virtual environment; folder is made, or used as it is when it was made from these pins and those in sources."""
    hashed = hashlib.sha256(sys.version.encode())
    for source in __file__, *sources:
        with open(source, "rb") as f:
            hashed.update(f.read())
    stamp = hashed.hexdigest()
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = f"{folder}/bin/python"
        done = f"{folder}/made-from"
        if not os.path.exists(done) or open(done).read() != stamp:
            run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
            make(python, pip_into(python))
            with open(done, "w") as f:
                f.write(stamp)
    return python


def pip_into(python):
    """Compiles nothing: of 13,000 modules few are imported, and the first import of each leaves it compiled."""
    return [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check", "--no-compile"]


def site_of(python):
    return run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()


def python_with_transformers(folder):
    def make(python, pip):
        run(*pip, "--no-deps", TORCH, "accelerate==1.15.0", "torchao==0.18.0")  # which would ask for torch's own needs
        run(*pip, *PINS, *SERVE)
        stand_in_for_cuda(site_of(python))

    return made_once(folder, make)


def python_with_tools(folder):
    """An environment of its own, which has all that the first has: the tools ask for an older transformers."""
    site = site_of(python_with_transformers(folder))

    def make(python, pip):
        run(*pip, "--no-deps", *TOOLS)
        with open(f"{site_of(python)}/framework.pth", "w") as f:
            f.write(site + "\n")

    return made_once(f"{folder}-tools", make)


if __name__ == "__main__":  # framework_venv.py [--tools] FOLDER PROGRAM [ARG..]: the program in the environment
    with_tools = sys.argv[1] == "--tools"
    words = sys.argv[2:] if with_tools else sys.argv[1:]
    folder = os.path.abspath(words[0])
    interpreter = (python_with_tools if with_tools else python_with_transformers)(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}-compiled"  # not beside the sources of the tests
    os.execv(interpreter, [interpreter, *words[1:]])
