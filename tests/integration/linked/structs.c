/* SPDX-License-Identifier: Apache-2.0 */
/*
 * structs COORDINATOR_URL: uses every struct that has struct_bytes, each at the end of a page
 * with nothing behind it, and prints what came. Compiled against the headers as they are, and
 * against those of reshape_headers.py.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "expertd/client.h"
#include "expertd/group.h"
#include "expertd/permute.h"

#define T 3
#define K 2
#define E 16
#define H 128
#define NEW(type) ((type *)at_edge(sizeof(type)))
#define NEED(expression)                                                                           \
    do {                                                                                           \
        ep_err need_err = (expression);                                                            \
        if (need_err != EP_OK) {                                                                   \
            fprintf(stderr, "%s: %s: %s\n", #expression, ep_err_name(need_err), error.text);       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static ep_error error;
static float x[T * H];
static float y[T * H];
static int32_t ids[T * K] = {0, 1, 5, 9, 15, 2};
static float scales[T * K] = {0.5f, 0.25f, 1, 2, 0.125f, 0.75f};
static float logits[T * E];

/* Full of rubbish, as a program's stack is. */
static void *at_edge(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *pages =
        mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages + page, page, PROT_NONE) != 0) {
        exit(2);
    }
    memset(pages, 0xee, page);
    return pages + page - bytes;
}

static void print_floats(const char *name, const float *values, int count)
{
    printf("%s", name);
    for (int i = 0; i < count; i++) {
        printf(" %a", (double)values[i]);
    }
    printf("\n");
}

#ifdef LONGER
/* What a newer version's field is set to, an older library refuses. */
static void refuse_later(ep_err err, const char *what)
{
    printf("%s: %s\n", what, err == EP_ERR_UNIMPLEMENTED ? "refused" : ep_err_name(err));
}
#endif

static ep_client *connect_to(const char *url)
{
    ep_client *client = NULL;
    ep_client_config *config = NEW(ep_client_config);
    ep_client_config_init(config);
    config->coordinator_url = url;
#ifdef LONGER
    config->later[2] = 1;
    refuse_later(ep_client_create(config, &client, &error), "config");
    config->later[2] = 0;
#endif
    NEED(ep_client_create(config, &client, &error));
    NEED(ep_client_wait_ready(client, 60000000, &error));
    return client;
}

static void describe(ep_client *client)
{
    ep_model_desc *model = NEW(ep_model_desc);
    ep_layer_desc *layer = NEW(ep_layer_desc);
    ep_client_node_waits *waits = NEW(ep_client_node_waits);
    ep_client_node_memory *memory = NEW(ep_client_node_memory);
    ep_client_stats *stats = NEW(ep_client_stats);
    model->struct_bytes = sizeof(*model);
    layer->struct_bytes = sizeof(*layer);
    waits->struct_bytes = sizeof(*waits);
    memory->struct_bytes = sizeof(*memory);
    stats->struct_bytes = sizeof(*stats);
    NEED(ep_client_model(client, 0, model));
    NEED(ep_client_layer(client, model->name, NULL, 2, layer));
    NEED(ep_client_read_waits(client, 0, waits));
    NEED(ep_client_ask_memory(client, 0, 60000000, memory, &error));
    ep_client_read_stats(client, stats);
    printf("model %s, layer %u, hidden %u, experts %u, calls %d\n", model->name, layer->layer,
           layer->hidden, layer->experts, (int)stats->calls);
}

static ep_gate_config *make_gate(ep_gate_load *load)
{
    ep_gate_config *gate = NEW(ep_gate_config);
    memset(gate, 0, sizeof(*gate));
    gate->struct_bytes = sizeof(*gate);
    gate->experts = E;
    gate->top_k = K;
    gate->select = EP_GATE_SOFTMAX;
    gate->weight = EP_GATE_SOFTMAX;
    gate->renormalise = true;
    memset(load, 0, sizeof(*load));
    load->struct_bytes = sizeof(*load);
    return gate;
}

static void forward(ep_client *client)
{
    ep_moe_args *args = NEW(ep_moe_args);
    ep_moe_result *result = NEW(ep_moe_result);
    ep_gate_load *load = NEW(ep_gate_load);
    ep_gate_config *gate = make_gate(load);
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_F32, T, H);
    ep_tensor l = ep_tensor_2d(logits, EP_DTYPE_F32, T, E);
    result->struct_bytes = sizeof(*result);
    ep_moe_args_init(args);
    args->model = "demo";
    args->layer = 2;
    args->x = ep_tensor_2d(x, EP_DTYPE_F32, T, H);
    args->expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, T, K);
    args->expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, T, K);
#ifdef LONGER
    args->later[0] = 1;
    refuse_later(ep_moe_forward(client, args, &out, NULL), "args");
    args->later[0] = 0;
#endif
    NEED(ep_moe_forward(client, args, &out, result));
    printf("nodes %u\n", result->nodes);
    print_floats("y", y, T * H);
    args->expert_ids = ep_tensor_none();
    args->expert_scales = ep_tensor_none();
    NEED(ep_moe_forward_logits(client, args, gate, &l, &out, result));
    print_floats("gated", y, T * H);
    NEED(ep_gate_load_compute(gate, T, logits, ids, NULL, load, &error));
    printf("slots %d, max over mean %a\n", (int)load->slots, load->max_over_mean);
}

