# SPDX-License-Identifier: Apache-2.0
"""Models of SGLang whose routed experts are on a service; all else, shared experts too, stays with SGLang.

    EXPERTD_URL=tcp://127.0.0.1:7410 python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --disable-cuda-graph

SGLang finds this as a plugin (entry point expertd of sglang.srt.plugins); without EXPERTD_URL it does nothing. Options
are in EXPERTD_OPTIONS (expertd/_settings.py). With tensor parallelism one rank asks and the others add zeros.
"""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, Tuple

from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec, get_flags, get_lora, get_parallel
from sglang.srt.utils import is_cpu, is_cuda

from ._engine import Layer, refuse

__all__ = ["register"]

_INIT = inspect.signature(FusedMoE.__init__)
_UNGATED = {"silu": "silu_no_gate", "gelu": "gelu_no_gate", "relu2": "relu2_no_gate"}


def _activations_of(given: Dict[str, Any]) -> List[str]:
    """The service's names for what SGLang would compute; it says gelu for both forms of it."""
    name, alpha, clamp = given["activation"], given["gemm1_alpha"], given["gemm1_clamp_limit"]
    if not given["is_gated"]:
        return [_UNGATED[name]] if name in _UNGATED else []
    if name == "silu" and alpha is not None:
        return ["swiglu_oai"]
    if name == "silu" and clamp is not None:
        return ["swiglu_step"]
    if name == "silu" and given["swiglu_limit"] is not None:
        return ["swiglu_limit"]
    return {"silu": ["silu"], "gelu": ["gelu", "gelu_tanh"], "situ": ["situ"]}.get(name, [])


def _numbers_of(given: Dict[str, Any]) -> Dict[str, float]:
    """What SGLang computes with for the service's alpha, beta and limit."""
    alpha, clamp = given["gemm1_alpha"], given["gemm1_clamp_limit"]
    if given["activation"] == "situ":
        beta, limit = clamp, None
    else:
        beta, limit = None if alpha is None else 1.0, given["swiglu_limit"] if clamp is None else clamp
    return {name: v for name, v in (("alpha", alpha), ("beta", beta), ("limit", limit)) if v is not None}


def _refuse(given: Dict[str, Any]) -> None:
    """What would give wrong sums, or a call that a captured graph has no place for."""
    ranks, execution, graph = get_parallel(), get_exec().moe, get_exec().graph.cuda_graph_config
    graphs = [] if graph is None else [graph.decode.backend, graph.prefill.backend]
    refuse(
        (
            (not is_cpu() and not is_cuda(), "this device is neither a CPU nor CUDA's", "use one of these"),
            (
                any(one != Backend.DISABLED for one in graphs),
                "CUDA graphs cannot hold a call to a service",
                "give --disable-cuda-graph",
            ),
            (
                ranks.moe_ep_size > 1 or not get_moe_a2a_backend().is_none(),
                "the service spreads experts",
                "leave out --ep-size and --moe-a2a-backend",
            ),
            (
                ranks.attn_dp_size > 1 or ranks.moe_dp_size > 1,
                "ranks of data parallelism exchange tokens",
                "leave out --attn-dp-size and --moe-dp-size",
            ),
            (
                given["num_fused_shared_experts"] > 0,
                "shared experts are fused with those of the service",
                "give --disable-shared-experts-fusion",
            ),
            (get_lora().enable_lora or get_lora().lora_paths, "LoRA wants experts' weights", "leave out --lora-paths"),
            (execution.enable_eplb, "the service has copies of experts itself", "leave out --enable-eplb"),
            (execution.enable_paged_experts, "no experts are paged", "leave out --enable-paged-experts"),
            (execution.kt_weight_path, "experts cannot be at KTransformers too", "leave out --kt-weight-path"),
            (
                get_flags().moe.in_speculative_scope,
                "a draft model has experts, which the service may not have",
                "leave out --speculative-algorithm",
            ),
            (given["quant_config"] is not None, "quantised checkpoints are untried", "serve one in bf16, f16 or f32"),
            (given["no_combine"], "this model wants rows of each expert", "serve a model of another class"),
            (given["quant_method"] is not None, "this model brings experts of its own", "serve one of another class"),
        )
    )


class _Method(FusedMoEMethodBase):
    """Computes a layer by asking the service."""

    def __init__(self, given: Dict[str, Any]):
        _refuse(given)
        self.experts = Layer(
            given["prefix"], given["layer_id"], given["num_experts"], given["hidden_size"], given["intermediate_size"],
            given["top_k"], _activations_of(given), given["apply_router_weight_on_input"],
            get_parallel().moe_tp_rank == 0, _numbers_of(given),
        )
        self.factor = given["routed_scaling_factor"] if is_cuda() else None  # elsewhere the models multiply

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        self.experts.hold_nothing(layer)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        pass

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        weights, ids, _ = dispatch_output.topk_output
        y = self.experts(dispatch_output.hidden_states, ids, weights)
        if self.factor is not None and not layer.should_fuse_routed_scaling_factor_in_topk:
            y *= self.factor
        return StandardCombineInput(hidden_states=y)


def _before_init(*args: Any, **kwargs: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    bound = _INIT.bind(*args, **kwargs)
    bound.apply_defaults()
    if not args[0].is_shared_fused_moe:
        bound.arguments["quant_method"] = _Method(bound.arguments)
    return bound.args, bound.kwargs


def register() -> None:
    """Has SGLang ask the service for routed experts."""
    HookRegistry.register(
        f"{FusedMoE.__module__}.{FusedMoE.__qualname__}.__init__", _before_init, HookType.BEFORE
    )
