# SPDX-License-Identifier: Apache-2.0
"""A tiny model of every MoE model type of transformers: which config makes it small, and where its experts are."""
import importlib, inspect, os, re

import torch, transformers

H, I, E, K, LAYERS = 64, 40, 8, 3, 3

# Every key that makes a config small, whatever the type; a type takes those that it has.
SMALL = dict(
    hidden_size=H, d_model=H, intermediate_size=48, intermediate_size_mlp=56, moe_intermediate_size=I, expert_ffn_hidden_size=I, ffn_hidden_size=I,
    shared_expert_intermediate_size=24, shared_intermediate_size=24, moe_shared_expert_intermediate_size=24, share_expert_dim=24,
    shared_experts_intermediate_size=24, dense_intermediate_size=56, prefix_dense_intermediate_size=56, moe_hidden_size=32,
    num_experts=E, num_local_experts=E, n_routed_experts=E, moe_num_experts=E, num_experts_per_tok=K, num_experts_per_token=K, moe_topk=K, moe_k=K,
    moe_top_k=K, top_k_experts=K, num_hidden_layers=LAYERS, n_layers=LAYERS, num_layers=LAYERS, num_decoder_layers=LAYERS, encoder_layers=LAYERS,
    decoder_layers=LAYERS, encoder_ffn_dim=I, decoder_ffn_dim=I, d_ff=I, d_kv=16, num_attention_heads=4, n_heads=4, num_heads=4,
    encoder_attention_heads=4, decoder_attention_heads=4, num_key_value_heads=2, head_dim=16, v_head_dim=16, kv_channels=16, qk_nope_head_dim=16,
    qk_rope_head_dim=16, kv_lora_rank=16, q_lora_rank=24, vocab_size=300, max_position_embeddings=128, max_seq_len=128, model_max_length=128,
    n_shared_experts=1, num_shared_experts=1, moe_num_shared_experts=1, n_group=1, topk_group=1, num_expert_group=1, first_k_dense_replace=1,
    num_dense_layers=1, zero_expert_num=2, index_n_heads=2, index_head_dim=16, index_topk=8, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_heads=4, linear_head_dim=16, mamba_d_state=8, mamba_d_conv=4, mamba_n_heads=4,
    mamba_d_head=32, mamba_expand=2, mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=8, n_groups=1, mamba_dt_rank=8, router_hidden_size=32,
    num_nextn_predict_layers=0, pad_token_id=0, bos_token_id=1, eos_token_id=2, depth=1, out_hidden_size=H, moe_layer_end_index=-1,
    vocab_size_per_layer_input=300, hidden_size_per_layer_input=8, projector_hidden_size=H)
DERIVED = ("layer_types", "mlp_layer_types", "layers_block_type", "moe_layers", "num_attention_heads_per_layer", "no_rope_layers", "kv_source_layers",
           "indexer_types", "layer_rope_theta")  # lists that follow from the number of layers
DROPPED = ("per_layer_config", "transformers_version", "rope_parameters", "architectures", "dtype", "model_type")

SPARSE = ["dense", "sparse", "sparse"]


def text(**more):
    return dict(text_config=more)


# Directory of transformers: what else its config needs. Several configs make several models.
MORE = {
    "axk1": [{}, dict(n_group=4, topk_group=2)],
    "axk2": [{}, dict(n_group=4, topk_group=2)],
    "bailing_hybrid": [dict(num_expert_group=4, topk_group=2)],
    "beam": [dict(mlp_layer_types=SPARSE, n_group=4, topk_group=2)],
    "cohere2_moe": [{}, dict(num_shared_experts=0), dict(shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid"),
                    dict(expert_selection_fn="sigmoid", norm_topk_prob=False, mlp_layer_types=SPARSE)],
    "dbrx": [dict(attn_config=dict(kv_n_heads=2, rope_theta=10000.0)),
             dict(attn_config=dict(kv_n_heads=2, rope_theta=10000.0), ffn_config=dict(moe_normalize_expert_weights=None))],
    "deepseek_ocr2": [text(mlp_layer_types=SPARSE, num_attention_heads=4, num_key_value_heads=4)],
    "deepseek_v2": [{}, dict(n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=2.0, n_shared_experts=2)],
    "deepseek_v3": [{}, dict(n_group=4, topk_group=2, n_shared_experts=2), dict(norm_topk_prob=False)],
    "deepseek_v4": [dict(mlp_layer_types=["hash_moe", "moe", "moe"], swiglu_limit=0.5)],
    "diffusion_gemma": [text(num_experts=E, moe_intermediate_size=I)],
    "doge": [dict(is_moe=True, num_experts=16)],
    "dots1": [{}, dict(norm_topk_prob=True, n_shared_experts=2)],
    "dots3_note": [dict(text_config=dict(num_key_value_heads=4, n_shared_experts=2), vision_config=dict(mlp_layer_types=SPARSE, adapter_in_dim=H, adapter_out_dim=H),
                        audio_config=dict(adapter_input_size=H, adapter_output_size=H))],
    "ernie4_5_vl_moe": [dict(text_config=dict(moe_intermediate_size=[40, 24], head_dim=32,
                                              rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[5, 5, 6])),
                             vision_config=dict(num_heads=2))],
    "exaone_moe": [dict(mlp_layer_types=SPARSE), dict(n_group=4, topk_group=2)],
    "flint": [{}, dict(mlp_only_layers=[0], norm_topk_prob=False)],
    "gemma4": [text(enable_moe_block=True)],
    "glm5_next": [text(num_key_value_heads=4, index_topk=16, qk_rope_head_dim=0, mlp_layer_types=SPARSE, swiglu_limit=0.5)],
    "gpt_oss": [dict(swiglu_limit=0.5)],
    "granitemoe_swa": [dict(shared_intermediate_size=0), {}],
    "hy_v4": [dict(swiglu_limit=0.5)],
    "inkling2": [dict(vision_config=dict(text_hidden_size=H)), dict(vision_config=dict(text_hidden_size=H), text_config=dict(mlp_gate_softcap=0.5))],
    "jamba": [dict(expert_layer_period=2, expert_layer_offset=1)],
    "kimi_linear": [{}, dict(num_expert_group=4, topk_group=2)],
    "kolibri1": [{}, dict(norm_topk_prob=True)],
    "laguna": [{}, dict(moe_router_logit_softcapping=2.0, moe_routed_scaling_factor=1.5)],
    "lfm2_moe": [dict(layer_types=["conv", "full_attention", "conv"]),
                 dict(layer_types=["conv", "full_attention", "conv"], use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.5)],
    "llama4": [text(num_experts_per_tok=1), text(num_experts_per_tok=2, interleave_moe_layer_step=2)],
    "longcat_flash": [{}],
    "minimax_m3_vl": [text(swiglu_limit=0.5), text(mlp_layer_types=SPARSE)],
    "mistral4": [{}, dict(n_group=4, topk_group=2)],
    "mistral_large4": [{}, text(n_group=4, topk_group=2)],
    "muse_spark": [dict(audio_config=dict(num_hidden_layers=4))],
    "nemotron_h": [dict(layers_block_type=["mamba", "moe", "moe"]), dict(layers_block_type=["moe", "mamba", "moe"], moe_latent_size=32)],
    "nllb_moe": [dict(encoder_sparse_step=2, decoder_sparse_step=3)],
    "openai_privacy_filter": [dict(swiglu_limit=0.5)],
    "phimoe": [dict(num_experts_per_tok=2)],
    "qwen3_omni_moe": [dict(talker_config=dict(spatial_merge_size=2, text_config=dict(shared_expert_intermediate_size=24)))],
    "qwen2_moe": [{}, dict(norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[0])],
    "qwen3_moe": [{}, dict(norm_topk_prob=True, mlp_only_layers=[1])],
    "step3p7": [text(mlp_layer_types=SPARSE, swiglu_limits=[0.0, 0.1, 0.0], swiglu_limits_shared=[0.0, 0.0, 0.2], moe_router_scaling_factor=2.0)],
    "switch_transformers": [dict(num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)],
    "unlimited_ocr": [text(num_key_value_heads=4)],
    "vitpose_backbone": [],  # its experts are no feed-forward experts: see ep_model_type
    "zaya": [dict(num_experts_per_tok=1)],
}
CLASSES = {"qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration"}


