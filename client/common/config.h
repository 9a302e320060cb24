/* SPDX-License-Identifier: Apache-2.0 */
/* Checks and copies a client's configuration. */
#ifndef EP_CLIENT_CONFIG_H
#define EP_CLIENT_CONFIG_H

#include "expertd/client.h"

/* Errors: INVALID_ARGUMENT naming field, value and allowed range; UNIMPLEMENTED (newer struct). */
ep_err ep_client_config_check(const ep_client_config *config, ep_error *out_error);
/* Copies strings too; lanes may come from the environment. Free it after an error too. Errors:
 * NO_MEMORY. */
ep_err ep_client_config_copy(const ep_client_config *config, ep_client_config *out_copy);
void ep_client_config_free(ep_client_config *config);

#endif
