#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""group_cases.py BUILD SOURCE: ranks of expertd.Group as threads, and as processes where one is forked or dies. Runs in the environment that test_python.py made."""
import asyncio, concurrent.futures, contextlib, copy, gc, multiprocessing, os, pickle, queue, random, signal, sys, threading, time, weakref
from ctypes import byref, c_size_t, c_void_p
from unittest import mock

import numpy as np

import expertd
from cases import Dlpack, raised, wait_for
from expertd import _c, _group, _tensors, errors
from expertd._c import lib

HIDDEN = 24
DEADLINE = 60.0


def join(name, rank, world, told, scheme="tcp", **more):
    """told: a queue in which rank 0's URL is handed on."""
    if rank == 0:
        more["on_listening"] = lambda url: [told.put(url) for _ in range(world - 1)]
    own = scheme + "://127.0.0.1:0"
    return expertd.Group(name, rank, world, own if rank == 0 else told.get(timeout=DEADLINE), listen=own, **{"deadline": DEADLINE, **more})


def on_ranks(world, play, **more):
    """play(group) on each, as threads, rank 0 as this one; what they return."""
    told, seats = queue.Queue(), threading.Barrier(world)

    def run(rank):
        with join("cases", rank, world, told, **more) as group:
            try:
                return play(group)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr)
                seats.abort()
                raise
            finally:
                with contextlib.suppress(threading.BrokenBarrierError):
                    seats.wait(DEADLINE)  # nobody leaves while others are at work

    with concurrent.futures.ThreadPoolExecutor(world) as pool:
        others = [pool.submit(run, rank) for rank in range(1, world)]
        return [run(0), *(other.result() for other in others)]


# ---- a batch, its experts, and what must come of it ----


class Batch:
    def __init__(self, rank, tokens, experts, top_k, kind=np.float32, seed=0):
        draw = np.random.default_rng(1000 * seed + rank)
        self.x = draw.standard_normal((tokens, HIDDEN)).astype(np.float32)
        if kind != np.float32:
            self.x = self.x.astype(kind) if kind == np.float16 else to_bf16(self.x)
        self.ids = np.array([draw.permutation(experts)[:top_k] for _ in range(tokens)], np.int32).reshape(tokens, top_k)
        self.scales = draw.random((tokens, top_k), np.float32)


def to_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_f32(rows):
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows.astype(np.float32)


def like(f32, dtype):
    return to_bf16(f32) if dtype == np.uint16 else f32.astype(dtype)


def expert(e, rows):
    """Expert e of the case, in x's type."""
    return like(to_f32(rows) * np.float32(e % 7 + 1.25), rows.dtype)


def run_experts(dispatch, first, rows=None):
    """Over what came, in place, or into rows."""
    rows, begin = dispatch.expand_x if rows is None else rows, 0
    for e, count in enumerate(dispatch.expert_token_nums):
        rows[begin : begin + count] = expert(first + e, dispatch.expand_x[begin : begin + count])
        begin += count


def first_expert(group, experts):
    """Of a rank: the first ones have one more."""
    each, more = divmod(experts, group.world_size)
    return group.rank * each + min(group.rank, more)


def canonical(b, mask=None):
    """The header's sum, in its order."""
    acc = np.zeros(b.x.shape, np.float32)
    for t, k in np.ndindex(b.ids.shape):
        if mask is None or mask[t]:
            acc[t] = acc[t] + b.scales[t, k] * to_f32(expert(b.ids[t, k], b.x[t]))
    return like(acc, b.x.dtype)


# ---- results ----


def case_canonical_sums(world=4):
    for kind, experts in ((np.float32, 8), (np.float16, 10), ("bf16", 8)):

        def play(group):
            params = expertd.GroupParams(experts, global_bs=world * (4 + world))
            b = Batch(group.rank, 5 + group.rank, experts, 3, kind)
            dtype = "bf16" if kind == "bf16" else None
            with group.prepare_dispatch(params, b.x, b.ids, dtype=dtype) as d, group.prepare_combine(d, b.scales) as c:
                for seed in range(3):  # the same buffers again, with other data
                    fresh = Batch(group.rank, 5 + group.rank, experts, 3, kind, seed)
                    b.x[:], b.ids[:], b.scales[:] = fresh.x, fresh.ids, fresh.scales
                    assert d.run() == sum(d.expert_token_nums) <= d.expand_x.shape[0]
                    run_experts(d, first_expert(group, experts))
                    y = c.run()
                    assert y is c.x_out and y.dtype == b.x.dtype and np.array_equal(y, canonical(b)), (kind, seed)
                stats = group.stats()
                assert stats.calls == 6 and stats.bytes_sent > 0 and group.traffic((group.rank + 1) % world).rows_sent > 0
            return True

        assert on_ranks(world, play) == [True] * world


