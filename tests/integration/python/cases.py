#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""cases.py BUILD SOURCE: runs in the environment that test_python.py made; TEST_URL, TEST_TOKEN, TEST_NODES (pids) from there."""
import asyncio, copy, ctypes, gc, multiprocessing, os, pickle, signal, sys, threading, time, weakref

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../door")
import expertd
from door_cluster import EXPERTS, HIDDEN, LAYER, TOP_K, Cluster, read_safetensors
from expertd import _client, _tensors, errors

URL, TOKEN = os.environ["TEST_URL"], os.environ["TEST_TOKEN"]
CA = os.environ.get("TEST_CA")
NODES = [int(pid) for pid in os.environ["TEST_NODES"].split()]
TOKENS = 6


class Batch:
    """A batch file's arrays and the oracle's rows for them."""

    def __init__(self, files, seed):
        path = files.batch(f"batch{seed}", TOKENS, seed)
        tensors = read_safetensors(path)
        self.x = np.frombuffer(tensors["x"], np.uint16).reshape(TOKENS, HIDDEN).copy()
        self.ids = np.frombuffer(tensors["expert_ids"], np.int32).reshape(TOKENS, TOP_K).copy()
        self.scales = np.frombuffer(tensors["expert_scales"], np.float32).reshape(TOKENS, TOP_K).copy()
        self.y16 = np.frombuffer(files.oracle(path, "--out-dtype", "bf16"), np.uint16).reshape(TOKENS, HIDDEN)
        self.y32 = np.frombuffer(files.oracle(path, "--out-dtype", "f32"), np.float32).reshape(TOKENS, HIDDEN)
        self.x32 = (self.x.astype(np.uint32) << 16).view(np.float32)

    def arguments(self):
        return "demo", LAYER, self.x, self.ids, self.scales


def client(wait=60, **more):
    return expertd.Client(URL, token=TOKEN, tls=expertd.Tls(CA, "127.0.0.1") if CA else None, wait=wait, **more)


def wait_for(condition, what, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.002)


def raised(kind, text, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), f"{error} does not say: {text}"
        return error
    raise AssertionError(f"no {kind.__name__} with: {text}")


def is_whole(c):
    models = c.models()
    return models and all(layer.copies_min == len(NODES) for layer in models[0].layers)


def is_stopped(pid):
    """Every thread of it: a signal is not at all of them at once."""
    try:
        lines = [open(f"/proc/{pid}/task/{task}/stat").read() for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return False  # one has ended meanwhile
    return all(line.rpartition(")")[2].split()[0] == "T" for line in lines)


def stop_nodes():
    for pid in NODES:
        os.kill(pid, signal.SIGSTOP)
    for pid in NODES:
        wait_for(lambda: is_stopped(pid), "a node to stop")


class stopped_nodes:
    """No call ends by itself meanwhile. Afterwards the service is whole, however long the nodes seemed lost."""

    def __enter__(self):
        stop_nodes()

    def __exit__(self, *_):
        for pid in NODES:
            os.kill(pid, signal.SIGCONT)
        with client() as c:
            wait_for(lambda: is_whole(c), "both nodes")


# ---- results ----


def case_same_bits_as_the_oracle(c, b):
    y = c.forward(*b.arguments(), dtype="bf16")
    assert y.dtype == np.uint16 and y.shape == (TOKENS, HIDDEN) and np.array_equal(y, b.y16)
    assert np.array_equal(c.forward(*b.arguments(), dtype="bf16", out_dtype="f32"), b.y32)
    assert np.array_equal(c.forward("demo", LAYER, b.x32, b.ids.astype(np.int64), b.scales), b.y32)
    out = np.full((TOKENS, HIDDEN), 7, np.float32)
    got, result = c.forward(*b.arguments(), out, dtype="bf16", with_result=True, want_timing=True, mode="decode")
    assert got is out and np.array_equal(out, b.y32)
    assert result.mode == "decode" and 1 <= result.nodes <= 2 and result.missing_slots == () and result.numerics and result.total_us > 0 and result.comm_why == "asked", result
    whole, result = c.forward(*b.arguments(), dtype="bf16", out_dtype="f32", allow_missing=True, with_result=True)
    assert np.array_equal(whole, b.y32) and result.missing_slots == ()
    rows = c.forward(*b.arguments(), dtype="bf16", out_dtype="f32", result="uncombined", shared_source="none")
    assert rows.shape == (TOKENS, TOP_K, HIDDEN)
    mask = np.ones(TOKENS, bool)
    mask[1] = False
    masked = c.forward(*b.arguments(), dtype="bf16", out_dtype="f32", active_mask=mask)
    assert not masked[1].any() and np.array_equal(masked[0], b.y32[0])


def case_nothing_is_copied(c, b):
    wide = np.zeros((TOKENS, 2 * HIDDEN), np.uint16)
    wide[:, :HIDDEN] = b.x
    part = wide[:, :HIDDEN]  # rows with gaps between them
    out = np.empty((TOKENS, HIDDEN), np.uint16)
    request = _client._Request("demo", LAYER, part, b.ids, b.scales, out, dtype="bf16")
    pointers = request.args.x.data, request.args.expert_ids.data, request.args.expert_scales.data, request.out_tensor.data
    assert pointers == (wide.ctypes.data, b.ids.ctypes.data, b.scales.ctypes.data, out.ctypes.data)
    assert request.args.x.stride_bytes[0] == 4 * HIDDEN and request.args.x.dtype == _tensors.DTYPES["bf16"]
    assert np.array_equal(c.forward("demo", LAYER, part, b.ids, b.scales, dtype="bf16"), b.y16)
    apart = np.asfortranarray(b.x32)  # gaps between elements: copied
    assert np.array_equal(c.forward("demo", LAYER, apart, b.ids, b.scales), b.y32)


class Dlpack:
    """What another library would export: a capsule over array's memory, made by hand."""

    alive = {}
    deleted = 0

    def __init__(self, array, code, bits, versioned, flags=0, device=(1, 0)):
        self.array, self.type, self.versioned, self.flags, self.device = array, (code, bits), versioned, flags, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **more):
        if more and not self.versioned:
            raise TypeError("max_version is not known here")
        shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        tensor = _tensors.DLTensor(self.array.ctypes.data, *self.device, self.array.ndim, *self.type, 1, shape, None, 0)
        name = b"dltensor"
        managed = Unversioned(tensor, None, DELETER)
        if self.versioned:
            name = b"dltensor_versioned"
            managed = _tensors.DLVersioned(1, 0, None, ctypes.cast(DELETER, ctypes.c_void_p), self.flags, tensor)
        Dlpack.alive[ctypes.addressof(managed)] = managed, shape, self.array
        return new_capsule(ctypes.addressof(managed), name, ctypes.cast(DESTROY, ctypes.c_void_p))


