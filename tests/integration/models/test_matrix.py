#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every MoE model type of transformers: a tiny checkpoint as save_pretrained writes it, in f32 and bf16. Each expert's rows, the whole
block and the router are compared with transformers; a type this build cannot serve is refused with the reason of its row. A type
without a row fails by name, so that a newer transformers shows what is new.

test_matrix.py PROBE WORK_FOLDER [PART/PARTS | DIRECTORY..]"""
import json, os, re, shutil, subprocess, sys, traceback

os.environ["HF_HUB_OFFLINE"] = "1"
import torch, transformers
import torch.nn.functional as F

import tiny_models
from published_configs import PUBLISHED
from tiny_models import E, LAYERS

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
TOKENS = 7
DRAWN = 1000
EXACT = 1e-6     # of the largest value, f32 against f32
ROUNDED = 3e-2   # of the largest value, against transformers in bf16
SERVED_MIN = 70  # directories
NOT_SERVED = {"ernie4_5_vl_moe", "muse_spark", "vitpose_backbone"}
ROUTER_NOT_COMPUTED = {"doge", "inkling", "nllb_moe", "switch_transformers"}


class Probe:
    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, line, *tensors):
        for part in (line.encode() + b"\n", *(t.contiguous().numpy().tobytes() for t in tensors)):
            self.process.stdin.write(part)
        self.process.stdin.flush()
        text = self.process.stdout.readline()
        assert text, f"the probe ended at: {line}"
        return json.loads(text)

    def bytes(self, count, dtype):
        return torch.frombuffer(bytearray(self.process.stdout.read(count * 4)), dtype=dtype) if count else torch.empty(0, dtype=dtype)

    def open(self, folder):
        return self.ask(f"open {folder}")

    def rows(self, layer, index, x):
        answer = self.ask(f"rows {layer} {index} {x.shape[0]}", x.float())
        assert "error" not in answer, answer
        return self.bytes(x.numel(), torch.float32).view(x.shape)

    def gate(self, layer, logits, tokens):
        answer = self.ask(f"gate {layer} {logits.shape[0]} {logits.shape[1]}", logits.float(), tokens.int())
        if "error" in answer:
            return answer["error"]
        shape = (logits.shape[0], answer["columns"])
        return self.bytes(shape[0] * shape[1], torch.int32).view(shape).long(), self.bytes(shape[0] * shape[1], torch.float32).view(shape)

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0


def error_of(got, want):
    return ((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-30)).item()


def chosen(names, wanted):
    """All of them, those wanted, or with ["2/4"] every fourth from the second."""
    if len(wanted) == 1 and "/" in wanted[0]:
        part, parts = map(int, wanted[0].split("/"))
        return names[part - 1::parts]
    return [name for name in names if not wanted or name in wanted]


# ---- what transformers computes ----

class Block:
    """One MoE block of a model of transformers."""

    def __init__(self, directory, layer, module, parent):
        self.directory, self.layer, self.module, self.parent = directory, layer, module, parent

    def width(self):
        if self.directory == "nemotron_h" and self.module.config.moe_latent_size is not None:
            return self.module.config.moe_latent_size
        return tiny_models.H

    def expert(self, e, x):
        m = self.module
        if self.directory in ("nllb_moe", "switch_transformers"):
            return m.experts[f"expert_{e}"](x)
        if self.directory == "llama4":
            return m.experts(x.repeat(E, 1))[e * len(x):(e + 1) * len(x)]
        if self.directory == "jetmoe":
            gate, up = F.linear(x, m.input_linear.weight[e]).chunk(2, dim=-1)
            return F.linear(m.activation(gate) * up, m.output_linear.weight[e])
        if self.directory == "doge":
            return m.act_fn(x @ m.down_embed.weight[e])[:, None] * m.up_embed.weight[e]
        ids = torch.tensor([[e, (e + 1) % E]]).expand(len(x), 2)  # LongCat's code needs two slots
        return m.experts(x, ids, torch.tensor([[1.0, 0.0]]).expand(len(x), 2)).view(x.shape)

    def route(self, x, tokens):
        """Logits as the caller of a gate has them, ids and weights."""
        m, d = self.module, self.directory
        router = m.gate if hasattr(m, "gate") else m.router
        if d == "afmoe":
            return (out := router(x[None], m.expert_bias))[0], out[2], out[1]
        if d in ("hy_v3", "minimax_m2"):
            return (out := router(x, m.e_score_correction_bias))[0], out[2], out[1]
        if d == "lfm2_moe":
            return (out := router(x, m.expert_bias if m.use_expert_bias else None))[0], out[2], out[1]
        if d == "deepseek_v4" and m.is_hash:
            return (out := router(x, tokens))[0], out[2], out[1]
        if d == "dbrx":
            logits = router(x)
            weights, ids = m.route_tokens_to_experts(logits)
            return logits, ids, weights
        if d == "llama4":
            scores, logits = router(x)
            ids = scores.topk(router.top_k, dim=1).indices
            return logits, ids, scores.gather(1, ids)
        if d == "jetmoe":
            _, rows, gates, sizes, logits = router(x)
            ids, weights, used = torch.empty(len(x), router.top_k).long(), torch.empty(len(x), router.top_k), [0] * len(x)
            for row, gate, e in zip(rows.tolist(), gates.tolist(), [e for e, size in enumerate(sizes) for _ in range(size)]):
                ids[row, used[row]], weights[row, used[row]] = e, gate
                used[row] += 1
            return logits, ids, weights
        if d == "zaya":
            logits, weights, ids, _ = router(x[None])
            return logits, torch.where(weights == 0, E, ids), weights
        logits, weights, ids = router(x)[:3]
        if d == "laguna":
            logits = F.linear(x, router.weight)  # the router returns them capped
        if d in ("gemma4", "diffusion_gemma"):
            logits = router.proj(router.norm(x) * router.scale * router.scalar_root_size)  # it returns probabilities
        return logits, ids, weights

    def factor(self):
        """What the block multiplies the experts' sum by, which a gate does before."""
        if self.directory == "cohere2_moe" and self.module.num_shared_experts > 0 and self.module.shared_expert_combination_strategy == "average":
            return 0.5
        if self.directory == "openai_privacy_filter":
            return float(self.module.num_experts)  # of a token
        return float(getattr(self.module, "routed_scaling_factor", 1.0))

    def whole(self, x, tokens):
        """The block's output, up to what is the caller's business."""
        m, d = self.module, self.directory
        if d in ("gemma4", "diffusion_gemma") or self.width() != tiny_models.H:
            _, ids, weights = self.route(x, tokens)
            return m.experts(x if self.width() == tiny_models.H else m.fc1_latent_proj(x), ids, weights)
        if d == "axk1":  # before its last norm
            kept = []
            hook = m.post_mlp_layernorm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
            m(x[None])
            hook.remove()
            return kept[0].view(x.shape)
        out = m(x[None], tokens[None]) if d == "deepseek_v4" and m.is_hash else m(x[None])
        out = (out[0] if isinstance(out, tuple) else out).view(x.shape)
        if d == "jetmoe":
            return out - m.bias
        if d.startswith("granitemoe") and hasattr(self.parent, "shared_mlp") and self.parent.shared_mlp is not None:
            return out + self.parent.shared_mlp(x[None]).view(x.shape)
        return out