def case_expand_idx_instead_of_assist_info(world=3):
    """The same sums; beside it no assist info is made."""

    def play(group):
        params, b = expertd.GroupParams(8), Batch(group.rank, 5, 8, 3, np.float32)
        index = np.full(5 * 3, -1, np.int32)
        with group.prepare_dispatch(params, b.x, b.ids, expand_idx=index) as d, group.prepare_combine(d, b.scales) as c:
            assert d.expand_idx is index and d.assist_info_for_combine is None
            d.run()
            sent = b.ids.reshape(-1)
            assert index.tolist() == [sent[:i].tolist().count(e) for i, e in enumerate(sent)]
            run_experts(d, first_expert(group, 8))
            assert np.array_equal(c.run(), canonical(b))
        try:
            group.prepare_dispatch(params, b.x, b.ids, expand_idx=index, assist_info_for_combine=np.empty(9999, np.int32))
        except ValueError as error:
            assert "assist_info_for_combine" in str(error) and "expand_idx" in str(error), error
        else:
            raise AssertionError("both were taken")
        return True

    assert on_ranks(world, play) == [True] * world


class Raw:
    """The C form, blocking, with buffers of its own."""

    def __init__(self, group, d, c):
        """The same arguments as the operations, with other outputs."""
        self.outputs, self.keep, self.group = {}, [], group
        self.dispatch, self.combine = (type(o._args).from_buffer_copy(o._args) for o in (d, c))
        self.norm = None if c._norm is None else _c.AddRmsNorm.from_buffer_copy(c._norm)
        for name in "expand_x", "dynamic_scales", "assist_info_for_combine", "expert_token_nums", "ep_recv_counts", "expand_scales":
            self._renew(self.dispatch, name)
        for name in "expand_x", "assist_info_for_combine", "ep_send_counts":
            setattr(self.combine, name, getattr(self.dispatch, {"ep_send_counts": "ep_recv_counts"}.get(name, name)))
        if d._args.quant_mode == 2:
            self.combine.expand_x = c._args.expand_x
        for struct, names in (self.combine, ["x_out"]), (self.norm, ["y", "rstd", "x"]):
            for name in names if struct is not None else []:
                self._renew(struct, name)

    def _renew(self, struct, name):
        """A dense array of the output's shape."""
        tensor = getattr(struct, name)
        if tensor.rank:
            kind = {2: np.float16, 3: np.float32, 1: np.uint16, 4: np.int8, 6: np.int32, 7: np.int64}[tensor.dtype]
            array = self.outputs[name] = np.zeros(tensor.shape[: tensor.rank], kind)
            tensor.data, tensor.stride_bytes[: tensor.rank] = array.ctypes.data, array.strides

    def run(self, what, args, *more):
        error, plan, size = _c.CError(), c_void_p(), c_size_t()
        begin = dict(dispatch=lib.ep_moe_dispatch_prepare, combine=lib.ep_moe_combine_prepare)[what]
        with self.group._use as handle:
            norm = (None if self.norm is None else byref(self.norm),) if what == "combine" else ()
            assert begin(handle, byref(args), *norm, byref(size), byref(plan), byref(error)) == 0, error.text
            workspace = np.empty(size.value + 64, np.uint8)
            call = getattr(lib, f"ep_moe_{what}" + ("_add_rms_norm" if norm and norm[0] else ""))
            call.argtypes = None
            given = [byref(self.norm)] if norm and norm[0] else []
            code = call(handle, plan, byref(args), *given, c_void_p(workspace.ctypes.data + -workspace.ctypes.data % 64), size, byref(error))
            assert code == 0, error.text
            lib.ep_group_plan_destroy(plan)


def case_bits_of_the_c_form(world=3):
    """Quantised, masked, strided, copied, normalised: every output of Python's form is that of the C form."""
    experts, top_k, tokens = 6, 3, 7

    def play(group, quant, norm):
        b = Batch(group.rank, tokens, experts, top_k)
        b.ids[2, 1] = experts  # a copy expert
        wide = np.zeros((tokens, 2 * HIDDEN), np.float32)
        wide[:, ::2] = b.x
        x, mask = wide[:, ::2], np.arange(tokens) != 4
        params = expertd.GroupParams(experts, copy_expert_num=1)
        smooth = np.random.default_rng(3).random((experts, HIDDEN), np.float32) if quant else None
        d = group.prepare_dispatch(params, x, b.ids, quant_mode=quant, scales=smooth, x_active_mask=mask, expert_scales=b.scales)
        results = np.zeros(d.expand_x.shape, np.float32)
        extra = dict(expand_x=results) if quant else {}
        out = np.full((tokens, HIDDEN, 2), 9, np.float32)
        if norm:
            sums = np.zeros((tokens, HIDDEN), np.float32)
            rstd = np.zeros(tokens, np.float32)
            extra["add_rms_norm"] = expertd.AddRmsNorm(b.x[::-1], np.linspace(0.5, 2, HIDDEN, dtype=np.float32), 1e-5, out[:, :, 0], rstd, sums)
        else:
            extra["x_out"] = out[:, :, 0]
        c = group.prepare_combine(d, b.scales, ori_x=x, **extra)
        assert d._args.x.data == wide.ctypes.data and d._args.x.stride_bytes[1] == 8, "copied"
        raw = Raw(group, d, c)
        came = d.run()
        raw.run("dispatch", raw.dispatch)
        for name in raw.outputs:
            if name in ("expand_x", "dynamic_scales", "expand_scales"):
                assert np.array_equal(raw.outputs[name][:came], getattr(d, name)[:came]), name
            elif name in ("expert_token_nums", "ep_recv_counts"):
                assert np.array_equal(raw.outputs[name], getattr(d, name)), name
        first = first_expert(group, experts)
        if quant:
            begin = 0
            for e, count in enumerate(d.expert_token_nums):
                results[begin : begin + count] = expert(first + e, d.expand_x[begin : begin + count] * d.dynamic_scales[begin : begin + count, None])
                begin += count
        else:
            run_experts(d, first)
            raw.outputs["expand_x"][:came] = d.expand_x[:came]
        y = c.run()
        raw.run("combine", raw.combine)
        assert np.array_equal(raw.outputs["y" if norm else "x_out"], y) and (out[:, :, 1] == 9).all()
        if norm:
            assert np.array_equal(raw.outputs["rstd"], rstd) and np.array_equal(raw.outputs["x"], sums) and rstd.all()
        return y

    for quant in 0, 2:
        for norm in False, True:
            for y in on_ranks(world, lambda group: play(group, quant, norm)):
                assert y.any() and not (y[4].any() and not norm)  # the masked token


