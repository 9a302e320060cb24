/* SPDX-License-Identifier: Apache-2.0 */
/* Packs the weights of one expert from row-major matrices into panels; ffn_kernel.h and ffn_pass.h
 * describe the layout. */
#include <string.h>

#include "base/check.h"
#include "kernels/ffn_element.h"
#include "kernels/ffn_pass.h"

/* Where each part begins; the panels of gate and up are first. */
typedef struct {
    size_t down;
    size_t gate_up_bias;
    size_t down_bias;
    size_t shared_gate;
    size_t places;
    size_t end;
} packed_parts;

static uint32_t panels_of(uint32_t outputs, uint32_t width)
{
    return (outputs + width - 1) / width;
}

static uint32_t gate_up_width(const ep_ffn_source *source)
{
    return ep_activation_has_gate(source->activation) ? EP_FFN_HALF_PANEL : EP_FFN_PANEL;
}

static packed_parts parts_of(const ep_ffn_source *source, ep_ffn_family family)
{
    const size_t line_bytes = EP_FFN_PANEL * sizeof(float);
    const size_t gate_up_panels = panels_of(source->inner, gate_up_width(source));
    const size_t down_panels = panels_of(source->hidden, EP_FFN_PANEL);
    const bool inner_bias = source->gate_bias != NULL || source->up_bias != NULL;
    packed_parts parts;
    parts.down = gate_up_panels * ep_ffn_panel_bytes(family, source->format, source->hidden);
    parts.gate_up_bias =
        parts.down +
        down_panels * ep_ffn_panel_bytes(family, ep_expert_down_format(source), source->inner);
    parts.down_bias = parts.gate_up_bias + (inner_bias ? gate_up_panels * line_bytes : 0);
    parts.shared_gate =
        parts.down_bias + (source->down_bias != NULL ? down_panels * line_bytes : 0);
    parts.places =
        parts.shared_gate + (source->shared_gate != NULL ? source->hidden * sizeof(float) : 0);
    parts.end = parts.places + (source->places != NULL ? source->hidden * sizeof(uint32_t) : 0);
    return parts;
}

size_t ep_ffn_packed_bytes(const ep_ffn_source *source, ep_ffn_family family)
{
    return ep_align_up(parts_of(source, family).end, EP_FFN_ALIGN);
}

/* The matrix rows that become one panel's outputs; a missing row is NULL and packed as zeros. */
typedef struct {
    ep_ffn_family family;
    ep_weight_format format;
    uint32_t matrix_rows;
    uint32_t columns;
    const uint8_t *rows[EP_FFN_PANEL]; /* by output */
    const void *scales[EP_FFN_PANEL];  /* of the row's matrix */
    uint32_t index[EP_FFN_PANEL];      /* index of the row in its matrix */
} panel_rows;

/* Makes matrix rows from first_row on, as far as there are any, outputs first_output..first_output
 * + width - 1 of the panel. */
static void set_rows(panel_rows *panel, const void *matrix, const void *scales, uint32_t rows_count,
                     uint32_t first_row, uint32_t first_output, uint32_t width)
{
    const size_t row_bytes = ep_weight_row_bytes(panel->format, panel->columns);
    panel->matrix_rows = rows_count;
    for (uint32_t j = 0; j < width; j++) {
        const uint32_t row = first_row + j;
        const uint32_t o = first_output + j;
        panel->rows[o] = row < rows_count ? (const uint8_t *)matrix + row * row_bytes : NULL;
        panel->scales[o] = scales;
        panel->index[o] = row;
    }
}

/* Writes one line after the other; the 64 rows read in parallel stay in the nearest cache. */
static void write_plain(const panel_rows *panel, uint8_t *to)
{
    const ep_dtype dtype = ep_weight_format_dtype(panel->format);
    const size_t element = ep_dtype_bytes(dtype);
    const uint8_t *by_slot[EP_FFN_PANEL];
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        by_slot[ep_ffn_panel_slot(dtype, o)] = panel->rows[o];
    }
    for (size_t k = 0; k < panel->columns; k++) {
        for (uint32_t slot = 0; slot < EP_FFN_PANEL; slot++, to += element) {
            const uint8_t *row = by_slot[slot];
            if (row == NULL) {
                memset(to, 0, element);
            } else if (element == 2) {
                memcpy(to, row + 2 * k, 2);
            } else {
                memcpy(to, row + 4 * k, 4);
            }
        }
    }
}

enum { GROUP_MOST = 128 }; /* columns */
#define CHECK_GROUP(name, number, text, codes, group, scales, offsets)                             \
    _Static_assert((group) <= GROUP_MOST, text " has longer groups");
EP_WEIGHTS_MAP(CHECK_GROUP)
#undef CHECK_GROUP

