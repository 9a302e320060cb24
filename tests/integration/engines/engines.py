# SPDX-License-Identifier: Apache-2.0
"""What the tests of plugins for serving engines share. Tiny random models have their experts on two nodes, and the engine gives the greedy tokens that it
gives alone, also through its OpenAI endpoint while a node is killed. By hand, with an interpreter that has the engine and pip: too large for CI."""
import dataclasses, json, math, os, shutil, signal, socket, subprocess, sys, urllib.request
from typing import Any, Callable, Dict, List, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [f"{HERE}/../door"]
from door_cluster import BUILD, SOURCE, Cluster, wait_for

TOKENS = 64
PROMPTS = [[5, 9, 2, 7, 1, 8, 3, 4], [11, 60, 33, 200, 41], [7] * 12]
ROUNDED = 1.25  # times what the engine's own roundings cost
EXACT = 0.98  # of the tokens; the sums of a row are in another order than the engine's, and a tie may end otherwise
SIZES = dict(vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
DEEPSEEK = dict(moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5)
MLA = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, num_key_value_heads=4)  # vLLM's kernel for a CPU has no other latent size
FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", dict(head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)),
    "qwen2_moe": ("Qwen2Moe", dict(moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=2)),
    "mixtral": ("Mixtral", dict(num_local_experts=8, num_experts_per_tok=2)),
    "olmoe": ("Olmoe", dict(intermediate_size=64, num_experts=8, num_experts_per_tok=2, eos_token_id=1)),
    "gpt_oss": ("GptOss", dict(head_dim=32, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, swiglu_limit=7.0)),
    "glm4_moe": ("Glm4Moe", dict(head_dim=32, n_group=1, topk_group=1, **DEEPSEEK)),
    "deepseek_v2": ("DeepseekV2", dict(topk_method="group_limited_greedy", q_lora_rank=None, n_group=2, topk_group=1, **MLA, **DEEPSEEK)),
    "deepseek_v3": ("DeepseekV3", dict(q_lora_rank=48, topk_method="noaux_tc", scoring_func="sigmoid", n_group=2, topk_group=1, **MLA, **DEEPSEEK)),
}


@dataclasses.dataclass
class Case:
    """options: of the engine. form: of the routed experts in the checkpoint (write_model.py). changes: of the family's config."""

    family: str
    options: Dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    form: str = ""
    changes: Dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Engine:
    """generate: a program that is called with a model's folder and JSON, [[prompts, tokens]..] and options, and prints the tokens as JSON, a line that begins with [[[.
    With 0 tokens it prints log-probabilities instead, of each prompt's tokens from the second on; prompts are then those of the round before with what it generated if null.
    serve: the command of its OpenAI endpoint. refusals: what it says, environment, options."""

    name: str
    generate: str
    environment: Dict[str, str]
    serve: Callable[[str, str, int], List[str]]
    cases: Dict[str, Case]
    refusals: List[Tuple[str, Dict[str, str], Dict[str, Any]]]


