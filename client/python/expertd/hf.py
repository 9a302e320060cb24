# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers whose experts are on a service; all else stays in this process.

    import expertd.hf
    model = expertd.hf.from_pretrained("Qwen/Qwen3-30B-A3B", experts="tcp://127.0.0.1:7410")
    model.generate(...)

Needs torch and transformers: pip install expertd[hf]. Modules of experts are made without parameters, so that the
loader leaves their tensors in the file. Router and shared experts stay with the model. For inference: a backward pass
is refused.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

try:
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, PreTrainedModel
except ImportError as error:
    raise ImportError(f"expertd.hf needs torch and transformers 5 ({error}): pip install expertd[hf]") from error

from . import _client
from ._service import Service, Shared, check_layer

__all__ = ["Service", "from_pretrained", "offload"]

_ELSEWHERE = re.compile("Vision|Visual|Audio|Talker")  # parts of multimodal models that no service has


# ---- which modules are experts, and how each is called ----


def _standard(module: Any, x: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """x [T,H], ids and weights [T,K]: the signature of most classes of experts."""
    return module.expertd_layer(x, top_k_index, top_k_weights)


def _dbrx(module: Any, x: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    return module.expertd_layer(x, top_k_index, top_k_weights).view(x.shape[0], -1, x.shape[-1])


def _llama4(module: Any, x: Any) -> Any:
    x = x.reshape(-1, module.hidden_dim)
    scores, logits = module.router(x)
    ids = logits.topk(module.top_k, dim=1).indices
    return module.shared_expert(x) + module.expertd_layer(x, ids, scores.gather(1, ids)), logits


def _jetmoe(module: Any, x: Any) -> Any:
    rows = x.reshape(-1, module.input_size)
    logits, ids = module.router.layer(rows).float().topk(module.router.top_k, dim=1)
    return module.expertd_layer(rows, ids, logits.softmax(dim=1).to(x.dtype)).view(x.shape) + module.bias


def _doge(module: Any, x: Any, **_: Any) -> Any:
    rows, keys = x.reshape(-1, module.hidden_size), module.num_keys
    logits = module.router_gate(x).view(2, rows.shape[0], -1)
    (scores_x, scores_y), (ids_x, ids_y) = logits.topk(keys, dim=-1)
    scores = (scores_x.unsqueeze(-1) + scores_y.unsqueeze(-2)).flatten(-2)
    ids = (ids_x.unsqueeze(-1) * keys + ids_y.unsqueeze(-2)).flatten(-2)
    scores, places = scores.topk(module.top_k, dim=-1)
    weights = scores.softmax(dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True) if module.norm_topk_prob else weights
    routed = module.expertd_layer(rows, ids.gather(-1, places), weights).view(x.shape)
    return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x)) + routed, logits


def _nllb(module: Any, x: Any, router_mask: Any, router_probs: Any) -> Any:
    """Transformers takes the mask's values for ids, and so does this."""
    if module.training:
        raise RuntimeError("NllbMoeExperts drops tokens in training: experts of a service are for model.eval()")
    ids = router_mask.long().masked_fill(router_probs == 0, -1)
    return module.expertd_layer(x, ids, router_probs * (1 - module.moe_token_dropout))


def _switch(module: Any, x: Any) -> Any:
    """What the router selects is one-hot, or all 0 beyond the expert's capacity."""
    selected, weights, _ = module.router(x)
    ids = selected.argmax(-1, keepdim=True).masked_fill(selected.sum(-1, keepdim=True) == 0, -1)
    rows = x.reshape(-1, x.shape[-1])
    return module.expertd_layer(rows, ids.view(-1, 1), weights.view(-1, 1)).view(x.shape)


@dataclass(frozen=True)
class _Kind:
    """A class of modules with experts: (E, H, I), the activation (gate, up) -> h, what to drop, the forward."""

    shape: Callable[[Any], Tuple[int, int, int]]
    activation: Callable[[Any], Callable[[Any, Any], Any]]
    drop: Tuple[str, ...]
    forward: Callable[..., Any] = _standard
    options: Callable[[Any], Dict[str, Any]] = lambda module: {}


