/* SPDX-License-Identifier: Apache-2.0 */
/* Sorting and counting. */
#include "trace/trace_figures.h"

#include <stdlib.h>
#include <string.h>

static int64_t length(const ep_cli_span *span)
{
    return span->end_ns - span->begin_ns;
}

static int64_t network_of(const ep_cli_trace_model *model, const ep_cli_span *exchange)
{
    int64_t rest = length(exchange) - length(&model->spans[exchange->mate]);
    return rest > 0 ? rest : 0;
}

static void make_stages(const ep_cli_trace_model *model, ep_cli_trace_figures *f, int64_t *values)
{
    for (int kind = 0; kind < EP_CLI_SPAN_KINDS; kind++) {
        size_t count = 0;
        for (size_t i = 0; i < model->spans_count; i++) {
            if (model->spans[i].kind == kind) {
                values[count++] = length(&model->spans[i]);
            }
        }
        f->stages[kind] = ep_cli_trace_stat_of(values, count);
    }
    size_t count = 0;
    for (size_t i = 0; i < model->spans_count; i++) {
        const ep_cli_span *span = &model->spans[i];
        bool joined = span->mate != EP_CLI_TRACE_NONE;
        f->unserved += span->kind == EP_CLI_SPAN_exchange && !joined;
        f->unasked += span->kind == EP_CLI_SPAN_serve && !joined;
        if (span->kind == EP_CLI_SPAN_exchange && joined) {
            values[count++] = network_of(model, span);
        }
    }
    f->network = ep_cli_trace_stat_of(values, count);
}

/* ---- requests ---- */

static int compare_slowest(const void *a, const void *b, void *arg)
{
    const ep_cli_span *spans = arg;
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    if (length(&spans[x]) != length(&spans[y])) {
        return length(&spans[x]) > length(&spans[y]) ? -1 : 1;
    }
    return x < y ? -1 : x > y;
}

/* A call that an application made: not the layer call that a gateway makes for it, and not the
 * gateway span of a call whose exchange was recorded. */
static bool is_request(const ep_cli_trace_model *model, uint32_t index)
{
    const ep_cli_span *span = &model->spans[index];
    return (span->kind == EP_CLI_SPAN_forward &&
            ep_cli_trace_model_gateway(model, index) == NULL) ||
           (span->kind == EP_CLI_SPAN_gateway && span->mate == EP_CLI_TRACE_NONE);
}

static ep_err make_requests(const ep_cli_trace_model *model, ep_cli_trace_figures *f,
                            ep_error *out_error)
{
    size_t most = f->stages[EP_CLI_SPAN_forward].count + f->stages[EP_CLI_SPAN_gateway].count;
    f->requests = malloc((most + 1) * sizeof(*f->requests));
    f->paths = malloc((most + 1) * sizeof(*f->paths));
    if (f->requests == NULL || f->paths == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu requests", most);
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        if (is_request(model, (uint32_t)i)) {
            f->requests[f->requests_count++] = (uint32_t)i;
            f->requests_ns += length(&model->spans[i]);
        }
    }
    qsort_r(f->requests, f->requests_count, sizeof(*f->requests), compare_slowest, model->spans);
    for (size_t i = 0; i < f->requests_count; i++) {
        ep_cli_trace_path_find(model, f->requests[i], &f->paths[i]);
    }
    return EP_OK;
}

/* ---- peers ---- */

/* Statistics of one kind of value over a peer's exchanges, all or only the joined ones. */
static ep_cli_trace_stat gather_peer(const ep_cli_trace_model *model, const uint32_t *exchanges,
                                     size_t count, int what, int64_t *values)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        const ep_cli_span *span = &model->spans[exchanges[i]];
        if (what == 0) {
            values[used++] = length(span);
        } else if (span->mate != EP_CLI_TRACE_NONE) {
            values[used++] =
                what == 1 ? network_of(model, span) : length(&model->spans[span->mate]);
        }
    }
    return ep_cli_trace_stat_of(values, used);
}

