/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A backend computes expert rows. This header is the porting guide: a device backend adds a folder
 * that fills one ep_backend_ops, and a line in backend_registry.c. tests/contract/backend runs over
 * it; nothing else changes.
 *
 * Everything is asynchronous: submit returns at once, done() comes from a thread of the backend. A
 * backend has its own memory kind. Host backends work directly on the caller's rows; each row has
 * its own pointer, so rows of many callers share one pass over the weights. Other backends get
 * copies: ep_backend_run (backend_run.c) gathers rows into the backend's memory with copy_in,
 * submits, and scatters with copy_out. Callers see no difference.
 */
#ifndef EP_BACKENDS_BACKEND_H
#define EP_BACKENDS_BACKEND_H

#include "base/error.h"
#include "base/expert_form.h"
#include "expertd/tensor.h"
#include "kernels/expert_ffn.h"
#include "moe/flow.h"
#include "observe/trace.h"

#define EP_BACKEND_API_VERSION 2
#define EP_NUMERICS_ID_BYTES 96
#define EP_JOB_ROWS_MAX 4096
#define EP_BACKEND_JOBS_MAX 65536 /* jobs submitted and not yet done, per backend */
#define EP_BACKEND_THREADS_MAX 512
#define EP_JOB_PATIENT ((uint64_t)1 << 63)
#define EP_PACKED_HEAD_BYTES 512
#define EP_BACKENDS_MAX 16 /* backends known to one process */
#define EP_BACKEND_DEVICES_MAX 64

typedef struct ep_backend ep_backend;
typedef struct ep_backend_weights ep_backend_weights; /* one expert in the backend's packed form */
typedef struct ep_backend_memory ep_backend_memory;   /* a block of the backend's own memory */
typedef struct ep_job ep_job;

/*
 * One row of a job, the same struct as in the kernels (kernels/expert_ffn.h):
 *     x [H] of job->x_dtype, any alignment; x_scale for i8; x_scales for f8e4m3
 *     input_weight for weight_on_input
 *     out [H] of job->out_dtype, aligned to its element
 * For ops->submit, x and out are addresses of the backend's memory kind; for ep_backend_run they
 * are host addresses. The array itself and x_scales are host memory.
 */
typedef ep_ffn_row ep_job_row;

/* One expert and its rows. Owned by the caller, who leaves it alone until done(). Zero it first. */
struct ep_job {
    ep_backend_weights *weights;
    const ep_job_row *rows;
    uint32_t rows_count; /* 1..EP_JOB_ROWS_MAX */
    ep_dtype x_dtype;    /* bf16, f16, f32, i8, f8e4m3 */
    ep_dtype out_dtype;  /* bf16, f16, f32 */
    bool weight_on_input;
    /* smaller first, best effort: a job may overtake others wherever the backend can switch. Jobs
     * with EP_JOB_PATIENT set give way to those without */
    uint64_t priority;
    /* Called exactly once, from a backend thread, with no lock held. May submit and unload; must
     * not close, and must not block long. */
    void (*done)(ep_job *job, ep_err result);
    void *arg;
    /* first fields of its kernel spans: call, expert, ...; NULL: not traced */
    const ep_trace_fields *trace;
    /* private to the backend while submitted */
    ep_job *next;
    uint32_t scratch[6];
};

/* An expert's packed form as a file keeps it; body is the large part. */
typedef struct ep_packed_view {
    const void *head; /* at most EP_PACKED_HEAD_BYTES: determines the body's layout */
    size_t head_bytes;
    const void *body;
    size_t body_bytes;
} ep_packed_view;

