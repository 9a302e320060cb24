# SPDX-License-Identifier: Apache-2.0
"""What the adapters for frameworks over torch share: where a model's experts are, the wait until all are served, one
layer's call, and the check that both sides mean the same layer."""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

import torch

from . import _client, _values, errors

_ROWS_MAX = 16384  # of one call: fewer than the service allows
_LOOK_SECONDS = 0.2  # between two looks at a service that still loads
_WIRE = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def check_layer(
    name: str,
    model: _client.Model,
    there: _client.Layer,
    experts: int,
    hidden: int,
    inner: int,
    top_k: Optional[int],
    activations: List[str],
    numbers: Optional[Dict[str, float]] = None,
) -> None:
    """Raises ValueError where the engine's layer is not the service's. top_k None: not known; activations: names that
    the service may have for the engine's; numbers: alpha, beta and limit of the activation, those that are known. A
    service of an older version tells none."""
    activation = there.activation
    if activation == "swiglu_step" and there.limit == 0 and "silu" in activations:
        activation = "silu"  # the same without a limit
    known = [(n, ctypes.c_float(v).value, getattr(there, n)) for n, v in (numbers or {}).items()]
    for what, ours, theirs in (
        ("experts", experts, there.experts),
        ("hidden size", hidden, there.hidden),
        ("inner size", inner, there.inner),
        ("top-k", top_k or there.top_k, there.top_k),
        ("activation", activation if activation in activations else activations, activation),
        *((f"the activation's {n}", ours, theirs) for n, ours, theirs in known if theirs is not None),
    ):
        if ours != theirs:
            raise ValueError(
                f"{name} (layer {there.layer}): {what} is {ours}, in model {model.name!r} of the service "
                f"{theirs}: allowed is the same; is it another model?"
            )


def _plain(tensor: Any) -> Any:
    """[rows, columns] in the host's memory, of no subclass."""
    tensor = tensor.detach().resolve_neg().reshape(-1, tensor.shape[-1]).cpu().contiguous()
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


def _bar(progress: bool, what: str) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        progress = False
    return tqdm(desc=what, unit="layer", leave=False) if progress else None


class Shared:
    """What copies of a model share."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a model with experts on a service is not pickled: load it there")


class Service(Shared):
    """Where a model's experts are; expertd.hf has it as model.expertd.

    client            the expertd.Client
    model_name, version  sent with each call: another version of the same name never answers
    seconds_to_ready  from the first try until every expert was served
    client.memory()   bytes of experts that each node holds
    """

    def __init__(
        self,
        experts: str,
        model_name: Optional[str],
        version: Optional[str],
        wait: float,
        deadline: float,
        options: Any,
    ):
        _values.microseconds("wait", wait)  # refused before a model is loaded
        self.url, self.model_name, self.version, self.wait = experts, model_name, version, wait
        self.client = _client.Client(experts, **{"wait": None, "deadline": deadline, **(options or {})})
        self._requests: Dict[Any, _client._Request] = {}  # one for each kind of call
        self.started, self.seconds_to_ready = time.monotonic(), float("nan")

    def run(self, layer: int, x: Any, ids: Any, weights: Any, options: Dict[str, Any]) -> Any:
        """Client.forward for tensors of any device and shape [..,H], [..,K], [..,K]: [..,H] of x's type, on x's device.
        Shared experts stay with the caller. options: of the layer, the same in each call."""
        if x.dtype not in _WIRE:
            allowed = ", ".join(map(str, _WIRE))
            raise TypeError(f"layer {layer}: x has type {x.dtype}: allowed are {allowed}: load with such a dtype=")
        if x.numel() == 0:
            return torch.empty_like(x)
        rows, ids, weights = _plain(x), _plain(ids), _plain(weights)
        weights = weights if weights.dtype in (torch.float32, torch.bfloat16) else weights.float()
        if rows.shape[0] <= _ROWS_MAX:
            y = self._run_part(layer, rows, ids, weights, options)
        else:
            parts = zip(*(t.split(_ROWS_MAX) for t in (rows, ids, weights)))
            y = torch.cat([self._run_part(layer, *part, options) for part in parts])
        return y if x.is_cpu and y.shape == x.shape else y.view(x.shape).to(x.device)

    def _run_part(self, layer: int, rows: Any, ids: Any, weights: Any, options: Dict[str, Any]) -> Any:
        kind = (layer, rows.dtype, rows.shape[1], ids.dtype, ids.shape[1], weights.dtype, weights.shape[1])
        known = self._requests.get(kind)
        if known is not None:
            return self.client._run(known.again(rows, ids, weights, torch.empty_like(rows)))
        request = _client._Request(
            self.model_name, layer, rows, ids, weights, None, version=self.version, shared_source="none",
            allow_duplicates=True, wire_dtype=_WIRE[rows.dtype], **options,
        )
        y = self.client._run(request)
        self._requests[kind] = request.let_go()
        return y

    def close(self) -> None:
        self.client.close()

    def _tell(self, bar: Any) -> None:
        """One line that stays: how long it took, and what each node holds."""
        held = self.client.memory()
        nodes = ", ".join(f"{node} {'-' if n is None else bar.format_sizeof(n, 'B')}" for node, n in held.items())
        bar.write(f"experts at {self.url}: ready after {self.seconds_to_ready:.1f} s; in memory: {nodes}", file=sys.stderr)

    def wait_ready(self, progress: bool) -> _client.Model:
        """Until each expert of the model is served, at most wait seconds; shows how many layers are. Errors: ValueError
        (no such model, or several and none named), errors.DeadlineExceeded with the last report."""
        bar = _bar(progress, f"experts at {self.url}")
        try:
            while True:
                served, last = self._look()
                whole = [layer for layer in served.layers if layer.copies_min > 0] if served else []
                if served and len(whole) == len(served.layers):
                    self.model_name, self.version = served.name, served.version
                    self.seconds_to_ready = time.monotonic() - self.started
                    if bar is not None:
                        self._tell(bar)
                    return served
                if bar is not None:
                    bar.total, bar.n = (len(served.layers), len(whole)) if served else (None, 0)
                    bar.set_postfix_str(last)  # why it waits
                if time.monotonic() - self.started > self.wait:
                    last = f"{len(whole)} of {len(served.layers)} layers are whole" if served else last
                    raise errors.DeadlineExceeded(f"{self.url}: waited {self.wait} s for the experts: {last}")
        finally:
            if bar is not None:
                bar.close()

    def _look(self) -> Tuple[Optional[_client.Model], str]:
        """The model after a moment, or None and why."""
        try:
            self.client.wait_ready(_LOOK_SECONDS)
        except errors.DeadlineExceeded as error:
            return None, error.args[0]  # without the code's name, which the last error has
        models = self.client.models()
        if not models:
            time.sleep(_LOOK_SECONDS)
            return None, "it serves no model"
        served = self._pick(models)
        if any(layer.copies_min == 0 for layer in served.layers):
            time.sleep(_LOOK_SECONDS)
        return served, ""

    def _pick(self, models: List[_client.Model]) -> _client.Model:
        named = [m for m in models if self.model_name in (None, m.name) and self.version in (None, m.version)]
        chosen = [m for m in named if m.is_default] if self.version is None and len(named) > 1 else named
        if len(chosen) == 1:
            return chosen[0]
        there = ", ".join(f"{m.name!r} ({m.version})" for m in models)
        if not chosen:
            raise ValueError(f"model_name is {self.model_name!r}, version {self.version!r}: {self.url} serves {there}")
        raise ValueError(f"model_name is None and {self.url} serves {there}: name one")
