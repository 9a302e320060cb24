# SPDX-License-Identifier: Apache-2.0
"""The group API: every rank holds tokens and experts. expertd/group.h has all rules; here are shapes and forms."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from ctypes import byref, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from . import _c, _client, _tensors, _values, errors
from ._c import lib
from ._values import Tls

_SIGNED = -(1 << 63)  # the library says what it allows
_ASSIST_INTS = 128  # of assist_info_for_combine, for each row
_RANKS_PER_SERVER = 8
_SIZES = (
    "ep_world_size", "ep_rank_id", "tp_world_size", "tp_rank_id", "expert_shard_type", "shared_expert_num",
    "shared_expert_rank_num", "global_bs", "zero_expert_num", "copy_expert_num", "const_expert_num",
)


@dataclass(frozen=True)
class GroupStats:
    """Of this rank since it joined. buffer_bytes: memory of frames, in use and kept for the next; buffer_bytes_peak: the
    most in use at once."""

    calls: int
    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int
    buffer_bytes: int
    buffer_bytes_peak: int
    system_allocations: int
    frames_passed_on: int


@dataclass(frozen=True)
class GroupTraffic:
    """What went to and came from one other rank; passed on: in the name of ranks of other hosts (hierarchy)."""

    frames_sent: int
    bytes_sent: int
    frames_received: int
    bytes_received: int
    rows_sent: int
    frames_passed_on: int
    rows_passed_on: int


@dataclass(frozen=True)
class GroupBuffers:
    """frame_bytes: the largest frame of a rank, which frame_bytes_max of a Group must hold. The others: what the vendor
    documents as least HCCL_BUFFSIZE, in bytes, of the group and of its pair."""

    frame_bytes: int
    vendor_bytes: int
    vendor_tp_bytes: int


class GroupParams:
    """What dispatch and combine have in common, equal on all ranks; the fields of ep_group_params by their names.

    moe_expert_num    M
    profile           "native", "a2", "a3": the ranges that are allowed
    const_rule        "kernel", "linear"
    comm_alg          None, "fullmesh", "fullmesh_v1", "fullmesh_v2", "hierarchy"
    group_tp          the Group of a tensor-parallel pair, with tp_world_size=2 and tp_rank_id
    elastic_info      i32 [4 + 2 * the group's size], without gaps; read when an operation is prepared and each time it
                      begins
    allow_duplicates  a token may name an expert twice
    ep_world_size, ep_rank_id, expert_shard_type, shared_expert_num, shared_expert_rank_num, global_bs,
    zero_expert_num, copy_expert_num, const_expert_num
    """

    def __init__(
        self,
        moe_expert_num: int,
        *,
        profile: str = "native",
        const_rule: str = "kernel",
        comm_alg: Optional[str] = None,
        group_tp: "Optional[Group]" = None,
        elastic_info: Any = None,
        allow_duplicates: bool = False,
        **sizes: int,
    ):
        p = self._c = _c.GroupParams()
        lib.ep_group_params_init_sized(byref(p), ctypes.sizeof(p))
        for name, value in {"moe_expert_num": moe_expert_num, **sizes}.items():
            if name != "moe_expert_num" and name not in _SIZES:
                raise TypeError(f"there is no parameter {name!r}: allowed are {', '.join(_SIZES)}, and those named")
            setattr(p, name, _values.integer(name, value, 63, _SIGNED))
        p.profile = _values.word("profile", profile, _c.ENUMS["EP_GROUP_PROFILE"])
        p.const_rule = _values.word("const_rule", const_rule, _c.ENUMS["EP_GROUP_CONST_"])
        p.comm_alg, p.allow_duplicates = (
            _values.text("comm_alg", comm_alg),
            _values.boolean("allow_duplicates", allow_duplicates),
        )
        if group_tp is not None and not isinstance(group_tp, Group):
            raise TypeError(f"group_tp is a {type(group_tp).__name__}: allowed is an expertd.Group")
        self.group_tp, self._elastic = group_tp, None
        if elastic_info is not None:
            self._elastic = _tensors.view("elastic_info", elastic_info, gaps=_tensors.REFUSED)
            p.elastic_info = self._elastic.tensor

    def _with(self, pair: Optional[c_void_p] = None) -> _c.GroupParams:
        """pair: the handle of group_tp."""
        params = _c.GroupParams.from_buffer_copy(self._c)
        params.group_tp = pair
        return params

    def _layout(self, group: "Group") -> "_Layout":
        p, twice = self._c, self._c.allow_duplicates
        if self._elastic is None or self._elastic.dtype != "i32" or self._elastic.shape != (4 + 2 * group.world_size,):
            return _Layout(group.world_size, group.rank, p.moe_expert_num, p.shared_expert_rank_num, twice)
        info = np.ctypeslib.as_array(ctypes.cast(p.elastic_info.data, ctypes.POINTER(ctypes.c_int32)), self._elastic.shape)
        scaled, ranks, shared_ranks, experts = (int(number) for number in info[:4])
        if not scaled:
            return _Layout(group.world_size, group.rank, p.moe_expert_num, p.shared_expert_rank_num, twice)
        return _Layout(ranks, int(info[4 + group.rank]), experts, shared_ranks, twice)


def _share(items: int, holders: int, holder: int) -> int:
    """How many of the items that holder has: the first ones have one more where it does not divide."""
    return items // holders + (holder < items % holders) if holders > 0 else 0


@dataclass(frozen=True)
class _Layout:
    """How large outputs are, which the caller may leave to us; what is not allowed the library refuses."""

    ranks: int  # W, after elastic_info, as all here
    rank: int
    experts: int  # M
    shared_ranks: int  # SR
    allow_duplicates: bool

    @property
    def local_experts(self) -> int:
        moe_rank = self.rank - self.shared_ranks
        return 1 if moe_rank < 0 else _share(self.experts, self.ranks - self.shared_ranks, moe_rank)

    def rows(self, batch: int, top_k: int, shared_experts: int) -> int:
        """A of this rank."""
        if self.rank >= self.shared_ranks:
            local = self.local_experts
            return batch * self.ranks * (top_k if self.allow_duplicates and local > 0 else min(local, top_k))
        end = peers = 0
        for shared in range(shared_experts):  # the ranks that have this rank's shared expert share its rows
            peers = _share(self.shared_ranks, shared_experts, shared)
            end += peers
            if self.rank < end:
                break
        return batch * -(-self.ranks // peers) if peers else 0


def group_buffer_sizes(
    params: GroupParams, max_bs: int, hidden: int, top_k: int, dtype: str = "bf16"
) -> GroupBuffers:
    """How large exchange buffers must be, whichever experts the tokens choose. params: with ep_world_size. max_bs: the
    largest T of any rank. Errors: ValueError, as for Group.prepare_dispatch."""
    out, error = _c.sized(_c.GroupBuffers), _c.CError()
    sizes = (_values.integer(n, v, 63, _SIGNED) for n, v in (("max_bs", max_bs), ("hidden", hidden), ("top_k", top_k)))
    kind = _values.word("dtype", dtype, {word: _tensors.DTYPES[word] for word in ("bf16", "f16", "f32")})
    if lib.ep_group_buffer_sizes(byref(params._c), *sizes, kind, byref(out), byref(error)) != 0:
        raise errors.from_c(error)
    return _values.plain(GroupBuffers, out)


# ---- operations ----

_endings: "Dict[int, concurrent.futures.Future[None]]" = {}  # of operations under way
_numbers = itertools.count(1)


def _settle(number: int) -> None:
    ended = _endings.pop(number, None)
    if ended is not None:
        ended.set_result(None)


def _on_over(number: int, _plan: Any) -> None:
    _client._of_library.thread = True
    _settle(number)


_on_over_c = _c.Over(_on_over)


class _Plan:
    """What the library may touch until the plan is destroyed, and its operation under way."""

    def __init__(self) -> None:
        self.handle, self.bytes, self.number = c_void_p(), c_size_t(), 0
        self.ended: "Optional[concurrent.futures.Future[None]]" = None
        self.lives: "List[Optional[_Life]]" = []  # those groups are destroyed after it
        self.tensors: List[Any] = []

    def make_workspace(self) -> int:
        """Its address, of 64 bytes' alignment."""
        workspace = np.empty(self.bytes.value + 64, np.uint8)
        self.tensors.append(workspace)
        return workspace.ctypes.data + -workspace.ctypes.data % 64

    def expect(self) -> int:
        self.number, ended = next(_numbers), concurrent.futures.Future()
        ended.set_running_or_notify_cancel()  # nobody cancels it but by the operation
        _endings[self.number] = self.ended = ended
        return self.number

    def forget(self) -> None:
        _settle(self.number)
        self.ended = None

    def destroy(self) -> None:
        lib.ep_group_plan_destroy(self.handle)
        self.forget()
        self.lives.clear()


class Operation:
    """A dispatch or a combine with fixed buffers: refill them, and run it as often as wanted. A context manager.

    run() is begin() and finish(). begin() packs, sends and returns; finish() waits, writes the outputs and returns
    answer(). poll() tells whether finish would not wait. run_async() and finish_async() are for asyncio; outputs are
    written on the loop's thread. cancel(), from any thread, ends it with Cancelled; Ctrl-C in finish and a cancelled
    task do that too, and end when it has.

    Up to four of a group are under way at once. All ranks begin them in the same order, also after one has failed, and
    what was begun is finished, unless begin failed. From begin to finish nobody else touches the buffers; after an
    error the outputs are undefined. One thread at a time has an operation.

    Errors     InvalidArgument (values of this or of another rank, parameters that differ), FailedPrecondition (not its
               turn; forked), ResourceExhausted (expand_x has fewer rows than come), OutOfRange (nan_policy),
               Unavailable and DeadlineExceeded naming ranks, Cancelled, Closed.
    """

    def __init__(self, group: "Group", params: "GroupParams"):
        if not isinstance(params, GroupParams):
            raise TypeError(f"params is a {type(params).__name__}: allowed is an expertd.GroupParams")
        self._group, self.params = group, params
        self._groups = [g for g in (group, params.group_tp) if g is not None]
        self._plan = _Plan()
        self._busy, self._alive = threading.Lock(), threading.Lock()  # as those of Prepared

    def _set(self, struct: Any, name: str, array: Any, dtype: Optional[str], writable: bool = False) -> Any:
        """None: it stays absent."""
        if array is None:
            return None
        view = _tensors.view(name, array, dtype, writable, _tensors.TAKEN)
        self._plan.tensors.append(view.keep)
        setattr(struct, name, view.tensor)
        return view

    def _take_common(self, args: Any, deadline: Optional[float], nan_policy: str) -> None:
        args.deadline_us = 0 if deadline is None else _values.microseconds("deadline", deadline)
        args.nan_policy = _values.word("nan_policy", nan_policy, _c.ENUMS["EP_MOE_NAN_"])

    def _prepare(self, function: Any, args: Any, *more: Any) -> None:
        error, plan = _c.CError(), self._plan
        with contextlib.ExitStack() as uses:
            group, *pair = [uses.enter_context(g._use) for g in self._groups]
            params = self.params._with(*pair)
            args.params = ctypes.pointer(params)
            plan.tensors.append((args, more, params, self.params))
            plan.lives = [g._life for g in self._groups]
            self._finalizer = weakref.finalize(self, _client._destroy, _Plan.destroy, plan)
            try:
                if function(group, byref(args), *more, byref(plan.bytes), byref(plan.handle), byref(error)) != 0:
                    raise errors.from_c(error)
                self._workspace = plan.make_workspace()
            except BaseException:  # whoever keeps the error keeps this too
                self._finalizer()
                raise
            for owner in self._groups:
                owner._operations.add(self)

    def begin(self) -> None:
        """Errors: those that this rank finds without the others; then there is nothing to finish."""
        error, plan = _c.CError(), self._plan
        with self._busy, self._group._use as group:
            handle = self._open()
            if plan.ended is not None:
                raise errors.FailedPrecondition("the operation is under way: finish it first")
            try:
                more = self._workspace, plan.bytes, _on_over_c, plan.expect(), byref(error)
                if self._begin(group, handle, *more) != 0:
                    raise errors.from_c(error)
            except BaseException:  # Ctrl-C may come after it began: then it is ended, else this does nothing
                lib.ep_group_plan_cancel(handle)
                lib.ep_group_plan_finish(handle, None)
                plan.forget()
                raise

    def poll(self) -> bool:
        """Errors: FailedPrecondition, Closed."""
        with self._busy:
            return bool(lib.ep_group_plan_poll(self._open()))

    def finish(self) -> Any:
        """Waits for the end, at most until the deadline. Errors: FailedPrecondition too where nothing was begun."""
        interrupted, ended = None, self._under_way()
        while ended is not None and not ended.done():
            try:
                ended.result()
            except KeyboardInterrupt as error:
                interrupted = error
                self.cancel()
        if interrupted is not None:
            self._finish_cancelled()
            raise interrupted
        return self._finish()

    def run(self) -> Any:
        try:
            self.begin()
            return self.finish()
        except KeyboardInterrupt:
            if self._plan.ended is not None:  # it came between the two
                self.cancel()
                self._finish_cancelled()
            raise

    async def finish_async(self) -> Any:
        ended = self._under_way()
        if ended is not None:
            try:
                await _client._wait_ended(asyncio.wrap_future(ended), self)
            except asyncio.CancelledError:
                self._finish_cancelled()
                raise
        return self._finish()

    async def run_async(self) -> Any:
        self.begin()
        return await self.finish_async()

    def cancel(self) -> None:
        with self._alive:
            if self._finalizer.alive and os.getpid() == self._group._pid:
                lib.ep_group_plan_cancel(self._plan.handle)

    def close(self) -> None:
        """An operation under way is cancelled and finished."""
        if os.getpid() != self._group._pid:
            return
        self.cancel()
        with self._busy, self._alive:
            self._finalizer()

    def answer(self) -> Any:
        """What finish returned last."""
        raise NotImplementedError

    def _begin(self, group: c_void_p, plan: c_void_p, *more: Any) -> int:
        raise NotImplementedError

    def _under_way(self) -> "Optional[concurrent.futures.Future[None]]":
        self._group._check_process()  # in a child nobody would end it
        return self._plan.ended

    def _finish(self) -> Any:
        error = _c.CError()
        with self._busy:
            handle = self._open()
            try:
                code = lib.ep_group_plan_finish(handle, byref(error))
            finally:  # Ctrl-C comes when it has ended
                self._plan.forget()
        if code != 0:
            raise errors.from_c(error)
        return self.answer()

    def _finish_cancelled(self) -> None:
        try:
            self._finish()
        except errors.Error:
            pass  # Cancelled, or what came before

    def _open(self) -> c_void_p:
        self._group._check_process()
        if not self._finalizer.alive:
            raise errors.Closed("the operation is closed")
        return self._plan.handle

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Dispatch(Operation):
    """Made by Group.prepare_dispatch, which has the shapes. finish returns how many rows of expand_x came.

    expand_x, dynamic_scales, assist_info_for_combine, expand_idx, expert_token_nums, ep_recv_counts, tp_recv_counts,
    expand_scales are its outputs; None: absent.
    """

    def __init__(
        self,
        group: "Group",
        params: GroupParams,
        x: Any,
        expert_ids: Any,
        *,
        dtype: Optional[str],
        deadline: Optional[float],
        nan_policy: str,
        x_abs_max: float,
        quant_mode: int,
        expert_token_nums_type: int,
        inputs: Dict[str, Any],
        outputs: Dict[str, Any],
    ):
        super().__init__(group, params)
        a = self._args = _c.DispatchArgs()
        lib.ep_moe_dispatch_args_init_sized(byref(a), ctypes.sizeof(a))
        self._take_common(a, deadline, nan_policy)
        a.x_abs_max = _values.number("x_abs_max", x_abs_max)
        a.quant_mode = _values.integer("quant_mode", quant_mode, 63, _SIGNED)
        a.expert_token_nums_type = _values.integer("expert_token_nums_type", expert_token_nums_type, 63, _SIGNED)
        self.expert_ids, self.x_active_mask = expert_ids, inputs["x_active_mask"]
        given = self._set(a, "x", x, dtype)
        dtype = self.dtype = "bf16" if given.dtype == "bf16" else dtype  # rows in uint16 are then that
        ids = self._set(a, "expert_ids", expert_ids, None)
        for name, array in inputs.items():
            self._set(a, name, array, None, writable=name == "performance_info")
        self._take_outputs(outputs)
        self._no_room = ""
        if len(given.shape) == len(ids.shape) == 2:  # else it is refused
            wanted = self._wanted(given, ids.shape[1])
            self._take_outputs({n: self._new(n, x, *wanted[n]) for n in wanted if outputs[n] is None and wanted[n] is not None})
        self._prepare(lib.ep_moe_dispatch_prepare, a)
        if self._no_room:
            self.close()
            raise errors.ResourceExhausted(self._no_room)

    def _take_outputs(self, outputs: Dict[str, Any]) -> None:
        for name, array in outputs.items():
            setattr(self, name, array)
            self._set(self._args, name, array, self.dtype if name == "expand_x" else None, writable=True)

    def _new(self, name: str, x: Any, shape: Tuple[int, ...], kind: str) -> Any:
        """Where a size is not allowed, or too large, the library shall say so by the parameter's name: until then it has so
        many entries as a row needs."""
        try:
            return _tensors.empty_like(x, (max(shape[0], 0), *shape[1:]), kind)
        except (ValueError, OverflowError, MemoryError, RuntimeError) as error:
            self._no_room = self._no_room or (
                f"{name} is None: a new one has shape {list(shape)}, of global_bs {self.params._c.global_bs}: {error}; "
                "give one with room for the rows that come"
            )
            return _tensors.empty_like(x, (_ASSIST_INTS, *shape[1:]), kind)

    def _wanted(self, given: _tensors.View, top_k: int) -> Dict[str, Any]:
        """Shape and type of outputs, as large as they may have to be; None: it is not asked for."""
        p, a = self.params._c, self._args
        layout, (tokens, hidden) = self.params._layout(self._group), given.shape
        batch = p.global_bs // self._group.world_size if p.global_bs > 0 else tokens
        part = max(layout.rows(batch, top_k, p.shared_expert_num), 0)  # of one rank of a pair
        pair = max(p.tp_world_size, 1)
        rows = part * pair if a.expand_x.rank == 0 else a.expand_x.shape[0]
        counts = layout.ranks * pair * layout.local_experts
        if p.profile != 0 and (self._is_hierarchy() or (p.profile == 1 and a.expert_scales.rank != 0)):
            servers = layout.ranks // _RANKS_PER_SERVER  # the vendor keeps two numbers a slot for each there
            counts += 2 * (p.global_bs or tokens * layout.ranks) * top_k * servers
        quantised = a.quant_mode == 2
        self._own_counts = layout.ranks * layout.local_experts  # the other rank of a pair has as many after them
        return {
            "expand_x": ((rows, hidden), "i8" if quantised else given.dtype),
            "dynamic_scales": ((rows,), "f32") if quantised else None,
            "assist_info_for_combine": None
            if a.expand_idx.rank != 0
            else ((_ASSIST_INTS * max(part if p.profile != 0 else rows, 1),), "i32"),
            "expand_idx": None,
            "expert_token_nums": ((layout.local_experts,), "i64"),
            "ep_recv_counts": ((counts,), "i32"),
            "tp_recv_counts": ((pair,), "i32") if pair > 1 else None,
            "expand_scales": ((rows,), "f32") if a.expert_scales.rank != 0 else None,
        }

    def _is_hierarchy(self) -> bool:
        return self.params._c.comm_alg == b"hierarchy"

    def _begin(self, group: c_void_p, plan: c_void_p, *more: Any) -> int:
        return lib.ep_moe_dispatch_begin(group, plan, byref(self._args), *more)

    def answer(self) -> int:
        ends = range(self._own_counts - 1, self._own_counts * max(self.params._c.tp_world_size, 1), self._own_counts or 1)
        counts = self._args.ep_recv_counts  # i32, of whatever library
        at = (counts.data + end * counts.stride_bytes[0] for end in ends)
        return sum(ctypes.c_int32.from_address(address).value for address in at) if self._own_counts else 0


@dataclass(frozen=True)
class AddRmsNorm:
    """For Group.prepare_combine: the sum becomes x = sum + residual_x and y = rms_norm(x) * gamma; expertd/group.h has
    the steps.

    residual_x  [T,H] or [T,1,H], y and x too; gamma [H]; all of expand_x's type
    y           None: a new one
    rstd        f32 [T] or [T,1,1], out; x out. None: not wanted
    """

    residual_x: Any
    gamma: Any
    eps: float = 1e-6
    y: Any = None
    rstd: Any = None
    x: Any = None


class Combine(Operation):
    """Made by Group.prepare_combine, which has the shapes. finish returns x_out, or y with add_rms_norm."""

    def __init__(
        self,
        group: "Group",
        dispatch: Dispatch,
        expert_scales: Any,
        *,
        expand_x: Any,
        x_out: Any,
        add_rms_norm: Optional[AddRmsNorm],
        deadline: Optional[float],
        nan_policy: str,
        comm_quant_mode: int,
        inputs: Dict[str, Any],
    ):
        if not isinstance(dispatch, Dispatch):
            raise TypeError(f"dispatch is a {type(dispatch).__name__}: allowed is what prepare_dispatch returned")
        super().__init__(group, dispatch.params)
        a, dtype = _c.CombineArgs(), dispatch.dtype
        self._args, self._dispatch, self._norm = a, dispatch, None
        lib.ep_moe_combine_args_init_sized(byref(a), ctypes.sizeof(a))
        self._take_common(a, deadline, nan_policy)
        a.comm_quant_mode = _values.integer("comm_quant_mode", comm_quant_mode, 63, _SIGNED)
        if expand_x is None and dispatch._args.quant_mode != 0:
            raise TypeError("expand_x is None: the dispatch's is int8, give the experts' results in x's type")
        results = dispatch.expand_x if expand_x is None else expand_x
        rows = self._set(a, "expand_x", results, dtype)
        for name, array in self._of_dispatch().items():
            self._set(a, name, array, None)
        self._set(a, "expert_scales", expert_scales, None)
        for name, array in inputs.items():
            self._set(a, name, array, dtype, writable=name == "performance_info")
        shape = (dispatch._args.x.shape[0], a.expand_x.shape[1])
        if add_rms_norm is None:
            self.x_out = _tensors.empty_like(results, shape, rows.dtype) if x_out is None else x_out
            self._set(a, "x_out", self.x_out, dtype, writable=True)
        else:
            self._take_norm(add_rms_norm, x_out, results, shape, rows.dtype)
        norm = None if self._norm is None else byref(self._norm)
        self._prepare(lib.ep_moe_combine_prepare, a, norm)

    def _of_dispatch(self) -> Dict[str, Any]:
        d = self._dispatch
        return {
            "expert_ids": d.expert_ids,
            "assist_info_for_combine": d.assist_info_for_combine,
            "expand_idx": d.expand_idx,
            "ep_send_counts": d.ep_recv_counts,
            "tp_send_counts": d.tp_recv_counts if d.params._c.tp_world_size > 1 else None,
            "x_active_mask": d.x_active_mask,
            "expand_scales": d.expand_scales if d._is_hierarchy() else None,
        }

    def _take_norm(self, given: AddRmsNorm, x_out: Any, results: Any, shape: Tuple[int, int], kind: str) -> None:
        if not isinstance(given, AddRmsNorm):
            raise TypeError(f"add_rms_norm is a {type(given).__name__}: allowed is an expertd.AddRmsNorm")
        if x_out is not None:
            raise ValueError("x_out is given with add_rms_norm: allowed is one of both; the sum is its x")
        n, dtype = _c.AddRmsNorm(), self._dispatch.dtype
        lib.ep_moe_add_rms_norm_init_sized(byref(n), ctypes.sizeof(n))
        n.eps, self._norm = _values.number("eps", given.eps), n
        self.x_out = _tensors.empty_like(results, shape, kind) if given.y is None else given.y
        for name, array in (("residual_x", given.residual_x), ("gamma", given.gamma)):
            self._set(n, name, array, dtype)
        for name, array in (("y", self.x_out), ("rstd", given.rstd), ("x", given.x)):
            self._set(n, name, array, dtype, writable=True)

    def _begin(self, group: c_void_p, plan: c_void_p, *more: Any) -> int:
        if self._norm is None:
            return lib.ep_moe_combine_begin(group, plan, byref(self._args), *more)
        return lib.ep_moe_combine_add_rms_norm_begin(group, plan, byref(self._args), byref(self._norm), *more)

    def answer(self) -> Any:
        return self.x_out


# ---- membership ----


class _Life:
    """The group's: it ends when neither a Group nor a plan has it."""

    def __init__(self, handle: c_void_p):
        self.finalizer = weakref.finalize(self, _client._destroy, lib.ep_group_destroy, handle)


class Group:
    """The ranks of a program that hold tokens and experts. Made when all of them are there; a context manager.

    name          1..127 characters, equal on all ranks
    rank, world_size
    urls          rank 0's URL ("tcp://host:port"), which the others tell theirs; or a list with each rank's
    listen        where this rank listens, port 0: any; None: its place in urls
    on_listening  function of one URL, called once when this rank listens: how rank 0 tells its port to a launcher. It
                  runs on another thread; what it raises is raised here. The port is then in use until the deadline,
                  or until all have come, as it is after Ctrl-C
    deadline      seconds, of this call, and of each operation that names none
    token, tls    as Client's; every rank shows the same. Beyond loopback both are needed, or insecure=True
    host          ranks with equal names share a host (comm_alg "hierarchy"); None: the machine, "": with nobody
    payload_crc, frame_bytes_max    as in ep_group_config

    Threads    any; of one operation one at a time. All ranks begin operations in the same order. The GIL is released
               while one waits.
    Fork       a group and its operations belong to the process that made them: in a child they give FailedPrecondition,
               and close does nothing. Ranks as children fork first and make a group each; after tls+tcp:// or the nng
               lane was used, start them with multiprocessing's "spawn".
    Errors     ValueError (InvalidArgument), Unavailable (address in use), DeadlineExceeded naming the ranks that are
               missing, Unauthenticated.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        urls: Union[str, Sequence[str]],
        *,
        listen: Optional[str] = None,
        on_listening: Optional[Callable[[str], Any]] = None,
        deadline: float = 30.0,
        token: Optional[str] = None,
        tls: Optional[Tls] = None,
        insecure: bool = False,
        payload_crc: bool = True,
        frame_bytes_max: Optional[int] = None,
        host: Optional[str] = None,
    ):
        config = _c.GroupConfig()
        lib.ep_group_config_init_sized(byref(config), ctypes.sizeof(config))
        config.name, config.token = _values.text("name", name), _values.text("token", token)
        config.world_size, config.rank = _values.integer("world_size", world_size, 32), _values.integer("rank", rank, 32)
        each = [urls] if isinstance(urls, str) else list(urls)
        texts = (ctypes.c_char_p * len(each))(*(_values.text(f"urls[{i}]", url) for i, url in enumerate(each)))
        config.urls, config.urls_count = texts, len(each)
        config.listen_url, config.host = _values.text("listen", listen), _values.text("host", host)
        config.deadline_us = _values.microseconds("deadline", deadline)
        _values.set_tls(config, tls)
        config.insecure = _values.boolean("insecure", insecure)
        config.payload_crc = _values.boolean("payload_crc", payload_crc)
        if frame_bytes_max is not None:
            config.frame_bytes_max = _values.integer("frame_bytes_max", frame_bytes_max, 64)
        if on_listening is not None and not callable(on_listening):
            raise TypeError(f"on_listening is a {type(on_listening).__name__}: allowed is a function of a URL")
        self.name, self.rank, self.world_size, self._pid = name, rank, world_size, os.getpid()
        self._operations: "weakref.WeakSet[Operation]" = weakref.WeakSet()
        self._handle = _meet(config, on_listening)
        self._life: Optional[_Life] = _Life(self._handle)
        self._use = _client._Use(weakref.ref(self), "group")

    def prepare_dispatch(
        self,
        params: GroupParams,
        x: Any,
        expert_ids: Any,
        *,
        scales: Any = None,
        x_active_mask: Any = None,
        expert_scales: Any = None,
        performance_info: Any = None,
        expand_x: Any = None,
        dynamic_scales: Any = None,
        assist_info_for_combine: Any = None,
        expand_idx: Any = None,
        expert_token_nums: Any = None,
        ep_recv_counts: Any = None,
        tp_recv_counts: Any = None,
        expand_scales: Any = None,
        quant_mode: int = 0,
        expert_token_nums_type: int = 1,
        nan_policy: str = "pass",
        x_abs_max: float = 0.0,
        deadline: Optional[float] = None,
        dtype: Optional[str] = None,
    ) -> Dispatch:
        """x[t] goes to the rank of each of its K experts; this rank gets its rows sorted by (local expert, source rank,
        position there). Checks everything but data.

        x                        [T,H] bf16, f16, native also f32; bf16 also uint16 with dtype="bf16"
        expert_ids               [T,K] i32, native also i64
        scales                   [S+M,H] f32, smooth scales, with quant_mode 2
        x_active_mask            [T] or [T,K] bool
        expert_scales            [T,K] f32: travel along to expand_scales
        performance_info         [W] i64: microseconds waited for each rank are added
        quant_mode               0: rows as they are; 2: int8 a row, with dynamic_scales
        expert_token_nums_type   0: prefix sums; 1: counts
        nan_policy, x_abs_max    as Client.forward's

        Outputs, made where they are None:
        expand_x                 [rows,H] of x's type, i8 with quant_mode 2. A new one has A rows (two A in a pair), the
                                 most that may come: where T differs between ranks, of global_bs = W * the largest T.
                                 Native takes any that has room for those that come
        dynamic_scales           [rows] f32, with quant_mode 2
        assist_info_for_combine  [128 * rows] i32
        expand_idx               [T*K] i32, instead of assist_info_for_combine: the vendor's operators without _v2. Made
                                 by the caller only; all ranks of a combine use the same one of the two
        expert_token_nums        [L] i64: rows of each expert of this rank
        ep_recv_counts           [W*max(tp,1)*L] i32, prefix sums by (local expert, source rank)
        tp_recv_counts           [2] i32, in a pair
        expand_scales            [rows] f32, with expert_scales

        Arrays are NumPy's, or anything with DLPack in the host's memory, with any strides; none is copied by Python, but
        the plan has dense copies of those whose rows are not dense. T, W, M, S, L, A are expertd/group.h's.

        Errors: ValueError (InvalidArgument) naming parameter, value and what is allowed, or a buffer and what it needs;
        ResourceExhausted where there is no memory for an output that was not given.
        """
        return Dispatch(
            self, params, x, expert_ids, dtype=dtype, deadline=deadline, nan_policy=nan_policy, x_abs_max=x_abs_max,
            quant_mode=quant_mode, expert_token_nums_type=expert_token_nums_type,
            inputs=dict(
                scales=scales, x_active_mask=x_active_mask, expert_scales=expert_scales,
                performance_info=performance_info,
            ),
            outputs=dict(
                expand_x=expand_x, dynamic_scales=dynamic_scales, assist_info_for_combine=assist_info_for_combine,
                expand_idx=expand_idx, expert_token_nums=expert_token_nums, ep_recv_counts=ep_recv_counts,
                tp_recv_counts=tp_recv_counts, expand_scales=expand_scales,
            ),
        )  # fmt: skip

    def prepare_combine(
        self,
        dispatch: Dispatch,
        expert_scales: Any,
        *,
        expand_x: Any = None,
        x_out: Any = None,
        shared_expert_x: Any = None,
        ori_x: Any = None,
        const_expert_alpha_1: Any = None,
        const_expert_alpha_2: Any = None,
        const_expert_v: Any = None,
        performance_info: Any = None,
        add_rms_norm: Optional[AddRmsNorm] = None,
        comm_quant_mode: int = 0,
        nan_policy: str = "pass",
        deadline: Optional[float] = None,
    ) -> Combine:
        """The experts' rows go back to their tokens and are summed there: x_out[t] = sum over k, in order, of
        expert_scales[t,k] * row(t,k), in f32, then shared experts; one rounding.

        dispatch          what it belongs to: parameters, ids, mask, assist info or expand_idx, and counts are its
        expert_scales     [T,K] f32
        expand_x          [rows,H] of x's type: the experts' results, in dispatch's order; None: the dispatch's own, where
                          the experts work in place
        x_out             [T,H], out; None: a new one of expand_x's kind
        shared_expert_x   [T,H], added last
        ori_x             [T,H]: x as dispatched, for copy and constant experts
        const_expert_alpha_1, const_expert_alpha_2, const_expert_v   [const_expert_num,H]
        add_rms_norm      an AddRmsNorm
        comm_quant_mode   0: rows as they are; 2: int8 for each 8 elements

        Arrays and errors are as for prepare_dispatch.
        """
        return Combine(
            self, dispatch, expert_scales, expand_x=expand_x, x_out=x_out, add_rms_norm=add_rms_norm,
            deadline=deadline, nan_policy=nan_policy, comm_quant_mode=comm_quant_mode,
            inputs=dict(
                shared_expert_x=shared_expert_x, ori_x=ori_x, const_expert_alpha_1=const_expert_alpha_1,
                const_expert_alpha_2=const_expert_alpha_2, const_expert_v=const_expert_v,
                performance_info=performance_info,
            ),
        )  # fmt: skip

    def stats(self) -> GroupStats:
        stats = _c.sized(_c.GroupStats)
        with self._use as group:
            lib.ep_group_read_stats(group, byref(stats))
        return _values.plain(GroupStats, stats)

    def traffic(self, rank: int) -> GroupTraffic:
        """With one other rank. Errors: ValueError (no such rank)."""
        if _values.integer("rank", rank, 32) >= self.world_size:
            raise ValueError(f"rank is {rank}: allowed 0..{self.world_size - 1}")
        traffic = _c.sized(_c.GroupTraffic)
        with self._use as group:
            lib.ep_group_read_traffic(group, rank, byref(traffic))
        return _values.plain(GroupTraffic, traffic)

    def close(self) -> None:
        """Says goodbye and closes its operations: those under way are cancelled. At most 5 s. Also at the end of a with
        block, and of the program."""
        if os.getpid() != self._pid or not self._use.close():
            return
        for operation in list(self._operations):
            operation.close()
        self._life = None  # another thread may still be at the end of an operation: that one ends the group then

    def _check_process(self) -> None:
        _client._check_process(self._pid, "group")

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Group cannot be copied or sent to another process: make one there")


def _meet(config: _c.GroupConfig, on_listening: Optional[Callable[[str], Any]]) -> c_void_p:
    """ep_group_create on a thread of its own, so that Ctrl-C is seen. It cannot be stopped: after Ctrl-C, or an error in
    on_listening, it keeps its port and waits for the others, at most until the deadline; what it makes is destroyed."""
    met: "concurrent.futures.Future[c_void_p]" = concurrent.futures.Future()

    def tell(_arg: Any, url: bytes) -> None:
        try:
            if on_listening is not None:
                on_listening(url.decode())
        except BaseException as error:
            _give(met, error=error)

    config.on_listening = _c.Listening(tell)

    def create() -> None:
        handle, error = c_void_p(), _c.CError()
        if lib.ep_group_create(byref(config), byref(handle), byref(error)) != 0:
            _give(met, error=errors.from_c(error))
        elif not _give(met, handle):
            lib.ep_group_destroy(handle)

    threading.Thread(target=create, name="expertd-group", daemon=True).start()
    try:
        return met.result()
    except KeyboardInterrupt as error:
        if not _give(met, error=error) and met.exception() is None:
            lib.ep_group_destroy(met.result())
        raise


def _give(met: "concurrent.futures.Future[c_void_p]", handle: Any = None, error: Any = None) -> bool:
    """False: it has one already."""
    try:
        met.set_result(handle) if error is None else met.set_exception(error)
    except concurrent.futures.InvalidStateError:
        return False
    return True
