/* SPDX-License-Identifier: Apache-2.0 */
/* Backends of the numerics families of pairs: the reference and the cpu backend with each of its
 * kernels give equal bits and equal ids, whatever the rows of a job and the threads; weights that a
 * family does not have stay with `portable`. */
#include <criterion/criterion.h>
#include <fenv.h>
#include <stdio.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpu_backend.h"
#include "backends/host_common.h"
#include "base/check.h"
#include "base/random.h"
#include "contract/backend/expert_fixture.h"
#include "kernels/bf16dp.h"
#include "kernels/ffn_element.h"
#include "support/expect.h"

static ep_error error; /* of the last call */

enum { BACKENDS_MAX = 8 };

static const ep_weight_format of_w4a8[] = {EP_WEIGHTS_MXFP4, EP_WEIGHTS_INT4, EP_WEIGHTS_INT4_F16,
                                           EP_WEIGHTS_Q4_K};

typedef struct {
    ep_backend *all[BACKENDS_MAX];
    const char *names[BACKENDS_MAX];
    size_t count;
} opened;

static void add(opened *o, ep_backend *backend, const char *name)
{
    cr_assert_lt(o->count, (size_t)BACKENDS_MAX);
    o->all[o->count] = backend;
    o->names[o->count++] = name;
}

/* The reference, the cpu backend as a daemon opens it, and with each kernel that computes the
 * format, with 1, 2, .. threads. */
static opened open_all(ep_numerics numerics, ep_weight_format format)
{
    opened o = {.count = 0};
    ep_backend *backend;
    ep_backend_config config = {.numerics = numerics, .threads = 1};
    ASSERT_OK(ep_backend_by_name("reference")->open(&config, &backend, &error), error);
    add(&o, backend, "reference");
    config.threads = 2;
    ASSERT_OK(ep_backend_by_name("cpu")->open(&config, &backend, &error), error);
    add(&o, backend, "cpu");
    const ep_ffn_kernel *kernel;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        if (kernel->family == ep_numerics_family(numerics, format)) {
            config.threads = 1 + (uint32_t)o.count;
            ASSERT_OK(ep_cpu_backend_open_with(kernel, &config, &backend, &error), error);
            add(&o, backend, kernel->name);
        }
    }
    return o;
}

static void close_all(opened *o)
{
    for (size_t b = 0; b < o->count; b++) {
        o->all[b]->ops->close(o->all[b]);
    }
}

static void expect_rows(const opened *o, const expert_fixture *f, const uint32_t *sizes,
                        size_t sizes_count)
{
    for (size_t b = 0; b < o->count; b++) {
        fixture_run_counts(f, o->all[b], o->names[b], 1 + (uint32_t)b, sizes, sizes_count);
    }
}

static void read_id(ep_backend *backend, unsigned format, bool wide_inputs, uint32_t others,
                    char out_id[EP_NUMERICS_ID_BYTES])
{
    cr_assert_eq(
        backend->ops->numerics_id(backend, (ep_weight_format)format, wide_inputs, others, out_id),
        EP_OK);
}

static void expect_all_numbers_of_rows(ep_numerics numerics, ep_weight_format format)
{
    enum { SIZES = 80 };
    uint32_t sizes[SIZES];
    for (uint32_t i = 0; i < 70; i++) {
        sizes[i] = i + 1;
    }
    memcpy(sizes + 70, (const uint32_t[]){255, 256, 257, 1000, EP_JOB_ROWS_MAX},
           5 * sizeof(sizes[0]));
    uint64_t state = (uint64_t)numerics;
    for (uint32_t i = 75; i < SIZES; i++) {
        sizes[i] = 1 + (uint32_t)(ep_splitmix64(&state) % EP_JOB_ROWS_MAX);
    }
    opened o = open_all(numerics, format);
    expert_fixture f = expert_fixture_make_of(5, 23, 17, EP_JOB_ROWS_MAX, format);
    expert_fixture_answer(&f, ep_numerics_family(numerics, format));
    expect_rows(&o, &f, sizes, SIZES);
    expert_fixture_free(&f);
    close_all(&o);
}

