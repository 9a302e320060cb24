# SPDX-License-Identifier: Apache-2.0
"""How config.json of published models spells what transformers writes under other keys. Each entry: the model whose file has these
keys, and what turns a written config into one that is spelt so. Directory of transformers: [(source, function)]."""


def renamed(c, **names):
    for old, new in names.items():
        if old in c:
            c[new] = c.pop(old)
    return c


def without(c, *keys):
    for key in keys:
        c.pop(key, None)
    return c


def dense_first(c):
    """first_k_dense_replace instead of mlp_layer_types."""
    types = c.pop("mlp_layer_types")
    c["first_k_dense_replace"] = types.index("sparse")
    return c


def in_text(spell):
    return lambda c: {**c, "text_config": spell(c["text_config"])}


def deepseek(c):
    return {**c, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True}


def mimo(c):
    types = c.pop("mlp_layer_types")
    return {**c, "moe_layer_freq": [int(t == "sparse") for t in types], "n_shared_experts": None, "routed_scaling_factor": None,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def hy3(c):
    c = dense_first(c)
    return {**c, "expert_hidden_dim": c["moe_intermediate_size"], "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True,
            "route_norm": True, "qk_norm": True}


def nemotron(c):
    letters = {"linear_attention": "M", "mamba": "M", "moe": "E", "full_attention": "*", "attention": "*", "mlp": "-"}
    kinds = c.pop("layers_block_type")
    return {**c, "hybrid_override_pattern": "".join(letters[k] for k in kinds), "num_hidden_layers": len(kinds)}


def step(c):
    t = c.pop("text_config")
    sparse = [i for i, kind in enumerate(t.pop("mlp_layer_types")) if kind == "sparse"]
    t = renamed(t, n_routed_experts="moe_num_experts", num_experts_per_tok="moe_top_k", num_key_value_heads="num_attention_groups")
    limits = {key: [limit or None for limit in t[key]] for key in ("swiglu_limits", "swiglu_limits_shared")}
    return {**t, **limits, "moe_layers_enum": ",".join(map(str, sparse)), "moe_layer_offset": 0, "moe_every_n_layer": 1, "use_moe": True,
            "norm_expert_weight": True, "moe_router_activation": "sigmoid", "use_moe_router_bias": True, "need_fp32_gate": True}


def hunyuan(c):
    layers = c["num_hidden_layers"]
    return {**c, "moe_topk": [c["moe_topk"]] * layers, "moe_intermediate_size": [c["intermediate_size"]] * layers, "num_shared_expert": [1] * layers,
            "moe_layer_num_skipped": 0, "use_mixed_mlp_moe": True, "moe_drop_tokens": False, "moe_random_routing_dropped_token": False,
            "norm_topk_prob": True}


def kimi_linear(c):
    c = dense_first(c)
    return {**c, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True}


def ling(c):
    c = without(c, "mlp_layer_types")
    return {**renamed(c, num_experts_per_token="num_experts_per_tok", num_expert_group="n_group", moe_renormalize="norm_topk_prob"),
            "moe_router_enable_expert_bias": True, "score_function": "sigmoid", "router_dtype": "fp32"}


def minimax_m2(c):
    return {**c, "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0, "norm_topk_prob": True}


def trinity(c):
    return {**without(c, "mlp_layer_types"), "score_func": "sigmoid", "route_norm": True, "num_expert_groups": 1, "num_limited_groups": 1, "n_group": 1,
            "topk_group": 1, "load_balance_coeff": 0.001}


def laguna(c):
    types = c.pop("mlp_layer_types")
    return {**c, "mlp_only_layers": [i for i, t in enumerate(types) if t == "dense"], "moe_router_use_sigmoid": True, "norm_topk_prob": True}


def ernie(c):
    return {**c, "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True, "moe_layer_end_index": c["num_hidden_layers"] - 1}


PUBLISHED = {
    "afmoe": [("arcee-ai/Trinity-Mini", trinity)],
    "bailing_hybrid": [("inclusionAI/Ring-2.5-1T", ling)],
    "deepseek_v2": [("deepseek-ai/DeepSeek-V2-Lite", lambda c: {**c, "scoring_func": "softmax", "moe_layer_freq": 1, "ep_size": 1})],
    "deepseek_v3": [("deepseek-ai/DeepSeek-V3", deepseek), ("moonshotai/Kimi-K2-Instruct", lambda c: {**deepseek(c), "model_type": "kimi_k2"})],
    "deepseek_v32": [("deepseek-ai/DeepSeek-V3.2", lambda c: deepseek(dense_first(c)))],
    "deepseek_v4": [("deepseek-ai/DeepSeek-V4-Flash", lambda c: {**without(c, "mlp_layer_types"), "num_hash_layers": 1, "topk_method": "noaux_tc"})],
    "ernie4_5_moe": [("baidu/ERNIE-4.5-21B-A3B-PT", ernie)],
    "glm4_moe": [("zai-org/GLM-4.5", lambda c: c)],
    "glm4_moe_lite": [("zai-org/GLM-4.7-Flash", lambda c: {**dense_first(c), "topk_method": "noaux_tc"})],
    "glm_moe_dsa": [("zai-org/GLM-5", lambda c: {**dense_first(c), "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1})],
    "gpt_oss": [("openai/gpt-oss-20b", lambda c: {**without(c, "swiglu_alpha"), "experts_per_token": c["num_experts_per_tok"]})],
    "hunyuan_v1_moe": [("tencent/Hunyuan-A13B-Instruct", hunyuan)],
    "hy_v3": [("tencent/Hy3-preview", hy3)],
    "kimi_linear": [("moonshotai/Kimi-Linear-48B-A3B-Instruct", kimi_linear)],
    "laguna": [("poolside/Laguna-S-2.1", laguna)],
    "lfm2_moe": [("LiquidAI/LFM2-8B-A1B", lambda c: without(c, "mlp_layer_types"))],
    "llama4": [("meta-llama/Llama-4-Scout-17B-16E", in_text(lambda t: without(t, "moe_layers"))),
               ("meta-llama/Llama-4-Maverick-17B-128E", in_text(lambda t: without(t, "layer_types")))],
    "longcat_flash": [("meituan-longcat/LongCat-Flash-Chat", lambda c: {**c, "zero_expert_type": "identity", "router_bias": False})],
    "mimo_v2_flash": [("XiaomiMiMo/MiMo-V2-Flash", mimo)],
    "minimax_m2": [("MiniMaxAI/MiniMax-M2", minimax_m2)],
    "mixtral": [("mistralai/Mixtral-8x7B-v0.1", lambda c: without(c, "head_dim"))],
    "nemotron_h": [("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", nemotron)],
    "qwen3_moe": [("Qwen/Qwen3-30B-A3B", lambda c: renamed(c, num_local_experts="num_experts"))],
    "step3p7": [("stepfun-ai/Step-3.5-Flash", step)],
}