def _part(module: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), module)


def _gated(path: str) -> Callable[[Any], Callable[[Any, Any], Any]]:
    return lambda module: lambda gate, up: _part(module, path)(gate) * up


def _ungated(path: str) -> Callable[[Any], Callable[[Any, Any], Any]]:
    return lambda module: lambda gate, up: _part(module, path)(up)


def _of_decorated(module: Any) -> Callable[[Any, Any], Any]:
    if not module.has_gate:
        return lambda gate, up: module.act_fn(up)
    join = torch.cat if module.is_concatenated else lambda pair, dim: torch.stack(pair, dim).flatten()
    return lambda gate, up: module._apply_gate(join((gate, up), -1))


def _down(module: Any) -> Tuple[int, int, int]:
    e, rows, columns = module.down_proj.shape
    return (e, columns, rows) if getattr(module, "is_transposed", False) else (e, rows, columns)


_DECORATED = _Kind(_down, _of_decorated, ("*",))
_KINDS = {
    "DbrxExperts": _Kind(
        lambda m: (m.num_experts, m.hidden_size, m.ffn_hidden_size),
        _gated("mlp.activation_fn"),
        ("mlp.w1", "mlp.v1", "mlp.w2"),
        _dbrx,
    ),
    "DogeCDMoE": _Kind(
        lambda m: (m.num_experts, m.hidden_size, 1), _ungated("act_fn"), ("down_embed", "up_embed"), _doge
    ),
    "JetMoeMoE": _Kind(
        lambda m: (m.router.num_experts, m.input_size, m.hidden_size),
        _gated("activation"),
        ("input_linear", "output_linear"),
        _jetmoe,
    ),
    "Llama4TextMoe": _Kind(
        lambda m: (m.num_experts, m.hidden_dim, m.experts.expert_dim),
        _gated("experts.act_fn"),
        ("experts.gate_up_proj", "experts.down_proj"),
        _llama4,
        lambda m: {"weight_on": "input"},
    ),
    "LongcatFlashExperts": _Kind(
        _down, _gated("act_fn"), ("*",), options=lambda m: {"copy_experts": m.zero_expert_num}
    ),
    "NllbMoeExperts": _Kind(
        lambda m: (m.num_experts, m.expert_0.fc1.in_features, m.expert_0.fc1.out_features),
        _ungated("expert_0.act"),
        ("expert_*",),
        _nllb,
    ),
    "Step3p7Experts": _Kind(_down, lambda m: lambda gate, up: m._apply_gate(torch.cat((gate, up), -1)), ("*",)),
    "SwitchTransformersSparseMLP": _Kind(
        lambda m: (m.router.num_experts, m.experts.expert_0.wi.in_features, m.experts.expert_0.wi.out_features),
        _ungated("experts.expert_0.act"),
        ("experts",),
        _switch,
    ),
}


def _kind_of(module: Any) -> Optional[_Kind]:
    """None: no experts, or none that a service has."""
    name, config = type(module).__name__, type(getattr(module, "config", None)).__name__
    if _ELSEWHERE.search(name) or _ELSEWHERE.search(config):
        return None
    if "_is_expert_parallel" in vars(module):  # what use_experts_implementation of transformers leaves
        if getattr(module, "has_post_expert_norm", False):  # transformers before 5.23 has no such models
            raise ValueError(f"{name} norms an expert's row before it is weighed: no service computes that")
        return _DECORATED
    return _KINDS.get(name)


# ---- one layer ----

_keys = itertools.count(1)
_layers: "weakref.WeakValueDictionary[int, _Layer]" = weakref.WeakValueDictionary()