class JaxArray(Dlpack):
    """Its capsule says nothing of being read-only, as JAX's."""


JaxArray.__module__ = "jaxlib._jax"


def delete(address):
    Dlpack.deleted += 1
    del Dlpack.alive[address]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(delete)


class Unversioned(ctypes.Structure):
    _fields_ = [("tensor", _tensors.DLTensor), ("manager", ctypes.c_void_p), ("deleter", type(DELETER))]


def destroy(capsule):
    """As exporters do: who did not take the capsule over leaves its memory to the capsule."""
    for name in b"dltensor", b"dltensor_versioned":
        if capsule_is(capsule, name):
            delete(capsule_pointer(capsule, name))


DESTROY = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(destroy)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def case_dlpack(c, b):
    BF16, INT, FLOAT = 4, 0, 2
    for versioned in False, True:
        Dlpack.deleted = 0
        out = np.zeros((TOKENS, HIDDEN), np.uint16)
        target = Dlpack(out, BF16, 16, versioned)
        x, ids, scales = Dlpack(b.x, BF16, 16, versioned), Dlpack(b.ids, INT, 32, versioned), Dlpack(b.scales, FLOAT, 32, versioned)
        request = _client._Request("demo", LAYER, x, ids, scales, target)
        assert (request.args.x.data, request.out_tensor.data) == (b.x.ctypes.data, out.ctypes.data), "copied"
        assert len(Dlpack.alive) == 4 and Dlpack.deleted == 0, "given back while in use"
        del request
        gc.collect()
        assert not Dlpack.alive and Dlpack.deleted == 4
        assert c.forward("demo", LAYER, x, ids, scales, target) is target and np.array_equal(out, b.y16)
        gc.collect()
        assert not Dlpack.alive and Dlpack.deleted == 8
        y = c.forward("demo", LAYER, x, ids, scales, out_dtype="f32")
        assert isinstance(y, np.ndarray) and np.array_equal(y, b.y32)
        assert np.array_equal(c.forward("demo", LAYER, x, ids, scales), b.y16)  # x says what its uint16 is
    raised(ValueError, "x is on DLPack device (2, 1)", c.forward, "demo", LAYER, Dlpack(b.x, BF16, 16, True, device=(2, 1)), b.ids, b.scales)
    raised(ValueError, "out is read-only", c.forward, *b.arguments(), Dlpack(out, BF16, 16, True, flags=1), dtype="bf16")
    raised(ValueError, "out is a JAX array", c.forward, *b.arguments(), JaxArray(out, BF16, 16, False), dtype="bf16")
    raised(TypeError, "x has type DLPack (2, 64, 1)", c.forward, "demo", LAYER, Dlpack(b.x, FLOAT, 64, True), b.ids, b.scales)


