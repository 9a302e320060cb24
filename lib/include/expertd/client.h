/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libexpertd: sends token batches of one MoE layer to the nodes that hold its experts and combines
 * the rows.
 *
 *   in   x [T,H], expert_ids [T,K], expert_scales [T,K], (model, version, layer)
 *   out  y [T,H] = sum over k of expert_scales[t,k] * FFN_{expert_ids[t,k]}(x[t])
 *                (+ shared experts)
 *
 * The bits of the result depend only on x, ids, scales and the experts' weights: not on placement,
 * batch, copies, retries or threads.
 *
 * Threads    any number of threads may use an ep_client at once. A call handle belongs to one
 *            thread at a time; only ep_call_cancel may come from another.
 * Process    the library changes no process-wide state. Its threads start with the first
 *            connection: those of the network library, one timer thread, and two that run what the
 *            timer finds due. One more exists while a node that left the routing table is being
 *            disconnected. The environment variables LIBEXPERTD_STREAM_LANE (uv, nng) and
 *            LIBEXPERTD_BUSY_POLL_US choose how tcp:// is carried.
 * Fork       in a child of fork(), each call with a client of the parent returns
 *            EP_ERR_FAILED_PRECONDITION; ep_client_destroy does nothing there. The child may
 *            create a client of its own, and the parent's goes on. The child closes the parent's
 *            connections, so nodes see when the parent ends (over nng they see it when both have
 *            ended). nng's threads do not survive a fork: in a child of a process that has used
 *            tls+tcp:// or the nng lane, ep_client_create for such a URL returns
 *            EP_ERR_FAILED_PRECONDITION.
 * Floats     the library rounds to nearest and keeps denormals, whatever float environment the
 *            calling thread has set (FTZ, DAZ, rounding, traps). It leaves that as it was.
 * Callbacks  run on the library's threads, never inside the call that began them (except on_tokens
 *            of a blocking call). They may begin calls, but not block or destroy the client.
 * Policy     operators may set values for all callers while the service runs (expertctl policy).
 *            They arrive with the routing table and apply to calls that begin afterwards; no call
 *            fails because of them. The first of these that gives a value decides: the call's
 *            argument (mode), the client's configuration (hedge_permille), the policy of the
 *            service, the coordinator's configuration, the default.
 * Structs    call _init first, which sets struct_bytes, then change fields. Unset pointers are
 *            NULL. _init tells the library which size your compiler knows (a program without this
 *            header calls _init_sized with it). A newer library takes its defaults for the fields
 *            you do not know. An older one returns UNIMPLEMENTED when a field that it lacks is
 *            not 0. Structs that the library fills: set struct_bytes to sizeof; no more than that
 *            is written (0: the size in version 0.1).
 */
#ifndef EXPERTD_CLIENT_H
#define EXPERTD_CLIENT_H

#include "expertd/error.h"
#include "expertd/gate.h"
#include "expertd/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ep_client ep_client;
typedef struct ep_call ep_call;

#define EP_HEDGE_BY_POLICY UINT32_MAX

