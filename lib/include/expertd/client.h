/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libexpertd: sends token batches of one MoE layer to the nodes that hold its experts and combines
 * the rows.
 *
 *   in   x [T,H], expert_ids [T,K], expert_scales [T,K], (model, version, layer)
 *   out  y [T,H] = sum over k of expert_scales[t,k] * FFN_{expert_ids[t,k]}(x[t])
 *                (+ shared experts)
 *
 * The result's bits depend on x, ids, scales and the experts' weights only: not on placement,
 * batch, copies, retries or threads.
 *
 * Threads    an ep_client is used by any number of threads at once. A call handle belongs to one
 *            thread at a time; only ep_call_cancel may come from another.
 * Process    nothing process-wide is changed. Threads start on first connect: the network
 *            library's, one timer thread and two that work on what it finds due; while a node that
 *            left the table is being disconnected there is one more. LIBEXPERTD_STREAM_LANE (uv,
 *            nng) and LIBEXPERTD_BUSY_POLL_US in the environment choose how tcp:// is carried.
 *            After fork() every call in the child with a client of the parent returns
 *            EP_ERR_FAILED_PRECONDITION, except ep_client_destroy, which does nothing there. The
 *            child makes a client of its own, the parent goes on. The child begins without the
 *            parent's connections, so that nodes see when the parent ends (over nng they see it
 *            when both have). nng's threads do not survive a fork: in a child of a process that
 *            has used tls+tcp:// or the nng lane, ep_client_create for such a URL returns
 *            EP_ERR_FAILED_PRECONDITION.
 * Floats     the library rounds to nearest and keeps denormals whatever the float environment of
 *            the calling thread (FTZ, DAZ, rounding, traps), and leaves that as it was.
 * Callbacks  run on the library's threads, never inside the call that began them (on_tokens of a
 *            blocking call excepted); they may begin calls, not block, not destroy the client.
 * Policy     operators may set values for all callers while the service runs (expertctl policy).
 *            They come with the routing table, calls that begin afterwards go by them, and none
 *            fails for it. Who decides, first to last:
 *            the call's argument (mode); the client's configuration (hedge_permille); the policy of
 *            the service; the coordinator's configuration; the default.
 * Structs    set struct_bytes by _init first; then change fields. Unset pointers are NULL. _init
 *            tells the library the size that your compiler knows (a program without this header
 *            calls _init_sized with it). A library with more fields takes its defaults for them;
 *            one with fewer gives UNIMPLEMENTED where a field it lacks is not 0.
 *            Structs the library fills: set struct_bytes to sizeof, no more than that is written
 *            (0: the size it has in 0.1).
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
    /* without a coordinator: the nodes themselves; the table is made of what they say they own */
    const char *const *node_urls;
    size_t node_urls_count;
    const char *token;       /* NULL none */
    const char *tls_ca_file; /* for tls+tcp URLs */
    const char *tls_cert_key_file;
    const char *tls_server_name;
    uint64_t deadline_us; /* default of a call, 10 s */
    /* NULL: the first id seen for a (model, version) is pinned (exact). An id: only that. "any":
     * tolerance */
    const char *numerics;
    /* send and receive buffers, 1 GiB; beyond it calls get RESOURCE_EXHAUSTED */
    uint64_t buffer_bytes_max;
    uint32_t calls_max; /* calls in flight, 1024 */
    /* four windows are under way at a time. 0: max(256, 32*E/K); less where their rows would exceed
     * buffer_bytes_max / 8 */
    uint32_t prefill_window_tokens;
    uint32_t chunk_bytes_max; /* prefill frames, 1 MiB */
    bool payload_crc;         /* on untrusted lanes; default true; must equal the nodes' setting */
    /* frames that may be sent a second time to another copy when the answer is later than the
     * measured 95th percentile, of 1000 sent; 0: never. Default EP_HEDGE_BY_POLICY: as the
     * service's policy says, 30 where it says nothing */
    uint32_t hedge_permille;
    /* NULL: shared memory with nodes of this host that offer it, else the URL's lane; "stream": the
     * URL's only. The environment variable LIBEXPERTD_LANES is taken where this is NULL */
    const char *lanes;
} ep_client_config;

EP_API void ep_client_config_init_sized(ep_client_config *out_config, size_t struct_bytes);
#define ep_client_config_init(config) ep_client_config_init_sized((config), sizeof(*(config)))

