/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls drawn from the tables of parameters give the same bits, or the same refusal, by the C
 * client, by the gateway, by expertctl forward and by expertctl forward --gateway. A row without a
 * call that shows it fails the test, so that a new parameter is here as soon as it has its row.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "gate_options.h"
#include "gateway_fixture.h"
#include "gateway_draw.h"
#include "model/safetensors_writer.h"

enum { CASES = 140, CASES_LONG = 560, CASES_SANITIZED = 60, PATH = EP_TEST_PATH_BYTES + 32 };

typedef struct ways {
    gateway_fixture *f;
    ep_client *client;
    ep_cli_gateway *gateway;
    char in[PATH];
    char out[PATH];
    uint32_t same;
    uint32_t refused;
    draw_coverage covered;
} ways;

static uint8_t expected[DRAW_OUT_BYTES];
static uint8_t got[DRAW_OUT_BYTES];

static ep_tensor out_of(const draw_call *c, uint8_t *data)
{
    return c->args.result == EP_MOE_UNCOMBINED
               ? ep_tensor_3d(data, c->out_dtype, c->tokens, c->top_k, GATEWAY_HIDDEN)
               : ep_tensor_2d(data, c->out_dtype, c->tokens, GATEWAY_HIDDEN);
}

static void by_gateway(ways *w, draw_call *c, uint32_t number, ep_err direct,
                       const ep_moe_result *wanted)
{
    ep_moe_result result;
    ep_tensor out = out_of(c, got);
    const size_t bytes = ep_cli_tensor_bytes(&out);
    memset(got, 0xa5, bytes);
    ep_err err = ep_cli_gateway_forward(w->gateway, &c->args, c->gated ? &c->gate : NULL,
                                        &c->logits, &out, &result);
    EP_TEST_CHECK(err == direct, "call %u: direct %s: %s; gateway %s: %s", number,
                  ep_err_name(direct), wanted->error.text, ep_err_name(err), result.error.text);
    if (err == EP_OK) {
        EP_TEST_CHECK(memcmp(expected, got, bytes) == 0, "call %u: the gateway has other bits",
                      number);
        EP_TEST_CHECK(result.mode == wanted->mode &&
                          (result.comm_alg == wanted->comm_alg ||
                           c->args.comm_alg == EP_MOE_COMM_AUTO) && /* each by its own times */
                          result.combine_at == wanted->combine_at &&
                          strcmp(result.numerics, wanted->numerics) == 0,
                      "call %u: another result", number);
    }
}

static void read_y(const char *path, size_t bytes)
{
    ep_safetensors *file = NULL;
    ep_error error;
    EP_TEST_CHECK(ep_safetensors_open_path(path, &file, &error) == EP_OK, "%s", error.text);
    const ep_safetensors_tensor *y = ep_safetensors_find(file, "y");
    EP_TEST_CHECK(y != NULL && ep_safetensors_tensor_bytes(y) == bytes, "%s: no y of %zu bytes",
                  path, bytes);
    EP_TEST_CHECK(ep_safetensors_read(file, y, 0, got, bytes, &error) == EP_OK, "%s", error.text);
    ep_safetensors_close(file);
}

static void by_command_line(ways *w, draw_call *c, uint32_t number, const char *how, ep_err direct,
                            const ep_moe_result *wanted)
{
    char options[DRAW_LINE_BYTES];
    char *output = NULL;
    ep_tensor out = out_of(c, got);
    const size_t bytes = ep_cli_tensor_bytes(&out);
    draw_options(c, options);
    int code = ep_test_cluster_ctl(
        &w->f->cluster, &output, "forward --model=deepseek --layer=1 --in %s --out %s%s%s%s%s",
        w->in, w->out, c->gated ? " --logits " : "", c->gated ? w->f->paths[1] : "", options, how);
    EP_TEST_CHECK((code == 0) == (direct == EP_OK),
                  "call %u:%s%s: %s: %s; expertctl ends with %d: %s", number, options, how,
                  ep_err_name(direct), wanted->error.text, code, output);
    if (code == 0) {
        read_y(w->out, bytes);
        EP_TEST_CHECK(memcmp(expected, got, bytes) == 0, "call %u: other bits by expertctl%s%s",
                      number, options, how);
    }
    free(output);
}

static void run_call(ways *w, draw_call *c, uint32_t number)
{
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor out = out_of(c, expected);
    ep_error error;
    memset(expected, 0x5a, ep_cli_tensor_bytes(&out));
    ep_err err =
        c->gated ? ep_moe_forward_logits(w->client, &c->args, &c->gate, &c->logits, &out, &result)
                 : ep_moe_forward(w->client, &c->args, &out, &result);
    EP_TEST_CHECK(err == EP_OK || (err == EP_ERR_INVALID_ARGUMENT && !c->must_succeed),
                  "call %u: %s: %s", number, ep_err_name(err), result.error.text);
    by_gateway(w, c, number, err, &result);
    if (!c->free_gate) { /* expertctl takes the gate of a checkpoint */
        ep_named_tensor tensors[DRAW_TENSORS_MAX];
        const size_t count = draw_tensors(c, tensors);
        EP_TEST_CHECK(ep_safetensors_write(w->in, tensors, count, NULL, 0, &error) == EP_OK, "%s",
                      error.text);
        by_command_line(w, c, number, "", err, &result);
        by_command_line(w, c, number, " --gateway", err, &result);
    }
    if (err == EP_OK) {
        draw_cover(c, &w->covered);
        w->same++;
    } else {
        w->refused++;
    }
}

