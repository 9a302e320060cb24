#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""expertd.hf: tiny random models of transformers whose experts are on two nodes give the greedy tokens that they give in process, in f32, also when a
node is killed in the middle.

test_hf.py BUILD SOURCE families [DIRECTORY..]
test_hf.py BUILD SOURCE cases
test_hf.py BUILD SOURCE memory [LAYERS]
test_hf.py BUILD SOURCE serve"""
from dataclasses import replace
import contextlib, copy, io, json, os, re, signal, subprocess, sys, threading, time, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD, SOURCE, WHAT, WANTED = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
sys.path[:0] = [f"{HERE}/../door", f"{HERE}/../models", f"{SOURCE}/client/python"]
os.environ.update(HF_HUB_OFFLINE="1", EXPERTD_LIBRARY=f"{BUILD}/client/libexpertd.so.0")

import tokenizers, torch, transformers
from torchao.prototype.quantization.int4 import Int4OpaqueTensor, PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig
from transformers.integrations import finegrained_fp8
from door_cluster import Cluster, wait_for

import expertd
import expertd.hf
from expertd import _engine
import tiny_models

torch.set_num_threads(1)
torch.cuda.is_current_stream_capturing = lambda: False  # framework_venv.py has empty CUDA libraries, which end the program here
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
TOKENS, PROMPT = 64, 8
EXACT = 1e-5
# One of each way that experts are called, and what people run most.
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "glm4_moe", "minimax_m2", "nemotron_h", "dbrx", "doge", "jetmoe",
            "llama4", "longcat_flash", "nllb_moe", "step3p7", "switch_transformers"]
# What a whole pass needs beside what a block does: sizes of attention, and a layer with a cache.
WHOLE = {
    "dbrx": dict(attn_config=dict(clip_qkv=8.0)), "deepseek_v3": dict(num_key_value_heads=4), "longcat_flash": dict(qk_head_dim=32, num_key_value_heads=4),
    "nemotron_h": dict(layers_block_type=["attention", "moe", "moe"]), "step3p7": dict(text_config=dict(sliding_window=16)),
    "qwen3_next": dict(layer_types=["linear_attention", "full_attention", "linear_attention"]),
}


def raised(kind, text, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), f"{error!r} does not say: {text}"
        return error
    raise AssertionError(f"no {kind.__name__} with: {text}")


def prompt(model, batch):
    torch.manual_seed(batch)
    return torch.randint(3, 300, (batch, PROMPT))


class At(transformers.LogitsProcessor):
    """Does something once, before the token of that number is chosen."""

    def __init__(self, step, do):
        self.step, self.do, self.seen = step, do, 0

    def __call__(self, ids, scores):
        self.seen += 1
        if self.seen == self.step:
            self.do()
        return scores


def generated(model, batch, at=None):
    ids = prompt(model, batch)
    extra = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS, pad_token_id=0,
                              logits_processor=[at] if at else [], **extra)


class Service:
    """A coordinator and two nodes with two copies of each expert of all models; nodes are killed and come back."""

    def __init__(self, cluster, models, numerics="portable"):
        self.cluster, self.numerics = cluster, numerics
        self.models = [f"--model={name}={folder}" for name, folder in models.items()]
        self.url = cluster.coordinator("--copies=2", "--min-nodes=2")["rpc_url"]
        for name in "a", "b":
            self.start(name, wait=False)
        cluster.wait_serving("--coordinator", self.url)

    def start(self, name, wait=True):
        self.cluster.daemon(name, f"{BUILD}/server/expertd/expertd", f"--node-name={name}", f"--numerics={self.numerics}",
                            f"--coordinator-url={self.url}", *self.models)
        if wait:
            wait_for(f"{name} to have loaded its experts", lambda: [l for l in self.cluster.log(name) if l["event"] == "node-state" and int(l["experts"])])

    def kill(self, name):
        entry = next(e for e in self.cluster.processes if e[0] == name)
        self.cluster.processes.remove(entry)
        entry[1].kill()
        entry[1].wait()

    def pids(self):
        return [process.pid for name, process in self.cluster.processes if name in "ab"]


def logits(model):
    ids = prompt(model, 2)
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits


def error_of(got, want):
    return ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()


def compare_family(service, name, folder, model_class, local, values, whole):
    """Logits, tokens of one prompt, and of 8 with a node killed in the middle."""
    model, info = expertd.hf.from_pretrained(folder, service.url, model_class=model_class, model_name=name, progress=False, dtype=torch.float32,
                                             output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"], f"{name}: {info}"
    layers = expertd.hf.layers_of(model)
    held, gone = (sum(p.numel() for p in model.parameters()), sum(2 * l.experts * l.hidden * l.inner for l in layers))
    assert layers and held + gone <= whole, f"{name}: {held} parameters are held, of {whole} in all"
    error = error_of(logits(model), values)
    assert error < EXACT, f"{name}: logits differ by {error:.1e} of the greatest"
    killed = []

    def kill():
        service.kill("b")
        killed.append(True)

    for batch, at in (1, None), (8, At(TOKENS // 2, kill)):
        tokens = generated(model, batch, at)
        want = local[batch]
        assert tokens.shape == want.shape and torch.equal(tokens, want), \
            f"{name}: batch {batch}{', node killed' if at else ''}: first difference at {int((tokens != want).any(0).nonzero()[0])} of {want.shape[1]}"
    assert killed
    calls = model.expertd.client.stats()
    assert calls.calls >= 2 * TOKENS and calls.calls_failed == 0, calls
    model.expertd.close()


def write_models(c, names):
    """name: (folder, class, tokens and logits in process)"""
    found = {}
    for directory in names:
        config = copy.deepcopy(tiny_models.MORE.get(directory, [{}])[0])
        for key, value in WHOLE.get(directory, {}).items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        tiny_models.MORE[directory] = [config]
        ((_, model),) = tiny_models.models(directory)
        model.save_pretrained(c.path(directory))
        model = type(model).from_pretrained(c.path(directory), dtype=torch.float32)  # without what randomise did to buffers that are not saved
        local = {batch: generated(model, batch) for batch in (1, 8)}
        found[directory] = c.path(directory), type(model), local, logits(model), sum(p.numel() for p in model.parameters())
    return found


def check_families(c):
    models = write_models(c, WANTED or FAMILIES)
    service = Service(c, {name: folder for name, (folder, *_) in models.items()})
    for name, parts in models.items():
        started = time.monotonic()
        compare_family(service, name, *parts)
        service.start("b")
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)


# ---- one model ----


def model_and_service(c, directory="mixtral", **more):
    models = write_models(c, [directory, "gpt_oss"])
    folder, _, tokens, values, _ = models[directory]
    return folder, tokens, values, Service(c, {directory: folder, "another": folder, "gpt_oss": models["gpt_oss"][0]}, **more)


def check_offload(folder, tokens, values, service):
    """A model that is loaded; copies of it; what is compiled."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    raised(ValueError, "'another' (", expertd.hf.offload, model, service.url, progress=False)
    raised(ValueError, "model_name is 'absent'", expertd.hf.offload, model, service.url, model_name="absent", progress=False)
    assert torch.equal(generated(model, 1), tokens[1]), "a model that was not taken is another one"
    assert expertd.hf.offload(model, service.url, model_name="mixtral", progress=False) is model
    assert model.expertd.model_name == "mixtral" and model.expertd.version and model.expertd.seconds_to_ready > 0
    raised(ValueError, "on a service already", expertd.hf.offload, model, service.url, model_name="mixtral", progress=False)
    model.set_experts_implementation("eager")  # which is how transformers would compute what is not here
    twin = copy.deepcopy(model)
    for one in model, twin, model.to("cpu"):
        assert torch.equal(generated(one, 8), tokens[8])
    calls = model.expertd.client.stats().calls
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    ids = prompt(model, 2)
    with torch.no_grad():
        got = compiled(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    assert error_of(got, values) < EXACT and model.expertd.client.stats().calls == calls + tiny_models.LAYERS
    raised(TypeError, "is not pickled", torch.save, model, os.devnull)
    check_many_rows(model)
    check_tensors(model)
    check_saved(model, f"{folder}-saved", tokens, service)
    check_backward(model, values)
    check_interrupt(model, values, service)
    model.expertd.close()
    raised(expertd.errors.Closed, "closed", logits, model)


def check_saved(model, folder, tokens, service):
    """What it saves has no experts, and is enough to load it again."""
    model.save_pretrained(folder)
    again, info = expertd.hf.from_pretrained(folder, service.url, model_name="mixtral", progress=False, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert torch.equal(generated(again, 1), tokens[1])
    again.expertd.close()


def check_many_rows(model):
    """More than one call takes, x not contiguous: each row is that of a call of its own."""
    layer = expertd.hf.layers_of(model)[0]
    x, ids = torch.randn(layer.hidden, 65537).t(), torch.randint(0, layer.experts, (65537, 3))
    weights = torch.rand(ids.shape)
    some = torch.tensor([0, 16383, 16384, 65536])
    assert torch.equal(layer(x, ids, weights)[some], layer(x[some], ids[some], weights[some]))


def check_tensors(model):
    """Of a call like one before, and of Client.forward: views are read as they are meant, and sizes that do not fit are refused."""
    layer, client = expertd.hf.layers_of(model)[0], model.expertd.client
    pairs, ids = torch.randn(8, layer.hidden, dtype=torch.complex64).conj(), torch.randint(0, layer.experts, (8, 2))
    weights = torch.rand(ids.shape)
    for x in pairs.imag[::2].contiguous(), pairs.imag[::2], pairs.imag.clone()[::2]:
        assert torch.equal(layer(x, ids[:4], weights[:4]), layer(x.clone(), ids[:4].int(), weights[:4]))
    x = pairs.imag.clone()
    want = layer(x, ids, weights)[::2]
    got = client.forward("mixtral", layer.number, x[::2], ids[::2].contiguous(), weights[::2], shared_source="none", allow_duplicates=True, wire_dtype="f32")
    assert torch.equal(got, want)
    raised(expertd.errors.InvalidArgument, "expert_ids", layer, x, ids[:7], weights)
    raised(expertd.errors.InvalidArgument, "expert_scales", layer, x, ids, weights[:7])
    raised(ValueError, "x is a tensor whose sign torch has yet to turn", client.forward, "mixtral", layer.number, pairs.imag, ids, weights)
    raised(ValueError, "x cannot be had by DLPack", client.forward, "mixtral", layer.number, x.requires_grad_(), ids, weights)


def check_backward(model, values):
    ids = prompt(model, 2)
    found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert found.requires_grad and error_of(found.detach(), values) < EXACT
    raised(RuntimeError, "have no gradients", found.sum().backward)


def check_interrupt(model, values, service):
    """Ctrl-C during a call that does not end by itself; the model is as good as before."""
    for pid in service.pids():
        os.kill(pid, signal.SIGSTOP)
    sent = model.expertd.client.stats().frames_sent

    def interrupt():
        wait_for("the call to be under way", lambda: model.expertd.client.stats().frames_sent > sent)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        logits(model)
        raise AssertionError("the call was not interrupted")
    except KeyboardInterrupt:
        pass
    finally:
        thread.join()
        for pid in service.pids():
            os.kill(pid, signal.SIGCONT)
    assert error_of(logits(model), values) < EXACT


def check_fp8(folder, tokens, service):
    """The class that transformers puts in the place of experts in fp8: while it makes a model, and in one that is loaded."""

    def replace(model):
        config = transformers.FineGrainedFP8Config(weight_block_size=(16, 16))
        finegrained_fp8.replace_with_fp8_linear(model, [r".*\.self_attn", "lm_head"], config)
        found = [m for m in model.modules() if isinstance(m, finegrained_fp8.FP8Experts)]
        assert len(found) == tiny_models.LAYERS
        return found

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with expertd.hf._Stripping():
        experts = replace(copy.deepcopy(model))
    assert all("expertd_layer" in vars(m) and not list(m.parameters()) for m in experts)
    experts = replace(model)
    expertd.hf.offload(model, service.url, model_name="mixtral", progress=False)
    assert torch.equal(generated(model, 1), tokens[1]) and not any(list(m.parameters()) for m in experts)
    model.expertd.close()


def check_types(folder, values, service):
    """Rows in the type of the model."""
    for dtype in torch.bfloat16, torch.float16:
        model = expertd.hf.from_pretrained(folder, service.url, model_name="mixtral", progress=False, dtype=dtype)
        local = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        got, want = logits(model), logits(local)
        assert got.dtype == dtype, got.dtype
        assert (got.float() - values).norm() < 2 * (want.float() - values).norm(), f"{dtype}: worse than transformers' own"
        model.expertd.close()


def linear_weights(model):
    """But for the head's, which transformers leaves out."""
    return [m.weight for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]


def check_torchao(folder, service):
    """Linear layers in torchao's 8 and 4 bits while the model is loaded: tokens are those with the experts in process, in f32. The same of a checkpoint
    that torchao wrote, and of a model that is loaded."""
    for kind, held in (Int8WeightOnlyConfig(), Int8Tensor), (PrototypeInt4WeightOnlyConfig(group_size=32), Int4OpaqueTensor):
        options = dict(dtype=torch.float32, quantization_config=transformers.TorchAoConfig(kind))
        local = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        model = expertd.hf.from_pretrained(folder, service.url, model_name="mixtral", progress=False, **options)
        weights = linear_weights(model)
        assert len(weights) == 4 * tiny_models.LAYERS and all(isinstance(weight, held) for weight in weights), weights
        assert not any(list(layer.mlp.experts.parameters()) for layer in model.model.layers)
        want = generated(local, 8)
        assert torch.equal(generated(model, 8), want), f"{kind}: other tokens than with the experts in process"
        model.expertd.close()
        if held is Int8Tensor:  # torchao writes no checkpoint of the other
            local.save_pretrained(f"{folder}-torchao")
            model = expertd.hf.from_pretrained(f"{folder}-torchao", service.url, model_name="mixtral", progress=False)
            assert all(isinstance(weight, held) for weight in linear_weights(model)) and torch.equal(generated(model, 8), want)
            model.expertd.close()
        expertd.hf.offload(local, service.url, model_name="mixtral", progress=False)
        assert torch.equal(generated(local, 8), want)
        local.expertd.close()


def check_fbgemm(folder, service):
    """Linear layers packed by FBGEMM, in place and in a copy. Rows that differ by a rounding may have other codes of 7 bits, so int8 has a bound and no tokens."""
    ao = torch.ao.quantization
    for kind, bound in (ao.float16_dynamic_qconfig, EXACT), (ao.per_channel_dynamic_qconfig, 0.01):
        found = []
        local = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for model in local, expertd.hf.from_pretrained(folder, service.url, model_name="mixtral", progress=False, dtype=torch.float32):
            twin = ao.quantize_dynamic(model, {torch.nn.Linear: kind})
            model = ao.quantize_dynamic(model, {torch.nn.Linear: kind}, inplace=True)
            assert not linear_weights(model) and torch.equal(logits(model), logits(twin))
            found.append(model)
        error = error_of(logits(found[1]), logits(found[0]))
        assert error < bound, f"{kind}: logits differ by {error:.1e} of the greatest"
        assert bound > EXACT or torch.equal(generated(found[1], 8), generated(found[0], 8))
        found[1].expertd.close()


def check_recipe(c, service):
    """The manual's own, loaded in bf16: for linear layers with a bias, and for routers that are linear layers, which stay as they are."""
    with open(f"{SOURCE}/deploy/manual/python.md") as file:
        blocks = [block.partition("```")[0] for block in file.read().split("```python\n")[1:]]
    (recipe,) = [block for block in blocks if "quantize_dynamic" in block]
    asked = recipe.replace("/models/qwen3", c.path("gpt_oss")).replace('"tcp://127.0.0.1:7410"', f'"{service.url}", model_name="gpt_oss", progress=False')
    want = logits(transformers.AutoModelForCausalLM.from_pretrained(c.path("gpt_oss"), dtype=torch.float32))
    for kind in "per_channel_dynamic_qconfig", "float16_dynamic_qconfig":
        names = {}
        exec(asked.replace("per_channel_dynamic_qconfig", kind), names)
        model = names["model"]
        packed = [m for m in model.modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)]
        assert len(packed) == 4 * tiny_models.LAYERS + 1 and all(m.bias() is not None for m in packed[:-1]), model
        error = error_of(logits(model), want)
        assert 0 < error < 0.1, f"{kind}: logits differ by {error:.1e} of the greatest"
        model.expertd.close()
    begin, _, rest = recipe.partition("model = expertd.hf.from_pretrained(")
    for directory in "afmoe", "dbrx", "doge", "hunyuan_v1_moe", "longcat_flash", "zaya":
        _, model = next(tiny_models.models(directory))
        names = {"model": model.bfloat16()}
        routers = {name for name, m in model.named_modules() if type(m) is torch.nn.Linear and ("router" in name or ".gate." in name)}
        exec(begin + rest.partition("\n")[2], names)
        left = {name for name, m in names["model"].named_modules() if type(m) is torch.nn.Linear}
        assert routers and routers == left, f"{directory}: {routers ^ left}"


def check_mistakes(c, folder, service):
    """What the two sides do not agree on is refused by its name, before a model is loaded where that can be."""
    for kind, wait in (TypeError, "2"), (TypeError, None), (ValueError, 0), (ValueError, float("nan")):
        raised(kind, "wait is ", expertd.hf.from_pretrained, "/absent", service.url, model_name="mixtral", wait=wait, progress=False)
    raised(ValueError, "version 'old'", expertd.hf.from_pretrained, "/absent", service.url, version="old", progress=False)
    for what, keys in (("inner size is 32", dict(intermediate_size=32)), ("top-k is 2", dict(num_experts_per_tok=2)), ("activation is ['gelu']", dict(hidden_act="gelu")),
                       ("experts is 4", dict(num_local_experts=4)), ("in layers [0, 1]", dict(num_hidden_layers=2))):
        config = transformers.AutoConfig.from_pretrained(folder, **keys)
        other = transformers.AutoModelForCausalLM.from_config(config)
        raised(ValueError, what, expertd.hf.offload, other, service.url, model_name="mixtral", progress=False)
        assert not expertd.hf.layers_of(other), "a model that is refused is changed"
    check_numbers(c.path("gpt_oss"), service)
    raised(ValueError, "tp_plan is given", expertd.hf.from_pretrained, "/absent", service.url, model_name="mixtral", tp_plan="auto", progress=False)
    split = transformers.AutoModelForCausalLM.from_pretrained(folder)
    split.config.distributed_config = transformers.distributed.DistributedConfig(tp_size=2)
    raised(ValueError, "distributed_config is given", expertd.hf.offload, split, service.url, model_name="mixtral", progress=False)
    double = transformers.AutoModelForCausalLM.from_pretrained(folder)
    double.model.layers[1].vision_moe = copy.deepcopy(double.model.layers[1].mlp)
    raised(ValueError, "in layers [0, 1, 1, 2]", expertd.hf.offload, double, service.url, model_name="mixtral", progress=False)
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50))
    raised(ValueError, "LlamaForCausalLM has no experts", expertd.hf.offload, dense, service.url)
    error = raised(expertd.errors.DeadlineExceeded, "waited 0.3 s", expertd.hf.from_pretrained, folder, "tcp://127.0.0.1:1", wait=0.3, progress=False)
    assert str(error).count("DEADLINE_EXCEEDED") == 1, error


