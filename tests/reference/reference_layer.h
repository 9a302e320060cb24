/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle: one whole MoE layer in one process, as plain loops. The service path is compared with
 * it bit for bit, so it is written from the text of the contract and shares no file with lib/ or
 * client/. It is clear, not fast.
 *
 * Shapes   T tokens, K slots per token, E routed experts, H hidden, I inner, S shared experts. All
 *          arrays are contiguous.
 * Ids      [0,E) routed; then zero experts; then copy experts; then constant experts; -1 and the
 *          total count are inactive.
 *
 * Choices where the contract leaves room:
 *   - Every id must be in range, also in masked slots. Duplicates are about routed ids of slots
 *     that are computed: active token, not masked, marked if the form is partial. x of an inactive
 *     token is never read.
 *   - partial: unmarked slots add nothing; shared experts and the caller's tensor are added as for
 *     `combined`.
 *   - uncombined: row(t,k), unweighted, rounded to the wire type, then converted to the output
 *     type. Zero rows for inactive slots and zero experts. Copy gives x, constant gives its r.
 *     Shared experts and the caller's tensor do not appear.
 *   - The NaN policy acts on the widened x before anything else. mean: f64 sum of the row's finite
 *     elements in ascending order, divided by their count in f64, rounded to f32 and then to x's
 *     type; no finite element: 0.
 *   - int8 rows: a row scale that is not finite makes the whole row non-finite. zero and mean take
 *     that scale as 0, reject refuses it.
 *   - x_abs_max refuses |x| above it. It ignores NaN, and elements that zero or mean replace.
 *   - weight_on_input: routed experts get round_f32(scale * x) and their row is added unweighted.
 *     Copy and constant experts keep w * row. Shared experts see the unscaled x.
 *   - Copy and constant experts work on the widened x in f32 and are not rounded to the wire type
 *     when combined.
 *   - The service's shared experts come first, the caller's shared tensor last; either may be
 *     absent.
 *   - node sums: a node adds scale * row (shared experts: row) over its slots of a token in slot
 *     order, from 0 in f32, and rounds the sum to the wire type. A sum is added at the place of the
 *     node's first slot, the row of a special expert at its own place.
 *   - Quantised are x as routed and shared experts receive it, after the NaN policy, and their
 *     rows, after the rounding to the wire type; with node sums the sum, not its rows. Copy and
 *     constant experts use x unquantised, and their rows are never quantised.
 *   - combined with T = 0 or K = 0 is legal; K = 0 leaves the shared experts.
 */
#ifndef TESTS_REFERENCE_REFERENCE_LAYER_H
#define TESTS_REFERENCE_REFERENCE_LAYER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ref_activation.h"
#include "ref_format.h"
#include "ref_math.h"

enum ref_form { REF_COMBINED, REF_PARTIAL, REF_UNCOMBINED };
enum ref_dispatch { REF_DISPATCH_PLAIN = 0, REF_DISPATCH_INT8 = 2, REF_DISPATCH_FP8 = 3 };
enum ref_nan { REF_NAN_PASS, REF_NAN_REJECT, REF_NAN_ZERO, REF_NAN_MEAN };

struct ref_expert {
    size_t inner;           /* I */
    struct ref_matrix gate; /* [I,H]; without values: the activation has no gate */
    struct ref_matrix up;   /* [I,H] */
    struct ref_matrix down; /* [H,I] */
    /* [H] or NULL: a shared expert's own gate: its row is multiplied by sigmoid(w . x) */
    const float *output_gate;
    enum ref_format format;
    bool down_differs; /* then the format of down is down_format */
    enum ref_format down_format;
    enum ref_family family; /* supports both formats */
    struct ref_activation activation;
};

struct ref_layer {
    size_t hidden;                    /* H */
    size_t expert_count;              /* E */
    const struct ref_expert *experts; /* [E] */
    size_t shared_count;              /* S */
    const struct ref_expert *shared;  /* [S] */
    size_t zero_count;
    size_t copy_count;
    size_t constant_count;
    const float *alpha1;   /* [constant_count,H] */
    const float *alpha2;   /* [constant_count,H] */
    const float *constant; /* [constant_count,H], v */
    /* alpha1 * x + alpha2 * v per element; otherwise the kernel's softmax gate */
    bool constant_linear;
};

struct ref_batch {
    size_t tokens;                /* T */
    size_t top_k;                 /* K */
    const void *x;                /* [T,H] */
    enum ref_dtype x_dtype;       /* bf16, f16, f32, i8 */
    const float *x_scales;        /* [T], i8 only */
    const void *ids;              /* [T,K] */
    enum ref_dtype ids_dtype;     /* i32, i64 */
    const void *scales;           /* [T,K] */
    enum ref_dtype scales_dtype;  /* f32, bf16 */
    const uint8_t *mask_tokens;   /* [T] or NULL */
    const uint8_t *mask_slots;    /* [T,K] or NULL */
    const uint8_t *partial_slots; /* [T,K], with REF_PARTIAL */
    const void *caller_shared;    /* [T,H] or NULL, added last */
    enum ref_dtype caller_shared_dtype;
    bool no_service_shared; /* leave the layer's shared experts out */
    bool weight_on_input;
    bool allow_duplicates;
    enum ref_form form;
    enum ref_nan nan_policy;
    float x_abs_max;           /* 0: off */
    enum ref_dtype wire_dtype; /* bf16, f16, f32 */
    enum ref_dtype out_dtype;  /* bf16, f16, f32 */
    /* [E+S] node of each expert, routed ones first: combined, partial by node sums; NULL: by
     * rows */
    const size_t *owner_of;
    enum ref_dispatch dispatch; /* of x in bf16, f16, f32: reference_quant.h */
    const float *smooth;        /* [S+E,H] or NULL, with REF_DISPATCH_INT8; shared experts first */
    bool combine_int8;          /* experts' rows come back as int8 per 8 elements */
};

enum { REF_TEXT_BYTES = 256 };

/* Reasons of a refusal, all INVALID_ARGUMENT in the contract. */
enum ref_refusal {
    REF_OK,
    REF_BAD_ID,
    REF_DUPLICATE_ID,
    REF_NOT_FINITE,
    REF_TOO_LARGE,
    REF_NO_MEMORY
};

/*
 * Runs the layer. out: [T,H], or [T,K,H] for REF_UNCOMBINED, of out_dtype; written only on REF_OK.
 * Otherwise text (may be NULL) has the reason.
 */
enum ref_refusal ref_layer_forward(const struct ref_layer *layer, const struct ref_batch *batch,
                                   void *out, char text[REF_TEXT_BYTES]);

/* Returns the floats of scratch for one expert: an inner row, a row x, and scales of the longer. */
static inline size_t ref_expert_scratch(size_t hidden, size_t inner)
{
    return inner + hidden + (hidden > inner ? hidden : inner) / 32 + 1;
}

/* Runs one expert on one f32 row, before any rounding to the wire type. */
void ref_expert_forward(const struct ref_expert *expert, size_t hidden, const float *x,
                        float *hidden_scratch, float *y);

#endif
