/* SPDX-License-Identifier: Apache-2.0 */
/* Figures over all calls: stages, failures, the slow node, calls over time, the call of each
 * span. */
#include <stdlib.h>
#include <string.h>

#include "trace/trace_figures.h"

#define SLOW_SHARE 100    /* the slowest hundredth */
#define FRAMES_FOR_P50 10 /* a node with fewer is not compared */
#define FRAMES_FOR_P99 100
#define STANDS_OUT 1.2 /* ratio to the other nodes */
#define STATUS_MAX 64  /* above every ep_err */

const char *const ep_cli_stage_names[EP_CLI_STAGES] = {
    "pack", "wire", "queue", "compute", "node", "combine", "client", "gateway", "late", "unserved"};

const ep_cli_stage ep_cli_stage_of[EP_CLI_PATH_PARTS] = {
    [EP_CLI_PATH_PLAN] = EP_CLI_STAGE_PACK,       [EP_CLI_PATH_PACK] = EP_CLI_STAGE_PACK,
    [EP_CLI_PATH_NETWORK] = EP_CLI_STAGE_WIRE,    [EP_CLI_PATH_DECODE] = EP_CLI_STAGE_NODE,
    [EP_CLI_PATH_QUEUE] = EP_CLI_STAGE_QUEUE,     [EP_CLI_PATH_JOB] = EP_CLI_STAGE_COMPUTE,
    [EP_CLI_PATH_REPLY] = EP_CLI_STAGE_NODE,      [EP_CLI_PATH_NODE] = EP_CLI_STAGE_NODE,
    [EP_CLI_PATH_GATEWAY] = EP_CLI_STAGE_GATEWAY, [EP_CLI_PATH_UNSERVED] = EP_CLI_STAGE_UNSERVED,
    [EP_CLI_PATH_LATE] = EP_CLI_STAGE_LATE,       [EP_CLI_PATH_COMBINE] = EP_CLI_STAGE_COMBINE,
    [EP_CLI_PATH_CLIENT] = EP_CLI_STAGE_CLIENT};