Test(families, bits_are_equal_for_all_numbers_of_rows)
{
    expect_all_numbers_of_rows(EP_NUMERICS_PORTABLE, EP_WEIGHTS_BF16);
    expect_all_numbers_of_rows(EP_NUMERICS_BF16DP, EP_WEIGHTS_BF16);
    expect_all_numbers_of_rows(EP_NUMERICS_BF16ODD, EP_WEIGHTS_BF16);
}

static void expect_shapes_and_types(ep_numerics numerics, ep_weight_format format)
{
    const uint32_t shapes[][2] = {{1, 1}, {64, 32}, {65, 33}, {150, 101}, {300, 270}};
    const uint32_t sizes[] = {1, 6, 7, 40};
    opened o = open_all(numerics, format);
    for (uint32_t s = 0; s < 5; s++) {
        for (uint64_t seed = 0; seed < 4; seed++) {
            expert_fixture f = expert_fixture_make_of(seed, shapes[s][0], shapes[s][1], 40, format);
            expert_fixture_answer(&f, ep_numerics_family(numerics, format));
            expect_rows(&o, &f, sizes, 4);
            expert_fixture_free(&f);
        }
    }
    close_all(&o);
}

Test(families, bits_are_equal_over_shapes_and_types)
{
    expect_shapes_and_types(EP_NUMERICS_BF16DP, EP_WEIGHTS_BF16);
    expect_shapes_and_types(EP_NUMERICS_BF16ODD, EP_WEIGHTS_BF16);
    for (size_t i = 0; i < EP_ARRAY_COUNT(of_w4a8); i++) {
        expect_shapes_and_types(EP_NUMERICS_W4A8, of_w4a8[i]);
    }
}

Test(families, other_weights_stay_with_portable)
{
    const uint32_t sizes[] = {7};
    opened o = open_all(EP_NUMERICS_BF16DP, EP_WEIGHTS_BF16);
    expert_fixture f = expert_fixture_make(11, 65, 33, 7, EP_DTYPE_F16);
    expect_rows(&o, &f, sizes, 1);
    expert_fixture_free(&f);
    close_all(&o);
}

/* What weights of a format are computed with, said once more. */
static const char *family_of(ep_numerics numerics, ep_weight_format format)
{
    bool has_nibbles = false;
    for (size_t i = 0; i < EP_ARRAY_COUNT(of_w4a8); i++) {
        has_nibbles |= of_w4a8[i] == format;
    }
    const bool has_pairs =
        format != EP_WEIGHTS_F16 && format != EP_WEIGHTS_F32 && format != EP_WEIGHTS_W8A8;
    return numerics == EP_NUMERICS_W4A8 && has_nibbles ? "w4a8"
           : (numerics == EP_NUMERICS_W4A8 || numerics == EP_NUMERICS_BF16DP) && has_pairs
               ? "bf16dp"
           : numerics == EP_NUMERICS_BF16ODD && format == EP_WEIGHTS_BF16 ? "bf16odd"
                                                                          : "portable";
}

static void expect_ids(ep_numerics numerics, ep_weight_format format)
{
    opened o = open_all(numerics, format);
    opened portable = open_all(EP_NUMERICS_PORTABLE, format);
    opened pairs = open_all(EP_NUMERICS_BF16DP, EP_WEIGHTS_BF16);
    char first[EP_NUMERICS_ID_BYTES];
    char id[EP_NUMERICS_ID_BYTES];
    char other[EP_NUMERICS_ID_BYTES];
    read_id(o.all[0], format, false, 0, first);
    for (size_t b = 0; b < o.count; b++) {
        read_id(o.all[b], format, false, 0, id);
        cr_assert_str_eq(id, first, "%s", o.names[b]);
        for (unsigned f = EP_WEIGHTS_BF16; f < EP_WEIGHTS_COUNT; f++) {
            char want[EP_NUMERICS_ID_BYTES];
            snprintf(want, sizeof(want), "%s/%s/rne/", family_of(numerics, (ep_weight_format)f),
                     ep_weight_format_name((ep_weight_format)f));
            read_id(o.all[b], f, false, 0, id);
            cr_assert(strncmp(id, want, strlen(want)) == 0, "%s, not %s", id, want);
            read_id(pairs.all[1], f, false, 0, other);
            const bool is_same = strcmp(family_of(numerics, (ep_weight_format)f),
                                        family_of(EP_NUMERICS_BF16DP, (ep_weight_format)f)) == 0;
            cr_assert_eq(strcmp(id, other) == 0, is_same, "%s and %s", id, other);
        }
    }
    read_id(portable.all[1], format, false, 0, id);
    cr_assert_str_neq(strchr(id, '/'), strchr(first, '/'), "the answers are the same");
    close_all(&pairs);
    close_all(&portable);
    close_all(&o);
}