def case_frameworks(c, b):
    """Those that are installed; the ordinary run has none."""
    try:
        import torch
    except ImportError:
        return
    x = torch.from_numpy(b.x.view(np.int16)).view(torch.bfloat16)
    y = c.forward("demo", LAYER, x, torch.from_numpy(b.ids), torch.from_numpy(b.scales))
    assert y.dtype == torch.bfloat16 and np.array_equal(y.view(torch.int16).numpy().view(np.uint16), b.y16)
    raised(ValueError, "x cannot be had by DLPack", c.forward, "demo", LAYER, torch.zeros(TOKENS, HIDDEN, requires_grad=True), b.ids, b.scales)


# ---- a gate in front ----


def case_logits(c, b):
    """The bits of forward with the gate's choice, in each form."""
    draw = np.random.default_rng(7)
    logits = draw.standard_normal((TOKENS, EXPERTS)).astype(np.float32)
    gates = [
        expertd.Gate(TOP_K, renormalise=True),
        expertd.Gate(TOP_K, "logit", "softmax_selected"),
        expertd.Gate(3, "sigmoid", "sigmoid", bias=draw.random(EXPERTS, np.float32), groups=4, groups_kept=2, group_best=2, group_mask="minus_inf",
                     renormalise=True, epsilon=1e-20, scaling_factor=2.5, expert_factors=draw.random(EXPERTS, np.float32)),
        expertd.Gate(TOP_K, noise_temperature=0.5, seed=9),
        expertd.Gate(TOP_K, weight="sigmoid", chosen=b.ids + (b.ids < 0)),
    ]
    for gate in gates:
        ids, scales = gate.choose(logits)
        assert ids.shape == scales.shape == (TOKENS, gate.top_k)
        for options in {}, dict(mode="prefill"), dict(result="uncombined", shared_source="none"):
            y = c.forward("demo", LAYER, b.x, ids, scales, dtype="bf16", **options)
            out = np.zeros_like(y)
            assert c.forward_logits("demo", LAYER, b.x, logits, gate, out, dtype="bf16", **options) is out and np.array_equal(out, y), (gate, options)
            got, result = asyncio.run(c.forward_logits_async("demo", LAYER, b.x, logits, gate, dtype="bf16", with_result=True, allow_missing=True, **options))
            assert np.array_equal(got, y) and result.missing_slots == ()
    wide = np.zeros((TOKENS, 2 * EXPERTS), np.float32)
    wide[:, ::2] = logits
    for form in Dlpack(logits, 2, 32, True), wide[:, ::2], logits[::-1][::-1]:
        assert all(np.array_equal(one, other) for one, other in zip(gates[2].choose(form), gates[2].choose(logits)))
    raised(TypeError, "logits has type bfloat16: allowed is float32", gates[0].choose, Dlpack(logits.view(np.uint16), 4, 16, True))
    assert np.array_equal(c.forward_logits("demo", LAYER, b.x32, wide[:, ::2], gates[0]), c.forward("demo", LAYER, b.x32, *gates[0].choose(wide[:, ::2])))
    logits[1] = np.nan
    mask = np.arange(TOKENS) != 1
    y = c.forward_logits("demo", LAYER, b.x32, logits, gates[0], active_mask=mask)
    assert not y[1].any() and y[0].all()
    check_bad_gates(c, b, logits)