static int compare_i64(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a;
    int64_t y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

ep_cli_trace_stat ep_cli_trace_stat_of(int64_t *values, size_t count)
{
    ep_cli_trace_stat stat = {.count = count};
    if (count == 0) {
        return stat;
    }
    qsort(values, count, sizeof(*values), compare_i64);
    stat.p50_ns = values[(count + 1) / 2 - 1];
    stat.p99_ns = values[(count * 99 + 99) / 100 - 1];
    stat.max_ns = values[count - 1];
    for (size_t i = 0; i < count; i++) {
        stat.total_ns += values[i];
    }
    return stat;
}

/* ---- whose each span is ---- */

typedef struct owning {
    const ep_cli_trace_model *model;
    uint32_t *owner_of;
    uint32_t request;
} owning;

static void own(owning *o, uint32_t index)
{
    if (o->owner_of[index] == EP_CLI_TRACE_NONE) {
        o->owner_of[index] = o->request;
    }
}

static void own_kind(owning *o, ep_cli_span_kind kind, uint64_t call, uint32_t process)
{
    size_t first;
    size_t count = ep_cli_trace_model_find(o->model, kind, call, &first);
    for (size_t i = 0; i < count; i++) {
        uint32_t index = o->model->by_call[first + i];
        if (o->model->spans[index].process == process) {
            own(o, index);
        }
    }
}

/* A job belongs to the first call whose rows it computes; other calls find it by its number. */
static void own_serve(owning *o, const ep_cli_span *serve)
{
    size_t first;
    size_t count = ep_cli_trace_model_find(o->model, EP_CLI_SPAN_queue, serve->call, &first);
    for (size_t i = 0; i < count; i++) {
        const ep_cli_span *queue = &o->model->spans[o->model->by_call[first + i]];
        if (queue->process == serve->process && queue->parent != 0) {
            own_kind(o, EP_CLI_SPAN_job, queue->parent, queue->process);
            own_kind(o, EP_CLI_SPAN_kernel, queue->parent, queue->process);
        }
    }
    own_kind(o, EP_CLI_SPAN_queue, serve->call, serve->process);
    own_kind(o, EP_CLI_SPAN_decode, serve->call, serve->process);
    own_kind(o, EP_CLI_SPAN_reply, serve->call, serve->process);
}

static void own_gateway(owning *o, uint32_t gateway);

/* inside: the forward runs in a gateway, as in trace_path.c. */
static void own_forward(owning *o, uint32_t forward, bool inside)
{
    static const ep_cli_span_kind kinds[] = {EP_CLI_SPAN_plan, EP_CLI_SPAN_pack,
                                             EP_CLI_SPAN_combine};
    const ep_cli_trace_model *model = o->model;
    const ep_cli_span *span = &model->spans[forward];
    own(o, forward);
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        own_kind(o, kinds[k], span->call, span->process);
    }
    size_t first;
    size_t count = ep_cli_trace_model_children(model, span->call, &first);
    for (size_t i = 0; i < count; i++) {
        uint32_t index = model->by_parent[first + i];
        const ep_cli_span *exchange = &model->spans[index];
        if (exchange->kind != EP_CLI_SPAN_exchange || exchange->process != span->process) {
            continue;
        }
        own(o, index);
        own_kind(o, EP_CLI_SPAN_send, exchange->call, exchange->process);
        own_kind(o, EP_CLI_SPAN_receive, exchange->call, exchange->process);
        if (exchange->mate == EP_CLI_TRACE_NONE) {
            continue;
        }
        const ep_cli_span *served = &model->spans[exchange->mate];
        own(o, exchange->mate);
        own_kind(o, EP_CLI_SPAN_send, exchange->call, served->process);
        own_kind(o, EP_CLI_SPAN_receive, exchange->call, served->process);
        if (served->kind == EP_CLI_SPAN_serve) {
            own_serve(o, served);
        } else if (!inside) {
            own_gateway(o, exchange->mate);
        }
    }
}

static void own_gateway(owning *o, uint32_t gateway)
{
    const ep_cli_trace_model *model = o->model;
    size_t first;
    size_t count = ep_cli_trace_model_children(model, model->spans[gateway].call, &first);
    own(o, gateway);
    for (size_t i = 0; i < count; i++) {
        if (ep_cli_trace_model_gateway(model, model->by_parent[first + i]) ==
            &model->spans[gateway]) {
            own_forward(o, model->by_parent[first + i], true);
        }
    }
}

static void own_all(const ep_cli_trace_model *model, ep_cli_trace_figures *f)
{
    owning o = {model, f->owner_of, 0};
    memset(f->owner_of, 0xff, model->spans_count * sizeof(*f->owner_of));
    for (; o.request < f->requests_count; o.request++) {
        uint32_t index = f->requests[o.request];
        if (model->spans[index].kind == EP_CLI_SPAN_gateway) {
            own_gateway(&o, index);
        } else {
            own_forward(&o, index, false);
        }
    }
}

/* ---- failures ---- */

static void add_failure(ep_cli_trace_failure *failure, bool frames, ep_err status, uint32_t request)
{
    bool known = request == EP_CLI_TRACE_NONE || failure->first_count == EP_CLI_TRACE_FIRST_MAX;
    failure->status = status;
    failure->frames = frames;
    failure->count++;
    for (size_t i = 0; i < failure->first_count; i++) {
        known = known || failure->first[i] == request;
    }
    if (!known) {
        failure->first[failure->first_count++] = request;
    }
}

static int compare_failures(const void *a, const void *b)
{
    const ep_cli_trace_failure *x = a;
    const ep_cli_trace_failure *y = b;
    if (x->frames != y->frames) {
        return x->frames ? 1 : -1;
    }
    return x->count != y->count ? (x->count > y->count ? -1 : 1) : (int)x->status - (int)y->status;
}

