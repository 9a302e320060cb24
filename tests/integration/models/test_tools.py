#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints as tools write them: every preset of compressed-tensors through llmcompressor, GPTQ and AWQ through AutoRound, GGUF
through gguf-py with AutoRound's blocks, transformers' own methods. Each expert's rows are those of its weights, dequantised exactly in
double precision from what the tool wrote and near to what the tool was given; or the checkpoint is refused by name. Then an unknown key
goes into each object of each config, and an unknown tensor beside each matrix: both are refused by name.

test_tools.py PROBE WORK_FOLDER [PART/PARTS | CASE..]"""
import copy, json, os, shutil, sys, traceback, warnings

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", AR_LOG_LEVEL="ERROR", TQDM_DISABLE="1", CUDA_VISIBLE_DEVICES="", AR_ALLOW_W8_ASYM="1")
warnings.simplefilter("ignore")
import gguf, numpy as np, torch, transformers
from auto_round import AutoRound
from auto_round.export.export_to_gguf.packing import ggml_quant
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import QuantizationMethod

from test_matrix import Probe, chosen

E, H, I, TOKENS, VOCABULARY = 4, 256, 128, 5, 64
EXACT = 1e-5    # of the largest value, where inputs stay as they are
ROUNDED = 3e-2  # of the largest value, where rows are rounded to int8 between
KEPT = {8: 0.02, 6: 0.05, 5: 0.08, 4: 0.2}  # of the weights' length: what so many bits may cost
PARTS = ("gate_proj", "up_proj", "down_proj")
IGNORED = ["lm_head", "re:.*mlp.gate$"]


# ---- what the tools are given ----

def make_plain(folder):
    config = transformers.Qwen3MoeConfig(hidden_size=H, intermediate_size=2 * H, moe_intermediate_size=I, num_hidden_layers=1, num_attention_heads=4,
                                         num_key_value_heads=4, head_dim=64, num_experts=E, num_experts_per_tok=2, vocab_size=VOCABULARY)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2").save_pretrained(folder)
    return weights_of(load_file(f"{folder}/model.safetensors"), lambda t, stem: t[f"{stem}.weight"].double())


def load_plain(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def weights_of(tensors, read):
    return [{part: read(tensors, f"model.layers.0.mlp.experts.{e}.{part}") for part in PARTS} for e in range(E)]


# ---- exactly what a tool wrote ----

def spread(numbers, rows, columns):
    """One number for so many rows and columns as the shapes say."""
    numbers = numbers.double().reshape(numbers.shape[0], -1) if numbers.dim() > 0 else numbers.double().view(1, 1)
    down, across = -(-rows // numbers.shape[0]), -(-columns // numbers.shape[1])
    return numbers.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]


def read_compressed(bits):
    def read(t, stem):
        scale = t[f"{stem}.weight_scale"]
        if f"{stem}.weight_global_scale" in t:
            packed = t[f"{stem}.weight_packed"]
            values = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float64)
            return values * spread(scale.double() / t[f"{stem}.weight_global_scale"].double(), *values.shape)
        if scale.dtype == torch.uint8:
            scale = torch.exp2(scale.double() - 127)
        if f"{stem}.weight" in t:
            values = t[f"{stem}.weight"].double()
        elif t[f"{stem}.weight_packed"].dtype == torch.uint8:
            packed = t[f"{stem}.weight_packed"]
            values = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float64)
        else:
            values = unpack_from_int32(t[f"{stem}.weight_packed"], bits, torch.Size(t[f"{stem}.weight_shape"].tolist())).double()
        zero = t.get(f"{stem}.weight_zero_point")
        if zero is not None and zero.dtype == torch.int32:
            zero = unpack_from_int32(zero, bits, torch.Size((values.shape[0], zero.shape[1])), packed_dim=0)
        return (values - (spread(zero, *values.shape) if zero is not None else 0)) * spread(scale, *values.shape)

    return read


def unpack_words(words, bits, order=None):
    """[n,m] words to [n, m * 32 / bits]."""
    codes = torch.stack([words.long() >> bits * (order[i] if order else i) & (1 << bits) - 1 for i in range(32 // bits)], dim=-1)
    return codes.reshape(words.shape[0], -1).double()


def read_gptq(bits):
    def read(t, stem):
        codes = unpack_words(t[f"{stem}.qweight"].t(), bits)
        groups = t[f"{stem}.g_idx"].long()
        zeros = unpack_words(t[f"{stem}.qzeros"], bits).t() + 1
        return (codes - zeros[:, groups]) * t[f"{stem}.scales"].double().t()[:, groups]

    return read


def read_awq(t, stem):
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    codes = unpack_words(t[f"{stem}.qweight"], 4, order).t()
    zeros = unpack_words(t[f"{stem}.qzeros"], 4, order).t()
    return (codes - spread(zeros, *codes.shape)) * spread(t[f"{stem}.scales"].t(), *codes.shape)


# ---- the tools ----

def llmcompressor(scheme, bits, modifier=QuantizationModifier, **more):
    def write(plain, folder):
        model = load_plain(plain)
        how = {"scheme": scheme, "targets": "Linear"} if isinstance(scheme, str) else {"config_groups": {"group_0": scheme}}
        recipe = modifier(ignore=IGNORED, **how, **more)
        if modifier is QuantizationModifier:
            oneshot(model=model, recipe=recipe, pipeline="datafree")
        else:
            rows = torch.randint(3, VOCABULARY, (16, 64)).tolist()
            oneshot(model=model, recipe=recipe, dataset=Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 64] * 16}),
                    num_calibration_samples=16, max_seq_length=64, tokenizer=transformers.AutoTokenizer.from_pretrained(plain))
        model.save_pretrained(folder, save_compressed=True)
        return weights_of(load_file(f"{folder}/model.safetensors"), read_compressed(bits))

    return write


def scheme_of(group, inputs=None, **weights):
    if group:
        weights |= {"group_size": group}
    inputs = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True) if inputs else None
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs)


def auto_round(form, read, **how):
    def write(plain, folder):
        tool = AutoRound(load_plain(plain), tokenizer=transformers.AutoTokenizer.from_pretrained(plain), iters=0, disable_opt_rtn=True, **how)
        tool.quantize_and_save(f"{folder}-tool", format=form)
        (written, *more), = [d for d in os.walk(f"{folder}-tool") if "config.json" in d[2]]
        shutil.move(written, folder)
        return weights_of(load_file(f"{folder}/model.safetensors"), read)

    return write


def reorder(folder, bits):
    """The same as desc_act writes it: columns in groups in any order, down's rows of gate and up with them. Layout: AutoGPTQ's."""
    path = f"{folder}/model.safetensors"
    t = load_file(path)
    for e in range(E):
        orders = {part: torch.randperm(I if part == "down_proj" else H) for part in PARTS}
        orders["up_proj"] = orders["gate_proj"]
        for part in PARTS:
            stem = f"model.layers.0.mlp.experts.{e}.{part}"
            codes = unpack_words(t[f"{stem}.qweight"].t(), bits)[:, orders[part]].long().view(-1, codes_in_word(t, stem, bits), 32 // bits)
            words = sum(codes[:, :, i] << bits * i for i in range(32 // bits))
            t[f"{stem}.qweight"] = torch.where(words >= 1 << 31, words - (1 << 32), words).int().t().contiguous()
            t[f"{stem}.g_idx"] = t[f"{stem}.g_idx"][orders[part]].contiguous()
    save_file(t, path)
    with open(f"{folder}/config.json") as f:
        config = json.load(f)
    config["quantization_config"]["desc_act"] = True
    with open(f"{folder}/config.json", "w") as f:
        json.dump(config, f)


def codes_in_word(t, stem, bits):
    return t[f"{stem}.qweight"].shape[0]


def gptq_in_order(bits, **how):
    def write(plain, folder):
        auto_round("auto_gptq", read_gptq(bits), **how)(plain, folder)
        reorder(folder, bits)
        return weights_of(load_file(f"{folder}/model.safetensors"), read_gptq(bits))

    return write


def in_gguf(wide, narrow, architecture="qwen3moe"):
    """Types of gate and up, and of down."""
    def write(plain, folder):
        original = make_original(plain)
        os.makedirs(folder)
        writer = gguf.GGUFWriter(f"{folder}/tiny.gguf", architecture)
        writer.add_embedding_length(H)
        writer.add_block_count(1)
        writer.add_expert_count(E)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(I if narrow not in BIG_BLOCKS else H)
        writer.add_vocab_size(VOCABULARY)
        writer.add_token_list([f"w{i}" for i in range(VOCABULARY)])
        exact = [{} for _ in range(E)]
        for part, kind in zip(PARTS, (wide, wide, narrow)):
            values = torch.stack([expert[part] for expert in original]).float()
            if narrow in BIG_BLOCKS:  # blocks of 256 columns: as wide as hidden
                values = torch.cat([values, values], dim=2 if part == "down_proj" else 1)
            number = gguf.GGMLQuantizationType[kind]
            data = blocks_of(values, kind, number)
            for e in range(E):
                exact[e][part] = torch.from_numpy(gguf.quants.dequantize(data[e], number)).double()
            name = f"blk.0.{ {'gate_proj': 'ffn_gate_exps', 'up_proj': 'ffn_up_exps', 'down_proj': 'ffn_down_exps'}[part] }.weight"
            writer.add_tensor(name, data, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return exact

    return write


BIG_BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def blocks_of(values, kind, number):
    if kind not in BIG_BLOCKS:
        return gguf.quants.quantize(values.numpy(), number)
    packed = ggml_quant(values.reshape(-1, values.shape[-1]), kind.lower(), device="cpu", original=kind != "Q6_K")
    return np.ascontiguousarray(packed).reshape(*values.shape[:-1], -1)


def make_original(plain):
    return weights_of(load_file(f"{plain}/model.safetensors"), lambda t, stem: t[f"{stem}.weight"].double())


def gpt_oss(plain, folder):
    """Transformers reads these blocks: any bytes are some weights."""
    config = transformers.GptOssConfig(hidden_size=H, intermediate_size=I, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
                                       num_local_experts=E, num_experts_per_tok=2, vocab_size=VOCABULARY, layer_types=["full_attention"])
    config.save_pretrained(folder)
    with open(f"{folder}/config.json") as f:
        written = json.load(f)
    written["quantization_config"] = transformers.Mxfp4Config().to_dict()
    with open(f"{folder}/config.json", "w") as f:
        json.dump(written, f)
    tensors, exact = {}, [{} for _ in range(E)]
    for name, rows, columns in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        stem = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{stem}_blocks"] = torch.randint(0, 256, (E, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{stem}_scales"] = torch.randint(118, 122, (E, rows, columns // 32), dtype=torch.uint8)
        tensors[f"{stem}_bias"] = torch.zeros(E, rows, dtype=torch.bfloat16)
        values = convert_moe_packed_tensors(tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"], dtype=torch.float32).double().transpose(1, 2)
        for e in range(E):
            if name == "down_proj":
                exact[e][name] = values[e]
            else:
                exact[e]["gate_proj"], exact[e]["up_proj"] = values[e][0::2], values[e][1::2]
    save_file(tensors, f"{folder}/model.safetensors")
    return exact


def transformers_fp8(plain, folder):
    """Its quantiser asks for a GPU and does not use it."""
    transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer.validate_environment = lambda *a, **k: None
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, device_map="cpu",
                                                              quantization_config=transformers.FineGrainedFP8Config())
    model.save_pretrained(folder)


class Case:
    """Served in a form, or refused with a text."""

    def __init__(self, write, form=None, bits=0, refused=None, bound=EXACT, is_oai=False, mutate=False):
        self.write, self.form, self.bits, self.refused, self.bound, self.is_oai, self.mutate = write, form, bits, refused, bound, is_oai, mutate


def presets():
    """Every preset of compressed-tensors: the form that it is served in, or why it is not."""
    served = {"W8A16": ("int8-g128", 8), "W4A16": ("int4-g128", 4), "W4A16_ASYM": ("int4-g128-zero", 4), "W8A8": ("w8a8", 8), "INT8": ("w8a8", 8),
              "W4A8": ("int8-g128", 4), "W4A4": ("int8-g128", 4), "W4AFP8": ("int8-g128", 4), "FP8": ("f8e4m3-channel", 5),
              "FP8_DYNAMIC": ("f8e4m3-channel", 5), "FP8_BLOCK": ("f8e4m3-block128", 5), "NVFP4A16": ("nvfp4", 4), "NVFP4": ("nvfp4", 4),
              "MXFP4A16": ("mxfp4", 4), "MXFP4": ("mxfp4", 4), "MXFP4XFP8": ("mxfp4", 4), "MXFP8A16": ("mxfp8", 5), "MXFP8": ("mxfp8", 5)}
    refused = {"MXFP6A16": 'format is "mxfp6-pack-quantized"', "MXFP6A8": 'format is "mxfp6-pack-quantized"'}
    refused.update({f"W{bits}A{wide}": f"num_bits is {bits}, allowed 4|8" for bits in (2, 3, 5, 6, 7) for wide in (4, 8, 16)})
    for name in PRESET_SCHEMES:
        if name == "UNQUANTIZED":
            continue
        form, bits = served.get(name, (None, 4))
        bound = ROUNDED if form == "w8a8" else EXACT
        yield f"ct-{name}", Case(llmcompressor(name, bits), form, bits, refused=None if form else refused.get(name, "(has no row in this test)"),
                                 bound=bound, mutate=name in ("W4A16_ASYM", "FP8_BLOCK", "NVFP4A16", "W8A8", "MXFP4"))


def cases():
    yield from presets()
    integer = {"type": "int", "dynamic": False}
    for bits in (4, 8):
        for symmetric in (True, False):
            end = "" if symmetric else "-zero"
            for group, form in ((32, "g32" if symmetric and bits == 4 else "g32-zero"), (64, "g32-zero"), (128, "g128"), (None, "g128")):
                form = f"int{bits}-{form}" + (end if form == "g128" else "")
                if form.startswith("int4-g32") and symmetric:
                    form = "int4-g32"
                strategy = "group" if group else "channel"
                yield (f"ct-int{bits}-{group or 'channel'}{end}",
                       Case(llmcompressor(scheme_of(group, num_bits=bits, symmetric=symmetric, strategy=strategy, **integer), bits), form, bits))
    yield "ct-w8a8-asym", Case(llmcompressor(scheme_of(None, True, num_bits=8, symmetric=False, strategy="channel", **integer), 8), "int8-g128-zero", 8)
    blocks = {"num_bits": 8, "type": "float", "strategy": "block", "dynamic": False, "symmetric": True}
    yield "ct-fp8-64x64", Case(llmcompressor(scheme_of(None, block_structure=[64, 64], **blocks), 8), "f8e4m3-g32", 5)
    yield "ct-gptq-static", Case(llmcompressor("W4A16", 4, GPTQModifier, actorder="static"), "int4-g128", 4)
    for bits in (4, 8):
        for symmetric in (True, False):
            form = f"int{bits}-g128" + ("" if symmetric else "-zero")
            how = {"scheme": f"W{bits}A16", "sym": symmetric}
            yield f"gptq-int{bits}{'' if symmetric else '-zero'}", Case(auto_round("auto_gptq", read_gptq(bits), **how), form, bits, mutate=bits == 4)
            yield f"gptq-int{bits}{'' if symmetric else '-zero'}-desc_act", Case(gptq_in_order(bits, **how), form)
    yield "gptq-int4-g32", Case(auto_round("auto_gptq", read_gptq(4), scheme="W4A16", group_size=32), "int4-g32-f16", 4)
    yield "awq-g128", Case(auto_round("auto_awq", read_awq, scheme="W4A16", sym=False), "int4-g128-zero", 4, mutate=True)
    yield "awq-g64", Case(auto_round("auto_awq", read_awq, scheme="W4A16", sym=False, group_size=64), "int4-g32-zero", 4)
    for wide, narrow, form, bits in (("Q4_0", "Q4_0", "int4-g32-f16", 4), ("Q5_0", "Q8_0", "int8-g32-f16", 5), ("Q8_0", "Q8_0", "int8-g32-f16", 8),
                                     ("MXFP4", "MXFP4", "mxfp4", 4), ("Q4_K", "Q6_K", "q4_k", 4), ("Q5_K", "Q5_K", "q5_k", 5), ("Q6_K", "Q6_K", "q6_k", 6),
                                     ("Q4_K", "F16", "q4_k", 4), ("BF16", "F32", "bf16", 8)):
        yield f"gguf-{wide}-{narrow}", Case(in_gguf(wide, narrow), form, bits, mutate=wide == "Q4_K")
    for kind in ("Q4_1", "Q5_1", "Q2_K", "Q3_K"):
        yield f"gguf-{kind}", Case(in_gguf(kind, kind), refused=f"blk.0.ffn_gate_exps.weight: dtype is {kind}, allowed")
    yield "transformers-mxfp4", Case(gpt_oss, "mxfp4", is_oai=True, mutate=True)
    yield "transformers-fp8", Case(transformers_fp8, refused="_proj_scale_inv")


# ---- the comparison ----

def rows_of(expert, x, is_oai):
    gate, up = x @ expert["gate_proj"].t(), x @ expert["up_proj"].t()
    if is_oai:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ expert["down_proj"].t()
    return (gate * torch.sigmoid(gate) * up) @ expert["down_proj"].t()


def refusal_of(probe, folder):
    """The error of opening it, or of any expert; None."""
    info = probe.open(folder)
    if "error" in info:
        return info["error"]
    for e in range(E):
        answer = probe.ask(f"rows 0 {e} 1", torch.zeros(1, H))
        if "error" in answer:
            return answer["error"]
        probe.bytes(H, torch.float32)
    return None


def compare(probe, name, case, folder, exact, original, problems):
    info = probe.open(folder)
    if "error" in info:
        problems.append(f"{name}: {info['error']}")
        return
    if info["format"] != case.form:
        problems.append(f"{name}: is read as {info['format']}, expected {case.form}")
    for e, expert in enumerate(exact):
        x = torch.randn(TOKENS, H, dtype=torch.float64).float()
        want = rows_of(expert, x.double(), case.is_oai)
        error = ((probe.rows(0, e, x).double() - want).abs().max() / want.abs().max()).item()
        if not error <= case.bound:
            problems.append(f"{name} expert {e}: rows differ by {error:.1e} from exact dequantisation, bound {case.bound:.0e}")
            return
        for part in PARTS if case.bits else ():
            kept = expert[part][:original[e][part].shape[0], :original[e][part].shape[1]] - original[e][part]
            cost = (kept.norm() / original[e][part].norm()).item()
            if not cost <= KEPT[case.bits]:
                problems.append(f"{name} expert {e} {part}: what was written is {cost:.2f} off what was given")
                return


# ---- what nobody knows ----

def objects_of(value, path=()):
    """Paths of all objects of a config, but lists' items."""
    if isinstance(value, dict):
        yield path
        for key, item in value.items():
            yield from objects_of(item, (*path, key))