def check_bad_gates(c, b, logits):
    good = expertd.Gate(TOP_K)
    raised(errors.InvalidArgument, "token 1", c.forward_logits, "demo", LAYER, b.x32, logits, good, nan_policy="reject")
    raised(TypeError, "gate is a int", c.forward_logits, "demo", LAYER, b.x32, logits, 2)
    raised(TypeError, "logits is a list", c.forward_logits, "demo", LAYER, b.x32, [[1.0]], good)
    raised(ValueError, "logits has rank 1: allowed is 2, [T,E]", c.forward_logits, "demo", LAYER, b.x32, logits[0], good)
    raised(ValueError, "logits has type bf16", c.forward_logits, "demo", LAYER, b.x32, Dlpack(logits.view(np.uint16)[:, ::2], 4, 16, True), good)
    raised(ValueError, "the gate has 15 experts", c.forward_logits, "demo", LAYER, b.x32, logits[:, :15], good)
    raised(ValueError, "logits have 3 tokens, x has 6", c.forward_logits, "demo", LAYER, b.x32, logits[:3], good)
    for kind, text, wrong in (
        (ValueError, "top_k", dict(top_k=17)),
        (ValueError, "top_k", dict(top_k=2**31)),
        (TypeError, "top_k is a float", dict(top_k=2.0)),
        (ValueError, "select is 'max': allowed are 'logit', 'softmax'", dict(select="max")),
        (ValueError, "select", dict(select="softmax_selected")),
        (ValueError, "group_mask is 'inf'", dict(group_mask="inf")),
        (TypeError, "renormalise is a int", dict(renormalise=1)),
        (TypeError, "epsilon is a str", dict(epsilon="0")),
        (TypeError, "bias has type float64: allowed is float32", dict(bias=np.zeros(EXPERTS))),
        (TypeError, "bias has type int32: allowed is float32", dict(bias=np.zeros(EXPERTS, np.int32))),
        (TypeError, "bias has type uint16: allowed is float32", dict(bias=np.zeros(EXPERTS, np.uint16))),
        (TypeError, "bias has type DLPack (2, 64, 1): allowed is float32", dict(bias=Dlpack(np.zeros(EXPERTS), 2, 64, True))),
        (TypeError, "chosen has type int64: allowed is int32", dict(chosen=b.ids.astype(np.int64))),
        (ValueError, "bias has shape [3]: allowed is [16]", dict(bias=np.zeros(3, np.float32))),
        (ValueError, "chosen has shape [6, 3]: allowed is [6, 2]", dict(chosen=np.zeros((TOKENS, 3), np.int32))),
        (ValueError, "groups", dict(groups=3, groups_kept=1, group_best=1)),
    ):
        gate = expertd.Gate(**{**dict(top_k=TOP_K), **wrong})
        for options in {}, dict(result="uncombined", shared_source="none", allow_missing=True, with_result=True):
            raised(kind, text, c.forward_logits, "demo", LAYER, b.x32, np.nan_to_num(logits), gate, **options)
        raised(kind, text, gate.choose, np.zeros((TOKENS, EXPERTS), np.float32))


def case_no_tokens(c, b):
    for x in b.x32[:0], np.empty((0, HIDDEN), np.float32):
        y = c.forward("demo", LAYER, x, np.empty((0, TOP_K), np.int32), np.empty((0, TOP_K), np.float32))
        assert y.shape == (0, HIDDEN)


# ---- bad arguments ----


