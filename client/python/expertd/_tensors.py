# SPDX-License-Identifier: Apache-2.0
"""Arrays of callers as views that libexpertd reads or writes: NumPy's by its own attributes, all others by DLPack.
Nothing is copied but a call's input of NumPy's whose rows have gaps between their elements."""

import ctypes
import functools
import sys
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

import numpy as np

from . import _c

DTYPES = _c.ENUMS["EP_DTYPE_"]
BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i8": 1, "u8": 1, "i32": 4, "i64": 8, "bool": 1, "f8e4m3": 1}
NUMPY = {
    "float32": "f32",
    "float16": "f16",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
    "bool": "bool",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
}
DLPACK = {
    (0, 8): "i8",
    (0, 32): "i32",
    (0, 64): "i64",
    (1, 8): "u8",
    (2, 16): "f16",
    (2, 32): "f32",
    (4, 16): "bf16",
    (6, 8): "bool",
}
CPU = (1, 0)
COPIED, REFUSED, TAKEN = range(3)  # gaps between elements, see view


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class DLVersioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", DLTensor),
    ]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.py_object, c_char_p]


def _dense(shape, size):
    return [size * int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]


class View:
    """An ep_tensor and what must live as long as it is used."""

    __slots__ = ("tensor", "keep", "dtype", "shape")

    def __init__(self, keep, dtype, pointer, shape, strides):
        self.keep, self.dtype, self.shape = keep, dtype, tuple(shape)
        self.tensor = _c.Tensor(ctypes.sizeof(_c.Tensor), DTYPES[dtype], pointer, len(self.shape))
        self.tensor.shape[: len(self.shape)] = self.shape
        self.tensor.stride_bytes[: len(self.shape)] = strides if 0 not in self.shape else _dense(self.shape, BYTES[dtype])


def _numpy_name(dtype):
    return next(name for name, word in NUMPY.items() if word == dtype)


def _other_type(name, what, only, names):
    allowed = f"are {', '.join(sorted(names))}, and uint16 with dtype=\"bf16\"" if only is None else f"is {_numpy_name(only)}"
    return TypeError(f"{name} has type {what}: allowed {allowed}")


def _element(name, dtype, wanted16, only):
    if dtype == "uint16" and only is None:
        if wanted16 is None:
            raise TypeError(f'{name} has type {dtype}: bf16 in uint16 is taken with dtype="bf16"')
        return wanted16
    if dtype not in NUMPY:
        raise _other_type(name, dtype, only, NUMPY)
    return NUMPY[dtype]


def _rows_are_whole(shape, strides, size):
    return 0 in shape or not shape or shape[-1] <= 1 or strides[-1] == size  # NumPy's empty ones have strides of 0


def _of_numpy(name, array, wanted16, writable, gaps, only):
    if not array.dtype.isnative:
        raise TypeError(f"{name} has type {array.dtype.str}: allowed is this machine's byte order")
    dtype = _element(name, array.dtype.name, wanted16, only)
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} is read-only")
    whole = _rows_are_whole(array.shape, array.strides, array.itemsize) and min(array.strides, default=0) >= 0
    if not whole and gaps != TAKEN:
        if writable or gaps == REFUSED:
            raise ValueError(f"{name} has strides {array.strides}: allowed are rows without gaps, in order")
        array = np.ascontiguousarray(array)
    return View(array, dtype, array.__array_interface__["data"][0], array.shape, array.strides)


def _capsule(name, array, writable):
    if writable and type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise ValueError(f"{name} is a JAX array, which nobody may write to: give NumPy's or PyTorch's")
    device = tuple(int(part) for part in array.__dlpack_device__())
    if device[0] != CPU[0]:
        raise ValueError(
            f"{name} is on DLPack device {device}: allowed is the host's memory, {CPU}; copy it there first"
        )
    try:
        return array.__dlpack__(max_version=(1, 0))
    except TypeError:
        return array.__dlpack__()


