# SPDX-License-Identifier: Apache-2.0
"""Client, its calls, and what it tells."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import itertools
import os
import threading
import time
import weakref
from ctypes import byref, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import _c, _tensors, _values, errors
from ._c import lib
from ._gate import Gate
from ._values import Tls

_SLICE_US = 50_000  # waits in the main thread are cut into such, so that Ctrl-C is seen
_WORDS = {
    "mode": "EP_MOE_MODE",
    "result": "EP_MOE_RESULT",
    "weight_on": "EP_MOE_WEIGHT_ON_",
    "shared_source": "EP_MOE_SHARED_",
    "nan_policy": "EP_MOE_NAN_",
    "rows_nan_policy": "EP_MOE_NAN_",
    "const_rule": "EP_MOE_CONST_",
    "comm_alg": "EP_MOE_COMM_",
    "combine_at": "EP_MOE_COMBINE_AT",
    "dispatch_quant": "EP_MOE_DISPATCH_",
    "combine_quant": "EP_MOE_COMBINE_QUANT",
}
_TENSORS = (
    "x_scales",
    "active_mask",
    "partial_slots",
    "shared",
    "const_alpha1",
    "const_alpha2",
    "const_v",
    "smooth_scales",
)
_INTEGERS = {"zero_experts": 32, "copy_experts": 32, "const_experts": 32, "step_group": 64, "step_group_size": 32}
_BOOLS = ("allow_duplicates", "allow_missing", "want_timing")


@dataclass(frozen=True)
class Layer:
    layer: int
    hidden: int
    inner: int
    experts: int
    shared_experts: int
    top_k: int
    copies_min: int  # copies of the expert that has fewest
    activation: str
    # None: nodes of an older version do not tell
    shared_inner: Optional[int]  # of the shared experts together; 0: none
    alpha: Optional[float]  # numbers of the activation, 0 where it has none; a limit of 0 is none
    beta: Optional[float]
    limit: Optional[float]


@dataclass(frozen=True)
class Model:
    """version is a digest of the config (sizes, activation and its numbers, shared width) and of the weights' identity:
    equal versions, the same model; expertctl model show --checkpoint PATH prints a checkpoint's. numerics: "" until one
    is pinned."""

    name: str
    version: str
    numerics: str
    is_default: bool
    layers: Tuple[Layer, ...]


@dataclass(frozen=True)
class Node:
    """Waits for one node in calls with want_timing, microseconds."""

    node: str
    frames: int
    wait_us: int
    wire_us: int
    queue_us: int
    compute_us: int
    wait_max_us: int


@dataclass(frozen=True)
class Stats:
    """Counters since the client was made."""

    calls: int
    calls_failed: int
    frames_sent: int
    frames_rerouted: int
    late_replies: int
    nonfinite_rows: int
    bytes_sent: int
    bytes_received: int
    buffer_bytes_lent: int
    buffer_allocations: int
    hedged_frames: int
    buffer_bytes_peak: int


@dataclass(frozen=True)
class Health:
    """ready: a routing table is there and each model's every expert has a copy. epoch: (term, number) of the table."""

    ready: bool
    epoch: Optional[Tuple[int, int]]
    models: Tuple[Model, ...]
    nodes: Tuple[Node, ...]
    stats: Stats


@dataclass(frozen=True)
class Result:
    """What a call tells beside its rows; times in microseconds. missing_slots: t * K + k of each. comm_why: why
    comm_alg="auto" took the way it took ("measured": by fullmesh_us and hierarchy_us, 0 where not known)."""

    mode: str
    nodes: int
    frames: int
    rerouted_frames: int
    hedged_frames: int
    missing_slots: Tuple[int, ...]
    epoch_term: int
    epoch_number: int
    bytes_sent: int
    bytes_received: int
    numerics: str
    comm_alg: str
    comm_why: str
    fullmesh_us: int
    hierarchy_us: int
    combine_at: str
    tokens_delivered: int
    total_us: int
    pack_us: int
    wire_us: int
    queue_us: int
    compute_us: int
    combine_us: int