def case_dlpack_and_defaults():
    """No copies of what another library holds, and memory given back."""

    def play(group):
        b = Batch(group.rank, 4, 4, 2, "bf16")
        out = np.zeros((4, HIDDEN), np.uint16)
        x, ids, scales, target = (Dlpack(a, *t, True) for a, t in ((b.x, (4, 16)), (b.ids, (0, 32)), (b.scales, (2, 32)), (out, (4, 16))))
        d = group.prepare_dispatch(expertd.GroupParams(4), x, ids)
        c = group.prepare_combine(d, scales, x_out=target)
        assert (d._args.x.data, d._args.expert_ids.data, c._args.x_out.data) == (b.x.ctypes.data, b.ids.ctypes.data, out.ctypes.data), "copied"
        d.run()
        run_experts(d, 2 * group.rank)
        assert c.run() is target and np.array_equal(out, canonical(b))
        counts = np.zeros((4, 2), np.int32)[::-1, 0]  # in place, whatever it is that the rows are counted in
        for form in counts, Dlpack(np.zeros(4, np.int32), 0, 32, True):
            with group.prepare_dispatch(expertd.GroupParams(4), x, ids, ep_recv_counts=form) as d:
                assert d.run() == sum(d.expert_token_nums) and asyncio.run(d.run_async()) == sum(d.expert_token_nums)
                raised(errors.FailedPrecondition, "under way", d.finish)
        return True

    assert on_ranks(2, play) == [True, True]
    gc.collect()
    assert not Dlpack.alive


def case_new_results_are_of_the_given_rows_kind():
    """Of expand_x's, where that is not the dispatch's own."""
    with expertd.Group("alone", 0, 1, "tcp://127.0.0.1:0") as group:
        b = Batch(0, 4, 4, 2)
        with group.prepare_dispatch(expertd.GroupParams(4), b.x, b.ids, quant_mode=2) as d:
            results = np.zeros(d.expand_x.shape, np.float32)
            for more in {}, dict(add_rms_norm=expertd.AddRmsNorm(b.x, b.x[0])):
                with mock.patch.object(_tensors, "empty_like", wraps=_tensors.empty_like) as made:
                    c = group.prepare_combine(d, b.scales, expand_x=results, **more)
                assert made.call_args.args[0] is results and c.x_out.shape == b.x.shape, made.call_args


def case_frameworks():
    """Those that are installed; the ordinary run has none."""
    try:
        import torch
    except ImportError:
        return

    def play(group):
        b = Batch(group.rank, 4, 4, 2)
        with group.prepare_dispatch(expertd.GroupParams(4), torch.from_numpy(b.x), torch.from_numpy(b.ids)) as d:
            assert isinstance(d.expand_x, torch.Tensor) and d.expert_token_nums.dtype == torch.int64
            with group.prepare_combine(d, torch.from_numpy(b.scales)) as c:
                d.run()
                view = d.expand_x.numpy()
                begin = 0
                for e, count in enumerate(d.expert_token_nums.tolist()):
                    view[begin : begin + count] = expert(2 * group.rank + e, view[begin : begin + count])
                    begin += count
                assert np.array_equal(c.run().numpy(), canonical(b))
        x = torch.from_numpy(b.x).bfloat16()
        with group.prepare_dispatch(expertd.GroupParams(4), x, torch.from_numpy(b.ids), quant_mode=2) as d:
            results = torch.zeros(d.expand_x.shape, dtype=x.dtype)
            with group.prepare_combine(d, torch.from_numpy(b.scales), expand_x=results) as c:
                assert c.x_out.dtype == x.dtype
        return True

    assert on_ranks(2, play) == [True, True]