/* Which numerics family a backend computes with. */
typedef enum ep_numerics {
    EP_NUMERICS_PORTABLE,
    /* kernels/bf16dp.h for formats that it supports, others portable; slow without AVX2 */
    EP_NUMERICS_BF16DP,
    EP_NUMERICS_BF16ODD, /* the same with kernels/bf16odd.h */
    /* kernels/ffn_w4a8.h for formats that it supports, others as EP_NUMERICS_BF16DP */
    EP_NUMERICS_W4A8,
    /* the family in which this CPU computes these weights fastest */
    EP_NUMERICS_AUTO,
    EP_NUMERICS_AUTO_WIDE, /* what AUTO means for experts of wide_inputs: never w4a8 */
} ep_numerics;

typedef struct ep_backend_config {
    ep_numerics numerics;
    /* compute threads, up to EP_BACKEND_THREADS_MAX; 0: one per CPU that this process may use */
    uint32_t threads;
    /* budget for weights, as weights_bytes counts them; 0: unlimited, or what the device has */
    uint64_t memory_bytes;
    bool unpinned;   /* cpu: with one thread per CPU, do not tie threads to their CPUs */
    uint32_t device; /* number of a device counted by probe; each has an instance of its own */
    /* Called once when the device is lost for the life of the process: from any thread, also inside
     * open. Must not block or call the backend. NULL: not called. */
    void (*on_lost)(void *arg, const char *why);
    void *arg;
} ep_backend_config;

/* What an instance knows about its device. */
typedef struct ep_backend_device {
    /* as recently read from the driver, like the next; 0: the device is lost */
    uint64_t memory_bytes;
    uint64_t free_bytes;
    uint64_t weight_bytes_max; /* the limit in force; never 0 */
} ep_backend_device;