/* Each option with a value names itself and what is allowed. */
static void wrong_options(ways *w)
{
    uint32_t count = 0;
    for (size_t i = 0; i < ep_moe_parameters.count; i++) {
        const ep_parameter *row = &ep_moe_parameters.rows[i];
        char wanted[128];
        char *output = NULL;
        if (row->option == NULL || row->kind == EP_PARAMETER_FLAG) {
            continue;
        }
        int code = ep_test_cluster_ctl(
            &w->f->cluster, &output, "forward --model=deepseek --layer=1 --in %s --out %s --%s=-1",
            w->in, w->out, row->option);
        snprintf(wanted, sizeof(wanted), "--%s is '-1', allowed: ", row->option);
        EP_TEST_CHECK(code == 2 && strstr(output, wanted) != NULL, "--%s=-1 ends with %d: %s",
                      row->option, code, output);
        free(output);
        count++;
    }
    EP_TEST_CHECK(count >= 15, "%u options only", count);
}

/* Nodes count a call for the tenant that it names, by both ways. */
static void tenants(ways *w)
{
    static const char *const hows[] = {"", " --gateway"};
    const char *counter = "expertd_tenant_tokens_total{tenant=\"alice\"}";
    for (size_t i = 0; i < EP_ARRAY_COUNT(hows); i++) {
        char *output = NULL;
        const double before = gateway_nodes_metric(w->f, counter);
        int code = ep_test_cluster_ctl(
            &w->f->cluster, &output,
            "forward --model=deepseek --layer=1 --in %s --out %s --tenant=alice%s", w->in, w->out,
            hows[i]);
        EP_TEST_CHECK(code == 0, "%s", output);
        EP_TEST_CHECK(gateway_nodes_metric(w->f, counter) > before,
                      "expertctl forward%s: no node counts for the tenant", hows[i]);
        free(output);
    }
}

/* A batch that any call can have. */
static void write_plain(ways *w)
{
    static const uint16_t x[4 * GATEWAY_HIDDEN];
    static const int32_t ids[4 * GATEWAY_TOP_K] = {0, 1, 2, 3, 4, 5, 6, 7};
    static const float scales[4 * GATEWAY_TOP_K];
    ep_error error;
    const ep_named_tensor tensors[] = {
        {"x", ep_tensor_2d((void *)(uintptr_t)x, EP_DTYPE_BF16, 4, GATEWAY_HIDDEN)},
        {"expert_ids", ep_tensor_2d((void *)(uintptr_t)ids, EP_DTYPE_I32, 4, GATEWAY_TOP_K)},
        {"expert_scales", ep_tensor_2d((void *)(uintptr_t)scales, EP_DTYPE_F32, 4, GATEWAY_TOP_K)}};
    EP_TEST_CHECK(ep_safetensors_write(w->in, tensors, EP_ARRAY_COUNT(tensors), NULL, 0, &error) ==
                      EP_OK,
                  "%s", error.text);
}

int main(void)
{
    static const char *const node_args[] = {"--tenant=alice=1", NULL};
    static gateway_fixture f = {.node_args = node_args};
    static draw_call c;
    static ways w = {.f = &f};
    ep_cli_gate gate;
    ep_error error;
    const uint32_t cases = ep_test_sanitized                ? CASES_SANITIZED
                           : getenv("EP_TEST_LONG") != NULL ? CASES_LONG
                                                            : CASES;
    gateway_fixture_init(&f, 1, NULL);
    gateway_wait_table(&f);
    w.client = ep_test_cluster_client(&f.cluster, NULL);
    w.gateway = gateway_open(&f);
    snprintf(w.in, sizeof(w.in), "%s/in.safetensors", f.cluster.dir);
    snprintf(w.out, sizeof(w.out), "%s/out.safetensors", f.cluster.dir);
    EP_TEST_CHECK(ep_cli_gate_read(f.paths[1], 1, &gate, &error) == EP_OK, "%s", error.text);
    for (uint32_t i = 0; i < cases; i++) {
        draw_call_make(&c, i, &gate.layer.config);
        run_call(&w, &c, i);
    }
    write_plain(&w);
    tenants(&w);
    wrong_options(&w);
    printf("%u calls: %u equal by all ways, %u refused by all\n", cases, w.same, w.refused);
    draw_report(&w.covered, !ep_test_sanitized);
    ep_cli_gate_fini(&gate);
    ep_client_destroy(w.client);
    ep_cli_gateway_close(w.gateway);
    gateway_fixture_fini(&f);
    return 0;
}
