/* SPDX-License-Identifier: Apache-2.0 */
/* Every backend the contract suite runs over: a new one gets a row here and with it all tests. */
#ifndef EP_TESTS_CONTRACT_BACKEND_BACKEND_VARIANTS_H
#define EP_TESTS_CONTRACT_BACKEND_BACKEND_VARIANTS_H

#include "backends/backend.h"
#include "support/check.h"

/* Number of variants on this machine: reference, slow, cpu once per kernel of family `portable`
 * this CPU runs. */
size_t backend_variants_count(void);
/* "cpu/avx2". Valid until the next call from the same thread. */
const char *backend_variant_name(size_t index);
ep_err backend_variant_try_open(size_t index, const ep_backend_config *config,
                                ep_backend **out_backend, ep_error *out_error);

/* Opens; a failed open ends the program with its text. threads and memory_bytes as in
 * ep_backend_config. */
static inline ep_backend *backend_variant_open(size_t index, uint32_t threads,
                                               uint64_t memory_bytes)
{
    const ep_backend_config config = {.threads = threads, .memory_bytes = memory_bytes};
    ep_backend *backend = NULL;
    ep_error error;
    CHECK(backend_variant_try_open(index, &config, &backend, &error) == EP_OK,
          "backend %s does not open: %s", backend_variant_name(index), error.text);
    return backend;
}

#endif