/* A recording may hold any number; a number that is no error code counts as UNKNOWN. */
static ep_err status_of(const ep_cli_span *span)
{
    return span->status == 0 ? EP_OK : ep_err_from_wire((uint32_t)span->status, EP_ERR_UNKNOWN);
}

static ep_err make_failures(const ep_cli_trace_model *model, ep_cli_trace_figures *f,
                            ep_error *out_error)
{
    /* calls by status, then frames */
    f->failures = calloc((size_t)STATUS_MAX * 2, sizeof(*f->failures));
    if (f->failures == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the failures");
    }
    for (size_t i = 0; i < f->requests_count; i++) {
        ep_err status = status_of(&model->spans[f->requests[f->in_time[i]]]);
        if (status != EP_OK) {
            f->failed++;
            add_failure(&f->failures[status], false, status, f->in_time[i]);
        }
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        const ep_cli_span *span = &model->spans[i];
        ep_err status = span->kind == EP_CLI_SPAN_exchange ? status_of(span) : EP_OK;
        if (status != EP_OK) {
            ep_cli_trace_failure *failure = &f->failures[STATUS_MAX + status];
            uint32_t request = f->owner_of[i];
            add_failure(failure, true, status, request);
            failure->saved +=
                request != EP_CLI_TRACE_NONE && model->spans[f->requests[request]].status == 0;
        }
        f->unused += span->kind == EP_CLI_SPAN_exchange && span->unused;
    }
    for (size_t i = 0; i < (size_t)STATUS_MAX * 2; i++) {
        if (f->failures[i].count > 0) {
            f->failures[f->failures_count++] = f->failures[i];
        }
    }
    qsort(f->failures, f->failures_count, sizeof(*f->failures), compare_failures);
    return EP_OK;
}

/* ---- the slow node ---- */

static int64_t exchange_time(const ep_cli_trace_peer *peer, bool p99)
{
    return p99 ? peer->exchange.p99_ns : peer->exchange.p50_ns;
}

static int compare_exchange(const void *a, const void *b, void *arg)
{
    const bool *p99 = arg;
    int64_t x = exchange_time(*(const ep_cli_trace_peer *const *)a, *p99);
    int64_t y = exchange_time(*(const ep_cli_trace_peer *const *)b, *p99);
    return x != y ? (x < y ? -1 : 1) : 0;
}

static void compare_nodes(ep_cli_trace_figures *f, const ep_cli_trace_peer **nodes, bool p99)
{
    size_t count = 0;
    for (size_t i = 0; i < f->peers_count; i++) {
        if (!f->peers[i].gateway &&
            f->peers[i].exchange.count >= (p99 ? FRAMES_FOR_P99 : FRAMES_FOR_P50)) {
            nodes[count++] = &f->peers[i];
        }
    }
    if (count < 2) {
        return;
    }
    qsort_r(nodes, count, sizeof(*nodes), compare_exchange, &p99);
    const ep_cli_trace_peer *slowest = nodes[count - 1];
    const ep_cli_trace_peer *against = nodes[(count - 2) / 2]; /* median of the others */
    int64_t base = exchange_time(against, p99);
    double times = base > 0 ? (double)exchange_time(slowest, p99) / (double)base : 0.0;
    f->slow.compared = true;
    if (times >= STANDS_OUT && times > f->slow.times) {
        f->slow = (ep_cli_trace_slow){.peer = (uint32_t)(slowest - f->peers),
                                      .against = (uint32_t)(against - f->peers),
                                      .times = times,
                                      .p99 = p99,
                                      .compared = true};
    }
}

static ep_err make_slow(ep_cli_trace_figures *f, ep_error *out_error)
{
    const ep_cli_trace_peer **nodes = malloc((f->peers_count + 1) * sizeof(*nodes));
    f->slow.peer = EP_CLI_TRACE_NONE;
    if (nodes == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to compare nodes");
    }
    compare_nodes(f, nodes, false);
    compare_nodes(f, nodes, true);
    free(nodes);
    return EP_OK;
}

