/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Token files, one per role, each a private regular file (base/private_file.h). A line has a token
 * and, behind a blank, an optional label for the log; there are up to EP_TOKENS_PER_ROLE lines. All
 * tokens are accepted, and the first is shown to others, so that tokens can be changed while
 * everything runs. Line ends may be LF or CRLF.
 */
#ifndef EP_SERVER_COMMON_SERVICE_TOKENS_H
#define EP_SERVER_COMMON_SERVICE_TOKENS_H

#include "options/options.h"
#include "rpc/rpc_credentials.h"

#define EP_TOKEN_BYTES_MIN 16

/*
 * Reads token_file, node_token_file (default: token_file) and admin_token_file (no default). Makes
 * *credentials if it is NULL, even without a token; otherwise replaces its tokens, or keeps them on
 * an error. Errors: BAD_CONFIG naming key, file and rule, never a token's text; NO_MEMORY.
 */
ep_err ep_service_tokens_load(const ep_options *options, ep_rpc_credentials **credentials,
                              ep_error *out_error);
/* Reads the files again after a reload, even if the paths are the same, and logs the result.
 * Connections stay open. */
void ep_service_tokens_reload(const ep_options *options, ep_rpc_credentials *credentials);

#endif
