# SPDX-License-Identifier: Apache-2.0
"""Models of vLLM whose routed experts are on a service; all else, shared experts too, stays with vLLM.

    EXPERTD_URL=tcp://127.0.0.1:7410 vllm serve Qwen/Qwen3-30B-A3B --enforce-eager

vLLM finds this as a plugin (entry point expertd of vllm.general_plugins); without EXPERTD_URL it does nothing. Options
go into --additional-config '{"expertd": {...}}':

    model_name   as the service calls it; without: the only one there is
    version      of expertd.Model.version; without: the default of the model at start
    wait         seconds for the service to have loaded every expert, 600
    deadline     seconds of one call, a layer of all tokens of a batch, 60
    token_file   what the service knows this client by
    tls          {"ca_file": ..., "server_name": ..., "cert_key_file": ...}, for tls+tcp:// URLs

With tensor parallelism one rank asks and the others add zeros.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any, Dict, Iterable, List, Tuple

import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from . import _client
from ._service import Service, check_layer

__all__ = ["register"]

_logger = init_logger("vllm.expertd")
_OPTIONS = ("model_name", "version", "wait", "deadline", "token_file", "tls")
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


def _options_of(config: VllmConfig) -> Dict[str, Any]:
    given = config.additional_config
    options = given.get("expertd", {}) if isinstance(given, dict) else {}
    if not isinstance(options, dict):
        raise TypeError(f"additional-config: expertd is {options!r}: allowed is an object with {', '.join(_OPTIONS)}")
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"additional-config: expertd has {name!r}: allowed are {', '.join(_OPTIONS)}")
    return dict(options)


def _refuse(config: VllmConfig, moe: Any) -> None:
    """What would give wrong sums, or a call that a captured graph has no place for."""
    for wrong, what, instead in (
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
    ):
        if wrong:
            raise ValueError(f"EXPERTD_URL is set, and {what}: {instead}, or unset EXPERTD_URL")


@functools.lru_cache(maxsize=None)
def _connect(url: str, pid: int, options: Tuple[Tuple[str, Any], ...]) -> Tuple[Service, _client.Model]:
    """Once for the layers of a process."""
    given = dict(options)
    client: Dict[str, Any] = {}
    if "token_file" in given:
        with open(given["token_file"], encoding="utf-8") as file:
            client["token"] = file.read().strip()
    if "tls" in given:
        client["tls"] = _client.Tls(**dict(given["tls"]))
    wait, deadline = given.get("wait", 600.0), given.get("deadline", 60.0)
    service = Service(url, given.get("model_name"), given.get("version"), wait, deadline, client)
    try:
        _logger.info("EXPERTD_URL: waiting for the experts at %s", url)
        served = service.wait_ready(True)
    except BaseException:
        service.close()
        raise
    _logger.info("experts of %r (%s) are at %s", served.name, served.version, url)
    return service, served


class _Method(FusedMoEMethodBase):
    """Computes a layer by asking the service."""

    def __init__(self, url: str, layer_name: str, layer: RoutedExperts, moe: Any):
        super().__init__(moe)
        config = get_current_vllm_config()
        _refuse(config, moe)
        options = {k: tuple(v.items()) if isinstance(v, dict) else v for k, v in _options_of(config).items()}
        self.service, served = _connect(url, os.getpid(), tuple(sorted(options.items())))
        found = re.search(r"\d+", layer_name)
        there = [one for one in served.layers if found and one.layer == int(found.group())]
        if not there:
            raise ValueError(
                f"{layer_name}: model {served.name!r} of the service at {url} has experts in layers "
                f"{[one.layer for one in served.layers]}: is it another model?"
            )
        self.number = there[0].layer
        activation = _ACTIVATIONS.get(moe.activation.value)
        if activation == "silu" and layer.swiglu_limit is not None:
            activation = "swiglu_limit"
        names: List[str] = [activation] if activation else []
        check_layer(
            layer_name, served, there[0], moe.num_logical_experts, moe.hidden_dim, moe.intermediate_size,
            moe.experts_per_token, names,
        )
        self.options = {"weight_on": "input"} if layer.apply_router_weight_on_input else {}
        self.asks = moe.moe_parallel_config.tp_rank == 0

    def create_weights(self, layer: RoutedExperts, *args: Any, **kwargs: Any) -> None:
        """None: the tensors stay in the file."""

    def maybe_roundup_sizes(self, hidden_size: int, inner: int, *args: Any) -> Tuple[int, int]:
        return hidden_size, inner

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def apply(
        self, layer: RoutedExperts, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Any:
        """x [T,H], weights and ids [T,K]: [T,H]. vLLM adds shared experts, and the ranks' results."""
        if not self.asks:
            return torch.zeros_like(x)
        return self.service.run(self.number, x, topk_ids, topk_weights, self.options)


def register(url: str) -> None:
    """Has vLLM ask the service at url for routed experts; again in the same process: nothing more."""
    from vllm.model_executor.custom_op import op_registry_oot

    there = op_registry_oot.get("RoutedExperts")
    if there is not None:
        if there.__module__ != __name__:
            raise RuntimeError(f"EXPERTD_URL is set, and {there.__module__} has vLLM's routed experts: VLLM_PLUGINS chooses")
        return

    @RoutedExperts.register_oot(name="RoutedExperts")
    class ServedExperts(RoutedExperts):
        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
            return _Method(url, prefix, self, moe_config)

        def load_weights(self, weights: Iterable[Tuple[str, Any]]) -> Iterable[str]:
            for _ in weights:  # read by the loader one at a time, and dropped
                pass
            return ()
