/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The group API: expert parallelism for SPMD programs. Every rank holds tokens and experts; all
 * ranks call the same operators in the same order. Each operator has two phases, as in aclnn.
 * *_prepare checks everything that can be checked without I/O, and returns a plan and the bytes of
 * the workspace. The operator then runs on the plan as often as wanted, with other data but the
 * same parameters and shapes. It runs in one call, or is begun and finished later, so that a rank
 * can compute in between.
 *
 *   dispatch  sends x[t] to the rank of each of its K experts and gives each rank its rows, sorted
 *             by (local expert, source rank, position in the source's flattened expert_ids)
 *   combine   sends the experts' rows back and sums them in the canonical order:
 *             acc = 0 (f32); k = 0..K-1: acc = acc + expert_scales[t,k] * row(t,k), multiply and
 *             add rounded separately; then the shared experts' rows in index order, unweighted;
 *             then shared_expert_x[t]; one rounding to the output type
 *
 * Letters    T tokens of this rank, K slots per token, H elements per row, W ep_world_size,
 *            M moe_expert_num, S shared_expert_num, SR shared_expert_rank_num, L experts of this
 *            rank. With elastic_info, W, M and SR are the scaled-down values.
 * Experts    MoE expert e is on rank SR + e / (M / (W - SR)). In profile native, W - SR need not
 *            divide M: the first M % (W - SR) ranks hold one expert more. Shared expert s of a
 *            token of rank r is on rank s * (SR / S) + r % (SR / S).
 * A          the most rows a rank can receive: a shared rank max_bs*W*S/SR; an MoE rank
 *            max_bs*W*min(L,K), with allow_duplicates max_bs*W*K (0 where L is 0). max_bs is T, or
 *            global_bs / the group's size.
 * Ids        [0,M) routed, then zero, copy and constant experts, which never travel. Profile native
 *            also takes -1 and the total number of experts as "none".
 * Agreement  in every call the ranks compare their parameters. When they differ, the call fails on
 *            all ranks with INVALID_ARGUMENT naming the parameter, the values and the ranks; the
 *            group stays usable. After a disagreement on elastic_info (the error names its digest)
 *            the group must be created anew.
 * Hosts      ranks with the same ep_group_config.host share a host. With comm_alg hierarchy a rank
 *            passes on rows of its neighbours, also after its own operation has ended and while its
 *            program does other things. When it dies, the neighbours' calls fail naming it.
 * Failure    a rank whose own values are bad (ids, masks, assist info) tells the others, and the
 *            call fails on all of them. What is found before that (plan, workspace, shapes,
 *            ranges) fails on this rank alone: it may call again while the others wait. When a rank
 *            dies, leaves or does not answer before the deadline, the call fails on every rank with
 *            UNAVAILABLE or DEADLINE_EXCEEDED naming the ranks, and so does every later call in
 *            which that rank takes part. Calls whose elastic_info leaves it out go on. A rank that
 *            was left out once stays out, even if it is alive: to take it back, create the group
 *            anew. After a failed call the outputs are undefined.
 * Under way  a group has up to EP_GROUP_OPERATIONS_MAX operations under way, each on a plan and a
 *            workspace of its own: one pair for each micro-batch. Every operation that was begun
 *            must be finished, also after an error. The args struct may go when begin returns.
 *            Until finish has returned, nobody else may write or free the tensors that it names.
 * Order      all ranks begin the operations of a group in the same order, also after failures: the
 *            n-th operation of one rank belongs to the n-th of each other rank. A begin that failed
 *            does not count. An operation that failed does count: go on with the next one, which
 *            fails with a reason if it needs what is missing. Operations may be finished in any
 *            order, but with group_tp in the order of beginning. elastic_info may change only while
 *            none is under way.
 * Cancelling a cancelled operation ends on this rank with CANCELLED, or with the error that broke
 *            the group before. On a rank that has not finished it, it fails with the same error,
 *            naming this rank; a rank that has keeps its result. A cancelled operation counts in
 *            the order, and the group stays usable.
 * Memory     frames lie in a pool of the group: at most two calls' worth of rows for each operation
 *            under way, by what is really sent, not by A; with hierarchy also the rows it passes
 *            on. Plans hold everything else: begin and finish allocate nothing.
 * Strides    any, in tensors of dispatch and combine except elastic_info. Elements may have gaps
 *            between them, lie in another order of dimensions or run backwards; elements of inputs
 *            may overlap. Where the elements of each row are dense the tensor itself is used, else
 *            a dense copy in the plan's memory.
 * Devices    tensors of dispatch and combine, except elastic_info, may be on an Ascend device:
 *            memory EP_MEMORY_ASCEND, device_id that of the threads that begin and finish,
 *            sync_handle the aclrtStream of their work (one stream for all tensors of a call);
 *            outputs without gaps. A plan prepared with them has pinned memory for them. begin
 *            copies inputs after the stream's earlier work, finish copies outputs after the
 *            exchange, and both return when the copies are done. The call's deadline bounds waiting
 *            for the stream too. Other errors: as for ep_moe_begin_on_stream in client.h.
 * Threads    calls from any thread; different groups are independent. When several threads begin
 *            operations of one group, their order must be the same on all ranks. One call at a time
 *            for a plan, except ep_group_plan_cancel. The exchange goes on without any call.
 * Fork       a group and its plans belong to the process that made them. In a child begin and
 *            finish give FAILED_PRECONDITION; cancel and destroy do nothing. The child closes the
 *            group's connections, so the other ranks see when the parent ends (over nng they see it
 *            when both have ended).
 * Callbacks  on_listening runs in ep_group_create. The done callbacks of begin run on one thread of
 *            the group (or of group_tp), which starts with the first of them; never inside a call
 *            of the program. They may call everything but ep_group_destroy of this group or of
 *            group_tp. While one runs, the others wait.
 * Structs    set struct_bytes by the _init function first, then change fields. An absent tensor has
 *            rank 0.
 */
