# SPDX-License-Identifier: Apache-2.0
"""OpenVINO's CPU plugin: the layer in the operators that it fuses into one that gathers experts."""
import numpy as np
import openvino
from openvino import opset13 as op

from containers import open_stacks
from layer import to_bf16, windows

BF16 = openvino.Type.bf16


class OpenVino:
    def __init__(self, job):
        self.job = job
        core = openvino.Core()
        self.stacks = open_stacks(job.folder, "c")  # the model borrows them
        options = {"INFERENCE_NUM_THREADS": job.threads, "INFERENCE_PRECISION_HINT": "bf16", "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        compiled = core.compile_model(self.model(), "CPU", options)
        if "GatherMatmul" not in {n.get_rt_info()["layerType"].astype(str) for n in compiled.get_runtime_model().get_ops() if "layerType" in n.get_rt_info()}:
            raise RuntimeError("this version does not fuse the layer: it would compute all experts for each token")
        self.request = compiled.create_infer_request()
        self.scales = to_bf16(job.scales)
        self.what = f"openvino {openvino.__version__.split('-')[0]} GatherMatmul"

    def weights(self, name):
        stack = self.stacks[f"{name}.weight"]
        return op.constant(openvino.Tensor(np.asarray(stack), list(stack.shape), BF16), shared_memory=True)

    def model(self):
        experts, hidden, slots = self.job.shape.experts, self.job.shape.hidden, self.job.shape.top_k
        numbers = lambda *values: op.constant(np.array(values, np.int64))
        x, ids, scales = op.parameter([1, -1, hidden], BF16), op.parameter([-1, slots], np.int64), op.parameter([-1, slots], BF16)
        rows = op.reshape(x, numbers(-1, hidden), False)
        for_all = op.reshape(op.tile(rows, numbers(experts, 1)), numbers(experts, -1, hidden), False)
        gate, up = (op.matmul(for_all, self.weights(name), False, True) for name in ("gate", "up"))
        down = op.matmul(op.multiply(op.multiply(gate, op.sigmoid(gate)), up), self.weights("down"), False, True)
        tokens = op.gather(op.shape_of(rows), numbers(0), op.constant(np.int64(0)))
        nothing = op.broadcast(op.constant(0, BF16), op.concat([tokens, numbers(experts)], 0))
        routed = op.transpose(op.scatter_elements_update(nothing, ids, scales, op.constant(np.int64(1))), numbers(1, 0))
        weights = op.unsqueeze(op.reshape(routed, op.concat([numbers(experts, 1), tokens], 0), False), op.constant(np.int64(3)))
        y = op.reduce_sum(op.multiply(op.reshape(down, numbers(experts, 1, -1, hidden), False), weights), numbers(0), False)
        return openvino.Model([op.result(op.convert(y, np.float32))], [x, ids, scales])

    def passes(self, tokens):
        places, ids = windows(tokens, self.job.tokens), self.job.ids.astype(np.int64)

        def compute():
            at = next(places)
            x = openvino.Tensor(self.job.x[None, at], [1, tokens, self.job.shape.hidden], BF16)
            scales = openvino.Tensor(self.scales[at], [tokens, self.job.shape.top_k], BF16)
            self.request.infer([x, openvino.Tensor(ids[at], shared_memory=True), scales], share_inputs=True)

        return compute

    def result(self, tokens):
        return np.array(self.request.get_output_tensor().data).reshape(tokens, -1)
