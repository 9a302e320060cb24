# SPDX-License-Identifier: Apache-2.0
"""What rows rounded to int8 make of a model in f32: log-probabilities of each sequence's tokens from the second on, by transformers with experts of its own.

rounded_rows.py FOLDER SEQUENCES"""
import json, sys

import torch, transformers
import torch.nn.functional as F


def rounded(rows):
    """With a scale for each row, as nodes of portable numerics round what comes into a matrix of 8 bits."""
    scales = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scales).round() * scales


def experts(self, x, ids, weights):
    y, x = torch.zeros_like(x), rounded(x)
    for row, k in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        gate, up = F.linear(x[row], self.gate_up_proj[ids[row, k]]).chunk(2)
        y[row] += weights[row, k] * F.linear(rounded(F.silu(gate) * up), self.down_proj[ids[row, k]])
    return y


folder, sequences = sys.argv[1], json.loads(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts.forward = experts
with torch.no_grad():
    scores = [model(torch.tensor([s])).logits[0].log_softmax(-1)[torch.arange(len(s) - 1), s[1:]].tolist() for s in sequences]
print(json.dumps([scores]))