typedef struct ep_client_config {
    uint32_t struct_bytes;
    const char *coordinator_url; /* "tcp://host:port"; or NULL and node_urls */
    /* without a coordinator: the nodes' URLs; the routing table is made of what they own */
    const char *const *node_urls;
    size_t node_urls_count;
    const char *token;       /* NULL none */
    const char *tls_ca_file; /* for tls+tcp URLs */
    const char *tls_cert_key_file;
    const char *tls_server_name;
    uint64_t deadline_us; /* default of a call, 10 s */
    /* NULL: exact, the first numerics id seen for a (model, version) is pinned. An id: only that
     * one. "any": tolerance */
    const char *numerics;
    /* limit of send and receive buffers, default 1 GiB; beyond it calls fail with
     * RESOURCE_EXHAUSTED */
    uint64_t buffer_bytes_max;
    uint32_t calls_max; /* calls in flight, default 1024 */
    /* tokens of a prefill window; four windows are in flight at a time. 0: max(256, 32*E/K), or
     * less where their rows would exceed buffer_bytes_max / 8 */
    uint32_t prefill_window_tokens;
    uint32_t chunk_bytes_max; /* of prefill frames, default 1 MiB */
    bool payload_crc; /* CRC on untrusted lanes; default true; must equal the nodes' setting */
    /* Hedged requests: of 1000 frames sent, how many may be sent a second time, to another copy,
     * when the answer is later than the measured 95th percentile. 0: none. Default
     * EP_HEDGE_BY_POLICY: what the service's policy says, or 30 */
    uint32_t hedge_permille;
    /* NULL: shared memory to nodes of this host that offer it, else the lane of the URL. "stream":
     * only the lane of the URL. Where this is NULL, the environment variable LIBEXPERTD_LANES is
     * used */
    const char *lanes;
} ep_client_config;

EP_API void ep_client_config_init_sized(ep_client_config *out_config, size_t struct_bytes);
#define ep_client_config_init(config) ep_client_config_init_sized((config), sizeof(*(config)))

/* Begins connecting and returns. Strings are copied. Errors: INVALID_ARGUMENT (field named),
 * NO_MEMORY. */
EP_API ep_err ep_client_create(const ep_client_config *config, ep_client **out_client,
                               ep_error *out_error);
/*
 * Waits until there is a routing table and, for each of its models, a connected node. With
 * node_urls it also waits until every node has answered, or until the nodes that have hold every
 * expert. Errors: DEADLINE_EXCEEDED with the last report.
 */
EP_API ep_err ep_client_wait_ready(ep_client *client, uint64_t timeout_us, ep_error *out_error);
/*
 * Sets the token (copied; NULL: none) for connections made from now on; open ones stay open.
 * Errors: INVALID_ARGUMENT (longer than 1024 bytes), CLOSED.
 */
EP_API ep_err ep_client_set_token(ep_client *client, const char *token, ep_error *out_error);
/*
 * Fails calls in flight with CANCELLED, waits for their callbacks, closes. Takes 5 s at most. NULL
 * allowed. Prepared calls stay valid only for ep_call_finish and ep_call_destroy.
 */
EP_API void ep_client_destroy(ep_client *client);

/* One MoE layer as the service describes it. */
typedef struct ep_layer_desc {
    uint32_t struct_bytes;
    uint32_t layer;
    uint32_t hidden;
    uint32_t inner;
    uint32_t experts;
    uint32_t shared_experts;
    uint32_t top_k;
    uint32_t copies_min; /* copies of the expert that has the fewest */
    char activation[32]; /* "silu", "swiglu_oai"... */
    /* 1: shared_inner, alpha, beta and limit are known. 0: they are 0, because the layer's nodes or
     * the coordinator are of an older version */
    uint32_t form_told;
    uint32_t shared_inner; /* I of all shared experts together; 0 none */
    /* Numbers of the activation; 0 where it does not use them. swiglu_oai: alpha, beta, limit.
     * situ: alpha, beta. swiglu_limit and swiglu_step: limit. A limit of 0 is none. */
    float alpha;
    float beta;
    float limit;
} ep_layer_desc;

typedef struct ep_model_desc {
    uint32_t struct_bytes;
    char name[128];
    /* Digest of the expert form: of config.json (sizes, activation and its numbers, shared width)
     * and of each weight file's size, header and samples of its data. A suffix ("-mxfp4") is added
     * where nodes hold experts in another format than the files. Equal versions mean equal models,
     * unless weights were changed in place between the samples. `expertctl model show --checkpoint
     * PATH` prints the version of a caller's files. */
    char version[32];
    char numerics[96]; /* pinned id, "" none yet */
    uint32_t layers_count;
    /* 1: calls that name no version get this one. An operator may change the default: name the
     * version where all layers of a pass must be of one version */
    uint32_t is_default;
} ep_model_desc;

