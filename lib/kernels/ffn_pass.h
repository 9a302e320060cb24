/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One pass of up to EP_FFN_PASS_ROWS rows through one packed expert, as tasks. Within a stage any
 * thread may run them in any order; a stage begins when the previous one has ended:
 *
 *     ep_ffn_pass_pack_chunk   chunks.count tasks     x widened, in the kernel's layout
 *     ep_ffn_pass_gate_up      gate_up_panels tasks   h = activation(gate x, up x)
 *     ep_ffn_pass_round_chunk  chunks.count tasks     h rounded to int8; where ep_ffn_pass_rounds
 *     ep_ffn_pass_down         down_panels tasks      y = down h, rounded, written to the rows
 *
 * Bits do not depend on how rows are divided into passes and tasks among threads.
 *
 * Ownership  the packed weights and the scratch are the caller's memory.
 * Threads    tasks of one stage write disjoint memory. The caller orders the stages.
 */
#ifndef EP_KERNELS_FFN_PASS_H
#define EP_KERNELS_FFN_PASS_H

#include "kernels/expert_ffn.h"
#include "kernels/ffn_kernel.h"

#define EP_FFN_ALIGN 64
/* names the layout that ep_ffn_pack writes; changes whenever a byte of it moves */
#define EP_FFN_PACKED_LAYOUT "panel64-8"
/* for more rows the weights are read again; from here on arithmetic is the limit */
#define EP_FFN_PASS_ROWS 256
#define EP_FFN_TILE_BYTES                                                                          \
    ((size_t)EP_FFN_PASS_ROWS * EP_FFN_PANEL * sizeof(float)) /* scratch of one thread */

typedef struct ep_ffn_packed {
    uint32_t hidden;
    uint32_t inner;
    ep_weight_format format; /* of gate and up */
    ep_weight_format down_format;
    ep_ffn_family family;
    ep_activation activation;
    ep_activation_numbers numbers;
    uint32_t gate_up_width; /* inner outputs of a gate-up panel: 32 with a gate, 64 without */
    uint32_t gate_up_panels;
    uint32_t down_panels;
    /* [gate_up_panels] over H: 32 gate outputs, then the same 32 of up; or 64 of up */
    const uint8_t *gate_up;
    const uint8_t *down; /* [down_panels] over I */
    /* [gate_up_panels][EP_FFN_PANEL] widened, -0 where an output has no bias; or NULL */
    const float *gate_up_bias;
    const float *down_bias;   /* [down_panels][EP_FFN_PANEL], likewise */
    const float *shared_gate; /* [H] widened, or NULL */
    const uint32_t *places;   /* [H] as in the source, or NULL */
} ep_ffn_packed;

typedef struct ep_ffn_pass {
    const ep_ffn_kernel *kernel;
    const ep_ffn_packed *weights;
    ep_ffn_batch batch; /* rows_count 1..EP_FFN_PASS_ROWS */
    ep_ffn_chunks chunks;
    float *x; /* packed activations over H; NULL for w8a8 */
    /* packed activations over I; w8a8: [rows][gate_up_panels * gate_up_width], rows in order */
    float *h;
    /* for w8a8: packed activations over H, and over I, with the scales of the rows */
    int8_t *x_int8;
    int8_t *h_int8;
    float *x_scales;
    float *h_scales;
    float *share;  /* [rows] factor of the shared expert's gate */
    float *placed; /* [rows][H] inputs in the order of places, or NULL */
} ep_ffn_pass;

/* family: one that supports the format (ep_ffn_family_has). */

/* Bytes of memory that ep_ffn_pack fills. Depends on shape, format, family and optional parts. */
size_t ep_ffn_packed_bytes(const ep_ffn_source *source, ep_ffn_family family);
/* Packs into memory (ep_ffn_packed_bytes, aligned to EP_FFN_ALIGN); *out_packed points into it.
 * Keeps nothing of source. */
void ep_ffn_pack(const ep_ffn_source *source, ep_ffn_family family, void *memory,
                 ep_ffn_packed *out_packed);

/* Sets the pointers to the parts of a packed expert in memory; reads neither matrices nor
 * memory. */
void ep_ffn_packed_place(const ep_ffn_source *source, ep_ffn_family family, void *memory,
                         ep_ffn_packed *out_packed);

/* Bytes of scratch for a pass. */
size_t ep_ffn_pass_scratch_bytes(const ep_ffn_packed *weights, uint32_t rows);
/* kernel: of the family that the weights are packed for. scratch: aligned to EP_FFN_ALIGN. It and
 * batch->rows are used until the last task has ended. */
void ep_ffn_pass_init(ep_ffn_pass *pass, const ep_ffn_kernel *kernel, const ep_ffn_packed *weights,
                      const ep_ffn_batch *batch, void *scratch);

/* Whether the inner rows of these weights are rounded to int8 (w8a8). A row's scale needs all
 * panels. */
static inline bool ep_ffn_pass_rounds(const ep_ffn_packed *weights)
{
    return weights->format == EP_WEIGHTS_W8A8;
}

void ep_ffn_pass_pack_chunk(const ep_ffn_pass *pass, uint32_t chunk);
void ep_ffn_pass_round_chunk(const ep_ffn_pass *pass, uint32_t chunk);
/*
 * tile: EP_FFN_TILE_BYTES of the calling thread, aligned to EP_FFN_ALIGN.
 * next_panel: where the weights begin of the panel that this thread will compute next, in this pass
 * or another; they are fetched meanwhile. NULL: unknown. A hint that is never read: the panel may
 * be gone.
 */
void ep_ffn_pass_gate_up(const ep_ffn_pass *pass, uint32_t panel, const uint8_t *next_panel,
                         float *tile);
void ep_ffn_pass_down(const ep_ffn_pass *pass, uint32_t panel, const uint8_t *next_panel,
                      float *tile);
/* Where the weights of a panel begin. */
const uint8_t *ep_ffn_gate_up_panel(const ep_ffn_packed *weights, uint32_t panel);
const uint8_t *ep_ffn_down_panel(const ep_ffn_packed *weights, uint32_t panel);

#endif
