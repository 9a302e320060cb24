# SPDX-License-Identifier: Apache-2.0
"""A Qwen3-MoE model of drawn weights, written once for all engines: the experts as llama.cpp's Q4_0 in one GGUF file, which expertd and llama.cpp both
read, and what is not experts beside it, for transformers in bf16 safetensors, for llama.cpp in bf16 and in its own 4 bits."""
import concurrent.futures, dataclasses, json, math, os

import numpy as np

from containers import open_gguf, open_safetensors
from layer import MATRICES, from_bf16, to_bf16

BLOCK = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])  # of Q4_0, 32 columns
SPARE = 1 << 16  # blocks by which layers' experts may be shifted against each other
BYTE_TOKENS, FIRST_TOKEN = 256, 300  # tokens that are drawn come behind what a vocabulary of llama.cpp must have
DENSE_FORMS = ("bf16", "q4_0")
FILES = "model-00001-of-00002.gguf", "model-00002-of-00002.gguf"


@dataclasses.dataclass(frozen=True)
class Model:
    layers: int = 48
    hidden: int = 2048
    experts: int = 128
    top_k: int = 8
    inner: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 32768  # of 151,936: each engine has less to read for the last product
    context: int = 40960

    def matrix(self, name):
        """[rows,columns] of an expert's matrix"""
        return (self.hidden, self.inner) if name == "down" else (self.inner, self.hidden)

    @property
    def expert_weights(self):
        return 3 * self.layers * self.experts * self.hidden * self.inner

    @property
    def expert_bytes(self):
        return self.expert_weights // 32 * BLOCK.itemsize

    @property
    def dense_weights(self):
        return sum(math.prod(shape) for _, _, shape, _ in self.dense())

    def dense(self):
        """[(transformers' name, llama.cpp's, shape, deviation of its values; 0: all are one)] of what is not an expert"""
        q, kv, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim, 1 / math.sqrt(self.hidden)
        found = [("model.embed_tokens", "token_embd", (self.vocab, self.hidden), 1.0), ("lm_head", "output", (self.vocab, self.hidden), narrow),
                 ("model.norm", "output_norm", (self.hidden,), 0)]
        for n in range(self.layers):
            found += [(f"model.layers.{n}.{theirs}", f"blk.{n}.{llama}", shape, deviation) for theirs, llama, shape, deviation in (
                ("input_layernorm", "attn_norm", (self.hidden,), 0), ("post_attention_layernorm", "ffn_norm", (self.hidden,), 0),
                ("self_attn.q_norm", "attn_q_norm", (self.head_dim,), 0), ("self_attn.k_norm", "attn_k_norm", (self.head_dim,), 0),
                ("self_attn.q_proj", "attn_q", (q, self.hidden), narrow), ("self_attn.k_proj", "attn_k", (kv, self.hidden), narrow),
                ("self_attn.v_proj", "attn_v", (kv, self.hidden), narrow), ("self_attn.o_proj", "attn_output", (self.hidden, q), 1 / math.sqrt(q)),
                ("mlp.gate", "ffn_gate_inp", (self.experts, self.hidden), narrow))]
        return [(f"{theirs}.weight", f"{llama}.weight", shape, deviation) for theirs, llama, shape, deviation in found]


def config_of(model):
    """For transformers."""
    return dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_hidden_layers=model.layers, hidden_size=model.hidden, vocab_size=model.vocab,
                moe_intermediate_size=model.inner, intermediate_size=model.inner, num_experts=model.experts, num_experts_per_tok=model.top_k,
                num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim, norm_topk_prob=True, hidden_act="silu",
                decoder_sparse_step=1, mlp_only_layers=[], rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=model.context,
                tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=None, eos_token_id=None)