/* The bytes of columns first..first + n - 1 of each row's codes; missing columns get a zero's
 * code. */
static void take_group(const panel_rows *panel, uint32_t first, uint32_t n, uint8_t zero,
                       uint8_t codes[EP_FFN_PANEL][GROUP_MOST])
{
    const size_t each = ep_weight_codes_are_nibbles(ep_weight_format_codes(panel->format)) ? 2 : 1;
    const size_t bytes = ep_weight_group_columns(panel->format) / each;
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        const size_t there = panel->rows[o] == NULL ? 0 : (n + each - 1) / each;
        if (there != 0) {
            memcpy(codes[o], panel->rows[o] + first / each, there);
        }
        memset(codes[o] + there, zero, bytes - there);
        if (there * each > n) {
            codes[o][there - 1] = (codes[o][there - 1] & 0x0fu) | (zero & 0xf0u);
        }
    }
}

/* Packs eight 4-bit codes of a row into the four bytes of w4a8: code j below code j + 4. */
static uint32_t fold_codes(uint32_t codes)
{
    uint32_t below = codes & 0xffffu;
    uint32_t above = codes >> 16;
    below = (below | below << 8) & 0x00ff00ffu;
    above = (above | above << 8) & 0x00ff00ffu;
    below = (below | below << 4) & 0x0f0f0f0fu;
    above = (above | above << 4) & 0x0f0f0f0fu;
    return below | above << 4;
}

/* Writes to the positions of ep_ffn_code_slot, both codes of a byte at once. */
static void write_nibbles(ep_ffn_family family, uint8_t codes[EP_FFN_PANEL][GROUP_MOST],
                          uint32_t group, uint8_t *to)
{
    for (uint32_t k = 0; family == EP_FFN_FAMILY_W4A8 && k < group; k += 8) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++, to += 4) {
            uint32_t word;
            memcpy(&word, codes[o] + k / 2, sizeof(word));
            word = fold_codes(word);
            memcpy(to, &word, sizeof(word));
        }
    }
    for (uint32_t b = 0; family != EP_FFN_FAMILY_W4A8 && b < group / 2; b++) {
        for (uint32_t o = 0; o < 16; o++, to += 4) {
            to[0] = (uint8_t)((codes[o][b] & 15u) | codes[o + 16][b] << 4);
            to[1] = (uint8_t)((codes[o + 32][b] & 15u) | codes[o + 48][b] << 4);
            to[2] = (uint8_t)(codes[o][b] >> 4 | (codes[o + 16][b] & 0xf0u));
            to[3] = (uint8_t)(codes[o + 32][b] >> 4 | (codes[o + 48][b] & 0xf0u));
        }
    }
}

static void write_bytes(const panel_rows *panel, uint8_t codes[EP_FFN_PANEL][GROUP_MOST],
                        uint32_t group, uint8_t *to)
{
    for (uint32_t k = 0; k < group; k++) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            to[ep_ffn_code_slot(panel->family, panel->format, k, o)] = codes[o][k];
        }
    }
}

/* The scales of group g in f32, or of all columns. */
static void write_wide_scales(const panel_rows *panel, uint32_t g, uint8_t *to)
{
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        if (panel->rows[o] != NULL) {
            const float scale =
                ep_ffn_weight_scale(panel->format, panel->scales[o], panel->matrix_rows,
                                    panel->columns, panel->index[o], g);
            memcpy(to + 4 * (size_t)o, &scale, sizeof(scale));
        }
    }
}

/* Writes group g's scales or parts and offsets, in the width of the format. */
static void write_scales(const panel_rows *panel, uint32_t g, uint8_t *to)
{
    const ep_scale_arrays arrays =
        ep_weight_scale_arrays(panel->format, panel->matrix_rows, panel->columns);
    const ep_weight_scales kind = ep_weight_format_scales(panel->format);
    const size_t groups = ep_ffn_groups(panel->format, panel->columns);
    const size_t bytes = ep_weight_scale_bytes(kind);
    if (kind == EP_SCALES_F32) {
        write_wide_scales(panel, g, to);
    }
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        const uint8_t *from = panel->scales[o];
        const size_t at = panel->index[o] * groups + g;
        if (panel->rows[o] == NULL) {
            if (kind == EP_SCALES_E8M0) {
                to[o] = 127; /* 1.0, which takes the kernels' fast path */
            }
            continue;
        }
        if (kind != EP_SCALES_F32) {
            memcpy(to + o * bytes, from + at * bytes, bytes);
        }
        if (arrays.offsets != 0) {
            to[EP_FFN_PANEL * bytes + o] = from[arrays.scales + at];
        }
    }
}