static int compare_peer_of(const void *a, const void *b, void *arg)
{
    const ep_cli_span *spans = arg;
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    return spans[x].peer != spans[y].peer ? (spans[x].peer < spans[y].peer ? -1 : 1)
           : x < y                        ? -1
                                          : x > y;
}

static int compare_peers(const void *a, const void *b)
{
    const ep_cli_trace_peer *x = a;
    const ep_cli_trace_peer *y = b;
    if (x->waited_ns != y->waited_ns) {
        return x->waited_ns > y->waited_ns ? -1 : 1;
    }
    if (x->exchange.total_ns != y->exchange.total_ns) {
        return x->exchange.total_ns > y->exchange.total_ns ? -1 : 1;
    }
    return x->name < y->name ? -1 : x->name > y->name;
}

static bool is_gateways(const ep_cli_trace_model *model, const ep_cli_span *exchange)
{
    return exchange->mate != EP_CLI_TRACE_NONE &&
           model->spans[exchange->mate].kind == EP_CLI_SPAN_gateway;
}

static ep_err make_peers(const ep_cli_trace_model *model, ep_cli_trace_figures *f, int64_t *values,
                         ep_error *out_error)
{
    size_t count = 0;
    uint32_t *slot_of = malloc(model->names_count * sizeof(*slot_of));
    uint32_t *exchanges = malloc((f->stages[EP_CLI_SPAN_exchange].count + 1) * sizeof(*exchanges));
    f->peers = calloc(model->names_count + 1, sizeof(*f->peers)); /* at most one per name */
    if (slot_of == NULL || exchanges == NULL || f->peers == NULL) {
        free(slot_of);
        free(exchanges);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the peers");
    }
    memset(slot_of, 0xff, model->names_count * sizeof(*slot_of));
    for (size_t i = 0; i < model->spans_count; i++) {
        if (model->spans[i].kind == EP_CLI_SPAN_exchange) {
            exchanges[count++] = (uint32_t)i;
        }
    }
    qsort_r(exchanges, count, sizeof(*exchanges), compare_peer_of, model->spans);
    for (size_t i = 0, end; i < count; i = end) {
        uint32_t name = model->spans[exchanges[i]].peer;
        ep_cli_trace_peer *peer = &f->peers[f->peers_count];
        for (end = i; end < count && model->spans[exchanges[end]].peer == name; end++) {
            peer->failed += model->spans[exchanges[end]].status != 0;
            peer->unused += model->spans[exchanges[end]].unused;
            peer->gateway = peer->gateway || is_gateways(model, &model->spans[exchanges[end]]);
        }
        peer->name = name;
        peer->exchange = gather_peer(model, &exchanges[i], end - i, 0, values);
        peer->network = gather_peer(model, &exchanges[i], end - i, 1, values);
        peer->serve = gather_peer(model, &exchanges[i], end - i, 2, values);
        slot_of[name] = (uint32_t)f->peers_count++;
    }
    for (size_t i = 0; i < f->requests_count; i++) {
        const ep_cli_trace_path *path = &f->paths[i];
        if (path->peer_ns > 0 && slot_of[path->peer] != EP_CLI_TRACE_NONE) {
            f->peers[slot_of[path->peer]].slowest_of++;
            f->peers[slot_of[path->peer]].waited_ns += path->peer_ns;
        }
        if (path->late_ns > 0 && slot_of[path->late_peer] != EP_CLI_TRACE_NONE) {
            f->peers[slot_of[path->late_peer]].late_ns += path->late_ns;
        }
    }
    qsort(f->peers, f->peers_count, sizeof(*f->peers), compare_peers);
    free(slot_of);
    free(exchanges);
    return EP_OK;
}

/* ---- experts ---- */

static int compare_place(const void *a, const void *b)
{
    const ep_cli_trace_expert *x = a;
    const ep_cli_trace_expert *y = b;
    return x->layer != y->layer ? (x->layer < y->layer ? -1 : 1)
                                : (x->expert > y->expert) - (x->expert < y->expert);
}