#ifndef EXPERTD_GROUP_H
#define EXPERTD_GROUP_H

#include "expertd/error.h"
#include "expertd/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_GROUP_WORLD_MAX 768
#define EP_GROUP_NAME_BYTES_MAX 127
#define EP_GROUP_OPERATIONS_MAX 4

typedef struct ep_group ep_group;
typedef struct ep_group_plan ep_group_plan;

/* ---- membership ---- */

typedef struct ep_group_config {
    uint32_t struct_bytes;
    const char *name;    /* group_ep, 1..127 characters; equal on all ranks */
    uint32_t world_size; /* 1..EP_GROUP_WORLD_MAX */
    uint32_t rank;       /* 0..world_size-1 */
    /* where the ranks listen: a URL per rank, or only rank 0's (the others tell it theirs) */
    const char *const *urls;
    uint32_t urls_count; /* world_size or 1 */
    /* where this rank listens; the port may be 0. NULL: urls[rank]. "tcp://", "tls+tcp://",
     * "loopback://", or any other scheme that a lane of this build serves */
    const char *listen_url;
    /* Called once with the real URL when this rank listens, so that rank 0 can tell a launcher its
     * port. NULL allowed. */
    void (*on_listening)(void *arg, const char *url);
    void *on_listening_arg;
    /* deadline of ep_group_create, and of each call that sets none; default 30 s */
    uint64_t deadline_us;
    const char *token;       /* all ranks must show the same token; NULL none */
    const char *tls_ca_file; /* for tls+tcp; the certificate serves both directions */
    const char *tls_cert_key_file;
    const char *tls_server_name;
    bool insecure;    /* allows a non-loopback address without TLS and token */
    bool payload_crc; /* CRC32C over rows on lanes that do not protect them; default true */
    /* largest frame, default 256 MiB: the rows of one rank for another rank or host in one call */
    uint64_t frame_bytes_max;
    /* Name of the host of this rank, for comm_alg hierarchy, up to 63 characters. Ranks with equal
     * names share a host. NULL: the machine's boot id. "": shares with no other rank */
    const char *host;
} ep_group_config;

