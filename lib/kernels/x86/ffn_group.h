/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by panels of formats with groups on x86. For up to EP_FFN_CHUNK_ROWS rows the panel is
 * read once, and its codes are widened in registers. For more rows, blocks of groups are widened
 * into memory that stays in the near caches, and every chunk uses them. Both take the same steps
 * for each output.
 * Included after the vectors of an instruction set, by files with its flags; each family has tiles
 * of its own.
 */
#ifndef EP_KERNELS_X86_FFN_GROUP_H
#define EP_KERNELS_X86_FFN_GROUP_H

#include <string.h>

/* Widened groups of a block: 256 bytes a line, then 64 scales as f32, then 64 offsets, if any. */
#define EP_GROUP_LINE_BYTES 256u
#define EP_GROUP_BLOCK_LINES 128u /* at least one group; groups have at least 8 lines */
#define EP_GROUP_BLOCK_BYTES                                                                       \
    ((EP_GROUP_BLOCK_LINES + EP_GROUP_BLOCK_LINES / 8) * EP_GROUP_LINE_BYTES)
/* How far ahead to fetch where only one chunk uses each line; with less, memory's latency shows. */
#define EP_GROUP_AHEAD_BYTES 9216u

/* A panel of a format, with what tiles need while they run. */
typedef struct ep_group_panel_form {
    ep_weight_format format;
    uint32_t group_lines; /* of a whole group */
    uint32_t block_lines; /* that share factors */
    size_t code_bytes;    /* of a group */
    size_t group_bytes;
    const float *factors; /* of the panel */
    size_t block_factors;
} ep_group_panel_form;

/* The groups that a tile processes, and what it fetches into the second-level cache meanwhile. */
typedef struct ep_group_walk {
    const ep_group_panel_form *form;
    const uint8_t *groups; /* panel's groups, or widened ones */
    uint32_t first;        /* line of the panel */
    uint32_t lines;        /* of all groups; the last may be short */
    /* codes: each group fetches as many bytes as it has itself. widened: `step` bytes per line */
    const uint8_t *ahead;
    size_t step;
    uint8_t *wide; /* where a tile that widens leaves the widened groups */
} ep_group_walk;

/* Adds the scaled chains of the groups to c[r][o], for the rows of one chunk; a is [line][rows]. */
typedef void (*ep_group_tile)(const ep_group_walk *walk, const float *a, float *c);

typedef struct ep_group_form {
    const ep_group_tile *tiles; /* over codes, by rows - 1 */
    const ep_group_tile *wide;  /* over widened groups */
    /* for codes, leaving them widened for the other chunks; NULL: `widen` runs before all chunks */
    const ep_group_tile *first;
    /* Widens the lines of one group, from line `first` of the panel on, its scales and offsets. */
    void (*widen)(const ep_group_panel_form *form, const uint8_t *group, uint32_t first,
                  uint32_t lines, uint8_t *to);
} ep_group_form;

/* func(rows, constants.., walk, a, c) for every number of rows. */
#define EP_GROUP_TILE(rows, name, func, ...)                                                       \
    static void name##_##rows(const ep_group_walk *walk, const float *a, float *c)                 \
    {                                                                                              \
        func(rows, ##__VA_ARGS__, walk, a, c);                                                     \
    }
#define EP_GROUP_TILES(name, func, ...)                                                            \
    EP_FFN_BY_ROWS(ep_group_tile, name, EP_GROUP_TILE, func, ##__VA_ARGS__)

INLINE bool ep_group_has_offsets(ep_weight_format format)
{
    return ep_weight_format_offsets(format) != EP_OFFSETS_NONE;
}

/* Factors of the group that begins at this line of the panel. */
INLINE const float *ep_group_factors(const ep_group_panel_form *form, uint32_t line)
{
    return form->factors + line / form->block_lines * form->block_factors;
}

/* The scales and offsets at the end of a group, for one tile. offset: only if the format has
 * offsets. */
typedef struct {
    vector scale[VECTORS];
    vector offset[VECTORS];
} ep_group_end;

/* Outputs from o on of an array of scales, or of parts of scales. */
INLINE vector ep_group_load_scale(ep_weight_scales kind, const uint8_t *scales, uint32_t o)
{
    if (kind == EP_SCALES_BF16 || kind == EP_SCALES_F16) {
        return kind == EP_SCALES_F16 ? vector_of_f16(scales + 2 * o)
                                     : vector_of_bf16(scales + 2 * o);
    }
    if (kind == EP_SCALES_E8M0) {
        return vector_of_e8m0(scales + o);
    }
    if (kind == EP_SCALES_UINT8_PARTS) {
        return vector_of_uint8(scales + o);
    }
    if (kind == EP_SCALES_INT8_PARTS) {
        return vector_of_int8(scales + o);
    }
    return kind == EP_SCALES_E4M3_PARTS ? vector_of_e4m3(scales + o)
                                        : vector_load_any(scales + 4 * o);
}

/* scales: after the codes of the group that has these factors. has_offsets is a constant. */
INLINE void ep_group_load_end(const bool has_offsets, const ep_group_panel_form *form,
                              const uint8_t *scales, const float *factors, uint32_t strip,
                              ep_group_end *end)
{
    const ep_weight_scales kind = ep_weight_format_scales(form->format);
    const ep_weight_offsets offsets = ep_weight_format_offsets(form->format);
    const uint8_t *codes = scales + ep_weight_scale_bytes(kind) * EP_FFN_PANEL;
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        end->scale[j] = ep_group_load_scale(kind, scales, vector_output(strip, j));
    }
    if (ep_weight_scales_have_levels(kind)) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            end->scale[j] =
                vector_mul(end->scale[j], vector_load_any(factors + vector_output(strip, j)));
        }
    }
    if (!has_offsets) {
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        const uint32_t o = vector_output(strip, j);
        end->offset[j] = offsets == EP_OFFSETS_ZERO
                             ? vector_mul(end->scale[j], vector_of_int8(codes + o))
                             : vector_mul(vector_of_uint8(codes + o),
                                          vector_load_any(factors + EP_FFN_PANEL + o));
    }
}