class _Layer(Shared):
    """An MoE layer whose weights are on the service. Called with x [T,H] bf16, f16 or f32, ids [T,K] and weights [T,K]
    it gives [T,H] of x's type, on x's device."""

    def __init__(self, module: Any, kind: _Kind):
        self.name = type(module).__name__
        self.experts, self.hidden, self.inner = kind.shape(module)
        self.options = kind.options(module)
        activation = kind.activation(module)
        self.formula, self.numbers = _formula_of(activation, module), _numbers_of(module)
        with torch.device("cpu"), torch.no_grad():
            self.wide = activation(*_wide())
        self.service: Optional[Service] = None
        self.number = -1
        self.key = next(_keys)
        _layers[self.key] = self

    def __call__(self, x: Any, ids: Any, weights: Any) -> Any:
        wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
        if wants_gradient or torch.compiler.is_compiling():
            return _experts(x, ids, weights, self.key)
        return _run(self, x, ids, weights)


def _run(layer: _Layer, x: Any, ids: Any, weights: Any) -> Any:
    if layer.service is None:
        raise RuntimeError(f"{layer.name}: its experts are on no service: expertd.hf.offload(model, url) names one")
    return layer.service.run(layer.number, x, ids, weights, layer.options)


@torch.library.custom_op("expertd::experts", mutates_args=())
def _experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, key: int) -> torch.Tensor:
    return _run(_layers[key], x, ids, weights)


