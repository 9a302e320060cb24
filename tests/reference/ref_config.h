/* SPDX-License-Identifier: Apache-2.0 */
/* What config.json says about the experts' activation. */
#ifndef TESTS_REFERENCE_REF_CONFIG_H
#define TESTS_REFERENCE_REF_CONFIG_H

#include <jansson.h>
#include <stddef.h>

#include "ref_activation.h"

/* Of the routed experts of a layer, or of its shared ones. Dies of a function that is not known. */
struct ref_activation ref_config_activation(const json_t *config, size_t layer, bool shared);

#endif
