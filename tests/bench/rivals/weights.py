# SPDX-License-Identifier: Apache-2.0
"""Weight forms made of bf16 weights by one function each, in NumPy, so that all who know the form compute with the same numbers. Of one matrix
[rows,columns] each returns its parts by name; every form in groups has 32 columns to a scale."""
import numpy as np

from layer import from_bf16

GROUP = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _groups(values):
    rows, columns = values.shape
    return values.reshape(rows, columns // GROUP, GROUP)


def _codes(values, scales, least, most):
    """Nearest integers of values / scales; all 0 where a scale is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.nan_to_num(np.rint(values / scales)), least, most)


def bf16(bits):
    return {"weight": bits}


def w8a8(bits):
    values = from_bf16(bits)
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    return {"weight": _codes(values, scales, -127, 127).astype(np.int8), "weight_scale": scales}


def int8_g32(bits):
    """As llama.cpp's q8_0: scales are f16."""
    values = _groups(from_bf16(bits))
    scales = np.abs(values).max(axis=2, keepdims=True) / np.float32(127)
    codes = _codes(values, scales, -127, 127).astype(np.int8)
    return {"weight": codes.reshape(bits.shape), "weight_scale": scales[:, :, 0].astype(np.float16)}


def int4(bits):
    """Codes -8..7, scales bf16 as bits; two codes to a byte with 8 added, the even column in the low half."""
    values = _groups(from_bf16(bits))
    rounded = np.abs(values).max(axis=2, keepdims=True) / np.float32(7.5)
    scale_bits = ((rounded.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    codes = (_codes(values, from_bf16(scale_bits), -8, 7) + 8).astype(np.uint8).reshape(bits.shape)
    return {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scale_bits[:, :, 0]}


def mxfp4(bits):
    """Scales 2^(e-127) in a byte: the largest value lies below 8 of them; two e2m1 to a byte, the even column in the low half."""
    values = _groups(from_bf16(bits))
    most = np.abs(values).max(axis=2, keepdims=True)
    exponents = np.clip((most.view(np.uint32) >> 23).astype(np.int32) - 2, 0, 254)
    magnitudes = np.abs(values) * np.exp2(127 - exponents.astype(np.float32))
    edges = (E2M1[1:] + E2M1[:-1]) / 2
    codes = np.zeros(values.shape, np.uint8)
    for edge in edges:
        codes += magnitudes > edge
    codes = (codes | (values < 0).astype(np.uint8) << 3).reshape(bits.shape)
    return {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": exponents[:, :, 0].astype(np.uint8)}


FORMS = {"bf16": bf16, "w8a8": w8a8, "int8-g32": int8_g32, "int4": int4, "mxfp4": mxfp4}
# Types of the parts as safetensors calls them; bits of bf16 are uint16 in NumPy.
TYPES = {"bf16": {"weight": "BF16"}, "w8a8": {"weight": "I8", "weight_scale": "F32"}, "int4": {"weight_packed": "I32", "weight_scale": "BF16"},
         "mxfp4": {"weight_packed": "U8", "weight_scale": "U8"}}


def q8_0_blocks(codes, scales):
    """llama.cpp's blocks [rows, 34 bytes for each 32 columns] of int8-g32."""
    rows, columns = codes.shape
    blocks = np.empty((rows, columns // GROUP, 2 + GROUP), np.uint8)
    blocks[:, :, :2] = scales.reshape(rows, -1, 1).view(np.uint8)
    blocks[:, :, 2:] = codes.reshape(rows, -1, GROUP).view(np.uint8)
    return blocks.reshape(rows, -1)


def mxfp4_blocks(packed, scales):
    """llama.cpp's blocks [rows, 17 bytes for each 32 columns] of mxfp4: columns 0..15 in low halves, 16..31 in high ones."""
    rows = packed.shape[0]
    codes = np.empty((rows, packed.shape[1] * 2), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    codes = codes.reshape(rows, -1, GROUP)
    blocks = np.empty((rows, codes.shape[1], 1 + GROUP // 2), np.uint8)
    blocks[:, :, 0] = scales
    blocks[:, :, 1:] = codes[:, :, : GROUP // 2] | codes[:, :, GROUP // 2 :] << 4
    return blocks.reshape(rows, -1)
