/* SPDX-License-Identifier: Apache-2.0 */
/* Packing, chunking and the passes of every kernel this CPU runs, against its family's
 * reference. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "kernels/ffn_element.h"
#include "kernels/ffn_pass.h"
#include "support/random_scales.h"

Test(chunks, cover_all_rows_in_order_and_differ_by_at_most_one)
{
    for (uint32_t rows = 1; rows <= EP_FFN_PASS_ROWS; rows++) {
        ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
        uint32_t next = 0;
        for (uint32_t c = 0; c < chunks.count; c++) {
            uint32_t n = ep_ffn_chunk_rows(&chunks, c);
            cr_assert_eq(ep_ffn_chunk_first_row(&chunks, c), next);
            cr_assert(n >= 1 && n <= EP_FFN_CHUNK_ROWS && n + 1 >= ep_ffn_chunk_rows(&chunks, 0));
            next += n;
        }
        cr_assert_eq(next, rows);
    }
}

Test(panel_slot, is_a_permutation)
{
    const ep_dtype dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};
    for (size_t d = 0; d < 3; d++) {
        bool seen[EP_FFN_PANEL] = {false};
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            uint32_t slot = ep_ffn_panel_slot(dtypes[d], o);
            cr_assert(slot < EP_FFN_PANEL && !seen[slot]);
            seen[slot] = true;
        }
    }
}

typedef struct {
    ep_ffn_source source;
    uint8_t *matrices[4];
    uint8_t *scales[3];
    uint8_t *biases[3];
    uint8_t *x;
    uint8_t *out; /* rows of out_stride, guard bytes between and around */
    uint8_t *want;
    size_t out_row_bytes;
    size_t out_stride;
    ep_ffn_row *rows;
    ep_ffn_batch batch;
} ffn_case;

#define GUARD_BYTES 64
#define GUARD 0xa5

/* A value of dtype at p; wild: any bits, so NaN, infinities and denormals too. */
static void put(uint64_t *state, uint8_t *p, ep_dtype dtype, bool wild)
{
    if (dtype == EP_DTYPE_I8) {
        *p = (uint8_t)ep_splitmix64(state);
    } else {
        ep_test_random_float(state, dtype, wild, p);
    }
}

/* Matrices and x begin at odd addresses: any alignment is allowed. */
static uint8_t *make_values(uint64_t *state, ep_dtype dtype, size_t count, bool wild)
{
    size_t element = ep_dtype_bytes(dtype);
    uint8_t *p = malloc(count * element + 1);
    for (size_t i = 0; i < count; i++) {
        put(state, p + 1 + i * element, dtype, wild);
    }
    return p;
}

/* Codes of a format with scales, any but those that mean NaN. */
static uint8_t *make_codes(uint64_t *state, ep_weight_format format, size_t bytes)
{
    bool is_f8 = ep_weight_format_codes(format) == EP_CODES_E4M3;
    uint8_t *p = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++) {
        uint8_t code = (uint8_t)(ep_splitmix64(state) >> 56);
        p[1 + i] = is_f8 && (code & 0x7fu) == 0x7fu ? 0x81 : code;
    }
    return p;
}

static uint8_t *make_scales(uint64_t *state, ep_weight_format format, uint32_t rows,
                            uint32_t columns, bool wild)
{
    uint8_t *p = malloc(ep_weight_scales_bytes(format, rows, columns) + 1);
    ep_test_random_scales(state, format, rows, columns, wild, p + 1);
    return p;
}

static uint8_t *make_matrix(uint64_t *state, ep_weight_format format, uint32_t rows,
                            uint32_t columns, bool wild)
{
    if (ep_weight_format_is_float(format)) {
        return make_values(state, ep_weight_format_dtype(format), (size_t)rows * columns, wild);
    }
    return make_codes(state, format, rows * ep_weight_row_bytes(format, columns));
}

