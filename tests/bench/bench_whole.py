#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A whole model, of Qwen3-30B-A3B's shape with drawn weights in 4 bits: transformers with its experts on an expertd of this machine, its dense part in
16 bits and in 8, transformers alone where that fits, and llama.cpp's server, which reads the same file of experts. Tokens a second of 1, 8 and 32 sequences
behind a short prompt and of one long prompt, memory, and time until ready. One engine at a time is in memory, as the model does not fit twice into most
machines: rounds go over all of them, each started anew with its files out of the page cache; medians over rounds are reported.

bench_whole.py BUILD SOURCE JSON [layers=48] [rounds=3] [batch=1,8,32] [prompt=2048] [new=24] [engine='NAME;..'] [server=PROGRAM]
               [dense=float16] [keep=FOLDER] [profile=BATCH]

dense is how transformers holds its dense part where that is not in 8 bits; without, as this CPU computes it quickest. server is a llama-server to use instead
of the one that is built, its libraries beside it. keep names a folder for the model's files, which are made there or taken from there and stay. profile
prints where transformers' time goes. GOMP_SPINCOUNT=0 keeps PyTorch's threads from spinning on the node's CPUs."""
import os, shutil, statistics, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD, SOURCE, REPORT = (os.path.abspath(path) for path in sys.argv[1:4])
sys.path[:0] = [f"{HERE}/whole", f"{HERE}/rivals", f"{HERE}/../integration/models", f"{SOURCE}/client/python"]
os.environ.update(EXPERTD_LIBRARY=f"{BUILD}/client/libexpertd.so.0", EXPERTD_NUMERICS=os.environ.get("EXPERTD_NUMERICS", "auto"), HF_HUB_OFFLINE="1")

import numpy as np

import engines, ggml, meter, model, venv
from report import Report, table

GIB = 1 << 30
THREADS = len(os.sched_getaffinity(0))
SHORT_PROMPT, PROMPT_SEED = 16, 1 << 20
PROGRAMS = 1.5 * GIB  # beside weights: libraries, key-value cache, buffers
OURS, EIGHT_BITS, FOUR_BITS = "transformers, expertd", "transformers in 8 bits, expertd", "llama.cpp, all in 4 bits"
ENGINES = {  # name: parts of venv.PARTS
    OURS: ("torch", "transformers"),
    EIGHT_BITS: ("torch", "transformers"),
    "transformers alone": ("torch", "transformers"),
    "llama.cpp": ("llama-server",),
    FOUR_BITS: ("llama-server",),
}
PEERS = {OURS: ("transformers alone", "llama.cpp"), EIGHT_BITS: (FOUR_BITS,)}  # those with the same or a similar dense part
DENSE = ("bfloat16", "float16", "float32")  # what may be said: 8 bits have a row of their own
LOADING = {"float32": 4, "bfloat16": 2, "float16": 2.5, "int8": 2.5}  # bytes for a dense weight, while the model is loaded
NOT_MEASURED = {"vLLM alone": "vLLM 0.32 computes 4-bit experts on a CPU with AMX or, on Zen with zentorch; this bench does not install it"}


def words_of(arguments):
    words = dict(layers="48", rounds="3", batch="1,8,32", prompt="2048", new="24", engine=";".join(ENGINES), keep="", profile="", server="", dense=dense_type())
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in words or not value:
            raise ValueError(f"{argument!r}: allowed are {', '.join(f'{word}=..' for word in words)}")
        numbers = value.split(",") if name == "batch" else [value] if name in ("layers", "rounds", "prompt", "new", "profile") else []
        least = 8 if name == "new" else 1  # fewer may arrive together, and then have no speed
        if any(not n.isdigit() or int(n) < least for n in numbers):
            raise ValueError(f"{name} is {value!r}: allowed are numbers from {least} on")
        if name == "dense" and value not in DENSE:
            raise ValueError(f"dense is {value!r}: allowed are {', '.join(DENSE)}")
        if name == "engine" and not set(value.split(";")) <= set(ENGINES):
            raise ValueError(f"engine is {value!r}: allowed are {'; '.join(ENGINES)}, with ';' between them")
        words[name] = value
    return words


def dense_type():
    """Without AVX-512 or its like PyTorch's products of bf16 are several times slower than those of float32. FBGEMM's, of weights in float16 and sums in
    float32, are as quick for long prompts, and up to five times as quick for 8 rows."""
    with open("/proc/cpuinfo") as file:
        flags = set(next((line for line in file if line.startswith(("flags", "Features"))), "").split())
    return "bfloat16" if flags & {"avx512bw", "bf16"} else "float16" if "avx2" in flags else "float32"


def memory_available():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


