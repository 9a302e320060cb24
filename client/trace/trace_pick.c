/* SPDX-License-Identifier: Apache-2.0 */
/* Picks whole calls for the page, so that each call is shown with all its spans. */
#include <stdlib.h>
#include <string.h>

#include "trace/trace_export.h"

#define SLOWEST_KEPT 200
#define FAILED_KEPT 200
#define HEDGED_KEPT 50
#define TOP 10 /* calls per stage and peer */
#define PEERS_KEPT 64
#define REFUSED_MAX 1000 /* after so many the page counts as full */

typedef struct picker {
    const ep_cli_trace_model *model;
    const ep_cli_trace_figures *f;
    ep_cli_trace_pick *pick;
    uint32_t *first_of; /* [requests_count + 1]: where a call's spans begin in owned */
    uint32_t *owned;    /* spans by owner */
    int64_t *scores;    /* [requests_count] */
    size_t spans_max;
    size_t refused; /* calls that did not fit */
} picker;

/* ---- spans of calls ---- */

static void index_owned(picker *p)
{
    for (size_t i = 0; i < p->model->spans_count; i++) {
        if (p->f->owner_of[i] != EP_CLI_TRACE_NONE) {
            p->first_of[p->f->owner_of[i] + 1]++;
        }
    }
    for (size_t i = 0; i < p->f->requests_count; i++) {
        p->first_of[i + 1] += p->first_of[i];
    }
    for (size_t i = 0; i < p->model->spans_count; i++) {
        uint32_t owner = p->f->owner_of[i];
        if (owner != EP_CLI_TRACE_NONE) {
            p->owned[p->first_of[owner]++] = (uint32_t)i;
        }
    }
    /* Filling moved each begin to the end of its call, which is the begin of the next call. */
    memmove(p->first_of + 1, p->first_of, p->f->requests_count * sizeof(*p->first_of));
    p->first_of[0] = 0;
}

/* Returns the number of spans not kept yet; if `keep`, keeps them while there is room. */
static size_t visit_span(picker *p, uint32_t index, bool keep)
{
    bool missing = !p->pick->spans[index];
    if (keep && missing && p->pick->spans_count < p->spans_max) {
        p->pick->spans[index] = true;
        p->pick->spans_count++;
    }
    return missing;
}

/* The job of a queue span, if it belongs to another call. */
static size_t visit_job(picker *p, uint32_t request, const ep_cli_span *queue, bool keep)
{
    static const ep_cli_span_kind kinds[] = {EP_CLI_SPAN_job, EP_CLI_SPAN_kernel};
    size_t missing = 0;
    for (size_t k = 0; k < 2; k++) {
        size_t first;
        size_t count = ep_cli_trace_model_find(p->model, kinds[k], queue->parent, &first);
        for (size_t i = 0; i < count; i++) {
            uint32_t index = p->model->by_call[first + i];
            bool others = p->f->owner_of[index] != request &&
                          p->model->spans[index].process == queue->process;
            missing += others ? visit_span(p, index, keep) : 0;
        }
    }
    return missing;
}

static size_t visit_call(picker *p, uint32_t request, bool keep)
{
    size_t missing = 0;
    for (uint32_t i = p->first_of[request]; i < p->first_of[request + 1]; i++) {
        const ep_cli_span *span = &p->model->spans[p->owned[i]];
        missing += visit_span(p, p->owned[i], keep);
        missing += span->kind == EP_CLI_SPAN_queue && span->parent != 0
                       ? visit_job(p, request, span, keep)
                       : 0;
    }
    return missing;
}

/* Keeps a call as a whole if the page holds fewer than room spans; if the page is too small for any
 * call, as many spans as fit. */
static void keep_call(picker *p, uint32_t request, size_t room)
{
    if (p->pick->calls[request] || p->pick->spans_count >= room || p->refused == REFUSED_MAX) {
        return;
    }
    if (p->pick->calls_count > 0 &&
        visit_call(p, request, false) > p->spans_max - p->pick->spans_count) {
        p->refused++;
        return;
    }
    p->pick->calls[request] = true;
    p->pick->calls_count++;
    visit_call(p, request, true);
}

/* ---- which ---- */

static void keep_top(picker *p, size_t room)
{
    uint32_t top[TOP];
    size_t count = 0;
    for (uint32_t i = 0; i < p->f->requests_count; i++) {
        size_t at = count;
        while (at > 0 && p->scores[top[at - 1]] < p->scores[i]) {
            at--;
        }
        if (p->scores[i] <= 0 || at == TOP) {
            continue;
        }
        count += count < TOP;
        memmove(&top[at + 1], &top[at], (count - at - 1) * sizeof(*top));
        top[at] = i;
    }
    for (size_t i = 0; i < count; i++) {
        keep_call(p, top[i], room);
    }
}

