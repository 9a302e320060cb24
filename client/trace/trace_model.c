/* SPDX-License-Identifier: Apache-2.0 */
/* Joins begins and ends to spans; names and processes become small numbers. */
#include "trace/trace_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/printable.h"

#define TABLE_START 1024 /* a power of 2 */
#define TOO_MANY "(too many names)"

const char *const ep_cli_span_names[EP_CLI_SPAN_KINDS] = {
#define EP_TRACE_SPAN(name, step, on, what) #name,
#include "observe/trace_spans.def"
#undef EP_TRACE_SPAN
};

struct ep_cli_trace_tables {
    uint64_t events_max;
    size_t spans_capacity;
    uint32_t *buckets; /* heads of chains of open spans */
    size_t buckets_count;
    size_t open_count;
    uint32_t *name_slots; /* open addressing, 0 empty, else name index + 1 */
    size_t name_slots_count;
    size_t processes_capacity;
    ep_cli_unmatched *ends; /* without a begin */
    size_t ends_count;
    size_t ends_capacity;
    int64_t longest_ns[EP_CLI_SPAN_KINDS]; /* matched spans */
};

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

static size_t bucket_of(const struct ep_cli_trace_tables *tables, uint32_t process, uint8_t kind,
                        uint64_t call, uint32_t sub)
{
    return mix(mix(call + kind) ^ ((uint64_t)process << 32 | sub)) & (tables->buckets_count - 1);
}

/* ---- names ---- */

static size_t name_slot(const ep_cli_trace_model *model, const char *text)
{
    uint64_t hash = 0;
    for (const char *c = text; *c != '\0'; c++) {
        hash = hash * 31 + (unsigned char)*c;
    }
    size_t mask = model->tables->name_slots_count - 1;
    size_t slot = mix(hash) & mask;
    while (model->tables->name_slots[slot] != 0 &&
           strcmp(model->names[model->tables->name_slots[slot] - 1], text) != 0) {
        slot = (slot + 1) & mask;
    }
    return slot;
}

/* EP_CLI_TRACE_NONE: no memory. */
static uint32_t intern(ep_cli_trace_model *model, const char *raw)
{
    char text[EP_CLI_TRACE_NAME_BYTES];
    ep_text_escape(raw, text, sizeof(text));
    size_t slot = name_slot(model, text);
    if (model->tables->name_slots[slot] == 0 && model->names_count == EP_CLI_TRACE_NAMES_MAX) {
        return 1;
    }
    if (model->tables->name_slots[slot] == 0) {
        char *copy = strdup(text);
        if (copy == NULL) {
            return EP_CLI_TRACE_NONE;
        }
        model->names[model->names_count++] = copy;
        model->tables->name_slots[slot] = (uint32_t)model->names_count;
    }
    return model->tables->name_slots[slot] - 1;
}

/* ---- life ---- */

ep_cli_trace_model *ep_cli_trace_model_create(uint64_t events_max)
{
    ep_cli_trace_model *model = calloc(1, sizeof(*model));
    struct ep_cli_trace_tables *tables = calloc(1, sizeof(*tables));
    if (model == NULL || tables == NULL) {
        free(model);
        free(tables);
        return NULL;
    }
    model->tables = tables;
    tables->events_max = events_max;
    tables->buckets_count = TABLE_START;
    tables->name_slots_count = EP_CLI_TRACE_NAMES_MAX * 2;
    tables->buckets = malloc(TABLE_START * sizeof(*tables->buckets));
    tables->name_slots = calloc(tables->name_slots_count, sizeof(*tables->name_slots));
    model->names = calloc(EP_CLI_TRACE_NAMES_MAX, sizeof(*model->names));
    model->unmatched = calloc(EP_CLI_TRACE_LISTED_MAX, sizeof(*model->unmatched));
    if (tables->buckets == NULL || tables->name_slots == NULL || model->names == NULL ||
        model->unmatched == NULL || intern(model, "") != 0 || intern(model, TOO_MANY) != 1) {
        ep_cli_trace_model_destroy(model);
        return NULL;
    }
    memset(tables->buckets, 0xff, TABLE_START * sizeof(*tables->buckets));
    return model;
}