/* Begins connecting and returns. Strings are copied. Errors: INVALID_ARGUMENT (field named),
 * NO_MEMORY. */
EP_API ep_err ep_client_create(const ep_client_config *config, ep_client **out_client,
                               ep_error *out_error);
/*
 * Waits until a routing table is there and a node of each of its models is connected; with
 * node_urls also until every node has spoken, or those that have hold every expert. Errors:
 * DEADLINE_EXCEEDED with the last report.
 */
EP_API ep_err ep_client_wait_ready(ep_client *client, uint64_t timeout_us, ep_error *out_error);
/*
 * Another token (copied; NULL: none) for connections made from now on; open ones stay open. Errors:
 * INVALID_ARGUMENT (longer than 1024 bytes), CLOSED.
 */
EP_API ep_err ep_client_set_token(ep_client *client, const char *token, ep_error *out_error);
/*
 * Fails calls in flight with CANCELLED, waits for their callbacks, closes. Bounded (5 s). NULL
 * allowed. Prepared calls stay valid for ep_call_finish and ep_call_destroy only.
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
    uint32_t copies_min;   /* copies of the expert that has fewest */
    char activation[32];   /* "silu", "swiglu_oai"... */
    uint32_t form_told;    /* 1: the next four are known; 0: they are 0, as the layer's nodes or the
                            * coordinator are of an older version. Weights: see version */
    uint32_t shared_inner; /* I of the shared experts together; 0 none */
    float alpha; /* numbers of the activation, 0 where it has none: of swiglu_oai alpha, */
    float beta;  /* beta and limit, of situ alpha and beta, of swiglu_limit and */
    float limit; /* swiglu_step limit; a limit of 0 is none */
} ep_layer_desc;

typedef struct ep_model_desc {
    uint32_t struct_bytes;
    char name[128];
    /* the digest of the expert form: over config.json, so sizes, activation and its numbers, the
     * shared width, and every weight file's size, header and samples of its data; a word behind it
     * ("-mxfp4") where nodes hold experts in another format than the files'. Where they are
     * equal the model is the same, but for weights that were changed in place between the samples.
     * `expertctl model show --checkpoint PATH` prints it for a caller's files */
    char version[32];
    char numerics[96]; /* pinned id, "" none yet */
    uint32_t layers_count;
    uint32_t is_default; /* 1: calls that name no version get this one. An operator may move it:
                          * name the version where all layers of a pass must be of one */
} ep_model_desc;

/* The table's models and layers by index; NOT_FOUND past the end, UNAVAILABLE before the first
 * table. */
EP_API ep_err ep_client_model(ep_client *client, uint32_t index, ep_model_desc *out_model);
EP_API ep_err ep_client_layer(ep_client *client, const char *model, const char *version,
                              uint32_t layer_index, ep_layer_desc *out_layer);
EP_API ep_err ep_client_epoch(ep_client *client, uint64_t *out_term, uint64_t *out_number);

/* Values as in the contract; see ARCHITECTURE.md, "The contract of a layer". */
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
 * inside. AUTO takes, for each host and call, the way that measured calls were quicker by. With
 * combine_at ROWS both ways give the same bits. With NODE_SUM they do not, so results of AUTO may
 * differ by a rounding from call to call. Hence DEFAULT is FULLMESH.
 */
typedef enum ep_moe_comm {
    EP_MOE_COMM_DEFAULT = 0,
    EP_MOE_COMM_FULLMESH = 1,
    EP_MOE_COMM_HIERARCHY = 2,
    EP_MOE_COMM_AUTO = 3
} ep_moe_comm;
/* Why AUTO took the way it took, for the host that gets the most bytes. */
typedef enum ep_moe_comm_why {
    EP_MOE_COMM_WHY_ASKED = 0, /* not AUTO, or it must be fullmesh: no coordinator, smooth_scales */
    EP_MOE_COMM_WHY_ALONE = 1, /* no other host has two nodes with rows */
    EP_MOE_COMM_WHY_NO_BYTES = 2, /* hierarchy would save hardly any bytes */
    EP_MOE_COMM_WHY_REFUSED = 3,  /* a node has just refused to pass rows on */
    EP_MOE_COMM_WHY_LEARNING = 4, /* too few calls were measured: one in seven tries hierarchy */
    EP_MOE_COMM_WHY_TRIED = 5,    /* the slower one, once in a while, to measure it again */
    EP_MOE_COMM_WHY_MEASURED = 6  /* by fullmesh_us and hierarchy_us */
} ep_moe_comm_why;
/* Where the weighted sum is made: here from one row per slot (canonical), or per node first (fewer
 * reply bytes, one more rounding). */
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
 * Tells that tokens [first, first + count) are finished: their rows in out are final and may be
 * read, also when the call fails later. Each token comes once, in ascending order: first is where
 * the range before ended, 0 at the beginning of a run; count is 1 or more. All of them come before
 * the call's end is told.
 *
 * Thread     one at a time for a call: the one that waits in ep_moe_forward or ep_call_finish, or a
 *            thread of the library. Never inside ep_moe_forward_async or ep_call_begin.
 * Inside     be quick, wait for nothing: the call, its deadline too, goes on when this returns.
 *            Other calls may be begun. ep_call_cancel(call) ends the call, a blocking one too, with
 *            CANCELLED unless these were its last tokens, and no range comes after it. call is good
 *            for that only, until this returns.
 */
