/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the critical path of a request by walking backwards from its end. At each point the request
 * waited for the child that ended last before it; the time between two children is the parent's
 * own. Every nanosecond is counted once. The request waited for an answer that was not used only
 * until another copy was asked for its rows. A request through a gateway is walked into the layer
 * call inside the gateway.
 */
#include "trace/trace_figures.h"

const char *const ep_cli_path_names[EP_CLI_PATH_PARTS] = {
    "plan", "pack",    "network",  "decode", "queue",   "job",   "reply",
    "node", "gateway", "unserved", "late",   "combine", "client"};

typedef struct walk {
    const ep_cli_trace_model *model;
    ep_cli_trace_path *path;
} walk;

/* The child that ends last before `before`, of those seen so far. */
typedef struct latest {
    uint32_t span; /* EP_CLI_TRACE_NONE */
    int64_t end_ns;
    int64_t before;
    int64_t since;
} latest;

static void consider(latest *best, const ep_cli_trace_model *model, uint32_t index)
{
    const ep_cli_span *span = &model->spans[index];
    int64_t end = span->end_ns < best->before ? span->end_ns : best->before;
    if (span->begin_ns < best->before && end > best->since &&
        (best->span == EP_CLI_TRACE_NONE || end > best->end_ns)) {
        best->span = index;
        best->end_ns = end;
    }
}

/* Considers the spans of one process with this kind and call. */
static void consider_kind(latest *best, const ep_cli_trace_model *model, ep_cli_span_kind kind,
                          uint64_t call, uint32_t process)
{
    size_t first;
    size_t count = ep_cli_trace_model_find(model, kind, call, &first);
    for (size_t i = 0; i < count; i++) {
        uint32_t index = model->by_call[first + i];
        if (model->spans[index].process == process) {
            consider(best, model, index);
        }
    }
}

