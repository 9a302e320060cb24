/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Trains the demo model from scratch and writes its checkpoint: AdamW, warm-up and cosine decay,
 * one thread. The same seed, steps, text, compiler and machine give the same bytes. `retrain`
 * builds and runs it.
 */
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checkpoint.h"
#include "model.h"

#define RATE_MAX 3e-3
#define RATE_MIN 1e-4
#define BETA1 0.9f
#define BETA2 0.95f
#define WEIGHT_DECAY 0.1f
#define GRADIENT_NORM_MAX 1.0f

enum { WARM_UP_STEPS = 100, REPORT_EVERY = 100, WINDOW = MODEL_CONTEXT + 1 };

struct text {
    uint8_t *bytes;
    size_t size;
};

static uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static float random_normal(uint64_t *state)
{
    double u = (double)((random_next(state) >> 11) + 1) * 0x1p-53;
    double v = (double)(random_next(state) >> 11) * 0x1p-53;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

static struct text read_text(const char *path)
{
    struct text text = {NULL, 0};
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        fprintf(stderr, "train: cannot read %s: %s\n", path, strerror(errno));
        exit(1);
    }
    long size = ftell(file);
    rewind(file);
    text.size = size > 0 ? (size_t)size : 0;
    text.bytes = malloc(text.size + 1);
    if (text.size <= (size_t)MODEL_SEQUENCES * WINDOW || text.bytes == NULL ||
        fread(text.bytes, 1, text.size, file) != text.size) {
        fprintf(stderr, "train: %s: needs more than %d readable bytes, has %zu\n", path,
                MODEL_SEQUENCES * WINDOW, text.size);
        exit(1);
    }
    fclose(file);
    return text;
}

static void initialise(struct weights *weights, uint64_t *random)
{
    static struct tensor_info tensors[MODEL_TENSORS];
    weights_list(weights, tensors);
    for (size_t i = 0; i < MODEL_TENSORS; i++) {
        const struct tensor_info *t = &tensors[i];
        float *data = weights->flat + (t->data - weights->flat);
        float width = 1.0f / sqrtf((float)t->columns);
        if (strstr(t->name, "o_proj") != NULL || strstr(t->name, ".w2.") != NULL) {
            /* the residual stream adds up 2 * layers of these */
            width /= sqrtf(2.0f * MODEL_LAYERS);
        }
        for (size_t j = 0; j < t->rows * (t->columns > 0 ? t->columns : 1); j++) {
            data[j] = t->columns > 0 ? width * random_normal(random) : 1.0f;
        }
    }
}

static double learning_rate(size_t step, size_t steps)
{
    if (step < WARM_UP_STEPS) {
        return RATE_MAX * (double)(step + 1) / WARM_UP_STEPS;
    }
    double done = (double)(step - WARM_UP_STEPS) /
                  (double)(steps > WARM_UP_STEPS ? steps - WARM_UP_STEPS : 1);
    return RATE_MIN + 0.5 * (RATE_MAX - RATE_MIN) * (1.0 + cos(3.141592653589793 * done));
}

struct adam {
    float *mean;
    float *square;
    float *decay; /* per weight: WEIGHT_DECAY for matrices, 0 for norms */
};

static struct adam adam_create(const struct weights *weights)
{
    static struct tensor_info tensors[MODEL_TENSORS];
    struct adam adam = {
        calloc(weights->count, sizeof(float)),
        calloc(weights->count, sizeof(float)),
        calloc(weights->count, sizeof(float)),
    };
    if (adam.mean == NULL || adam.square == NULL || adam.decay == NULL) {
        fprintf(stderr, "train: no memory\n");
        exit(1);
    }
    weights_list(weights, tensors);
    for (size_t i = 0; i < MODEL_TENSORS; i++) {
        for (size_t j = 0; j < tensors[i].rows * tensors[i].columns; j++) {
            adam.decay[tensors[i].data - weights->flat + (ptrdiff_t)j] = WEIGHT_DECAY;
        }
    }
    return adam;
}

static void adam_destroy(struct adam *adam)
{
    free(adam->mean);
    free(adam->square);
    free(adam->decay);
}

static void adam_step(struct adam *adam, struct weights *weights, const struct weights *grads,
                      size_t step, float rate)
{
    double norm = 0.0;
    for (size_t i = 0; i < grads->count; i++) {
        norm += (double)grads->flat[i] * grads->flat[i];
    }
    norm = sqrt(norm);
    float clip = norm > GRADIENT_NORM_MAX ? (float)(GRADIENT_NORM_MAX / norm) : 1.0f;
    float fix1 = 1.0f / (1.0f - powf(BETA1, (float)(step + 1)));
    float fix2 = 1.0f / (1.0f - powf(BETA2, (float)(step + 1)));
    for (size_t i = 0; i < grads->count; i++) {
        float g = grads->flat[i] * clip;
        adam->mean[i] = BETA1 * adam->mean[i] + (1.0f - BETA1) * g;
        adam->square[i] = BETA2 * adam->square[i] + (1.0f - BETA2) * g * g;
        float update = adam->mean[i] * fix1 / (sqrtf(adam->square[i] * fix2) + 1e-8f);
        weights->flat[i] -= rate * (update + adam->decay[i] * weights->flat[i]);
    }
}