typedef void (*ep_moe_tokens_func)(void *arg, ep_call *call, uint32_t first, uint32_t count);

/*
 * Inputs of one layer call. Tensors are borrowed until the call completes.
 *   x              [T,H] bf16, f16, f32; or i8 with x_scales [T] f32
 *   expert_ids     [T,K] i32 or i64: [0,E) routed, then zero, copy, constant experts; -1 and the
 *                  total are inactive
 *   expert_scales  [T,K] f32 or bf16; used as they are, never renormalised
 *   active_mask    [T] or [T,K] bool; rank 0: all active. A token masked out (all K false) gives a
 *                  zero row
 *   partial_slots  [T,K] bool, with EP_MOE_PARTIAL
 *   shared         [T,H] added last, with EP_MOE_SHARED_CALLER
 */
typedef struct ep_moe_args {
    uint32_t struct_bytes;
    const char *model;
    /* NULL or "": the default of the model; an error naming all when none of several is whole */
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
    /* rows that cannot be had before the deadline count as 0 and are counted in the result */
    bool allow_missing;
    uint64_t deadline_us; /* from now; 0: the client's default */
    /* W3C, NULL none; the trace this call joins. Any other text is ignored */
    const char *traceparent;
    const char *tenant; /* NULL none */
    /* [missing_slots_max] with allow_missing: numbers of the slots without a row, ascending, the
     * first missing_slots_max of them; written before the call completes; NULL: not wanted */
    uint32_t *missing_slots;
    size_t missing_slots_max;
    ep_moe_comm comm_alg;
    ep_moe_combine_at combine_at;
    ep_moe_dispatch_quant dispatch_quant; /* of x in bf16, f16 or f32 */
    ep_moe_combine_quant combine_quant;
    /* [shared + E,H] f32 with EP_MOE_DISPATCH_INT8; rank 0: none. Row: expert id + shared
     * experts */
    ep_tensor smooth_scales;
    /* data-parallel ranks of one step: the same number on all, another each step; 0 none. Each run
     * of a prepared call counts as a step: the next run's number is one more */
    uint64_t step_group;
    /* how many of them call; decode only: nodes compute their rows of a layer together */
    uint32_t step_group_size;
    bool want_timing; /* nodes tell queue and compute times in their replies */
    /*
     * Told of tokens as they are finished, in prefill and decode, whatever the other arguments;
     * NULL: nobody is. A token is finished when it and all before it have their rows; where rows
     * stay away (allow_missing) that is at the end. out is written as rows come, with the bits it
     * has without on_tokens. After an error the first result.tokens_delivered tokens are good and
     * the rows of the others undefined. Prefill begins with smaller windows, unless
     * prefill_window_tokens is set. INVALID_ARGUMENT with tensors on a device.
     */
    ep_moe_tokens_func on_tokens;
    void *on_tokens_arg;
    /* nan_policy's rules for the experts' rows as they arrive, and for rows of constant experts.
     * REJECT: the call fails with OUT_OF_RANGE naming token, slot and element. Not with node_sum,
     * where there are sums only */
    ep_moe_nan rows_nan_policy;
} ep_moe_args;
EP_API void ep_moe_args_init_sized(ep_moe_args *out_args, size_t struct_bytes);
#define ep_moe_args_init(args) ep_moe_args_init_sized((args), sizeof(*(args)))