def check_numbers(folder, service):
    """Of an activation, which no size tells; a service of an older version tells none."""
    for key, theirs in ("swiglu_limit", 0.25), ("swiglu_alpha", 1.5):
        other = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder, **{key: theirs}))
        what = f"{key.partition('_')[2]} {theirs}"
        raised(ValueError, what, expertd.hf.offload, other, service.url, model_name="gpt_oss", progress=False)
        text = str(raised(ValueError, "alpha 1.702, beta 1, limit 0.5: allowed are the same", expertd.hf.offload, other, service.url, model_name="gpt_oss", progress=False))
        assert "other values than swiglu_oai of the service" in text and not expertd.hf.layers_of(other), text
    other = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder, swiglu_limit=0.25))
    client, models = expertd._client.Client, expertd._client.Client.models
    untold = dict(alpha=None, beta=None, limit=None, shared_inner=None)
    client.models = lambda self: [replace(m, layers=tuple(replace(l, **untold) for l in m.layers)) for m in models(self)]
    try:
        expertd.hf.offload(other, service.url, model_name="gpt_oss", progress=False).expertd.close()
    finally:
        client.models = models


def check_wait(c, folder):
    """A cluster that is still loading: the wait ends with it, or says what it waited for."""
    url = c.coordinator("--min-nodes=1", name="later")["rpc_url"]
    raised(expertd.errors.DeadlineExceeded, "waited 0.3 s for the experts", expertd.hf.from_pretrained, folder, url, wait=0.3, progress=False)
    found, shown = [], io.StringIO()
    with contextlib.redirect_stderr(shown):
        thread = threading.Thread(target=lambda: found.append(expertd.hf.from_pretrained(folder, url)))
        thread.start()
        c.daemon("late", f"{BUILD}/server/expertd/expertd", "--node-name=late", f"--coordinator-url={url}", f"--model=mixtral={folder}")
        thread.join()
    assert found and found[0].expertd.model_name == "mixtral"
    assert re.search(rf"experts at {url}: ready after \d+\.\d s; in memory: late \d+(\.\d+)?MB\n", shown.getvalue()), shown.getvalue()
    found[0].expertd.close()