def case_bad_arguments(c, b):
    table = [
        (TypeError, "model is None", dict(model=None)),
        (TypeError, "model is a int", dict(model=3)),
        (ValueError, "model is not set", dict(model="")),
        (ValueError, "model is 'a\\x00b'", dict(model="a\0b")),
        (TypeError, "layer is a str", dict(layer="3")),
        (ValueError, "layer is -1: allowed 0..4294967295", dict(layer=-1)),
        (ValueError, f"layer is {2**32}: allowed", dict(layer=2**32)),
        (TypeError, "x is a list", dict(x=[[1.0]])),
        (TypeError, "x has type float64: allowed are", dict(x=b.x32.astype(np.float64))),
        (TypeError, 'x has type uint16: bf16 in uint16 is taken with dtype="bf16"', dict(x=b.x)),
        (TypeError, "x has type >f4", dict(x=b.x32.astype(">f4"))),
        (ValueError, "x has rank 1", dict(x=b.x32[0])),
        (ValueError, "x has rank 9: allowed 1..8", dict(x=np.zeros((1,) * 9, np.float32))),
        (ValueError, "x has rank 9: allowed 1..8", dict(x=Dlpack(np.zeros((1,) * 9, np.float32), 2, 32, True))),
        (ValueError, "x has hidden 64, layer 2 of model demo has 128", dict(x=b.x32[:, :64])),
        (ValueError, "expert_ids has 3 in dimension 0: x has that many tokens, so 6 is needed", dict(expert_ids=b.ids[:3])),
        (ValueError, "expert_ids has type f32", dict(expert_ids=b.ids.astype(np.float32))),
        (ValueError, "expert_scales has 1 in dimension 1", dict(expert_scales=b.scales[:, :1])),
        (errors.InvalidArgument, "allowed", dict(expert_ids=b.ids + 1000)),
        (ValueError, "out has type i32", dict(out=np.zeros((TOKENS, HIDDEN), np.int32))),
        (ValueError, "out is read-only", dict(out=np.broadcast_to(np.float32(0), (TOKENS, HIDDEN)))),
        (ValueError, "out has strides", dict(out=np.zeros((HIDDEN, TOKENS), np.float32).T)),
        (ValueError, "out overlaps x", dict(out=b.x32)),
        (ValueError, "active_mask has rank 0: allowed 1..8", dict(active_mask=np.array(False))),
        (ValueError, "out has type f32 and out_dtype is bf16", dict(out=np.zeros((TOKENS, HIDDEN), np.float32), out_dtype="bf16")),
        (ValueError, "dtype is 'f16'", dict(dtype="f16")),
        (ValueError, "out_dtype is 'i8'", dict(out_dtype="i8")),
        (ValueError, "wire_dtype is 'i8': allowed are 'bf16', 'f16', 'f32'", dict(wire_dtype="i8")),
        (ValueError, "mode is 'fast': allowed are 'auto', 'decode', 'prefill'", dict(mode="fast")),
        (ValueError, "nan_policy is 2", dict(nan_policy=2)),
        (ValueError, "deadline is 0: allowed more than 0 and less than 4294 seconds", dict(deadline=0)),
        (ValueError, "deadline is nan", dict(deadline=float("nan"))),
        (TypeError, "deadline is a str", dict(deadline="3")),
        (TypeError, "x_abs_max is a str", dict(x_abs_max="3")),
        (ValueError, "step_group is -1", dict(step_group=-1)),
        (TypeError, "zero_experts is a float", dict(zero_experts=1.0)),
        (TypeError, "want_timing is a int", dict(want_timing=1)),
        (TypeError, "there is no argument 'top_k'", dict(top_k=2)),
        (ValueError, "allow_missing without with_result", dict(allow_missing=True)),
        (ValueError, "x_scales are given, but x is f32", dict(x_scales=np.ones(TOKENS, np.float32))),
        (ValueError, "const_alpha1 is missing: const_experts is 2, so it is needed, [2,128] of x's type", dict(const_experts=2)),
        (errors.NotFound, "other", dict(model="other")),
        (LookupError, "99", dict(layer=99)),
    ]
    for kind, text, wrong in table:
        arguments = dict(dict(model="demo", layer=LAYER, x=b.x32, expert_ids=b.ids, expert_scales=b.scales), **wrong)
        raised(kind, text, c.forward, **arguments)
    for number in np.float32, np.float64, np.int64:  # as Python's
        assert np.array_equal(c.forward("demo", LAYER, b.x32, b.ids, b.scales, deadline=number(60), x_abs_max=number(1000)), b.y32)
    raised(TypeError, "x_abs_max is a bool", c.forward, "demo", LAYER, b.x32, b.ids, b.scales, x_abs_max=True)
    raised(ValueError, "coordinator_url", expertd.Client)
    raised(ValueError, "calls_max is 0: allowed 1..65536", expertd.Client, URL, calls_max=0)
    raised(TypeError, "nodes is a str", expertd.Client, nodes="tcp://127.0.0.1:1")
    raised(TypeError, "tls is a str", expertd.Client, URL, tls="ca.pem")
    raised(ValueError, "tls_ca_file", expertd.Client, "tls+tcp://127.0.0.1:1")
    raised(TypeError, "cannot be copied", pickle.dumps, c)
    raised(TypeError, "cannot be copied", copy.deepcopy, c)
    error = raised(errors.NotFound, "NOT_FOUND: ", c.forward, "other", LAYER, b.x32, b.ids, b.scales)
    assert error.code == 5 and error.node == "" and error.expert is None and isinstance(error, expertd.Error)
    raised(errors.DeadlineExceeded, "", expertd.Client, "tcp://127.0.0.1:1", wait=0.1)
    raised(errors.Error, "token", expertd.Client, URL, token="wrong", wait=1)


