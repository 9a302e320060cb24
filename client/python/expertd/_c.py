# SPDX-License-Identifier: Apache-2.0
"""libexpertd's structs, numbers and functions as expertd/client.h, gate.h and group.h have them: the one place that
repeats it. A test compares fields, sizes, offsets and numbers with the headers'. The library takes structs of other
versions, so this may be older than it."""

import ctypes
import os
from ctypes import CFUNCTYPE, POINTER, Structure, c_bool, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64
from ctypes import c_size_t, c_uint32, c_uint64, c_void_p

LIBRARY = "libexpertd.so.0"
RANK_MAX = 8
HEDGE_BY_POLICY = 2**32 - 1

# Names as users write them, numbers as in C: ENUM_CONSTANT -> {name: number}.
ENUMS = {
    "EP_DTYPE_": {
        "none": 0, "bf16": 1, "f16": 2, "f32": 3, "i8": 4, "u8": 5, "i32": 6, "i64": 7, "bool": 8, "f8e4m3": 9
    },
    "EP_MOE_MODE": {"auto": 0, "decode": 1, "prefill": 2},
    "EP_MOE_RESULT": {"combined": 0, "partial": 1, "uncombined": 2},
    "EP_MOE_WEIGHT_ON_": {"output": 0, "input": 1},
    "EP_MOE_SHARED_": {"service": 0, "caller": 1, "none": 2},
    "EP_MOE_NAN_": {"pass": 0, "reject": 1, "zero": 2, "mean": 3},
    "EP_MOE_CONST_": {"kernel": 0, "linear": 1},
    "EP_MOE_COMM_": {"default": 0, "fullmesh": 1, "hierarchy": 2, "auto": 3},
    "EP_MOE_COMM_WHY_": {
        "asked": 0, "alone": 1, "no_bytes": 2, "refused": 3, "learning": 4, "tried": 5, "measured": 6
    },
    "EP_MOE_COMBINE_AT": {"rows": 0, "node_sum": 1},
    "EP_MOE_DISPATCH_": {"plain": 0, "int8": 2, "fp8": 3},
    "EP_MOE_COMBINE_QUANT": {"plain": 0, "int8": 2},
    "EP_GATE_": {
        "logit": 1, "softmax": 2, "sigmoid": 3, "sqrt_softplus": 4, "softmax_selected": 5, "sparsemixer": 6
    },
    "EP_GROUP_MASK_": {"zero": 0, "minus_inf": 1},
    "EP_GROUP_PROFILE": {"native": 0, "a2": 1, "a3": 2},
    "EP_GROUP_CONST_": {"kernel": 0, "linear": 1},
}
# Where the constant's name is not the prefix and the name.
PREFIXES = {"EP_MOE_MODE": "EP_MOE_", "EP_MOE_RESULT": "EP_MOE_", "EP_MOE_COMBINE_AT": "EP_MOE_COMBINE_",
            "EP_MOE_COMBINE_QUANT": "EP_MOE_COMBINE_", "EP_GROUP_PROFILE": "EP_GROUP_"}


class Tensor(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("dtype", c_int), ("data", c_void_p), ("rank", c_uint32), ("memory", c_int),
        ("shape", c_int64 * RANK_MAX), ("stride_bytes", c_int64 * RANK_MAX), ("device_id", c_int32),
        ("sync_handle", c_uint64)
    ]


class CError(Structure):
    _fields_ = [
        ("code", c_int), ("layer", c_int32), ("expert", c_int32), ("waited_us", c_int64),
        ("retry_after_us", c_uint64), ("current_epoch", c_uint64), ("node", c_char * 64), ("text", c_char * 512)
    ]


class ClientConfig(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("coordinator_url", c_char_p), ("node_urls", POINTER(c_char_p)),
        ("node_urls_count", c_size_t), ("token", c_char_p), ("tls_ca_file", c_char_p),
        ("tls_cert_key_file", c_char_p), ("tls_server_name", c_char_p), ("deadline_us", c_uint64),
        ("numerics", c_char_p), ("buffer_bytes_max", c_uint64), ("calls_max", c_uint32),
        ("prefill_window_tokens", c_uint32), ("chunk_bytes_max", c_uint32), ("payload_crc", c_bool),
        ("hedge_permille", c_uint32), ("lanes", c_char_p)
    ]