void ep_cli_trace_model_destroy(ep_cli_trace_model *model)
{
    if (model == NULL) {
        return;
    }
    for (size_t i = 0; model->names != NULL && i < model->names_count; i++) {
        free(model->names[i]);
    }
    for (size_t i = 0; i < model->recordings_count; i++) {
        free(model->recordings[i].skipped);
    }
    free(model->names);
    free(model->spans);
    free(model->processes);
    free(model->unmatched);
    free(model->by_call);
    free(model->by_parent);
    free(model->tables->buckets);
    free(model->tables->name_slots);
    free(model->tables->ends);
    free(model->tables);
    free(model);
}

ep_err ep_cli_trace_model_recording(ep_cli_trace_model *model, const char *path,
                                    ep_error *out_error)
{
    if (model->recordings_count == EP_CLI_TRACE_RECORDINGS_MAX) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED, "%s: more than %d recordings",
                            path, EP_CLI_TRACE_RECORDINGS_MAX);
    }
    ep_cli_recording *recording = &model->recordings[model->recordings_count++];
    snprintf(recording->path, sizeof(recording->path), "%s", path);
    return EP_OK;
}

/* ---- processes ---- */

static bool names_process(ep_cli_trace_process *p, const ep_cli_trace_event *event, uint32_t node,
                          uint32_t thread, uint32_t frames)
{
    if (p->recording != event->recording || p->pid != event->pid ||
        (node != 0 && p->node != 0 && p->node != node)) {
        return false;
    }
    p->node = p->node == 0 ? node : p->node;
    p->frames = p->frames == 0 ? frames : p->frames;
    p->calls = p->calls || event->kind == EP_CLI_SPAN_forward;
    p->thread = event->tid == event->pid ? thread : p->thread;
    return true;
}

/*
 * Finds the process of an event by pid and name: two names under one pid are two processes, since
 * each container counts pids on its own. Events without a name go to the first process of the pid.
 * Send and receive spans carry the name of a connection's owner; a process may have several of
 * those, so this name is used only when there is no other.
 */
static uint32_t process_of(ep_cli_trace_model *model, const ep_cli_trace_event *event,
                           ep_error *out_error)
{
    struct ep_cli_trace_tables *tables = model->tables;
    uint32_t node = intern(model, event->node);
    uint32_t thread = intern(model, event->thread);
    uint32_t frames = 0;
    ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a process");
    if (event->kind == EP_CLI_SPAN_send || event->kind == EP_CLI_SPAN_receive) {
        frames = node;
        node = node == EP_CLI_TRACE_NONE ? node : 0;
    }
    if (node == EP_CLI_TRACE_NONE || thread == EP_CLI_TRACE_NONE) {
        return EP_CLI_TRACE_NONE;
    }
    for (size_t i = 0; i < model->processes_count; i++) {
        if (names_process(&model->processes[i], event, node, thread, frames)) {
            return (uint32_t)i;
        }
    }
    if (model->processes_count == EP_CLI_TRACE_PROCESSES_MAX) {
        ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED, "events of more than %d processes",
                     EP_CLI_TRACE_PROCESSES_MAX);
        return EP_CLI_TRACE_NONE;
    }
    if (model->processes_count == tables->processes_capacity) {
        size_t capacity = tables->processes_capacity == 0 ? 16 : tables->processes_capacity * 2;
        ep_cli_trace_process *grown = realloc(model->processes, capacity * sizeof(*grown));
        if (grown == NULL) {
            return EP_CLI_TRACE_NONE;
        }
        model->processes = grown;
        tables->processes_capacity = capacity;
    }
    model->processes[model->processes_count] =
        (ep_cli_trace_process){.recording = event->recording,
                               .pid = event->pid,
                               .node = node,
                               .thread = thread,
                               .frames = frames,
                               .calls = event->kind == EP_CLI_SPAN_forward,
                               .first_ns = event->time_ns};
    return (uint32_t)model->processes_count++;
}