static int compare_load(const void *a, const void *b)
{
    const ep_cli_trace_expert *x = a;
    const ep_cli_trace_expert *y = b;
    return x->rows != y->rows ? (x->rows > y->rows ? -1 : 1) : compare_place(a, b);
}

static ep_err make_experts(const ep_cli_trace_model *model, ep_cli_trace_figures *f,
                           ep_error *out_error)
{
    size_t jobs = 0;
    f->experts = calloc(f->stages[EP_CLI_SPAN_job].count + 1, sizeof(*f->experts));
    if (f->experts == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the experts");
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        const ep_cli_span *span = &model->spans[i];
        if (span->kind == EP_CLI_SPAN_job && span->expert >= 0) {
            f->experts[jobs++] =
                (ep_cli_trace_expert){span->layer, span->expert, 1, span->rows, length(span)};
        }
    }
    qsort(f->experts, jobs, sizeof(*f->experts), compare_place);
    for (size_t i = 0; i < jobs; i++) {
        ep_cli_trace_expert *last = f->experts_count > 0 ? &f->experts[f->experts_count - 1] : NULL;
        if (last != NULL && compare_place(last, &f->experts[i]) == 0) {
            last->jobs++;
            last->rows += f->experts[i].rows;
            last->busy_ns += f->experts[i].busy_ns;
        } else {
            f->experts[f->experts_count++] = f->experts[i];
        }
    }
    qsort(f->experts, f->experts_count, sizeof(*f->experts), compare_load);
    return EP_OK;
}

/* ---- all ---- */

static int compare_trace(const void *a, const void *b)
{
    const ep_trace_id *x = a;
    const ep_trace_id *y = b;
    return x->high != y->high ? (x->high < y->high ? -1 : 1)
                              : (x->low > y->low) - (x->low < y->low);
}

static ep_err count_traces(const ep_cli_trace_model *model, ep_cli_trace_figures *f,
                           ep_error *out_error)
{
    size_t count = 0;
    ep_trace_id *ids = malloc((model->spans_count + 1) * sizeof(*ids));
    if (ids == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the trace ids");
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        if (model->spans[i].trace.high != 0 || model->spans[i].trace.low != 0) {
            ids[count++] = model->spans[i].trace;
        }
    }
    qsort(ids, count, sizeof(*ids), compare_trace);
    for (size_t i = 0; i < count; i++) {
        f->traces_count += i == 0 || compare_trace(&ids[i - 1], &ids[i]) != 0;
    }
    free(ids);
    return EP_OK;
}

ep_err ep_cli_trace_figures_make(const ep_cli_trace_model *model, ep_cli_trace_figures *out_figures,
                                 ep_error *out_error)
{
    *out_figures = (ep_cli_trace_figures){0};
    int64_t *values = malloc((model->spans_count + 1) * sizeof(*values));
    if (values == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu spans",
                            model->spans_count);
    }
    make_stages(model, out_figures, values);
    ep_err err = make_requests(model, out_figures, out_error);
    err = err != EP_OK ? err : make_peers(model, out_figures, values, out_error);
    err = err != EP_OK ? err : ep_cli_trace_calls_make(model, out_figures, values, out_error);
    err = err != EP_OK ? err : make_experts(model, out_figures, out_error);
    err = err != EP_OK ? err : count_traces(model, out_figures, out_error);
    free(values);
    if (err != EP_OK) {
        ep_cli_trace_figures_free(out_figures);
    }
    return err;
}

void ep_cli_trace_figures_free(ep_cli_trace_figures *figures)
{
    free(figures->requests);
    free(figures->paths);
    free(figures->peers);
    free(figures->failures);
    free(figures->owner_of);
    free(figures->in_time);
    free(figures->hedged);
    free(figures->experts);
    *figures = (ep_cli_trace_figures){0};
}
