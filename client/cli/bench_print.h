/* SPDX-License-Identifier: Apache-2.0 */
/* What a bench run shows: figures of the whole, where the time of a call went, and the waits per
 * node. */
#ifndef EP_CLI_BENCH_PRINT_H
#define EP_CLI_BENCH_PRINT_H

#include "bench.h"
#include "output.h"

extern const char *const ep_cli_bench_mode_words[]; /* as ep_moe_mode, NULL-terminated */

/* The waits are the client's, calls before the clock started included. False when out takes no
 * more. Sorts the latencies. */
bool ep_cli_bench_print(const ep_cli_bench_request *request, ep_cli_bench_result *result,
                        ep_client *client, ep_cli_format format, FILE *out);

#endif