def case_settings_of_plugins(c, b):
    """EXPERTD_URL and EXPERTD_OPTIONS: what is wrong in them is named with what is allowed."""
    from expertd import _settings

    def told(options):
        os.environ.update(EXPERTD_URL=URL, EXPERTD_OPTIONS=options)
        try:
            return _settings.arguments()
        finally:
            del os.environ["EXPERTD_URL"], os.environ["EXPERTD_OPTIONS"]

    raised(ValueError, "EXPERTD_URL is not set", _settings.arguments)
    seconds = "allowed is a number of seconds, more than 0 and less than 4294"
    for text, options in (
        ("allowed is a JSON object", "{"),
        ("allowed is a JSON object with model_name", "[]"),
        ("EXPERTD_OPTIONS has 'modle': allowed are model_name", '{"modle": 1}'),
        ("EXPERTD_OPTIONS has tls 3: allowed is an object with ca_file", '{"tls": 3}'),
        ("EXPERTD_OPTIONS has tls ['ca.pem']: allowed is an object", '{"tls": ["ca.pem"]}'),
        ("EXPERTD_OPTIONS has tls {'ca_file': 'c'}: allowed is an object", '{"tls": {"ca_file": "c"}}'),
        ("EXPERTD_OPTIONS has tls {'ca_file': 'c', 'server_name': 's', 'key': 'k'}", '{"tls": {"ca_file": "c", "server_name": "s", "key": "k"}}'),
        ("EXPERTD_OPTIONS has tls {'ca_file': 3, 'server_name': 's'}", '{"tls": {"ca_file": 3, "server_name": "s"}}'),
        ("EXPERTD_OPTIONS has token_file 0: allowed is the path", '{"token_file": 0}'),
        ("EXPERTD_OPTIONS has token_file '/nope', which cannot be read", '{"token_file": "/nope"}'),
        ("EXPERTD_OPTIONS has token_file '/dev/null', which is empty", '{"token_file": "/dev/null"}'),
        ("EXPERTD_OPTIONS has model_name 3: allowed is a text", '{"model_name": 3}'),
        ("EXPERTD_OPTIONS has model_name '': allowed is a text", '{"model_name": ""}'),
        ("EXPERTD_OPTIONS has version ['a']: allowed is a text", '{"version": ["a"]}'),
        (f"EXPERTD_OPTIONS has wait '10': {seconds}", '{"wait": "10"}'),
        (f"EXPERTD_OPTIONS has wait None: {seconds}", '{"wait": null}'),
        (f"EXPERTD_OPTIONS has wait True: {seconds}", '{"wait": true}'),
        (f"EXPERTD_OPTIONS has deadline 0: {seconds}", '{"deadline": 0}'),
        (f"EXPERTD_OPTIONS has deadline inf: {seconds}", '{"deadline": 1e999}'),
    ):
        raised(ValueError, text, told, options)
    given = told('{"model_name": "m", "tls": {"ca_file": "c", "server_name": "s", "cert_key_file": null}}')
    assert given["experts"] == URL and given["model_name"] == "m" and given["version"] is None and given["wait"] == 600 and given["client"] == {"tls": expertd.Tls("c", "s")}, given


# ---- what it knows, and its life ----


def case_tells_models_and_health(c, b):
    (model,) = c.models()
    assert model.name == "demo" and model.is_default and model.version and [layer.layer for layer in model.layers] == list(range(len(model.layers)))
    layer = model.layers[LAYER]
    assert (layer.hidden, layer.experts, layer.top_k, layer.copies_min, layer.activation) == (HIDDEN, EXPERTS, TOP_K, 2, "silu"), layer
    assert (layer.shared_inner, layer.alpha, layer.beta, layer.limit) == (0, 0.0, 0.0, 0.0), layer
    health = c.health()
    assert health.ready and health.epoch[1] > 0 and sorted(n.node for n in health.nodes) == ["a", "b"] and health.models == (model,)
    before = c.stats().calls
    c.forward(*b.arguments(), dtype="bf16")
    assert c.stats().calls == before + 1


def case_tells_memory_of_nodes(c, b):
    assert is_whole(c)
    held = c.memory(timeout=60.0)
    least = sum(layer.experts * 3 * layer.hidden * layer.inner for layer in c.models()[0].layers)  # bytes, if a weight were in 8 bits
    assert sorted(held) == ["a", "b"] and held["a"] == held["b"] and least <= held["a"] <= 8 * least, (held, least)
    with stopped_nodes():
        assert c.memory(timeout=0.2) == {"a": None, "b": None}
    raised(ValueError, "timeout is 0", c.memory, timeout=0)
    with expertd.Client("tcp://127.0.0.1:1", wait=None) as nowhere:
        raised(errors.Unavailable, "no routing table yet", nowhere.memory)


def case_closes(c, b):
    with client() as own:
        call = own.prepare(*b.arguments(), dtype="bf16")
        own.set_token(TOKEN)
    for what in own.forward, own.prepare:
        raised(errors.Closed, "the client is closed", what, *b.arguments(), dtype="bf16")
    raised(errors.Closed, "", call.run)
    own.close()
    gone = close_with_calls_under_way(b)
    gc.collect()
    assert gone() is None, "a client that nobody has is kept"


def close_with_calls_under_way(b):
    own, ended = client(), []

    def call_on():
        ended.append(raised(errors.Error, "CANCELLED", own.forward, *b.arguments(), dtype="bf16", deadline=60))

    with stopped_nodes():
        threads = [threading.Thread(target=call_on) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(_client._under_way) == 4, "calls under way")
        own.close()
        for thread in threads:
            thread.join()
    assert len(ended) == 4 and not _client._under_way
    return weakref.ref(own)