class LayerDesc(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("layer", c_uint32), ("hidden", c_uint32), ("inner", c_uint32),
        ("experts", c_uint32), ("shared_experts", c_uint32), ("top_k", c_uint32), ("copies_min", c_uint32),
        ("activation", c_char * 32), ("form_told", c_uint32), ("shared_inner", c_uint32), ("alpha", c_float),
        ("beta", c_float), ("limit", c_float)
    ]


class ModelDesc(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("name", c_char * 128), ("version", c_char * 32), ("numerics", c_char * 96),
        ("layers_count", c_uint32), ("is_default", c_uint32)
    ]


Tokens = CFUNCTYPE(None, c_void_p, c_void_p, c_uint32, c_uint32)


class MoeArgs(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("model", c_char_p), ("version", c_char_p), ("layer", c_uint32),
        ("x", Tensor), ("x_scales", Tensor), ("expert_ids", Tensor), ("expert_scales", Tensor),
        ("active_mask", Tensor), ("partial_slots", Tensor), ("shared", Tensor), ("zero_experts", c_uint32),
        ("copy_experts", c_uint32), ("const_experts", c_uint32), ("const_alpha1", Tensor),
        ("const_alpha2", Tensor), ("const_v", Tensor), ("const_rule", c_int), ("result", c_int),
        ("weight_on", c_int), ("shared_source", c_int), ("nan_policy", c_int), ("x_abs_max", c_float),
        ("mode", c_int), ("wire_dtype", c_int), ("allow_duplicates", c_bool), ("allow_missing", c_bool),
        ("deadline_us", c_uint64), ("traceparent", c_char_p), ("tenant", c_char_p),
        ("missing_slots", POINTER(c_uint32)), ("missing_slots_max", c_size_t), ("comm_alg", c_int),
        ("combine_at", c_int), ("dispatch_quant", c_int), ("combine_quant", c_int), ("smooth_scales", Tensor),
        ("step_group", c_uint64), ("step_group_size", c_uint32), ("want_timing", c_bool), ("on_tokens", Tokens),
        ("on_tokens_arg", c_void_p),
        ("rows_nan_policy", c_int)
    ]


class MoeResult(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("mode", c_int), ("nodes", c_uint32), ("frames", c_uint32),
        ("rerouted_frames", c_uint32), ("missing_count", c_uint32), ("missing_first_slot", c_uint32),
        ("total_us", c_uint64), ("epoch_term", c_uint64), ("epoch_number", c_uint64), ("bytes_sent", c_uint64),
        ("bytes_received", c_uint64), ("numerics", c_char * 96), ("error", CError), ("hedged_frames", c_uint32),
        ("pack_us", c_uint64), ("wire_us", c_uint64), ("queue_us", c_uint64), ("compute_us", c_uint64),
        ("combine_us", c_uint64), ("comm_alg", c_int), ("combine_at", c_int), ("tokens_delivered", c_uint32),
        ("comm_why", c_int), ("fullmesh_us", c_uint64), ("hierarchy_us", c_uint64)
    ]


class ClientStats(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("calls", c_uint64), ("calls_failed", c_uint64), ("frames_sent", c_uint64),
        ("frames_rerouted", c_uint64), ("late_replies", c_uint64), ("nonfinite_rows", c_uint64),
        ("bytes_sent", c_uint64), ("bytes_received", c_uint64), ("buffer_bytes_lent", c_uint64),
        ("buffer_allocations", c_uint64), ("hedged_frames", c_uint64), ("buffer_bytes_peak", c_uint64)
    ]


class NodeWaits(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("node", c_char * 128), ("frames", c_uint64), ("wait_us", c_uint64),
        ("wire_us", c_uint64), ("queue_us", c_uint64), ("compute_us", c_uint64), ("wait_max_us", c_uint64)
    ]