EP_API void ep_group_config_init_sized(ep_group_config *out_config, size_t struct_bytes);
#define ep_group_config_init(config) ep_group_config_init_sized((config), sizeof(*(config)))
/*
 * Connects to all other ranks and returns when every one is connected. Errors: INVALID_ARGUMENT
 * (field named), UNAVAILABLE (address in use), DEADLINE_EXCEEDED naming the ranks that are missing,
 * UNAUTHENTICATED, NO_MEMORY.
 */
EP_API ep_err ep_group_create(const ep_group_config *config, ep_group **out_group,
                              ep_error *out_error);
/* Says goodbye, sends what is still queued (for 5 s at most), closes. Plans of the group must be
 * destroyed before. NULL allowed. */
EP_API void ep_group_destroy(ep_group *group);
EP_API uint32_t ep_group_rank(const ep_group *group);
EP_API uint32_t ep_group_world_size(const ep_group *group);

/* Counters of this rank since the group was created, and the memory it holds for frames. */
typedef struct ep_group_stats {
    uint32_t struct_bytes;
    uint64_t calls; /* operators run, including failed ones */
    uint64_t frames_sent;
    uint64_t frames_received;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t buffer_bytes;       /* lent and kept now */
    uint64_t buffer_bytes_peak;  /* the most that was lent at one time */
    uint64_t system_allocations; /* frames for which the pool had no kept memory */
    /* of frames_sent: those of ranks of other hosts, passed on (comm_alg hierarchy) */
    uint64_t frames_passed_on;
} ep_group_stats;

EP_API void ep_group_read_stats(ep_group *group, ep_group_stats *out_stats);

/* Traffic with one other rank, over its connection. */
typedef struct ep_group_traffic {
    uint32_t struct_bytes;
    uint64_t frames_sent;
    uint64_t bytes_sent;
    uint64_t frames_received;
    uint64_t bytes_received;
    /* rows of this rank: token rows in dispatch frames, result rows in combine frames */
    uint64_t rows_sent;
    uint64_t frames_passed_on; /* of frames_sent: those of ranks of other hosts, passed on */
    uint64_t rows_passed_on;   /* rows in those frames */
} ep_group_traffic;

/* All zeros when rank >= world_size. */
EP_API void ep_group_read_traffic(ep_group *group, uint32_t rank, ep_group_traffic *out_traffic);

/* ---- parameters of dispatch and combine; must be equal on all ranks ---- */

/*
 * native: no rule for sizes or divisibility. a2, a3: the ranges that the vendor documents for its
 * newest operators (npu_moe_distribute_dispatch_v2 and combine_v2 of August 2026; with expand_idx
 * those of npu_moe_distribute_dispatch and combine), for programs that must run there too.
 * server_num is ep_world_size / 8. One of the vendor's rules is not checked: only hierarchy may
 * cross between super nodes. A rank cannot find out which super node it is on.
 */
typedef enum ep_group_profile {
    EP_GROUP_NATIVE = 0,
    EP_GROUP_A2 = 1,
    EP_GROUP_A3 = 2
} ep_group_profile;
/* kernel: p1*x + p2*v, (p1,p2) = softmax(alpha1.x, alpha2.x). linear: alpha1*x + alpha2*v, element
 * by element. */
typedef enum ep_group_const_rule {
    EP_GROUP_CONST_KERNEL = 0,
    EP_GROUP_CONST_LINEAR = 1
} ep_group_const_rule;

