/* SPDX-License-Identifier: Apache-2.0 */
#include "top.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "output.h"

#define HOT_LEAST 3 /* rows that the hottest keep even if nodes need room */
#define LINE_BYTES 512

void ep_top_sample_fini(ep_top_sample *sample)
{
    ep_cli_node_list_free(&sample->nodes);
    expertd__v1__statistics_reply__free_unpacked(sample->statistics, NULL);
    sample->statistics = NULL;
}

double ep_top_rate(uint64_t before, uint64_t now, uint64_t ns)
{
    return now > before && ns > 0 ? (double)(now - before) * 1e9 / (double)ns : 0.0;
}

/* The same process in the former sample; NULL: not there, no answer then or now, or restarted
 * since. */
static const Expertd__V1__NodeStatusReply *status_before(const ep_top_sample *before,
                                                         const Expertd__V1__NodeStatusReply *now)
{
    for (size_t i = 0; now != NULL && i < before->nodes.count; i++) {
        const Expertd__V1__NodeStatusReply *status = before->nodes.nodes[i].status;
        if (status != NULL && status->incarnation == now->incarnation) {
            return status;
        }
    }
    return NULL;
}

/* Inserts by heat, hottest first; cold ones are left out. */
static size_t keep(ep_top_hot *list, size_t count, size_t max, const ep_top_hot *hot)
{
    size_t at = count;
    while (at > 0 && list[at - 1].per_s < hot->per_s) {
        at--;
    }
    if (at == max || hot->per_s <= 0.0) {
        return count;
    }
    count += count < max;
    memmove(&list[at + 1], &list[at], (count - at - 1) * sizeof(*list));
    list[at] = *hot;
    return count;
}

static bool is_same_layer(const Expertd__V1__LayerStatus *a, const Expertd__V1__LayerStatus *b)
{
    return a->layer == b->layer && strcmp(a->model, b->model) == 0 &&
           strcmp(a->version, b->version) == 0;
}

static uint64_t layer_rows(const Expertd__V1__NodeStatusReply *status,
                           const Expertd__V1__LayerStatus *layer)
{
    for (size_t l = 0; status != NULL && l < status->n_layers; l++) {
        if (is_same_layer(status->layers[l], layer)) {
            return status->layers[l]->rows_served;
        }
    }
    return 0;
}

static bool was_seen(const ep_top_sample *now, size_t node, const Expertd__V1__LayerStatus *layer)
{
    for (size_t i = 0; i < node; i++) {
        const Expertd__V1__NodeStatusReply *status = now->nodes.nodes[i].status;
        for (size_t l = 0; status != NULL && l < status->n_layers; l++) {
            if (is_same_layer(status->layers[l], layer)) {
                return true;
            }
        }
    }
    return false;
}

/* Rows per second of a layer, summed over the nodes from first on. */
static double layer_rate(const ep_top_sample *before, const ep_top_sample *now, size_t first,
                         const Expertd__V1__LayerStatus *layer)
{
    double sum = 0.0;
    for (size_t i = first; i < now->nodes.count; i++) {
        const Expertd__V1__NodeStatusReply *status = now->nodes.nodes[i].status;
        const Expertd__V1__NodeStatusReply *was = status_before(before, status);
        if (was != NULL) {
            sum += ep_top_rate(layer_rows(was, layer), layer_rows(status, layer),
                               now->at_ns - before->at_ns);
        }
    }
    return sum;
}

size_t ep_top_hot_layers(const ep_top_sample *before, const ep_top_sample *now, ep_top_hot *out_hot,
                         size_t max)
{
    size_t count = 0;
    for (size_t i = 0; i < now->nodes.count; i++) {
        const Expertd__V1__NodeStatusReply *status = now->nodes.nodes[i].status;
        for (size_t l = 0; status != NULL && l < status->n_layers; l++) {
            const Expertd__V1__LayerStatus *layer = status->layers[l];
            if (!was_seen(now, i, layer)) {
                const ep_top_hot hot = {.model = layer->model,
                                        .version = layer->version,
                                        .layer = layer->layer,
                                        .expert = -1,
                                        .per_s = layer_rate(before, now, i, layer)};
                count = keep(out_hot, count, max, &hot);
            }
        }
    }
    return count;
}