static int64_t later(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Children of a serve: decode, queue, the jobs its groups of rows went into, reply. */
static void walk_serve(walk *w, const ep_cli_span *serve, int64_t since, int64_t until)
{
    const ep_cli_trace_model *model = w->model;
    size_t first;
    size_t groups = ep_cli_trace_model_find(model, EP_CLI_SPAN_queue, serve->call, &first);
    while (until > since) {
        latest best = {.span = EP_CLI_TRACE_NONE, .before = until, .since = since};
        consider_kind(&best, model, EP_CLI_SPAN_reply, serve->call, serve->process);
        for (size_t i = 0; i < groups; i++) {
            const ep_cli_span *queue = &model->spans[model->by_call[first + i]];
            if (queue->process == serve->process && queue->parent != 0) {
                consider_kind(&best, model, EP_CLI_SPAN_job, queue->parent, serve->process);
            }
        }
        consider_kind(&best, model, EP_CLI_SPAN_queue, serve->call, serve->process);
        consider_kind(&best, model, EP_CLI_SPAN_decode, serve->call, serve->process);
        if (best.span == EP_CLI_TRACE_NONE) {
            break;
        }
        const ep_cli_span *child = &model->spans[best.span];
        int64_t begin = later(child->begin_ns, since);
        ep_cli_path_part part = child->kind == EP_CLI_SPAN_reply   ? EP_CLI_PATH_REPLY
                                : child->kind == EP_CLI_SPAN_job   ? EP_CLI_PATH_JOB
                                : child->kind == EP_CLI_SPAN_queue ? EP_CLI_PATH_QUEUE
                                                                   : EP_CLI_PATH_DECODE;
        w->path->parts_ns[EP_CLI_PATH_NODE] += until - best.end_ns;
        w->path->parts_ns[part] += best.end_ns - begin;
        until = begin;
    }
    w->path->parts_ns[EP_CLI_PATH_NODE] += until - since;
}

static void walk_gateway(walk *w, const ep_cli_span *gateway, int64_t since, int64_t until);

/* inside: the exchange runs in a gateway. A gateway inside a gateway is not walked, so that a
 * damaged recording cannot cause endless recursion. */
static void walk_exchange(walk *w, const ep_cli_span *exchange, bool inside, int64_t since,
                          int64_t until)
{
    const ep_cli_span *served =
        exchange->mate != EP_CLI_TRACE_NONE ? &w->model->spans[exchange->mate] : NULL;
    bool through = served != NULL && served->kind == EP_CLI_SPAN_gateway && !inside;
    if (!through && until - since > w->path->peer_ns) {
        w->path->peer = exchange->peer;
        w->path->peer_ns = until - since;
    }
    if (served == NULL) {
        w->path->parts_ns[EP_CLI_PATH_UNSERVED] += until - since;
        return;
    }
    int64_t begin = later(served->begin_ns, since);
    int64_t end = served->end_ns < until ? served->end_ns : until;
    if (end <= begin) {
        w->path->parts_ns[EP_CLI_PATH_NETWORK] += until - since;
        return;
    }
    w->path->parts_ns[EP_CLI_PATH_NETWORK] += (until - end) + (begin - since);
    if (served->kind == EP_CLI_SPAN_serve) {
        walk_serve(w, served, begin, end);
    } else if (through) {
        walk_gateway(w, served, begin, end);
    } else {
        w->path->parts_ns[EP_CLI_PATH_GATEWAY] += end - begin;
    }
}

/*
 * A combine may begin a moment before an exchange it waits for ends. An exchange never waits for
 * another one that still runs when it begins: ended leaves those out.
 */
static void consider_exchanges(latest *best, const ep_cli_trace_model *model,
                               const ep_cli_span *forward, bool ended)
{
    size_t first;
    size_t count = ep_cli_trace_model_children(model, forward->call, &first);
    for (size_t i = 0; i < count; i++) {
        uint32_t index = model->by_parent[first + i];
        const ep_cli_span *exchange = &model->spans[index];
        if (exchange->kind == EP_CLI_SPAN_exchange && exchange->process == forward->process &&
            !exchange->unused && (!ended || exchange->end_ns <= best->before)) {
            consider(best, model, index);
        }
    }
}

/*
 * The time between children: the client's own work, or, before another copy's exchange, the wait
 * for a running exchange whose answer is not used in the end.
 */
static void walk_gap(walk *w, const ep_cli_span *forward, bool before_exchange, int64_t since,
                     int64_t until)
{
    size_t first;
    size_t count = ep_cli_trace_model_children(w->model, forward->call, &first);
    int64_t waited_since = until;
    uint32_t peer = 0;
    for (size_t i = 0; i < count && before_exchange; i++) {
        const ep_cli_span *exchange = &w->model->spans[w->model->by_parent[first + i]];
        if (exchange->unused && exchange->process == forward->process &&
            exchange->begin_ns < waited_since && exchange->end_ns >= until) {
            waited_since = later(exchange->begin_ns, since);
            peer = exchange->peer;
        }
    }
    if (until - waited_since > w->path->late_ns) {
        w->path->late_peer = peer;
        w->path->late_ns = until - waited_since;
    }
    w->path->parts_ns[EP_CLI_PATH_LATE] += until - waited_since;
    w->path->parts_ns[EP_CLI_PATH_CLIENT] += waited_since - since;
}

static void walk_forward(walk *w, const ep_cli_span *forward, bool inside, int64_t since,
                         int64_t until)
{
    bool exchanged = false;
    while (until > since) {
        latest best = {.span = EP_CLI_TRACE_NONE, .before = until, .since = since};
        consider_kind(&best, w->model, EP_CLI_SPAN_combine, forward->call, forward->process);
        consider_exchanges(&best, w->model, forward, exchanged);
        consider_kind(&best, w->model, EP_CLI_SPAN_pack, forward->call, forward->process);
        consider_kind(&best, w->model, EP_CLI_SPAN_plan, forward->call, forward->process);
        if (best.span == EP_CLI_TRACE_NONE) {
            break;
        }
        const ep_cli_span *child = &w->model->spans[best.span];
        int64_t begin = later(child->begin_ns, since);
        walk_gap(w, forward, exchanged, best.end_ns, until);
        if (child->kind == EP_CLI_SPAN_exchange) {
            walk_exchange(w, child, inside, begin, best.end_ns);
            exchanged = true;
        } else {
            ep_cli_path_part part = child->kind == EP_CLI_SPAN_combine ? EP_CLI_PATH_COMBINE
                                    : child->kind == EP_CLI_SPAN_pack  ? EP_CLI_PATH_PACK
                                                                       : EP_CLI_PATH_PLAN;
            w->path->parts_ns[part] += best.end_ns - begin;
        }
        until = begin;
    }
    walk_gap(w, forward, exchanged, since, until);
}

static void walk_gateway(walk *w, const ep_cli_span *gateway, int64_t since, int64_t until)
{
    size_t first;
    size_t count = ep_cli_trace_model_children(w->model, gateway->call, &first);
    while (until > since) {
        latest best = {.span = EP_CLI_TRACE_NONE, .before = until, .since = since};
        for (size_t i = 0; i < count; i++) {
            uint32_t index = w->model->by_parent[first + i];
            if (ep_cli_trace_model_gateway(w->model, index) == gateway) {
                consider(&best, w->model, index);
            }
        }
        if (best.span == EP_CLI_TRACE_NONE) {
            break;
        }
        const ep_cli_span *forward = &w->model->spans[best.span];
        int64_t begin = later(forward->begin_ns, since);
        w->path->parts_ns[EP_CLI_PATH_GATEWAY] += until - best.end_ns;
        walk_forward(w, forward, true, begin, best.end_ns);
        until = begin;
    }
    w->path->parts_ns[EP_CLI_PATH_GATEWAY] += until - since;
}

void ep_cli_trace_path_find(const ep_cli_trace_model *model, uint32_t request,
                            ep_cli_trace_path *out_path)
{
    *out_path = (ep_cli_trace_path){0};
    walk w = {model, out_path};
    const ep_cli_span *span = &model->spans[request];
    if (span->kind == EP_CLI_SPAN_gateway) {
        walk_gateway(&w, span, span->begin_ns, span->end_ns);
    } else {
        walk_forward(&w, span, false, span->begin_ns, span->end_ns);
    }
}
