/* SPDX-License-Identifier: Apache-2.0 */
/*
 * on_device HOME CASES SEED: random worlds whose ranks have their tensors on the emulated device,
 * made there by streams that are slow; every output bit for bit as the oracle's, and rows after
 * those that came as they were. Then what goes wrong with the device.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"
#include "support/caller_device.h"

enum { TENSORS_MAX = 20, OUTPUTS_MAX = 8 };

typedef struct world {
    const oracle_case *c;
    uint64_t seed;
} world;

/* A call's tensors; outputs come last. */
typedef struct tensors {
    ep_tensor *all[TENSORS_MAX];
    ep_tensor host[TENSORS_MAX];
    int count;
    int inputs;
} tensors;

static size_t bytes_of(const ep_tensor *tensor)
{
    size_t bytes = ep_dtype_bytes(tensor->dtype);
    for (uint32_t i = 0; i < tensor->rank; i++) {
        bytes *= (size_t)tensor->shape[i];
    }
    return bytes;
}

static tensors of_dispatch(ep_moe_dispatch_args *d)
{
    return (tensors){.all = {&d->x, &d->expert_ids, &d->scales, &d->x_active_mask,
                             &d->expert_scales, &d->performance_info, &d->expand_x,
                             &d->dynamic_scales, &d->assist_info_for_combine, &d->expand_idx,
                             &d->expert_token_nums, &d->ep_recv_counts, &d->expand_scales},
                     .count = 13,
                     .inputs = 5};
}

static tensors of_combine(ep_moe_combine_args *m, ep_moe_add_rms_norm *norm)
{
    return (tensors){
        .all = {&m->expand_x, &m->expert_ids, &m->assist_info_for_combine, &m->expand_idx,
                &m->ep_send_counts, &m->expert_scales, &m->x_active_mask, &m->shared_expert_x,
                &m->ori_x, &m->const_expert_alpha_1, &m->const_expert_alpha_2, &m->const_expert_v,
                &norm->residual_x, &norm->gamma, &m->x_out, &norm->y, &norm->rstd, &norm->x},
        .count = 18,
        .inputs = 14};
}

/* The stream makes them; outputs too, so that what is not written is seen. */
static void to_device(tensors *t, ep_acl_stream stream)
{
    for (int i = 0; i < t->count; i++) {
        t->host[i] = *t->all[i];
        if (t->host[i].rank != 0) {
            void *memory = device_alloc(bytes_of(&t->host[i]));
            device_put(stream, memory, t->host[i].data, bytes_of(&t->host[i]));
            *t->all[i] = device_tensor(&t->host[i], memory, stream);
        }
    }
}

/* Back to the host, with what the call wrote. */
static void from_device(tensors *t, ep_acl_stream stream)
{
    const void *got[TENSORS_MAX];
    for (int i = t->inputs; i < t->count; i++) {
        got[i] = t->host[i].rank != 0 ? device_get(stream, t->all[i]->data, bytes_of(&t->host[i]))
                                      : NULL;
    }
    device_sync(stream);
    for (int i = 0; i < t->count; i++) {
        if (i >= t->inputs && t->host[i].rank != 0 && bytes_of(&t->host[i]) > 0) {
            memcpy(t->host[i].data, got[i], bytes_of(&t->host[i]));
        }
        *t->all[i] = t->host[i];
    }
}

/* Of the dispatch's or the combine's expand_x, the rows that came. */
static size_t bytes_received(const rank_call *call, const ep_tensor *expand)
{
    const size_t row = bytes_of(expand) / (size_t)(expand->shape[0] > 0 ? expand->shape[0] : 1);
    return (size_t)rank_call_rows_received(call) * row;
}

static bool spare_rows_are_unwritten(const rank_call *call)
{
    const ep_tensor *expand = &call->dispatch.expand_x;
    for (size_t i = bytes_received(call, expand); i < bytes_of(expand); i++) {
        if (((const uint8_t *)expand->data)[i] != 0xa5) {
            fprintf(stderr, "rank %u: a row of expand_x after those that came is written\n",
                    call->rank);
            return false;
        }
    }
    return true;
}

static bool play(void *arg, uint32_t rank, ep_group *group)
{
    const world *w = arg;
    rank_call call;
    ep_error error;
    ep_acl_stream stream = device_streams[rank % DEVICE_STREAMS];
    DEVICE_MUST(device_acl.aclrtSetDevice(0));
    rank_call_init(&call, w->c, rank, (int)(w->seed % 3));
    call.dispatch.expert_token_nums_type = (int64_t)(w->seed & 1);
    if (w->seed % 4 == 0) {
        rank_call_use_index(&call);
    }

    tensors of = of_dispatch(&call.dispatch);
    to_device(&of, stream);
    bool good = rank_call_dispatch(&call, group, &error) == EP_OK;
    if (!good) {
        fprintf(stderr, "rank %u, dispatch: %s: %s\n", rank, ep_err_name(error.code), error.text);
    }
    from_device(&of, stream);
    good = good && rank_call_check_dispatch(&call) && spare_rows_are_unwritten(&call);
    if (good) {
        rank_call_experts(&call);
        of = of_combine(&call.combine, &call.norm);
        to_device(&of, stream);
        /* what is behind them is not read */
        const size_t came = bytes_received(&call, &call.combine.expand_x);
        call.combine.expand_x.data = device_alloc(came);
        device_put(stream, call.combine.expand_x.data, of.host[0].data, came);
        good = rank_call_combine(&call, group, &error) == EP_OK;
        if (!good) {
            fprintf(stderr, "rank %u, combine: %s: %s\n", rank, ep_err_name(error.code),
                    error.text);
        }
        from_device(&of, stream);
        good = good && rank_call_check_combine(&call, case_is_approximate(w->c) ? 0.02 : 0);
    }
    rank_call_free(&call);
    return good;
}