def blocks_of(directory, model):
    found = []
    for name, module in model.named_modules():
        if re.search(r"vision|visual|audio|talker|model\.encoder\.language_model", name):
            continue
        experts = getattr(module, "experts", None)
        if (experts is not None and re.search(r"Experts$", type(experts).__name__)) or type(module).__name__ in ("JetMoeMoE", "DogeCDMoE"):
            layer = int(re.search(r"\d+", name).group())
            if directory in ("nllb_moe", "switch_transformers") and re.search(r"(^|\.)decoder\.", name):
                layer += LAYERS
            found.append(Block(directory, layer, module, model.get_submodule(name.rpartition(".")[0])))
    return sorted(found, key=lambda b: b.layer)


# ---- the comparison ----

def our_block(probe, info, block, x, logits, tokens):
    """Routed and shared experts as a caller of this service adds them."""
    layer = next(l for l in info["layers"] if l["layer"] == block.layer)
    ids, weights = probe.gate(block.layer, logits, tokens)
    experts, zero = layer["experts"], info["zero"]
    inner = block.module.fc1_latent_proj(x) if block.width() != tiny_models.H else x
    y = torch.zeros_like(inner)
    for e in ids.unique().tolist():
        t, k = torch.where(ids == e)
        w = weights[t, k, None]
        if e >= experts + zero:
            y.index_add_(0, t, w * inner[t])  # a copy expert
        elif e < experts:
            y.index_add_(0, t, probe.rows(block.layer, e, inner[t] * w) if info["weight_on_input"] else w * probe.rows(block.layer, e, inner[t]))
    return y + probe.rows(block.layer, experts, x) if layer["shared"] else y