/* Models and layers of the routing table, by index. Errors: NOT_FOUND past the end, UNAVAILABLE
 * before the first table. */
EP_API ep_err ep_client_model(ep_client *client, uint32_t index, ep_model_desc *out_model);
EP_API ep_err ep_client_layer(ep_client *client, const char *model, const char *version,
                              uint32_t layer_index, ep_layer_desc *out_layer);
EP_API ep_err ep_client_epoch(ep_client *client, uint64_t *out_term, uint64_t *out_number);

/* The values are explained in ARCHITECTURE.md, "The contract of a layer". */
typedef enum ep_moe_result_form {
    EP_MOE_COMBINED = 0,
    EP_MOE_PARTIAL = 1,
    EP_MOE_UNCOMBINED = 2
} ep_moe_result_form;
typedef enum ep_moe_weight_on {
    EP_MOE_WEIGHT_ON_OUTPUT = 0,
    EP_MOE_WEIGHT_ON_INPUT = 1
} ep_moe_weight_on;
typedef enum ep_moe_shared {
    EP_MOE_SHARED_SERVICE = 0,
    EP_MOE_SHARED_CALLER = 1,
    EP_MOE_SHARED_NONE = 2
} ep_moe_shared;
typedef enum ep_moe_nan {
    EP_MOE_NAN_PASS = 0,
    EP_MOE_NAN_REJECT = 1,
    EP_MOE_NAN_ZERO = 2,
    EP_MOE_NAN_MEAN = 3
} ep_moe_nan;
typedef enum ep_moe_mode { EP_MOE_AUTO = 0, EP_MOE_DECODE = 1, EP_MOE_PREFILL = 2 } ep_moe_mode;
typedef enum ep_moe_const_rule {
    EP_MOE_CONST_KERNEL = 0,
    EP_MOE_CONST_LINEAR = 1
} ep_moe_const_rule;
/*
 * How rows reach the nodes of one host: straight to each owner, or once per host and forwarded
 * inside it. AUTO takes, for each host and call, the way that was quicker in measured calls. With
 * combine_at ROWS both ways give the same bits. With NODE_SUM they do not, so results of AUTO may
 * differ by a rounding from call to call. Hence DEFAULT is FULLMESH.
 */
typedef enum ep_moe_comm {
    EP_MOE_COMM_DEFAULT = 0,
    EP_MOE_COMM_FULLMESH = 1,
    EP_MOE_COMM_HIERARCHY = 2,
    EP_MOE_COMM_AUTO = 3
} ep_moe_comm;
/* Why AUTO chose as it did, for the host that gets the most bytes. */
typedef enum ep_moe_comm_why {
    /* AUTO was not asked for, or only fullmesh can be used (no coordinator; smooth_scales) */
    EP_MOE_COMM_WHY_ASKED = 0,
    EP_MOE_COMM_WHY_ALONE = 1,    /* no other host has two nodes with rows */
    EP_MOE_COMM_WHY_NO_BYTES = 2, /* hierarchy would save hardly any bytes */
    EP_MOE_COMM_WHY_REFUSED = 3,  /* a node has just refused to pass rows on */
    /* too few calls were measured; one call in seven tries hierarchy */
    EP_MOE_COMM_WHY_LEARNING = 4,
    EP_MOE_COMM_WHY_TRIED = 5,   /* the slower way, tried once in a while to measure it again */
    EP_MOE_COMM_WHY_MEASURED = 6 /* fullmesh_us and hierarchy_us decided */
} ep_moe_comm_why;
/* Where the weighted sum is made: at the caller from one row per slot (canonical), or per node
 * first (fewer reply bytes, one more rounding). */