static void permute(void)
{
    ep_permute_config *config = NEW(ep_permute_config);
    ep_permute_in *in = NEW(ep_permute_in);
    ep_permute_out *out = NEW(ep_permute_out);
    ep_unpermute_args *back = NEW(ep_unpermute_args);
    float rows[T * K * H];
    int32_t slot_rows[T * K];
    float workspace[3 * H + 64];
    ep_permute_config_init(config);
    config->tokens = T;
    config->top_k = K;
    config->hidden = H;
    config->experts = E;
#ifndef SHORTER
    config->dtype = EP_DTYPE_F32;
#else
    config->hidden = 2 * H; /* rows of bf16, the default of the field that is not there */
#endif
    memset(in, 0, sizeof(*in));
    in->struct_bytes = sizeof(*in);
    in->x = x;
    in->ids = ids;
    memset(out, 0, sizeof(*out));
    out->struct_bytes = sizeof(*out);
    out->rows = rows;
    out->slot_rows = slot_rows;
    NEED(ep_moe_permute(config, in, workspace, sizeof(workspace), out, &error));
    ep_unpermute_args_init(back);
    back->tokens = T;
    back->top_k = K;
    back->hidden = H;
    back->rows_count = T * K;
    back->dtype = EP_DTYPE_F32;
    back->out_dtype = EP_DTYPE_F32;
    back->rows = rows;
    back->slot_rows = slot_rows;
    back->out = y;
    NEED(ep_moe_unpermute(back, workspace, sizeof(workspace), &error));
    print_floats("permuted", y, T * H);
}

typedef struct buffers {
    float rows[T * K * H];
    float row_scales[T * K];
    int32_t assist[128 * T * K];
    int64_t nums[E];
    int32_t counts[E];
} buffers;

static void run_group(void)
{
    static const char *const urls[] = {"loopback://structs"};
    static buffers b;
    ep_group *group = NULL;
    ep_group_plan *plan = NULL;
    size_t bytes = 0;
    ep_group_config *config = NEW(ep_group_config);
    ep_group_params *params = NEW(ep_group_params);
    ep_moe_dispatch_args *d = NEW(ep_moe_dispatch_args);
    ep_moe_combine_args *c = NEW(ep_moe_combine_args);
    ep_moe_add_rms_norm *norm = NEW(ep_moe_add_rms_norm);
    ep_group_stats *stats = NEW(ep_group_stats);
    ep_group_traffic *traffic = NEW(ep_group_traffic);
    ep_tensor gamma = ep_tensor_1d(x, EP_DTYPE_F32, H);
    ep_group_config_init(config);
    config->name = "abi";
    config->world_size = 1;
    config->urls = urls;
    config->urls_count = 1;
    NEED(ep_group_create(config, &group, &error));
    ep_group_params_init(params);
    params->moe_expert_num = E;
    ep_moe_dispatch_args_init(d);
    d->params = params;
    d->x = ep_tensor_2d(x, EP_DTYPE_F32, T, H);
    d->expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, T, K);
    d->expand_x = ep_tensor_2d(b.rows, EP_DTYPE_F32, T * K, H);
    d->assist_info_for_combine = ep_tensor_1d(b.assist, EP_DTYPE_I32, 128 * T * K);
    d->expert_token_nums = ep_tensor_1d(b.nums, EP_DTYPE_I64, E);
    d->ep_recv_counts = ep_tensor_1d(b.counts, EP_DTYPE_I32, E);
    NEED(ep_moe_dispatch_prepare(group, d, &bytes, &plan, &error));
    NEED(
        ep_moe_dispatch(group, plan, d, aligned_alloc(64, (bytes + 127) / 64 * 64), bytes, &error));
    ep_group_plan_destroy(plan);
    ep_moe_combine_args_init(c);
    c->params = params;
    c->expand_x = d->expand_x;
    c->expert_ids = d->expert_ids;
    c->assist_info_for_combine = d->assist_info_for_combine;
    c->ep_send_counts = d->ep_recv_counts;
    c->expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, T, K);
    ep_moe_add_rms_norm_init(norm);
    norm->residual_x = ep_tensor_2d(x, EP_DTYPE_F32, T, H);
    norm->gamma = gamma;
    norm->y = ep_tensor_2d(y, EP_DTYPE_F32, T, H);
    NEED(ep_moe_combine_prepare(group, c, norm, &bytes, &plan, &error));
    NEED(ep_moe_combine_add_rms_norm(group, plan, c, norm,
                                     aligned_alloc(64, (bytes + 127) / 64 * 64), bytes, &error));
    print_floats("group", y, T * H);
    stats->struct_bytes = sizeof(*stats);
    traffic->struct_bytes = sizeof(*traffic);
    ep_group_read_stats(group, stats);
    ep_group_read_traffic(group, 0, traffic);
    printf("group calls %d, rows %d\n", (int)stats->calls, (int)traffic->rows_sent);
    ep_group_plan_destroy(plan);
    ep_group_destroy(group);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        return 2;
    }
    for (int i = 0; i < T * H; i++) {
        x[i] = (float)(i * 37 % 64 - 32) / 32.0f;
    }
    for (int i = 0; i < T * E; i++) {
        logits[i] = (float)(i * 29 % 48) / 8.0f;
    }
    ep_client *client = connect_to(argv[1]);
    describe(client);
    forward(client);
    permute();
    run_group();
    ep_client_destroy(client);
    return 0;
}