/* ---- what goes wrong ---- */

typedef struct trouble {
    const oracle_case *c;
    const char *lost_file;
    ep_err wanted;
    const char *text;
    bool has_stream;
    bool loses_context; /* the thread, between the two phases */
} trouble;

static bool meet_trouble(void *arg, uint32_t rank, ep_group *group)
{
    const trouble *t = arg;
    rank_call call;
    ep_error error = {.text = ""};
    DEVICE_MUST(device_acl.aclrtSetDevice(0));
    rank_call_init(&call, t->c, rank, 0);
    tensors of = of_dispatch(&call.dispatch);
    to_device(&of, device_streams[0]);
    for (int i = 0; i < of.count && !t->has_stream; i++) {
        of.all[i]->sync_handle = 0;
    }
    ep_err err = ep_moe_dispatch_prepare(group, &call.dispatch, &call.dispatch_workspace_bytes,
                                         &call.dispatch_plan, &error);
    if (err == EP_OK) {
        void *workspace = aligned_alloc(64, call.dispatch_workspace_bytes + 64);
        if (t->lost_file != NULL) {
            fclose(fopen(t->lost_file, "w"));
        }
        if (t->loses_context) {
            DEVICE_MUST(device_acl.aclrtResetDevice(0));
        }
        err = ep_moe_dispatch(group, call.dispatch_plan, &call.dispatch, workspace,
                              call.dispatch_workspace_bytes, &error);
        free(workspace);
        ep_group_plan_destroy(call.dispatch_plan);
    }
    if (err == t->wanted && strstr(error.text, t->text) != NULL) {
        return true;
    }
    fprintf(stderr, "%s '%s', want %s '%s'\n", ep_err_name(err), error.text, ep_err_name(t->wanted),
            t->text);
    return false;
}

/* In a process of its own: nothing of such a device is given back. */
static bool meets_trouble(const char *home, const char *name, const char *value, trouble *t)
{
    int status = 0;
    oracle_case c;
    const case_limits limits = {.ranks_max = 1, .tokens_max = 8, .hidden_max = 16};
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        case_draw(5, &limits, &c);
        setenv(name, value, 1);
        device_open(home, 1, "100");
        t->c = &c;
        _exit(!rank_threads_play("loopback", NULL, (uint32_t)c.ranks, 20000000, meet_trouble, t));
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

static bool all_troubles(const char *home)
{
    char file[64];
    snprintf(file, sizeof(file), "/tmp/on_device.%d", (int)getpid());
    bool good = meets_trouble(
        home, "EP_CANN_SEED", "1",
        &(trouble){.wanted = EP_ERR_INVALID_ARGUMENT,
                   .text = "sync_handle 0: allowed the aclrtStream that their work is on"});
    good = meets_trouble(
               home, "EP_CANN_SEED", "1",
               &(trouble){.wanted = EP_ERR_FAILED_PRECONDITION,
                          .text = "and this thread works on none: aclrtSetDevice comes first",
                          .has_stream = true,
                          .loses_context = true}) &&
           good;
    good = meets_trouble(home, "EP_CANN_HANG_AT", "2",
                         &(trouble){.wanted = EP_ERR_DEADLINE_EXCEEDED,
                                    .text = "did not end its work within",
                                    .has_stream = true}) &&
           good;
    good = meets_trouble(home, "EP_CANN_LOST_FILE", file,
                         &(trouble){.wanted = EP_ERR_DEVICE_LOST,
                                    .text = "code 507010",
                                    .has_stream = true,
                                    .lost_file = file}) &&
           good;
    unlink(file);
    setenv("ASCEND_HOME_PATH", "/nonexistent", 1);
    return good;
}

int main(int argc, char **argv)
{
    const case_limits limits = {.ranks_max = 5, .tokens_max = 24, .hidden_max = 70};
    if (argc != 4) {
        fprintf(stderr, "usage: %s HOME CASES SEED\n", argv[0]);
        return 2;
    }
    const uint64_t first = strtoull(argv[3], NULL, 0);
    const uint64_t cases = strtoull(argv[2], NULL, 0);
    if (!all_troubles(argv[1])) {
        return 1;
    }
    for (uint64_t seed = first; seed < first + cases; seed++) {
        oracle_case c;
        case_draw(seed, &limits, &c);
        world w = {.c = &c, .seed = seed};
        device_open(argv[1], seed, "300");
        if (!rank_threads_play("loopback", NULL, (uint32_t)c.ranks, 20000000, play, &w)) {
            fprintf(stderr, "failed with seed %llu\n", (unsigned long long)seed);
            return 1;
        }
        device_close(); /* finds what the plans left */
        case_free(&c);
    }
    printf("seed %llu: %llu cases\n", (unsigned long long)first, (unsigned long long)cases);
    return 0;
}