typedef enum ep_moe_combine_at {
    EP_MOE_COMBINE_ROWS = 0,
    EP_MOE_COMBINE_NODE_SUM = 1
} ep_moe_combine_at;
/* Numbers as in the vendor's quant_mode where it has one. */
typedef enum ep_moe_dispatch_quant {
    EP_MOE_DISPATCH_PLAIN = 0,
    EP_MOE_DISPATCH_INT8 = 2, /* per row, one f32 scale */
    EP_MOE_DISPATCH_FP8 = 3   /* e4m3, one f32 scale per 128 elements */
} ep_moe_dispatch_quant;
/* Numbers as in the vendor's comm_quant_mode. */
typedef enum ep_moe_combine_quant {
    EP_MOE_COMBINE_PLAIN = 0,
    EP_MOE_COMBINE_INT8 = 2 /* int8, one scale of the wire type per 8 elements */
} ep_moe_combine_quant;

/*
 * Reports that tokens [first, first + count) are finished: their rows in out are final and may be
 * read, even if the call fails later. Each token is reported once, in ascending order: first is 0
 * at the beginning of a run, then the end of the range before. count is at least 1. All ranges are
 * reported before the end of the call is.
 *
 * Thread     one at a time for a call: the thread that waits in ep_moe_forward or ep_call_finish,
 *            or one of the library. Never inside ep_moe_forward_async or ep_call_begin.
 * Inside     return quickly and wait for nothing: the call and its deadline go on when this
 *            returns. Other calls may be begun. ep_call_cancel(call) ends the call, also a blocking
 *            one, with CANCELLED unless these were its last tokens; no range follows. call is valid
 *            only for that, and only until this returns.
 */
typedef void (*ep_moe_tokens_func)(void *arg, ep_call *call, uint32_t first, uint32_t count);

/*
 * Inputs of one layer call. Tensors are borrowed until the call completes.
 *   x              [T,H] bf16, f16, f32; or i8 with x_scales [T] f32
 *   expert_ids     [T,K] i32 or i64: [0,E) routed, then zero, copy, constant experts. -1 and the
 *                  total number of experts mark inactive slots
 *   expert_scales  [T,K] f32 or bf16; used as they are, never renormalised
 *   active_mask    [T] or [T,K] bool; rank 0: all active. A token that is masked out (all K false)
 *                  gives a row of zeros
 *   partial_slots  [T,K] bool, with EP_MOE_PARTIAL
 *   shared         [T,H] added last, with EP_MOE_SHARED_CALLER
 */