typedef struct ep_group_params {
    uint32_t struct_bytes;
    ep_group_profile profile;
    ep_group_const_rule const_rule;
    int64_t ep_world_size;  /* 0: the group's size; any other value must equal it */
    int64_t ep_rank_id;     /* -1: the group's rank; any other value must equal it */
    int64_t moe_expert_num; /* M >= 1 */
    ep_group *group_tp;     /* group of the two ranks of a tensor-parallel pair; NULL none */
    /* 0: none. 1: none; group_tp is ignored. 2: with group_tp, and one local expert per rank */
    int64_t tp_world_size;
    int64_t tp_rank_id;        /* rank in group_tp; 0 without one */
    int64_t expert_shard_type; /* 0: shared-expert ranks come first; no other value is defined */
    int64_t shared_expert_num; /* S; 1 with shared_expert_rank_num 0 means none */
    int64_t shared_expert_rank_num; /* SR */
    /* 0, or the largest batch of any rank times the group's size before elastic_info. Profiles want
     * exactly this, native at least this and no more than the largest BS allows */
    int64_t global_bs;
    int64_t zero_expert_num;
    int64_t copy_expert_num;
    int64_t const_expert_num;
    /* NULL, "", "fullmesh", "fullmesh_v1", "fullmesh_v2": rows go straight from rank to rank; the
     * profiles have other ranges for each name. "hierarchy": a dispatch sends a token's row once to
     * each other host, to one of its ranks, which passes it on there; rows of a combine go
     * straight. All give the same bits. hierarchy takes no scales: with scales a token has another
     * row for each expert */
    const char *comm_alg;
    /* native only. i32 [4+2*W0], W0 the group's size: {is_scaled_down, ranks, shared ranks, MoE
     * experts, table1[rank] = local index or -1, table2[local index] = rank}. The ids of zero, copy
     * and constant experts and the rows of scales still follow moe_expert_num */
    ep_tensor elastic_info;
    bool allow_duplicates; /* a token may name an expert twice (native only) */
} ep_group_params;

EP_API void ep_group_params_init_sized(ep_group_params *out_params, size_t struct_bytes);
#define ep_group_params_init(params) ep_group_params_init_sized((params), sizeof(*(params)))

/* How large exchange buffers must be for any choice of experts. */
typedef struct ep_group_buffers {
    uint32_t struct_bytes;
    /* The largest frame of a rank; frame_bytes_max of ep_group_config must be at least this. With
     * profiles a2 and a3 prepare refuses less. native accepts less: then a call fails only if its
     * tokens' choice of experts makes a larger frame */
    uint64_t frame_bytes;
    /* a2, a3: the least HCCL_BUFFSIZE of group_ep that the vendor documents, in bytes (that
     * variable counts MiB; its operator adds 512 bytes per rank). 0 in native. L experts per rank,
     * B max_bs, S shared experts, alignN(x) is x rounded up to a multiple of N:
     *   a2  2 * (B * W * min(L,K) * H * 2 + 2 MiB)
     *   a2  hierarchy: (M + W / 4) * align512(B * (H * 2 + 16 * align8(K))) + 8 MiB
     *   a3  2 * (L * B * W * R + (K + S) * B * align512(2 * H)), R = align512(align32(2 * H) + 64),
     *       fullmesh_v2: R = ceil((align32(2 * H) + 64) / 480) * 512
     *   a3  hierarchy: M * B * (H * 2 + 16 * align8(K)) + 404 MiB */
    uint64_t vendor_bytes;
    /* The same for group_tp; 0 without TP. With A = B * W * min(L,K):
     *   2 * A * (align512(align32(2 * H) + 44) + align512(2 * H)) */
    uint64_t vendor_tp_bytes;
} ep_group_buffers;

/*
 * Works without a group: params->ep_world_size must be set; group_tp may be NULL. max_bs: the
 * largest T of any rank. hidden: H. top_k: K. dtype: of x, bf16, f16 or f32. Set struct_bytes of
 * out_buffers. Errors: INVALID_ARGUMENT as for prepare. Threads: any.
 */
EP_API ep_err ep_group_buffer_sizes(const ep_group_params *params, int64_t max_bs, int64_t hidden,
                                    int64_t top_k, ep_dtype dtype, ep_group_buffers *out_buffers,
                                    ep_error *out_error);

/* ---- dispatch ---- */