def case_sizes_of_new_outputs():
    """What Python makes is what the library wants: it takes that, and not one entry less."""
    world, draw = 4, random.Random(1)
    cases = []
    for profile in "native", "a2", "a3":
        for _ in range(12):
            shared = draw.choice((0, 0, 1, 2)) if profile != "a2" else 0
            share = 4 - shared if profile != "native" else 1
            cases.append((profile, share * draw.randrange(1, 4) + (draw.randrange(5) if profile == "native" else 0), shared, draw.choice((0, 9))))

    def play(group):
        refused = 0
        for profile, experts, shared_ranks, more in cases:
            sizes = dict(shared_expert_num=1, shared_expert_rank_num=shared_ranks) if shared_ranks else {}
            tokens, top_k = (3, min(experts, 2)) if profile == "native" else (8, min(experts, 2))
            params = expertd.GroupParams(experts, profile=profile, global_bs=world * (tokens + more), **sizes)
            hidden = 64 if profile == "native" else 7168 if profile == "a2" else 1024
            kind = np.float16
            x, ids = np.zeros((tokens, hidden), kind), np.zeros((tokens, top_k), np.int32)
            try:
                d = group.prepare_dispatch(params, x, ids)
            except errors.InvalidArgument as error:
                assert not any(name in str(error) for name in ("expand_x", "assist", "nums", "counts")), (profile, str(error))
                continue  # a range of the profile
            made = {n: getattr(d, n) for n in ("expand_x", "assist_info_for_combine", "expert_token_nums", "ep_recv_counts")}
            for name in list(made)[2 if profile == "native" else 0 :] if len(made["expert_token_nums"]) else []:  # a rank without experts wants none
                raised(errors.InvalidArgument, f"{name} has", group.prepare_dispatch, params, x, ids, **{**made, name: made[name][:-1]})
                refused += 1
            d.close()
        return refused

    assert min(on_ranks(world, play)) > 40


def case_room_for_an_expert_named_twice():
    """All tokens name the same expert in both slots."""

    def play(group):
        b = Batch(group.rank, 4, 2, 2)
        b.ids[:] = 0
        params = expertd.GroupParams(2, allow_duplicates=True)
        with group.prepare_dispatch(params, b.x, b.ids) as d, group.prepare_combine(d, b.scales) as c:
            assert d.expand_x.shape == (2 * 4 * 2, HIDDEN)
            assert d.run() == (16 if group.rank == 0 else 0)
            run_experts(d, group.rank)
            assert np.array_equal(c.run(), canonical(b))
        with group.prepare_dispatch(expertd.GroupParams(1, allow_duplicates=True), b.x, b.ids) as d:
            assert d.expand_x.shape[0] == (16 if group.rank == 0 else 0), "a rank without experts gets none"
        return True

    assert on_ranks(2, play) == [True, True]


def case_without_one_rank():
    """By elastic_info: the others are ranks 0 and 1 of two."""
    world, info = 3, np.array([1, 2, 0, 4, 0, -1, 1, 0, 2, -1], np.int32)

    def play(group):
        if group.rank == 1:
            return True
        local = int(info[4 + group.rank])
        b = Batch(group.rank, 5, 4, 2)
        d = group.prepare_dispatch(expertd.GroupParams(6, elastic_info=info), b.x, b.ids)
        c = group.prepare_combine(d, b.scales)
        assert d.expand_x.shape == (20, HIDDEN) and d.expert_token_nums.shape == (2,) and d.ep_recv_counts.shape == (4,)
        d.run()
        run_experts(d, 2 * local)
        assert np.array_equal(c.run(), canonical(b))
        return True

    assert on_ranks(world, play) == [True] * world


def case_pairs():
    """Two groups of two; ranks of a pair have half of an expert each, and both get the rows of both groups."""
    meetings = {(what, i): queue.Queue() for what in ("group", "pair") for i in range(2)}
    seats = threading.Barrier(4)

    def run(side, rank):
        with join(f"side {side}", rank, 2, meetings["group", side]) as group, join(f"pair {rank}", side, 2, meetings["pair", rank]) as pair:
            b = Batch(rank, 4 + side, 2, 2, seed=side)
            b.x = np.round(8 * b.x)
            params = expertd.GroupParams(2, global_bs=2 * 5, group_tp=pair, tp_world_size=2, tp_rank_id=side)
            d = group.prepare_dispatch(params, b.x, b.ids)
            c = group.prepare_combine(d, b.scales)
            assert d.run() == sum(d.tp_recv_counts) == 2 * (4 + 5)
            d.expand_x *= 0.5 if side else 0.25 * (rank + 1)  # the sum: 0.75 and 1.0
            y, acc = c.run(), np.zeros(b.x.shape, np.float32)
            for t, k in np.ndindex(b.ids.shape):
                acc[t] += b.scales[t, k] * (b.x[t] * np.float32(0.75 if b.ids[t, k] == 0 else 1.0))
            assert np.array_equal(y, acc)
            seats.wait(DEADLINE)
            pair.close()  # and with it the operations that use it
            raised(errors.Closed, "", d.run)
            return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all([f.result() for f in [pool.submit(run, side, rank) for side in range(2) for rank in range(2)]])


# ---- beside compute ----