typedef struct ep_moe_result {
    uint32_t struct_bytes;
    ep_moe_mode mode; /* used */
    uint32_t nodes;   /* that got rows */
    uint32_t frames;  /* sent, re-routed ones included */
    uint32_t rerouted_frames;
    uint32_t missing_count; /* with allow_missing: slots without a row */
    /* t * slots per token + k of the first; all of them: args' missing_slots */
    uint32_t missing_first_slot;
    uint64_t total_us;
    uint64_t epoch_term;
    uint64_t epoch_number;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    char numerics[96];
    ep_error error;
    uint32_t hedged_frames; /* sent a second time because the first answer was slow */
    /* Where the time went; queue, compute and wire only with want_timing. The slowest frame's, as
     * frames run side by side. */
    uint64_t pack_us;
    uint64_t wire_us; /* from sent to answered, less the node's own time */
    uint64_t queue_us;
    uint64_t compute_us;
    uint64_t combine_us;
    /* used; with AUTO hierarchy if any host's rows went so. Without a coordinator fullmesh */
    ep_moe_comm comm_alg;
    ep_moe_combine_at combine_at; /* used: node_sum rounds once more and is not the canonical sum */
    uint32_t tokens_delivered; /* the first ones, which on_tokens was told of; after an error too */
    ep_moe_comm_why comm_why;
    /* with AUTO: what either way was expected to take at the slowest host; 0 not known */
    uint64_t fullmesh_us;
    uint64_t hierarchy_us;
} ep_moe_result;

/*
 * out: [T,H], uncombined [T,K,H]; bf16, f16 or f32; apart from the inputs; written only on success
 * (or, with on_tokens, as tokens are finished). out_result may be NULL. Before the first routing
 * table it waits for one. A prefill call needs a scratch result of out's size: its tokens are
 * combined while others still travel.
 *
 * Errors (named in out_result->error)
 *   INVALID_ARGUMENT, UNIMPLEMENTED  an argument, its value, what is allowed
 *   NOT_FOUND                        model, version or layer; what there is
 *   UNAVAILABLE                      no live copy before the deadline: layer, expert, node, time
 *                                    waited, last report; or, at once, only nodes of other numerics
 *                                    ids
 *   DEADLINE_EXCEEDED                a live node did not answer: the same
 *   RESOURCE_EXHAUSTED               calls_max, buffer_bytes_max, a node's admission beyond the
 *                                    retry budget, or, before the deadline, nodes with more work
 *                                    than they can do until then
 *   CANCELLED, CLOSED, FAILED_PRECONDITION, NO_MEMORY; any other error of a node no other copy can
 *   mend
 */
EP_API ep_err ep_moe_forward(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                             ep_moe_result *out_result);

/* Completion, exactly once. result is valid during the callback. */
typedef void (*ep_moe_done_func)(void *arg, const ep_moe_result *result);

/* Callback form. On an error here done is never called; UNAVAILABLE before the first routing table.
 * out_call may be NULL; else *out_call is valid until done returns, for ep_call_cancel. */
EP_API ep_err ep_moe_forward_async(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                                   ep_moe_done_func done, void *arg, ep_call **out_call,
                                   ep_error *out_error);
/* The call completes with CANCELLED unless it already completed. */
EP_API void ep_call_cancel(ep_call *call);

/*
 * Prepared form: registers fixed buffers for a layer and a greatest T (args' and out's first
 * dimension). Everything is allocated here; begin and finish allocate nothing and change no
 * address. Many prepared calls (at least 128) may be in flight.
 */
EP_API ep_err ep_call_create(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                             ep_call **out_call, ep_error *out_error);
/* Starts with the first n_active tokens of the buffers; rows after them are neither read, sent nor
 * written. One run at a time. */
EP_API ep_err ep_call_begin(ep_call *call, uint32_t n_active, ep_error *out_error);
/* Waits for the end of the run. out_result may be NULL. FAILED_PRECONDITION when not begun. */
EP_API ep_err ep_call_finish(ep_call *call, ep_moe_result *out_result);
/* Not while a run is under way (it is then cancelled and waited for). NULL allowed. */
EP_API void ep_call_destroy(ep_call *call);