static const Expertd__V1__LayerStatistics *
statistics_before(const ep_top_sample *before, const Expertd__V1__LayerStatistics *now)
{
    for (size_t l = 0; before->statistics != NULL && l < before->statistics->n_layers; l++) {
        const Expertd__V1__LayerStatistics *layer = before->statistics->layers[l];
        if (layer->layer == now->layer && strcmp(layer->model, now->model) == 0 &&
            strcmp(layer->version, now->version) == 0 && layer->n_counts == now->n_counts) {
            return layer;
        }
    }
    return NULL;
}

size_t ep_top_hot_experts(const ep_top_sample *before, const ep_top_sample *now,
                          ep_top_hot *out_hot, size_t max)
{
    size_t count = 0;
    for (size_t l = 0; now->statistics != NULL && l < now->statistics->n_layers; l++) {
        const Expertd__V1__LayerStatistics *layer = now->statistics->layers[l];
        const Expertd__V1__LayerStatistics *was = statistics_before(before, layer);
        for (size_t e = 0; was != NULL && e < layer->n_counts; e++) {
            const ep_top_hot hot = {
                .model = layer->model,
                .version = layer->version,
                .layer = layer->layer,
                .expert = (int64_t)e,
                .per_s = ep_top_rate(was->counts[e], layer->counts[e], now->at_ns - before->at_ns)};
            count = keep(out_hot, count, max, &hot);
        }
    }
    return count;
}

/* ---- tables ---- */

static const char *name_of(const ep_cli_node *node)
{
    return node->status != NULL ? node->status->node : node->name[0] != '\0' ? node->name : "-";
}

static const char *state_of(const ep_cli_node *node)
{
    return node->status != NULL ? node->status->state : "silent";
}

/* was NULL: no rate yet. */
static void rate_cell(ep_cli_table *table, const uint64_t *was, uint64_t is, uint64_t ns)
{
    if (was == NULL || ns == 0) {
        ep_cli_table_cell(table, "-");
    } else {
        ep_cli_table_count(table, (uint64_t)(ep_top_rate(*was, is, ns) + 0.5));
    }
}

static void node_row(ep_cli_table *table, const ep_cli_node *node,
                     const Expertd__V1__NodeStatusReply *was, uint64_t ns)
{
    const Expertd__V1__NodeStatusReply *status = node->status;
    ep_cli_table_cell(table, "%s", name_of(node));
    ep_cli_table_cell(table, "%s", state_of(node));
    for (int c = 0; status == NULL && c < 8; c++) {
        ep_cli_table_cell(table, "-");
    }
    if (status != NULL) {
        rate_cell(table, was != NULL ? &was->rows_served : NULL, status->rows_served, ns);
        rate_cell(table, was != NULL ? &was->requests_served : NULL, status->requests_served, ns);
        ep_cli_table_count(table, status->requests_in_flight);
        ep_cli_table_count(table, status->jobs_waiting);
        ep_cli_table_count(table, status->tokens_in_flight);
        rate_cell(table, was != NULL ? &was->requests_failed : NULL, status->requests_failed, ns);
        rate_cell(table, was != NULL ? &was->requests_refused : NULL, status->requests_refused, ns);
        rate_cell(table, was != NULL ? &was->requests_hedged : NULL, status->requests_hedged, ns);
    }
    ep_cli_table_cell(table, "%s", node->url);
}

static ep_cli_table *nodes_table(const ep_top_sample *before, const ep_top_sample *now)
{
    ep_cli_table *table = ep_cli_table_create(
        "NODE|STATE|>ROWS/S|8>CALLS/S|7>FLIGHT|7>WAIT|5>TOKENS|6>FAIL/S|6>REFUSE/S|2>HEDGE/S|1URL");
    for (size_t i = 0; i < now->nodes.count; i++) {
        const ep_cli_node *node = &now->nodes.nodes[i];
        node_row(table, node, status_before(before, node->status), now->at_ns - before->at_ns);
    }
    return table;
}