FREE = ("input_activations", "output_activations", "kv_cache_scheme", "observer_kwargs", "meta", "producer")  # roundings of others, and histories


def mutate_config(probe, name, folder, problems):
    path = f"{folder}/config.json"
    with open(path) as f:
        text = f.read()
    for at in objects_of(json.loads(text)["quantization_config"]):
        if any(key in FREE or key.startswith("-:") for key in at):
            continue
        config = json.loads(text)
        place = config["quantization_config"]
        for key in at:
            place = place[key]
        place["new_trick"] = 3
        with open(path, "w") as f:
            json.dump(config, f)
        error = refusal_of(probe, folder)
        if error is None or ".".join(("quantization_config", *at, "new_trick")) not in error:
            problems.append(f"{name}: an unknown key at {'.'.join(at) or 'the top'}: {error or 'served'}")
    with open(path, "w") as f:
        f.write(text)


def mutate_tensors(probe, name, folder, problems):
    path = f"{folder}/model.safetensors"
    tensors = load_file(path)
    stems = {key.rpartition(".")[0] for key in tensors if ".experts.1." in key}
    ends = [f"{stem}.codebook" for stem in sorted(stems)] or [f"{key}_codebook" for key in tensors if key.endswith("_blocks")]
    for end in ends:
        save_file({**tensors, end: torch.zeros(1)}, path)
        error = refusal_of(probe, folder)
        if error is None or end not in error:
            problems.append(f"{name}: with tensor {end}: {error or 'served'}")
    if not ends:
        problems.append(f"{name}: no tensor to stand beside")
    save_file(tensors, path)