class Bench:
    def __init__(self, words):
        self.rounds, self.new, self.prompt = int(words["rounds"]), int(words["new"]), int(words["prompt"])
        self.batches = [int(n) for n in words["batch"].split(",")]
        self.dense = words["dense"]
        self.names, self.profile = words["engine"].split(";"), int(words["profile"] or 0)
        context = -(-(max(self.prompt, max(self.batches) * SHORT_PROMPT) + max(self.batches) * self.new) // 256) * 256
        self.model, self.context = model.Model(layers=int(words["layers"])), context
        self.columns = [f"decode, batch {n}" for n in self.batches] + [f"prefill of {self.prompt}"]
        parts = {part for name in self.names for part in ENGINES[name]} - ({"llama-server"} if words["server"] else set())
        self.python, self.gone = venv.install(f"{os.path.dirname(BUILD)}/rivals-venv", parts)
        self.server = words["server"] or f"{os.path.dirname(os.path.dirname(self.python))}/{venv.LLAMA_SERVER}/llama-server"
        self.report, self.found, self.missing, self.what, self.firsts = Report(), {}, {}, {}, {}

    def write(self, folder):
        forms = model.DENSE_FORMS if FOUR_BITS in self.names and "llama-server" not in self.gone else model.DENSE_FORMS[:1]
        forms = model.missing(folder, self.model, forms)
        if not forms:
            return
        begin = time.monotonic()
        quantise = ggml.Library(os.path.dirname(self.server)).quantise if "q4_0" in forms else None
        model.write(folder, self.model, forms, quantise)
        self.report.add("writing the model", time.monotonic() - begin, "s")

    def dense_of(self, name):
        """What an engine's dense part is computed in. None: llama.cpp's own."""
        return None if name.startswith("llama.cpp") else "int8" if name == EIGHT_BITS else self.dense

    def why_not(self, name):
        """Why an engine is not measured; None: it is."""
        gone = [self.gone[part] for part in ENGINES[name] if part in self.gone]
        alone, wide = name == "transformers alone", 2 if self.dense == "bfloat16" else 4
        dense = (wide if alone else LOADING.get(self.dense_of(name), 2)) * self.model.dense_weights
        experts = wide * self.model.expert_weights if alone else self.model.expert_bytes
        need = PROGRAMS + dense + experts + (8 * self.model.expert_weights // self.model.layers if alone else 0)  # a layer while it is widened
        free = memory_available()
        if gone:
            return gone[0]
        if alone and need >= free:
            return f"it has no 4-bit experts: widened they take {experts / GIB:.0f} GiB, free are {free / GIB:.0f}"
        return None if need < free else f"needs about {need / GIB:.0f} GiB, free are {free / GIB:.0f}"

    def start(self, name, folder, work):
        if name.startswith("llama.cpp"):
            path = f"{folder}/{'q4_0' if name == FOUR_BITS else 'bf16'}/model-00001-of-00002.gguf"
            return engines.LlamaServer(self.server, path, work, self.context, max(self.batches), THREADS)
        return engines.Transformers(self.python, BUILD, SOURCE, folder, work, self.model, THREADS, name in PEERS, self.dense_of(name))

    def prompts(self, count, length):
        draw = np.random.default_rng([PROMPT_SEED, count, length])
        return draw.integers(model.FIRST_TOKEN, self.model.vocab, (count, length)).tolist()

    def measure(self, name, folder, work):
        """Adds one round's values of an engine."""
        why = self.why_not(name)
        if why is None:
            model.forget(folder)
            with meter.Memory() as memory:
                begin = time.monotonic()
                engine = self.start(name, folder, work)
                try:
                    ready = time.monotonic() - begin
                    why = engine.missing or self.measure_cells(name, engine)
                finally:
                    engine.close()
        if why is not None:
            print(f"  {name} missing: {why}", flush=True)
            self.missing[name] = why
            self.found.pop(name, None)
            self.firsts.pop(name, None)
            return
        self.keep(name, "ready", ready)
        for program, most in memory.most.items():
            self.keep(name, f"memory of {program}", meter.own(most))
            self.keep(name, f"mapped by {program}", most["RssFile"])

    def keep(self, name, what, value):
        print(f"  {name}: {what} {f'{value / GIB:.2f} GiB' if what.startswith(('memory', 'mapped')) else f'{value:.2f}'}", flush=True)
        self.found.setdefault(name, {}).setdefault(what, []).append(value)

    def measure_cells(self, name, engine):
        """Why it is missing after all; None: it is not."""
        self.what[name] = engine.what
        engine.generate(self.prompts(1, SHORT_PROMPT), 3)  # to warm up
        for column, batch in zip(self.columns, self.batches):
            answer, _ = self.ask(name, engine, column, self.prompts(batch, SHORT_PROMPT), self.new)
            if engine.missing:
                return engine.missing
            self.keep(name, column, meter.rate(answer["stamps"]))
            if meter.share(answer) is not None:
                self.keep(name, f"{column}: of it in experts", meter.share(answer))
            self.firsts.setdefault(name, []).extend(tokens[0] for tokens in answer["tokens"])
        answer, begin = self.ask(name, engine, self.columns[-1], self.prompts(1, self.prompt), 1)
        if engine.missing:
            return engine.missing
        self.keep(name, self.columns[-1], self.prompt / (answer["stamps"][0][0] - begin))
        self.firsts[name].append(answer["tokens"][0][0])
        if self.profile and name.startswith("transformers"):
            print(engine.generate(self.prompts(self.profile, SHORT_PROMPT), 8, profile=True)["profile"])
        return None

    def ask(self, name, engine, column, prompts, new):
        """(answer, when it was asked)"""
        begin, cpu = time.monotonic(), meter.cpu_seconds()
        answer = engine.generate(prompts, new)
        if engine.missing is None:
            self.keep(name, f"{column}: CPU seconds", meter.cpu_seconds() - cpu)
        return answer, begin

    def run(self, folder, work):
        self.write(folder)
        for _ in range(self.rounds):
            for name in self.names:
                if name not in self.missing:
                    self.measure(name, folder, work)


def rows(bench):
    """Adds ours beside the best of their peers, then theirs. Returns the lines of the table."""
    medians = {name: {what: statistics.median(values) for what, values in bench.found[name].items()} for name in bench.names if name in bench.found}
    for found in medians.values():
        found["memory"] = sum(value for what, value in found.items() if what.startswith("memory of")) / GIB
        found["mapped"] = sum(value for what, value in found.items() if what.startswith("mapped by")) / GIB
    units = {**dict.fromkeys(bench.columns, ("tokens/s", "higher")), "memory": ("GiB", "lower"), "ready": ("s", "lower")}
    for what, (unit, better) in units.items():
        for name in (name for name in PEERS if name in medians):
            rivals = {peer: medians[peer][what] for peer in PEERS[name] if peer in medians}
            best = (max if better == "higher" else min)(rivals, key=rivals.get, default=None)
            ours = medians[name][what]
            bench.report.add(f"{what}: {name}{'' if best is None else f', against {best}'}", ours, unit, rivals.get(best),
                             None if best is None else ours / rivals[best], None if best is None else 1.0, better)
        for name in (name for name in medians if name not in PEERS):
            bench.report.add(f"{what}: {name}", medians[name][what], unit, better=better)
    for name, found in medians.items():
        for what, value in found.items():
            if what.startswith(("memory of", "mapped by")):
                bench.report.add(f"{what}: {name}", value / GIB, "GiB")
            elif what.endswith(("experts", "seconds")):
                bench.report.add(f"{what}: {name}", value, "s" if what.endswith("seconds") else "of 1")
    add_agreement(bench)
    for name, why in {**bench.missing, **NOT_MEASURED}.items():
        bench.report.add(f"{name} missing: {why}")
    digits = {what: 1 if unit == "tokens/s" else 0 if unit == "s" else 1 for what, (unit, _) in units.items()}
    lines = [[name, *(f"{found[what]:.{digits[what]}f}" for what in bench.columns), f"{found['memory']:.1f}", f"{found['mapped']:.1f}", f"{found['ready']:.0f}"]
             for name, found in medians.items()]
    return lines + [[name, *["-"] * (len(bench.columns) + 3)] for name in {**bench.missing, **NOT_MEASURED}]


def add_agreement(bench):
    """Of all prompts, those behind which engines of the same weights generate the same first token. Others differ by rounding, as drawn weights have no
    clear answers; by chance one of all words would."""
    for name in ("transformers alone", "llama.cpp"):
        if OURS in bench.firsts and name in bench.firsts:
            pairs = list(zip(bench.firsts[OURS], bench.firsts[name]))
            bench.report.add(f"first tokens equal: {OURS} and {name}", sum(a == b for a, b in pairs) / len(pairs), "of 1", better="higher")


def main():
    try:
        words = words_of(sys.argv[4:])
    except ValueError as error:
        print(f"bench_whole.py: {error}", file=sys.stderr)
        return 2
    os.makedirs(os.path.dirname(REPORT), exist_ok=True)
    bench, work = Bench(words), tempfile.mkdtemp(prefix="whole-")
    folder = os.path.abspath(words["keep"]) if words["keep"] else tempfile.mkdtemp(prefix="whole-", dir=os.path.dirname(REPORT))
    try:
        bench.run(folder, work)
    except FileExistsError as error:
        print(f"bench_whole.py: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(work)
        if not words["keep"]:
            shutil.rmtree(folder)
    lines = rows(bench)
    status = bench.report.finish(REPORT)
    m = bench.model
    print(f"\n{m.layers} layers, hidden {m.hidden}, {m.experts} experts top-{m.top_k} of {m.inner}, {m.heads} heads, {m.kv_heads} of keys, vocabulary {m.vocab}; "
          f"{THREADS} threads, {bench.rounds} rounds of one engine after another; tokens/s, GiB, s\n")
    print(table(["engine", *bench.columns, "memory", "files mapped", "until ready"], lines))
    print("\n" + "\n".join(f"{name}: {what}" for name, what in bench.what.items()))
    return status


if __name__ == "__main__":
    sys.exit(main())
