#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A decode step of a Qwen3-MoE of transformers with its experts on an expertd of this machine, over shared memory and over TCP, against the same
kernels in this process and against the ways in which transformers computes experts itself. Rounds alternate between all of them, with equal threads;
medians of ratios are reported. Rows "experts" tell what of the step its layers of experts take.

bench_hf.py BUILD SOURCE JSON [TOKENS..]"""
import ctypes, json, os, statistics, sys, time

BUILD, SOURCE, REPORT = sys.argv[1:4]
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [f"{HERE}/../integration/door", f"{SOURCE}/client/python"]
os.environ.update(HF_HUB_OFFLINE="1", EXPERTD_LIBRARY=f"{BUILD}/client/libexpertd.so.0")

import torch, transformers
from door_cluster import Cluster
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import expertd.hf
from expertd import _c

torch.cuda.is_current_stream_capturing = lambda: False  # framework_venv.py has empty CUDA libraries, which end the program here
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
HIDDEN, INNER, EXPERTS, TOP_K, LAYERS, CONTEXT = 2048, 768, 32, 8, 2, 8
TOKENS = [int(t) for t in sys.argv[4:]] or [1, 8, 64, 512]
ROUNDS, WARM_UP, SECONDS = 40, 3, 20  # of one number of tokens: as many rounds as begin in the seconds
LANES = {"expertd": None, "expertd-tcp": "stream"}  # None: what a user of the same host gets
OWN = {"eager": 512, "grouped_mm": 512, "batched_mm": 8}  # transformers' ways; the last copies an expert's weights for each row, so it ends early
SERVICE_BAR, OWN_BAR = 1.10, 1.0
THREADS = len(os.sched_getaffinity(0))
torch.set_num_threads(THREADS)


class Report:
    """Rows as those of bench_report.h, smaller is better in all."""

    def __init__(self):
        self.rows = []
        print(f"{'name':52} {'value':>12} {'unit':10} {'limit':>12} {'rival':>12} {'ratio':>12} {'bar':>12}  pass")

    def add(self, name, value, rival=None, ratio=None, bar=None):
        passes = None if bar is None else ratio <= bar
        self.rows.append(dict(name=name, value=value, unit="us", limit=None, rival=rival, ratio=ratio, better="lower", bar=bar, **{"pass": passes}))
        numbers = [f"{'-':>12}" if n is None else f"{n:12.0f}" if n >= 1000 else f"{n:12.3f}" for n in (value, None, rival, ratio, bar)]
        print(f"{name:52} {numbers[0]} {'us':10} {' '.join(numbers[1:])}  {'-' if passes is None else 'yes' if passes else 'NO'}", flush=True)

    def finish(self, path):
        with open(path, "w") as file:
            json.dump(self.rows, file, indent=2)
        return int(any(row["pass"] is False for row in self.rows))


class Kernels:
    """experts_implementation "kernels": the daemon's kernels in this process."""

    def __init__(self, folder):
        self.lib, error = ctypes.CDLL(f"{BUILD}/tests/bench/libbench_hf.so"), _c.CError()
        self.lib.hf_local_open.restype = ctypes.c_void_p
        self.layers = [self.lib.hf_local_open(folder.encode(), n, THREADS, ctypes.byref(error)) for n in range(LAYERS)]
        assert all(self.layers), error.text

    def __call__(self, module, x, ids, weights):
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.float().contiguous()
        assert (x.dtype, ids.dtype, x.shape[1], ids.shape[1]) == (torch.bfloat16, torch.int64, HIDDEN, TOP_K)
        out = torch.empty_like(x)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, ids, weights)]
        err = self.lib.hf_local_run(ctypes.c_void_p(self.layers[module.bench_layer]), *pointers, x.shape[0], ctypes.c_void_p(out.data_ptr()))
        assert err == 0, err
        return out


class Form:
    """A model and how it computes its experts. Forms that differ in the latter alone share a model."""

    def __init__(self, model, implementation=None):
        self.model, self.implementation = model, implementation

    def choose(self):
        if self.implementation is not None:
            self.model.set_experts_implementation(self.implementation)

    def step(self, ids, cache):
        """(us, us in layers of experts, logits): a decode step of a batch behind a context."""
        self.choose()
        self.model.bench_experts_us = 0.0
        begin = time.perf_counter()
        logits = self.model(input_ids=ids[:, CONTEXT:], past_key_values=cache).logits
        took = (time.perf_counter() - begin) * 1e6
        cache.crop(-1)
        return took, self.model.bench_experts_us, logits