typedef struct ep_moe_dispatch_args {
    uint32_t struct_bytes;
    const ep_group_params *params;
    /* 0: rows as they are; 2: int8 per row. d = 127/max|x|, q = round-half-even(x*d), scale = 1/d,
     * in f32; zero row: q = 0, scale = 0; row with NaN or Inf: q = 0, scale = NaN */
    int64_t quant_mode;
    int64_t expert_token_nums_type; /* 0: inclusive prefix sums; 1: counts */
    uint64_t deadline_us;           /* 0: the group's */
    /* in */
    ep_tensor x;          /* bf16, f16 (native also f32) [T,H] */
    ep_tensor expert_ids; /* i32 (native also i64) [T,K] */
    /* f32 [S+M,H]: smooth scales, by which x is multiplied first. Row S+e is for expert e, row s
     * for shared expert s. Needs quant_mode 2 */
    ep_tensor scales;
    /* bool [T] or [T,K]; a token is inactive when its entry, or all its K entries, are false */
    ep_tensor x_active_mask;
    /* f32 [T,K]: sent along, they become expand_scales. Profiles want them with hierarchy; a3
     * refuses them without */
    ep_tensor expert_scales;
    /* i64 [W]: microseconds waited for each rank's rows are added to it; not with hierarchy in
     * a3 */
    ep_tensor performance_info;
    /* out */
    /* x's type, or i8 with quant_mode 2; [rows >= max(tp,1)*A, H]. In native it is enough that the
     * rows which arrive fit */
    ep_tensor expand_x;
    /* f32 [rows of expand_x]; required with quant_mode 2; otherwise left as it is */
    ep_tensor dynamic_scales;
    /* i32 [128 * max(rows of A, 1)]: the first 3*n ints are (source rank, token, slot) of each row,
     * slot K+s for shared expert s; the last 16 ints say which dispatch wrote it. Absent with
     * expand_idx */
    ep_tensor assist_info_for_combine;
    ep_tensor expert_token_nums; /* i64 [L] */
    /* i32 [W*max(tp,1)*L]: inclusive prefix sums in order [local expert][source rank]; with TP the
     * other rank's W follow. a2 with expert_scales, a3 with hierarchy: [M +
     * 2*global_bs*K*server_num], where a global_bs of 0 counts as BS*W, the size the vendor's
     * programs use; what follows the sums is not written */
    ep_tensor ep_recv_counts;
    /* i32 [tp_world_size]: rows of each TP rank; required with TP, otherwise left as it is */
    ep_tensor tp_recv_counts;
    /* f32 [rows]: expert_scales of each row, 0 for shared experts. May be absent, but profiles want
     * it with hierarchy */
    ep_tensor expand_scales;
    /* What to do with NaN and Inf in x of active tokens, before rows are quantised. Numbers as in
     * ep_moe_nan: 0 pass them on, 1 refuse the call, 2 replace them by 0, 3 by the mean of the
     * row's finite values */
    int64_t nan_policy;
    float x_abs_max; /* |x| above it is refused; 0 off */
    /* out, i32 [T*K], instead of assist_info_for_combine: the number of each slot's row among those
     * that this rank sends to the same expert; 0 for slots that send none. The call is then the
     * vendor's first operator (npu_moe_distribute_dispatch, without _v2), and the profiles check
     * its ranges */
    ep_tensor expand_idx;
} ep_moe_dispatch_args;

EP_API void ep_moe_dispatch_args_init_sized(ep_moe_dispatch_args *out_args, size_t struct_bytes);
#define ep_moe_dispatch_args_init(args) ep_moe_dispatch_args_init_sized((args), sizeof(*(args)))
/*
 * Checks parameters, shapes and buffer sizes; looks at no data. *out_workspace_bytes is what
 * ep_moe_dispatch needs. Errors: INVALID_ARGUMENT naming the parameter, its value and the allowed
 * range, or the buffer, the bytes needed and their formula; UNIMPLEMENTED (kind of memory).
 */
EP_API ep_err ep_moe_dispatch_prepare(ep_group *group, const ep_moe_dispatch_args *args,
                                      size_t *out_workspace_bytes, ep_group_plan **out_plan,
                                      ep_error *out_error);
/*
 * plan: from ep_moe_dispatch_prepare of this group, with equal parameters and shapes. workspace:
 * 64-byte aligned.
 * Errors: FAILED_PRECONDITION (no plan; a stale plan, naming what differs; the plan's operation is
 * still under way; too many operations are), INVALID_ARGUMENT (values, a disagreement, another
 * rank's error), RESOURCE_EXHAUSTED (workspace or expand_x too small; frame_bytes_max),
 * UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED.
 */
EP_API ep_err ep_moe_dispatch(ep_group *group, ep_group_plan *plan,
                              const ep_moe_dispatch_args *args, void *workspace,
                              size_t workspace_bytes, ep_error *out_error);

