/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs one MoE layer of a checkpoint on a batch from a safetensors file, with the oracle.
 *     in:  x [T,H] bf16|f16|f32|i8 (i8 with x_scales [T] f32), expert_ids [T,K] i32|i64,
 *          expert_scales [T,K] f32|bf16
 *     out: y [T,H], or [T,K,H] uncombined
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref_checkpoint.h"
#include "ref_quant.h"

struct request {
    const char *model, *in, *out;
    size_t layer;
    enum ref_family family; /* as a node's --numerics */
    enum ref_quant quant;   /* as a node's weight_quant */
    int wire, out_dtype;    /* enum ref_dtype; -1: x's own type, bf16 for int8 */
    struct ref_batch batch;
};

static void usage(void)
{
    fprintf(
        stderr,
        "usage: ref_forward --model DIR --layer L --in FILE --out FILE [--wire bf16|f16|f32] "
        "[--out-dtype bf16|f16|f32]\n"
        "                   [--uncombined] [--weight-on-input] [--no-shared] [--allow-duplicates]\n"
        "                   [--nan pass|reject|zero|mean] [--dispatch-quant plain|int8|fp8] "
        "[--combine-quant plain|int8]\n"
        "                   [--numerics auto|portable|bf16dp|bf16odd|w4a8|ID] "
        "[--weight-quant none|int8-g32|int4-g32|mxfp4|q4_k]\n"
        "defaults: wire bf16, out-dtype that of x (bf16 for int8), numerics auto (as a daemon on "
        "this CPU)\n");
    exit(2);
}

static int parse_word(const char *text, const char *const *words, int count)
{
    for (int i = 0; i < count; i++) {
        if (strcmp(text, words[i]) == 0) {
            return i;
        }
    }
    fprintf(stderr, "ref_forward: %s is not an allowed value\n", text);
    usage();
    return -1;
}

static struct request parse(int argc, char **argv)
{
    static const struct option options[] = {
        {"model", required_argument, NULL, 'm'},
        {"layer", required_argument, NULL, 'l'},
        {"in", required_argument, NULL, 'i'},
        {"out", required_argument, NULL, 'o'},
        {"wire", required_argument, NULL, 'w'},
        {"out-dtype", required_argument, NULL, 'd'},
        {"uncombined", no_argument, NULL, 'u'},
        {"weight-on-input", no_argument, NULL, 'x'},
        {"no-shared", no_argument, NULL, 's'},
        {"allow-duplicates", no_argument, NULL, 'a'},
        {"nan", required_argument, NULL, 'n'},
        {"dispatch-quant", required_argument, NULL, 'q'},
        {"combine-quant", required_argument, NULL, 'c'},
        {"numerics", required_argument, NULL, 'f'},
        {"weight-quant", required_argument, NULL, 'g'},
        {NULL, 0, NULL, 0},
    };
    /* as enum ref_dtype */
    static const char *const dtypes[] = {"bf16", "f16", "f32"};
    static const char *const policies[] = {"pass", "reject", "zero", "mean"}; /* as enum ref_nan */
    static const char *const quants[] = {"plain", "int8", "fp8"};
    /* as enum ref_quant */
    static const char *const weights[] = {"none", "int8-g32", "int4-g32", "mxfp4", "q4_k"};
    static const enum ref_dispatch dispatches[] = {REF_DISPATCH_PLAIN, REF_DISPATCH_INT8,
                                                   REF_DISPATCH_FP8};
    struct request request = {
        .wire = REF_BF16, .out_dtype = -1, .layer = SIZE_MAX, .family = ref_family_default()};
    char *end;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 'm':
            request.model = optarg;
            break;
        case 'i':
            request.in = optarg;
            break;
        case 'o':
            request.out = optarg;
            break;
        case 'l':
            request.layer = strtoul(optarg, &end, 10);
            if (end == optarg || *end != '\0') {
                usage();
            }
            break;
        case 'w':
            request.wire = parse_word(optarg, dtypes, 3);
            break;
        case 'd':
            request.out_dtype = parse_word(optarg, dtypes, 3);
            break;
        case 'n':
            request.batch.nan_policy = (enum ref_nan)parse_word(optarg, policies, 4);
            break;
        case 'q':
            request.batch.dispatch = dispatches[parse_word(optarg, quants, 3)];
            break;
        case 'c':
            request.batch.combine_int8 = parse_word(optarg, quants, 2) == 1;
            break;
        case 'f':
            if (!ref_family_parse(optarg, &request.family)) {
                fprintf(stderr, "ref_forward: %s is not a family\n", optarg);
                usage();
            }
            break;
        case 'g':
            request.quant = (enum ref_quant)parse_word(optarg, weights, 5);
            break;
        case 'u':
            request.batch.form = REF_UNCOMBINED;
            break;
        case 'x':
            request.batch.weight_on_input = true;
            break;
        case 's':
            request.batch.no_service_shared = true;
            break;
        case 'a':
            request.batch.allow_duplicates = true;
            break;
        default:
            usage();
        }
    }
    if (request.model == NULL || request.in == NULL || request.out == NULL ||
        request.layer == SIZE_MAX || optind != argc) {
        usage();
    }
    return request;
}

