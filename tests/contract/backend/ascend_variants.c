/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contract suite over the one backend "ascend", on the emulated device of EP_CONTRACT_CANN.
 * With EP_CONTRACT_DEVICE in the environment on the one that CANN of ASCEND_HOME_PATH has
 * (deploy/examples/ascend-first-run).
 */
#include <stdlib.h>

#include "contract/backend/backend_variants.h"

size_t backend_variants_count(void)
{
    return 1;
}

const char *backend_variant_name(size_t index)
{
    (void)index;
    return "ascend";
}

ep_err backend_variant_try_open(size_t index, const ep_backend_config *config,
                                ep_backend **out_backend, ep_error *out_error)
{
    ep_backend_config own = *config;
    (void)index;
    if (getenv("EP_CONTRACT_DEVICE") == NULL) {
        setenv("ASCEND_HOME_PATH", EP_CONTRACT_CANN, 1);
    }
    own.numerics = EP_NUMERICS_AUTO;
    return ep_backend_by_name("ascend")->open(&own, out_backend, out_error);
}