def micro_batch(group, params, seed, tokens=6):
    b = Batch(group.rank, tokens, 2 * group.world_size, 2, seed=seed)
    d = group.prepare_dispatch(params, b.x, b.ids)
    return b, d, group.prepare_combine(d, b.scales)


def case_begin_poll_finish(world=3):
    def play(group):
        params = expertd.GroupParams(2 * world)
        (b0, d0, c0), (b1, d1, c1) = (micro_batch(group, params, seed) for seed in range(2))
        for _ in range(20):
            d0.begin()
            raised(errors.FailedPrecondition, "under way", d0.begin)
            d1.begin()
            wait_for(d0.poll, "the rows", DEADLINE)
            d0.finish()
            raised(errors.FailedPrecondition, "", d0.finish)
            run_experts(d0, 2 * group.rank)
            c0.begin()
            d1.finish()
            run_experts(d1, 2 * group.rank)
            c1.begin()
            assert np.array_equal(c0.finish(), canonical(b0)) and np.array_equal(c1.finish(), canonical(b1))
        d0.close()
        raised(errors.Closed, "the operation is closed", d0.run)
        return True

    assert on_ranks(world, play) == [True] * world
    assert not _group._endings


def case_asyncio(world=3):
    async def layer(b, d, c, rank):
        await d.finish_async()
        run_experts(d, 2 * rank)
        return await c.run_async()

    async def layers(group, batches):
        for _ in range(10):
            for _, d, _ in batches:
                d.begin()
            for b, d, c in batches:  # the same order on all ranks
                assert np.array_equal(await layer(b, d, c, group.rank), canonical(b))

    def play(group):
        params = expertd.GroupParams(2 * world)
        asyncio.run(layers(group, [micro_batch(group, params, seed) for seed in range(2)]))
        return True

    assert on_ranks(world, play) == [True] * world
    assert not _group._endings


# ---- ends ----


def run_cancelled(group, d, before, times=1):
    """On rank 1, what rank 0 has begun and cancelled. Of each there came two frames, rows and failure, since before; a
    frame of the next operation says that they are in place, so that these runs lack rows from the beginning."""
    wait_for(lambda: group.traffic(0).frames_received > before + 2 * times, "what rank 0 cancelled", DEADLINE)
    for _ in range(times):
        raised(errors.Cancelled, "rank 0 has cancelled its ep_moe_dispatch", d.run)


def case_cancels():
    """On a task, by hand, and by closing: the other rank learns who cancelled, and the group is used on."""

    async def cancel_task(d):
        task = asyncio.create_task(d.run_async())
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    both = threading.Barrier(2)

    def play(group):
        params = expertd.GroupParams(4)
        b, d, c = micro_batch(group, params, 0)
        before = group.traffic(1 - group.rank).frames_received
        both.wait(DEADLINE)
        if group.rank == 0:
            assert asyncio.run(cancel_task(d))
            d.begin()
            d.cancel()
            raised(errors.Cancelled, "", d.finish)
            d.begin()
            d.close()
            d = group.prepare_dispatch(params, b.x, b.ids)
            c = group.prepare_combine(d, b.scales)
        else:
            run_cancelled(group, d, before, times=3)
        d.run()
        run_experts(d, 2 * group.rank)
        assert np.array_equal(c.run(), canonical(b))
        return True

    assert on_ranks(2, play) == [True, True]
    assert not _group._endings


def case_ctrl_c():
    """In the main thread: a wait for the other rank, and the meeting itself."""
    told, ready = queue.Queue(), threading.Event()

    def second():
        with join("ctrl-c", 1, 2, told) as group:
            b, d, c = micro_batch(group, expertd.GroupParams(4), 0)
            before = group.traffic(0).frames_received
            ready.set()
            run_cancelled(group, d, before)
            d.run()
        return True

    pool = concurrent.futures.ThreadPoolExecutor(1)
    other = pool.submit(second)
    with join("ctrl-c", 0, 2, told) as group:
        b, d, c = micro_batch(group, expertd.GroupParams(4), 0)
        assert ready.wait(DEADLINE)
        killer = threading.Thread(target=lambda: (wait_for(lambda: d._plan.ended is not None, "the operation"), os.kill(os.getpid(), signal.SIGINT)))
        killer.start()
        raised(KeyboardInterrupt, "", d.run)
        killer.join()
        d.run()
        assert other.result()
    pool.shutdown()
    listening = threading.Event()
    killer = threading.Thread(target=lambda: (listening.wait(DEADLINE), os.kill(os.getpid(), signal.SIGINT)))
    killer.start()
    raised(KeyboardInterrupt, "", expertd.Group, "alone", 0, 2, "tcp://127.0.0.1:0", on_listening=lambda url: listening.set(), deadline=2.0)
    killer.join()