/* The factors of parts for one EP_SCALE_BLOCK of columns. */
static void write_factors(const panel_rows *panel, size_t block, uint8_t *to)
{
    const ep_scale_arrays arrays =
        ep_weight_scale_arrays(panel->format, panel->matrix_rows, panel->columns);
    const size_t blocks = ((size_t)panel->columns + EP_SCALE_BLOCK - 1) / EP_SCALE_BLOCK;
    memset(to, 0, ep_ffn_block_factors(panel->format) * sizeof(float));
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        if (panel->rows[o] == NULL) {
            continue;
        }
        const uint8_t *from = (const uint8_t *)panel->scales[o] + arrays.scales + arrays.offsets;
        const size_t at = sizeof(float) * (panel->index[o] * blocks + block);
        memcpy(to + sizeof(float) * o, from + at, sizeof(float));
        if (arrays.offset_factors != 0) {
            memcpy(to + sizeof(float) * (EP_FFN_PANEL + o), from + arrays.scale_factors + at,
                   sizeof(float));
        }
    }
}

static void write_groups(const panel_rows *panel, uint8_t *to)
{
    const ep_weight_codes kind = ep_weight_format_codes(panel->format);
    const bool nibbles = ep_weight_codes_are_nibbles(kind);
    const uint8_t zero = kind == EP_CODES_INT4 ? 0x88 : 0;
    const uint32_t group = ep_weight_group_columns(panel->format);
    uint8_t codes[EP_FFN_PANEL][GROUP_MOST];
    const size_t bytes = ep_ffn_group_bytes(panel->format);
    const size_t code_bytes = ep_ffn_group_code_bytes(panel->format);
    for (uint32_t k = 0; k < panel->columns; k += group, to += bytes) {
        const uint32_t n = panel->columns - k < group ? panel->columns - k : group;
        take_group(panel, k, n, zero, codes);
        if (nibbles) {
            write_nibbles(panel->family, codes, group, to);
        } else {
            write_bytes(panel, codes, group, to);
        }
        memset(to + code_bytes, 0, bytes - code_bytes);
        write_scales(panel, k / group, to + code_bytes);
    }
    const size_t factors = ep_ffn_block_factors(panel->format);
    for (uint32_t k = 0; factors != 0 && k < panel->columns;
         k += EP_SCALE_BLOCK, to += factors * sizeof(float)) {
        write_factors(panel, k / EP_SCALE_BLOCK, to);
    }
}

static void write_int8(const panel_rows *panel, uint8_t *to)
{
    const uint32_t quads = ep_ffn_quads(panel->columns);
    uint32_t sums[EP_FFN_PANEL] = {0}; /* modulo 2^32 */
    for (uint32_t q = 0; q < quads; q++) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            for (uint32_t k = 4 * q; k < 4 * q + 4; k++, to++) {
                *to = k < panel->columns && panel->rows[o] != NULL ? panel->rows[o][k] : 0;
                sums[o] += (uint32_t)(int32_t)(int8_t)*to;
            }
        }
    }
    memset(to, 0, EP_FFN_PANEL * sizeof(float));
    write_wide_scales(panel, 0, to);
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        sums[o] *= (uint32_t)-128;
    }
    memcpy(to + EP_FFN_PANEL * sizeof(float), sums, sizeof(sums));
}

/* Writes pairs of bf16; an odd last member is paired with a zero. */
static void write_pairs(const panel_rows *panel, uint8_t *to)
{
    const size_t row_bytes = 2 * (size_t)panel->columns;
    for (size_t at = 0; at < row_bytes; at += 4) {
        const size_t bytes = row_bytes - at < 4 ? row_bytes - at : 4;
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++, to += 4) {
            const uint8_t *row = panel->rows[o];
            if (row != NULL && bytes == 4) {
                memcpy(to, row + at, 4);
                continue;
            }
            memset(to, 0, 4);
            if (row != NULL) {
                memcpy(to, row + at, bytes);
            }
        }
    }
}

static void write_panel(const panel_rows *panel, uint8_t *to)
{
    if (ep_weight_format_is_float(panel->format)) {
        (ep_ffn_family_has_pairs(panel->family) ? write_pairs : write_plain)(panel, to);
    } else if (panel->format == EP_WEIGHTS_W8A8) {
        write_int8(panel, to);
    } else {
        write_groups(panel, to);
    }
}

/* to[panel][first_output + j] = bias[panel * width + j], or -0 where there is none: it changes no
 * sum, not even -0. */
static void write_bias(const void *bias, ep_dtype dtype, uint32_t count, uint32_t width,
                       uint32_t first_output, float *to)
{
    const uint32_t panels = panels_of(count, width);
    for (uint32_t i = 0; i < panels * width; i++) {
        to[i / width * EP_FFN_PANEL + first_output + i % width] =
            bias == NULL || i >= count ? -0.0f : ep_ffn_read_float(bias, dtype, i);
    }
}