Test(families, ids_name_the_family_and_its_answer)
{
    expect_ids(EP_NUMERICS_BF16DP, EP_WEIGHTS_BF16);
    expect_ids(EP_NUMERICS_BF16ODD, EP_WEIGHTS_BF16);
    for (size_t i = 0; i < EP_ARRAY_COUNT(of_w4a8); i++) {
        expect_ids(EP_NUMERICS_W4A8, of_w4a8[i]);
    }
}

/* One id and its rows with experts that name inputs of 16 bits, or do not. */
static void expect_auto(ep_weight_format format, bool wide_inputs, ep_numerics same)
{
    const uint32_t sizes[] = {1, 7, 40};
    char want[EP_NUMERICS_ID_BYTES];
    char id[EP_NUMERICS_ID_BYTES];
    opened o = open_all(EP_NUMERICS_AUTO, format);
    opened named = open_all(same, format);
    expert_fixture f = expert_fixture_make_of(3, 150, 101, 40, format);
    f.source.wide_inputs = wide_inputs;
    expert_fixture_answer(&f, ep_numerics_family(same, format));
    expect_rows(&o, &f, sizes, 3);
    read_id(named.all[1], format, false, 0, want);
    for (size_t b = 0; b < o.count; b++) {
        read_id(o.all[b], format, wide_inputs, 0, id);
        cr_expect_str_eq(id, want, "%s", o.names[b]);
    }
    f.source.wide_inputs = true; /* a name is a name */
    expect_rows(&named, &f, sizes, 3);
    expert_fixture_free(&f);
    close_all(&named);
    close_all(&o);
}

/* Where auto takes w4a8, and elsewhere, its rows and ids are those of the families that can be
 * named. */
Test(families, auto_keeps_inputs_of_16_bits_where_they_are_named)
{
    const ep_weight_format formats[] = {EP_WEIGHTS_MXFP4, EP_WEIGHTS_INT4, EP_WEIGHTS_INT4_F16,
                                        EP_WEIGHTS_Q4_K, EP_WEIGHTS_MXFP8};
    const ep_numerics numerics[EP_FFN_FAMILIES] = {EP_NUMERICS_PORTABLE, EP_NUMERICS_BF16DP,
                                                   EP_NUMERICS_BF16ODD, EP_NUMERICS_W4A8};
    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
        for (int wide = 0; wide < 2; wide++) {
            expect_auto(formats[i], wide != 0,
                        numerics[ep_ffn_family_fastest(formats[i], wide != 0)]);
        }
    }
}

/* The answers of each family as they were recorded: an id stands for its bits, on every machine and
 * in every build. Whoever changes a family's bits or the known-answer run records new ones; whoever
 * did not mean to has found a mistake. A new format adds rows of its own: those of before stay. */
