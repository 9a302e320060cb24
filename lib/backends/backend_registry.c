/* SPDX-License-Identifier: Apache-2.0 */
/* The backends that this process knows: built-in ones, and those that a program or a test adds
 * before it starts threads. */
#include <string.h>

#include "backends/ascend/ascend_backend.h"
#include "backends/backend.h"
#include "backends/cpu/cpu_backend.h"
#include "backends/reference/reference_backend.h"
#include "base/check.h"

#define NAMES_BYTES 256

static const ep_backend_ops *backends[EP_BACKENDS_MAX] = {
    &ep_backend_cpu_ops, &ep_backend_ascend_ops, &ep_backend_reference_ops};
static size_t backends_count = 3;
static char names[NAMES_BYTES] = "cpu, ascend, reference";

const ep_backend_ops *ep_backend_by_name(const char *name)
{
    for (size_t i = 0; i < backends_count; i++) {
        if (strcmp(backends[i]->name, name) == 0) {
            return backends[i];
        }
    }
    return NULL;
}

const char *ep_backend_names(void)
{
    return names;
}

void ep_backend_register(const ep_backend_ops *ops)
{
    const ep_backend_ops *known = ep_backend_by_name(ops->name);
    if (known == ops) {
        return;
    }
    EP_ASSERT(known == NULL);
    EP_ASSERT(ops->api_version == EP_BACKEND_API_VERSION);
    EP_ASSERT(backends_count < EP_BACKENDS_MAX);
    EP_ASSERT(strlen(names) + strlen(ops->name) + sizeof(", ") <= sizeof(names));
    backends[backends_count++] = ops;
    strcat(names, ", ");
    strcat(names, ops->name);
}
