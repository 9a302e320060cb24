/* SPDX-License-Identifier: Apache-2.0 */
/* Experts of one shape in the cpu backend, and passes over them: a job per expert, all submitted at
 * once. */
#ifndef EP_BENCH_FFN_EXPERTS_H
#define EP_BENCH_FFN_EXPERTS_H

#include <pthread.h>

#include "backends/cpu/cpu_backend.h"
#include "bench/ffn_case.h"

/* The cpu backend. Ends the program when that fails. */
ep_backend *ffn_backend_open(ep_numerics numerics, uint32_t threads);
/* The numerics id of a format. */
void ffn_backend_id(ep_backend *backend, ep_weight_format format,
                    char out_id[EP_NUMERICS_ID_BYTES]);

typedef struct ffn_experts {
    ep_backend *backend;
    ep_backend_weights **weights; /* [count] */
    ffn_segment *segments;        /* [count] their memory */
    uint32_t count;
    ffn_probe probe;
} ffn_experts;

/* c->experts of them, the same values in memory of their own. Ends the program when that fails. */
void ffn_experts_load(ffn_experts *experts, ep_backend *backend, const ffn_case *c);
void ffn_experts_unload(ffn_experts *experts);

typedef struct ffn_pass {
    const ffn_experts *experts;
    uint32_t jobs_count;
    ep_job *jobs;     /* of experts that have rows */
    ep_job_row *rows; /* of all jobs, one job after the other */
    uint16_t *x;      /* [rows][H] bf16 */
    uint16_t *y;
    pthread_mutex_t lock;
    pthread_cond_t all_done;
    uint32_t pending;
    double end_us;
    uint64_t idle_end_ns;
    ep_err err;
} ffn_pass;

/* rows[e]: of expert e, 0 none; count of them. Row r of a job is ffn_case_input(r). */
void ffn_pass_open(ffn_pass *pass, const ffn_experts *experts, uint32_t hidden,
                   const uint32_t *rows, uint32_t count);
void ffn_pass_close(ffn_pass *pass);
/* Microseconds from the first submit to the last done(). out_idle_us: of all threads together in
 * that time; NULL allowed. */
double ffn_pass_run(ffn_pass *pass, double *out_idle_us);

#endif
