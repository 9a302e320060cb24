#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""One layer on expertd, over shared memory, against libraries that compute it in their own process: the same weights, tokens and routes. Each rival has a
process of its own and is stopped while expertd computes. Rounds alternate; medians of ratios are reported, with errors against float64 on bf16 weights.

bench_rivals.py BUILD SOURCE JSON [shape=Q,M] [form=bf16,w8a8,int8-g32,int4,q4_K,mxfp4] [tokens=1,8,64,512] [rounds=3] [rival=NAME,..]

shape is Q (128 experts top-8 2048x768), M (8 experts top-2 4096x14336) or ExKxHxI. EXPERTD_NUMERICS chooses expertd's arithmetic."""
import os, shutil, statistics, sys, tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD, SOURCE, REPORT = (os.path.abspath(path) for path in sys.argv[1:4])
sys.path[:0] = [f"{HERE}/rivals", f"{HERE}/../integration/models", f"{SOURCE}/client/python"]
os.environ.update(EXPERTD_LIBRARY=f"{BUILD}/client/libexpertd.so.0", EXPERTD_NUMERICS=os.environ.get("EXPERTD_NUMERICS", "auto"))

import numpy as np

import catalogue, containers, ggml, layer, venv
from process import RivalProcess
from report import Report, add_cells, cell, markdown
from service import Service
from timing import alternate

GIB = 1 << 30
THREADS = len(os.sched_getaffinity(0))


def words_of(arguments):
    """{name: [value, ..]}"""
    words = dict(shape=list(layer.SHAPES), form=list(catalogue.FORMS), tokens=["1", "8", "64", "512"], rounds=["3"],
                 rival=[rival.name for rival in catalogue.RIVALS])
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in words or not value:
            raise ValueError(f"{argument!r}: allowed are {', '.join(f'{word}=..' for word in words)}")
        values = value.split(",")
        wrong = [v for v in values if name in ("form", "rival") and v not in words[name] or name in ("tokens", "rounds") and not (v.isdigit() and int(v) > 0)]
        if wrong:
            raise ValueError(f"{name} is {wrong[0]!r}: allowed are {', '.join(words[name]) if name in ('form', 'rival') else 'numbers above 0'}")
        words[name] = values
    return words


def memory_available():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