void ep_cli_trace_process_name(const ep_cli_trace_model *model, uint32_t process, bool with_pid,
                               char *out_name, size_t bytes)
{
    const ep_cli_trace_process *p = &model->processes[process];
    const char *name = model->names[p->node != 0 ? p->node : p->thread];
    if (with_pid) {
        snprintf(out_name, bytes, "%s%s (%d)", p->node != 0 ? "" : "client ", name, p->pid);
    } else {
        snprintf(out_name, bytes, "%s%s", p->node != 0 ? "" : "client ", name);
    }
}

/* ---- open spans ---- */

static bool grow_buckets(ep_cli_trace_model *model)
{
    struct ep_cli_trace_tables *tables = model->tables;
    size_t count = tables->buckets_count * 2;
    uint32_t *old = tables->buckets;
    uint32_t *grown = malloc(count * sizeof(*grown));
    if (grown == NULL) {
        return false;
    }
    memset(grown, 0xff, count * sizeof(*grown));
    size_t old_count = tables->buckets_count;
    tables->buckets = grown;
    tables->buckets_count = count;
    for (size_t b = 0; b < old_count; b++) {
        for (uint32_t i = old[b]; i != EP_CLI_TRACE_NONE;) {
            ep_cli_span *span = &model->spans[i];
            uint32_t next = span->chain;
            size_t bucket = bucket_of(tables, span->process, span->kind, span->call, span->sub);
            span->chain = grown[bucket];
            grown[bucket] = i;
            i = next;
        }
    }
    free(old);
    return true;
}

/* Takes the open span of this name off its chain; EP_CLI_TRACE_NONE when there is none. */
static uint32_t take_open(ep_cli_trace_model *model, uint32_t process,
                          const ep_cli_trace_event *event)
{
    struct ep_cli_trace_tables *tables = model->tables;
    uint32_t *link =
        &tables->buckets[bucket_of(tables, process, (uint8_t)event->kind, event->call, event->sub)];
    while (*link != EP_CLI_TRACE_NONE) {
        ep_cli_span *span = &model->spans[*link];
        if (span->process == process && span->kind == (uint8_t)event->kind &&
            span->call == event->call && span->sub == event->sub) {
            uint32_t found = *link;
            *link = span->chain;
            tables->open_count--;
            return found;
        }
        link = &span->chain;
    }
    return EP_CLI_TRACE_NONE;
}

static bool keep_end(struct ep_cli_trace_tables *tables, const ep_cli_unmatched *one)
{
    if (tables->ends_count == tables->ends_capacity) {
        size_t capacity = tables->ends_capacity == 0 ? TABLE_START : tables->ends_capacity * 2;
        ep_cli_unmatched *grown = realloc(tables->ends, capacity * sizeof(*grown));
        if (grown == NULL) {
            return false;
        }
        tables->ends = grown;
        tables->ends_capacity = capacity;
    }
    tables->ends[tables->ends_count++] = *one;
    return true;
}

static ep_err add_begin(ep_cli_trace_model *model, uint32_t process,
                        const ep_cli_trace_event *event, ep_error *out_error)
{
    struct ep_cli_trace_tables *tables = model->tables;
    uint32_t peer = intern(model, event->peer);
    uint32_t older = take_open(model, process, event); /* never ended */
    if (older != EP_CLI_TRACE_NONE) {
        model->spans[older].again = true;
    }
    if (model->spans_count == tables->spans_capacity) {
        size_t capacity = tables->spans_capacity == 0 ? TABLE_START : tables->spans_capacity * 2;
        ep_cli_span *grown = realloc(model->spans, capacity * sizeof(*grown));
        if (grown == NULL) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu spans", capacity);
        }
        model->spans = grown;
        tables->spans_capacity = capacity;
    }
    if (peer == EP_CLI_TRACE_NONE ||
        (tables->open_count >= tables->buckets_count && !grow_buckets(model))) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the open spans");
    }
    size_t bucket = bucket_of(tables, process, (uint8_t)event->kind, event->call, event->sub);
    model->spans[model->spans_count] = (ep_cli_span){.begin_ns = event->time_ns,
                                                     .end_ns = event->time_ns,
                                                     .trace = event->trace,
                                                     .call = event->call,
                                                     .parent = event->parent,
                                                     .epoch = event->epoch,
                                                     .process = process,
                                                     .peer = peer,
                                                     .sub = event->sub,
                                                     .rows = event->rows,
                                                     .layer = event->layer,
                                                     .expert = event->expert,
                                                     .status = event->status,
                                                     .tid = event->tid,
                                                     .mate = EP_CLI_TRACE_NONE,
                                                     .chain = tables->buckets[bucket],
                                                     .kind = (uint8_t)event->kind,
                                                     .open = true};
    tables->buckets[bucket] = (uint32_t)model->spans_count++;
    tables->open_count++;
    return EP_OK;
}

