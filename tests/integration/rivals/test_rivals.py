#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tests/bench/bench_rivals.py and bench_whole.py without rivals: expertd computes a small layer from the files that they write, in each form, as
NumPy does in float64 from the form's parts; a stand-in for a rival, one that is missing and one that dies go through the same processes and rows.

test_rivals.py BUILD SOURCE"""
import json, math, os, sys, tempfile

BUILD, SOURCE = sys.argv[1:3]
BENCH = f"{SOURCE}/tests/bench"
sys.path[:0] = [f"{BENCH}/rivals", f"{BENCH}/whole", f"{SOURCE}/client/python"]
os.environ.update(EXPERTD_LIBRARY=f"{BUILD}/client/libexpertd.so.0", EXPERTD_NUMERICS="portable")

import numpy as np

import catalogue, containers, layer, meter, model, report, weights
from process import RivalProcess
from service import Service

SHAPE = layer.shape_of("4x2x128x64")
TOKENS = layer.ERROR_TOKENS
# Of the form's rounding on weights like these, and beside it of what expertd rounds itself: rows to int8 in w8a8, else results to bf16.
FORM_ERRORS = {"bf16": (0, 0), "w8a8": (0.005, 0.03), "int8-g32": (0.004, 0.015), "int4": (0.1, 0.25), "mxfp4": (0.1, 0.3)}
OWN_ERROR = {"w8a8": 0.04}


def widened(form, parts):
    """The float32 values of a matrix in a form."""
    scales = parts.get("weight_scale")
    if form == "bf16":
        return layer.from_bf16(parts["weight"])
    if form in ("w8a8", "int8-g32"):
        wide = np.repeat(scales.astype(np.float32), parts["weight"].shape[1] // scales.shape[1], axis=1)
        return parts["weight"].astype(np.float32) * wide
    packed = parts["weight_packed"]
    codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(packed.shape[0], -1)
    if form == "int4":
        return (codes.astype(np.float32) - 8) * np.repeat(layer.from_bf16(scales), weights.GROUP, axis=1)
    values = weights.E2M1[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
    return values * np.exp2(np.repeat(scales.astype(np.float32), weights.GROUP, axis=1) - 127)


class Widened:
    """The answer's weights: those of the form. Stands in for stacks of bf16, whose bits layer.answer widens."""

    def __init__(self, values):
        self.values = values

    @classmethod
    def of_form(cls, form, plain):
        return cls({f"{m}.weight": [widened(form, weights.FORMS[form](bits)) for bits in plain[f"{m}.weight"]] for m in layer.MATRICES})

    def answer(self):
        x, ids, scales = layer.draw_tokens(SHAPE, TOKENS)
        x, y = layer.from_bf16(x).astype(np.float64), np.zeros((TOKENS, SHAPE.hidden))
        for t in range(TOKENS):
            for e, scale in zip(ids[t], scales[t]):
                gate, up, down = (self.values[f"{m}.weight"][e].astype(np.float64) for m in layer.MATRICES)
                g = gate @ x[t]
                y[t] += scale * (down @ (g / (1 + np.exp(-g)) * (up @ x[t])))
        return y


def check_forms(folder):
    os.mkdir(f"{folder}/bf16")
    plain = containers.create_safetensors(f"{folder}/bf16", SHAPE, "bf16")
    layer.draw_weights(SHAPE, plain)
    exact = layer.answer(SHAPE, plain, *layer.draw_tokens(SHAPE, TOKENS))
    assert set(FORM_ERRORS) == set(weights.FORMS) and set(weights.FORMS) | {"q4_K"} == set(catalogue.FORMS)
    for form, (least, most) in FORM_ERRORS.items():  # mxfp4 is last
        if form != "bf16":
            containers.write_form(f"{folder}/{form}", SHAPE, form, plain)
        want = Widened.of_form(form, plain).answer()
        of_form = layer.error_of(want, exact)
        assert least <= of_form <= most + 1e-12, f"{form}: the form's error is {of_form}"
        got = computed(folder, form)
        error = layer.error_of(got, want)
        assert error < OWN_ERROR.get(form, 0.005), f"{form}: expertd's error against the form's weights is {error}"
    check_mxfp4_blocks(folder, got)
    return exact


def computed(folder, form, number=0):
    service = Service(f"{BUILD}/server/expertd/expertd", f"{folder}/{form}", folder, SHAPE, TOKENS, 1, number)
    try:
        y = service.result(TOKENS)
        assert np.array_equal(y[:3], service.result(3)), f"{form}: fewer tokens have other rows"
        assert service.run(1) > 0
        return y
    finally:
        service.close()