class Bench:
    def __init__(self, words):
        self.tokens, self.rounds = [int(t) for t in words["tokens"]], int(words["rounds"][0])
        self.tokens_most = max(self.tokens + [layer.ERROR_TOKENS])
        self.forms, self.names = words["form"], words["rival"]
        parts = {part for rival in catalogue.RIVALS if rival.name in self.names for part in rival.needs} | ({"ggml"} if "q4_K" in self.forms else set())
        self.python, self.missing = venv.install(f"{os.path.dirname(BUILD)}/rivals-venv", parts)
        self.ggml = f"{os.path.dirname(os.path.dirname(self.python))}/{venv.GGML}"
        self.report, self.lines = Report(), []

    def measure_shape(self, shape):
        os.makedirs(os.path.dirname(REPORT), exist_ok=True)
        self.shape, self.folder = shape, tempfile.mkdtemp(prefix=f"rivals-{shape.name}-", dir=os.path.dirname(REPORT))
        try:
            os.mkdir(f"{self.folder}/bf16")
            plain = containers.create_safetensors(f"{self.folder}/bf16", shape, "bf16")
            layer.draw_weights(shape, plain)
            self.want = layer.answer(shape, plain, *layer.draw_tokens(shape, layer.ERROR_TOKENS))
            for form in self.forms:
                self.measure_form(form, plain)
        finally:
            shutil.rmtree(self.folder)

    def write_form(self, form, plain):
        """False: ggml's form, and no ggml to make it."""
        folder = f"{self.folder}/{form}"
        if form == "q4_K" and "ggml" in self.missing:
            return False
        if form == "q4_K":
            os.mkdir(folder)
            library, stacks = ggml.Library(self.ggml), containers.create_gguf(folder, self.shape, "Q4_K")
            layer.each_expert(self.shape, lambda matrix, e: np.copyto(stacks[f"{matrix}.blocks"][e], library.quantise("Q4_K", plain[f"{matrix}.weight"][e])))
        elif form != "bf16":
            containers.write_form(folder, self.shape, form, plain)
        os.sync()
        return True

    def measure_form(self, form, plain):
        stem = f"{self.shape.name} {form}"
        if not self.write_form(form, plain):
            self.report.add(f"{stem} missing: {self.missing['ggml']}")
            return
        service = Service(f"{BUILD}/server/expertd/expertd", f"{self.folder}/{form}", self.folder, self.shape, self.tokens_most, THREADS)
        try:
            error = self.error_of(service.result)
            self.report.add(f"{stem} error of expertd, {service.numerics}", error, "rms")
            ours, cells = {t: [] for t in self.tokens}, {t: {} for t in self.tokens}
            for rival in catalogue.RIVALS:
                if rival.name in self.names:
                    self.measure_rival(rival, form, service, ours, cells)
            self.lines.append((self.shape.name, form, error, {t: self.add_cell(stem, t, error, ours[t], cells[t], service) for t in self.tokens}))
        finally:
            service.close()
            if form != "bf16":
                shutil.rmtree(f"{self.folder}/{form}")

    def error_of(self, result):
        """The larger one of the first tokens alone and among the most that are measured: kernels may differ. None: there is no result."""
        errors = []
        for tokens in sorted({layer.ERROR_TOKENS, self.tokens_most}):
            y = result(tokens)
            if y is None:
                return None
            errors.append(layer.error_of(y.reshape(tokens, -1)[: layer.ERROR_TOKENS], self.want))
        return max(errors)

    def add_cell(self, stem, tokens, error, ours, cells, service):
        ours = statistics.median(ours or [service.run(tokens)])
        return cell(ours, add_cells(self.report, f"{stem} T={tokens}", error, ours, cells), cells)

    def why_not(self, rival, form):
        """Why a rival is not measured; None: it is."""
        gone = [self.missing[part] for part in rival.needs if part in self.missing]
        need, free = int(rival.copies * catalogue.FORMS[form] * self.shape.elements), memory_available()
        if rival.reason(form) or gone:
            return rival.reason(form) or gone[0]
        return None if need < free else f"needs about {need / GIB:.0f} GiB, free are {free / GIB:.0f}"

    def measure_rival(self, rival, form, service, ours, cells):
        stem = f"{self.shape.name} {form}"
        why = self.why_not(rival, form)
        if why is None:
            job = dict(module=rival.module, rival=rival.rival, shape=self.shape.name, form=form, folder=f"{self.folder}/{form}", plain=f"{self.folder}/bf16",
                       tokens=self.tokens_most, threads=THREADS, ggml=self.ggml)
            with RivalProcess(self.python, f"{HERE}/rivals/worker.py", job) as process:
                why = process.missing or self.measure_cells(rival, stem, process, service, ours, cells)
        if why is not None:
            self.report.add(f"{stem} {rival.name} missing: {why}")

    def measure_cells(self, rival, stem, process, service, ours, cells):
        """Why it is missing after all; None: it is not."""
        error = self.error_of(lambda tokens: process.result(tokens, f"{self.folder}/result"))
        if error is None:
            return process.missing
        self.report.add(f"{stem} error of {rival.name}, {process.what}", error, "rms")
        for t in self.tokens:
            pairs = alternate(lambda: service.run(t), lambda: process.run(t), self.rounds)
            if pairs is None:
                return process.missing
            ours[t] += [own for own, _ in pairs]
            cells[t][rival.name] = (statistics.median(other for _, other in pairs), statistics.median(own / other for own, other in pairs), error)
        return None


def main():
    try:
        words = words_of(sys.argv[4:])
        shapes = [layer.shape_of(text) for text in words["shape"]]
    except ValueError as error:
        print(f"bench_rivals.py: {error}", file=sys.stderr)
        return 2
    bench = Bench(words)
    for shape in shapes:
        bench.measure_shape(shape)
    status = bench.report.finish(REPORT)
    print("\nms of expertd, its share of the time of the best rival whose error is at most 1.2 times expertd's, and which that is (in brackets: none is as "
          "accurate; the quickest, and its error)\n")
    print(markdown(bench.tokens, bench.lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