static void write_biases(const ep_ffn_source *source, const ep_ffn_packed *packed, float *gate_up,
                         float *down)
{
    const uint32_t width = packed->gate_up_width;
    if (packed->gate_up_bias != NULL) {
        if (width == EP_FFN_HALF_PANEL) {
            write_bias(source->gate_bias, source->bias_dtype, source->inner, width, 0, gate_up);
        }
        write_bias(source->up_bias, source->bias_dtype, source->inner, width, EP_FFN_PANEL - width,
                   gate_up);
    }
    if (packed->down_bias != NULL) {
        write_bias(source->down_bias, source->bias_dtype, source->hidden, EP_FFN_PANEL, 0, down);
    }
}

static void write_panels(const ep_ffn_source *source, const ep_ffn_packed *packed, uint8_t *gate_up,
                         uint8_t *down)
{
    const uint32_t hidden = source->hidden;
    const uint32_t inner = source->inner;
    const uint32_t width = packed->gate_up_width;
    const size_t gate_up_bytes = ep_ffn_panel_bytes(packed->family, source->format, hidden);
    const size_t down_bytes = ep_ffn_panel_bytes(packed->family, packed->down_format, inner);
    panel_rows panel = {.family = packed->family, .format = source->format, .columns = hidden};

    for (uint32_t p = 0; p < packed->gate_up_panels; p++) {
        if (width == EP_FFN_HALF_PANEL) {
            set_rows(&panel, source->gate, source->gate_scales, inner, p * width, 0, width);
        }
        set_rows(&panel, source->up, source->up_scales, inner, p * width, EP_FFN_PANEL - width,
                 width);
        write_panel(&panel, gate_up + p * gate_up_bytes);
    }
    panel.format = packed->down_format;
    panel.columns = inner;
    for (uint32_t p = 0; p < packed->down_panels; p++) {
        set_rows(&panel, source->down, source->down_scales, hidden, p * EP_FFN_PANEL, 0,
                 EP_FFN_PANEL);
        write_panel(&panel, down + p * down_bytes);
    }
}

void ep_ffn_packed_place(const ep_ffn_source *source, ep_ffn_family family, void *memory,
                         ep_ffn_packed *out_packed)
{
    const packed_parts parts = parts_of(source, family);
    const bool has_gate_up_bias = source->gate_bias != NULL || source->up_bias != NULL;
    uint8_t *base = memory;
    *out_packed = (ep_ffn_packed){
        .hidden = source->hidden,
        .inner = source->inner,
        .format = source->format,
        .down_format = ep_expert_down_format(source),
        .family = family,
        .activation = source->activation,
        .numbers = source->numbers,
        .gate_up_width = gate_up_width(source),
        .gate_up_panels = panels_of(source->inner, gate_up_width(source)),
        .down_panels = panels_of(source->hidden, EP_FFN_PANEL),
        .gate_up = base,
        .down = base + parts.down,
        .gate_up_bias =
            has_gate_up_bias ? (const float *)(void *)(base + parts.gate_up_bias) : NULL,
        .down_bias =
            source->down_bias != NULL ? (const float *)(void *)(base + parts.down_bias) : NULL,
        .shared_gate =
            source->shared_gate != NULL ? (const float *)(void *)(base + parts.shared_gate) : NULL,
        .places = source->places != NULL ? (const uint32_t *)(void *)(base + parts.places) : NULL,
    };
}

void ep_ffn_pack(const ep_ffn_source *source, ep_ffn_family family, void *memory,
                 ep_ffn_packed *out_packed)
{
    EP_ASSERT(ep_ffn_family_has(family, source->format) &&
              ep_ffn_family_has(family, ep_expert_down_format(source)));
    const packed_parts parts = parts_of(source, family);
    uint8_t *base = memory;
    float *shared_gate = (float *)(void *)(base + parts.shared_gate);
    ep_ffn_packed_place(source, family, memory, out_packed);
    write_panels(source, out_packed, base, base + parts.down);
    write_biases(source, out_packed, (float *)(void *)(base + parts.gate_up_bias),
                 (float *)(void *)(base + parts.down_bias));
    for (uint32_t i = 0; source->shared_gate != NULL && i < source->hidden; i++) {
        shared_gate[i] = ep_ffn_read_float(source->shared_gate, source->shared_gate_dtype, i);
    }
    if (source->places != NULL) {
        memcpy(base + parts.places, source->places, parts.end - parts.places);
    }
    /* the padding is written to disk with the rest */
    memset(base + parts.end, 0, ep_align_up(parts.end, EP_FFN_ALIGN) - parts.end);
}
