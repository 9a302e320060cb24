/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Token files: one token per role, each in a regular file that is private (base/private_file.h). A
 * file's first line is the token, an optional second line the one before it: both are let in, the
 * first is shown to others, so that tokens can be changed while everything runs. Line ends may be
 * LF or CRLF.
 */
#ifndef EP_SERVER_COMMON_SERVICE_TOKENS_H
#define EP_SERVER_COMMON_SERVICE_TOKENS_H

#include "options/options.h"
#include "rpc/rpc_credentials.h"

#define EP_TOKEN_BYTES_MIN 16

/*
 * Reads token_file, node_token_file (not set: as token_file) and admin_token_file (never taken from
 * another). *credentials NULL: they are made, also without any token; else its tokens are replaced,
 * and on an error kept. Errors: BAD_CONFIG naming key, file and rule, never a token's text;
 * NO_MEMORY.
 */
ep_err ep_service_tokens_load(const ep_options *options, ep_rpc_credentials **credentials,
                              ep_error *out_error);
/* After a reload: the files are read again, also when their paths are the same; logs what came of
 * it. Connections that are open stay open. */
void ep_service_tokens_reload(const ep_options *options, ep_rpc_credentials *credentials);

#endif
