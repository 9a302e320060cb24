# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one layer that expertd reads, whose matrices lie in the file as stacks [E,rows,..], so that rivals map the same bytes: parts.json
beside them says where."""
import json, os, struct

import numpy as np

from layer import MATRICES, each_expert
import weights

NUMPY = {"BF16": np.uint16, "F32": np.float32, "I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64}
# llama.cpp's: number, and bytes of a block of so many columns.
GGUF_TYPES = {"Q4_0": (2, 18, 32), "Q8_0": (8, 34, 32), "Q4_K": (12, 144, 256), "Q6_K": (14, 210, 256), "MXFP4": (39, 17, 32)}
ALIGNMENT = 64
_SCHEMES = {
    "w8a8": ("int-quantized", dict(num_bits=8, type="int", symmetric=True, strategy="channel"),
             dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)),
    "int4": ("pack-quantized", dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=weights.GROUP), None),
    "mxfp4": ("mxfp4-pack-quantized", dict(num_bits=4, type="float", symmetric=True, strategy="group", group_size=weights.GROUP), None),
}


def _config(shape, form):
    config = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=shape.hidden, moe_intermediate_size=shape.inner,
                  num_experts=shape.experts, num_experts_per_tok=shape.top_k, num_hidden_layers=1, norm_topk_prob=True, hidden_act="silu",
                  decoder_sparse_step=1, mlp_only_layers=[], intermediate_size=shape.inner, num_attention_heads=1, vocab_size=256)
    if form in _SCHEMES:
        layout, of_weights, of_inputs = _SCHEMES[form]
        group = dict(targets=["Linear"], weights=of_weights, input_activations=of_inputs)
        config["quantization_config"] = dict(quant_method="compressed-tensors", format=layout, quantization_status="compressed",
                                             config_groups=dict(group_0=group))
    return config


def _part_shape(form, part, rows, columns):
    """As NumPy has it, then as the file says it."""
    if part == "weight_scale":
        mine = (rows, 1 if form == "w8a8" else columns // weights.GROUP)
        return mine, mine
    mine = (rows, columns // 2 if part == "weight_packed" else columns)
    return mine, (rows, columns // 8) if weights.TYPES[form][part] == "I32" else mine


def _create(path, head, parts):
    """A file of a head and the parts, [(name, shape, NumPy's type)] in their order: mapped, to be filled."""
    places, offset = {}, len(head)
    for name, shape, dtype in parts:
        places[name] = dict(file=os.path.basename(path), offset=offset, shape=list(shape), dtype=np.dtype(dtype).str)
        offset += int(np.prod(shape)) * np.dtype(dtype).itemsize
        offset += -offset % (ALIGNMENT if path.endswith(".gguf") else 1)
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(offset)
    folder = os.path.dirname(path)
    with open(f"{folder}/parts.json", "w") as file:
        json.dump(places, file)
    return open_stacks(folder, "r+")


def open_stacks(folder, mode="r"):
    """"gate.weight" and so on: a mapped array [E,rows,..]."""
    with open(f"{folder}/parts.json") as file:
        places = json.load(file)
    return {name: np.memmap(f"{folder}/{p['file']}", np.dtype(p["dtype"]), mode, p["offset"], tuple(p["shape"])) for name, p in places.items()}


def _safetensors_head(entries):
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def open_safetensors(path, tensors):
    """A new file: its tensors mapped by name, to be filled. tensors: [(name, shape, type)]"""
    entries, offset = {}, 0
    for name, shape, kind in tensors:
        size = int(np.prod(shape)) * np.dtype(NUMPY[kind]).itemsize
        entries[name] = dict(dtype=kind, shape=list(shape), data_offsets=[offset, offset + size])
        offset += size
    return _create(path, _safetensors_head(entries), [(name, shape, NUMPY[kind]) for name, shape, kind in tensors])


def create_safetensors(folder, shape, form):
    entries, parts, offset = {}, [], 0

    def add(name, kind, size, said):
        nonlocal offset
        entries[name] = dict(dtype=kind, shape=said, data_offsets=[offset, offset + size])
        offset += size

    for matrix in MATRICES:
        for part, kind in weights.TYPES[form].items():
            mine, said = _part_shape(form, part, *shape.matrix(matrix))
            dtype = np.uint8 if kind == "I32" else NUMPY[kind]
            parts.append((f"{matrix}.{part}", (shape.experts, *mine), dtype))
            for e in range(shape.experts):
                add(f"model.layers.0.mlp.experts.{e}.{matrix}_proj.{part}", kind, int(np.prod(mine)) * np.dtype(dtype).itemsize, list(said))
    shaped = form == "int4"
    if shaped:
        parts.append(("weight_shape", (len(MATRICES), shape.experts, 2), np.int64))
        for matrix in MATRICES:
            for e in range(shape.experts):
                add(f"model.layers.0.mlp.experts.{e}.{matrix}_proj.weight_shape", "I64", 16, [2])
    stacks = _create(f"{folder}/model.safetensors", _safetensors_head(entries), parts)
    if shaped:
        stacks["weight_shape"][:] = np.array([shape.matrix(m) for m in MATRICES], np.int64)[:, None, :]
    with open(f"{folder}/config.json", "w") as file:
        json.dump(_config(shape, form), file)
    return stacks


def gguf_row_bytes(kind, columns):
    _, block, wide = GGUF_TYPES[kind]
    return columns // wide * block


def _gguf_value(value):
    """The type's number and the value. Numbers of one kind have one type: integers are uint32, those of split.* uint16 by (value, 2)."""
    if isinstance(value, list):
        kinds, values = zip(*map(_gguf_value, value))
        return 9, struct.pack("<IQ", kinds[0], len(value)) + b"".join(values)
    if isinstance(value, str):
        return 8, struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return value[1], struct.pack("<H" if value[1] == 2 else "<i", value[0])
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (4, struct.pack("<I", value))


def open_gguf(path, keys, tensors):
    """A new file: its tensors mapped, to be filled, as parts.json beside it tells. keys: {name: str, int (uint32), float, a list of one of them, or (value,
    type's number)}; tensors: [(name, key of the mapped array, shape as NumPy has it, type)]; arrays have blocks' bytes for columns."""

    def text(value):
        return _gguf_value(value)[1]

    keys = {"general.alignment": ALIGNMENT, **keys}
    pairs = [text(name) + struct.pack("<I", kind) + value for name, (kind, value) in ((name, _gguf_value(value)) for name, value in keys.items())]
    parts, entries, offset = [], [], 0
    for name, key, shape, kind in tensors:
        number = {"F32": 0, "BF16": 30}.get(kind) if kind not in GGUF_TYPES else GGUF_TYPES[kind][0]
        mine = (*shape[:-1], gguf_row_bytes(kind, shape[-1])) if kind in GGUF_TYPES else shape
        parts.append((key, mine, NUMPY.get(kind, np.uint8)))
        entries.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, offset))
        offset += int(np.prod(mine)) * np.dtype(parts[-1][2]).itemsize
        offset += -offset % ALIGNMENT
    head = struct.pack("<IIQQ", 0x46554747, 3, len(entries), len(pairs)) + b"".join(pairs + entries)
    return _create(path, head + b"\0" * (-len(head) % ALIGNMENT), parts)