Test(families, the_references_answers_are_those_recorded)
{
    static const struct {
        ep_numerics numerics;
        ep_weight_format format;
        uint32_t others;
        const char *id;
    } recorded[] = {{EP_NUMERICS_PORTABLE, EP_WEIGHTS_BF16, 0x3ff, "portable/bf16/rne/50925aa1"},
                    {EP_NUMERICS_BF16DP, EP_WEIGHTS_BF16, 0x3ff, "bf16dp/bf16/rne/657913a9"},
                    {EP_NUMERICS_BF16ODD, EP_WEIGHTS_BF16, 0x3ff, "bf16odd/bf16/rne/00f97804"},
                    {EP_NUMERICS_PORTABLE, EP_WEIGHTS_BF16, 0x7fffff, "portable/bf16/rne/70207dde"},
                    {EP_NUMERICS_BF16DP, EP_WEIGHTS_BF16, 0x7fffff, "bf16dp/bf16/rne/f8d174a6"},
                    {EP_NUMERICS_BF16ODD, EP_WEIGHTS_BF16, 0x7fffff, "bf16odd/bf16/rne/129f44b7"},
                    {EP_NUMERICS_W4A8, EP_WEIGHTS_MXFP4, 0, "w4a8/mxfp4/rne/cc64d879"},
                    {EP_NUMERICS_W4A8, EP_WEIGHTS_INT4, 0, "w4a8/int4-g32/rne/f97147f8"},
                    {EP_NUMERICS_W4A8, EP_WEIGHTS_INT4_F16, 0, "w4a8/int4-g32-f16/rne/50cdc660"},
                    {EP_NUMERICS_W4A8, EP_WEIGHTS_Q4_K, 0, "w4a8/q4_k/rne/0d54ea49"}};
    uint32_t in_all[EP_NUMERICS_AUTO] = {0};
    for (size_t n = 0; n < sizeof(recorded) / sizeof(recorded[0]); n++) {
        const ep_backend_config config = {.numerics = recorded[n].numerics, .threads = 1};
        in_all[recorded[n].numerics] |= recorded[n].others | 1u << recorded[n].format;
        char id[EP_NUMERICS_ID_BYTES];
        ep_backend *backend;
        ASSERT_OK(ep_backend_by_name("reference")->open(&config, &backend, &error), error);
        read_id(backend, recorded[n].format, false, recorded[n].others, id);
        cr_expect_str_eq(id, recorded[n].id);
        backend->ops->close(backend);
    }
    for (unsigned n = EP_NUMERICS_PORTABLE; n <= EP_NUMERICS_BF16ODD; n++) {
        cr_expect_eq(in_all[n] | 1u, (1u << EP_WEIGHTS_COUNT) - 1u,
                     "answers of numerics %u are recorded for formats %#x only", n, in_all[n]);
    }
}

/* Backends opened by a thread that rounds upwards and flushes denormals have the usual ids, which
 * stand for the usual bits. */
static void expect_ids_of_a_strange_opener(ep_numerics numerics)
{
    char usual[EP_NUMERICS_ID_BYTES];
    char id[EP_NUMERICS_ID_BYTES];
    fenv_t before;
    opened o = open_all(numerics, EP_WEIGHTS_BF16);
    read_id(o.all[0], EP_WEIGHTS_BF16, false, UINT32_MAX, usual);
    close_all(&o);
    cr_assert_eq(fegetenv(&before), 0);
    cr_assert_eq(fesetround(FE_UPWARD), 0);
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040u); /* FTZ and DAZ */
#endif
    o = open_all(numerics, EP_WEIGHTS_BF16);
    cr_assert_eq(fesetenv(&before), 0);
    for (size_t b = 0; b < o.count; b++) {
        read_id(o.all[b], EP_WEIGHTS_BF16, false, UINT32_MAX, id);
        cr_expect_str_eq(id, usual, "%s", o.names[b]);
    }
    close_all(&o);
}

Test(families, the_openers_float_environment_does_not_matter)
{
    expect_ids_of_a_strange_opener(EP_NUMERICS_PORTABLE);
    expect_ids_of_a_strange_opener(EP_NUMERICS_BF16DP);
    expect_ids_of_a_strange_opener(EP_NUMERICS_BF16ODD);
}

/* ---- processors that compute otherwise, each in one respect ---- */

static const ep_ffn_kernel *right; /* what the wrong ones are made of */

/* Sums below 2^-126 and such inputs become zeros, as with FTZ and DAZ. */
static void flushed(float *c, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        c[i] = ep_bf16dp_flush(c[i]);
    }
}

static void panel_of_flushed(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                             uint32_t lines, const uint8_t *next, float *c)
{
    right->panel(dtype, a, rows, panel, lines, next, c);
    flushed(c, rows * EP_FFN_PANEL);
}