typedef struct ep_moe_args {
    uint32_t struct_bytes;
    const char *model;
    /* NULL or "": the model's default version. If there are several and none has all its experts,
     * the error names them */
    const char *version;
    uint32_t layer;
    ep_tensor x;
    ep_tensor x_scales;
    ep_tensor expert_ids;
    ep_tensor expert_scales;
    ep_tensor active_mask;
    ep_tensor partial_slots;
    ep_tensor shared;
    uint32_t zero_experts;
    uint32_t copy_experts;
    uint32_t const_experts;
    ep_tensor const_alpha1; /* [const_experts,H] of x's type */
    ep_tensor const_alpha2;
    ep_tensor const_v;
    ep_moe_const_rule const_rule;
    ep_moe_result_form result;
    ep_moe_weight_on weight_on;
    ep_moe_shared shared_source;
    ep_moe_nan nan_policy;
    float x_abs_max; /* 0 off */
    ep_moe_mode mode;
    ep_dtype wire_dtype; /* NONE: bf16 */
    bool allow_duplicates;
    /* experts that cannot be reached before the deadline contribute 0; result.missing_count has
     * their slots */
    bool allow_missing;
    uint64_t deadline_us; /* from now; 0: the client's default */
    /* W3C trace context that this call joins; NULL none. Text in another format is ignored */
    const char *traceparent;
    const char *tenant; /* NULL none */
    /* With allow_missing: [missing_slots_max] of the caller, or NULL. Before the call completes,
     * the first missing_slots_max numbers of slots without a row are written here, ascending */
    uint32_t *missing_slots;
    size_t missing_slots_max;
    ep_moe_comm comm_alg;
    ep_moe_combine_at combine_at;
    ep_moe_dispatch_quant dispatch_quant; /* 8-bit form of x in bf16, f16 or f32 */
    ep_moe_combine_quant combine_quant;
    /* [shared + E,H] f32 with EP_MOE_DISPATCH_INT8; rank 0: none. Row of an expert: id + shared
     * experts */
    ep_tensor smooth_scales;
    /* Data-parallel ranks that run the same step give the same number here, and another number
     * for the next step; 0 none. Each run of a prepared call is a step: its number grows by one
     * per run */
    uint64_t step_group;
    /* how many of these ranks call. Decode only: nodes compute their rows of a layer together */
    uint32_t step_group_size;
    bool want_timing; /* nodes report queue and compute times in their replies */
    /*
     * Called as tokens are finished, in prefill and decode, with any other arguments; NULL: not
     * called. A token is finished when it and all tokens before it have their rows; where rows are
     * missing (allow_missing), at the end of the call. out is written as rows arrive, with the same
     * bits as without on_tokens. After an error, the first result.tokens_delivered tokens are valid
     * and the other rows are undefined. Prefill begins with smaller windows, unless
     * prefill_window_tokens is set. INVALID_ARGUMENT with tensors on a device.
     */
    ep_moe_tokens_func on_tokens;
    void *on_tokens_arg;
    /* Applies the rules of nan_policy to the experts' rows as they arrive, and to rows of constant
     * experts. REJECT: the call fails with OUT_OF_RANGE naming token, slot and element. Not with
     * NODE_SUM, where only sums arrive */
    ep_moe_nan rows_nan_policy;
} ep_moe_args;
EP_API void ep_moe_args_init_sized(ep_moe_args *out_args, size_t struct_bytes);
#define ep_moe_args_init(args) ep_moe_args_init_sized((args), sizeof(*(args)))

typedef struct ep_moe_result {
    uint32_t struct_bytes;
    ep_moe_mode mode; /* decode or prefill, as used */
    uint32_t nodes;   /* nodes that got rows */
    uint32_t frames;  /* frames sent, including re-routed ones */
    uint32_t rerouted_frames;
    uint32_t missing_count; /* with allow_missing: slots without a row */
    /* t * slots per token + k of the first such slot; args' missing_slots gets all of them */
    uint32_t missing_first_slot;
    uint64_t total_us;
    uint64_t epoch_term;
    uint64_t epoch_number;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    char numerics[96];
    ep_error error;
    uint32_t hedged_frames; /* sent a second time because the first answer was late */
    /* Where the time went, for the slowest frame, since frames run side by side. queue, compute and
     * wire only with want_timing. */
    uint64_t pack_us;
    uint64_t wire_us; /* from sending to the answer, less the node's own time */
    uint64_t queue_us;
    uint64_t compute_us;
    uint64_t combine_us;
    /* as used; with AUTO, HIERARCHY if any host's rows went that way; FULLMESH without
     * coordinator */
    ep_moe_comm comm_alg;
    /* as used; NODE_SUM rounds once more and is not the canonical sum */
    ep_moe_combine_at combine_at;
    /* the first tokens that on_tokens was told of; also after an error */
    uint32_t tokens_delivered;
    ep_moe_comm_why comm_why;
    /* with AUTO: expected time of either way at the slowest host; 0 not known */
    uint64_t fullmesh_us;
    uint64_t hierarchy_us;
} ep_moe_result;