def create_gguf(folder, shape, kind):
    arch = "qwen3moe"
    counts = dict(block_count=1, embedding_length=shape.hidden, expert_count=shape.experts, expert_used_count=shape.top_k,
                  expert_feed_forward_length=shape.inner, feed_forward_length=shape.inner)
    keys = {"general.architecture": arch, **{f"{arch}.{name}": value for name, value in counts.items()}}
    tensors = [(f"blk.0.ffn_{matrix}_exps.weight", f"{matrix}.blocks", (shape.experts, *shape.matrix(matrix)), kind) for matrix in MATRICES]
    return open_gguf(f"{folder}/model.gguf", keys, tensors)


def write_form(folder, shape, form, plain):
    """The bf16 stacks of plain in a form of weights.FORMS, as the file that expertd reads."""
    os.makedirs(folder)
    in_gguf = form == "int8-g32"
    stacks = create_gguf(folder, shape, "Q8_0") if in_gguf else create_safetensors(folder, shape, form)

    def convert(matrix, e):
        made = weights.FORMS[form](plain[f"{matrix}.weight"][e])
        if in_gguf:
            stacks[f"{matrix}.blocks"][e] = weights.q8_0_blocks(made["weight"], made["weight_scale"])
            return
        for part, values in made.items():
            stacks[f"{matrix}.{part}"][e] = values

    each_expert(shape, convert)
    return stacks