/* Denormal inputs and sums are kept, where the family flushes them. */
static void panel_of_kept(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                          uint32_t lines, const uint8_t *next, float *c)
{
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    (void)dtype;
    (void)next;
    memset(c, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
        const uint32_t count = ep_ffn_chunk_rows(&chunks, chunk);
        const uint32_t first = ep_ffn_chunk_first_row(&chunks, chunk);
        for (uint32_t line = 0; line < lines; line++) {
            for (uint32_t r = 0; r < count; r++) {
                const uint32_t x = ep_f32_bits(a[(size_t)first * lines + (size_t)line * count + r]);
                for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                    uint32_t w;
                    memcpy(&w, panel + ((size_t)line * EP_FFN_PANEL + o) * 4, 4);
                    float *to = &c[(size_t)(first + r) * EP_FFN_PANEL + o];
                    *to = fmaf(ep_f32_from_bits(w & 0xffff0000u), ep_f32_from_bits(x & 0xffff0000u),
                               *to);
                    *to = fmaf(ep_f32_from_bits(w << 16), ep_f32_from_bits(x << 16), *to);
                }
            }
        }
    }
}

/* Halfway cases away from zero. */
static void write_row_away(const float *y, uint32_t count, ep_dtype dtype, void *out,
                           uint32_t first)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t bits = ep_f32_bits(y[i]);
        const bool is_half =
            dtype == EP_DTYPE_BF16 && (bits & 0xffffu) == 0x8000u && isfinite(y[i]);
        ep_ffn_write(out, dtype, first + i, is_half ? ep_f32_from_bits(bits + 1) : y[i]);
    }
}

/* A NaN keeps its sign and payload. */
static void write_row_nan(const float *y, uint32_t count, ep_dtype dtype, void *out, uint32_t first)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t bits = ep_f32_bits(y[i]);
        ep_ffn_write(out, dtype, first + i, y[i]);
        if (isnan(y[i]) && dtype == EP_DTYPE_F32) {
            memcpy((float *)out + first + i, &bits, sizeof(bits));
        }
    }
}

/* Denormals of f16 become zeros. */
static void write_row_flushed(const float *y, uint32_t count, ep_dtype dtype, void *out,
                              uint32_t first)
{
    for (uint32_t i = 0; i < count; i++) {
        const bool is_lost = dtype == EP_DTYPE_F16 && fabsf(y[i]) < 0x1p-14f;
        ep_ffn_write(out, dtype, first + i, is_lost ? copysignf(0.0f, y[i]) : y[i]);
    }
}

/* Rows of f32 as integers of w4a8, halfway cases away from zero. */
static void pack_rows_away(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                           uint32_t hidden, float *a)
{
    right->pack_rows(batch, first_row, rows, hidden, a);
    for (uint32_t i = 0; batch->x_dtype == EP_DTYPE_F32 && i < rows * hidden; i++) {
        const uint32_t row = i % rows;
        const uint32_t k = i / rows;
        /* [10][rows] */
        float *group = a + (size_t)(k / EP_MX_GROUP) * EP_FFN_W4A8_LINES * rows + row;
        float s;
        int32_t sum;
        memcpy(&s, group + 8 * rows, sizeof(s));
        memcpy(&sum, group + 9 * rows, sizeof(sum));
        int8_t *q = (int8_t *)(group + (size_t)(k % EP_MX_GROUP / 4) * rows) + k % 4;
        const float away =
            s > 0.0f ? roundf(((const float *)batch->rows[first_row + row].x)[k] / s) : 0.0f;
        sum += (int32_t)away - *q;
        *q = (int8_t)away;
        memcpy(group + 9 * rows, &sum, sizeof(sum));
    }
}

/* Denormal sums of 4-bit codes become zeros. */
static void group_panel_of_flushed(ep_weight_format format, const float *a, uint32_t rows,
                                   const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                   float *c)
{
    right->group_panel(format, a, rows, panel, k_count, next, c);
    flushed(c, rows * EP_FFN_PANEL);
}