typedef struct ep_backend_ops {
    uint32_t api_version; /* EP_BACKEND_API_VERSION */
    const char *name;     /* "cpu", "ascend", "reference" */
    ep_memory_kind memory;

    /* how many jobs keep an instance busy; 0: two per compute thread */
    uint32_t jobs_ahead;

    /* (optional) Whether open would find its libraries on this machine, and the number of devices.
     * Errors: UNAVAILABLE (none). */
    ep_err (*probe)(uint32_t *out_devices, ep_error *out_error);

    /* Starts threads or opens the device. Errors: UNAVAILABLE (no such device or library),
     * NO_MEMORY, INVALID_ARGUMENT. */
    ep_err (*open)(const ep_backend_config *config, ep_backend **out_backend, ep_error *out_error);
    /* All jobs must be done (done() was called, though it may still be returning), each submit
     * returned, and all weights unloaded. Joins the threads. NULL allowed. */
    void (*close)(ep_backend *backend);
    /* (NULL without devices) Threads: any. Never waits. */
    void (*device_read)(ep_backend *backend, ep_backend_device *out_device);

    /*
     * Numerics id of a model whose experts are of this format: family/weight format/rounding/digest
     * of a known-answer run on this machine, e.g. "portable/bf16/rne/5f0c9a12". Equal ids mean
     * equal bits. others: bits (1 << format) of the other formats of the model's experts.
     * wide_inputs: as in these experts. Pure after open.
     */
    ep_err (*numerics_id)(ep_backend *backend, ep_weight_format format, bool wide_inputs,
                          uint32_t others, char out_id[EP_NUMERICS_ID_BYTES]);
    /* Bytes that weights_load will take for this expert; 0 if it would refuse it. Looks only at
     * shapes and types. */
    size_t (*weights_bytes)(ep_backend *backend, const ep_expert_source *source);
    /* Packs an expert; may block (call it from a loader thread). Keeps nothing of source. Threads:
     * any. Errors: NO_MEMORY, RESOURCE_EXHAUSTED (budget), UNIMPLEMENTED (format or activation),
     * INVALID_ARGUMENT (shape), DEVICE_LOST. */
    ep_err (*weights_load)(ep_backend *backend, const ep_expert_source *source,
                           ep_backend_weights **out_weights, ep_error *out_error);
    /* No job may use them any more. NULL allowed. */
    void (*weights_unload)(ep_backend *backend, ep_backend_weights *weights);

    /*
     * The next three slots let packed weights be kept in a file. All are NULL when the backend does
     * not support that.
     * packed_layout  names the layout of head and body on this machine; the name differs whenever
     *                their bytes would differ. Pure after open.
     * weights_export gives the bytes of loaded weights, borrowed for as long as these live.
     * weights_import creates weights from such bytes: checks the head, allocates body_bytes of
     * memory,
     *                and calls fill() to write the whole body there (fill's error is returned). The
     *                reader of the file has checked its checksums; head and sizes are checked again
     *                here. Errors: those of weights_load, and BAD_FILE. Threads: any.
     */
    const char *(*packed_layout)(ep_backend *backend);
    void (*weights_export)(ep_backend *backend, const ep_backend_weights *weights,
                           ep_packed_view *out_view);
    ep_err (*weights_import)(ep_backend *backend, const void *head, size_t head_bytes,
                             size_t body_bytes,
                             ep_err (*fill)(void *arg, void *body, size_t body_bytes,
                                            ep_error *out_error),
                             void *arg, ep_backend_weights **out_weights, ep_error *out_error);

    /* Queues a job; rows point to the backend's own memory kind. Never blocks. Threads: any, and
     * from done().
     * Errors: RESOURCE_EXHAUSTED (EP_BACKEND_JOBS_MAX), INVALID_ARGUMENT, DEVICE_LOST; then done()
     * is not called. done() may report NO_MEMORY or DEVICE_LOST; the rows' outputs are then
     * undefined. */
    ep_err (*submit)(ep_backend *backend, ep_job *job);

    /* The slots below are all NULL for host memory. alloc and free: any thread, also from done().
     * Blocks are 64-byte aligned. Errors of alloc: NO_MEMORY, DEVICE_LOST. */
    ep_err (*memory_alloc)(ep_backend *backend, size_t bytes, ep_backend_memory **out_memory);
    void (*memory_free)(ep_backend *backend, ep_backend_memory *memory);
    /* Address of the block in the backend's address space, for job rows. Not readable by the
     * host. */
    void *(*memory_address)(ep_backend_memory *memory);
    /* Copies a gather list of host rows into the block at offset, or the block into a scatter list,
     * one row after the other. rows (the array too) must stay valid until done(). done() is as for
     * jobs, and is not called after an error. Jobs and copies may run in any order: the caller
     * submits one when those it depends on are done.
     * Errors: INVALID_ARGUMENT (past the block's end), RESOURCE_EXHAUSTED, DEVICE_LOST. */
    ep_err (*copy_in)(ep_backend *backend, ep_backend_memory *memory, size_t offset,
                      const void *const *rows, size_t row_bytes, uint32_t rows_count,
                      void (*done)(void *arg, ep_err result), void *arg);
    ep_err (*copy_out)(ep_backend *backend, ep_backend_memory *memory, size_t offset,
                       void *const *rows, size_t row_bytes, uint32_t rows_count,
                       void (*done)(void *arg, ep_err result), void *arg);
} ep_backend_ops;

/* First member of every backend. */
struct ep_backend {
    const ep_backend_ops *ops;
};

/* First member of every backend's weights. */
struct ep_backend_weights {
    uint32_t hidden;
    uint32_t inner;
    ep_weight_format format;
    ep_weight_format down_format;
};

/* NULL when there is no such backend. ep_backend_names() lists all for messages: "cpu, ascend,
 * reference".
 * Threads: any. */
const ep_backend_ops *ep_backend_by_name(const char *name);
const char *ep_backend_names(void);
/*
 * Adds a backend; ops must stay valid for the life of the process. Adding one again changes
 * nothing. Call it before threads start: it takes no lock against the two functions above.
 */
void ep_backend_register(const ep_backend_ops *ops);

/*
 * Runs a job whose rows are in host memory on any backend; copies them through the backend's own
 * memory if it has one. Same contract as ops->submit, and NO_MEMORY (for the copies). Threads: any.
 */
ep_err ep_backend_run(ep_backend *backend, ep_job *job);

#endif
