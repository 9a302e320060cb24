# SPDX-License-Identifier: Apache-2.0
"""Routers: from logits to the experts of each token and their weights."""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass
from typing import Any, Optional, Tuple

import numpy as np

from . import _c, _tensors, _values, errors
from ._c import lib


@dataclass(frozen=True)
class Gate:
    """The rule of a router, as ep_gate_config of expertd/gate.h has it step by step; what a step is not used for is 0.

    top_k                            K experts for each token
    select, weight                   score of the selection, and what the weights are made of: "logit", "softmax",
                                     "sigmoid", "sqrt_softplus", "sparsemixer" (both or neither); weight also
                                     "softmax_selected"
    bias, expert_factors             [E] f32: added to the selection score; the weight of each expert times this
    groups, groups_kept, group_best, group_mask
                                     experts compete by groups; group_mask "zero" or "minus_inf"
    softcap, renormalise, epsilon, sum_min, scaling_factor, jitter
    chosen                           [T,K] i32: ids of a layer that does not select; weights are made for them
    noise_temperature, expert_dropout, seed

    Mixtral: Gate(2, "logit", "softmax_selected"). Qwen3: Gate(8, renormalise=True). DeepSeek-V3: Gate(8, "sigmoid",
    "sigmoid", bias=b, groups=8, groups_kept=4, group_best=2, group_mask="minus_inf", renormalise=True, epsilon=1e-20,
    scaling_factor=2.5). C's weight_func and load are not offered: take choose, and Client.forward with its answer.
    """

    top_k: int
    select: str = "softmax"
    weight: str = "softmax"
    softcap: float = 0.0
    bias: Any = None
    groups: int = 0
    groups_kept: int = 0
    group_best: int = 0
    group_mask: str = "zero"
    renormalise: bool = False
    epsilon: float = 0.0
    sum_min: float = 0.0
    scaling_factor: float = 0.0
    expert_factors: Any = None
    jitter: float = 0.0
    chosen: Any = None
    noise_temperature: float = 0.0
    expert_dropout: float = 0.0
    seed: int = 0

    def choose(self, logits: Any) -> Tuple[np.ndarray, np.ndarray]:
        """ids [T,K] i32 and weights [T,K] f32 for logits [T,E] f32. Errors: ValueError (InvalidArgument), naming the
        field or the token."""
        rows = _array("logits", logits, "f32", (None, None))
        config, _keep = self._to_c(*rows.shape)
        error, shape = _c.CError(), (rows.shape[0], min(config.top_k, config.experts))  # more is refused
        ids, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
        pointers = (array.ctypes.data for array in (rows, ids, weights))
        if lib.ep_gate(byref(config), rows.shape[0], *pointers, byref(error)) != 0:
            raise errors.from_c(error)
        return ids, weights

    def _to_c(self, tokens: int, experts: int) -> Tuple[_c.GateConfig, Any]:
        """And what must live as long as it is used."""
        config = _c.GateConfig(struct_bytes=ctypes.sizeof(_c.GateConfig), experts=experts)
        for name, bits in (("top_k", 32), ("groups", 32), ("groups_kept", 32), ("group_best", 32), ("seed", 64)):
            setattr(config, name, _values.integer(name, getattr(self, name), bits))
        numbers = "softcap", "epsilon", "sum_min", "scaling_factor", "jitter", "noise_temperature", "expert_dropout"
        for name in numbers:
            setattr(config, name, _values.number(name, getattr(self, name)))
        for name, kind in (("select", "EP_GATE_"), ("weight", "EP_GATE_"), ("group_mask", "EP_GROUP_MASK_")):
            setattr(config, name, _values.word(name, getattr(self, name), _c.ENUMS[kind]))
        config.renormalise = _values.boolean("renormalise", self.renormalise)
        keep = []
        for name, kind, shape in (
            ("bias", "f32", (experts,)),
            ("expert_factors", "f32", (experts,)),
            ("chosen", "i32", (tokens, config.top_k)),
        ):
            if getattr(self, name) is not None:
                keep.append(_array(name, getattr(self, name), kind, shape))
                setattr(config, name, keep[-1].ctypes.data)
        return config, keep


def _array(name: str, given: Any, kind: str, shape: Tuple[Optional[int], ...]) -> np.ndarray:
    """Dense, of that type and shape (None: any): C takes a pointer and asks no more."""
    view = _tensors.view(name, given, only=kind)
    if len(view.shape) != len(shape) or any(w not in (None, n) for w, n in zip(shape, view.shape)):
        wanted = ["any" if n is None else n for n in shape]
        raise ValueError(f"{name} has shape {list(view.shape)}: allowed is {wanted}")
    return _tensors.to_numpy(view)
