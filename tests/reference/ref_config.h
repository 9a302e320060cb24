/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the experts' activation from config.json. */
#ifndef TESTS_REFERENCE_REF_CONFIG_H
#define TESTS_REFERENCE_REF_CONFIG_H

#include <jansson.h>
#include <stddef.h>

#include "ref_activation.h"

/* For a layer's routed experts, or its shared ones. Dies on an unknown function. */
struct ref_activation ref_config_activation(const json_t *config, size_t layer, bool shared);

#endif