class _Request:
    """The C side of one call, and all that must outlive it."""

    gaps = _tensors.COPIED

    def __init__(
        self,
        model: str,
        layer: int,
        x: Any,
        expert_ids: Any,
        expert_scales: Any,
        out: Any,
        *,
        dtype: Optional[str] = None,
        out_dtype: Optional[str] = None,
        version: Optional[str] = None,
        deadline: Optional[float] = None,
        wire_dtype: Optional[str] = None,
        x_abs_max: float = 0.0,
        traceparent: Optional[str] = None,
        tenant: Optional[str] = None,
        with_result: bool = False,
        on_tokens: Optional[Callable[[int, int], Any]] = None,
        **more: Any,
    ):
        if dtype not in (None, "bf16"):
            raise ValueError(f"dtype is {dtype!r}: allowed are None and 'bf16', what elements of uint16 are")
        if out_dtype not in (None, "bf16", "f16", "f32"):
            raise ValueError(f"out_dtype is {out_dtype!r}: allowed are None (x's), 'bf16', 'f16', 'f32'")
        if wire_dtype is not None:
            _values.word("wire_dtype", wire_dtype, {"bf16": 1, "f16": 2, "f32": 3})
        self.args, self.with_result = _c.MoeArgs(), _values.boolean("with_result", with_result)
        self.keep: List[Any] = []
        a = self.args
        lib.ep_moe_args_init_sized(byref(a), ctypes.sizeof(a))
        if model is None:
            raise TypeError("model is None: allowed is a string")
        a.model, a.version = _values.text("model", model), _values.text("version", version)
        a.layer = _values.integer("layer", layer, 32)
        a.traceparent, a.tenant = _values.text("traceparent", traceparent), _values.text("tenant", tenant)
        a.deadline_us = 0 if deadline is None else _values.microseconds("deadline", deadline)
        a.wire_dtype, a.x_abs_max = _tensors.DTYPES[wire_dtype or "none"], _values.number("x_abs_max", x_abs_max)
        given = self._set("x", x, dtype)
        if len(given.shape) != 2:
            raise ValueError(f"x has rank {len(given.shape)}: allowed is 2, [T,H]")
        dtype = "bf16" if given.dtype == "bf16" else dtype  # elements of uint16 are then that
        self.slots = self._take_routing(given.shape[0], expert_ids, expert_scales, dtype)
        self._take_options(more, dtype)
        self.tokens_error: Optional[BaseException] = None
        if on_tokens is not None:
            if not callable(on_tokens):
                raise TypeError(f"on_tokens is a {type(on_tokens).__name__}: allowed is a function of (first, count)")
            a.on_tokens = self._tokens_to(on_tokens)
        self.missing = None
        if a.allow_missing:
            if not with_result:
                raise ValueError("allow_missing without with_result: only the Result tells missing rows from zeros")
            self.missing = (c_uint32 * (given.shape[0] * self.slots))()
            a.missing_slots, a.missing_slots_max = self.missing, len(self.missing)
        self.out = self._new_out(x, given, out_dtype, dtype) if out is None else out
        view = _tensors.view("out", self.out, dtype, writable=True)
        self.out_tensor = view.tensor
        self.keep.append(view.keep)
        if out_dtype is not None and view.dtype != out_dtype:
            raise ValueError(
                f"out has type {view.dtype} and out_dtype is {out_dtype}: allowed is one of both, or the same"
            )

    def let_go(self) -> "_Request":
        """Of its tensors: it is good for again only."""
        self.keep, self.out = [], None
        return self

    def again(self, x: Any, expert_ids: Any, expert_scales: Any, out: Any) -> "_Request":
        """The same call with other tensors of PyTorch's, contiguous and in the host's memory, which differ from this one's
        in T alone. Right after experts' weights went through the caches Python is slow, so this makes few steps."""
        other = object.__new__(_Request)
        other.args, other.keep = _c.MoeArgs.from_buffer_copy(self.args), [self, x, expert_ids, expert_scales]
        other.out, other.out_tensor = out, _c.Tensor.from_buffer_copy(self.out_tensor)
        other.with_result, other.missing, other.tokens_error = self.with_result, None, None
        a = other.args
        for tensor, array in (
            (a.x, x), (a.expert_ids, expert_ids), (a.expert_scales, expert_scales), (other.out_tensor, out)
        ):
            tensor.data, tensor.shape[0] = array.data_ptr(), array.shape[0]
        return other

    def begin(self, client: Any, number: int, out_call: Any, out_error: Any) -> int:
        return lib.ep_moe_forward_async(
            client, byref(self.args), byref(self.out_tensor), _on_done_c, number, byref(out_call), byref(out_error)
        )

    def _take_routing(self, tokens: int, expert_ids: Any, expert_scales: Any, dtype: Optional[str]) -> int:
        """K."""
        shape = self._set("expert_ids", expert_ids, None).shape
        self._set("expert_scales", expert_scales, dtype)
        return shape[1] if len(shape) == 2 else 0  # which the library refuses

    def _take_options(self, more: Dict[str, Any], dtype: Optional[str]) -> None:
        for name, value in more.items():
            if name in _TENSORS:
                if value is not None:
                    self._set(name, value, dtype)
            elif name in _WORDS:
                setattr(self.args, name, _values.word(name, value, _c.ENUMS[_WORDS[name]]))
            elif name in _INTEGERS:
                setattr(self.args, name, _values.integer(name, value, _INTEGERS[name]))
            elif name in _BOOLS:
                setattr(self.args, name, _values.boolean(name, value))
            else:
                raise TypeError(
                    f"there is no argument {name!r}: allowed are those that Client.forward names, and "
                    + ", ".join(sorted([*_TENSORS, *_WORDS, *_INTEGERS, *_BOOLS]))
                )

    def _new_out(self, x: Any, given: _tensors.View, out_dtype: Optional[str], dtype: Optional[str]) -> Any:
        shape = given.shape
        if self.args.result == _c.ENUMS["EP_MOE_RESULT"]["uncombined"]:
            shape = (shape[0], self.slots, shape[1])
        kind = out_dtype or (given.dtype if given.dtype in ("bf16", "f16", "f32") else "f32")
        return _tensors.empty_like(x, shape, kind)

    def _set(self, name: str, array: Any, dtype: Optional[str]) -> _tensors.View:
        view = _tensors.view(name, array, dtype, gaps=self.gaps)
        setattr(self.args, name, view.tensor)
        self.keep.append(view.keep)
        return view

    def _tokens_to(self, function: Callable[[int, int], Any]) -> Any:
        def tell(_arg: Any, call: Any, first: int, count: int) -> None:
            before, _of_library.thread = getattr(_of_library, "thread", False), True
            try:
                function(first, count)
            except BaseException as error:
                self.tokens_error = error
                lib.ep_call_cancel(call)
            finally:
                _of_library.thread = before

        return _c.Tokens(tell)

    def answer(self, c: Any, error: Optional[BaseException]) -> Any:
        """error: tokens_error of the same run."""
        if error is not None:
            raise error
        if c.error.code != 0:
            raise errors.from_c(c.error)
        if not self.with_result:
            return self.out
        missing = tuple(self.missing[: c.missing_count]) if self.missing is not None else ()
        return self.out, _values.plain(
            Result,
            c,
            mode=_values.name_of("EP_MOE_MODE", c.mode),
            comm_alg=_values.name_of("EP_MOE_COMM_", c.comm_alg),
            comm_why=_values.name_of("EP_MOE_COMM_WHY_", c.comm_why),
            combine_at=_values.name_of("EP_MOE_COMBINE_AT", c.combine_at),
            missing_slots=missing,
        )