def case_ctrl_c_while_it_begins():
    """Before the library has begun, and after: nothing is left under way."""
    with expertd.Group("alone", 0, 1, "tcp://127.0.0.1:0") as group:
        b, d, c = micro_batch(group, expertd.GroupParams(2), 0)
        begin = d._begin

        def interrupted(*args):
            if after:
                assert begin(*args) == 0
            raise KeyboardInterrupt

        for after in False, True:
            for call in d.begin, d.run:
                d._begin = interrupted
                raised(KeyboardInterrupt, "", call)
                d._begin = begin
                raised(errors.FailedPrecondition, "under way", d.finish)
                d.run()
                run_experts(d, 0)
                assert np.array_equal(c.run(), canonical(b))
    assert not _group._endings


def case_ctrl_c_while_it_finishes():
    """Python tells of it when the library returns: the operation has ended then."""
    with expertd.Group("alone", 0, 1, "tcp://127.0.0.1:0") as group:
        b, d, c = micro_batch(group, expertd.GroupParams(2), 0)
        finish = lib.ep_group_plan_finish

        def interrupted(*args):
            assert finish(*args) == 0
            raise KeyboardInterrupt

        for call in d.finish, lambda: asyncio.run(d.finish_async()):
            d.begin()
            with mock.patch.object(lib, "ep_group_plan_finish", interrupted):
                raised(KeyboardInterrupt, "", call)
            assert not _group._endings
            assert d.run() == d.expert_token_nums.sum()


def case_a_group_ends_after_its_operations():
    """One whose end is under way on another thread, and one whose workspace could not be had."""
    order, entered, go = [], threading.Event(), threading.Event()
    end_plan, end_group = lib.ep_group_plan_destroy, lib.ep_group_destroy

    def slowly(handle):
        assert handle.value is not None
        entered.set()
        assert go.wait(DEADLINE)
        end_plan(handle)
        order.append("operation")

    with mock.patch.multiple(lib, ep_group_plan_destroy=slowly, ep_group_destroy=lambda h: (end_group(h), order.append("group"))):
        group, b = expertd.Group("alone", 0, 1, "tcp://127.0.0.1:0"), Batch(0, 3, 4, 2)
        operations = [group.prepare_dispatch(expertd.GroupParams(4), b.x, b.ids)]
        collector = threading.Thread(target=operations.clear)
        collector.start()
        assert entered.wait(DEADLINE)
        group.close()
        ended_early = list(order)
        go.set()
        collector.join()
        assert not ended_early and order == ["operation", "group"], (ended_early, order)
        with expertd.Group("alone", 0, 1, "tcp://127.0.0.1:0") as group, mock.patch.object(_group._Plan, "make_workspace", side_effect=MemoryError("none")):
            kept = raised(MemoryError, "none", group.prepare_dispatch, expertd.GroupParams(4), b.x, b.ids)
            assert order[2:] == ["operation"], order
        assert order[2:] == ["operation", "group"] and kept, order


def case_closes():
    def play(group):
        b, d, c = micro_batch(group, expertd.GroupParams(4), 0)
        d.begin()
        d.finish()
        group.close()
        raised(errors.Closed, "the group is closed", group.prepare_dispatch, expertd.GroupParams(4), b.x, b.ids)
        raised(errors.Closed, "", d.run)
        raised(errors.Closed, "", c.finish)
        raised(errors.Closed, "the group is closed", group.stats)
        group.close()
        return weakref.ref(d)

    gone = on_ranks(2, play)
    gc.collect()
    assert all(d() is None for d in gone)

    def abandon(group):
        """With an operation under way, without close."""
        micro_batch(group, expertd.GroupParams(4), 0)[1].begin()
        gc.collect()
        return True

    assert on_ranks(2, abandon) == [True, True]
    gc.collect()
    assert not _group._endings


# ---- bad arguments and other ranks' ----


def case_bad_arguments():
    params = expertd.GroupParams(4)
    raised(TypeError, "there is no parameter 'top_k'", expertd.GroupParams, 4, top_k=2)
    raised(TypeError, "moe_expert_num is a str", expertd.GroupParams, "4")
    raised(ValueError, "profile is 'a5': allowed are 'native', 'a2', 'a3'", expertd.GroupParams, 4, profile="a5")
    raised(TypeError, "group_tp is a int", expertd.GroupParams, 4, group_tp=3)
    raised(ValueError, "elastic_info has strides", expertd.GroupParams, 4, elastic_info=np.zeros(24, np.int32)[::2])
    raised(errors.InvalidArgument, "ep_world_size", expertd.group_buffer_sizes, params, 4, 64, 2)
    raised(ValueError, "dtype is 'i8'", expertd.group_buffer_sizes, expertd.GroupParams(4, ep_world_size=4), 4, 64, 2, "i8")
    assert expertd.group_buffer_sizes(expertd.GroupParams(4, ep_world_size=2), 4, 64, 2).frame_bytes > 4 * 2 * 64 * 2
    for kind, text, wrong in (
        (ValueError, "name", dict(name="")),
        (TypeError, "rank is a str", dict(rank="0")),
        (ValueError, "rank is 1", dict(rank=1)),
        (ValueError, "world_size is 769", dict(world_size=769)),
        (ValueError, "urls", dict(urls="http://127.0.0.1")),
        (TypeError, "urls[1] is a int", dict(urls=["tcp://127.0.0.1:0", 3])),
        (ValueError, "deadline is 0", dict(deadline=0)),
        (TypeError, "on_listening is a int", dict(on_listening=3)),
        (TypeError, "tls is a str", dict(tls="ca.pem")),
        (ValueError, "insecure", dict(urls="tcp://0.0.0.0:0")),
    ):
        raised(kind, text, expertd.Group, **{**dict(name="g", rank=0, world_size=1, urls="tcp://127.0.0.1:0"), **wrong})
    raised(LookupError, "by the launcher", expertd.Group, "g", 0, 2, "tcp://127.0.0.1:0", on_listening=refuse_url, deadline=1.0)
    raised(errors.DeadlineExceeded, "rank 1", expertd.Group, "g", 0, 2, "tcp://127.0.0.1:0", deadline=0.2)
    with expertd.Group("alone", 0, 1, "tcp://127.0.0.1:0") as group:
        check_operations(group, params)