def case_a_client_that_only_its_call_has(c, b):
    owners = [client()]
    with stopped_nodes():
        gone = abandon_a_call(owners.pop(), b)
        gc.collect()
        assert gone() is not None and len(_client._under_way) == 1
    wait_for(lambda: not _client._under_way and (gc.collect(), gone())[1] is None, "the client's end")


def abandon_a_call(own, b):
    flight = _client._Flight(own, _client._Request(*b.arguments(), None, dtype="bf16"), lambda: None)
    flight.begin()
    return weakref.ref(own)


def case_threads(c, b):
    failed = []

    def call_on():
        for _ in range(50):
            if not np.array_equal(c.forward(*b.arguments(), dtype="bf16"), b.y16):
                failed.append(1)

    threads = [threading.Thread(target=call_on) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def in_child(queue, y):
    b = batch_of_child
    try:
        parents.forward(*b.arguments(), dtype="bf16")
        queue.put("the parent's client works in a child")
    except errors.FailedPrecondition as error:
        assert "forked" in str(error)
    parents.close()
    with client() as own:
        queue.put("" if np.array_equal(own.forward(*b.arguments(), dtype="bf16"), y) else "other bits")


def case_fork(c, b):
    global parents, batch_of_child
    parents, batch_of_child = c, b
    fork = multiprocessing.get_context("fork")
    stop = []
    busy = threading.Thread(target=lambda: [c.forward(*b.arguments(), dtype="bf16") for _ in iter(lambda: bool(stop), True)])
    busy.start()  # forks in the midst of calls
    for _ in range(4):
        queue = fork.Queue()
        child = fork.Process(target=in_child, args=(queue, b.y16))
        child.start()
        assert queue.get(timeout=60) == ""
        child.join()
        assert child.exitcode == 0
    stop.append(1)
    busy.join()
    assert np.array_equal(c.forward(*b.arguments(), dtype="bf16"), b.y16)


# ---- prepared calls ----


def case_prepared(c, b):
    x, out = b.x.copy(), np.zeros((TOKENS, HIDDEN), np.uint16)
    with c.prepare("demo", LAYER, x, b.ids, b.scales, out, dtype="bf16") as call:
        assert call.run() is out and np.array_equal(out, b.y16)
        out[:] = 9
        assert np.array_equal(call.run(2)[:2], b.y16[:2]) and (out[2:] == 9).all()
        x[0] = x[1]
        b2 = c.forward("demo", LAYER, x, b.ids, b.scales, dtype="bf16")
        assert np.array_equal(call.run(), b2)
        raised(ValueError, "n_active is 7: allowed 0..6", call.begin, TOKENS + 1)
        raised(errors.FailedPrecondition, "not begun", call.finish)
        call.begin()
        raised(errors.FailedPrecondition, "begun already", call.begin)
        call.finish()
        assert np.array_equal(asyncio.run(call.run_async(3))[:3], b2[:3])
    raised(errors.Closed, "the prepared call is closed", call.run)
    # a copy of it would be computed again and again, whatever the caller refills
    raised(ValueError, "x has strides (4, 24): allowed are rows without gaps", c.prepare, "demo", LAYER, np.asfortranarray(b.x32), b.ids, b.scales)


# ---- tokens as they are ready ----


def check_error_of_cancelled_run(c, b):
    """What on_tokens raises in a run whose task is cancelled is not the next run's error."""
    first = []

    async def cancel():
        loop = asyncio.get_running_loop()
        task, cancelled = asyncio.current_task(), threading.Event()
        first.append(lambda: loop.call_soon_threadsafe(lambda: (task.cancel(), cancelled.set())) and cancelled.wait())
        await call.run_async()

    def stop_once(*_):
        if first:
            first.pop()()
            raise LookupError("of the first run")

    with c.prepare(*b.arguments(), dtype="bf16", on_tokens=stop_once) as call:
        raised(asyncio.CancelledError, "", asyncio.run, cancel())
        assert not first and np.array_equal(call.run(), b.y16)


def case_on_tokens(c, b):
    told, out = [], np.zeros((TOKENS, HIDDEN), np.uint16)

    def tell(first, count):
        assert first == sum(n for _, n in told) and np.array_equal(out[first : first + count], b.y16[first : first + count])
        told.append((first, count))

    def stop(first, count):
        told.append((first, count))
        raise LookupError("enough")

    def check(answer):
        result = answer[1] if isinstance(answer, tuple) else None
        assert sum(n for _, n in told) == TOKENS and np.array_equal(out, b.y16) and (result is None or result.tokens_delivered == TOKENS), told
        told.clear()
        out[:] = 0

    streamed = dict(dtype="bf16", on_tokens=tell)
    for mode in "decode", "prefill":
        check(c.forward(*b.arguments(), out, mode=mode, with_result=True, **streamed))
        check(asyncio.run(c.forward_async(*b.arguments(), out, mode=mode, **streamed)))
        with c.prepare(*b.arguments(), out, mode=mode, **streamed) as call:
            check(call.run())
            check(asyncio.run(call.run_async()))
    raised(LookupError, "enough", c.forward, *b.arguments(), out, dtype="bf16", on_tokens=stop)
    with c.prepare(*b.arguments(), out, dtype="bf16", on_tokens=stop) as call:
        for _ in range(2):
            raised(LookupError, "enough", call.run)
        raised(LookupError, "enough", call.answer)
    assert len(told) == 3 and all(first == 0 for first, _ in told), told
    check_error_of_cancelled_run(c, b)
    raised(TypeError, "on_tokens is a int: allowed is a function of (first, count)", c.forward, *b.arguments(), dtype="bf16", on_tokens=3)


# ---- interrupts ----


def interrupt_when(condition):
    def wait():
        wait_for(condition, "a call under way")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def case_ctrl_c_cancels(c, b):
    out = np.full((TOKENS, HIDDEN), 5, np.uint16)
    with c.prepare(*b.arguments(), dtype="bf16", deadline=60) as call, stopped_nodes():
        thread = interrupt_when(lambda: _client._under_way)
        raised(KeyboardInterrupt, "", c.forward, *b.arguments(), out, dtype="bf16", deadline=60)
        thread.join()
        assert not _client._under_way and (out == 5).all()
        call.begin()
        thread = interrupt_when(call._busy.locked)
        raised(KeyboardInterrupt, "", call.finish)
        thread.join()
    assert np.array_equal(c.forward(*b.arguments(), dtype="bf16"), b.y16)


def case_cancelled_tasks(c, b):
    async def cancel():
        task = asyncio.create_task(c.forward_async(*b.arguments(), dtype="bf16", deadline=60))
        while not _client._under_way:
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return not _client._under_way
        return False

    async def time_out():
        try:
            await asyncio.wait_for(c.forward_async(*b.arguments(), dtype="bf16", deadline=60), 0.05)
        except asyncio.TimeoutError:
            return not _client._under_way
        return False

    with stopped_nodes():
        assert asyncio.run(cancel()) and asyncio.run(time_out())


# ---- last: it kills a node ----


def case_asyncio_survives_a_killed_node(c, b):
    async def call_on():
        for _ in range(20):
            assert np.array_equal(await c.forward_async(*b.arguments(), dtype="bf16"), b.y16)

    async def run():
        stop_nodes()
        tasks = [asyncio.create_task(call_on()) for _ in range(64)]
        while len(_client._under_way) < 64:  # all are in flight when it dies
            await asyncio.sleep(0)
        os.kill(NODES[1], signal.SIGKILL)
        os.kill(NODES[0], signal.SIGCONT)
        await asyncio.gather(*tasks)

    before = c.stats()
    asyncio.run(run())
    assert c.stats().calls - before.calls == 64 * 20 and c.stats().calls_failed == before.calls_failed


# ---- where the service wants TLS ----


def make_client(answers):
    try:
        with client():
            answers.put("made")
    except errors.FailedPrecondition as error:
        answers.put(str(error))


def tls_calls_and_children(c, b):
    assert np.array_equal(c.forward(*b.arguments(), dtype="bf16"), b.y16)
    raised(errors.DeadlineExceeded, "", expertd.Client, URL, token=TOKEN, tls=expertd.Tls(CA, "other.example"), wait=0.5)
    for way, answer in ("fork", "multiprocessing's spawn"), ("spawn", "made"):
        context = multiprocessing.get_context(way)
        answers = context.Queue()
        child = context.Process(target=make_client, args=(answers,))
        child.start()
        said = answers.get(timeout=60)
        assert answer in said, said
        child.join()


def main():
    cases = [(name, case) for name, case in globals().items() if name.startswith("tls_" if CA else "case_")]
    with Cluster() as files, client() as c:
        b = Batch(files, 5)
        for name, case in cases:
            case(c, b)
            print(f"passed: {name.partition('_')[2]}", flush=True)
            assert not _client._under_way and not Dlpack.alive
    return 0


if __name__ == "__main__":
    sys.exit(main())