class _FixedRequest(_Request):
    """One whose tensors the caller refills."""

    gaps = _tensors.REFUSED


class _LogitsRequest(_Request):
    """One whose ids and scales a gate makes of logits."""

    def begin(self, client: Any, number: int, out_call: Any, out_error: Any) -> int:
        return lib.ep_moe_forward_logits_async(
            client, byref(self.args), byref(self._gate), byref(self._logits), byref(self.out_tensor), _on_done_c,
            number, byref(out_call), byref(out_error),
        )

    def _take_routing(self, tokens: int, logits: Any, gate: Any, dtype: Optional[str]) -> int:
        if not isinstance(gate, Gate):
            raise TypeError(f"gate is a {type(gate).__name__}: allowed is an expertd.Gate")
        view = _tensors.view("logits", logits)
        if len(view.shape) != 2:
            raise ValueError(f"logits has rank {len(view.shape)}: allowed is 2, [T,E]")
        self._logits = view.tensor
        self._gate, keep = gate._to_c(tokens, view.shape[1])
        self.keep += [view.keep, keep]
        return min(self._gate.top_k, view.shape[1])  # more is refused


# ---- calls under way ----

_under_way: Dict[int, "_Flight"] = {}  # what the library may still touch lives at least so long
_numbers = itertools.count(1)
_of_library = threading.local()  # has .thread on threads that call back