/*
 * Prepared calls on an Ascend device. x and out of ep_call_create are there (memory
 * EP_MEMORY_ASCEND, device_id, sync_handle 0), and so may be x_scales, expert_ids, expert_scales,
 * active_mask, partial_slots and shared; a result there has no gaps. ep_call_create works on the
 * calling thread's device and context and allocates pinned memory for them and a stream of its own.
 * ep_call_destroy comes before aclFinalize; it waits for what the streams still hold of the call,
 * and leaves as it is what they do not pass within 5 s. CANN's runtime is opened when the first
 * such call is made: FAILED_PRECONDITION names it where it is missing.
 *
 * begin   returns at once. Behind what stream holds now the inputs are copied to the host, and then
 *         the run starts; its deadline counts from there. Inputs in host memory are read during the
 *         run.
 * finish  once between begin and ep_call_finish, returns at once: stream waits for the end of the
 *         run and copies the result to out. It may be another stream than begin's. Until it has
 *         passed this place, the program leaves the inputs and out alone.
 * After these, ep_call_finish tells how the run ended (waiting, if need be, for begin's stream too)
 * and must come before the next begin. The copy to out is then in stream's hands: whoever reads out
 * waits for stream. After a run that failed or was cancelled the rows of out are NaN. Without
 * ep_moe_finish_on_stream out is not written.
 *
 * stream  an aclrtStream of the call's device, not NULL.
 * Errors  FAILED_PRECONDITION (a call of host tensors; not its turn), INVALID_ARGUMENT, DEVICE_LOST
 *         and other failures of the runtime, named with the vendor's code. Failures later on come
 *         by ep_call_finish.
 * Threads as for ep_call_begin and ep_call_finish, whatever device they work on. One more thread of
 * the library runs
 *         while such calls are there, for callbacks.
 */
EP_API ep_err ep_moe_begin_on_stream(ep_call *call, uint32_t n_active, void *stream,
                                     ep_error *out_error);
EP_API ep_err ep_moe_finish_on_stream(ep_call *call, void *stream, ep_error *out_error);

/* Gate, dispatch, experts and combine in one: logits [T,E] f32 instead of ids and scales (which
 * must be rank 0). */
EP_API ep_err ep_moe_forward_logits(ep_client *client, const ep_moe_args *args,
                                    const ep_gate_config *gate, const ep_tensor *logits,
                                    const ep_tensor *out, ep_moe_result *out_result);
/* The callback form of it, with the rules of ep_moe_forward_async. The gate runs in the caller's
 * thread, before this returns: logits and gate are not needed afterwards. */
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
    uint64_t nonfinite_rows; /* of x, with NaN or Inf, where nan_policy is not PASS */
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t buffer_bytes_lent;
    uint64_t buffer_allocations; /* from the system allocator */
    uint64_t hedged_frames;
    uint64_t buffer_bytes_peak; /* the most that was lent at once */
} ep_client_stats;
EP_API void ep_client_read_stats(ep_client *client, ep_client_stats *out_stats);

/* Waits for one node, summed over the frames of calls with want_timing whose rows were used. */
typedef struct ep_client_node_waits {
    uint32_t struct_bytes;
    char node[128];
    uint64_t frames;
    /* from sent to answered; the next three are its parts, the rest is the node's own work around
     * them */
    uint64_t wait_us;
    uint64_t wire_us;
    uint64_t queue_us;
    uint64_t compute_us;
    uint64_t wait_max_us;
} ep_client_node_waits;
/* The newest table's nodes by index; NOT_FOUND past the end, UNAVAILABLE before the first table. */
EP_API ep_err ep_client_read_waits(ep_client *client, uint32_t index,
                                   ep_client_node_waits *out_waits);

typedef struct ep_client_node_memory {
    uint32_t struct_bytes;
    char node[128];
    uint64_t weight_bytes; /* experts in its memory, of all models, in the form it computes with */
} ep_client_node_memory;
/* Asks the node at index of the newest table and waits for its answer, up to timeout_us. Set
 * struct_bytes of out_memory. Any thread, not from a callback. ep_client_destroy waits for it 5 s;
 * should it take longer, the client's memory is not freed. Errors: NOT_FOUND past the end,
 * UNAVAILABLE before the first table; of a node that does not answer DEADLINE_EXCEEDED, or why it
 * cannot be asked, with its name in out_error->node. */
EP_API ep_err ep_client_ask_memory(ep_client *client, uint32_t index, uint64_t timeout_us,
                                   ep_client_node_memory *out_memory, ep_error *out_error);

/* "0.1.0" */
EP_API const char *ep_version(void);

#ifdef __cplusplus
}
#endif
#endif