def compare_gate(probe, block, what, problems):
    x, tokens = torch.randn(DRAWN, tiny_models.H), torch.randint(0, 300, (DRAWN,))
    logits, want_ids, want = block.route(x, tokens)
    got_ids, got = probe.gate(block.layer, logits, tokens)
    want = want.float() * block.factor()
    zero = torch.where(want_ids == E, 0.0, 1.0) if block.directory == "zaya" else 1.0
    order, got_order = want_ids.argsort(dim=1), got_ids.argsort(dim=1)
    same = (want_ids.gather(1, order) == got_ids.gather(1, got_order)).all(dim=1)
    if block.directory == "axk2" and not same.all():  # masked groups have score 0, all of them the same: which wins is up to torch
        scores = logits.sigmoid() + block.module.gate.e_score_correction_bias
        scores = block.module.gate.apply_group_scoring(scores) if block.module.gate.num_group is not None else scores
        tied = (scores.gather(1, want_ids).sort(dim=1).values == scores.gather(1, got_ids).sort(dim=1).values).all(dim=1)
        if (same | tied).all():
            return
    if not same.all():
        problems.append(f"{what} gate: {int((~same).sum())} of {DRAWN} tokens have other ids")
    difference = (want.gather(1, order) - (got * zero).gather(1, got_order))[same]
    if difference.numel() and not difference.abs().max() <= 1e-6 * max(1.0, want.abs().max().item()):
        problems.append(f"{what} gate: weights differ by {difference.abs().max().item():.1e}")


def is_tied(probe, block, logits, x, tokens):
    """Whether torch took other experts of the same score: then the block is another one."""
    return block.directory == "axk2" and not torch.equal(probe.gate(block.layer, logits, tokens)[0].sort(dim=1).values,
                                                         block.route(x, tokens)[1].sort(dim=1).values)


def compare(probe, info, blocks, what, rounded, problems):
    if [l["layer"] for l in info["layers"]] != [b.layer for b in blocks]:
        problems.append(f"{what}: MoE layers are {[l['layer'] for l in info['layers']]}, in transformers {[b.layer for b in blocks]}")
        return
    directory = blocks[0].directory
    for block, shape in zip(blocks, info["layers"]):
        x, tokens = torch.randn(TOKENS, block.width()), torch.randint(0, 300, (TOKENS,))
        for e in range(shape["experts"]):
            error = error_of(probe.rows(block.layer, e, x), block.expert(e, x))
            if not error <= EXACT:
                problems.append(f"{what} layer {block.layer} expert {e}: rows differ by {error:.1e}")
                break
        if directory in ROUTER_NOT_COMPUTED:
            text = probe.gate(block.layer, torch.zeros(1, shape["experts"]), tokens[:1])
            if not isinstance(text, str) or directory.split("_")[0] not in text or not info["router"] or info["router"] not in text:
                problems.append(f"{what}: the router is not refused by name: {text}")
            continue
        compare_gate(probe, block, f"{what} layer {block.layer}", problems)
        x = torch.randn(TOKENS, tiny_models.H)
        logits, _, _ = block.route(x, tokens)
        got = our_block(probe, info, block, x, logits, tokens)
        error = error_of(got, block.whole(x, tokens)) if not is_tied(probe, block, logits, x, tokens) else 0.0
        if not error <= EXACT * 2:
            problems.append(f"{what} layer {block.layer}: the block differs by {error:.1e}")
        if rounded is not None and not is_tied(probe, block, logits, x, tokens):
            rounded.append((block, x, tokens, got))