def refuse_url(url):
    raise LookupError("by the launcher")


def check_operations(group, params):
    b = Batch(0, 3, 4, 2)
    for kind, text, wrong in (
        (TypeError, "params is a int", dict(params=4)),
        (TypeError, "x is a list", dict(x=[[1.0]])),
        (TypeError, 'x has type uint16: bf16 in uint16 is taken with dtype="bf16"', dict(x=b.x.astype(np.uint16))),
        (ValueError, "x", dict(x=b.x[0])),
        (ValueError, "x has 2 in dimension 0", dict(x=b.x[:2])),
        (ValueError, "expert_ids has rank 0", dict(expert_ids=np.array(3))),
        (ValueError, "expert_ids has type f32", dict(expert_ids=b.scales)),
        (ValueError, "scales", dict(scales=np.ones((4, HIDDEN), np.float32))),
        (ValueError, "x_active_mask has 2 in dimension 0", dict(x_active_mask=np.ones(2, bool))),
        (TypeError, "expand_x is a list", dict(expand_x=[[1.0]])),
        (ValueError, "expand_x has", dict(expand_x=np.zeros((6, HIDDEN - 1), np.float32))),
        (ValueError, "expand_x is read-only", dict(expand_x=np.broadcast_to(np.float32(0), (6, HIDDEN)))),
        (ValueError, "quant_mode is 1", dict(quant_mode=1)),
        (TypeError, "quant_mode is a str", dict(quant_mode="int8")),
        (ValueError, "expert_token_nums_type is 2", dict(expert_token_nums_type=2)),
        (ValueError, "nan_policy is 'no'", dict(nan_policy="no")),
        (ValueError, "deadline is -1", dict(deadline=-1)),
        (ValueError, "moe_expert_num is 0", dict(params=expertd.GroupParams(0))),
        (ValueError, "moe_expert_num is -1", dict(params=expertd.GroupParams(-1))),
        (ValueError, f"moe_expert_num is {1 << 62}", dict(params=expertd.GroupParams(1 << 62))),
        (ValueError, "global_bs is -4", dict(params=expertd.GroupParams(4, global_bs=-4))),
        (ValueError, "tp_world_size is", dict(params=expertd.GroupParams(4, tp_world_size=1 << 62))),
        (ValueError, "elastic_info new rank number is -2", dict(params=expertd.GroupParams(4, elastic_info=np.array([1, -2, 0, 4, 0, 0], np.int32)))),
        (ValueError, "elastic_info table1[0] is -3", dict(params=expertd.GroupParams(4, elastic_info=np.array([1, 1, 0, 4, -3, 0], np.int32)))),
        (errors.ResourceExhausted, f"of global_bs {1 << 29}", dict(params=expertd.GroupParams(4, global_bs=1 << 29))),
        (ValueError, f"global_bs is {1 << 62}", dict(params=expertd.GroupParams(4, global_bs=1 << 62))),
        (ValueError, "comm_alg", dict(params=expertd.GroupParams(4, comm_alg="ring"))),
        (ValueError, "ep_world_size is 2", dict(params=expertd.GroupParams(4, ep_world_size=2))),
        (ValueError, "elastic_info has", dict(params=expertd.GroupParams(4, elastic_info=np.zeros(5, np.int32)))),
    ):
        raised(kind, text, group.prepare_dispatch, **{**dict(params=params, x=b.x, expert_ids=b.ids), **wrong})
    with group.prepare_dispatch(params, b.x, b.ids) as d:
        for kind, text, wrong in (
            (TypeError, "dispatch is a int", dict(dispatch=3)),
            (ValueError, "expert_scales has 1 in dimension 1", dict(expert_scales=b.scales[:, :1])),
            (ValueError, "x_out has 2 in dimension 0", dict(x_out=np.zeros((2, HIDDEN), np.float32))),
            (ValueError, "const_expert_v is given", dict(const_expert_v=b.x)),
            (TypeError, "add_rms_norm is a int", dict(add_rms_norm=3)),
            (ValueError, "x_out is given with add_rms_norm", dict(add_rms_norm=expertd.AddRmsNorm(b.x, b.x[0]), x_out=b.x.copy())),
            (ValueError, "comm_quant_mode is 3", dict(comm_quant_mode=3)),
        ):
            raised(kind, text, group.prepare_combine, **{**dict(dispatch=d, expert_scales=b.scales), **wrong})
        b.ids[1, 0] = 77
        raised(errors.InvalidArgument, "77", d.run)
        b.ids[1, 0] = b.ids[1, 1]
        raised(errors.InvalidArgument, "", d.run)  # twice the same
    with group.prepare_dispatch(params, b.x, b.ids, quant_mode=2) as d:
        raised(TypeError, "expand_x is None", group.prepare_combine, d, b.scales)
    raised(TypeError, "cannot be copied", pickle.dumps, group)
    raised(TypeError, "cannot be copied", copy.deepcopy, group)
    raised(ValueError, "rank is 1: allowed 0..0", group.traffic, 1)