/* ---- combine ---- */

typedef struct ep_moe_combine_args {
    uint32_t struct_bytes;
    const ep_group_params *params; /* as given to the dispatch */
    /* 0: rows as they are; 2: int8 per block of 8 elements. s = max|x| * (1/127), q =
     * rint(f16(x/s)), s travels rounded to the rows' type; zero block: 0; block with NaN or Inf:
     * NaN. Not with TP */
    int64_t comm_quant_mode;
    int64_t out_dtype;       /* always 0, as the vendor defines it: x_out has expand_x's type */
    int64_t group_list_type; /* 0 */
    uint64_t deadline_us;    /* 0: the group's */
    /* in */
    /* bf16, f16 (native also f32) [rows,H]: the experts' results, in the order of the dispatch.
     * With TP the rows of both ranks */
    ep_tensor expand_x;
    ep_tensor expert_ids;              /* as given to the dispatch */
    ep_tensor assist_info_for_combine; /* as the dispatch wrote it; absent with expand_idx */
    ep_tensor ep_send_counts;          /* the dispatch's ep_recv_counts */
    ep_tensor expert_scales;           /* f32 [T,K] */
    ep_tensor tp_send_counts;          /* the dispatch's tp_recv_counts; read with TP only */
    ep_tensor x_active_mask;           /* as given to the dispatch */
    /* must be absent, like the next two: the vendor reserves them */
    ep_tensor activation_scale;
    ep_tensor weight_scale;
    ep_tensor group_list;
    /* the dispatch's, or absent; profiles require it with hierarchy, and a3 refuses it without. It
     * is checked but not read, since weights are applied where the token came from */
    ep_tensor expand_scales;
    /* expand_x's type [T,H], or [a,b,H] with a*b = T: added last; not with shared-expert ranks */
    ep_tensor shared_expert_x;
    ep_tensor ori_x; /* expand_x's type [T,H]: x as dispatched, for copy and constant experts */
    /* expand_x's type [const_expert_num,H], like the next two; absent when const_expert_num is 0 */
    ep_tensor const_expert_alpha_1;
    ep_tensor const_expert_alpha_2;
    ep_tensor const_expert_v;
    ep_tensor performance_info; /* as for the dispatch */
    /* out */
    ep_tensor x_out; /* expand_x's type [T,H]; rows of inactive tokens are 0 */
    /* What to do with NaN and Inf in the experts' rows of this rank's tokens, as they arrived, and
     * in ori_x; numbers as in the dispatch. 1: the call fails on this rank with OUT_OF_RANGE naming
     * token, slot, element */
    int64_t nan_policy;
    /* As the dispatch wrote it, instead of assist_info_for_combine and then on all ranks; the bits
     * are the same. It cannot say which dispatch wrote it: what does not fit expert_ids is refused,
     * but rows of another dispatch that sent as many to each expert go unnoticed */
    ep_tensor expand_idx;
} ep_moe_combine_args;

/* For ep_moe_combine_add_rms_norm, where x_out of ep_moe_combine_args stays absent. */
typedef struct ep_moe_add_rms_norm {
    uint32_t struct_bytes;
    float eps;            /* norm_eps, > 0 or 0 */
    ep_tensor residual_x; /* expand_x's type [T,H], or [T,1,H] */
    ep_tensor gamma;      /* expand_x's type [H] */
    ep_tensor y;          /* out, expand_x's type [T,H] or [T,1,H] */
    ep_tensor rstd;       /* out, f32 [T] or [T,1,1]; absent: not wanted */
    ep_tensor x;          /* out, expand_x's type [T,H] or [T,1,H]: the sum; may be absent */
} ep_moe_add_rms_norm;

EP_API void ep_moe_combine_args_init_sized(ep_moe_combine_args *out_args, size_t struct_bytes);
#define ep_moe_combine_args_init(args) ep_moe_combine_args_init_sized((args), sizeof(*(args)))
EP_API void ep_moe_add_rms_norm_init_sized(ep_moe_add_rms_norm *out_norm, size_t struct_bytes);
#define ep_moe_add_rms_norm_init(norm) ep_moe_add_rms_norm_init_sized((norm), sizeof(*(norm)))
/* norm NULL: for ep_moe_combine; otherwise for ep_moe_combine_add_rms_norm. Errors as for
 * ep_moe_dispatch_prepare. */