def environment(c, engine, more):
    found = {**os.environ, "EXPERTD_LIBRARY": f"{BUILD}/client/libexpertd.so.0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **engine.environment, **more}
    return {**found, "PYTHONPATH": ":".join(p for p in (c.path("site"), engine.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if p)}


def python(c, engine, more, program, *words, code=0):
    with open(c.path("program.py"), "w") as f:
        f.write(program)
    with open(c.path("said"), "w+") as said:
        process = subprocess.Popen([sys.executable, c.path("program.py"), *words], env=environment(c, engine, more), stdout=said, stderr=said, start_new_session=True)
        try:
            process.wait(900)
        finally:
            end(process)
        said.seek(0)
        text = said.read()
    assert (process.returncode == 0) == (code == 0), f"ended with {process.returncode}: {text[-9000:]}"
    return text


def end(process):
    """With the processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
        process.wait(60)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def served(url, name):
    return {"EXPERTD_URL": url, "EXPERTD_OPTIONS": json.dumps({"model_name": name})}


def answer_of(said):
    return json.loads(next(line for line in said.splitlines() if line.startswith("[[[")))  # the engine logs there too


def program(c, engine, name, *words):
    return python(c, engine, {}, f"import runpy; runpy.run_path({f'{HERE}/{name}'!r}, run_name='__main__')", *words)


def tokens_of(c, engine, more, folder, rounds, **options):
    return answer_of(python(c, engine, more, engine.generate, folder, json.dumps(rounds), json.dumps(options)))


def rows_of(nodes):
    texts = [urllib.request.urlopen(f"{node['probe_url']}/metrics", timeout=30).read().decode() for node in nodes]
    return sum(float(line.split()[-1]) for text in texts for line in text.splitlines() if line.startswith("expertd_rows_served_total"))


def check_tokens(c, engine, url, nodes, case, want):
    before = rows_of(nodes)
    got = tokens_of(c, engine, served(url, case), c.path(case), [[PROMPTS, TOKENS]], dtype="float32", **engine.cases[case].options)[0]
    pairs = list(zip((t for row in got for t in row), (t for row in want for t in row)))
    assert len(pairs) == TOKENS * len(PROMPTS), got
    share = sum(g == w for g, w in pairs) / len(pairs)
    print(f"{case}: {share:.1%} of {len(pairs)} tokens are {engine.name}'s own; rows of the nodes: {rows_of(nodes) - before:.0f}", flush=True)
    assert share >= EXACT
    assert rows_of(nodes) > before, f"no row was computed by a node: {engine.name} used experts of its own"


def rms(some, others):
    pairs = [pair for rows in zip(some, others) for pair in zip(*rows)]
    return (sum((a - b) ** 2 for a, b in pairs) / len(pairs)) ** 0.5


def check_rounded(c, engine, url, nodes, name, exact, want, sequences):
    """Tokens part at the first tie that a rounding decides, so the same tokens are scored. Log-probabilities are as near to the engine's own in f32 as its own in this
    type with exact weights are, and as near to these. Rows rounded to int8 add what they cost in a program of transformers."""
    case, before = engine.cases[name], rows_of(nodes)
    (own,) = tokens_of(c, engine, {}, exact, [[sequences, 0]], dtype=case.dtype, **case.options)
    (got,) = tokens_of(c, engine, served(url, name), c.path(name), [[sequences, 0]], dtype=case.dtype, **case.options)
    assert [len(row) for row in got] == [len(row) - 1 for row in sequences], got
    rows = rms(answer_of(program(c, engine, "rounded_rows.py", exact, json.dumps(sequences)))[0], want) if case.form == "w8a8" else 0
    figures = rms(got, want), rms(got, own), rms(own, want)
    print("{}: {}: log-probabilities differ from f32's by {:.1e}, from {}'s own by {:.1e}; these from f32's by {:.1e}, for rows in int8 by {:.1e}; rows of the nodes: {:.0f}".format(
        name, case.dtype, figures[0], engine.name, *figures[1:], rows, rows_of(nodes) - before), flush=True)
    assert max(figures[:2]) <= ROUNDED * math.hypot(figures[2], rows), figures
    assert rows_of(nodes) > before, f"no row was computed by a node: {engine.name} used experts of its own"


def check_case(c, engine, url, nodes, name):
    """The tokens that the engine gives alone in f32."""
    case = engine.cases[name]
    exact = c.path(name) + ("-exact" if case.form else "")
    rounds = [[PROMPTS, TOKENS], *([[None, 0]] if case.dtype != "float32" else [])]
    tokens, *scores = tokens_of(c, engine, {}, exact, rounds, dtype="float32", **case.options)
    if scores:
        check_rounded(c, engine, url, nodes, name, exact, scores[0], [p + t for p, t in zip(PROMPTS, tokens)])
    else:
        check_tokens(c, engine, url, nodes, name, tokens)
    return tokens


def free_port():
    """Port 0 is not for these endpoints, which say no port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def stream(url, body):
    """Pieces of the text."""
    request = urllib.request.Request(url, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


def check_endpoint(c, engine, url, name, want, kill):
    port = free_port()
    with open(c.path("serve.log"), "wb") as log:
        process = subprocess.Popen(engine.serve(c.path(name), name, port), env=environment(c, engine, served(url, name)), stdout=log, stderr=log, start_new_session=True)

    def is_up():
        assert process.poll() is None, open(c.path("serve.log")).read()[-9000:]
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        wait_for(f"{engine.name}'s endpoint", is_up, 600)
        for killed in False, True:
            body, text = dict(model=name, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, ignore_eos=True), ""
            for piece in stream(f"http://127.0.0.1:{port}/v1/completions", body):
                text += piece
                if killed and kill and len(text.split()) >= TOKENS // 4:
                    kill, _ = None, kill()
            got = text.split()
            same = sum(a == f"t{b}" for a, b in zip(got, want)) / TOKENS
            print(f"{name}: endpoint{', a node is killed in the middle' if killed else ''}: {same:.1%} of {len(got)} tokens are {engine.name}'s own", flush=True)
            assert len(got) == TOKENS and same >= EXACT
        assert kill is None, "no node was killed"
    finally:
        end(process)


def check_refusals(c, engine, url, name):
    for text, more, options in engine.refusals:
        said = python(c, engine, {**served(url, name), **more}, engine.generate, c.path(name), json.dumps([[PROMPTS, 1]]), json.dumps({"dtype": "float32", **options}), code=1)
        assert text in said, f"does not say {text!r}: {said[-5000:]}"
        print(f"refused: {text}", flush=True)


def run(engine):
    with Cluster() as c:
        shutil.copytree(f"{SOURCE}/client/python", c.path("tree"))  # a build writes into its tree
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", c.path("site"), c.path("tree")], check=True)
        names = sys.argv[3:] or list(engine.cases)
        for name in names:
            case = engine.cases[name]
            model, keys = FAMILIES[case.family]
            program(c, engine, "write_model.py", c.path(name), model, json.dumps({**SIZES, **keys, **case.changes}), *([case.form] if case.form else []))
        url = c.coordinator("--copies=2", "--min-nodes=2")["rpc_url"]
        nodes = [c.daemon(node, f"{BUILD}/server/expertd/expertd", f"--node-name={node}", "--numerics=portable", f"--coordinator-url={url}",
                          *(f"--model={name}={c.path(name)}" for name in names)) for node in ("a", "b")]
        c.wait_serving("--coordinator", url)
        alone = {name: check_case(c, engine, url, nodes, name) for name in names}
        check_refusals(c, engine, url, names[0])

        def kill():
            entry = next(e for e in c.processes if e[0] == "b")
            c.processes.remove(entry)
            entry[1].kill()
            entry[1].wait()

        check_endpoint(c, engine, url, names[0], alone[names[0]][0], kill)