static ep_cli_table *hot_table(const char *headings, const ep_top_hot *hot, size_t count)
{
    ep_cli_table *table = ep_cli_table_create(headings);
    for (size_t i = 0; i < count; i++) {
        ep_cli_table_cell(table, "%s", hot[i].model);
        ep_cli_table_cell(table, "%s", hot[i].version);
        ep_cli_table_cell(table, "%" PRIu32, hot[i].layer);
        if (hot[i].expert >= 0) {
            ep_cli_table_cell(table, "%" PRId64, hot[i].expert);
        }
        ep_cli_table_count(table, (uint64_t)(hot[i].per_s + 0.5));
    }
    return table;
}

/* ---- layout ---- */

/* Rows under each heading. */
typedef struct room {
    size_t nodes;
    size_t layers;
    size_t experts;
    bool has_layers; /* shown, with its heading and an empty line before it */
    bool has_experts;
} room;

static size_t at_most(size_t value, size_t max)
{
    return value < max ? value : max;
}

/* rows: of the screen, from the nodes' heading on; has_experts: the coordinator sent some. */
static room share_rows(size_t rows, size_t nodes, size_t layers, size_t experts, bool has_experts)
{
    const size_t heading = 2;
    const size_t layers_least = heading + at_most(layers, HOT_LEAST);
    const size_t experts_least = has_experts ? heading + at_most(experts, HOT_LEAST) : 0;
    room r = {.nodes = nodes,
              .layers = layers,
              .experts = experts,
              .has_layers = true,
              .has_experts = has_experts};
    if (rows == 0) {
        return r;
    }
    size_t left = rows > 1 ? rows - 1 : 0; /* the nodes' own heading */
    r.nodes = at_most(nodes, left > layers_least + experts_least + HOT_LEAST
                                 ? left - layers_least - experts_least
                                 : at_most(left, HOT_LEAST));
    left -= r.nodes;
    r.has_layers = left >= heading + at_most(layers, 1);
    left -= r.has_layers ? heading : 0;
    r.has_experts =
        has_experts && r.has_layers && left >= heading + at_most(layers, 1) + at_most(experts, 1);
    left -= r.has_experts ? heading : 0;
    size_t half = r.has_experts && left < layers + experts
                      ? (left > 2 * experts ? left - experts : left / 2)
                      : left;
    r.layers = r.has_layers ? at_most(layers, half) : 0;
    r.experts = r.has_experts ? at_most(experts, left - r.layers) : 0;
    return r;
}

