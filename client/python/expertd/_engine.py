# SPDX-License-Identifier: Apache-2.0
"""What adapters for engines share: the service that EXPERTD_URL and EXPERTD_OPTIONS name (_settings.py), and a layer of an
engine whose experts are there."""

from __future__ import annotations

import functools
import os
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch

from . import _client
from ._service import Service, check_layer
from ._settings import arguments


@functools.lru_cache(maxsize=None)
def _ready(pid: int) -> Tuple[Service, _client.Model]:
    """Once for the layers of a process."""
    made = Service(*arguments().values())  # they are in this order
    try:
        return made, made.wait_ready(True)
    except BaseException:
        made.close()
        raise


def refuse(reasons: Iterable[Tuple[Any, str, str]]) -> None:
    """ValueError for the first of (holds, what, what to do) that holds."""
    for wrong, what, instead in reasons:
        if wrong:
            raise ValueError(f"EXPERTD_URL is set, and {what}: {instead}, or unset EXPERTD_URL")


def _drop(*_: Any, **__: Any) -> bool:
    """For a loader: read, and dropped."""
    return True


class _Nothing(torch.nn.Parameter):
    """Without elements; what a loader gives it, or copies into it, is dropped."""

    weight_loader = staticmethod(_drop)

    def copy_(self, *_: Any, **__: Any) -> "_Nothing":
        return self


class Layer:
    """An engine's layer of experts on the service, checked to be the same there.

    name         in messages
    number       None: the name has none
    activations  names that the service may have for the engine's
    numbers      alpha, beta and limit of the activation, those that are known
    asks         False: this rank of tensor parallelism adds zeros, as another asks
    """

    def __init__(
        self, name: str, number: Optional[int], experts: int, hidden: int, inner: int, top_k: Optional[int],
        activations: List[str], weight_on_input: bool, asks: bool, numbers: Dict[str, float],
    ):
        self._service, served = _ready(os.getpid())
        there = [one for one in served.layers if one.layer == number]
        if not there:
            raise ValueError(
                f"{name}: model {served.name!r} of the service at {self._service.url} has experts in layers "
                f"{[one.layer for one in served.layers]}: is it another model?"
            )
        check_layer(name, served, there[0], experts, hidden, inner, top_k, activations, numbers)
        self._number, self._asks = number, asks
        self._options = {"weight_on": "input"} if weight_on_input else {}

    def hold_nothing(self, module: torch.nn.Module, names: Iterable[str] = ("weight",)) -> None:
        """Gives the module what loaders look for, of w13 and w2 each."""
        for name in names:
            for matrix in ("w13", "w2"):
                module.register_parameter(f"{matrix}_{name}", _Nothing(torch.empty(0), requires_grad=False))

    def __call__(self, x: Any, ids: Any, weights: Any) -> Any:
        """x [T,H], ids and weights [T,K]: [T,H] of x's type. The engine adds shared experts, and the ranks' results."""
        if not self._asks:
            return torch.zeros_like(x)
        return self._service.run(self._number, x, ids, weights, self._options)