/*
 * out: [T,H], or uncombined [T,K,H]; bf16, f16 or f32; must not overlap the inputs; written only on
 * success (with on_tokens: as tokens are finished). out_result may be NULL. Before the first
 * routing table the call waits for one. A prefill call needs a scratch result of out's size,
 * because its tokens are combined while others still travel.
 *
 * Errors (named in out_result->error)
 *   INVALID_ARGUMENT, UNIMPLEMENTED  an argument, its value, what is allowed
 *   NOT_FOUND                        model, version or layer; what there is
 *   UNAVAILABLE                      no live copy before the deadline: layer, expert, node, time
 *                                    waited, last report. At once, when only nodes of other
 *                                    numerics ids hold the expert
 *   DEADLINE_EXCEEDED                a live node did not answer; details as for UNAVAILABLE
 *   RESOURCE_EXHAUSTED               calls_max, buffer_bytes_max, or a node's admission beyond the
 *                                    retry budget. Before the deadline, when nodes have more work
 *                                    than they can do until then
 *   CANCELLED, CLOSED, FAILED_PRECONDITION, NO_MEMORY; and any error of a node that no other copy
 *   can avoid
 */
EP_API ep_err ep_moe_forward(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                             ep_moe_result *out_result);

/* Called at completion, exactly once. result is valid during the callback. */
typedef void (*ep_moe_done_func)(void *arg, const ep_moe_result *result);

/* Callback form. If this returns an error, done is never called; before the first routing table the
 * error is UNAVAILABLE. out_call may be NULL; otherwise *out_call is valid for ep_call_cancel until
 * done returns. */
EP_API ep_err ep_moe_forward_async(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                                   ep_moe_done_func done, void *arg, ep_call **out_call,
                                   ep_error *out_error);
/* The call completes with CANCELLED unless it has already completed. */
EP_API void ep_call_cancel(ep_call *call);

/*
 * Prepared form: registers fixed buffers for a layer and a largest T (the first dimension of the
 * tensors in args and out). Everything is allocated here; begin and finish allocate nothing and
 * change no address. Many prepared calls (at least 128) may be in flight.
 */
EP_API ep_err ep_call_create(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                             ep_call **out_call, ep_error *out_error);
/* Starts a run with the first n_active tokens of the buffers; later rows are neither read, sent nor
 * written. One run at a time. */
EP_API ep_err ep_call_begin(ep_call *call, uint32_t n_active, ep_error *out_error);
/* Waits for the end of the run. out_result may be NULL. FAILED_PRECONDITION if none was begun. */
EP_API ep_err ep_call_finish(ep_call *call, ep_moe_result *out_result);
/* A run in flight is cancelled and waited for. NULL allowed. */
EP_API void ep_call_destroy(ep_call *call);

/*
 * Prepared calls on an Ascend device. x and out of ep_call_create are in device memory (memory
 * EP_MEMORY_ASCEND, device_id, sync_handle 0). x_scales, expert_ids, expert_scales, active_mask,
 * partial_slots and shared may be too. A result on the device has no gaps between elements.
 * ep_call_create works on the calling thread's device and context, and allocates pinned memory and
 * a stream for the call. ep_call_destroy must come before aclFinalize. It waits up to 5 s for work
 * of the call that is still on the streams, and leaves alone what has not finished by then. CANN's
 * runtime is opened when the first such call is created; if it is missing, FAILED_PRECONDITION
 * names it.
 *
 * begin   returns at once. After the work that stream holds now, the inputs are copied to the host,
 *         and then the run and its deadline start. Inputs in host memory are read during the run.
 * finish  comes once between begin and ep_call_finish, and returns at once. stream waits for the
 *         end of the run and copies the result to out; it need not be begin's stream. Until stream
 *         has passed this point, the program must not touch the inputs and out.
 *
 * Then ep_call_finish tells how the run ended (it may have to wait for begin's stream) and must
 * come before the next begin. The copy to out is still queued on stream: whoever reads out waits
 * for stream. After a run that failed or was cancelled, the rows of out are NaN. Without
 * ep_moe_finish_on_stream out is not written.
 *
 * stream   an aclrtStream of the call's device, not NULL.
 * Errors   FAILED_PRECONDITION (a call of host tensors; called out of order), INVALID_ARGUMENT,
 *          DEVICE_LOST and other failures of the runtime, named with the vendor's code. Later
 *          failures are returned by ep_call_finish.
 * Threads  as for ep_call_begin and ep_call_finish, whatever device they work on. While such calls
 *          exist, the library runs one more thread for callbacks.
 */