/* Adds a part to the line if all of it fits. */
static void add_part(char line[LINE_BYTES], size_t columns, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void add_part(char line[LINE_BYTES], size_t columns, const char *format, ...)
{
    size_t bytes = strlen(line);
    va_list args;
    va_start(args, format);
    vsnprintf(line + bytes, LINE_BYTES - bytes, format, args);
    va_end(args);
    if (columns > 0 && strlen(line) > columns) {
        line[bytes] = '\0';
    }
}

static const char *sum_text(double sum, size_t columns, char out[EP_CLI_BRIEF_BYTES])
{
    if (columns > 0) {
        return ep_cli_count_text((uint64_t)sum, out);
    }
    snprintf(out, EP_CLI_BRIEF_BYTES, "%.0f", sum);
    return out;
}

static void print_sums(const ep_top_sample *before, const ep_top_sample *now,
                       const ep_top_view *view, size_t shown, FILE *out)
{
    char line[LINE_BYTES] = "";
    char sum[EP_CLI_BRIEF_BYTES];
    const size_t columns = view->screen.columns;
    const uint64_t ns = now->at_ns - before->at_ns;
    size_t serving = 0;
    double rows = 0.0;
    double calls = 0.0;
    time_t seconds = (time_t)(now->clock_us / 1000000);
    struct tm local = {0};
    for (size_t i = 0; i < now->nodes.count; i++) {
        const Expertd__V1__NodeStatusReply *status = now->nodes.nodes[i].status;
        const Expertd__V1__NodeStatusReply *was = status_before(before, status);
        serving += status != NULL && strcmp(status->state, "serving") == 0;
        rows += was != NULL ? ep_top_rate(was->rows_served, status->rows_served, ns) : 0.0;
        calls += was != NULL ? ep_top_rate(was->requests_served, status->requests_served, ns) : 0.0;
    }
    localtime_r(&seconds, &local);
    add_part(line, columns, "%02d:%02d:%02d", local.tm_hour, local.tm_min, local.tm_sec);
    add_part(line, columns, "  %zu of %zu nodes serving", serving,
             now->nodes.count + now->nodes.lost_count);
    if (now->nodes.lost_count > 0) {
        add_part(line, columns, ", %zu lost", now->nodes.lost_count);
    }
    if (shown < now->nodes.count) {
        add_part(line, columns, ", %zu-%zu shown", view->first_node + (shown > 0),
                 view->first_node + shown);
    }
    if (ns > 0) {
        add_part(line, columns, "  %s rows/s", sum_text(rows, columns, sum));
        add_part(line, columns, "  %s calls/s", sum_text(calls, columns, sum));
    }
    add_part(line, columns, "%s", view->hint != NULL ? view->hint : "");
    fprintf(out, "%s\n", line);
}

static bool print_table(ep_cli_table *taken_table, const ep_top_view *view, size_t first,
                        size_t count, FILE *out)
{
    bool good = ep_cli_table_print_part(taken_table, view->screen.columns, first, count, out);
    ep_cli_table_destroy(taken_table);
    return good;
}

bool ep_top_print(const ep_top_sample *before, const ep_top_sample *now, ep_top_view *io_view,
                  size_t *out_nodes_shown, FILE *out)
{
    ep_top_hot layers[EP_TOP_HOTTEST_MAX];
    ep_top_hot experts[EP_TOP_HOTTEST_MAX];
    const bool is_lost = now->coordinator_error.code != EP_OK;
    const size_t max = at_most(io_view->hottest, EP_TOP_HOTTEST_MAX);
    const size_t layers_count = ep_top_hot_layers(before, now, layers, max);
    const size_t experts_count = ep_top_hot_experts(before, now, experts, max);
    const size_t above = 1 + is_lost;
    const size_t rows = io_view->screen.rows == 0      ? 0
                        : io_view->screen.rows > above ? io_view->screen.rows - above
                                                       : 1;
    const room r =
        share_rows(rows, now->nodes.count, layers_count, experts_count, now->statistics != NULL);
    io_view->first_node = at_most(io_view->first_node, now->nodes.count - r.nodes);
    print_sums(before, now, io_view, r.nodes, out);
    if (is_lost) {
        ep_cli_line_cut(out, rows > 0 ? io_view->screen.columns : 0,
                        "coordinator lost, going on with the nodes: %s",
                        now->coordinator_error.text);
    }
    bool good = print_table(nodes_table(before, now), io_view, io_view->first_node, r.nodes, out);
    if (r.has_layers) {
        fputc('\n', out);
        good =
            print_table(hot_table("HOTTEST LAYERS|1VERSION|>LAYER|>ROWS/S", layers, layers_count),
                        io_view, 0, r.layers, out) &&
            good;
    }
    if (r.has_experts) {
        fputc('\n', out);
        good = print_table(hot_table("HOTTEST EXPERTS|1VERSION|>LAYER|>EXPERT|>SLOTS/S", experts,
                                     experts_count),
                           io_view, 0, r.experts, out) &&
               good;
    }
    if (out_nodes_shown != NULL) {
        *out_nodes_shown = r.nodes;
    }
    return good && ferror(out) == 0;
}

/* ---- JSON ---- */

/* null: there is no rate yet. */
static json_t *rate_json(const uint64_t *was, uint64_t is, uint64_t ns)
{
    return was != NULL && ns > 0 ? json_real(ep_top_rate(*was, is, ns)) : json_null();
}

static json_t *node_json(const ep_cli_node *node, const Expertd__V1__NodeStatusReply *was,
                         uint64_t ns)
{
    const Expertd__V1__NodeStatusReply *status = node->status;
    json_t *json =
        json_pack("{s:o, s:o, s:o}", "name", ep_cli_json_text(name_of(node)), "url",
                  ep_cli_json_text(node->url), "state", ep_cli_json_text(state_of(node)));
    if (status == NULL) {
        json_object_set_new(json, "error", ep_cli_json_text(node->error.text));
        return json;
    }
    json_object_set_new(json, "rows_per_s",
                        rate_json(was != NULL ? &was->rows_served : NULL, status->rows_served, ns));
    json_object_set_new(
        json, "calls_per_s",
        rate_json(was != NULL ? &was->requests_served : NULL, status->requests_served, ns));
    json_object_set_new(json, "requests_in_flight",
                        json_integer((json_int_t)status->requests_in_flight));
    json_object_set_new(json, "jobs_waiting", json_integer((json_int_t)status->jobs_waiting));
    json_object_set_new(json, "tokens_in_flight",
                        json_integer((json_int_t)status->tokens_in_flight));
    json_object_set_new(
        json, "failed_per_s",
        rate_json(was != NULL ? &was->requests_failed : NULL, status->requests_failed, ns));
    json_object_set_new(
        json, "refused_per_s",
        rate_json(was != NULL ? &was->requests_refused : NULL, status->requests_refused, ns));
    json_object_set_new(
        json, "hedged_per_s",
        rate_json(was != NULL ? &was->requests_hedged : NULL, status->requests_hedged, ns));
    return json;
}

static json_t *hot_json(const ep_top_hot *hot, size_t count)
{
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++) {
        json_t *json =
            json_pack("{s:o, s:o, s:I}", "model", ep_cli_json_text(hot[i].model), "version",
                      ep_cli_json_text(hot[i].version), "layer", (json_int_t)hot[i].layer);
        if (hot[i].expert >= 0) {
            json_object_set_new(json, "expert", json_integer((json_int_t)hot[i].expert));
        }
        json_object_set_new(json, hot[i].expert >= 0 ? "slots_per_s" : "rows_per_s",
                            json_real(hot[i].per_s));
        json_array_append_new(list, json);
    }
    return list;
}