/* Half of the optional parts, and in three of four cases another activation than silu. */
static void make_source(ffn_case *c, uint64_t *state, uint32_t hidden, uint32_t inner,
                        ep_weight_format format, bool wild)
{
    const ep_dtype floats[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};
    ep_expert_source *s = &c->source;
    uint64_t z = ep_splitmix64(state);
    *s = (ep_expert_source){.hidden = hidden, .inner = inner, .format = format};
    s->activation = z % 4 == 0 ? EP_ACT_SILU : (ep_activation)((z >> 8) % EP_ACT_COUNT);
    s->numbers = (ep_activation_numbers){1.702f, 1.0f + (float)((z >> 16) % 3),
                                         (float)((z >> 20) % 3) * 0.75f};
    s->bias_dtype = floats[(z >> 24) % 3];
    s->shared_gate_dtype = floats[(z >> 28) % 3];
    c->matrices[0] = make_matrix(state, format, inner, hidden, wild);
    c->matrices[1] = make_matrix(state, format, inner, hidden, wild);
    c->matrices[2] = make_matrix(state, format, hidden, inner, wild);
    c->matrices[3] = make_values(state, s->shared_gate_dtype, hidden, wild);
    for (size_t m = 0; m < 3; m++) {
        uint32_t rows = m == 2 ? hidden : inner;
        c->scales[m] = make_scales(state, format, rows, m == 2 ? inner : hidden, wild);
        c->biases[m] = make_values(state, s->bias_dtype, rows, wild);
    }
    bool has_gate = ep_activation_has_gate(s->activation);
    bool has_scales = !ep_weight_format_is_float(format);
    s->gate = has_gate ? c->matrices[0] + 1 : NULL;
    s->up = c->matrices[1] + 1;
    s->down = c->matrices[2] + 1;
    s->gate_scales = has_gate && has_scales ? c->scales[0] + 1 : NULL;
    s->up_scales = has_scales ? c->scales[1] + 1 : NULL;
    s->down_scales = has_scales ? c->scales[2] + 1 : NULL;
    s->gate_bias = has_gate && (z >> 32) % 2 != 0 ? c->biases[0] + 1 : NULL;
    s->up_bias = (z >> 33) % 2 != 0 ? c->biases[1] + 1 : NULL;
    s->down_bias = (z >> 34) % 2 != 0 ? c->biases[2] + 1 : NULL;
    s->shared_gate = (z >> 35) % 2 != 0 ? c->matrices[3] + 1 : NULL;
}

static ffn_case make_case(uint64_t seed, uint32_t hidden, uint32_t inner, uint32_t rows,
                          ep_weight_format format, bool wild)
{
    const ep_dtype x_dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_I8};
    uint64_t state = seed;
    ffn_case c = {0};
    make_source(&c, &state, hidden, inner, format, wild);
    c.batch.x_dtype = x_dtypes[ep_splitmix64(&state) % 4];
    c.batch.out_dtype = x_dtypes[ep_splitmix64(&state) % 3];
    c.batch.weight_on_input = ep_splitmix64(&state) % 2 != 0;
    c.batch.rows_count = rows;
    c.x = make_values(&state, c.batch.x_dtype, (size_t)rows * hidden, wild);
    c.out_row_bytes = hidden * ep_dtype_bytes(c.batch.out_dtype);
    c.out_stride = (c.out_row_bytes + 2 * GUARD_BYTES) & ~(size_t)3;
    c.out = malloc(GUARD_BYTES + rows * c.out_stride);
    c.want = malloc(GUARD_BYTES + rows * c.out_stride);
    memset(c.out, GUARD, GUARD_BYTES + rows * c.out_stride);
    memset(c.want, GUARD, GUARD_BYTES + rows * c.out_stride);
    c.rows = malloc(rows * sizeof(*c.rows));
    for (uint32_t r = 0; r < rows; r++) {
        c.rows[r].x = c.x + 1 + r * hidden * ep_dtype_bytes(c.batch.x_dtype);
        c.rows[r].x_scale = 0.01f + 0.001f * (float)r;
        c.rows[r].input_weight = 0.2f + 0.1f * (float)(r % 9);
    }
    c.batch.rows = c.rows;
    return c;
}

static void set_outputs(ffn_case *c, uint8_t *to)
{
    for (uint32_t r = 0; r < c->batch.rows_count; r++) {
        c->rows[r].out = to + GUARD_BYTES + r * c->out_stride;
    }
}

static void fill_want(ffn_case *c, ep_ffn_family family)
{
    float *scratch = malloc(ep_ffn_reference_scratch_floats(c->source.hidden, c->source.inner) *
                            sizeof(*scratch));
    set_outputs(c, c->want);
    ep_ffn_reference_of(family, &c->source, &c->batch, scratch);
    set_outputs(c, c->out);
    free(scratch);
}

static void free_case(ffn_case *c)
{
    for (size_t m = 0; m < 4; m++) {
        free(c->matrices[m]);
    }
    for (size_t m = 0; m < 3; m++) {
        free(c->scales[m]);
        free(c->biases[m]);
    }
    free(c->x);
    free(c->out);
    free(c->want);
    free(c->rows);
}