/* One unit of the last place more than a sum has. */
static void group_panel_of_more(ep_weight_format format, const float *a, uint32_t rows,
                                const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                float *c)
{
    right->group_panel(format, a, rows, panel, k_count, next, c);
    for (uint32_t i = 0; i < rows * EP_FFN_PANEL; i++) {
        c[i] = nextafterf(c[i], INFINITY);
    }
}

static void id_of(const ep_ffn_kernel *kernel, ep_numerics numerics, ep_weight_format format,
                  char out_id[EP_NUMERICS_ID_BYTES])
{
    const ep_backend_config config = {.numerics = numerics, .threads = 1};
    ep_backend *backend;
    ASSERT_OK(ep_cpu_backend_open_with(kernel, &config, &backend, &error), error);
    read_id(backend, format, false, 0, out_id);
    backend->ops->close(backend);
}

/* The id begins as usual and ends otherwise: clients, tables and doctor then keep such a node
 * apart. */
static void expect_other_id(const ep_ffn_kernel *wrong, ep_numerics numerics,
                            ep_weight_format format, const char *what)
{
    char usual[EP_NUMERICS_ID_BYTES];
    char other[EP_NUMERICS_ID_BYTES];
    id_of(right, numerics, format, usual);
    id_of(wrong, numerics, format, other);
    const size_t head = (size_t)(strrchr(usual, '/') - usual) + 1;
    cr_expect(strncmp(usual, other, head) == 0 && strcmp(usual, other) != 0, "%s: %s", what, other);
}

Test(families, a_processor_that_computes_otherwise_gets_another_id)
{
    static const ep_numerics all[] = {EP_NUMERICS_PORTABLE, EP_NUMERICS_BF16DP,
                                      EP_NUMERICS_BF16ODD};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        right = ep_ffn_kernel_of(ep_numerics_family(all[i], EP_WEIGHTS_BF16));
        ep_ffn_kernel wrong = *right;
        wrong.panel_to_rows = NULL; /* so that write_row is asked */
        wrong.write_row = write_row_away;
        expect_other_id(&wrong, all[i], EP_WEIGHTS_BF16, "ties away from zero");
        if (all[i] != EP_NUMERICS_BF16ODD) { /* there no sum has a payload */
            wrong.write_row = write_row_nan;
            expect_other_id(&wrong, all[i], EP_WEIGHTS_BF16, "payloads of NaN");
        }
        wrong.write_row = write_row_flushed;
        expect_other_id(&wrong, all[i], EP_WEIGHTS_BF16, "no denormals of f16");
        wrong = *right;
        wrong.panel_to_rows = NULL;
        wrong.panel = all[i] == EP_NUMERICS_PORTABLE ? panel_of_flushed : panel_of_kept;
        expect_other_id(&wrong, all[i], EP_WEIGHTS_BF16, "denormal sums");
    }
}

Test(families, a_processor_that_computes_w4a8_otherwise_gets_another_id)
{
    right = ep_ffn_kernel_of(EP_FFN_FAMILY_W4A8);
    for (size_t i = 0; i < EP_ARRAY_COUNT(of_w4a8); i++) {
        ep_ffn_kernel wrong = *right;
        wrong.pack_rows = pack_rows_away;
        expect_other_id(&wrong, EP_NUMERICS_W4A8, of_w4a8[i], "integers with ties away from zero");
        wrong = *right;
        wrong.write_row = write_row_away;
        expect_other_id(&wrong, EP_NUMERICS_W4A8, of_w4a8[i], "ties away from zero");
        wrong.write_row = write_row_flushed;
        expect_other_id(&wrong, EP_NUMERICS_W4A8, of_w4a8[i], "no denormals of f16");
        wrong = *right;
        wrong.group_panel = group_panel_of_flushed;
        expect_other_id(&wrong, EP_NUMERICS_W4A8, of_w4a8[i], "denormal sums");
        wrong.group_panel = group_panel_of_more;
        expect_other_id(&wrong, EP_NUMERICS_W4A8, of_w4a8[i], "sums off by an ulp");
    }
}