def check_engine_layer(folder, service):
    """What the plugins for engines share: a layer of the service, and parameters that take whatever a loader gives them."""
    os.environ.update(EXPERTD_URL=service.url, EXPERTD_OPTIONS='{"model_name": "mixtral", "wait": 60}')
    keys = transformers.AutoConfig.from_pretrained(folder)
    sizes = keys.num_local_experts, keys.hidden_size, keys.intermediate_size, keys.num_experts_per_tok, ["silu"], False
    asks, adds = (_engine.Layer("model.layers.1.mlp.experts", 1, *sizes, rank == 0, {}) for rank in (0, 1))
    raised(ValueError, "has experts in layers [0, 1, 2]", _engine.Layer, "model.layers.7.mlp.experts", 7, *sizes, True, {})
    x, ids, weights = torch.randn(5, keys.hidden_size), torch.randint(0, keys.num_local_experts, (5, 3)), torch.rand(5, 3)
    model = expertd.hf.from_pretrained(folder, service.url, model_name="mixtral", progress=False)
    want = expertd.hf.layers_of(model)[1](x, ids, weights)
    assert torch.equal(asks(x, ids, weights), want) and want.any()
    assert torch.equal(adds(x, ids, weights) + want, want) and adds(x.bfloat16(), ids, weights).dtype == torch.bfloat16
    model.expertd.close()
    module = torch.nn.Module()
    asks.hold_nothing(module, ("weight", "weight_scale_inv"))
    held = dict(module.named_parameters())
    assert sorted(held) == ["w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"], held
    for parameter in held.values():
        assert parameter.numel() == 0 and parameter.copy_(torch.ones(8, 4, 2)) is parameter
        assert parameter.weight_loader(parameter, torch.ones(4, 2), "w13_weight", shard_id="w1", expert_id=3, return_success=True) is True


