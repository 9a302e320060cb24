# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's operator QMoE on the CPU: weights in 8 or 4 bits, 32 columns to a scale."""
import tempfile

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from containers import open_stacks
from layer import from_bf16, windows
import weights

OFF = np.float32(-1e4)  # a logit that gives an expert nothing


class QMoE:
    def __init__(self, job):
        self.job, self.bits = job, 4 if job.form == "int4" else 8
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = job.threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "1")
        with tempfile.TemporaryDirectory(dir=job.folder) as folder:
            self.session = onnxruntime.InferenceSession(self.write_model(folder), options, providers=["CPUExecutionProvider"])
        # It routes by itself: the softmax of these logits' top K are our scales.
        self.logits = np.full((job.tokens, job.shape.experts), OFF, np.float32)
        np.put_along_axis(self.logits, job.ids.astype(np.int64), np.log(job.scales), axis=1)
        self.x = from_bf16(job.x)
        self.what = f"onnxruntime {onnxruntime.__version__} QMoE, {self.bits} bits"

    def write_model(self, folder):
        """Its path; weights are in a file beside it, for a model has no more than 2 GiB."""
        shape, constants = self.job.shape, []
        with open(f"{folder}/weights", "wb") as file:
            for name, values in self.weights().items():
                file.write(bytes(-file.tell() % 4096))
                kind = TensorProto.UINT8 if values.dtype == np.uint8 else TensorProto.FLOAT
                tensor = TensorProto(name=name, data_type=kind, dims=values.shape, data_location=TensorProto.EXTERNAL)
                for key, value in ("location", "weights"), ("offset", str(file.tell())), ("length", str(values.nbytes)):
                    tensor.external_data.add(key=key, value=value)
                constants.append(tensor)
                values.tofile(file)
        attributes = dict(k=shape.top_k, activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0, normalize_routing_weights=1,
                          expert_weight_bits=self.bits, block_size=weights.GROUP, swiglu_limit=float("inf"))
        node = helper.make_node("QMoE", ["x", "logits", "w13", "s13", "", "w2", "s2"], ["y"], domain="com.microsoft", **attributes)
        rows = lambda name, columns: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", columns])
        graph = helper.make_graph([node], "layer", [rows("x", shape.hidden), rows("logits", shape.experts)], [rows("y", shape.hidden)], constants)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        with open(f"{folder}/model.onnx", "wb") as file:
            file.write(helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString())
        return file.name

    def weights(self):
        """Codes without a sign, and scales; rows of gate and up alternate."""
        parts = {name: self.parts(name) for name in ("gate", "up", "down")}
        both = [np.stack([g, u], axis=2).reshape(g.shape[0], -1, g.shape[2]) for g, u in zip(parts["gate"], parts["up"])]
        return dict(w13=both[0], s13=both[1], w2=parts["down"][0], s2=parts["down"][1])

    def parts(self, name):
        stacks = open_stacks(self.job.folder)
        if self.bits == 4:
            return np.array(stacks[f"{name}.weight_packed"]), from_bf16(np.array(stacks[f"{name}.weight_scale"]))
        blocks = stacks[f"{name}.blocks"].reshape(*stacks[f"{name}.blocks"].shape[:2], -1, 2 + weights.GROUP)
        codes = (blocks[..., 2:] ^ np.uint8(128)).reshape(*blocks.shape[:2], -1)
        return codes, np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)

    def passes(self, tokens):
        places = windows(tokens, self.job.tokens)

        def compute():
            at = next(places)
            (self.y,) = self.session.run(None, dict(x=self.x[at], logits=self.logits[at]))

        return compute

    def result(self, tokens):
        return self.y[:tokens].astype(np.float32)