EP_API ep_err ep_moe_combine_prepare(ep_group *group, const ep_moe_combine_args *args,
                                     const ep_moe_add_rms_norm *norm, size_t *out_workspace_bytes,
                                     ep_group_plan **out_plan, ep_error *out_error);
/* Errors as for ep_moe_dispatch; FAILED_PRECONDITION also for assist_info_for_combine of another
 * dispatch, group or membership. */
EP_API ep_err ep_moe_combine(ep_group *group, ep_group_plan *plan, const ep_moe_combine_args *args,
                             void *workspace, size_t workspace_bytes, ep_error *out_error);
/*
 * With c the canonical sum in f32, not yet rounded:
 *     s[i] = c[i] + residual[i]                     f32;   x = round(s)
 *     m    = sum over i ascending of (s[i]*s[i]) * (1/H)   f32, each step rounded
 *     rstd = 1 / sqrt(m + eps)                      f32
 *     y[i] = round(f32(round(s[i] * rstd)) * gamma[i])
 * round: to nearest even, to expand_x's type. The vendor's kernel does the same steps; its sum over
 * i is a tree.
 */
EP_API ep_err ep_moe_combine_add_rms_norm(ep_group *group, ep_group_plan *plan,
                                          const ep_moe_combine_args *args,
                                          const ep_moe_add_rms_norm *norm, void *workspace,
                                          size_t workspace_bytes, ep_error *out_error);

/* ---- operators beside compute ---- */

/* Called when the operation has ended, so that ep_group_plan_finish would not wait. Called once,
 * unless finish comes first. */
typedef void (*ep_group_done_func)(void *arg, ep_group_plan *plan);

/*
 * The first half of ep_moe_dispatch: packs, sends and returns. done may be NULL. The plan belongs
 * to the operation until ep_group_plan_finish. Errors: those of ep_moe_dispatch that this rank
 * finds without its data and the others' answers, and those that make every later call fail. After
 * an error there is nothing to finish, and done is never called. RESOURCE_EXHAUSTED: no thread for
 * done. After operations have failed on this rank, begin may wait for the other ranks to begin them
 * too.
 */
EP_API ep_err ep_moe_dispatch_begin(ep_group *group, ep_group_plan *plan,
                                    const ep_moe_dispatch_args *args, void *workspace,
                                    size_t workspace_bytes, ep_group_done_func done, void *arg,
                                    ep_error *out_error);
EP_API ep_err ep_moe_combine_begin(ep_group *group, ep_group_plan *plan,
                                   const ep_moe_combine_args *args, void *workspace,
                                   size_t workspace_bytes, ep_group_done_func done, void *arg,
                                   ep_error *out_error);
EP_API ep_err ep_moe_combine_add_rms_norm_begin(ep_group *group, ep_group_plan *plan,
                                                const ep_moe_combine_args *args,
                                                const ep_moe_add_rms_norm *norm, void *workspace,
                                                size_t workspace_bytes, ep_group_done_func done,
                                                void *arg, ep_error *out_error);
/* True when ep_group_plan_finish would not wait for other ranks. With group_tp and without done, an
 * operation makes progress only here and in finish. */
EP_API bool ep_group_plan_poll(ep_group_plan *plan);
/* Waits for the end, at most until the deadline, and writes the outputs: a dispatch its rows, a
 * combine its sums. Errors: FAILED_PRECONDITION (nothing is under way), and those of the blocking
 * call. */
EP_API ep_err ep_group_plan_finish(ep_group_plan *plan, ep_error *out_error);
/* Ends the operation with CANCELLED, unless it is already being finished; it must still be
 * finished. From any thread. NULL allowed. */
EP_API void ep_group_plan_cancel(ep_group_plan *plan);
/* Cancels and finishes an operation under way. NULL allowed. */
EP_API void ep_group_plan_destroy(ep_group_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