class NodeMemory(Structure):
    _fields_ = [("struct_bytes", c_uint32), ("node", c_char * 128), ("weight_bytes", c_uint64)]


# ---- expertd/gate.h ----

WeightFunc = CFUNCTYPE(c_float, c_void_p, c_uint32, c_uint32, c_uint32, c_float)


class GateLoad(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("fractions", POINTER(c_double)), ("mean_probabilities", POINTER(c_double)),
        ("slots", c_uint64), ("max_over_mean", c_double), ("auxiliary_loss", c_double), ("z_loss", c_double)
    ]


class GateConfig(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("experts", c_uint32), ("top_k", c_uint32), ("select", c_int), ("weight", c_int),
        ("softcap", c_float), ("bias", c_void_p), ("groups", c_uint32), ("groups_kept", c_uint32),
        ("group_best", c_uint32), ("group_mask", c_int), ("renormalise", c_bool), ("epsilon", c_float),
        ("sum_min", c_float), ("scaling_factor", c_float), ("expert_factors", c_void_p), ("jitter", c_float),
        ("chosen", c_void_p), ("noise_temperature", c_float), ("expert_dropout", c_float), ("seed", c_uint64),
        ("weight_func", WeightFunc), ("weight_func_arg", c_void_p), ("load", POINTER(GateLoad))
    ]


# ---- expertd/group.h ----

Listening = CFUNCTYPE(None, c_void_p, c_char_p)
Over = CFUNCTYPE(None, c_void_p, c_void_p)


class GroupConfig(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("name", c_char_p), ("world_size", c_uint32), ("rank", c_uint32),
        ("urls", POINTER(c_char_p)), ("urls_count", c_uint32), ("listen_url", c_char_p), ("on_listening", Listening),
        ("on_listening_arg", c_void_p), ("deadline_us", c_uint64), ("token", c_char_p), ("tls_ca_file", c_char_p),
        ("tls_cert_key_file", c_char_p), ("tls_server_name", c_char_p), ("insecure", c_bool),
        ("payload_crc", c_bool), ("frame_bytes_max", c_uint64), ("host", c_char_p)
    ]


class GroupStats(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("calls", c_uint64), ("frames_sent", c_uint64), ("frames_received", c_uint64),
        ("bytes_sent", c_uint64), ("bytes_received", c_uint64), ("buffer_bytes", c_uint64),
        ("buffer_bytes_peak", c_uint64), ("system_allocations", c_uint64), ("frames_passed_on", c_uint64)
    ]


class GroupTraffic(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("frames_sent", c_uint64), ("bytes_sent", c_uint64),
        ("frames_received", c_uint64), ("bytes_received", c_uint64), ("rows_sent", c_uint64),
        ("frames_passed_on", c_uint64), ("rows_passed_on", c_uint64)
    ]


class GroupParams(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("profile", c_int), ("const_rule", c_int), ("ep_world_size", c_int64),
        ("ep_rank_id", c_int64), ("moe_expert_num", c_int64), ("group_tp", c_void_p), ("tp_world_size", c_int64),
        ("tp_rank_id", c_int64), ("expert_shard_type", c_int64), ("shared_expert_num", c_int64),
        ("shared_expert_rank_num", c_int64), ("global_bs", c_int64), ("zero_expert_num", c_int64),
        ("copy_expert_num", c_int64), ("const_expert_num", c_int64), ("comm_alg", c_char_p),
        ("elastic_info", Tensor), ("allow_duplicates", c_bool)
    ]


class GroupBuffers(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("frame_bytes", c_uint64), ("vendor_bytes", c_uint64),
        ("vendor_tp_bytes", c_uint64)
    ]