/* Stages in order, tasks inside a stage backwards: their order may not matter. */
static void run_pass(const ep_ffn_kernel *kernel, const ffn_case *c)
{
    size_t packed_bytes = ep_ffn_packed_bytes(&c->source, kernel->family);
    void *memory = aligned_alloc(EP_FFN_ALIGN, packed_bytes);
    float *tile = aligned_alloc(EP_FFN_ALIGN, EP_FFN_TILE_BYTES);
    memset(memory, 0xff, packed_bytes);
    ep_ffn_packed packed;
    ep_ffn_pass pass;
    ep_ffn_pack(&c->source, kernel->family, memory, &packed);
    size_t scratch_bytes = ep_ffn_pass_scratch_bytes(&packed, c->batch.rows_count);
    void *scratch = aligned_alloc(EP_FFN_ALIGN, scratch_bytes);
    memset(scratch, 0xff, scratch_bytes);
    ep_ffn_pass_init(&pass, kernel, &packed, &c->batch, scratch);
    for (uint32_t i = pass.chunks.count; i-- > 0;) {
        ep_ffn_pass_pack_chunk(&pass, i);
    }
    for (uint32_t i = packed.gate_up_panels; i-- > 0;) {
        ep_ffn_pass_gate_up(&pass, i, i > 0 ? ep_ffn_gate_up_panel(&packed, i - 1) : NULL, tile);
    }
    for (uint32_t i = ep_ffn_pass_rounds(&packed) ? pass.chunks.count : 0; i-- > 0;) {
        ep_ffn_pass_round_chunk(&pass, i);
    }
    for (uint32_t i = packed.down_panels; i-- > 0;) {
        ep_ffn_pass_down(&pass, i, i > 0 ? ep_ffn_down_panel(&packed, i - 1) : NULL, tile);
    }
    free(memory);
    free(scratch);
    free(tile);
}

/* c->want holds the family's answers. */
static void expect_family_equal(const ffn_case *c, ep_ffn_family family, uint64_t seed,
                                ep_weight_format format)
{
    const size_t bytes = GUARD_BYTES + c->batch.rows_count * c->out_stride;
    const ep_ffn_kernel *kernel;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        if (kernel->family != family) {
            continue;
        }
        memset(c->out, GUARD, bytes);
        run_pass(kernel, c);
        cr_assert_arr_eq(c->out, c->want, bytes,
                         "%s of family %s: H %u I %u rows %u weights %s %s x %s out %s seed %llu",
                         kernel->name, ep_ffn_family_name(family), c->source.hidden,
                         c->source.inner, c->batch.rows_count, ep_weight_format_name(format),
                         ep_activation_name(c->source.activation), ep_dtype_name(c->batch.x_dtype),
                         ep_dtype_name(c->batch.out_dtype), (unsigned long long)seed);
    }
}

static void expect_all_families_equal(ffn_case *c, uint64_t seed, ep_weight_format format)
{
    for (unsigned family = 0; family < EP_FFN_FAMILIES; family++) {
        if (ep_ffn_family_has((ep_ffn_family)family, format)) {
            fill_want(c, (ep_ffn_family)family);
            expect_family_equal(c, (ep_ffn_family)family, seed, format);
        }
    }
}

static void expect_all_kernels_equal(uint64_t seed, uint32_t hidden, uint32_t inner, uint32_t rows,
                                     ep_weight_format format, bool wild)
{
    ffn_case c = make_case(seed, hidden, inner, rows, format, wild);
    expect_all_families_equal(&c, seed, format);
    free_case(&c);
}

/* Nothing is added behind the down product: kernels that can write rows as they are complete do. */
static void expect_all_kernels_equal_at_once(uint64_t seed, uint32_t hidden, uint32_t inner,
                                             uint32_t rows, ep_weight_format format)
{
    ffn_case c = make_case(seed, hidden, inner, rows, format, false);
    c.source.down_bias = NULL;
    c.source.shared_gate = NULL;
    expect_all_families_equal(&c, seed, format);
    free_case(&c);
}

/* Where a processor is emulated, or a sanitizer looks at memory: others look at all bits. */
static bool is_short(void)
{
#if defined(__SANITIZE_ADDRESS__)
    return true;
#else
    return getenv("EP_TEST_SHORT") != NULL;
#endif
}

/* A fifth of the combinations, with any three of hidden, inner, rows and format together;
 * EP_TEST_LONG=1: all. */
