/* SPDX-License-Identifier: Apache-2.0 */
/* Lays out a batch as the gateway reads it: each tensor at its place after the header. */
#include "gateway_request.h"

#include "base/error.h"

ep_err ep_cli_gateway_request_make(const ep_moe_args *args, const ep_gate_config *gate,
                                   const ep_tensor *logits, ep_dtype out_dtype,
                                   ep_buffer_pool *pool, ep_cli_gateway_request *out_request,
                                   ep_error *out_error)
{
    out_request->tensors = NULL;
    ep_err err = ep_gateway_request_fill(args, gate, logits, out_dtype, &out_request->header,
                                         &out_request->gate, out_error);
    err = err != EP_OK
              ? err
              : ep_gateway_layout_make(&out_request->header, &out_request->layout, out_error);
    if (err != EP_OK || out_request->layout.total_bytes == 0) {
        return err;
    }
    err = ep_buffer_acquire(pool, out_request->layout.total_bytes, &out_request->tensors);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for a request of %zu bytes",
                            out_request->layout.total_bytes);
    }
    ep_gateway_request_pack(args, gate, logits, &out_request->layout, out_request->tensors->data);
    return EP_OK;
}

void ep_cli_gateway_request_fini(ep_cli_gateway_request *request)
{
    ep_buffer_unref(request->tensors);
}