/* ---- over time ---- */

static int compare_begin(const void *a, const void *b, void *arg)
{
    const ep_cli_trace_figures *f = arg; /* spans are sorted by begin */
    uint32_t x = f->requests[*(const uint32_t *)a];
    uint32_t y = f->requests[*(const uint32_t *)b];
    return x < y ? -1 : x > y;
}

static void make_bins(const ep_cli_trace_model *model, ep_cli_trace_figures *f, int64_t *values)
{
    if (f->requests_count == 0) {
        return;
    }
    int64_t first = model->spans[f->requests[f->in_time[0]]].begin_ns;
    int64_t last = model->spans[f->requests[f->in_time[f->requests_count - 1]]].begin_ns;
    int64_t width = (last - first) / EP_CLI_TRACE_BINS + 1;
    size_t next = 0;
    f->bins_count = (size_t)((last - first) / width) + 1;
    for (size_t b = 0; b < f->bins_count; b++) {
        ep_cli_trace_bin *bin = &f->bins[b];
        size_t count = 0;
        bin->begin_ns = first + (int64_t)b * width;
        bin->end_ns = bin->begin_ns + width;
        for (; next < f->requests_count; next++) {
            const ep_cli_span *span = &model->spans[f->requests[f->in_time[next]]];
            if (span->begin_ns >= bin->end_ns) {
                break;
            }
            values[count++] = span->end_ns - span->begin_ns;
            bin->failed += span->status != 0;
            bin->hedged += f->hedged[f->in_time[next]];
        }
        bin->calls = ep_cli_trace_stat_of(values, count);
    }
}

/* ---- all ---- */

static void make_stages(const ep_cli_trace_model *model, ep_cli_trace_figures *f, int64_t *values)
{
    f->slow_count = (f->requests_count + SLOW_SHARE - 1) / SLOW_SHARE;
    for (size_t i = 0; i < f->requests_count; i++) {
        const ep_cli_span *span = &model->spans[f->requests[i]];
        values[i] = span->end_ns - span->begin_ns;
        for (int part = 0; part < EP_CLI_PATH_PARTS; part++) {
            f->stages_ns[ep_cli_stage_of[part]] += f->paths[i].parts_ns[part];
            f->slow_stages_ns[ep_cli_stage_of[part]] +=
                i < f->slow_count ? f->paths[i].parts_ns[part] : 0;
        }
    }
    f->calls = ep_cli_trace_stat_of(values, f->requests_count);
}

ep_err ep_cli_trace_calls_make(const ep_cli_trace_model *model, ep_cli_trace_figures *figures,
                               int64_t *values, ep_error *out_error)
{
    figures->owner_of = malloc((model->spans_count + 1) * sizeof(*figures->owner_of));
    figures->in_time = malloc((figures->requests_count + 1) * sizeof(*figures->in_time));
    figures->hedged = calloc(figures->requests_count + 1, sizeof(*figures->hedged));
    if (figures->owner_of == NULL || figures->in_time == NULL || figures->hedged == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu calls",
                            figures->requests_count);
    }
    for (size_t i = 0; i < figures->requests_count; i++) {
        figures->in_time[i] = (uint32_t)i;
    }
    qsort_r(figures->in_time, figures->requests_count, sizeof(*figures->in_time), compare_begin,
            figures);
    own_all(model, figures);
    for (size_t i = 0; i < model->spans_count; i++) {
        uint32_t owner = figures->owner_of[i];
        if (model->spans[i].kind == EP_CLI_SPAN_exchange && model->spans[i].unused &&
            owner != EP_CLI_TRACE_NONE) {
            figures->hedged[owner] = true;
        }
    }
    make_stages(model, figures, values);
    make_bins(model, figures, values);
    ep_err err = make_failures(model, figures, out_error);
    return err != EP_OK ? err : make_slow(figures, out_error);
}
