/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pseudo-random expert with rows and the answers of the reference kernel, and a way to run rows
 * and wait. Answers are computed once for all rows: a row's bits may not depend on its company.
 */
#ifndef EP_TESTS_CONTRACT_BACKEND_EXPERT_FIXTURE_H
#define EP_TESTS_CONTRACT_BACKEND_EXPERT_FIXTURE_H

#include <pthread.h>

#include "backends/backend.h"

typedef struct expert_fixture {
    ep_expert_source source;
    ep_dtype x_dtype;
    ep_dtype out_dtype;
    bool weight_on_input;
    uint32_t rows_count;
    size_t out_row_bytes;
    ep_job_row *rows; /* out is NULL */
    uint8_t *want;    /* [rows_count] of out_row_bytes */
    double *allowed;  /* [rows_count][H] how far from want a value may be; NULL: not at all */
    void *memory[11];
} expert_fixture;

/* Types of rows and outputs, shared gate and input weights follow from the seed. dtype i8: weights
 * are w8a8. */
expert_fixture expert_fixture_make(uint64_t seed, uint32_t hidden, uint32_t inner,
                                   uint32_t rows_count, ep_dtype dtype);
/* The same by format. */
expert_fixture expert_fixture_make_of(uint64_t seed, uint32_t hidden, uint32_t inner,
                                      uint32_t rows_count, ep_weight_format format);
/* Another activation, and biases of a type that follows from the seed; with the answers of
 * `portable`. */
void expert_fixture_reshape(expert_fixture *fixture, uint64_t seed, ep_activation activation,
                            bool has_biases);
/* Puts the answers of another family in the place of those of `portable`. */
void expert_fixture_answer(expert_fixture *fixture, ep_ffn_family family);
void expert_fixture_free(expert_fixture *fixture);

/* Loads; a failed load ends the program with its text. */
ep_backend_weights *fixture_load(const expert_fixture *fixture, ep_backend *backend);

/* A job over rows [first, first + count) with its own outputs and guard bytes around each. */
typedef struct fixture_job {
    ep_job job;
    const expert_fixture *fixture;
    uint32_t first;
    ep_job_row *rows;
    uint8_t *out;
    size_t out_bytes;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    uint32_t done_count;
    ep_err result;
} fixture_job;

void fixture_job_init(fixture_job *job, const expert_fixture *fixture, ep_backend_weights *weights,
                      uint32_t first, uint32_t count);
/* May be initialised jobs only; not while submitted. */
void fixture_job_fini(fixture_job *job);
ep_err fixture_job_wait(fixture_job *job);
/* NULL when all rows and guards are as they must be, else what is wrong. Valid until the next call
 * from the same thread. */
const char *fixture_job_check(const fixture_job *job);
/* init, run, wait, check, fini. NULL when all is well. */
const char *fixture_run(const expert_fixture *fixture, ep_backend *backend,
                        ep_backend_weights *weights, uint32_t first, uint32_t count);
/* Loads, runs jobs of the last counts[] rows, and unloads. What is wrong ends the program, with
 * name and threads in its text. */
void fixture_run_counts(const expert_fixture *fixture, ep_backend *backend, const char *name,
                        uint32_t threads, const uint32_t *counts, size_t counts_count);

#endif
