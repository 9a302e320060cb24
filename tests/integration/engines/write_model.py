# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of transformers in f32 with a tokenizer, for an engine: write_model.py FOLDER CLASS KEYS [FORM]

With a form, its routed experts are quantised as tools write that form, and FOLDER-exact has the same weights in f32: those of the codes and scales."""
import json, os, re, shutil, sys

import torch, transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

EXPERT = re.compile(r"(.*\.experts\.\d+\.(?:gate_proj|up_proj|down_proj|w1|w2|w3))\.weight")
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*gate$", "re:.*shared_expert.*", r"re:.*mlp\.(gate|up|down)_proj$"]


def write(folder, kind, keys):
    torch.manual_seed(3)
    made = getattr(transformers, kind + "ForCausalLM")(getattr(transformers, kind + "Config")(**keys))
    for name, parameter in [*made.named_parameters(), *made.named_buffers()]:
        if parameter.dim() > 1:
            limited = 8 if kind == "GptOss" and "gate_up_proj" in name else 1  # its activation cuts off beyond 7
            torch.nn.init.normal_(parameter, 0, limited * parameter.shape[-1] ** -0.5)
        elif parameter.is_floating_point() and "inv_freq" not in name:
            torch.nn.init.normal_(parameter, 0 if name.endswith("bias") else 1, 0.02)
    made.float().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    chat = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=chat).save_pretrained(folder)


# ---- forms: a matrix [rows, columns] gives its tensors, and the exact values ----


def fp8(w):
    rows, columns = w.shape
    scales = w.view(rows // 128, 128, columns // 128, 128).abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes = (w / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def w4a16(w):
    rows, columns = w.shape
    groups = w.view(rows, columns // 32, 32)
    scales = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7)
    words = ((codes.to(torch.int64).view(rows, columns // 8, 8) + 8) << torch.arange(0, 32, 4)).sum(2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}, (codes * scales.float().unsqueeze(2)).view(rows, columns)


def w8a8(w):
    scales = w.abs().amax(1, keepdim=True) / 127
    codes = (w / scales).round().clamp(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


def mxfp4(w):
    rows, columns = w.shape
    groups = w.view(rows, columns // 32, 32)
    powers = groups.abs().amax(2).log2().floor() - 2
    scaled = groups / torch.exp2(powers).unsqueeze(2)
    near = (scaled.abs().unsqueeze(3) - FP4).abs().argmin(3)
    codes = (near + 8 * (scaled < 0)).to(torch.uint8).view(rows, columns // 2, 2)
    exact = FP4[near] * scaled.sign() * torch.exp2(powers).unsqueeze(2)
    return {"weight_packed": codes[..., 0] | codes[..., 1] << 4, "weight_scale": (powers + 127).to(torch.uint8)}, exact.view(rows, columns)


def compressed(form, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}, "input_activations": inputs, "output_activations": None, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": IGNORED}


FORMS = {
    "bf16": (lambda w: ({"weight": w.bfloat16()}, w.bfloat16().float()), None),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "w4a16": (w4a16, compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})),
    "w8a8": (w8a8, compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
                              {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True})),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"})),
}


def quantise(folder, form):
    quantised, config = FORMS[form]
    shutil.copytree(folder, folder + "-exact")
    tensors = load_file(f"{folder}/model.safetensors")
    exact, found = dict(tensors), [name for name in tensors if EXPERT.fullmatch(name)]
    assert found, f"no expert in {list(tensors)}"
    for name in found:
        parts, exact[name] = quantised(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in exact.items()}, f"{folder}-exact/model.safetensors", {"format": "pt"})
    with open(f"{folder}/config.json") as file:
        written = json.load(file)
    if form == "fp8":
        linear = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dim() == 2 and not re.search(r"\.experts\.|embed", name)}
        config = {**config, "modules_to_not_convert": sorted(linear)}
    with open(f"{folder}/config.json", "w") as file:
        json.dump({**written, **({"quantization_config": config} if config else {"dtype": "bfloat16"})}, file, indent=1)


if __name__ == "__main__":
    folder, kind, keys, *form = sys.argv[1:]
    write(folder, kind, json.loads(keys))
    if form:
        quantise(folder, form[0])