def _of_dlpack(name, array, wanted16, writable, gaps, only):
    try:
        capsule = _capsule(name, array, writable)
    except (BufferError, RuntimeError) as error:  # a tensor that wants a gradient, for one, which there is none of
        raise ValueError(f"{name} cannot be had by DLPack: {error}") from None
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = DLVersioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise TypeError(f"{name} comes as DLPack {managed.major}.{managed.minor}: allowed 1.x and older")
        if writable and managed.flags & 1:
            raise ValueError(f"{name} is read-only")
        t = managed.tensor
    elif _is_valid(capsule, b"dltensor"):
        t = DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
    else:
        raise TypeError(f"{name}: __dlpack__ gave no DLPack capsule")
    what = f"DLPack ({t.code}, {t.bits}, {t.lanes})"
    dtype = wanted16 if (t.code, t.bits) == (1, 16) and wanted16 else DLPACK.get((t.code, t.bits))
    if dtype is None or t.lanes != 1:
        raise _other_type(name, what, only, set(DLPACK.values()))
    if not 0 <= t.ndim <= _c.RANK_MAX:
        raise ValueError(f"{name} has rank {t.ndim}: allowed 1..{_c.RANK_MAX}")
    shape, size = t.shape[: t.ndim], BYTES[dtype]
    strides = [s * size for s in t.strides[: t.ndim]] if t.strides else _dense(shape, size)
    pointer = (t.data or 0) + t.byte_offset
    if gaps == TAKEN or (_rows_are_whole(shape, strides, size) and min(strides, default=0) >= 0):
        return View((capsule, array), dtype, pointer, shape, strides)  # the capsule frees what it holds when it goes
    raise ValueError(
        f"{name} has strides {strides} in bytes: allowed are rows without gaps, in order; make it contiguous"
    )


@functools.lru_cache(maxsize=None)
def _torch_names():
    torch = sys.modules["torch"]
    return {getattr(torch, name): word for name, word in NUMPY.items() if word in DLPACK.values()}


def _of_torch(name, array):
    """What DLPack gives, at a tenth of its time. None: not a plain tensor, of which DLPack tells what is wrong."""
    dtype = _torch_names().get(array.dtype)
    if dtype is None or not array.is_cpu or array.requires_grad or not array.is_contiguous():
        return None
    shape, stride, strides = array.shape, BYTES[dtype], []
    if len(shape) > _c.RANK_MAX:
        return None
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    return View(array, dtype, array.data_ptr(), shape, strides)


def view(name, array, wanted16=None, writable=False, gaps=COPIED, only=None):
    """View of an input, or with writable of an output. wanted16: what elements of uint16 are. gaps between a row's
    elements: an input with them is COPIED (NumPy's only), REFUSED where the caller refills it, or TAKEN as it is. only:
    the one type allowed; None: the library says which are."""
    found = _view(name, array, wanted16, writable, gaps, only)
    if only not in (None, found.dtype):
        raise _other_type(name, _numpy_name(found.dtype), only, ())
    if not found.shape:
        raise ValueError(f"{name} has rank 0: allowed 1..{_c.RANK_MAX}")  # to libexpertd it would be absent
    return found


def _view(name, array, wanted16, writable, gaps, only):
    torch = sys.modules.get("torch")
    of_torch = getattr(torch, "Tensor", None)  # None too while torch is being imported
    if of_torch is not None and isinstance(array, of_torch):
        if array.is_neg():  # DLPack gives the memory as it is
            raise ValueError(f"{name} is a tensor whose sign torch has yet to turn: give {name}.resolve_neg()")
        plain = _of_torch(name, array) if type(array) is of_torch else None
        if plain is not None:
            return plain
    if isinstance(array, np.ndarray):
        if array.ndim > _c.RANK_MAX:
            raise ValueError(f"{name} has rank {array.ndim}: allowed 1..{_c.RANK_MAX}")
        return _of_numpy(name, array, wanted16, writable, gaps, only)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _of_dlpack(name, array, wanted16, writable, gaps, only)
    raise TypeError(f"{name} is a {type(array).__name__}: allowed are NumPy arrays and objects with __dlpack__")


def to_numpy(view):
    """A dense copy."""
    dtype = _numpy_name(view.dtype)
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    strides = view.tensor.stride_bytes[: len(view.shape)]
    span = sum((n - 1) * stride for n, stride in zip(view.shape, strides)) + BYTES[view.dtype]
    there = (c_uint8 * span).from_address(view.tensor.data)
    return np.ndarray(view.shape, dtype, there, strides=strides).copy()


def empty_like(array, shape, dtype):
    """A new output of the kind of array: PyTorch's for PyTorch's, else NumPy's."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        dtypes = {word: there for there, word in _torch_names().items()}
        return torch.empty(shape, dtype=dtypes[dtype], device=array.device)
    if dtype != "bf16":
        return np.empty(shape, _numpy_name(dtype))
    if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":
        return np.empty(shape, array.dtype)
    return np.empty(shape, np.uint16)