/* An end event adds the job and the status, sometimes rows and peer. */
static ep_err add_end(ep_cli_trace_model *model, uint32_t process, const ep_cli_trace_event *event,
                      ep_error *out_error)
{
    uint32_t index = take_open(model, process, event);
    uint32_t peer = intern(model, event->peer);
    if (peer == EP_CLI_TRACE_NONE) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a name");
    }
    if (index == EP_CLI_TRACE_NONE) {
        const ep_cli_unmatched one = {event->time_ns, event->trace,         event->call, event->sub,
                                      process,        (uint8_t)event->kind, true,        false};
        return keep_end(model->tables, &one) ? EP_OK
                                             : ep_error_set(out_error, EP_ERR_NO_MEMORY,
                                                            "no memory for an end without begin");
    }
    ep_cli_span *span = &model->spans[index];
    span->open = false;
    span->end_ns = event->time_ns > span->begin_ns ? event->time_ns : span->begin_ns;
    int64_t *longest = &model->tables->longest_ns[span->kind];
    *longest = span->end_ns - span->begin_ns > *longest ? span->end_ns - span->begin_ns : *longest;
    span->status = event->status;
    span->parent = event->parent != 0 ? event->parent : span->parent;
    span->unused = event->kind == EP_CLI_SPAN_exchange && event->rows == 0 && event->status == 0;
    span->rows = event->rows != 0 ? event->rows : span->rows;
    span->peer = peer != 0 ? peer : span->peer;
    span->epoch = event->epoch != 0 ? event->epoch : span->epoch;
    span->layer = event->layer >= 0 ? event->layer : span->layer;
    span->expert = event->expert >= 0 ? event->expert : span->expert;
    if (span->trace.high == 0 && span->trace.low == 0) {
        span->trace = event->trace;
    }
    return EP_OK;
}

ep_err ep_cli_trace_model_add(ep_cli_trace_model *model, const ep_cli_trace_event *event,
                              ep_error *out_error)
{
    if (event->recording >= model->recordings_count || (unsigned)event->kind >= EP_CLI_SPAN_KINDS) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "event of kind %d in recording %u",
                            (int)event->kind, event->recording);
    }
    if (model->events_count >= model->tables->events_max) {
        model->cut = true;
        return EP_OK;
    }
    ep_error why;
    uint32_t process = process_of(model, event, &why);
    if (process == EP_CLI_TRACE_NONE) {
        return ep_error_set(out_error, why.code, "%s", why.text);
    }
    ep_cli_recording *recording = &model->recordings[event->recording];
    model->events_count++;
    recording->last_ns = recording->events_count == 0 || event->time_ns > recording->last_ns
                             ? event->time_ns
                             : recording->last_ns;
    recording->events_count++;
    return event->is_end ? add_end(model, process, event, out_error)
                         : add_begin(model, process, event, out_error);
}

/* ---- finish ---- */

