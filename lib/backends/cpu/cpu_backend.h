/* SPDX-License-Identifier: Apache-2.0 */
/* Backend "cpu": worker threads over packed weights. With the same config->numerics, its bits equal
 * those of backend "reference". */
#ifndef EP_BACKENDS_CPU_CPU_BACKEND_H
#define EP_BACKENDS_CPU_CPU_BACKEND_H

#include "backends/backend.h"
#include "backends/cpu/cpu_schedule.h"
#include "kernels/ffn_kernel.h"

extern const ep_backend_ops ep_backend_cpu_ops;

/* ops->open with a kernel that this CPU can run, for its family; NULL: the fastest. For tests. */
ep_err ep_cpu_backend_open_with(const ep_ffn_kernel *kernel, const ep_backend_config *config,
                                ep_backend **out_backend, ep_error *out_error);
/* For a backend opened by ep_backend_cpu_ops. Threads: any. */
ep_cpu_counts ep_cpu_backend_counts(const ep_backend *backend);

#endif