def check_mxfp4_blocks(folder, want):
    """llama.cpp's blocks, which ggml is given, hold the same weights: the same bits come out."""
    os.mkdir(f"{folder}/blocks")
    blocks, parts = containers.create_gguf(f"{folder}/blocks", SHAPE, "MXFP4"), containers.open_stacks(f"{folder}/mxfp4")
    for m in layer.MATRICES:
        for e in range(SHAPE.experts):
            blocks[f"{m}.blocks"][e] = weights.mxfp4_blocks(parts[f"{m}.weight_packed"][e], parts[f"{m}.weight_scale"][e])
    assert np.array_equal(computed(folder, "blocks"), want), "mxfp4 in blocks computes other rows"


def check_whole(folder):
    """The model of bench_whole.py, in two files as llama.cpp has them: expertd computes its last layer."""
    tiny = model.Model(layers=2, hidden=SHAPE.hidden, experts=SHAPE.experts, top_k=SHAPE.top_k, inner=SHAPE.inner, heads=2, kv_heads=1, head_dim=64, vocab=512)
    model.write(f"{folder}/whole", tiny, model.DENSE_FORMS[:1])
    want = Widened({f"{m}.weight": model.widen_experts(f"{folder}/whole", tiny, 1, m) for m in layer.MATRICES}).answer()
    error = layer.error_of(computed(f"{folder}", "whole/bf16", 1), want)
    assert error < 0.005, f"the whole model's last layer: error {error}"
    assert 0.1 < math.sqrt((want**2).mean()) < 2, "rows grow or shrink from layer to layer"
    assert meter.rate([[1.0, 2.0, 3.0], [1.5, 2.5, 3.5]]) == 3 / 1.5, "tokens are counted before all have begun or after one has ended"


STAND_IN = '''
import layer, numpy, os
from containers import open_stacks

class Exact:
    what = "the answer itself"
    def __init__(self, job):
        self.job, self.stacks = job, open_stacks(job.folder)
    def passes(self, tokens):
        def compute():
            self.y = layer.answer(self.job.shape, self.stacks, self.job.x[:tokens], self.job.ids[:tokens], self.job.scales[:tokens])
        return compute
    def result(self, tokens):
        return self.y.astype(numpy.float32)

class Lacking:
    def __init__(self, job):
        raise RuntimeError("no such operator")

class Dying(Exact):
    def passes(self, tokens):
        os.abort()
'''


def check_processes(folder, exact):
    with open(f"{folder}/stand_in.py", "w") as file:
        file.write(STAND_IN)
    os.environ["PYTHONPATH"] = folder
    job = dict(module="stand_in", shape=SHAPE.name, form="bf16", folder=f"{folder}/bf16", plain=f"{folder}/bf16", tokens=TOKENS, threads=1)
    start = lambda rival: RivalProcess("/usr/bin/python3", f"{BENCH}/rivals/worker.py", {**job, "rival": rival})
    with start("Exact") as process:
        assert process.missing is None and process.what == "the answer itself", process.missing
        with open(f"/proc/{process.process.pid}/stat") as file:
            assert file.read().rpartition(")")[2].split()[0] in "TR", "it is not asked to stop"
        y = process.result(TOKENS, f"{folder}/result").reshape(TOKENS, -1)
        assert layer.error_of(y, exact) < 1e-6
        assert process.run(2) > 0
    with start("Lacking") as process:
        assert process.missing == "RuntimeError: no such operator", process.missing
    with start("Dying") as process:
        assert process.missing is None and process.run(1) is None and process.missing.startswith("ended with -6"), process.missing


def check_rows(folder):
    rows = report.Report()
    cells = {"coarse and quick": (1.0, 4.0, 0.2), "quicker": (2.0, 1.5, 0.11), "slower": (4.0, 0.75, 0.09)}
    assert report.add_cells(rows, "S form T=1", 0.1, 3.0, cells)[0] == "quicker", "the best is not the quickest of those as accurate"
    assert report.add_cells(rows, "S form T=8", 0.01, 3.0, cells) is None
    assert report.cell(3.0, None, cells) == "3.00 (4.00 coarse and quick .200)"
    rows.add("S form other missing: no operator")
    assert rows.finish(f"{folder}/rows.json") == 1, "a cell above its bar passes"
    with open(f"{folder}/rows.json") as file:
        written = {row["name"]: row for row in json.load(file)}
    first = written["S form T=1 expertd, against quicker"]
    assert first == dict(name=first["name"], value=3.0, unit="ms", limit=None, rival=2.0, ratio=1.5, better="lower", bar=1.0, **{"pass": False}), first
    assert written["S form T=8 expertd, no rival of its accuracy"]["pass"] is None and written["S form other missing: no operator"]["value"] is None


def main():
    with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
        check_processes(folder, check_forms(folder))
        check_whole(folder)
        check_rows(folder)
    for rival in catalogue.RIVALS:
        assert all(rival.reason(form) is None or form not in rival.forms for form in catalogue.FORMS)


if __name__ == "__main__":
    sys.exit(main())