static struct ref_tensor need(const struct ref_file *file, const char *path, const char *name,
                              size_t rank)
{
    struct ref_tensor tensor;
    if (!ref_file_find(file, name, &tensor)) {
        ref_die("%s: no tensor %s", path, name);
    }
    if (tensor.rank != rank) {
        ref_die("%s: tensor %s has %zu dimensions, expected %zu", path, name, tensor.rank, rank);
    }
    return tensor;
}

/* Fills the batch from the file's tensors. Returns the row scales of int8 x, to be freed; else
 * NULL. */
static float *fill_batch(const struct ref_file *file, const char *path, size_t hidden,
                         struct ref_batch *batch)
{
    struct ref_tensor x = need(file, path, "x", 2);
    struct ref_tensor ids = need(file, path, "expert_ids", 2);
    struct ref_tensor scales = need(file, path, "expert_scales", 2);
    if (x.shape[1] != hidden) {
        ref_die("%s: x has %zu columns, the model's hidden size is %zu", path, x.shape[1], hidden);
    }
    if (ids.shape[0] != x.shape[0] || scales.shape[0] != x.shape[0] ||
        ids.shape[1] != scales.shape[1]) {
        ref_die("%s: x, expert_ids and expert_scales disagree on T or K", path);
    }
    if ((ids.dtype != REF_I32 && ids.dtype != REF_I64) ||
        (scales.dtype != REF_F32 && scales.dtype != REF_BF16) || x.dtype == REF_I32 ||
        x.dtype == REF_I64) {
        ref_die("%s: a tensor has a type that is not allowed for it", path);
    }
    batch->tokens = x.shape[0];
    batch->top_k = ids.shape[1];
    batch->x = x.data;
    batch->x_dtype = x.dtype;
    batch->ids = ids.data;
    batch->ids_dtype = ids.dtype;
    batch->scales = scales.data;
    batch->scales_dtype = scales.dtype;
    if (x.dtype != REF_I8) {
        return NULL;
    }
    struct ref_tensor row_scales = need(file, path, "x_scales", 1);
    if (row_scales.dtype != REF_F32 || row_scales.count != batch->tokens) {
        ref_die("%s: x_scales must be F32 [T]", path);
    }
    float *aligned = malloc((row_scales.count + 1) * sizeof(*aligned));
    if (aligned == NULL) {
        ref_die("no memory");
    }
    memcpy(aligned, row_scales.data, row_scales.count * sizeof(*aligned));
    batch->x_scales = aligned;
    return aligned;
}

int main(int argc, char **argv)
{
    static struct ref_checkpoint checkpoint;
    struct request request = parse(argc, argv);
    struct ref_batch *batch = &request.batch;
    struct ref_layer layer;
    struct ref_file file;
    char text[REF_TEXT_BYTES];

    ref_checkpoint_open(request.model, &checkpoint);
    ref_layer_load(&checkpoint, request.layer, &layer);
    ref_layer_set_family(&layer, request.family);
    ref_layer_quantize(&layer, request.quant, request.family);
    ref_file_open(request.in, &file);
    float *row_scales = fill_batch(&file, request.in, layer.hidden, batch);
    batch->wire_dtype = (enum ref_dtype)request.wire;
    if (request.out_dtype >= 0) {
        batch->out_dtype = (enum ref_dtype)request.out_dtype;
    } else {
        batch->out_dtype = batch->x_dtype == REF_I8 ? REF_BF16 : batch->x_dtype;
    }

    size_t shape[3] = {batch->tokens, batch->top_k, layer.hidden};
    size_t rank = 3;
    size_t rows = batch->tokens * batch->top_k;
    if (batch->form != REF_UNCOMBINED) {
        shape[1] = layer.hidden;
        rank = 2;
        rows = batch->tokens;
    }
    void *y = malloc(rows * layer.hidden * ref_dtype_bytes(batch->out_dtype) + 1);
    if (y == NULL) {
        ref_die("no memory for the result");
    }
    if (ref_layer_forward(&layer, batch, y, text) != REF_OK) {
        ref_die("%s", text);
    }
    ref_file_write(request.out, "y", batch->out_dtype, rank, shape, y);
    free(y);
    free(row_scales);
    ref_file_close(&file);
    ref_layer_free(&layer);
    ref_checkpoint_close(&checkpoint);
    return 0;
}