static void sweep(bool wild)
{
    const bool is_long = getenv("EP_TEST_LONG") != NULL && !is_short();
    const uint32_t hiddens[] = {1, 63, 64, 65, 150};
    const uint32_t inners[] = {1, 31, 32, 33, 101};
    const uint32_t rows[] = {1, 2, 3, 4, 5, 6, 7, 13, 40};
    uint64_t seed = wild ? 1000000 : 1;
    for (size_t h = 0; h < 5; h++) {
        for (size_t i = 0; i < 5; i++) {
            for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]) - (is_short() ? 1 : 0); r++) {
                for (unsigned f = EP_WEIGHTS_BF16; f < EP_WEIGHTS_COUNT; f++, seed++) {
                    if (!is_long && (h + i + r + f) % 5 != 0) {
                        continue;
                    }
                    expect_all_kernels_equal(seed, hiddens[h], inners[i], rows[r],
                                             (ep_weight_format)f, wild);
                }
            }
        }
    }
}

Test(ffn_pass, equals_reference_over_shapes)
{
    sweep(false);
}

Test(ffn_pass, equals_reference_with_nan_infinity_and_denormals)
{
    sweep(true);
}

/* A down matrix of another format, and inputs that belong to other columns, in every family that
 * has both formats. */
static void expect_mixed_equal(uint64_t seed, uint32_t rows, ep_weight_format format,
                               ep_weight_format down, bool has_places)
{
    enum { H = 150, I = 101 };
    uint32_t places[H];
    uint64_t state = seed;
    ffn_case c = make_case(seed, H, I, rows, format, false);
    for (uint32_t i = 0; i < H; i++) {
        const uint32_t other = (uint32_t)(ep_splitmix64(&state) % (i + 1));
        places[i] = places[other];
        places[other] = i;
    }
    free(c.matrices[2]);
    free(c.scales[2]);
    c.matrices[2] = make_matrix(&state, down, H, I, false);
    c.scales[2] = make_scales(&state, down, H, I, false);
    c.source.places = has_places ? places : NULL;
    c.source.down_format = down;
    c.source.down = c.matrices[2] + 1;
    c.source.down_scales = ep_weight_format_is_float(down) ? NULL : c.scales[2] + 1;
    for (unsigned family = 0; family < EP_FFN_FAMILIES; family++) {
        if (ep_ffn_family_has((ep_ffn_family)family, format) &&
            ep_ffn_family_has((ep_ffn_family)family, down)) {
            fill_want(&c, (ep_ffn_family)family);
            expect_family_equal(&c, (ep_ffn_family)family, seed, down);
        }
    }
    free_case(&c);
}

Test(ffn_pass, down_may_be_of_another_format_and_inputs_have_their_places)
{
    static const ep_weight_format pairs[][2] = {
        {EP_WEIGHTS_Q4_K, EP_WEIGHTS_Q6_K}, {EP_WEIGHTS_INT4, EP_WEIGHTS_MXFP4},
        {EP_WEIGHTS_BF16, EP_WEIGHTS_Q4_K}, {EP_WEIGHTS_F16, EP_WEIGHTS_INT8_F16},
        {EP_WEIGHTS_F8_32, EP_WEIGHTS_F32}, {EP_WEIGHTS_MXFP8, EP_WEIGHTS_NVFP4},
        {EP_WEIGHTS_W8A8, EP_WEIGHTS_W8A8}};
    const uint32_t rows[] = {1, 4, 13};
    for (size_t p = 0; p < sizeof(pairs) / sizeof(pairs[0]); p++) {
        for (size_t r = 0; r < 3; r++) {
            expect_mixed_equal(50 + 3 * p + r, rows[r], pairs[p][0], pairs[p][1], (p + r) % 2 == 0);
            expect_mixed_equal(90 + 3 * p + r, rows[r], pairs[p][0], pairs[p][1], (p + r) % 2 != 0);
        }
    }
}

/* H beyond one block of k, in all block sizes, and a full pass. */
Test(ffn_pass, equals_reference_over_k_blocks)
{
    expect_all_kernels_equal(1, 701, 303, 7, EP_WEIGHTS_BF16, false);
    expect_all_kernels_equal(4, 702, 300, 3, EP_WEIGHTS_BF16, false);
    expect_all_kernels_equal(5, 600, 96, 40, EP_WEIGHTS_BF16, true);
    expect_all_kernels_equal(6, 1111, 40, 33, EP_WEIGHTS_BF16, false);
    expect_all_kernels_equal(7, 1301, 40, 7, EP_WEIGHTS_BF16, false);
    expect_all_kernels_equal(8, 2101, 33, 33, EP_WEIGHTS_BF16, false);
    expect_all_kernels_equal(9, 40, 1301, 13, EP_WEIGHTS_BF16, false);
    expect_all_kernels_equal(2, 1100, 70, 40, EP_WEIGHTS_F16, false);
    expect_all_kernels_equal(3, 130, 70, EP_FFN_PASS_ROWS, EP_WEIGHTS_F32, false);
    for (unsigned f = EP_WEIGHTS_F8_BLOCK; f < EP_WEIGHTS_COUNT; f++) {
        expect_all_kernels_equal(4 + f, 321, 270, 7, (ep_weight_format)f, false);
        expect_all_kernels_equal(24 + f, 2103, 33, 13, (ep_weight_format)f, false);
        expect_all_kernels_equal(14 + f, 130, 33, is_short() ? 13 : EP_FFN_PASS_ROWS,
                                 (ep_weight_format)f, false);
    }
}