def case_ranks_that_differ():
    def play(group):
        b = Batch(group.rank, 3, 4, 2)
        with group.prepare_dispatch(expertd.GroupParams(4, zero_expert_num=group.rank), b.x, b.ids) as d:
            raised(errors.InvalidArgument, "zero_expert_num", d.run)
        b, d, c = micro_batch(group, expertd.GroupParams(4), 0)
        few = group.prepare_dispatch(expertd.GroupParams(4), b.x, b.ids, expand_x=np.zeros((1, HIDDEN), np.float32))
        kept = b.ids[0, 0]
        b.ids[0, 0] = -7 if group.rank == 0 else kept
        raised(errors.InvalidArgument, "-7" if group.rank == 0 else "rank 0", d.run)
        b.ids[0, 0] = kept
        raised(errors.ResourceExhausted, "expand_x", few.run)
        d.run()
        return True

    assert on_ranks(2, play) == [True, True]


# ---- processes ----


def rank_that_dies(told, rank, answers):
    with join("dying", rank, 3, told) as group:
        b, d, c = micro_batch(group, expertd.GroupParams(6), 0)
        d.run()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            d.run()
            answers.put(f"rank {rank} was told nothing")
        except errors.Unavailable as error:
            answers.put("" if "2 is gone" in str(error) else str(error))


def case_killed_rank():
    fork = multiprocessing.get_context("fork")
    told, answers = fork.Queue(), fork.Queue()
    ranks = [fork.Process(target=rank_that_dies, args=(told, rank, answers)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    assert [answers.get(timeout=DEADLINE) for _ in range(2)] == ["", ""]
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, -signal.SIGKILL]


def in_child(group, d, answers):
    b = Batch(0, 3, 4, 2)
    try:
        for what in d.begin, d.finish, d.poll, d.run, group.stats, lambda: group.prepare_dispatch(d.params, b.x, b.ids):
            raised(errors.FailedPrecondition, "forked", what)
        raised(errors.FailedPrecondition, "forked", asyncio.run, d.finish_async())
        d.cancel()
        d.close()
        group.close()
        with expertd.Group("own", 0, 1, "tcp://127.0.0.1:0") as own:
            b, d, c = micro_batch(own, expertd.GroupParams(2), 0)
            d.run()
            run_experts(d, 0)
            assert np.array_equal(c.run(), canonical(b))
        answers.put("")
    except BaseException as error:
        answers.put(repr(error))


def case_fork():
    """Before, between, and with an operation under way: the parent's goes on."""
    fork = multiprocessing.get_context("fork")

    def play(group):
        b, d, c = micro_batch(group, expertd.GroupParams(4), 0)
        for under_way in False, True:
            if under_way:
                d.begin()
            if group.rank == 0:
                answers = fork.Queue()
                child = fork.Process(target=in_child, args=(group, d, answers))
                child.start()
                assert answers.get(timeout=DEADLINE) == ""
                child.join()
                assert child.exitcode == 0, child.exitcode
            if not under_way:
                d.begin()
            d.finish()
            run_experts(d, 2 * group.rank)
            assert np.array_equal(c.run(), canonical(b))
        return True

    assert on_ranks(2, play) == [True, True]


# ---- last, as children of a process that used nng cannot use it ----


def case_tls():
    """With certificates that prove both ends, and a token."""
    folder = os.path.dirname(os.environ["TEST_CA"])
    own = expertd.Tls(folder + "/ca.pem", "127.0.0.1", folder + "/service.pem")

    def play(group):
        b, d, c = micro_batch(group, expertd.GroupParams(4), 0)
        d.run()
        run_experts(d, 2 * group.rank)
        assert np.array_equal(c.run(), canonical(b))
        return True

    assert on_ranks(2, play, scheme="tls+tcp", tls=own, token="token-of-the-ranks") == [True, True]
    raised(ValueError, "TLS setting ca_file is required", expertd.Group, "g", 0, 2, "tls+tcp://127.0.0.1:0", deadline=1.0)


def main():
    for name, case in [(name, case) for name, case in globals().items() if name.startswith("case_")]:
        begin = time.monotonic()
        case()
        print(f"passed: {name.partition('_')[2]} in {time.monotonic() - begin:.1f} s", flush=True)
        assert not Dlpack.alive
    return 0


if __name__ == "__main__":
    sys.exit(main())
