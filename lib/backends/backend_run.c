/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs jobs with rows in host memory on a backend with memory of its own: gathers rows in, runs a
 * job on the copies, scatters rows out. One block per job: inputs first, then outputs.
 */
#include <stdlib.h>
#include <string.h>

#include "backends/backend.h"
#include "backends/host_common.h"
#include "base/check.h"

#define STAGE_ALIGN 64

typedef struct {
    ep_backend *backend;
    ep_job *job;   /* the caller's */
    ep_job staged; /* its rows are in memory */
    ep_backend_memory *memory;
    size_t x_row_bytes;
    size_t out_row_bytes;
    size_t out_offset;
    const void **x_rows;     /* [rows] host */
    void **out_rows;         /* [rows] host */
    ep_job_row *staged_rows; /* [rows] addresses in memory */
} staging;

static void staging_destroy(staging *s)
{
    if (s->memory != NULL) {
        s->backend->ops->memory_free(s->backend, s->memory);
    }
    free(s->x_rows);
    free(s->out_rows);
    free(s->staged_rows);
    free(s);
}

/* Ends every staged job that ep_backend_run accepted. */
static void finish(void *arg, ep_err result)
{
    staging *s = arg;
    ep_job *job = s->job;
    staging_destroy(s);
    job->done(job, result);
}

static void job_ran(ep_job *staged, ep_err result)
{
    staging *s = staged->arg;
    if (result == EP_OK) {
        result = s->backend->ops->copy_out(s->backend, s->memory, s->out_offset, s->out_rows,
                                           s->out_row_bytes, staged->rows_count, finish, s);
        if (result == EP_OK) {
            return;
        }
    }
    finish(s, result);
}

static void copied_in(void *arg, ep_err result)
{
    staging *s = arg;
    if (result == EP_OK) {
        result = s->backend->ops->submit(s->backend, &s->staged);
        if (result == EP_OK) {
            return;
        }
    }
    finish(s, result);
}

/* Lists the host rows and their places in the block. */
static void fill_rows(staging *s)
{
    uint8_t *base = s->backend->ops->memory_address(s->memory);
    for (uint32_t r = 0; r < s->job->rows_count; r++) {
        const ep_job_row *row = &s->job->rows[r];
        s->x_rows[r] = row->x;
        s->out_rows[r] = row->out;
        s->staged_rows[r] = *row;
        s->staged_rows[r].x = base + r * s->x_row_bytes;
        s->staged_rows[r].out = base + s->out_offset + r * s->out_row_bytes;
    }
}

static ep_err staging_create(ep_backend *backend, ep_job *job, staging **out_staging)
{
    staging *s = calloc(1, sizeof(*s));
    if (s == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    s->backend = backend;
    s->job = job;
    s->x_row_bytes = job->weights->hidden * ep_dtype_bytes(job->x_dtype);
    s->out_row_bytes = job->weights->hidden * ep_dtype_bytes(job->out_dtype);
    s->out_offset = ep_align_up(s->x_row_bytes * job->rows_count, STAGE_ALIGN);
    s->x_rows = malloc(job->rows_count * sizeof(*s->x_rows));
    s->out_rows = malloc(job->rows_count * sizeof(*s->out_rows));
    s->staged_rows = malloc(job->rows_count * sizeof(*s->staged_rows));
    ep_err err = EP_ERR_NO_MEMORY;
    if (s->x_rows != NULL && s->out_rows != NULL && s->staged_rows != NULL) {
        err = backend->ops->memory_alloc(
            backend, s->out_offset + s->out_row_bytes * job->rows_count, &s->memory);
    }
    if (err != EP_OK) {
        staging_destroy(s);
        return err;
    }
    fill_rows(s);
    s->staged = *job;
    s->staged.rows = s->staged_rows;
    s->staged.done = job_ran;
    s->staged.arg = s;
    *out_staging = s;
    return EP_OK;
}

ep_err ep_backend_run(ep_backend *backend, ep_job *job)
{
    if (backend->ops->memory == EP_MEMORY_HOST) {
        return backend->ops->submit(backend, job);
    }
    ep_err err = ep_job_check(job);
    if (err != EP_OK) {
        return err;
    }
    staging *s = NULL;
    err = staging_create(backend, job, &s);
    if (err != EP_OK) {
        return err;
    }
    err = backend->ops->copy_in(backend, s->memory, 0, s->x_rows, s->x_row_bytes, job->rows_count,
                                copied_in, s);
    if (err != EP_OK) {
        staging_destroy(s);
    }
    return err;
}