/* The same expert in bf16: its weights as family bf16dp has them. */
static void widen_source(ffn_case *c, uint16_t *to[3])
{
    ep_expert_source *s = &c->source;
    for (size_t m = 0; m < 3; m++) {
        const uint32_t rows = m == 2 ? s->hidden : s->inner;
        const uint32_t columns = m == 2 ? s->inner : s->hidden;
        const size_t row_bytes = ep_weight_row_bytes(s->format, columns);
        to[m] = malloc((size_t)rows * columns * sizeof(*to[m]));
        for (uint32_t n = 0; n < rows; n++) {
            for (uint32_t k = 0; k < columns; k++) {
                const float code =
                    ep_ffn_weight_code(s->format, c->matrices[m] + 1 + n * row_bytes, k);
                const float scale = ep_ffn_weight_scale(s->format, c->scales[m] + 1, rows, columns,
                                                        n, k / EP_MX_GROUP);
                to[m][(size_t)n * columns + k] = ep_f32_to_bf16(code * scale);
            }
        }
    }
    s->format = EP_WEIGHTS_BF16;
    s->gate = s->gate == NULL ? NULL : to[0];
    s->up = to[1];
    s->down = to[2];
    s->gate_scales = s->up_scales = s->down_scales = NULL;
}

/* Scales near the ends of the range stand in some groups: there weights overflow or fall below the
 * normal numbers. */
static void expect_bits_of_widened(ep_weight_format format, uint32_t rows, bool wild)
{
    ffn_case c = make_case(rows + format, 331, 133, rows, format, false);
    uint16_t *wide[3];
    for (size_t i = 0; wild && i < 20; i++) {
        c.scales[1][1 + 37 * i] = (uint8_t)(i < 10 ? i : 244 + (i - 10));
    }
    fill_want(&c, EP_FFN_FAMILY_BF16DP);
    expect_family_equal(&c, EP_FFN_FAMILY_BF16DP, rows, format);
    widen_source(&c, wide);
    expect_family_equal(&c, EP_FFN_FAMILY_BF16DP, rows, EP_WEIGHTS_BF16);
    for (size_t m = 0; m < 3; m++) {
        free(wide[m]);
    }
    free_case(&c);
}

Test(ffn_pass, mx_formats_have_the_bits_of_the_expert_widened_to_bf16)
{
    const uint32_t rows[] = {1, 3, 4, 6, 7, 40};
    for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
        for (unsigned wild = 0; wild < 2; wild++) {
            expect_bits_of_widened(EP_WEIGHTS_MXFP4, rows[r], wild != 0);
            expect_bits_of_widened(EP_WEIGHTS_MXFP8, rows[r], wild != 0);
        }
    }
}

/* Inputs and scales such that sums stay inside the range of f32, or leave it at one end or only in
 * units of scales. */
typedef struct mx_range {
    uint32_t inputs, inputs_span; /* exponent fields */
    uint32_t scales, scales_span;
    bool returns; /* of one group and chunk: the second half takes away what the first one adds */
} mx_range;

static void fill_mx_panel(uint64_t *state, ep_weight_format format, const mx_range *range,
                          uint8_t *panel, size_t bytes)
{
    const size_t code_bytes = ep_ffn_group_code_bytes(format);
    for (size_t i = 0; i < bytes; i++) {
        const uint64_t z = ep_splitmix64(state);
        const bool is_scale = i % ep_ffn_group_bytes(format) >= code_bytes;
        panel[i] = (uint8_t)(is_scale ? range->scales + z % range->scales_span : z >> 8);
        /* no NaN */
        panel[i] ^= !is_scale && format == EP_WEIGHTS_MXFP8 && (panel[i] & 0x7fu) == 0x7fu;
    }
}

/* Some are zero. */
static void fill_pairs(uint64_t *state, const mx_range *range, uint32_t *a, size_t count)
{
    for (size_t i = 0; i < 2 * count; i++) {
        const uint64_t z = ep_splitmix64(state);
        const uint32_t bits = (uint32_t)(z & 0x807fu) |
                              (range->inputs + (uint32_t)(z >> 32) % range->inputs_span) << 7;
        a[i / 2] = a[i / 2] << 16 | ((z >> 16) % 8 == 0 ? bits & 0x8000u : bits);
    }
}

