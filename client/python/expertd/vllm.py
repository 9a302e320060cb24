# SPDX-License-Identifier: Apache-2.0
"""Models of vLLM whose routed experts are on a service; all else, shared experts too, stays with vLLM.

    EXPERTD_URL=tcp://127.0.0.1:7410 vllm serve Qwen/Qwen3-30B-A3B --enforce-eager

vLLM finds this as a plugin (entry point expertd of vllm.general_plugins); without EXPERTD_URL it does nothing. Options
are in EXPERTD_OPTIONS (expertd/_settings.py). With tensor parallelism one rank asks and the others add zeros.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Optional, Tuple

from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ._engine import Layer, refuse

__all__ = ["register"]

_ACTIVATIONS = {  # vLLM's name: the service's
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swigluoai": "swiglu_oai",
    "swigluoai_uninterleave": "swiglu_oai",
    "swiglustep": "swiglu_step",
    "situ": "situ",
    "silu_no_mul": "silu_no_gate",
    "gelu_no_mul": "gelu_no_gate",
    "gelu_tanh_no_mul": "gelu_tanh_no_gate",
    "relu2_no_mul": "relu2_no_gate",
}

_HELD = (  # what checkpoints of any form have beside a matrix, for those loaders that look parameters up
    "weight", "bias", "weight_packed", "weight_shape", "weight_scale", "weight_scale_inv", "weight_scale_2",
    "weight_zero_point", "weight_g_idx", "weight_global_scale", "input_scale", "input_global_scale", "qweight", "qzeros",
    "scales", "g_idx",
)
_CLASSES = ("RoutedExperts", "GptOssRoutedExperts")  # whose loaders drop all with parameters of _HELD


def _numbers_of(moe: Any, limit: Optional[float]) -> Dict[str, float]:
    """What vLLM's kernels take for the service's alpha, beta and limit."""
    alpha, beta = {
        "swigluoai": (1.702, 1.0),
        "swigluoai_uninterleave": (1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha, moe.swiglu_beta or 0.0),
        "situ": (moe.activation_situ_beta, moe.activation_situ_linear_beta),
    }.get(moe.activation.value, (None, None))
    if moe.activation.value in ("swigluoai", "swiglustep"):
        limit = 7.0
    return {name: v for name, v in (("alpha", alpha), ("beta", beta), ("limit", limit)) if v is not None}


def _refuse(config: VllmConfig, layer: RoutedExperts, moe: Any) -> None:
    """What would give wrong sums, or a call that a captured graph has no place for."""
    name = type(layer).__name__
    refuse(
        (
            (
                isinstance(config.additional_config, dict) and "expertd" in config.additional_config,
                "expertd reads nothing from --additional-config",
                "put its options into EXPERTD_OPTIONS",
            ),
            (name not in _CLASSES, f"{name} loads experts in a way of its own", "serve a model of another class"),
            (
                config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE,
                "CUDA graphs cannot hold a call to a service",
                "give --enforce-eager",
            ),
            (moe.moe_parallel_config.use_ep, "the service spreads experts", "leave out --enable-expert-parallel"),
            (
                moe.moe_parallel_config.dp_size > 1 or moe.moe_parallel_config.pcp_size > 1,
                "ranks of data or context parallelism exchange tokens",
                "start one vLLM for each replica",
            ),
            (moe.is_lora_enabled, "LoRA wants experts' weights", "leave out --enable-lora"),
            (
                config.model_config.runner_type == "draft",
                "a draft model has experts, which the service may not have",
                "leave out --speculative-config",
            ),
        )
    )


class _Method(FusedMoEMethodBase):
    """Computes a layer by asking the service."""

    def __init__(self, layer_name: str, layer: RoutedExperts, moe: Any):
        super().__init__(moe)
        _refuse(get_current_vllm_config(), layer, moe)
        found = re.search(r"\d+", layer_name)
        activation = _ACTIVATIONS.get(moe.activation.value)
        if activation == "silu" and layer.swiglu_limit is not None:
            activation = "swiglu_limit"
        names: List[str] = [activation] if activation else []
        self.experts = Layer(
            layer_name, int(found.group()) if found else None, moe.num_logical_experts, moe.hidden_dim,
            moe.intermediate_size, moe.experts_per_token, names, layer.apply_router_weight_on_input,
            moe.moe_parallel_config.tp_rank == 0, _numbers_of(moe, layer.swiglu_limit),
        )

    def create_weights(self, layer: RoutedExperts, *args: Any, **kwargs: Any) -> None:
        self.experts.hold_nothing(layer, _HELD)

    def maybe_roundup_sizes(self, hidden_size: int, inner: int, *args: Any) -> Tuple[int, int]:
        return hidden_size, inner

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def apply(
        self, layer: RoutedExperts, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Any:
        return self.experts(x, topk_ids, topk_weights)


def _get_quant_method(self: RoutedExperts, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
    return _Method(prefix, self, moe_config)


def _load_weights(self: RoutedExperts, weights: Iterable[Tuple[str, Any]]) -> Iterable[str]:
    for _ in weights:  # read by the loader one at a time, and dropped
        pass
    return ()


def register() -> None:
    """Has vLLM ask the service for routed experts. Its door for classes out of its tree (register_oot) has none for
    subclasses, which would compute experts of their own."""
    RoutedExperts._get_quant_method = _get_quant_method
    RoutedExperts.load_weights = _load_weights
