/* SPDX-License-Identifier: Apache-2.0 */
/* Figures of recordings as tables for people or JSON for programs. */
#ifndef EP_CLI_TRACE_REPORT_H
#define EP_CLI_TRACE_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "trace/trace_figures.h"

/* top: most requests and experts to list. NULL: no memory. */
json_t *ep_cli_trace_report_json(const ep_cli_trace_model *model,
                                 const ep_cli_trace_figures *figures, size_t top);
/* False: no memory, or writing failed. */
bool ep_cli_trace_report_print(const ep_cli_trace_model *model, const ep_cli_trace_figures *figures,
                               size_t top, FILE *out);
/* The first line of a report: "4,490 calls, p50 151 us, ...", with a real micro sign. */
#define EP_CLI_TRACE_SUMMARY_BYTES 1024
void ep_cli_trace_summary(const ep_cli_trace_model *model, const ep_cli_trace_figures *figures,
                          char out_text[EP_CLI_TRACE_SUMMARY_BYTES]);
/* Writes 32 hexadecimal digits. */
#define EP_CLI_TRACE_ID_BYTES 33
void ep_cli_trace_id_text(ep_trace_id trace, char out_text[EP_CLI_TRACE_ID_BYTES]);

#endif