static void expect_panel_equal(ep_weight_format format, const mx_range *range, uint32_t rows,
                               uint32_t k_count)
{
    uint64_t state = rows + k_count + range->inputs;
    const uint32_t lines = ep_ffn_lines(EP_FFN_FAMILY_BF16DP, k_count);
    const size_t bytes = ep_ffn_panel_bytes(EP_FFN_FAMILY_BF16DP, format, k_count);
    const size_t count = (size_t)rows * EP_FFN_PANEL;
    uint8_t *panel = aligned_alloc(64, (bytes + 63) / 64 * 64);
    uint32_t *a = calloc((size_t)rows * lines, sizeof(*a));
    float *want = aligned_alloc(64, count * sizeof(*want));
    float *c = aligned_alloc(64, count * sizeof(*c));
    const ep_ffn_kernel *kernel;
    const ep_ffn_kernel *plain = NULL;
    fill_mx_panel(&state, format, range, panel, bytes);
    fill_pairs(&state, range, a, (size_t)rows * lines);
    for (size_t i = 0; range->returns && i < rows * EP_MX_GROUP / 4; i++) {
        a[i + rows * EP_MX_GROUP / 4] = a[i] ^ 0x80008000u;
    }
    if (range->returns) {
        memcpy(panel + ep_ffn_group_code_bytes(format) / 2, panel,
               ep_ffn_group_code_bytes(format) / 2);
    }
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        plain = kernel->family == EP_FFN_FAMILY_BF16DP ? kernel : plain; /* the last: plain loops */
    }
    plain->group_panel(format, (const float *)(const void *)a, rows, panel, k_count, NULL, want);
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != plain; n++) {
        if (kernel->family != EP_FFN_FAMILY_BF16DP) {
            continue;
        }
        kernel->group_panel(format, (const float *)(const void *)a, rows, panel, k_count, NULL, c);
        for (size_t i = 0; i < count; i++) {
            cr_assert(ep_f32_bits(c[i]) == ep_f32_bits(want[i]) || (isnan(c[i]) && isnan(want[i])),
                      "%s: %s rows %u columns %u inputs from %u scales from %u: %a, not %a at %zu",
                      kernel->name, ep_weight_format_name(format), rows, k_count, range->inputs,
                      range->scales, (double)c[i], (double)want[i], i);
        }
    }
    free(panel);
    free(a);
    free(want);
    free(c);
}

Test(ffn_pass, mx_sums_equal_those_of_plain_loops_at_the_ends_of_the_range)
{
    static const mx_range ranges[] = {
        {110, 20, 110, 18, false}, /* inside */
        {1, 40, 100, 28, false},   /* below: products, or sums that cancel */
        {20, 12, 107, 20, false},  /* about there: 1 + 7 + 127 and the codes' bits */
        {215, 40, 90, 38, false},  /* above */
        {215, 30, 30, 60, false},  /* above, in units of scales alone */
        {20, 30, 120, 80, false},  /* units above 1 */
        {145, 40, 0, 12, false},   /* inside, but weights below the normal numbers are zeros */
    };
    const uint32_t rows[] = {1, 4, 6, 7, 16, 50};
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]) - (is_short() ? 2 : 0); r++) {
            expect_panel_equal(EP_WEIGHTS_MXFP4, &ranges[i], rows[r], 32);
            expect_panel_equal(EP_WEIGHTS_MXFP4, &ranges[i], rows[r], 311);
            expect_panel_equal(EP_WEIGHTS_MXFP8, &ranges[i], rows[r], 32);
            expect_panel_equal(EP_WEIGHTS_MXFP8, &ranges[i], rows[r], 311);
        }
    }
    /* Above on the way, where the sums in such units are not. */
    expect_panel_equal(EP_WEIGHTS_MXFP4, &(mx_range){187, 1, 192, 1, true}, 4, EP_MX_GROUP);
    expect_panel_equal(EP_WEIGHTS_MXFP8, &(mx_range){187, 1, 186, 1, true}, 4, EP_MX_GROUP);
}

/* Every size of a pass: a chunk may not take its neighbour's rows. */
Test(ffn_pass, equals_reference_for_every_number_of_rows)
{
    for (uint32_t rows = 1; rows <= 70; rows++) {
        expect_all_kernels_equal(rows, 37, 35, rows, EP_WEIGHTS_BF16, false);
        for (unsigned f = EP_WEIGHTS_F8_BLOCK; f < EP_WEIGHTS_COUNT; f++) {
            if (!is_short() || rows % EP_WEIGHTS_COUNT == f) {
                expect_all_kernels_equal(rows, 37, 35, rows, (ep_weight_format)f, false);
            }
        }
    }
    for (uint32_t rows = 71; rows <= EP_FFN_PASS_ROWS; rows += 37) {
        expect_all_kernels_equal(rows, 37, 35, rows, EP_WEIGHTS_BF16, false);
    }
}