static void keep_failed(picker *p, size_t room)
{
    size_t failed = 0;
    for (size_t i = 0; i < p->f->failures_count; i++) {
        for (size_t k = 0; k < p->f->failures[i].first_count; k++) {
            keep_call(p, p->f->failures[i].first[k], room);
        }
    }
    for (size_t i = 0; i < p->f->requests_count && failed < FAILED_KEPT; i++) {
        if (p->model->spans[p->f->requests[p->f->in_time[i]]].status != 0) {
            keep_call(p, p->f->in_time[i], room);
            failed++;
        }
    }
}

static void keep_notable(picker *p, size_t room)
{
    const ep_cli_trace_figures *f = p->f;
    size_t hedged = 0;
    keep_failed(p, room);
    for (int stage = 0; stage < EP_CLI_STAGES; stage++) {
        for (size_t i = 0; i < f->requests_count; i++) {
            p->scores[i] = 0;
            for (int part = 0; part < EP_CLI_PATH_PARTS; part++) {
                p->scores[i] +=
                    ep_cli_stage_of[part] == (ep_cli_stage)stage ? f->paths[i].parts_ns[part] : 0;
            }
        }
        keep_top(p, room);
    }
    for (size_t k = 0; k < f->peers_count && k < PEERS_KEPT; k++) {
        for (size_t i = 0; i < f->requests_count; i++) {
            const ep_cli_trace_path *path = &f->paths[i];
            p->scores[i] = path->peer == f->peers[k].name ? path->peer_ns : 0;
            p->scores[i] += path->late_peer == f->peers[k].name ? path->late_ns : 0;
        }
        keep_top(p, room);
    }
    for (uint32_t i = 0; i < f->requests_count; i++) {
        if (i < SLOWEST_KEPT || (f->hedged[i] && hedged < HEDGED_KEPT)) {
            keep_call(p, i, room);
        }
        hedged += f->hedged[i];
    }
}

static int compare_longer(const void *a, const void *b, void *arg)
{
    const ep_cli_span *spans = arg;
    const ep_cli_span *x = &spans[*(const uint32_t *)a];
    const ep_cli_span *y = &spans[*(const uint32_t *)b];
    int64_t more = (x->end_ns - x->begin_ns) - (y->end_ns - y->begin_ns);
    return more != 0 ? (more > 0 ? -1 : 1) : x < y ? -1 : x > y;
}

/* Keeps spans of no call. They are gathered in owned, behind the spans with an owner. */
static void keep_others(picker *p, size_t room)
{
    uint32_t *others = p->owned + p->first_of[p->f->requests_count];
    size_t count = 0;
    for (size_t i = 0; i < p->model->spans_count; i++) {
        if (p->f->owner_of[i] == EP_CLI_TRACE_NONE) {
            others[count++] = (uint32_t)i;
        }
    }
    qsort_r(others, count, sizeof(*others), compare_longer, p->model->spans);
    for (size_t i = 0; i < count; i++) {
        visit_span(p, others[i], p->pick->spans_count < room);
    }
}

/* Visits halves, quarters, eighths ...: wherever it stops, the kept calls are spread evenly. */
static void keep_sample(picker *p, size_t room)
{
    size_t places = 1;
    while (places < p->f->requests_count) {
        places *= 2;
    }
    for (size_t i = 0; i < places; i++) {
        size_t place = 0;
        for (size_t bit = 1; bit < places; bit *= 2) {
            place = place * 2 + ((i & bit) != 0);
        }
        if (place < p->f->requests_count) {
            keep_call(p, p->f->in_time[place], room);
        }
    }
}

ep_err ep_cli_trace_pick_make(const ep_cli_trace_model *model, const ep_cli_trace_figures *figures,
                              size_t spans_max, ep_cli_trace_pick *out_pick, ep_error *out_error)
{
    size_t calls = figures->requests_count;
    picker p = {.model = model, .f = figures, .pick = out_pick, .spans_max = spans_max};
    *out_pick =
        (ep_cli_trace_pick){.spans = calloc(model->spans_count + 1, sizeof(*out_pick->spans)),
                            .calls = calloc(calls + 1, sizeof(*out_pick->calls))};
    p.first_of = calloc(calls + 2, sizeof(*p.first_of));
    p.owned = malloc((model->spans_count + 1) * sizeof(*p.owned));
    p.scores = malloc((calls + 1) * sizeof(*p.scores));
    bool good = out_pick->spans != NULL && out_pick->calls != NULL && p.first_of != NULL &&
                p.owned != NULL && p.scores != NULL;
    if (good) {
        index_owned(&p);
        keep_notable(&p, spans_max / 2);
        keep_others(&p, calls > 0 ? out_pick->spans_count + spans_max / 10 : spans_max);
        keep_sample(&p, spans_max);
    }
    free(p.first_of);
    free(p.owned);
    free(p.scores);
    if (!good) {
        ep_cli_trace_pick_free(out_pick);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to pick of %zu spans",
                            model->spans_count);
    }
    return EP_OK;
}

void ep_cli_trace_pick_free(ep_cli_trace_pick *pick)
{
    free(pick->spans);
    free(pick->calls);
    *pick = (ep_cli_trace_pick){0};
}