def _keys_of(model):
    """For llama.cpp, which wants a vocabulary too."""
    numbers = {"block_count": model.layers, "context_length": model.context, "embedding_length": model.hidden, "feed_forward_length": model.inner,
               "attention.head_count": model.heads, "attention.head_count_kv": model.kv_heads, "attention.key_length": model.head_dim,
               "attention.value_length": model.head_dim, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "expert_count": model.experts,
               "expert_used_count": model.top_k, "expert_feed_forward_length": model.inner, "vocab_size": model.vocab}
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(BYTE_TOKENS)]
    tokens += [f"t{n}" for n in range(len(tokens), model.vocab)]
    kinds = [2, 3, 3] + [1] * (model.vocab - 3)  # bytes are words too: llama.cpp's server holds back tokens until they end a character
    return {**{f"qwen3moe.{name}": value for name, value in numbers.items()}, "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(n) for n in range(model.vocab)], "tokenizer.ggml.token_type": [(kind, 5) for kind in kinds],
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def _part_of(index, tensors, **more):
    return {"general.architecture": "qwen3moe", **more, "split.no": (index, 2), "split.count": (2, 2), "split.tensors.count": (tensors, 5)}


def _dense_type(form, name, shape):
    """What llama.cpp's own quantiser makes of a tensor."""
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return "F32"
    if form == "bf16":
        return "BF16"
    return "Q6_K" if name == "output.weight" else "Q4_0"


def _pool(model, name):
    """Blocks of a matrix of all experts of a layer, and some more. The scales' signs are drawn as well, as a code has -8 but not 8."""
    rows, columns = model.matrix(name)
    draw = np.random.default_rng([MATRICES.index(name), 1])
    blocks = np.empty(model.experts * rows * columns // 32 + SPARE, BLOCK)
    blocks["codes"] = draw.integers(0, 256, (len(blocks), 16), np.uint8)
    scale = 1 / math.sqrt(columns * 21.5)  # 21.5: the mean square of codes
    blocks["scale"] = draw.uniform(0.5, 1.35, len(blocks)) * scale * draw.choice([-1.0, 1.0], len(blocks))
    return blocks.view(np.uint8)


def _write_experts(path, model, tensors):
    """Drawn once for each matrix; a layer has them shifted by a number of blocks of its own."""
    names = [(f"blk.{n}.ffn_{matrix}_exps.weight", f"{n}.{matrix}", (model.experts, *model.matrix(matrix)), "Q4_0")
             for n in range(model.layers) for matrix in MATRICES]
    stacks, size = open_gguf(path, _part_of(1, tensors), names), BLOCK.itemsize
    for matrix in MATRICES:
        pool, shifts = _pool(model, matrix), np.random.default_rng(MATRICES.index(matrix)).integers(0, SPARE, model.layers)
        for n, shift in enumerate(shifts):
            stack = stacks[f"{n}.{matrix}"]
            stack.reshape(-1)[:] = pool[shift * size : shift * size + stack.size]
            stack.flush()


def _draw(number, shape, deviation):
    if deviation == 0:
        return np.ones(shape, np.float32)
    return np.random.default_rng([number, 2]).standard_normal(shape, np.float32) * np.float32(deviation)


def _write_dense(folder, model, quantise, forms):
    """All forms have the bf16 values, in theirs."""
    dense = model.dense()
    files, plain = {}, None
    if "bf16" in forms:
        plain = open_safetensors(f"{folder}/transformers/model.safetensors", [(name, shape, "BF16") for name, _, shape, _ in dense])
    for form in forms:
        tensors = [(llama, llama, shape, _dense_type(form, llama, shape)) for _, llama, shape, _ in dense]
        files[form] = open_gguf(f"{folder}/{form}/{FILES[0]}", _part_of(0, _tensors(model), **_keys_of(model)), tensors)

    def write(number):
        name, llama, shape, deviation = dense[number]
        bits = to_bf16(_draw(number, shape, deviation))
        if plain is not None:
            plain[name][:] = bits
        for form, stacks in files.items():
            kind = _dense_type(form, llama, shape)
            if kind == "F32":
                stacks[llama][:] = from_bf16(bits)
            else:
                stacks[llama][:] = bits if kind == "BF16" else quantise(kind, bits)

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(write, range(len(dense))))


def _tensors(model):
    return 3 * model.layers + len(model.dense())


def write(folder, model, forms, quantise=None):
    """Those of DENSE_FORMS that are named: folders that llama.cpp and expertd load; with bf16, the first, transformers and experts beside it. A form is there
    when its folder has the experts. quantise(type, bf16 as bits) -> blocks: for q4_0."""
    for name in (*(("transformers", "experts") if "bf16" in forms else ()), *forms):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    if "bf16" in forms:
        _write_experts(f"{folder}/experts/{FILES[1]}", model, _tensors(model))
    _write_dense(folder, model, quantise, forms)
    os.sync()
    if "bf16" in forms:  # the shape, by which the rest is judged: not before all of it is there
        with open(f"{folder}/transformers/config.json", "w") as file:
            json.dump(config_of(model), file)
    for form in forms:
        os.link(f"{folder}/experts/{FILES[1]}", f"{folder}/{form}/{FILES[1]}")


def missing(folder, model, forms):
    """Those of the forms that are yet to be written. Raises FileExistsError for a folder with another model."""
    config = f"{folder}/transformers/config.json"
    if os.path.exists(config):
        with open(config) as file:
            if json.load(file) != config_of(model):
                raise FileExistsError(f"{folder} has a model of another shape: name another folder, or remove it")
    return [form for form in forms if not os.path.exists(f"{folder}/{form}/{FILES[1]}")]


def widen_experts(folder, model, layer, matrix):
    """float32 [E,rows,columns] of a layer's experts."""
    with open(f"{folder}/experts/parts.json") as file:
        place = json.load(file)[f"{layer}.{matrix}"]
    rows, columns = model.matrix(matrix)
    blocks = np.memmap(f"{folder}/experts/{place['file']}", BLOCK, "r", place["offset"], (model.experts, rows, columns // 32))
    codes = np.concatenate((blocks["codes"] & 15, blocks["codes"] >> 4), axis=-1).astype(np.float32) - 8
    return (codes * blocks["scale"].astype(np.float32)[..., None]).reshape(model.experts, rows, columns)


def forget(folder):
    """Leaves the files out of the page cache, so that each engine reads them anew."""
    for place, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(f"{place}/{name}", os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