def one_model(probe, directory, number, model, work, problems):
    what = f"{directory}[{number}]"
    folder = f"{work}/{directory}-{number}"
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        info = probe.open(folder)
        if directory in NOT_SERVED:
            if directory.split("_")[0] not in info.get("error", "") or "cannot serve" not in info["error"]:
                problems.append(f"{what}: not refused by name: {info}")
            return
        if "error" in info:
            problems.append(f"{what}: {info['error']}")
            return
        if not info["known"]:
            problems.append(f"{what}: model type {info['model_type']} has no row in lib/model/model_types.c")
            return
        model.float()
        rounded = []
        blocks = blocks_of(directory, model)
        compare(probe, info, blocks, f"{what} {str(dtype)[6:]}", rounded, problems)
        if dtype == torch.bfloat16:
            model.to(dtype)
            for block, x, tokens, got in rounded:
                want = in_bf16(block, x, tokens)
                error = ((got - want).norm() / want.norm()).item() if want is not None else 0.0
                if not error <= ROUNDED and not other_choice(block, x, tokens):
                    problems.append(f"{what} layer {block.layer}: the block differs by {error:.1e} from transformers in bf16")
            model.float()
    compare_published(probe, directory, number, blocks_of(directory, model), folder, problems)


def in_bf16(block, x, tokens):
    """The block of transformers in bf16; None where it mixes types itself."""
    try:
        return block.whole(x.bfloat16(), tokens).float()
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        return None


def other_choice(block, x, tokens):
    """In bf16 the router may choose other experts, and then nothing can be compared."""
    _, ids, _ = block.route(x.bfloat16(), tokens)
    block.module.float()
    _, wide, _ = block.route(x, tokens)
    block.module.bfloat16()
    return not torch.equal(ids.sort(dim=1).values, wide.sort(dim=1).values)


def compare_published(probe, directory, number, blocks, folder, problems):
    """The same tensors under the keys that the published config.json of such a model has."""
    with open(f"{folder}/config.json") as f:
        written = json.load(f)
    for source, spell in PUBLISHED.get(directory, []):
        spelt = spell(json.loads(json.dumps(written)))
        with open(f"{folder}/config.json", "w") as f:
            json.dump(spelt, f)
        what = f"{directory}[{number}] with the keys of {source}"
        info = probe.open(folder)
        if "error" in info or not info["known"]:
            problems.append(f"{what}: {info.get('error', 'unknown type')}")
        else:
            compare(probe, info, blocks, what, None, problems)


def main():
    program, work = sys.argv[1:3]
    wanted = sys.argv[3:]
    os.makedirs(work, exist_ok=True)
    directories = tiny_models.directories()
    assert len(directories) >= SERVED_MIN + len(NOT_SERVED), directories
    failed = 0
    served = set()
    torch.set_num_threads(1)
    directories = chosen(directories, wanted)
    for directory in directories:
        problems = []
        probe = Probe(program)
        try:
            with torch.no_grad():
                for number, model in tiny_models.models(directory):
                    one_model(probe, directory, number, model, work, problems)
                    shutil.rmtree(f"{work}/{directory}-{number}", ignore_errors=True)
            probe.close()
        except Exception:
            problems.append(f"{directory}: {traceback.format_exc(limit=-4)}")
            probe.process.kill()
        for problem in problems:
            print(problem, flush=True)
        failed += bool(problems)
        if not problems and directory not in NOT_SERVED:
            served.add(directory)
    print(f"{len(served)} of {len(directories)} directories of transformers {transformers.__version__} served, {len(NOT_SERVED)} refused by name, {failed} failed")
    return 1 if failed or (not wanted and len(served) < SERVED_MIN) else 0


if __name__ == "__main__":
    sys.exit(main())