class DispatchArgs(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("params", POINTER(GroupParams)), ("quant_mode", c_int64),
        ("expert_token_nums_type", c_int64), ("deadline_us", c_uint64), ("x", Tensor), ("expert_ids", Tensor),
        ("scales", Tensor), ("x_active_mask", Tensor), ("expert_scales", Tensor), ("performance_info", Tensor),
        ("expand_x", Tensor), ("dynamic_scales", Tensor), ("assist_info_for_combine", Tensor),
        ("expert_token_nums", Tensor), ("ep_recv_counts", Tensor), ("tp_recv_counts", Tensor),
        ("expand_scales", Tensor), ("nan_policy", c_int64), ("x_abs_max", c_float), ("expand_idx", Tensor)
    ]


class CombineArgs(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("params", POINTER(GroupParams)), ("comm_quant_mode", c_int64),
        ("out_dtype", c_int64), ("group_list_type", c_int64), ("deadline_us", c_uint64), ("expand_x", Tensor),
        ("expert_ids", Tensor), ("assist_info_for_combine", Tensor), ("ep_send_counts", Tensor),
        ("expert_scales", Tensor), ("tp_send_counts", Tensor), ("x_active_mask", Tensor),
        ("activation_scale", Tensor), ("weight_scale", Tensor), ("group_list", Tensor), ("expand_scales", Tensor),
        ("shared_expert_x", Tensor), ("ori_x", Tensor), ("const_expert_alpha_1", Tensor),
        ("const_expert_alpha_2", Tensor), ("const_expert_v", Tensor), ("performance_info", Tensor),
        ("x_out", Tensor), ("nan_policy", c_int64), ("expand_idx", Tensor)
    ]


class AddRmsNorm(Structure):
    _fields_ = [
        ("struct_bytes", c_uint32), ("eps", c_float), ("residual_x", Tensor), ("gamma", Tensor), ("y", Tensor),
        ("rstd", Tensor), ("x", Tensor)
    ]


STRUCTS = {
    "ep_tensor": Tensor, "ep_error": CError, "ep_client_config": ClientConfig, "ep_layer_desc": LayerDesc,
    "ep_model_desc": ModelDesc, "ep_moe_args": MoeArgs, "ep_moe_result": MoeResult, "ep_client_stats": ClientStats,
    "ep_client_node_waits": NodeWaits, "ep_client_node_memory": NodeMemory, "ep_gate_load": GateLoad,
    "ep_gate_config": GateConfig, "ep_group_config": GroupConfig, "ep_group_stats": GroupStats,
    "ep_group_traffic": GroupTraffic, "ep_group_params": GroupParams, "ep_group_buffers": GroupBuffers,
    "ep_moe_dispatch_args": DispatchArgs, "ep_moe_combine_args": CombineArgs, "ep_moe_add_rms_norm": AddRmsNorm
}

Done = CFUNCTYPE(None, c_void_p, POINTER(MoeResult))
_P = c_void_p  # a handle
_E = POINTER(CError)
_BEGIN = [c_void_p, c_size_t, Over, c_void_p, _E]  # workspace, its bytes, callback and its argument