def directories():
    """Those with a class of experts: what a newer transformers adds is among them."""
    root = os.path.join(os.path.dirname(transformers.__file__), "models")
    found = []
    for name in sorted(os.listdir(root)):
        for file in os.listdir(f"{root}/{name}") if os.path.isdir(f"{root}/{name}") else []:
            if file.startswith("modeling_") and name not in found:
                with open(f"{root}/{name}/{file}") as f:
                    if re.search(r"class \w*(Experts|MoE|Moe|MOE|SparseM\w+)\w*\(", f.read()):
                        found.append(name)
    return found


def small_config(cls, more):
    more = dict(more)
    base = cls()
    keys = {k: v for k, v in base.to_dict().items() if not k.startswith("_") and k not in DROPPED}
    for k in keys:
        keys[k] = SMALL[k] if k in SMALL else None if k in DERIVED else keys[k]
    for name in getattr(cls, "sub_configs", {}):
        sub = getattr(base, name, None)
        if isinstance(sub, transformers.PreTrainedConfig):
            keys[name] = small_config(type(sub), more.pop(name, {})).to_dict()
    return cls(**{**keys, **more})


def config_class(directory):
    module = importlib.import_module(f"transformers.models.{directory}.configuration_{directory}")
    own = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, transformers.PreTrainedConfig) and c.__module__ == module.__name__]
    whole = [c for c in own if not re.search("Vision|Audio|Text|Sam|Thinker|Talker|Attention|FFN|Code", c.__name__)]
    return whole[0]


def model_class(directory, config):
    if directory in CLASSES:
        return getattr(transformers, CLASSES[directory])
    mappings = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
                transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING]
    if hasattr(config, "text_config"):
        mappings = [mappings[1], mappings[0], *mappings[2:]]
    return next(m[type(config)] for m in mappings if type(config) in m)


@torch.no_grad()
def randomise(model):
    """Values of every weight that change what it gives: no zero bias, no factor of one."""
    for name, p in list(model.named_parameters()) + list(model.named_buffers()):
        if name.endswith("tid2eid"):
            p.copy_(torch.stack([torch.randperm(E)[:p.shape[1]] for _ in range(p.shape[0])]))
        elif not p.is_floating_point():
            continue
        elif re.search(r"bias|balancing|global_scale|per_expert_scale", name) and p.dim() <= 2 and "inv_freq" not in name:
            low, high = (0.5, 1.5) if "scale" in name else (-1.0, 0.1) if re.search("correction|expert_bias|balancing", name) else (-0.2, 0.2)
            p.uniform_(low, high)  # scores below 0 show what masked groups compete with
        elif p.dim() >= 2:
            p.normal_(0.0, p.shape[-1] ** -0.5)
        elif re.search(r"norm|scale", name):
            p.uniform_(0.5, 1.5)


def models(directory):
    """(number, model) of each of the directory's configs, in f32."""
    cls = config_class(directory)
    for number, more in enumerate(MORE.get(directory, [{}])):
        torch.manual_seed(number)
        config = small_config(cls, more)
        model = model_class(directory, config)._from_config(config).eval()
        randomise(model)
        yield number, model