static bool same_trace(ep_trace_id a, ep_trace_id b)
{
    return a.high == b.high && a.low == b.low;
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Cut or unmatched: the rule is in the header. */
static void judge(ep_cli_trace_model *model, const ep_cli_unmatched *one, ep_trace_id only)
{
    const ep_cli_trace_process *process = &model->processes[one->process];
    int64_t last_ns = model->recordings[process->recording].last_ns;
    int64_t longest = model->tables->longest_ns[one->kind];
    int64_t edge = longest > EP_CLI_TRACE_EDGE_NS ? longest : EP_CLI_TRACE_EDGE_NS;
    if (!same_trace(only, (ep_trace_id){0}) && !same_trace(only, one->trace)) {
        return;
    }
    if (one->is_end ? one->time_ns - process->first_ns <= edge
                    : !one->again && last_ns - one->time_ns <= edge) {
        *(one->is_end ? &model->cut_ends : &model->cut_begins) += 1;
        return;
    }
    *(one->is_end ? &model->unmatched_ends : &model->unmatched_begins) += 1;
    if (model->unmatched_count < EP_CLI_TRACE_LISTED_MAX) {
        model->unmatched[model->unmatched_count++] = *one;
    }
}

static void take_out_open(ep_cli_trace_model *model, ep_trace_id only)
{
    size_t kept = 0;
    for (size_t i = 0; i < model->tables->ends_count; i++) {
        judge(model, &model->tables->ends[i], only);
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        ep_cli_span *span = &model->spans[i];
        if (span->open) {
            const ep_cli_unmatched one = {span->begin_ns, span->trace, span->call, span->sub,
                                          span->process,  span->kind,  false,      span->again};
            judge(model, &one, only);
        } else {
            model->spans[kept++] = *span;
        }
    }
    model->spans_count = kept;
}

/* Collects, sorted, the jobs of the trace's queue spans or its remote calls. */
static size_t named_calls(const ep_cli_trace_model *model, ep_trace_id trace, bool jobs,
                          uint64_t *out_calls)
{
    size_t count = 0;
    for (size_t i = 0; i < model->spans_count; i++) {
        const ep_cli_span *span = &model->spans[i];
        bool names = jobs ? span->kind == EP_CLI_SPAN_queue
                          : span->kind == EP_CLI_SPAN_exchange || span->kind == EP_CLI_SPAN_serve;
        if (names && same_trace(span->trace, trace)) {
            out_calls[count++] = jobs ? span->parent : span->call;
        }
    }
    qsort(out_calls, count, sizeof(*out_calls), compare_u64);
    return count;
}

/* Keeps the spans of the trace, the jobs (with kernels) that its queue spans name, and spans of its
 * remote calls recorded before the node had decoded the trace id. */
static ep_err keep_trace(ep_cli_trace_model *model, ep_trace_id trace, ep_error *out_error)
{
    uint64_t *jobs = malloc((model->spans_count + 1) * sizeof(*jobs));
    uint64_t *calls = malloc((model->spans_count + 1) * sizeof(*calls));
    if (jobs == NULL || calls == NULL) {
        free(jobs);
        free(calls);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to choose one trace");
    }
    size_t jobs_count = named_calls(model, trace, true, jobs);
    size_t calls_count = named_calls(model, trace, false, calls);
    size_t kept = 0;
    for (size_t i = 0; i < model->spans_count; i++) {
        const ep_cli_span *span = &model->spans[i];
        bool works = span->kind == EP_CLI_SPAN_job || span->kind == EP_CLI_SPAN_kernel;
        bool carries = (span->kind == EP_CLI_SPAN_send || span->kind == EP_CLI_SPAN_receive) &&
                       same_trace(span->trace, (ep_trace_id){0});
        if (same_trace(span->trace, trace) ||
            (works && bsearch(&span->call, jobs, jobs_count, sizeof(*jobs), compare_u64) != NULL) ||
            (carries &&
             bsearch(&span->call, calls, calls_count, sizeof(*calls), compare_u64) != NULL)) {
            model->spans[kept++] = *span;
        }
    }
    model->spans_count = kept;
    free(jobs);
    free(calls);
    return EP_OK;
}

static int compare_begin(const void *a, const void *b)
{
    const ep_cli_span *x = a;
    const ep_cli_span *y = b;
    if (x->begin_ns != y->begin_ns) {
        return x->begin_ns < y->begin_ns ? -1 : 1;
    }
    if (x->end_ns != y->end_ns) {
        return x->end_ns > y->end_ns ? -1 : 1;
    }
    return x->kind != y->kind ? (int)x->kind - (int)y->kind : (x->sub > y->sub) - (x->sub < y->sub);
}

static int compare_call(const void *a, const void *b, void *arg)
{
    const ep_cli_span *spans = arg;
    const ep_cli_span *x = &spans[*(const uint32_t *)a];
    const ep_cli_span *y = &spans[*(const uint32_t *)b];
    if (x->kind != y->kind) {
        return (int)x->kind - (int)y->kind;
    }
    if (x->call != y->call) {
        return x->call < y->call ? -1 : 1;
    }
    return x < y ? -1 : x > y;
}

static int compare_parent(const void *a, const void *b, void *arg)
{
    const ep_cli_span *spans = arg;
    const ep_cli_span *x = &spans[*(const uint32_t *)a];
    const ep_cli_span *y = &spans[*(const uint32_t *)b];
    return x->parent != y->parent ? (x->parent < y->parent ? -1 : 1) : x < y ? -1 : x > y;
}

static ep_err index_calls(ep_cli_trace_model *model, ep_error *out_error)
{
    free(model->by_call);
    free(model->by_parent);
    model->by_parent_count = 0;
    model->by_call = malloc((model->spans_count + 1) * sizeof(*model->by_call));
    model->by_parent = malloc((model->spans_count + 1) * sizeof(*model->by_parent));
    if (model->by_call == NULL || model->by_parent == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the index of spans");
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        model->by_call[i] = (uint32_t)i;
        if (model->spans[i].kind == EP_CLI_SPAN_exchange ||
            model->spans[i].kind == EP_CLI_SPAN_forward) {
            model->by_parent[model->by_parent_count++] = (uint32_t)i;
        }
    }
    qsort_r(model->by_call, model->spans_count, sizeof(*model->by_call), compare_call,
            model->spans);
    qsort_r(model->by_parent, model->by_parent_count, sizeof(*model->by_parent), compare_parent,
            model->spans);
    return EP_OK;
}

static size_t lower_bound(const ep_cli_trace_model *model, ep_cli_span_kind kind, uint64_t call,
                          bool past)
{
    size_t low = 0;
    size_t high = model->spans_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const ep_cli_span *span = &model->spans[model->by_call[middle]];
        bool before = span->kind != (uint8_t)kind
                          ? span->kind < (uint8_t)kind
                          : span->call < call || (past && span->call == call);
        low = before ? middle + 1 : low;
        high = before ? high : middle;
    }
    return low;
}

