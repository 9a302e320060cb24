#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A token batch through the coordinator's open door; prints y, a line per token: thin_client.py URL MODEL LAYER BATCH.safetensors"""
import json, os, struct, sys
import pynng  # the only package that is needed

DTYPES = {"BF16": 1, "F16": 2, "F32": 3, "I32": 6, "I64": 7}  # safetensors' names, expertd's numbers
CRC = list(range(256))  # table of CRC32C (Castagnoli)
for _ in range(8):
    CRC = [n >> 1 ^ 0x82F63B78 * (n & 1) for n in CRC]

def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF

def varint(n):  # protobuf's integers: 7 bits a byte, lowest first; the top bit says that more follow
    return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])

def field(number, value):  # number << 3 | type: 0 an integer, 2 a length and so many bytes
    return varint(number << 3) + varint(value) if isinstance(value, int) else varint(number << 3 | 2) + varint(len(value)) + value

def fields(data):  # the way back
    found, at, numbers = {}, 0, []
    while at < len(data):
        n = shift = 0
        while shift == 0 or data[at - 1] > 127:
            n, at, shift = n | (data[at] & 127) << shift, at + 1, shift + 7
        numbers.append(n)
        if len(numbers) == 2:  # tag, then value or length
            (tag, n), numbers = numbers, []
            found[tag >> 3], at = (data[at : at + n], at + n) if tag & 7 == 2 else (n, at)
    return found

def pad(data):  # tensors begin at multiples of 64
    return data + bytes(-len(data) % 64)

url, model, layer, path = sys.argv[1:]
token = os.environ.get("EXPERTD_TOKEN", "").encode()
blob = open(path, "rb").read()
size = 8 + struct.unpack_from("<Q", blob)[0]  # of safetensors' JSON header; the data follow
(x, ids, scales) = (json.loads(blob[8:size])[name] for name in ("x", "expert_ids", "expert_scales"))
section = b"".join(pad(blob[size + t["data_offsets"][0] : size + t["data_offsets"][1]]) for t in (x, ids))
section += blob[size + scales["data_offsets"][0] : size + scales["data_offsets"][1]]  # a frame ends with its last tensor byte
tokens, hidden = x["shape"]
values = {1: model.encode(), 3: int(layer), 4: tokens, 5: hidden, 6: ids["shape"][1], 7: DTYPES[x["dtype"]], 8: DTYPES[ids["dtype"]],
          9: DTYPES[scales["dtype"]], 10: DTYPES["F32"]}  # GatewayForwardRequest in proto/gateway.proto; 10: y in f32
call = field(1, field(1, b"authorization") + field(2, b"Bearer " + token)) if token else b""  # CallHeader in proto/common.proto
header = struct.pack("<I", len(call)) + call + b"".join(field(*v) for v in values.items())
payload = pad(header) + section
fixed = struct.pack("<4sBBHQHHIIIIIQIQ", b"EPD1", 1, 1, 0, 1, 0, 0x0601, 0, 0xFFFFFFFF, len(header), 64 + len(pad(header)), 0,
                    len(section), crc32c(payload), 0)  # lib/wire/frame.h; 0x0601 is Gateway.Forward
with pynng.Req0(dial=url, recv_timeout=30000) as door:
    door.send(fixed + struct.pack("<I", crc32c(fixed)) + payload)
    reply = door.recv()
(status, header_bytes, at), (crc,) = struct.unpack_from("<I4xII", reply, 20), struct.unpack_from("<I", reply, 48)
if crc != crc32c(reply[64:]):
    sys.exit("the reply is damaged")
if status != 0:  # a gRPC code; the header is message Status, its field 2 the words
    sys.exit(f"gRPC code {status}: {fields(reply[64 : 64 + header_bytes])[2].decode()}")
for t in range(tokens):
    print(json.dumps(struct.unpack_from(f"<{hidden}f", reply, at + 4 * hidden * t)))
