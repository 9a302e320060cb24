/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised rows: bf16 elements per second of each form beside memcpy of the same rows in the same
 * rounds, and the errors each form makes on normal rows and on rows with outliers (1 element of 100
 * is 50 times as large).
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/numeric.h"
#include "base/random.h"
#include "bench/bench_report.h"
#include "moe/convert.h"
#include "moe/quantize.h"

enum { HIDDEN = 7168, ROWS = 64, ROUNDS = 41, FORMS = 6 };

static uint16_t x[ROWS][HIDDEN];
static uint16_t copy[ROWS][HIDDEN];
static int8_t codes[ROWS][HIDDEN];
static float scales[ROWS][HIDDEN / EP_QUANT_BLOCK_F8];
static uint16_t block_scales[ROWS][HIDDEN / EP_QUANT_BLOCK_I8];
static float wide[HIDDEN];

static const char *const form_names[FORMS] = {"int8 row, quantise",   "int8 row, back",
                                              "int8 per 8, quantise", "int8 per 8, back",
                                              "fp8, quantise",        "fp8, back"};

static void run_form(int form, int r)
{
    switch (form) {
    case 0:
        scales[r][0] = ep_row_quantize_i8(x[r], EP_DTYPE_BF16, NULL, HIDDEN, codes[r]);
        break;
    case 1:
        ep_row_dequantize_i8(codes[r], scales[r][0], HIDDEN, wide);
        break;
    case 2:
        ep_row_quantize_i8_blocks(x[r], EP_DTYPE_BF16, HIDDEN, codes[r], block_scales[r]);
        break;
    case 3:
        ep_row_dequantize_i8_blocks(codes[r], block_scales[r], EP_DTYPE_BF16, HIDDEN, wide);
        break;
    case 4:
        ep_row_quantize_f8(x[r], EP_DTYPE_BF16, HIDDEN, (uint8_t *)codes[r], scales[r]);
        break;
    default: /* by itself nobody does: kernels widen them as they pack */
        for (int i = 0; i < HIDDEN; i++) {
            wide[i] =
                ep_f8e4m3_to_f32((uint8_t)codes[r][i]) * scales[r][(unsigned)i / EP_QUANT_BLOCK_F8];
        }
        break;
    }
}

/* Sum of 12 uniform numbers less 6: normal enough, and the same everywhere. */
static float draw_normal(uint64_t *state)
{
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) {
        sum += (float)(ep_splitmix64(state) >> 40) * 0x1p-24f;
    }
    return sum;
}

static void fill(int has_outliers)
{
    uint64_t state = 7;
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < HIDDEN; i++) {
            float value = draw_normal(&state);
            x[r][i] = ep_f32_to_bf16(
                has_outliers && ep_splitmix64(&state) % 100 == 0 ? 50.0f * value : value);
        }
    }
}

/* Of the round trip; x is what bf16 holds. */
static void report_error(const char *rows, int form)
{
    double error = 0.0;
    double power = 0.0;
    double most = 0.0;
    double relative = 0.0;
    for (int r = 0; r < ROWS; r++) {
        float amax = 0.0f;
        double row_most = 0.0;
        run_form(form, r);
        run_form(form + 1, r);
        for (int i = 0; i < HIDDEN; i++) {
            float value = ep_bf16_to_f32(x[r][i]);
            double off = fabs((double)wide[i] - (double)value);
            error += off * off;
            power += (double)value * (double)value;
            row_most = off > row_most ? off : row_most;
            amax = fabsf(value) > amax ? fabsf(value) : amax;
        }
        most = row_most > most ? row_most : most;
        relative = row_most / (double)amax > relative ? row_most / (double)amax : relative;
    }
    printf("error %-9s %-22.*s relative RMS %.5f  max %.5f  max of the row's greatest %.5f\n", rows,
           (int)(strchr(form_names[form], ',') - form_names[form]), form_names[form],
           sqrt(error / power), most, relative);
}

int main(int argc, char **argv)
{
    bench_report *report = bench_report_create("quantised rows, bf16, H 7168");
    static double ratio[FORMS][ROUNDS];
    static double rate[FORMS][ROUNDS];
    static double copy_rate[ROUNDS];
    for (int has_outliers = 0; has_outliers < 2; has_outliers++) {
        fill(has_outliers);
        for (int form = 0; form < FORMS; form += 2) {
            report_error(has_outliers ? "outliers" : "normal", form);
        }
    }
    fill(0);
    for (int round = 0; round < ROUNDS; round++) {
        double begin = bench_now_us();
        for (int r = 0; r < ROWS; r++) {
            memcpy(copy[r], x[r], sizeof(x[r]));
            __asm__ volatile("" ::"r"(copy[r]) : "memory");
        }
        copy_rate[round] = (double)sizeof(x) / (bench_now_us() - begin) * 1e-3;
        for (int form = 0; form < FORMS; form++) {
            begin = bench_now_us();
            for (int r = 0; r < ROWS; r++) {
                run_form(form, r);
                __asm__ volatile("" ::"r"(wide) : "memory");
            }
            rate[form][round] = (double)sizeof(x) / (bench_now_us() - begin) * 1e-3;
            ratio[form][round] = rate[form][round] / copy_rate[round];
        }
    }
    double copied = bench_quantile(copy_rate, ROUNDS, 0.5);
    for (int form = 0; form < FORMS; form++) {
        bench_row row =
            bench_value(bench_quantile(rate[form], ROUNDS, 0.5), "GB/s of bf16", BENCH_HIGHER, NAN);
        row.limit = copied;
        row.ratio = bench_quantile(ratio[form], ROUNDS, 0.5);
        bench_report_add(report, &row, "%s", form_names[form]);
    }
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