@_experts.register_fake
def _(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, key: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _refuse_backward(context: Any, gradient: Any) -> Any:
    raise RuntimeError(
        "experts on a service have no gradients: run the model under torch.no_grad(), or train it with its experts "
        "in process"
    )


_experts.register_autograd(_refuse_backward)


def _drop(module: Any, name: str) -> None:
    """A parameter or submodule; with "*" at the end all that begin so, "*" alone: all parameters."""
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    for store in (owner._parameters, {} if last == "*" else owner._modules):
        for found in [key for key in store if key == last or (last.endswith("*") and key.startswith(last[:-1]))]:
            del store[found]


def _strip(module: Any, kind: _Kind, layer: _Layer) -> None:
    """Makes it a module without experts that calls the layer."""
    for name in kind.drop:
        _drop(module, name)
    for part in (module, *module.children()):
        if part is module or not any(True for _ in part.parameters()):
            part._is_hf_initialized = True  # else the loader gives values to what is dropped
    module.expertd_layer = layer
    module.forward = types.MethodType(kind.forward, module)  # whatever experts_implementation says


# ---- what both sides must agree on ----


def _numbers_of(module: Any) -> Tuple[float, float, float]:
    """alpha, beta and limit of the activation, under the names that transformers has for them."""
    config = getattr(module, "config", None)
    situ = getattr(config, "mlp_gate_softcap", None), getattr(config, "mlp_up_softcap", None)
    alpha, beta = situ if all(situ) else (getattr(module, "alpha", getattr(module, "swiglu_alpha", None)), None)
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    return 1.702 if alpha is None else alpha, 1.0 if beta is None else beta, float("inf") if limit is None else limit


def _wide() -> Tuple[Any, Any]:
    """(gate, up) of every size, which show what a limit cuts off."""
    sizes = 2.0 ** torch.arange(-2, 11, dtype=torch.float32)
    values = torch.cat((-sizes, sizes))
    return values.repeat(len(values)), values.repeat_interleave(len(values))


def _formulas(gate: Any, up: Any, alpha: float, beta: float, limit: float) -> Dict[str, Any]:
    """h of each activation that a service names."""
    low, near = gate.clamp(max=limit), up.clamp(-limit, limit)
    found = {
        "silu": F.silu(gate) * up,
        "gelu": F.gelu(gate) * up,
        "gelu_tanh": F.gelu(gate, approximate="tanh") * up,
        "swiglu_oai": low * torch.sigmoid(alpha * low) * (near + beta),
        "swiglu_limit": F.silu(low) * near,
        "swiglu_step": F.silu(gate).clamp(max=limit) * near,
        "silu_no_gate": F.silu(up),
        "gelu_no_gate": F.gelu(up),
        "gelu_tanh_no_gate": F.gelu(up, approximate="tanh"),
        "relu_no_gate": F.relu(up),
        "relu2_no_gate": F.relu(up).square(),
    }
    if alpha and beta:
        found["situ"] = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * (beta * torch.tanh(up / beta))
    return found


def _formula_of(activation: Callable[[Any, Any], Any], module: Any) -> List[str]:
    """Names of the service's activations that give what the module's gives."""
    with torch.device("cpu"), torch.no_grad():
        gate, up = torch.linspace(-6, 6, 31), torch.linspace(5, -4, 31)
        h = activation(gate, up)
        numbers = _numbers_of(module)
        known = _formulas(gate, up, *numbers)
        same = [name for name, values in known.items() if torch.allclose(h, values, rtol=1e-4, atol=1e-4)]
        return [name for name in same if name != "swiglu_limit" or numbers[2] < float("inf")]


def _check_numbers(path: str, served: _client.Model, there: _client.Layer, layer: _Layer) -> None:
    """By what the activation gives: transformers has several names for its numbers."""
    if there.alpha is None or there.beta is None or there.limit is None:
        return  # of an older version
    with torch.device("cpu"), torch.no_grad():
        h = _formulas(*_wide(), there.alpha, there.beta, there.limit or float("inf")).get(there.activation)
        if h is not None and torch.allclose(layer.wide, h, rtol=1e-3, atol=1e-2):
            return
    ours = "alpha {:g}, beta {:g}, limit {:g}".format(*layer.numbers)
    raise ValueError(
        f"{path} (layer {there.layer}): the activation gives other values than {there.activation} of the service: it has {ours}, in model {served.name!r} of the service alpha "
        f"{there.alpha:g}, beta {there.beta:g}, limit {there.limit or float('inf'):g}: allowed are the same; is it another model?"
    )


def _top_k_of(model: Any, path: str, module: Any) -> Optional[int]:
    parent = model.get_submodule(path.rpartition(".")[0])
    for owner in (module, parent):
        for part in (owner, getattr(owner, "gate", None), getattr(owner, "router", None)):
            top_k = getattr(part, "top_k", None)
            if isinstance(top_k, int):
                return top_k
    return None


def _number_of(model: Any, path: str) -> int:
    """The service's number of a layer: the first in the module's path; a decoder's come after the encoder's."""
    found = re.search(r"\d+", path)
    if found is None:
        raise ValueError(f"{path}: no layer number in the module's path")
    config, number = model.config, int(found.group())
    if config.is_encoder_decoder and "decoder" in path.split("."):
        number += config.encoder_layers if hasattr(config, "encoder_layers") else config.num_layers
    return number


def _refuse_split(given: Dict[str, Any]) -> None:
    """Ranks of transformers add up their outputs of a layer of experts, and each has the whole sum from the service."""
    for name in ("distributed_config", "tp_plan", "tp_size", "device_mesh"):
        if given.get(name) is not None:
            raise ValueError(
                f"{name} is given: allowed is None, as ranks would add up the service's sums: load the whole "
                "model in each process, or spread it with device_map"
            )


def _check(model: Any, served: _client.Model, found: List[Tuple[str, Any, _Layer]]) -> None:
    """Refuses what the service serves otherwise, by name."""
    by_number = {layer.layer: layer for layer in served.layers}
    numbers = {path: _number_of(model, path) for path, _, _ in found}
    here = sorted(numbers.values())  # one twice: the service has the experts of one of the two
    if here != sorted(by_number):
        raise ValueError(
            f"{type(model).__name__} has experts in layers {here}, model {served.name!r} of the service in "
            f"{sorted(by_number)}: allowed are the same; is it another model?"
        )
    for path, module, layer in found:
        there, top_k = by_number[numbers[path]], _top_k_of(model, path, module)
        check_layer(path, served, there, layer.experts, layer.hidden, layer.inner, top_k, layer.formula)
        _check_numbers(path, served, there, layer)


def layers_of(model: Any) -> List[_Layer]:
    """Those of a model that are on a service: each has number, experts, hidden, inner."""
    return [vars(module)["expertd_layer"] for module in model.modules() if "expertd_layer" in vars(module)]


# ---- what users call ----


def _connect(model: Any, service: Service, found: List[Tuple[str, Any, _Layer]], progress: bool) -> None:
    served = service.wait_ready(progress)
    _check(model, served, found)
    for path, module, layer in found:
        layer.number, layer.service = _number_of(model, path), service


def offload(
    model: PreTrainedModel,
    experts: str,
    *,
    model_name: Optional[str] = None,
    version: Optional[str] = None,
    wait: float = 600.0,
    deadline: float = 60.0,
    progress: bool = True,
    client: Optional[Dict[str, Any]] = None,
) -> PreTrainedModel:
    """Drops the experts of a model that is loaded and has the service compute them; returns the model.

    experts     URL of the coordinator
    model_name  as the service calls it; None: the only one there is
    version     of expertd.Model.version; None: the default of the model when this is called
    wait        seconds for the service to have loaded every expert; progress shows it (tqdm)
    deadline    seconds of one call: a layer, at most 16384 tokens
    client      further arguments of expertd.Client: {"token": ..., "tls": ...}

    Layer numbers, E, H, I, top-k and activation must be the service's, else ValueError names what differs, and the
    model is as it was. Rows travel in the type of the model: bf16, f16 or f32. Errors of the service are those of
    expertd.Client.forward; Ctrl-C ends a call. save_pretrained writes the model without experts.
    """
    _refuse_split(vars(model.config))
    found = []
    for path, module in model.named_modules():
        kind = _kind_of(module)
        if kind is not None and "expertd_layer" not in vars(module):
            found.append((path, module, _Layer(module, kind)))
    if layers_of(model):
        raise ValueError(f"{type(model).__name__} has its experts on a service already: load it again for another")
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts that expertd.hf knows")
    service = Service(experts, model_name, version, wait, deadline, client)
    try:
        _connect(model, service, found, progress)
    except BaseException:
        service.close()
        raise
    for _, module, layer in found:
        _strip(module, _kind_of(module), layer)
    model.expertd = service
    return model


class _Stripping:
    """with _Stripping(): experts that this thread makes have no parameters, and the loader does not wonder that the
    checkpoint has them."""

    def __enter__(self) -> "_Stripping":
        self.thread, self.ignored = threading.get_ident(), {r"(^|\.)experts\."}
        self.handle = torch.nn.modules.module.register_module_module_registration_hook(self.see)
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()

    def see(self, parent: Any, name: str, module: Any) -> None:
        if threading.get_ident() != self.thread or module is None:
            return
        kind = _kind_of(module)
        if kind is not None and "expertd_layer" not in vars(module):
            _strip(module, kind, _Layer(module, kind))
            self.ignored |= {rf"\.{re.escape(name)}\." for name in kind.drop if "*" not in name}
        if isinstance(parent, PreTrainedModel):
            parent._keys_to_ignore_on_load_unexpected = self.ignored | set(
                parent._keys_to_ignore_on_load_unexpected or ()
            )


def from_pretrained(
    path: str,
    experts: str,
    *,
    model_class: Any = AutoModelForCausalLM,
    model_name: Optional[str] = None,
    version: Optional[str] = None,
    wait: float = 600.0,
    deadline: float = 60.0,
    progress: bool = True,
    client: Optional[Dict[str, Any]] = None,
    **options: Any,
) -> PreTrainedModel:
    """A model of transformers without its experts, which the service has: they are neither read nor held here.

    path         as for transformers: a folder, or a name of the hub
    model_class  of transformers, for models that are more than AutoModelForCausalLM
    options      further arguments of its from_pretrained: dtype, device_map, revision...

    All others, and errors, as offload has them. The checkpoint here may lack the experts' tensors.
    """
    _refuse_split(options)
    wants_info = options.pop("output_loading_info", False)
    service = Service(experts, model_name, version, wait, deadline, client)
    try:
        service._look()  # a wrong name is told before the model is loaded
        with _Stripping():
            model, info = model_class.from_pretrained(path, output_loading_info=True, **options)
        found = [(p, m, vars(m)["expertd_layer"]) for p, m in model.named_modules() if "expertd_layer" in vars(m)]
        if not found:
            raise ValueError(f"{type(model).__name__} has no experts that expertd.hf knows")
        _connect(model, service, found, progress)
    except BaseException:
        service.close()
        raise
    model.expertd = service
    return (model, info) if wants_info else model