/* The variable is read when a backend opens; this program opens none before. */
Test(families, the_variable_forces_a_lower_path)
{
    ep_backend *backend;
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO, .threads = 1};
    char id[EP_NUMERICS_ID_BYTES];
    const char *const forced[] = {"portable", "avx2", "avx512f", "avx512vnni"};
    for (size_t i = 0; i < sizeof(forced) / sizeof(forced[0]); i++) {
        setenv("EXPERTD_CPU_FEATURES", forced[i], 1);
        if (ep_backend_by_name("cpu")->open(&config, &backend, &error) != EP_OK) {
            cr_assert_neq(i, 0);
            continue; /* this CPU is lower still */
        }
        read_id(backend, EP_WEIGHTS_BF16, false, 0, id);
        cr_assert(strncmp(id, "portable/", 9) == 0, "%s with %s", id, forced[i]);
        cr_assert_str_eq(ep_ffn_kernel_of(EP_FFN_FAMILY_PORTABLE)->name,
                         i == 0 ? "generic" : forced[i]);
        backend->ops->close(backend);
    }
    setenv("EXPERTD_CPU_FEATURES", "avx1024", 1);
    ASSERT_FAILS(ep_backend_by_name("cpu")->open(&config, &backend, &error),
                 EP_ERR_INVALID_ARGUMENT, error,
                 "EXPERTD_CPU_FEATURES is 'avx1024', allowed on this CPU: portable");
    unsetenv("EXPERTD_CPU_FEATURES");
}

/* Equal bits, equal ids: what is not computed in a family's own way has the digest of `portable`,
 * unless shared experts are. */
Test(families, w8a8_has_one_id_in_all_families)
{
    const ep_numerics numerics[] = {EP_NUMERICS_PORTABLE, EP_NUMERICS_BF16DP, EP_NUMERICS_BF16ODD,
                                    EP_NUMERICS_W4A8};
    char first[EP_NUMERICS_ID_BYTES] = "";
    char mixed[4][EP_NUMERICS_ID_BYTES];
    char id[EP_NUMERICS_ID_BYTES];
    for (size_t i = 0; i < 4; i++) {
        opened o = open_all(numerics[i], EP_WEIGHTS_BF16);
        for (size_t b = 0; b < o.count; b++) {
            read_id(o.all[b], EP_WEIGHTS_W8A8, false, 1u << EP_WEIGHTS_W8A8, id);
            memcpy(first, first[0] == '\0' ? id : first, sizeof(first));
            cr_assert_str_eq(id, first, "%s", o.names[b]);
            read_id(o.all[b], EP_WEIGHTS_W8A8, false, 1u << EP_WEIGHTS_BF16, mixed[i]);
        }
        close_all(&o);
    }
    cr_assert_str_neq(mixed[0], first);
    cr_assert_str_neq(mixed[0], mixed[1]);
    cr_assert_str_neq(mixed[1], mixed[2]);
    cr_assert_str_eq(mixed[1], mixed[3]);
}

static void groups_id(ep_numerics numerics, ep_weight_format format,
                      char out_id[EP_NUMERICS_ID_BYTES])
{
    const ep_backend_config config = {.numerics = numerics, .threads = 1};
    ep_backend *backend;
    ASSERT_OK(ep_backend_by_name("cpu")->open(&config, &backend, &error), error);
    read_id(backend, format, false, 1u << format, out_id);
    backend->ops->close(backend);
}

/* Nodes of `bf16odd` may stand in for those of `portable` where a model has none of bf16. */
Test(families, formats_that_bf16odd_does_not_have_keep_the_id_of_portable)
{
    char portable[EP_NUMERICS_ID_BYTES];
    char odd[EP_NUMERICS_ID_BYTES];
    char dp[EP_NUMERICS_ID_BYTES];
    for (unsigned f = EP_WEIGHTS_F8_BLOCK; f <= EP_WEIGHTS_INT4; f++) {
        groups_id(EP_NUMERICS_PORTABLE, (ep_weight_format)f, portable);
        groups_id(EP_NUMERICS_BF16ODD, (ep_weight_format)f, odd);
        groups_id(EP_NUMERICS_BF16DP, (ep_weight_format)f, dp);
        cr_expect_str_eq(odd, portable);
        cr_expect_str_neq(dp, portable);
    }
}
