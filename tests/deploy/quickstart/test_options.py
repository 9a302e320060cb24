#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An option without its value: the usage, and exit code 2."""
import subprocess, sys

OPTIONS = {
    "quickstart": ["--build", "--prompt", "--bytes", "--seed"],
    "build-packages": ["--build", "--out"],
    "examples/ascend-first-run": ["--build", "--report"],
}
for script, options in OPTIONS.items():
    for option in options:
        done = subprocess.run([f"{sys.argv[1]}/deploy/{script}", "--no-install", option], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.startswith(f"usage: deploy/{script} "), (script, option, done)