def meter(model):
    """Adds the time of each layer of experts to model.bench_experts_us."""
    model.bench_experts_us = 0.0

    def before(module, _):
        module.bench_begin = time.perf_counter()

    def after(module, *_):
        model.bench_experts_us += (time.perf_counter() - module.bench_begin) * 1e6

    for n, layer in enumerate(model.model.layers):
        layer.mlp.experts.bench_layer = n
        layer.mlp.experts.register_forward_pre_hook(before)
        layer.mlp.experts.register_forward_hook(after)
    return model.eval()


def make_forms(c):
    """name: form. All compute in bf16 from one checkpoint."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=LAYERS, norm_topk_prob=True,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=INNER, vocab_size=4096, max_position_embeddings=256)
    folder, options = c.path("model"), dict(dtype=torch.bfloat16)
    transformers.AutoModelForCausalLM.from_config(config, **options).save_pretrained(folder)
    url = c.coordinator()["rpc_url"]
    c.daemon("node", f"{BUILD}/server/expertd/expertd", "--node-name=node", f"--coordinator-url={url}", f"--model=bench={folder}", f"--threads={THREADS}")
    forms = {name: Form(meter(expertd.hf.from_pretrained(folder, url, wait=300, progress=False, client={"lanes": lanes}, **options)))
             for name, lanes in LANES.items()}
    ALL_EXPERTS_FUNCTIONS.register("kernels", Kernels(folder))
    local = meter(transformers.AutoModelForCausalLM.from_pretrained(folder, **options))
    forms.update((name, Form(local, name)) for name in ("kernels", *OWN))
    return forms


def caches_of(forms, ids):
    """One for each model."""
    caches = {}
    for form in forms.values():
        if form.model not in caches:
            form.choose()
            caches[form.model] = transformers.DynamicCache(config=form.model.config)
            form.model(input_ids=ids[:, :CONTEXT], past_key_values=caches[form.model])
    return caches


def measure(forms, tokens, report):
    forms = {name: form for name, form in forms.items() if tokens <= OWN.get(name, tokens)}
    torch.manual_seed(tokens)
    ids = torch.randint(0, 4096, (tokens, CONTEXT + 1))
    caches, took, experts, want = caches_of(forms, ids), {name: [] for name in forms}, {name: [] for name in forms}, None
    names, end = list(forms), time.monotonic() + SECONDS
    for round_ in range(-WARM_UP, ROUNDS):
        if round_ > 0 and time.monotonic() > end:
            break
        for name in names:
            us, experts_us, logits = forms[name].step(ids, caches[forms[name].model])
            if round_ >= 0:
                took[name].append(us)
                experts[name].append(experts_us)
            else:  # no way is quick by leaving something out
                want = logits.float() if want is None else want
                error = ((logits.float() - want).norm() / want.norm()).item()
                assert error < 0.05, f"{name}: logits differ by {error:.3f}"
        names = names[1:] + names[:1]  # another goes first, and each comes after each
    report_rows(tokens, took, experts, report)


def report_rows(tokens, took, experts, report):
    def add(what, of, form, rival, bar):
        ratio = statistics.median(a / b for a, b in zip(of[form], of[rival]))
        report.add(f"T={tokens} {what}: {form} against {rival}", statistics.median(of[form]), statistics.median(of[rival]), ratio, bar)

    best = min((name for name in OWN if name in took), key=lambda name: statistics.median(took[name]))
    for form in LANES:
        add("step", took, form, "kernels", SERVICE_BAR)
        add("experts", experts, form, "kernels", None)
    for form in LANES:
        add("step", took, form, best, OWN_BAR)


def main():
    with Cluster() as c, torch.inference_mode():
        forms = make_forms(c)
        print(f"Qwen3-MoE, hidden {HIDDEN}, {LAYERS} layers, {EXPERTS} experts top-{TOP_K} of {INNER}, bf16, {THREADS} threads; "
              f"numerics {forms['expertd'].model.expertd.client.models()[0].numerics}")
        report = Report()
        for tokens in TOKENS:
            measure(forms, tokens, report)
        for name in LANES:
            forms[name].model.expertd.close()
        return report.finish(REPORT)


if __name__ == "__main__":
    sys.exit(main())