/* Bytes of a widened group. */
INLINE size_t ep_group_wide_bytes(const ep_group_panel_form *form)
{
    return (size_t)(form->group_lines + (ep_group_has_offsets(form->format) ? 2 : 1)) *
           EP_GROUP_LINE_BYTES;
}

/* For one chunk. The last groups fetch the first groups of the next panel. */
INLINE void ep_group_stream(const ep_group_form *form, const ep_group_panel_form *panel_form,
                            const float *a, uint32_t rows, const uint8_t *panel, uint32_t lines,
                            const uint8_t *next, float *c)
{
    const size_t group_bytes = panel_form->group_bytes;
    const uint32_t group_lines = panel_form->group_lines;
    const uint32_t groups = (lines + group_lines - 1) / group_lines;
    const uint32_t ahead = (uint32_t)((EP_GROUP_AHEAD_BYTES + group_bytes - 1) / group_bytes);
    const uint32_t inside = groups > ahead ? groups - ahead : 0;
    ep_group_walk walk = {.form = panel_form,
                          .groups = panel,
                          .lines = inside * group_lines,
                          .ahead = panel + ahead * group_bytes};
    form->tiles[rows - 1](&walk, a, c);
    a += (size_t)walk.lines * rows;
    walk.groups = panel + inside * group_bytes;
    walk.first = walk.lines;
    walk.lines = lines - walk.lines;
    walk.ahead = next == NULL ? walk.groups : next;
    form->tiles[rows - 1](&walk, a, c);
}

/* Block by block, all chunks per block; each chunk fetches an equal share of the next block. */
INLINE void ep_group_blocks(const ep_group_form *form, const ep_group_panel_form *panel_form,
                            const float *a, uint32_t rows, const uint8_t *panel, uint32_t lines,
                            const uint8_t *next, float *c)
{
    _Alignas(64) uint8_t block[EP_GROUP_BLOCK_BYTES];
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const size_t group_bytes = panel_form->group_bytes;
    const uint32_t group_lines = panel_form->group_lines;
    for (uint32_t line = 0; line < lines; line += EP_GROUP_BLOCK_LINES) {
        const uint32_t n =
            lines - line < EP_GROUP_BLOCK_LINES ? lines - line : EP_GROUP_BLOCK_LINES;
        const uint8_t *codes = panel;
        uint8_t *to = block;
        for (uint32_t first = 0; first < n; first += group_lines, panel += group_bytes) {
            if (form->first == NULL) {
                form->widen(panel_form, panel, line + first,
                            n - first < group_lines ? n - first : group_lines, to);
            }
            to += ep_group_wide_bytes(panel_form);
        }
        const uint8_t *behind = line + n < lines ? panel : next;
        const size_t bytes = EP_GROUP_BLOCK_LINES / group_lines * group_bytes;
        ep_group_walk walk = {.form = panel_form,
                              .first = line,
                              .lines = n,
                              .wide = block,
                              .step = behind == NULL ? 0 : bytes / ((size_t)chunks.count * n) + 1};
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            walk.ahead = behind == NULL ? block : behind + chunk * (bytes / chunks.count);
            const bool widens = chunk == 0 && form->first != NULL;
            const ep_group_tile *tiles = widens ? form->first : form->wide;
            walk.groups = widens ? codes : block;
            tiles[chunk_rows - 1](&walk, a + first_row * lines + (size_t)line * chunk_rows,
                                  c + first_row * EP_FFN_PANEL);
        }
    }
}

/* group_panel of ffn_kernel.h. columns: of a line in the kernel's family, 1 or 2. */
INLINE void ep_group_panel(const ep_group_form *form, ep_weight_format format, uint32_t columns,
                           const float *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                           const uint8_t *next, float *c)
{
    const uint32_t lines = (k_count + columns - 1) / columns;
    const ep_group_panel_form panel_form = {
        .format = format,
        .group_lines = ep_weight_group_columns(format) / columns,
        .block_lines = EP_SCALE_BLOCK / columns,
        .code_bytes = ep_ffn_group_code_bytes(format),
        .group_bytes = ep_ffn_group_bytes(format),
        .factors = ep_ffn_factors_of(format, panel, ep_ffn_groups(format, k_count), 0),
        .block_factors = ep_ffn_block_factors(format)};
    memset(c, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    if (rows <= EP_FFN_CHUNK_ROWS) {
        ep_group_stream(form, &panel_form, a, rows, panel, lines, next, c);
    } else {
        ep_group_blocks(form, &panel_form, a, rows, panel, lines, next, c);
    }
}

#endif