/* The same in w8a8, where fetching ahead and blocks depend on it: over several blocks, and every
 * row has its own scale. */
Test(ffn_pass, equals_reference_in_w8a8_for_every_number_of_rows)
{
    for (uint32_t rows = 1; rows <= (is_short() ? 13 : 70); rows++) {
        expect_all_kernels_equal(rows, 37 + rows, 35, rows, EP_WEIGHTS_W8A8, rows % 2 == 0);
        expect_all_kernels_equal(rows, 67, 531, rows, EP_WEIGHTS_W8A8, false);
    }
    expect_all_kernels_equal(5, 2103, 67, 7, EP_WEIGHTS_W8A8, false);
    expect_all_kernels_equal(6, 2103, 67, 40, EP_WEIGHTS_W8A8, false);
}

/* Panels over several blocks of the longest kinds, for few rows and for many, whose rows are
 * written behind the last block alone. */
Test(ffn_pass, rows_written_at_once_equal_reference_over_k_blocks)
{
    expect_all_kernels_equal_at_once(17, 40, 2101, 13, EP_WEIGHTS_BF16);
    expect_all_kernels_equal_at_once(18, 40, 4203, 40, EP_WEIGHTS_BF16);
    expect_all_kernels_equal_at_once(19, 40, 4203, 13, EP_WEIGHTS_W8A8);
    expect_all_kernels_equal_at_once(20, 40, 8403, 40, EP_WEIGHTS_W8A8);
    expect_all_kernels_equal_at_once(21, 4203, 40, 13, EP_WEIGHTS_W8A8);
    expect_all_kernels_equal_at_once(22, 8403, 40, 40, EP_WEIGHTS_W8A8);
}

/* Rows of NaN, infinities, denormals and huge values beside ordinary ones, which stay as they are
 * without them. */
static void expect_wild_rows_alone(const ep_ffn_kernel *kernel, ep_weight_format format)
{
    enum { HIDDEN = 67, ROWS = 13 };
    const uint32_t wild[] = {0x7fc00000u, 0x7f800000u, 0xff800000u,
                             0x00000001u, 0x807fffffu, 0x7f7fffffu};
    ffn_case c = make_case(77, HIDDEN, 45, ROWS, format, false);
    uint8_t *x = malloc((size_t)ROWS * HIDDEN * 4);
    c.batch.x_dtype = EP_DTYPE_F32;
    for (uint32_t r = 0; r < ROWS; r++) {
        c.rows[r].x = x + (size_t)r * HIDDEN * 4;
        for (uint32_t i = 0; i < HIDDEN; i++) {
            float v = (float)(int32_t)(r * 37 + i * 11) * 0x1p-9f - 0.7f;
            memcpy(x + ((size_t)r * HIDDEN + i) * 4, &v, 4);
        }
    }
    set_outputs(&c, c.want);
    run_pass(kernel, &c);
    for (uint32_t r = 1; r < ROWS; r += 2) {
        for (uint32_t i = 0; i < HIDDEN; i++) {
            memcpy(x + ((size_t)r * HIDDEN + i) * 4, &wild[(r / 2 + i) % 6], 4);
        }
    }
    set_outputs(&c, c.out);
    run_pass(kernel, &c);
    for (uint32_t r = 0; r < ROWS; r += 2) {
        size_t at = GUARD_BYTES + r * c.out_stride;
        cr_assert_arr_eq(c.out + at, c.want + at, c.out_row_bytes, "%s of family %s, %s, row %u",
                         kernel->name, ep_ffn_family_name(kernel->family),
                         ep_weight_format_name(format), r);
    }
    free(x);
    free_case(&c);
}

Test(ffn_pass, wild_rows_leave_their_neighbours_alone)
{
    const ep_ffn_kernel *kernel;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        for (unsigned f = EP_WEIGHTS_NONE + 1; f < EP_WEIGHTS_COUNT; f++) {
            if (ep_ffn_family_has(kernel->family, (ep_weight_format)f)) {
                expect_wild_rows_alone(kernel, (ep_weight_format)f);
            }
        }
    }
}

static uint64_t hash_of(const uint8_t *bytes, size_t count)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    }
    return hash;
}