/* Bits per byte over whole windows, in order, each window's first byte being context only. */
static double evaluate(const struct weights *weights, const struct text *text, size_t batches_max)
{
    static uint8_t batch[MODEL_SEQUENCES][WINDOW];
    size_t batches = (text->size - 1) / MODEL_TOKENS;
    batches = batches < batches_max ? batches : batches_max;
    double loss = 0.0;
    for (size_t b = 0; b < batches; b++) {
        for (size_t s = 0; s < MODEL_SEQUENCES; s++) {
            memcpy(batch[s], text->bytes + (b * MODEL_SEQUENCES + s) * MODEL_CONTEXT, WINDOW);
        }
        loss += model_loss(weights, batch[0], NULL);
    }
    return loss / (double)batches / log(2.0);
}

static void draw_batch(const struct text *text, uint64_t *random,
                       uint8_t batch[MODEL_SEQUENCES][WINDOW])
{
    for (size_t s = 0; s < MODEL_SEQUENCES; s++) {
        memcpy(batch[s], text->bytes + random_next(random) % (text->size - WINDOW), WINDOW);
    }
}

static double cpu_seconds(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

/* Prints, for one weight of each kind, the written gradient beside a central difference of the
 * loss. */
static void check_gradient(struct weights *weights, struct weights *grads, const struct text *text,
                           uint64_t *random)
{
    static uint8_t batch[MODEL_SEQUENCES][WINDOW];
    static struct tensor_info tensors[MODEL_TENSORS];
    draw_batch(text, random, batch);
    model_loss(weights, batch[0], grads);
    weights_list(weights, tensors);
    for (size_t i = 0; i < MODEL_TENSORS; i += i < 12 || i > MODEL_TENSORS - 3 ? 1 : 23) {
        size_t at = (size_t)(tensors[i].data - weights->flat);
        size_t size = tensors[i].rows * (tensors[i].columns > 0 ? tensors[i].columns : 1);
        size_t best = at;
        for (size_t j = at; j < at + size; j++) {
            best = fabsf(grads->flat[j]) > fabsf(grads->flat[best]) ? j : best;
        }
        float kept = weights->flat[best];
        float step = 2e-3f;
        weights->flat[best] = kept + step;
        float above = model_loss(weights, batch[0], NULL);
        weights->flat[best] = kept - step;
        float below = model_loss(weights, batch[0], NULL);
        weights->flat[best] = kept;
        printf("%-60s written % .6f difference % .6f\n", tensors[i].name, (double)grads->flat[best],
               (double)((above - below) / (2.0f * step)));
    }
}

static void train(struct weights *weights, struct weights *grads, const struct text *text,
                  size_t steps, uint64_t *random)
{
    static uint8_t batch[MODEL_SEQUENCES][WINDOW];
    struct adam adam = adam_create(weights);
    double mean = 8.0;
    for (size_t step = 0; step < steps; step++) {
        draw_batch(text, random, batch);
        memset(grads->flat, 0, grads->count * sizeof(float));
        double bits = model_loss(weights, batch[0], grads) / log(2.0);
        adam_step(&adam, weights, grads, step, (float)learning_rate(step, steps));
        mean += (bits - mean) / (step < 20 ? (double)step + 1.0 : 100.0);
        if (step % REPORT_EVERY == 0 || step + 1 == steps) {
            printf("step %5zu  bytes %9zu  train %.3f bits/byte  balance %.2f  cpu %.0f s\n",
                   step + 1, (step + 1) * MODEL_TOKENS, mean,
                   (double)model_balance() / MODEL_LAYERS, cpu_seconds());
            fflush(stdout);
        }
    }
    adam_destroy(&adam);
}

static int usage(void)
{
    fprintf(stderr, "usage: train --train FILE --validation FILE --out DIR [--steps N] [--seed N] "
                    "[--check-gradient]\n");
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"train", required_argument, NULL, 't'},
        {"validation", required_argument, NULL, 'v'},
        {"out", required_argument, NULL, 'o'},
        {"steps", required_argument, NULL, 'n'},
        {"seed", required_argument, NULL, 's'},
        {"check-gradient", no_argument, NULL, 'c'},
        {NULL, 0, NULL, 0},
    };
    const char *train_path = NULL, *validation_path = NULL, *out = NULL;
    size_t steps = 6000;
    uint64_t random = 1;
    bool check = false;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 't':
            train_path = optarg;
            break;
        case 'v':
            validation_path = optarg;
            break;
        case 'o':
            out = optarg;
            break;
        case 'n':
            steps = strtoul(optarg, NULL, 10);
            break;
        case 's':
            random = strtoull(optarg, NULL, 10);
            break;
        case 'c':
            check = true;
            break;
        default:
            return usage();
        }
    }
    if (train_path == NULL || validation_path == NULL || (out == NULL && !check) || steps == 0) {
        return usage();
    }

    struct text text = read_text(train_path), validation = read_text(validation_path);
    struct weights weights, grads;
    weights_create(&weights);
    weights_create(&grads);
    initialise(&weights, &random);
    printf("weights %zu  train bytes %zu  validation bytes %zu  steps %zu\n", weights.count,
           text.size, validation.size, steps);
    int result = 0;
    if (check) {
        check_gradient(&weights, &grads, &text, &random);
    } else {
        train(&weights, &grads, &text, steps, &random);
        checkpoint_round(&weights);
        printf("bf16 weights: train %.3f bits/byte  validation %.3f bits/byte  cpu %.0f s\n",
               evaluate(&weights, &text, 75), evaluate(&weights, &validation, SIZE_MAX),
               cpu_seconds());
        result = checkpoint_write(&weights, out) == 0 ? 0 : 1;
    }
    weights_destroy(&weights);
    weights_destroy(&grads);
    free(text.bytes);
    free(validation.bytes);
    return result;
}