def mutate_gguf(probe, name, folder, problems):
    """gguf-py writes both."""
    reader = gguf.GGUFReader(f"{folder}/tiny.gguf")
    tensors = [(t.name, np.array(t.data), t.tensor_type) for t in reader.tensors]
    for key, extra in [("expert_new_trick", None)] + [(None, t.replace(".weight", ".scale")) for t, _, _ in tensors]:
        shutil.rmtree(f"{folder}-new", ignore_errors=True)
        os.makedirs(f"{folder}-new")
        writer = gguf.GGUFWriter(f"{folder}-new/tiny.gguf", "qwen3moe")
        for word, field in reader.fields.items():
            if word.startswith("qwen3moe."):
                writer.add_uint32(word, int(field.contents()))
        if key is not None:
            writer.add_uint32(f"qwen3moe.{key}", 3)
        for tensor, data, kind in tensors:
            writer.add_tensor(tensor, data, raw_dtype=kind)
        if extra is not None:
            writer.add_tensor(extra, np.ones(E, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        error = refusal_of(probe, f"{folder}-new")
        if error is None or (key or extra) not in error:
            problems.append(f"{name}: with {key or extra}: {error or 'served'}")
    shutil.rmtree(f"{folder}-new")


def unknown_methods(probe, plain, problems):
    """Each method of transformers that has no case above is refused by its name."""
    read = {"gptq", "awq", "compressed-tensors", "fp8", "mxfp4", "mxfp8"}
    path = f"{plain}/config.json"
    with open(path) as f:
        text = f.read()
    for method in QuantizationMethod:
        if method.value in read:
            continue
        with open(path, "w") as f:
            json.dump({**json.loads(text), "quantization_config": {"quant_method": method.value}}, f)
        error = refusal_of(probe, plain)
        if error is None or method.value not in error:
            problems.append(f"quant_method {method.value}: {error or 'served'}")
    with open(path, "w") as f:
        f.write(text)


def one_case(probe, name, case, work, original, problems):
    folder = f"{work}/{name}"
    exact = case.write(f"{work}/plain", folder)
    if case.refused is not None:
        error = refusal_of(probe, folder)
        if error is None or case.refused not in error:
            problems.append(f"{name}: not refused by {case.refused}: {error or 'served'}")
        return
    compare(probe, name, case, folder, exact, original, problems)
    if case.mutate and os.path.exists(f"{folder}/config.json"):
        mutate_config(probe, name, folder, problems)
        mutate_tensors(probe, name, folder, problems)
    elif case.mutate:
        mutate_gguf(probe, name, folder, problems)


def main():
    program, work = sys.argv[1:3]
    wanted = sys.argv[3:]
    shutil.rmtree(work, ignore_errors=True)
    os.makedirs(work)
    logger.remove()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    original = make_plain(f"{work}/plain")
    failed, served, refused = 0, 0, 0
    every = dict(cases())
    for name in chosen(list(every), wanted):
        case = every[name]
        problems = []
        probe = Probe(program)
        try:
            one_case(probe, name, case, work, original, problems)
            probe.close()
        except Exception:
            problems.append(f"{name}: {traceback.format_exc(limit=-4)}")
            probe.process.kill()
        for problem in problems:
            print(problem, flush=True)
        failed += bool(problems)
        served += not problems and case.refused is None
        refused += not problems and case.refused is not None
        shutil.rmtree(f"{work}/{name}", ignore_errors=True)
        shutil.rmtree(f"{work}/{name}-tool", ignore_errors=True)
    problems = []
    probe = Probe(program)
    unknown_methods(probe, f"{work}/plain", problems)
    probe.close()
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{served} written by tools served, {refused} refused by name, {failed} failed; {len(problems)} methods not refused by name")
    return 1 if failed or problems else 0


if __name__ == "__main__":
    sys.exit(main())