EP_API ep_err ep_moe_begin_on_stream(ep_call *call, uint32_t n_active, void *stream,
                                     ep_error *out_error);
EP_API ep_err ep_moe_finish_on_stream(ep_call *call, void *stream, ep_error *out_error);

/* Gate, dispatch, experts and combine in one call: logits [T,E] f32 replace ids and scales (which
 * must have rank 0). */
EP_API ep_err ep_moe_forward_logits(ep_client *client, const ep_moe_args *args,
                                    const ep_gate_config *gate, const ep_tensor *logits,
                                    const ep_tensor *out, ep_moe_result *out_result);
/* The callback form of ep_moe_forward_logits, with the rules of ep_moe_forward_async. The gate runs
 * in the caller's thread before this returns: logits and gate are not needed afterwards. */
EP_API ep_err ep_moe_forward_logits_async(ep_client *client, const ep_moe_args *args,
                                          const ep_gate_config *gate, const ep_tensor *logits,
                                          const ep_tensor *out, ep_moe_done_func done, void *arg,
                                          ep_call **out_call, ep_error *out_error);

/* Counters since creation. */
typedef struct ep_client_stats {
    uint32_t struct_bytes;
    uint64_t calls;
    uint64_t calls_failed;
    uint64_t frames_sent;
    uint64_t frames_rerouted;
    uint64_t late_replies;
    uint64_t nonfinite_rows; /* rows of x with NaN or Inf, where nan_policy is not PASS */
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t buffer_bytes_lent;
    uint64_t buffer_allocations; /* from the system allocator */
    uint64_t hedged_frames;
    uint64_t buffer_bytes_peak; /* the most that was lent at one time */
} ep_client_stats;
EP_API void ep_client_read_stats(ep_client *client, ep_client_stats *out_stats);

/* Waiting times for one node: sums over frames of calls with want_timing whose rows were used. */
typedef struct ep_client_node_waits {
    uint32_t struct_bytes;
    char node[128];
    uint64_t frames;
    /* from sending to the answer; the next three are parts of it, the rest is other work of the
     * node */
    uint64_t wait_us;
    uint64_t wire_us;
    uint64_t queue_us;
    uint64_t compute_us;
    uint64_t wait_max_us;
} ep_client_node_waits;
/* Nodes of the newest routing table, by index. Errors: NOT_FOUND past the end, UNAVAILABLE before
 * the first table. */
EP_API ep_err ep_client_read_waits(ep_client *client, uint32_t index,
                                   ep_client_node_waits *out_waits);

typedef struct ep_client_node_memory {
    uint32_t struct_bytes;
    char node[128];
    /* experts in the node's memory, of all models, in the form it computes with */
    uint64_t weight_bytes;
} ep_client_node_memory;
/* Asks the node at index of the newest routing table and waits for its answer, up to timeout_us.
 * Set struct_bytes of out_memory. Any thread, but not from a callback. ep_client_destroy waits up
 * to 5 s for it; if it takes longer, the client's memory is not freed. Errors: NOT_FOUND past the
 * end, UNAVAILABLE before the first table. If the node does not answer: DEADLINE_EXCEEDED, or why
 * it cannot be asked, with its name in out_error->node. */
EP_API ep_err ep_client_ask_memory(ep_client *client, uint32_t index, uint64_t timeout_us,
                                   ep_client_node_memory *out_memory, ep_error *out_error);

/* "0.1.0" */
EP_API const char *ep_version(void);

#ifdef __cplusplus
}
#endif
#endif