# Each releases the GIL while it runs.
FUNCTIONS = {
    "ep_version": (c_char_p, []),
    "ep_err_name": (c_char_p, [c_int]),
    "ep_client_config_init_sized": (None, [POINTER(ClientConfig), c_size_t]),
    "ep_moe_args_init_sized": (None, [POINTER(MoeArgs), c_size_t]),
    "ep_client_create": (c_int, [POINTER(ClientConfig), POINTER(_P), POINTER(CError)]),
    "ep_client_wait_ready": (c_int, [_P, c_uint64, POINTER(CError)]),
    "ep_client_set_token": (c_int, [_P, c_char_p, POINTER(CError)]),
    "ep_client_destroy": (None, [_P]),
    "ep_client_model": (c_int, [_P, c_uint32, POINTER(ModelDesc)]),
    "ep_client_layer": (c_int, [_P, c_char_p, c_char_p, c_uint32, POINTER(LayerDesc)]),
    "ep_client_epoch": (c_int, [_P, POINTER(c_uint64), POINTER(c_uint64)]),
    "ep_client_read_stats": (None, [_P, POINTER(ClientStats)]),
    "ep_client_read_waits": (c_int, [_P, c_uint32, POINTER(NodeWaits)]),
    "ep_client_ask_memory": (c_int, [_P, c_uint32, c_uint64, POINTER(NodeMemory), POINTER(CError)]),
    "ep_moe_forward_async": (
        c_int, [_P, POINTER(MoeArgs), POINTER(Tensor), Done, c_void_p, POINTER(_P), POINTER(CError)]
    ),
    "ep_moe_forward_logits_async": (
        c_int,
        [
            _P, POINTER(MoeArgs), POINTER(GateConfig), POINTER(Tensor), POINTER(Tensor), Done, c_void_p,
            POINTER(_P), _E
        ]
    ),
    "ep_gate": (c_int, [POINTER(GateConfig), c_uint32, c_void_p, c_void_p, c_void_p, _E]),
    "ep_call_cancel": (None, [_P]),
    "ep_call_create": (c_int, [_P, POINTER(MoeArgs), POINTER(Tensor), POINTER(_P), POINTER(CError)]),
    "ep_call_begin": (c_int, [_P, c_uint32, POINTER(CError)]),
    "ep_call_finish": (c_int, [_P, POINTER(MoeResult)]),
    "ep_call_destroy": (None, [_P]),
    "ep_group_config_init_sized": (None, [POINTER(GroupConfig), c_size_t]),
    "ep_group_create": (c_int, [POINTER(GroupConfig), POINTER(_P), _E]),
    "ep_group_destroy": (None, [_P]),
    "ep_group_read_stats": (None, [_P, POINTER(GroupStats)]),
    "ep_group_read_traffic": (None, [_P, c_uint32, POINTER(GroupTraffic)]),
    "ep_group_params_init_sized": (None, [POINTER(GroupParams), c_size_t]),
    "ep_group_buffer_sizes": (
        c_int, [POINTER(GroupParams), c_int64, c_int64, c_int64, c_int, POINTER(GroupBuffers), _E]
    ),
    "ep_moe_dispatch_args_init_sized": (None, [POINTER(DispatchArgs), c_size_t]),
    "ep_moe_dispatch_prepare": (c_int, [_P, POINTER(DispatchArgs), POINTER(c_size_t), POINTER(_P), _E]),
    "ep_moe_dispatch_begin": (c_int, [_P, _P, POINTER(DispatchArgs), *_BEGIN]),
    "ep_moe_combine_args_init_sized": (None, [POINTER(CombineArgs), c_size_t]),
    "ep_moe_add_rms_norm_init_sized": (None, [POINTER(AddRmsNorm), c_size_t]),
    "ep_moe_combine_prepare": (
        c_int, [_P, POINTER(CombineArgs), POINTER(AddRmsNorm), POINTER(c_size_t), POINTER(_P), _E]
    ),
    "ep_moe_combine_begin": (c_int, [_P, _P, POINTER(CombineArgs), *_BEGIN]),
    "ep_moe_combine_add_rms_norm_begin": (c_int, [_P, _P, POINTER(CombineArgs), POINTER(AddRmsNorm), *_BEGIN]),
    "ep_group_plan_poll": (c_bool, [_P]),
    "ep_group_plan_finish": (c_int, [_P, _E]),
    "ep_group_plan_cancel": (None, [_P]),
    "ep_group_plan_destroy": (None, [_P]),
}


def _load():
    path = os.environ.get("EXPERTD_LIBRARY") or LIBRARY
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"{path} cannot be loaded ({error}): install the package libexpertd0, or run ldconfig after "
            "cmake --install, or name the file in EXPERTD_LIBRARY"
        ) from None
    for name, (result, arguments) in FUNCTIONS.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise ImportError(f"{path} has no {name}: this package needs libexpertd 0.1.0 or newer") from None
        function.restype, function.argtypes = result, arguments
    return lib


lib = _load()


def sized(struct_type):
    """A struct that the library fills."""
    return struct_type(struct_bytes=ctypes.sizeof(struct_type))