def _destroy(function: Any, handle: c_void_p, _keep: Any = None) -> None:
    """Also when the garbage collector comes by inside a callback, which must not wait for the library."""
    if getattr(_of_library, "thread", False):
        threading.Thread(target=function, args=(handle,)).start()
    else:
        function(handle)


def _on_done(number: int, result: Any) -> None:
    _of_library.thread = True
    flight = _under_way.pop(number)
    with flight.lock:
        flight.over = True
    flight.result = _c.MoeResult.from_buffer_copy(result.contents)
    flight.tell()


_on_done_c = _c.Done(_on_done)


class _Flight:
    """One call. tell() is called at its end, from a thread of the library."""

    def __init__(self, client: "Client", request: _Request, tell: Any):
        self.client, self.request, self.tell = client, request, tell
        self.result: Any = None
        self.call, self.over, self.lock = c_void_p(), False, threading.Lock()

    def begin(self) -> None:
        number, error = next(_numbers), _c.CError()
        _under_way[number] = self
        try:
            with self.client._use as handle:
                code = self.request.begin(handle, number, self.call, error)
            if code != 0:
                raise errors.from_c(error)
        except BaseException:
            if not self.has_begun():
                del _under_way[number]
            raise

    def has_begun(self) -> bool:
        return self.call.value is not None

    def fly(self, ended: Any) -> None:
        """Begins it and waits for its end. Ctrl-C cancels, and is raised then: before, the library may write to out."""
        interrupted = None
        while self.result is None:
            try:
                if not self.has_begun():
                    self.begin()
                ended.acquire()
            except KeyboardInterrupt as error:
                if not self.has_begun():
                    raise
                interrupted = error
                self.cancel()
        if interrupted is not None:
            raise interrupted

    def cancel(self) -> None:
        with self.lock:  # the handle is there until its callback returns, which waits for this
            if self.has_begun() and not self.over:
                lib.ep_call_cancel(self.call)

    def answer(self) -> Any:
        return self.request.answer(self.result, self.request.tokens_error)