size_t ep_cli_trace_model_find(const ep_cli_trace_model *model, ep_cli_span_kind kind,
                               uint64_t call, size_t *out_first)
{
    *out_first = lower_bound(model, kind, call, false);
    return lower_bound(model, kind, call, true) - *out_first;
}

size_t ep_cli_trace_model_children(const ep_cli_trace_model *model, uint64_t call,
                                   size_t *out_first)
{
    size_t low = 0;
    size_t high = model->by_parent_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        bool before = model->spans[model->by_parent[middle]].parent < call;
        low = before ? middle + 1 : low;
        high = before ? high : middle;
    }
    *out_first = low;
    while (low < model->by_parent_count && model->spans[model->by_parent[low]].parent == call) {
        low++;
    }
    return low - *out_first;
}

const ep_cli_span *ep_cli_trace_model_gateway(const ep_cli_trace_model *model, uint32_t forward)
{
    const ep_cli_span *span = &model->spans[forward];
    size_t first;
    size_t count = span->kind == EP_CLI_SPAN_forward && span->parent != 0
                       ? ep_cli_trace_model_find(model, EP_CLI_SPAN_gateway, span->parent, &first)
                       : 0;
    for (size_t i = 0; i < count; i++) {
        const ep_cli_span *gateway = &model->spans[model->by_call[first + i]];
        if (gateway->process == span->process && same_trace(gateway->trace, span->trace)) {
            return gateway;
        }
    }
    return NULL;
}