json_t *ep_top_json(const ep_top_sample *before, const ep_top_sample *now, size_t hottest)
{
    ep_top_hot hot[EP_TOP_HOTTEST_MAX];
    const size_t max = at_most(hottest, EP_TOP_HOTTEST_MAX);
    const uint64_t ns = now->at_ns - before->at_ns;
    json_t *nodes = json_array();
    for (size_t i = 0; i < now->nodes.count; i++) {
        const ep_cli_node *node = &now->nodes.nodes[i];
        json_array_append_new(nodes, node_json(node, status_before(before, node->status), ns));
    }
    json_t *layers = hot_json(hot, ep_top_hot_layers(before, now, hot, max));
    json_t *experts = now->statistics != NULL
                          ? hot_json(hot, ep_top_hot_experts(before, now, hot, max))
                          : json_null();
    return json_pack("{s:I, s:f, s:o, s:I, s:o, s:o, s:o}", "time_us", (json_int_t)now->clock_us,
                     "seconds", (double)ns / 1e9, "coordinator_error",
                     now->coordinator_error.code != EP_OK
                         ? ep_cli_json_text(now->coordinator_error.text)
                         : json_null(),
                     "nodes_lost", (json_int_t)now->nodes.lost_count, "nodes", nodes, "layers",
                     layers, "experts", experts);
}
