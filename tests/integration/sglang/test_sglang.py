#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""expertd.sglang with SGLang on the CPU, where stub/ stands in for sglang-kernel: that imports nothing without a GPU. By hand.

test_sglang.py BUILD SOURCE [CASE..]"""
import os, sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [f"{HERE}/../engines"]
from engines import Case, Engine, run

GENERATE = """
import sys, json
import sglang
if __name__ == "__main__":
    folder, rounds, more = sys.argv[1], *map(json.loads, sys.argv[2:])
    engine = sglang.Engine(model_path=folder, device="cpu", attention_backend="torch_native", max_total_tokens=4096, mem_fraction_static=0.2, context_length=128,
                           disable_radix_cache=True, **{"disable_cuda_graph": True, **more})
    answers = []
    for prompts, tokens in rounds:
        found = engine.generate(input_ids=prompts, sampling_params=dict(temperature=0, max_new_tokens=tokens, ignore_eos=True))
        answers.append([f["output_ids"] for f in found])
    print(json.dumps(answers), flush=True)
    engine.shutdown()
"""


def serve(folder, name, port):
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", folder, "--served-model-name", name, "--dtype", "float32", "--disable-cuda-graph", "--device", "cpu",
            "--attention-backend", "torch_native", "--max-total-tokens", "4096", "--mem-fraction-static", "0.2", "--context-length", "128", "--disable-radix-cache",
            "--host", "127.0.0.1", "--port", str(port)]


if __name__ == "__main__":
    run(Engine(
        "SGLang", GENERATE,
        {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{HERE}/stub"},
        serve,
        {"qwen3_moe": Case("qwen3_moe")},
        [
            ("EXPERTD_OPTIONS has 'modle'", {"EXPERTD_OPTIONS": '{"modle": 1}'}, {}),
            ("tcp://127.0.0.1:1: waited 1 s for the experts", {"EXPERTD_URL": "tcp://127.0.0.1:1", "EXPERTD_OPTIONS": '{"wait": 1}'}, {}),
            ("expertd is no plugin of this SGLang", {"EXPERTD_LIBRARY": "/nowhere"}, {}),
        ],
    ))