/* Of one expert as packed for a family; every byte is written. seed: which parts it has. */
static uint64_t packed_hash(uint64_t seed, ep_ffn_family family, ep_weight_format format)
{
    ffn_case c = make_case(seed, 67, 45, 1, format, false);
    ep_ffn_packed packed;
    const size_t bytes = ep_ffn_packed_bytes(&c.source, family);
    uint8_t *memory = aligned_alloc(EP_FFN_ALIGN, ep_align_up(bytes, EP_FFN_ALIGN));
    memset(memory, 0xff, bytes);
    ep_ffn_pack(&c.source, family, memory, &packed);
    const uint64_t hash = hash_of(memory, bytes);
    memset(memory, 0, bytes);
    ep_ffn_pack(&c.source, family, memory, &packed);
    cr_assert_eq(hash, hash_of(memory, bytes), "family %s leaves bytes of %s unwritten",
                 ep_ffn_family_name(family), ep_weight_format_name(format));
    free(memory);
    free_case(&c);
    return hash;
}

/* -0 as an up product stays -0 beside a gate that has a bias: the last sum is of -0 alone, and
 * would be +0 with any +0 among it. */
Test(ffn_pass, a_bias_that_is_not_there_adds_nothing_even_to_minus_zero)
{
    static const float gate[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    static const float up[4] = {-1.0f, 0.0f, 0x1p-100f, 0.0f};
    static const float down[4] = {-0x1p-100f, 1.0f, -0x1p-100f, 1.0f};
    static const float gate_bias[2] = {1.0f, 1.0f};
    static const float x[2] = {-0x1p-100f, -0.0f};
    static const float want[2] = {-0.0f, -0.0f};
    float got[2];
    ep_ffn_row row = {.x = x, .out = got};
    ffn_case c = {
        .source = {.hidden = 2,
                   .inner = 2,
                   .format = EP_WEIGHTS_F32,
                   .activation = EP_ACT_SILU,
                   .gate = gate,
                   .up = up,
                   .down = down,
                   .bias_dtype = EP_DTYPE_F32,
                   .gate_bias = gate_bias},
        .batch = {.rows = &row,
                  .rows_count = 1,
                  .x_dtype = EP_DTYPE_F32,
                  .out_dtype = EP_DTYPE_F32},
    };
    float scratch[64];
    cr_assert_leq(ep_ffn_reference_scratch_floats(2, 2), sizeof(scratch) / sizeof(scratch[0]));
    ep_ffn_reference_of(EP_FFN_FAMILY_PORTABLE, &c.source, &c.batch, scratch);
    cr_assert_arr_eq(got, want, sizeof(want), "the reference: %g %g", (double)got[0],
                     (double)got[1]);
    const ep_ffn_kernel *kernel;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        if (kernel->family == EP_FFN_FAMILY_PORTABLE && kernel->panel != NULL) {
            run_pass(kernel, &c);
            cr_assert_arr_eq(got, want, sizeof(want), "%s: %g %g", kernel->name, (double)got[0],
                             (double)got[1]);
        }
    }
}

static uint64_t packed_hash_of_all(unsigned first, unsigned last)
{
    uint64_t all = 0;
    for (unsigned family = 0; family < EP_FFN_FAMILIES; family++) {
        for (unsigned f = first; f <= last; f++) {
            for (uint64_t seed = 1;
                 seed <= 8 && ep_ffn_family_has((ep_ffn_family)family, (ep_weight_format)f);
                 seed++) {
                all = all * 0x100000001b3u +
                      packed_hash(seed, (ep_ffn_family)family, (ep_weight_format)f);
            }
        }
    }
    return all;
}

/* Packed experts are kept on disks under the layout's name. Whoever moves a byte of them gives the
 * layout another name and records the hashes anew; else nodes would compute with what an older
 * build packed. New formats add a row: their bytes were never on a disk. */
Test(ffn_pass, packed_bytes_are_those_of_the_layouts_name)
{
    static const struct {
        unsigned last; /* of formats; the first is the one behind the row before */
        const char *hash;
    } recorded[] = {{EP_WEIGHTS_Q5_K, "panel64-8 9d18b7200a3b245b"}};
    unsigned first = EP_WEIGHTS_NONE + 1;
    for (size_t i = 0; i < EP_ARRAY_COUNT(recorded); i++) {
        char got[64];
        snprintf(got, sizeof(got), "%s %016llx", EP_FFN_PACKED_LAYOUT,
                 (unsigned long long)packed_hash_of_all(first, recorded[i].last));
        cr_expect_str_eq(got, recorded[i].hash);
        first = recorded[i].last + 1;
    }
    cr_expect_eq(first, EP_WEIGHTS_COUNT, "no hash of %s is recorded",
                 ep_weight_format_name((ep_weight_format)first));
}