def _set_quietly(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def _fly(client: "Client", request: _Request) -> Any:
    loop = asyncio.get_running_loop()
    ended: "asyncio.Future[None]" = loop.create_future()

    def tell() -> None:
        try:
            loop.call_soon_threadsafe(_set_quietly, ended)
        except RuntimeError:
            pass  # the loop is closed: nobody waits

    flight = _Flight(client, request, tell)
    flight.begin()
    await _wait_ended(ended, flight)
    return flight.answer()


async def _wait_ended(ended: "asyncio.Future[None]", flight: Any) -> None:
    """Also a cancelled task waits for the call's end: until then the library may write to out."""
    cancelled = False
    while not ended.done():
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            cancelled = True
            flight.cancel()
    if cancelled:
        raise asyncio.CancelledError


class Prepared:
    """A call with fixed buffers: no address changes from run to run. One run at a time, from one thread at a time.

    run(n) and run_async(n) compute the first n tokens of the buffers (None: all) and return what Client.forward does;
    rows after them are not touched.
    begin(n) and finish() are their two halves. Made by Client.prepare; a context manager.
    """

    def __init__(self, client: "Client", request: _Request):
        self._request, self._client, self._result = request, client, _c.sized(_c.MoeResult)
        self._tokens_error: Optional[BaseException] = None
        self._handle, error = c_void_p(), _c.CError()
        self._busy, self._alive = (
            threading.Lock(),
            threading.Lock(),
        )  # of the thread that has the handle; of whoever cancels or closes
        with client._use as handle:
            if (
                lib.ep_call_create(
                    handle, byref(request.args), byref(request.out_tensor), byref(self._handle), byref(error)
                )
                != 0
            ):
                raise errors.from_c(error)
        self._tokens = request.out_tensor.shape[0]
        self._finalizer = weakref.finalize(self, _destroy, lib.ep_call_destroy, self._handle, request)
        client._prepared.add(self)

    @property
    def out(self) -> Any:
        return self._request.out

    def begin(self, n: Optional[int] = None) -> None:
        error, tokens = _c.CError(), _values.integer("n", self._tokens if n is None else n, 32)
        with self._busy:
            if lib.ep_call_begin(self._open(), tokens, byref(error)) != 0:
                raise errors.from_c(error)

    def finish(self) -> Any:
        """Waits for the run. Ctrl-C cancels it."""
        if threading.current_thread() is not threading.main_thread():
            self._finish()  # no signal handler runs here
            return self.answer()
        ended, interrupted = self._client._pool.submit(self._finish), None
        while not ended.done():
            try:
                concurrent.futures.wait([ended])
            except KeyboardInterrupt as error:
                interrupted = error
                self.cancel()
        if interrupted is not None:
            raise interrupted
        ended.result()
        return self.answer()

    def run(self, n: Optional[int] = None) -> Any:
        self.begin(n)
        return self.finish()

    async def run_async(self, n: Optional[int] = None) -> Any:
        self.begin(n)
        await _wait_ended(asyncio.get_running_loop().run_in_executor(self._client._pool, self._finish), self)
        return self.answer()

    def cancel(self) -> None:
        """Any thread: the run under way ends with Cancelled, unless it has ended."""
        with self._alive:
            if self._finalizer.alive:
                lib.ep_call_cancel(self._handle)

    def close(self) -> None:
        """A run under way is cancelled."""
        if os.getpid() != self._client._pid:
            return
        self.cancel()
        with self._busy, self._alive:
            self._finalizer()

    def _finish(self) -> None:
        with self._busy:
            lib.ep_call_finish(self._open(), byref(self._result))
            self._tokens_error, self._request.tokens_error = self._request.tokens_error, None

    def answer(self) -> Any:
        """What finish returned last."""
        return self._request.answer(self._result, self._tokens_error)

    def _open(self) -> c_void_p:
        self._client._check_process()
        if not self._finalizer.alive:
            raise errors.Closed("the prepared call is closed")
        return self._handle

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _check_process(pid: int, what: str) -> None:
    if os.getpid() != pid:
        raise errors.FailedPrecondition(
            f"this process was forked from the one that made the {what}: a child makes its own"
        )


class _Use:
    """with client._use as handle: the client, or group, is not destroyed inside. For short calls of the library."""

    def __init__(self, owner_ref: Any, what: str):
        self._owner, self._what, self._changed = owner_ref, what, threading.Condition(threading.Lock())
        self._count, self._closed = 0, False

    def __enter__(self) -> c_void_p:
        owner = self._owner()
        owner._check_process()
        with self._changed:
            if self._closed:
                raise errors.Closed(f"the {self._what} is closed")
            self._count += 1
        return owner._handle

    def __exit__(self, *_: Any) -> None:
        with self._changed:
            self._count -= 1
            if self._closed:
                self._changed.notify_all()

    def close(self) -> bool:
        """Waits until nobody is inside; False when it was closed before."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.wait_for(lambda: self._count == 0)
        return first


class Client:
    """Sends token batches to the experts of a service.

    coordinator        "tcp://host:port", or "tls+tcp://host:port" with tls
    nodes              instead of a coordinator: URLs of the nodes themselves
    token              what the service knows this client by
    tls                Tls(ca_file, server_name, cert_key_file)
    wait               seconds to wait until a table is there and nodes are connected; None: return at once
    deadline           seconds of a call that names none
    numerics, buffer_bytes_max, calls_max, prefill_window_tokens, chunk_bytes_max, payload_crc, hedge_permille, lanes
                       as in ep_client_config (expertd/client.h)

    Threads    any number use one client at once. The GIL is released while a call waits.
    Fork       a child makes a client of its own: a parent's gives FailedPrecondition there. After tls+tcp:// or the
               nng lane was used a child can make none for them: start it with multiprocessing's "spawn".
    Errors     ValueError and TypeError for arguments; errors.Error otherwise, one class a code: Unavailable,
               DeadlineExceeded, NotFound...
    """

    def __init__(
        self,
        coordinator: Optional[str] = None,
        *,
        nodes: Optional[Sequence[str]] = None,
        token: Optional[str] = None,
        tls: Optional[Tls] = None,
        wait: Optional[float] = 10.0,
        deadline: float = 10.0,
        numerics: Optional[str] = None,
        buffer_bytes_max: Optional[int] = None,
        calls_max: Optional[int] = None,
        prefill_window_tokens: Optional[int] = None,
        chunk_bytes_max: Optional[int] = None,
        payload_crc: bool = True,
        hedge_permille: Optional[int] = None,
        lanes: Optional[str] = None,
    ):
        config, error, handle = _c.ClientConfig(), _c.CError(), c_void_p()
        lib.ep_client_config_init_sized(byref(config), ctypes.sizeof(config))
        config.coordinator_url, config.token = _values.text("coordinator", coordinator), _values.text("token", token)
        if nodes is not None:
            if isinstance(nodes, str):
                raise TypeError("nodes is a str: allowed is a list of URLs")
            urls = (ctypes.c_char_p * len(nodes))(*(_values.text(f"nodes[{i}]", url) for i, url in enumerate(nodes)))
            config.node_urls, config.node_urls_count = urls, len(nodes)
        _values.set_tls(config, tls)
        config.deadline_us = _values.microseconds("deadline", deadline)
        config.numerics, config.lanes = _values.text("numerics", numerics), _values.text("lanes", lanes)
        config.payload_crc = _values.boolean("payload_crc", payload_crc)
        for name, value, bits in (
            ("buffer_bytes_max", buffer_bytes_max, 64),
            ("calls_max", calls_max, 32),
            ("prefill_window_tokens", prefill_window_tokens, 32),
            ("chunk_bytes_max", chunk_bytes_max, 32),
            ("hedge_permille", hedge_permille, 32),
        ):
            if value is not None:
                setattr(config, name, _values.integer(name, value, bits))
        if wait is not None:
            _values.microseconds("wait", wait)
        if lib.ep_client_create(byref(config), byref(handle), byref(error)) != 0:
            raise errors.from_c(error)
        self._handle, self._pid = handle, os.getpid()
        self._prepared: "weakref.WeakSet[Prepared]" = weakref.WeakSet()
        self._use, self._deadline, self._has_table = _Use(weakref.ref(self), "client"), deadline, False
        self._pool = concurrent.futures.ThreadPoolExecutor(
            128, "expertd"
        )  # for waits of prepared calls; its threads come when needed
        self._finalizer = weakref.finalize(self, _destroy, lib.ep_client_destroy, handle)
        if wait is not None:
            try:
                self.wait_ready(wait)
            except BaseException:
                self.close()
                raise

    # ---- calls ----

    def forward(
        self, model: str, layer: int, x: Any, expert_ids: Any, expert_scales: Any, out: Any = None, **options: Any
    ) -> Any:
        """y[t] = sum over k of expert_scales[t,k] * FFN_{expert_ids[t,k]}(x[t]), and the shared experts; returns out.

        x              [T,H] bf16, f16, f32; or i8 with x_scales
        expert_ids     [T,K] i32 or i64; -1: none
        expert_scales  [T,K] f32 or bf16, used as they are
        out            [T,H] bf16, f16 or f32, apart from the inputs; None: a new one of x's kind (PyTorch's, else
                       NumPy's). [T,K,H] with result="uncombined"

        Arrays are NumPy's, or anything with DLPack in the host's memory; contiguous ones are not copied. bf16 is
        torch.bfloat16, ml_dtypes.bfloat16, or uint16 with dtype="bf16".

        options: dtype, out_dtype ("bf16", "f16", "f32"), version, deadline (seconds), with_result (True: returns
        (out, Result)), and the fields of ep_moe_args by their names; expertd/client.h says what each is:
          tensors   x_scales [T], active_mask [T] or [T,K], partial_slots [T,K], shared [T,H], const_alpha1,
                    const_alpha2, const_v [const_experts,H], smooth_scales [shared + E,H]
          words     result="combined|partial|uncombined", weight_on="output|input",
                    shared_source="service|caller|none", nan_policy="pass|reject|zero|mean", rows_nan_policy likewise,
                    const_rule="kernel|linear", mode="auto|decode|prefill", comm_alg="default|fullmesh|hierarchy|auto",
                    combine_at="rows|node_sum", dispatch_quant="plain|int8|fp8", combine_quant="plain|int8",
                    wire_dtype="bf16|f16|f32"
          others    zero_experts, copy_experts, const_experts, step_group, step_group_size, x_abs_max,
                    allow_duplicates, allow_missing, want_timing, traceparent, tenant

        on_tokens(first, count) is called while others still travel: rows first to first + count - 1 of out are
        finished. Each token once, in order, from a thread of the library: be quick, wait for nothing (with asyncio,
        loop.call_soon_threadsafe). What it raises ends the call and is raised.

        Ctrl-C cancels the call. Errors: InvalidArgument, NotFound, Unavailable, DeadlineExceeded, ResourceExhausted,
        Cancelled, Closed...; out is then as it was, or, with on_tokens, has the rows it was called for.
        """
        return self._run(_Request(model, layer, x, expert_ids, expert_scales, out, **options))

    def _run(self, request: _Request) -> Any:
        if not self._has_table:  # the callback form does not wait for the first one
            if self._epoch() is None:
                self.wait_ready(request.args.deadline_us / 1e6 or self._deadline)
            self._has_table = True
        ended = threading.Lock()
        ended.acquire()
        flight = _Flight(self, request, ended.release)
        flight.fly(ended)
        return flight.answer()

    async def forward_async(
        self, model: str, layer: int, x: Any, expert_ids: Any, expert_scales: Any, out: Any = None, **options: Any
    ) -> Any:
        """As forward, for asyncio. A cancelled task cancels its call and ends when that has. Before the first table it
        is Unavailable: wait_ready waits for that."""
        return await _fly(self, _Request(model, layer, x, expert_ids, expert_scales, out, **options))

    def forward_logits(
        self, model: str, layer: int, x: Any, logits: Any, gate: Gate, out: Any = None, **options: Any
    ) -> Any:
        """forward with the gate's choice: the bits of forward with the ids and scales of gate.choose(logits).

        logits  [T,E] f32, E the layer's experts, then the call's zero, copy and constant ones
        gate    expertd.Gate

        Tokens that active_mask leaves out may have anything in their logits; NaN and Inf of the others go by nan_policy.
        The rest is as in forward. Errors, too: ValueError (InvalidArgument) where the gate has other experts than the
        layer, or names a logit.
        """
        return self._run(_LogitsRequest(model, layer, x, logits, gate, out, **options))

    async def forward_logits_async(
        self, model: str, layer: int, x: Any, logits: Any, gate: Gate, out: Any = None, **options: Any
    ) -> Any:
        """forward_logits, for asyncio, with the rules of forward_async. The gate runs before the first await."""
        return await _fly(self, _LogitsRequest(model, layer, x, logits, gate, out, **options))

    def prepare(
        self, model: str, layer: int, x: Any, expert_ids: Any, expert_scales: Any, out: Any = None, **options: Any
    ) -> Prepared:
        """The arguments of forward, as buffers to be used again and again: refill them between runs. None is copied:
        an input with gaps between a row's elements is refused."""
        request = _FixedRequest(model, layer, x, expert_ids, expert_scales, out, **options)
        return Prepared(self, request)

    # ---- what it knows ----

    def wait_ready(self, timeout: float = 10.0) -> None:
        """Until a routing table is there and a node of each model is connected. Errors: DeadlineExceeded with the last
        report."""
        end, error = time.monotonic() + _values.microseconds("timeout", timeout) / 1e6, _c.CError()
        while True:
            left_us = max(0, int((end - time.monotonic()) * 1e6))
            with self._use as handle:
                code = lib.ep_client_wait_ready(handle, min(left_us, _SLICE_US), byref(error))
            if code == 0:
                return
            if code != errors.DeadlineExceeded.code or left_us <= _SLICE_US:
                raise errors.from_c(error)

    def models(self) -> List[Model]:
        """What the service serves, with every layer. Errors: Unavailable before the first table."""
        found: List[Model] = []
        model = _c.sized(_c.ModelDesc)
        with self._use as handle:
            while self._code(lib.ep_client_model(handle, len(found), byref(model))):
                layers: List[Layer] = []
                layer = _c.sized(_c.LayerDesc)
                while self._code(lib.ep_client_layer(handle, model.name, model.version, len(layers), byref(layer))):
                    form = {} if layer.form_told else dict.fromkeys(("shared_inner", "alpha", "beta", "limit"))
                    layers.append(_values.plain(Layer, layer, **form))
                found.append(_values.plain(Model, model, is_default=model.is_default != 0, layers=tuple(layers)))
        return found

    def health(self) -> Health:
        """What the client knows now; asks nobody."""
        epoch = self._epoch()
        models = self.models() if epoch else []
        nodes: List[Node] = []
        waits = _c.sized(_c.NodeWaits)
        with self._use as handle:
            while epoch and self._code(lib.ep_client_read_waits(handle, len(nodes), byref(waits))):
                nodes.append(_values.plain(Node, waits))
        ready = bool(models) and all(layer.copies_min > 0 for model in models for layer in model.layers)
        return Health(ready, epoch, tuple(models), tuple(nodes), self.stats())

    def memory(self, timeout: float = 2.0) -> Dict[str, Optional[int]]:
        """Bytes of experts, of all models, in the memory of each node of the table. Asks all nodes at once; None: it
        gave no answer in timeout seconds. Errors: Unavailable before the first table."""
        timeout_us = _values.microseconds("timeout", timeout)

        def ask(index: int) -> Optional[Tuple[str, Optional[int]]]:
            memory, error = _c.sized(_c.NodeMemory), _c.CError()
            with self._use as handle:
                code = lib.ep_client_ask_memory(handle, index, timeout_us, byref(memory), byref(error))
            if code == 0:
                return memory.node.decode(errors="replace"), memory.weight_bytes
            if error.node:
                return error.node.decode(errors="replace"), None
            if code == errors.NotFound.code:  # the table has become shorter
                return None
            raise errors.from_c(error)

        answers = self._pool.map(ask, range(len(self.health().nodes) or 1))
        return dict(answer for answer in answers if answer is not None)

    def stats(self) -> Stats:
        stats = _c.sized(_c.ClientStats)
        with self._use as handle:
            lib.ep_client_read_stats(handle, byref(stats))
        return _values.plain(Stats, stats)

    def set_token(self, token: Optional[str]) -> None:
        """For connections made from now on; open ones stay open."""
        error, text = _c.CError(), _values.text("token", token)
        with self._use as handle:
            if lib.ep_client_set_token(handle, text, byref(error)) != 0:
                raise errors.from_c(error)

    # ---- life ----

    def close(self) -> None:
        """Calls under way end with Cancelled. At most 5 s. Also at the end of a with block, and of the program."""
        if os.getpid() != self._pid or not self._use.close():
            return
        for call in list(self._prepared):
            call.close()
        self._finalizer()
        self._pool.shutdown()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Client cannot be copied or sent to another process: make one there")

    def _check_process(self) -> None:
        _check_process(self._pid, "client")

    def _epoch(self) -> Optional[Tuple[int, int]]:
        term, number = c_uint64(), c_uint64()
        with self._use as handle:
            code = lib.ep_client_epoch(handle, byref(term), byref(number))
        if code == errors.Unavailable.code:
            return None
        self._code(code)
        return term.value, number.value

    @staticmethod
    def _code(code: int) -> bool:
        """False past the end of a list."""
        if code == 0:
            return True
        if code == errors.NotFound.code:
            return False
        raise errors.BY_CODE.get(code, errors.Error)(
            "no routing table yet: wait_ready waits for it"
            if code == errors.Unavailable.code
            else "the client is closed"
        )