def check_cases(c):
    folder, tokens, values, service = model_and_service(c)
    check_engine_layer(folder, service)
    check_offload(folder, tokens, values, service)
    check_fp8(folder, tokens, service)
    check_types(folder, values, service)
    check_torchao(folder, service)
    check_fbgemm(folder, service)
    check_recipe(c, service)
    check_mistakes(c, folder, service)
    check_wait(c, folder)


# ---- memory ----

HOLDER = """
import json, sys, torch, transformers, expertd.hf
torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
def resident():
    return [int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(("VmHWM", "VmRSS"))]
folder, url = sys.argv[1:]
ids = torch.arange(8)[None]
warm = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50))
warm.generate(ids, max_new_tokens=2)
before = resident()[1]
model = expertd.hf.from_pretrained(folder, url, progress=False)
model.generate(ids, max_new_tokens=8)
peak, now = resident()
print(json.dumps({"dense": sum(p.numel() * p.element_size() for p in model.parameters()), "peak": peak - before, "now": now - before}))
"""


def check_memory(c):
    """A process that holds the dense part and no experts: what it grows by, from before the model is loaded to after tokens were generated."""
    layers = int(WANTED[0]) if WANTED else 12 if "EP_TEST_LONG" in os.environ else 2
    config = transformers.MixtralConfig(hidden_size=512, intermediate_size=1536, num_hidden_layers=layers, num_local_experts=16, num_experts_per_tok=2, num_attention_heads=8,
                                        num_key_value_heads=2, vocab_size=64000, max_position_embeddings=128)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.detach().zero_()
    folder, whole = c.path("large"), sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder)
    del model
    url = c.coordinator()["rpc_url"]
    c.daemon("a", f"{BUILD}/server/expertd/expertd", "--node-name=a", f"--coordinator-url={url}", f"--model=large={folder}")
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}/client/python"}
    done = subprocess.run([sys.executable, "-c", HOLDER, folder, url], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    mib = {name: round(value / 2**20, 1) for name, value in {"whole": whole, **seen}.items()}
    print(f"MiB: {mib}", flush=True)
    assert seen["dense"] == whole - layers * 16 * 3 * 512 * 1536 * 2, mib
    assert seen["peak"] < 1.1 * seen["dense"], mib


# ---- transformers serve ----


def add_words(folder):
    """So that text shows each token: t17."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(300)}, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    chat = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=chat).save_pretrained(folder)
    transformers.GenerationConfig(eos_token_id=2, pad_token_id=0, min_new_tokens=TOKENS).save_pretrained(folder)


def serve(c, folder, **more):
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}/client/python", "OMP_NUM_THREADS": "1", **more}
    with open(c.path("serve.log"), "w") as log:
        process = subprocess.Popen([sys.executable, "-m", "expertd.serve", folder, "--device=cpu", "--dtype=float32", "--host=127.0.0.1", "--port=0"], env=environment,
                                   stdout=log, stderr=log)
    c.processes.append(("serve", process))

    def look():
        text = open(c.path("serve.log")).read()
        return process.poll() is not None or re.search(r"running on (http://127.0.0.1:\d+)", text)

    wait_for("the endpoint", look, 600)
    return look(), process, open(c.path("serve.log")).read()


def chat(url, folder, ids, at):
    """The tokens of an answer that is streamed; at(text so far) after each piece."""
    body = dict(model=folder, messages=[{"role": "user", "content": " ".join(f"t{i}" for i in ids)}], max_tokens=TOKENS, temperature=0, stream=True)
    request, text = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}), ""
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                at(text)
    return [int(word) for word in re.findall(r"t(\d+)", text)][-TOKENS:]  # a tokenizer without a decoder has the prompt before them


def check_serve(c):
    """The OpenAI endpoint of transformers gives the tokens that the model gives in process, also when a node is killed in the middle."""
    folder, tokens, _, service = model_and_service(c)
    add_words(folder)
    for more, what in (dict(), "EXPERTD_URL is not set"), (dict(EXPERTD_URL=service.url, EXPERTD_OPTIONS='{"modle": 1}'), "EXPERTD_OPTIONS has 'modle'"):
        _, process, said = serve(c, folder, **more)
        assert process.returncode == 1 and what in said, said
    found, _, said = serve(c, folder, EXPERTD_URL=service.url, EXPERTD_OPTIONS='{"model_name": "mixtral"}')
    assert isinstance(found, re.Match), said
    killed = []

    def kill(text):
        if not killed and len(re.findall(r"t\d+", text)) >= PROMPT + TOKENS // 4:
            service.kill("b")
            killed.append(True)

    want = tokens[1][0].tolist()
    for at in (lambda text: None), kill:
        got = chat(found.group(1), folder, want[:PROMPT], at)
        assert got == want[PROMPT:], f"{got} for {want[PROMPT:]}"
        print(f"{len(got)} tokens are those in process{', a node is killed in the middle' if killed else ''}", flush=True)
    assert killed


def main():
    with Cluster() as c:
        {"families": check_families, "cases": check_cases, "memory": check_memory, "serve": check_serve}[WHAT](c)
    return 0


if __name__ == "__main__":
    sys.exit(main())