/* Call ids are unique among a client's calls only: the trace and the node's name must agree too. */
static void join_kind(ep_cli_trace_model *model, ep_cli_span_kind kind, uint32_t index)
{
    ep_cli_span *exchange = &model->spans[index];
    size_t first;
    size_t count = ep_cli_trace_model_find(model, kind, exchange->call, &first);
    for (size_t s = 0; s < count && exchange->mate == EP_CLI_TRACE_NONE; s++) {
        ep_cli_span *served = &model->spans[model->by_call[first + s]];
        uint32_t node = model->processes[served->process].node;
        if (served->mate == EP_CLI_TRACE_NONE && same_trace(served->trace, exchange->trace) &&
            (exchange->peer == 0 || node == 0 || exchange->peer == node)) {
            exchange->mate = (uint32_t)(served - model->spans);
            served->mate = index;
        }
    }
}

/* Marks all spans with the number of the remote call, on both sides. Jobs are not marked: they
 * serve other calls too. */
static void mark_unused(ep_cli_trace_model *model, const ep_cli_span *exchange)
{
    static const ep_cli_span_kind kinds[] = {EP_CLI_SPAN_send,  EP_CLI_SPAN_receive,
                                             EP_CLI_SPAN_serve, EP_CLI_SPAN_decode,
                                             EP_CLI_SPAN_queue, EP_CLI_SPAN_reply};
    uint32_t node = exchange->mate != EP_CLI_TRACE_NONE ? model->spans[exchange->mate].process
                                                        : exchange->process;
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        size_t first;
        size_t count = ep_cli_trace_model_find(model, kinds[k], exchange->call, &first);
        for (size_t i = 0; i < count; i++) {
            ep_cli_span *span = &model->spans[model->by_call[first + i]];
            span->unused =
                span->unused || span->process == exchange->process || span->process == node;
        }
    }
}

static void join(ep_cli_trace_model *model)
{
    for (size_t i = 0; i < model->spans_count; i++) {
        if (model->spans[i].kind == EP_CLI_SPAN_exchange) {
            join_kind(model, EP_CLI_SPAN_serve, (uint32_t)i);
            join_kind(model, EP_CLI_SPAN_gateway, (uint32_t)i);
            if (model->spans[i].unused) {
                mark_unused(model, &model->spans[i]);
            }
        }
    }
}

static ep_err order(ep_cli_trace_model *model, ep_error *out_error)
{
    if (model->spans_count > 0) {
        qsort(model->spans, model->spans_count, sizeof(*model->spans), compare_begin);
    }
    ep_err err = index_calls(model, out_error);
    if (err == EP_OK) {
        join(model);
    }
    return err;
}

ep_err ep_cli_trace_model_finish(ep_cli_trace_model *model, ep_trace_id trace, ep_error *out_error)
{
    for (size_t i = 0; i < model->processes_count; i++) {
        ep_cli_trace_process *p = &model->processes[i];
        p->node = p->node == 0 && !p->calls ? p->frames : p->node;
    }
    take_out_open(model, trace);
    ep_err err = same_trace(trace, (ep_trace_id){0}) ? EP_OK : keep_trace(model, trace, out_error);
    err = err != EP_OK ? err : order(model, out_error);
    if (err == EP_OK && model->recordings_count > 1) {
        ep_cli_trace_clock_fit(model);
        for (size_t i = 0; i < model->spans_count; i++) {
            ep_cli_span *span = &model->spans[i];
            int64_t offset = model->recordings[model->processes[span->process].recording].offset_ns;
            span->begin_ns -= offset;
            span->end_ns -= offset;
            span->mate = EP_CLI_TRACE_NONE;
        }
        err = order(model, out_error);
    }
    for (size_t i = 0; err == EP_OK && i < model->spans_count; i++) {
        model->processes[model->spans[i].process].spans_count++;
    }
    return err;
}
