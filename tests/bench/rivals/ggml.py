# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's ggml, through ctypes: its quantisers, and the layer as llama.cpp's graph has it."""
import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p

import numpy as np

from containers import GGUF_TYPES, gguf_row_bytes, open_stacks
from layer import MATRICES, from_bf16, windows
import weights

F32, I32, BF16 = 0, 26, 30
KINDS = {"int8-g32": "Q8_0", "int4": "Q4_0", "q4_K": "Q4_K", "mxfp4": "MXFP4"}
NODES = 64


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


# Result, and arguments; void* for all handles.
_P = c_void_p
_FUNCTIONS = {
    "ggml_version": (c_char_p, []),
    "ggml_init": (_P, [_InitParams]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_nbytes": (c_size_t, [_P]),
    "ggml_quantize_chunk": (c_size_t, [c_int, _P, _P, c_int64, c_int64, c_int64, _P]),
    "ggml_new_tensor_3d": (_P, [_P, c_int, c_int64, c_int64, c_int64]),
    "ggml_new_tensor_2d": (_P, [_P, c_int, c_int64, c_int64]),
    "ggml_view_2d": (_P, [_P, _P, c_int64, c_int64, c_size_t, c_size_t]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_swiglu_split": (_P, [_P, _P, _P]),
    "ggml_mul": (_P, [_P, _P, _P]),
    "ggml_add": (_P, [_P, _P, _P]),
    "ggml_set_input": (None, [_P]),
    "ggml_set_output": (None, [_P]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_gallocr_new": (_P, [_P]),
    "ggml_gallocr_alloc_graph": (c_bool, [_P, _P]),
    "ggml_backend_cpu_init": (_P, []),
    "ggml_backend_cpu_set_n_threads": (None, [_P, c_int]),
    "ggml_backend_cpu_buffer_type": (_P, []),
    "ggml_backend_cpu_reg": (_P, []),
    "ggml_backend_reg_dev_get": (_P, [_P, c_size_t]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, c_char_p]),
    "ggml_backend_buft_name": (c_char_p, [_P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_tensor_set": (None, [_P, _P, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [_P, _P, c_size_t, c_size_t]),
    "ggml_backend_graph_compute": (c_int, [_P, _P]),
}


class Library:
    def __init__(self, folder):
        loaded = [ctypes.CDLL(f"{folder}/lib{name}.so", ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")]
        for name, (result, arguments) in _FUNCTIONS.items():
            function = next(getattr(library, name) for library in loaded if hasattr(library, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name[5:], function)

    def quantise(self, kind, bits):
        """Blocks [rows,bytes] of a bf16 matrix, by ggml's own rule."""
        values = np.ascontiguousarray(from_bf16(bits))
        rows, columns = values.shape
        blocks = np.empty((rows, gguf_row_bytes(kind, columns)), np.uint8)
        self.quantize_chunk(GGUF_TYPES[kind][0], values.ctypes.data, blocks.ctypes.data, 0, rows, columns, None)
        return blocks

    def context(self, tensors):
        size = self.tensor_overhead() * tensors + self.graph_overhead()
        return self.init(_InitParams(size, None, True))

    def repacking_buffers(self):
        """The type of buffers that lays weights out for the CPU's kernels as they are written. None: there is none."""
        reg = self.backend_cpu_reg()
        get = self.backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
        types = ctypes.CFUNCTYPE(POINTER(_P), _P)(get)(self.backend_reg_dev_get(reg, 0))
        index = 0
        while types[index]:
            if self.backend_buft_name(types[index]) == b"CPU_REPACK":
                return types[index]
            index += 1
        return None


class Ggml:
    """Weights in plain buffers."""

    repacks = False

    def __init__(self, job):
        self.lib, self.job = Library(job.ggml), job
        self.backend = self.lib.backend_cpu_init()
        self.lib.backend_cpu_set_n_threads(self.backend, job.threads)
        self.graphs = {}
        self.load()
        kind = KINDS.get(job.form, "BF16").lower()
        self.what = f"ggml {self.lib.version().decode()} {kind}{', repacked' if self.repacks else ''}"

    def load(self):
        lib, shape, form = self.lib, self.job.shape, self.job.form
        context = lib.context(len(MATRICES))
        kind = GGUF_TYPES[KINDS[form]][0] if form in KINDS else BF16
        self.weights = {}
        for name in MATRICES:
            rows, columns = shape.matrix(name)
            self.weights[name] = lib.new_tensor_3d(context, kind, columns, rows, shape.experts)
        buffers = lib.repacking_buffers() if self.repacks else lib.backend_cpu_buffer_type()
        if not buffers or not lib.backend_alloc_ctx_tensors_from_buft(context, buffers):
            raise RuntimeError("this build has no buffers that repack")
        for name in MATRICES:
            data = self.stack(name)
            assert data.nbytes == lib.nbytes(self.weights[name]), (name, data.nbytes)
            lib.backend_tensor_set(self.weights[name], data.ctypes.data, 0, data.nbytes)

    def stack(self, name):
        """All experts' blocks of a matrix."""
        plain, form = self.job.plain, self.job.form
        if form == "bf16":
            return open_stacks(plain)[f"{name}.weight"]
        if form == "int4":  # ggml has no form with our scales: its own of the same size
            return np.stack([self.lib.quantise("Q4_0", bits) for bits in open_stacks(plain)[f"{name}.weight"]])
        stacks = open_stacks(self.job.folder)
        if form == "mxfp4":
            packed, scales = stacks[f"{name}.weight_packed"], stacks[f"{name}.weight_scale"]
            return np.stack([weights.mxfp4_blocks(p, s) for p, s in zip(packed, scales)])
        return stacks[f"{name}.blocks"]

    def graph(self, tokens):
        """(graph, result, [(input, values of all tokens)])"""
        lib, shape = self.lib, self.job.shape
        context = lib.context(NODES + 2 * shape.top_k)
        x = lib.new_tensor_3d(context, F32, shape.hidden, 1, tokens)
        ids = lib.new_tensor_2d(context, I32, shape.top_k, tokens)
        scales = lib.new_tensor_3d(context, F32, 1, shape.top_k, tokens)
        for given in x, ids, scales:
            lib.set_input(given)
        gate, up = (lib.mul_mat_id(context, self.weights[name], x, ids) for name in ("gate", "up"))
        rows = lib.mul(context, lib.mul_mat_id(context, self.weights["down"], lib.swiglu_split(context, gate, up), ids), scales)
        row = 4 * shape.hidden
        of_slot = [lib.view_2d(context, rows, shape.hidden, tokens, row * shape.top_k, row * k) for k in range(shape.top_k)]
        y = of_slot[0]
        for other in of_slot[1:]:
            y = lib.add(context, y, other)
        lib.set_output(y)
        graph = lib.new_graph(context)
        lib.build_forward_expand(graph, y)
        allocator = lib.gallocr_new(lib.backend_cpu_buffer_type())
        if not lib.gallocr_alloc_graph(allocator, graph):
            raise MemoryError("ggml: no memory for a graph")
        return graph, y, [(x, from_bf16(self.job.x)), (ids, self.job.ids), (scales, self.job.scales)]

    def passes(self, tokens):
        if tokens not in self.graphs:
            self.graphs[tokens] = self.graph(tokens)
        graph, _, inputs = self.graphs[tokens]
        places = windows(tokens, self.job.tokens)

        def compute():
            at = next(places)
            for given, values in inputs:
                part = values[at]
                self.lib.backend_tensor_set(given, part.ctypes.data, 0, part.nbytes)
            if self.lib.backend_graph_compute(self.backend, graph) != 0:
                raise RuntimeError("ggml: the graph failed")

        return compute

    def result(self, tokens):
        y = np.empty((tokens, self.job.shape.hidden), np.float32)
        self.lib.backend_tensor_get(self.graphs[tokens][1], y.ctypes.data, 0, y.nbytes)
        return y


class GgmlRepacked(Ggml):
    repacks = True
