/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by backends on host memory (and test backends): checks, the weight budget, threads. */
#ifndef EP_BACKENDS_HOST_COMMON_H
#define EP_BACKENDS_HOST_COMMON_H

#include <pthread.h>
#include <stdatomic.h>

#include "backends/backend.h"
#include "kernels/ffn_kernel.h"

#define EP_HOST_ALIGN 64 /* of weights and scratch */

/* EP_OK, INVALID_ARGUMENT (shape, NULL matrix or scales, numbers) or UNIMPLEMENTED (format,
 * activation), with text. */
ep_err ep_expert_source_check(const ep_expert_source *source, ep_error *out_error);
/* The same shapes and types without addresses; a pointer only tells that its array exists. This is
 * what a file may keep of a source. */
ep_expert_source ep_expert_source_outline(const ep_expert_source *source);
/* Whether weights_load would accept the shapes and types; looks at no matrices. */
bool ep_expert_source_supported(const ep_expert_source *source);
/* EP_OK or INVALID_ARGUMENT. Also checks every row's addresses. */
ep_err ep_job_check(const ep_job *job);

/* The numerics for an expert: only EP_NUMERICS_AUTO depends on wide_inputs. */
static inline ep_numerics ep_numerics_of(ep_numerics numerics, bool wide_inputs)
{
    return numerics == EP_NUMERICS_AUTO && wide_inputs ? EP_NUMERICS_AUTO_WIDE : numerics;
}
/* The family for weights of this format; resolves EP_NUMERICS_AUTO. */
ep_ffn_family ep_numerics_family(ep_numerics numerics, ep_weight_format format);
/* The family for an expert: that of gate and up if it also has down's format, else that of down if
 * it also has theirs, else `portable`. */
ep_ffn_family ep_numerics_expert_family(ep_numerics numerics, ep_weight_format format,
                                        ep_weight_format down_format);

/* Bytes of weights held, with a limit. Threads: any. */
typedef struct ep_backend_budget {
    uint64_t limit_bytes; /* 0: unlimited; set before threads share it */
    _Atomic uint64_t used_bytes;
} ep_backend_budget;

/* RESOURCE_EXHAUSTED with text when bytes do not fit. */
ep_err ep_backend_budget_take(ep_backend_budget *budget, size_t bytes, ep_error *out_error);
void ep_backend_budget_give(ep_backend_budget *budget, size_t bytes);

/* Gives the calling thread the float environment that every numerics family assumes: to nearest,
 * denormals kept. A thread inherits that of its creator, and programs may have changed theirs (some
 * by how they were linked). */
void ep_host_floats_reset(void);
/* CPUs this process may use, 1..EP_BACKEND_THREADS_MAX. */
uint32_t ep_host_cpus_count(void);

#endif
