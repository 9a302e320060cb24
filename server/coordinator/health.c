/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/health.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/quantity.h"
#include "common/service_tls.h"
#include "coordinator/state.h"

/* A serving node may load for so long without a warning. Meanwhile no node drops copies. */
#define BEHIND_WARN_MS 300000u
#define SLOW_WARN_MS 5000u

const ep_health_rule ep_health_rules[EP_HEALTH_CODES] = {
    [EP_HEALTH_MEMORY] =
        {"memory", true, true,
         "raise buffer_bytes_max, or find in the log (pool-exhausted) who holds it"},
    [EP_HEALTH_MIN_NODES] =
        {"min-nodes", true, true,
         "start the missing nodes with this coordinator_url, or lower min_nodes"},
    [EP_HEALTH_NO_TABLE] = {"no-table", true, true,
                            "wait until the nodes have loaded; else see the other findings"},
    [EP_HEALTH_NOTHING_SERVED] = {"nothing-served", true, true,
                                  "start the nodes again; their logs say why they ended"},
    [EP_HEALTH_PLACEMENT] = {"placement", true, false,
                             "add a node with room, or repair what is named"},
    [EP_HEALTH_STORE] =
        {"store", true, false,
         "make room on the disk of state_dir, or repair its rights; it is tried again"},
    [EP_HEALTH_COPY_DIFFERS] = {"copy-differs", true, false,
                                "compare the checkpoints with a good copy to know which is wrong"},
    [EP_HEALTH_NO_COPY] =
        {"no-copy", true, false,
         "calls that need them fail: start the node that held them, or one that can"},
    [EP_HEALTH_DEVICE_LOST] = {"device-lost", true, false,
                               "npu-smi info on its host shows the device; restart its expertd "
                               "once it is well, or without it by "
                               "ASCEND_RT_VISIBLE_DEVICES"},
    [EP_HEALTH_NODE_DEGRADED] = {"node-degraded", true, false,
                                 "see the finding on its experts, else its log"},
    [EP_HEALTH_NODE_SUSPECT] = {"node-suspect", true, false,
                                "is its process alive, and can it reach the coordinator?"},
    [EP_HEALTH_NODE_LOST] = {"node-lost", true, false,
                             "start it again, or expertctl drain NODE if it is gone for good"},
    [EP_HEALTH_CERTIFICATE_ENDED] = {"certificate-ended", true, false,
                                     "put new files in the place of the old ones; they are seen "
                                     "within a minute, or by expertctl reload"},
    [EP_HEALTH_TLS_REFUSED] =
        {"tls-refused", false, false,
         "repair the file that is named before a restart, then expertctl reload"},
    [EP_HEALTH_FEW_COPIES] = {"few-copies", false, false,
                              "start another node, or lower copies; lost copies load at move_rate"},
    [EP_HEALTH_ONE_HOST] =
        {"one-host", false, false,
         "give the nodes of other hosts more memory (weight_bytes_max), or add nodes there"},
    [EP_HEALTH_NUMERICS] = {"numerics", false, false,
                            "give all nodes of a model the same build and the same numerics, "
                            "portable where CPUs differ"},
    [EP_HEALTH_VERSIONS] = {"versions", false, false,
                            "finish the roll-out, or repair the node that differs; expertctl model "
                            "default NAME VERSION moves callers that name none"},
    [EP_HEALTH_NODE_STARTING] = {"node-starting", false, false,
                                 "wait; its log shows how far loading is"},
    [EP_HEALTH_NODE_DRAINING] = {"node-draining", false, false,
                                 "wait until it is drained, or expertctl drain --undo"},
    [EP_HEALTH_NODE_DRAINED] = {"node-drained", false, false,
                                "expertctl drain NODE --undo when it shall take part again"},
    [EP_HEALTH_NODE_BEHIND] =
        {"node-behind", false, false,
         "its log shows how far loading is; is its disk slow, or weight_load_rate low?"},
    [EP_HEALTH_NODE_SLOW] = {"node-slow", false, false,
                             "see its host: other load, heat, a power limit, memory errors; "
                             "expertctl drain NODE takes it out of service"},
    [EP_HEALTH_HOST_UNKNOWN] = {"host-unknown", false, false,
                                "set host, or EXPERTD_BOOT_ID as the shipped unit does"},
    [EP_HEALTH_CERTIFICATE_ENDS] = {"certificate-ends", false, false,
                                    "put new files in the place of the old ones; they are seen "
                                    "within a minute, or by expertctl reload"},
};

__attribute__((format(printf, 3, 4))) static void add(ep_health *health, ep_health_code code,
                                                      const char *format, ...)
{
    health->counts[code]++;
    uint32_t at = health->problems_count;
    while (at > 0 && health->problems[at - 1].code > code) {
        at--;
    }
    if (at == EP_HEALTH_PROBLEMS_MAX) {
        health->problems_dropped++;
        return;
    }
    if (health->problems_count == EP_HEALTH_PROBLEMS_MAX) {
        health->problems_count--;
        health->problems_dropped++;
    }
    memmove(&health->problems[at + 1], &health->problems[at],
            (health->problems_count++ - at) * sizeof(health->problems[0]));
    health->problems[at].code = code;
    va_list args;
    va_start(args, format);
    vsnprintf(health->problems[at].text, sizeof(health->problems[at].text), format, args);
    va_end(args);
}

static void judge_tls(const char *who, uint64_t expiry, const char *error, uint64_t now,
                      ep_health *health)
{
    if (error != NULL && error[0] != '\0') {
        add(health, EP_HEALTH_TLS_REFUSED,
            "%s: a restart would fail, its TLS files are refused and those of before are in force: "
            "%s",
            who, error);
    }
    if (expiry != 0 && expiry <= now) {
        add(health, EP_HEALTH_CERTIFICATE_ENDED,
            "%s: a certificate in force ended %" PRIu64 " hours ago", who, (now - expiry) / 3600);
    } else if (expiry != 0 && expiry - now < EP_TLS_WARN_DAYS * UINT64_C(86400)) {
        add(health, EP_HEALTH_CERTIFICATE_ENDS,
            "%s: a certificate in force ends in %" PRIu64 " days", who, (expiry - now) / 86400);
    }
}

/* Reports the lost devices by number. */
static void judge_devices(const Expertd__V1__NodeEntry *node, ep_health *health)
{
    const int lost = __builtin_popcountll(node->devices_lost);
    char list[EP_NODE_NAME_BYTES] = "";
    size_t used = 0;
    for (uint32_t d = 0; d < 64 && used + sizeof(", 63, ..") < sizeof(list); d++) {
        if ((node->devices_lost >> d & 1) != 0) {
            used +=
                (size_t)snprintf(list + used, sizeof(list) - used, "%s%u", used > 0 ? ", " : "", d);
        }
    }
    add(health, EP_HEALTH_DEVICE_LOST, "node %s has lost %d of %u devices (%s): %s", node->name,
        lost, node->devices, list,
        (uint32_t)lost < node->devices
            ? "its experts come on the others, one by one when there is no room for all"
            : "it computes nothing, and its experts were given to others");
}

static void judge_node(const Expertd__V1__NodeEntry *node, uint64_t unix_now, ep_health *health)
{
    char who[EP_NODE_NAME_BYTES + 8];
    double silent_s = (double)node->last_seen_ms / 1e3;
    bool is_lost = strcmp(node->state, EP_NODE_LOST) == 0;
    bool is_emptied = strcmp(node->state, "draining") == 0 || strcmp(node->state, "drained") == 0;
    bool is_silent = is_lost || strcmp(node->state, "suspect") == 0;
    health->nodes_seen += !is_emptied && !is_silent;
    health->nodes_expected += !is_emptied;
    if (is_lost) {
        add(health, EP_HEALTH_NODE_LOST,
            "node %s at %s is lost: it fell silent %.0f s ago, and its experts were given to "
            "others",
            node->name, node->url, silent_s);
    } else if (is_silent) {
        add(health, EP_HEALTH_NODE_SUSPECT,
            "node %s at %s is suspect: it has been silent for %.1f s", node->name, node->url,
            silent_s);
    } else if (strcmp(node->state, "draining") == 0) {
        add(health, EP_HEALTH_NODE_DRAINING,
            "node %s is draining: its experts are moving, or it is ending", node->name);
    } else if (is_emptied) {
        add(health, EP_HEALTH_NODE_DRAINED, "node %s is drained and holds no experts", node->name);
    } else if (strcmp(node->state, "starting") == 0) {
        add(health, EP_HEALTH_NODE_STARTING, "node %s is starting%s", node->name,
            node->waits_to_load ? ", and waits for its turn to load (loading_nodes_max)" : "");
    } else if (node->devices_lost != 0) {
        judge_devices(node, health);
    } else if (strcmp(node->state, "degraded") == 0) {
        add(health, EP_HEALTH_NODE_DEGRADED,
            "node %s is degraded: it could not load all its experts", node->name);
    } else if (node->behind_ms >= BEHIND_WARN_MS) {
        add(health, EP_HEALTH_NODE_BEHIND,
            "node %s serves by an old assignment: for %" PRIu64 " s it has not loaded the newest",
            node->name, node->behind_ms / 1000);
    } else if (node->slow_ms >= SLOW_WARN_MS) {
        add(health, EP_HEALTH_NODE_SLOW,
            "node %s is slow: for %" PRIu64
            " s it has computed %.2f of what the median node does in a time",
            node->name, node->slow_ms / 1000, node->speed);
    }
    if (!is_lost && node->speed > 0 && node->speed < health->speed_min) {
        health->speed_min = node->speed;
    }
    snprintf(who, sizeof(who), "node %s", node->name);
    judge_tls(who, is_lost ? 0 : node->tls_expiry, is_lost ? "" : node->tls_error, unix_now,
              health);
    if (!is_lost && node->host[0] == '\0') {
        add(health, EP_HEALTH_HOST_UNKNOWN,
            "node %s does not know which machine it is on: no shared memory and no comm_alg "
            "hierarchy there",
            node->name);
    }
}

/* Experts of a model with too few copies: their number, and the first one. */
typedef struct expert_lack {
    uint64_t experts;
    uint32_t layers;
    uint32_t layer;
    uint32_t expert;
} expert_lack;

static void lack_add(expert_lack *lack, uint32_t layer, uint32_t expert)
{
    lack->layers += lack->experts == 0 || lack->layer != layer;
    if (lack->experts++ == 0) {
        lack->expert = expert;
    }
    lack->layer = layer;
}

static bool on_one_host(const ep_routing_table *table, const uint32_t *nodes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (table->nodes[nodes[i]].host[0] == '\0' ||
            strcmp(table->nodes[nodes[i]].host, table->nodes[nodes[0]].host) != 0) {
            return false;
        }
    }
    return count > 1;
}

/* Warns of experts whose copies are all on one host, if copies are on several hosts at all. */
static void judge_hosts(const ep_routing_table *table, uint32_t model_index, ep_health *health)
{
    const ep_routing_model *model = &table->models[model_index];
    expert_lack near = {0};
    uint32_t first_near = 0;
    const char *first_host = NULL;
    bool are_several = false;
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        const uint32_t experts = layer->model_index == model_index
                                     ? layer->shape.experts + layer->shape.shared_experts
                                     : 0;
        for (uint32_t e = 0; e < experts; e++) {
            const uint32_t *nodes = layer->copies + layer->offsets[e],
                           count = layer->offsets[e + 1] - layer->offsets[e];
            for (uint32_t i = 0; i < count && !are_several; i++) {
                const char *host = table->nodes[nodes[i]].host;
                first_host = first_host == NULL && host[0] != '\0' ? host : first_host;
                are_several = host[0] != '\0' && strcmp(host, first_host) != 0;
            }
            if (on_one_host(table, nodes, count)) {
                first_near = near.experts == 0 ? layer->shape.layer : first_near;
                lack_add(&near, layer->shape.layer, e);
            }
        }
    }
    if (are_several && near.experts > 0) {
        add(health, EP_HEALTH_ONE_HOST,
            "model %s %s: all copies of %" PRIu64
            " experts in %u layers are on one host, layer %u expert %u first",
            model->name, model->version, near.experts, near.layers, first_near, near.expert);
    }
}

static void add_few(const ep_health_facts *facts, uint32_t model_index, const expert_lack *few,
                    ep_health *health)
{
    const ep_routing_model *model = &facts->table->models[model_index];
    const uint32_t waiting = facts->copies_waiting != NULL ? facts->copies_waiting[model_index] : 0;
    char rate[EP_QUANTITY_BYTES], wait[EP_QUANTITY_BYTES + 64] = "";
    if (waiting > 0) {
        snprintf(wait, sizeof(wait), "; %u copies wait for move_rate %s", waiting,
                 ep_quantity_format(facts->move_rate, EP_UNIT_BYTES, rate));
    }
    add(health, EP_HEALTH_FEW_COPIES,
        "model %s %s: %" PRIu64 " experts in %u layers have fewer than %u copies%s", model->name,
        model->version, few->experts, few->layers, facts->cluster->copies, wait);
}

static void judge_copies(const ep_health_facts *facts, uint32_t model_index, bool is_mapped,
                         ep_health *health)
{
    const ep_routing_table *table = facts->table;
    const ep_routing_model *model = &table->models[model_index];
    expert_lack none = {0};
    expert_lack few = {0};
    uint32_t first_none = 0;
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        if (layer->model_index != model_index) {
            continue;
        }
        uint32_t experts = layer->shape.experts;
        for (uint32_t e = 0; e < experts + layer->shape.shared_experts; e++) {
            uint32_t count = layer->offsets[e + 1] - layer->offsets[e];
            /* An expert map sets the copies of routed experts itself; `copies` then counts only for
             * shared ones. */
            uint32_t wanted = is_mapped && e < experts ? 1 : facts->cluster->copies;
            if (count == 0) {
                first_none = none.experts == 0 ? layer->shape.layer : first_none;
                lack_add(&none, layer->shape.layer, e);
            } else if (count < wanted) {
                lack_add(&few, layer->shape.layer, e);
            }
        }
    }
    health->experts_without_copy += none.experts;
    health->experts_with_few_copies += few.experts;
    if (none.experts > 0) {
        add(health, EP_HEALTH_NO_COPY,
            "model %s %s: %" PRIu64 " experts in %u layers have no copy, layer %u expert %u first",
            model->name, model->version, none.experts, none.layers, first_none, none.expert);
    }
    if (few.experts > 0) {
        add_few(facts, model_index, &few, health);
    }
}

static void judge_model(const ep_routing_table *table, uint32_t model_index, ep_health *health)
{
    const ep_routing_model *model = &table->models[model_index];
    if (model->numerics_count > 1) {
        add(health, EP_HEALTH_NUMERICS,
            "model %s: its nodes compute with %u different numerics ids (%s, %s%s): only those of "
            "one id hold experts",
            model->name, model->numerics_count, model->numerics[0], model->numerics[1],
            model->numerics_count > 2 ? ", .." : "");
    }
    for (uint32_t m = 0; m < model_index; m++) {
        if (strcmp(table->models[m].name, model->name) == 0) {
            add(health, EP_HEALTH_VERSIONS, "model %s is served in versions %s%s and %s%s",
                model->name, table->models[m].version,
                table->models[m].is_default ? " (default)" : "", model->version,
                model->is_default ? " (default)" : "");
        }
    }
}

static bool serves_some(const ep_routing_table *table)
{
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        if (layer->offsets[layer->shape.experts + layer->shape.shared_experts] > 0) {
            return true;
        }
    }
    return false;
}

static void judge_service(const ep_health_facts *facts, ep_health *health)
{
    const Expertd__V1__ClusterStatusReply *cluster = facts->cluster;
    if (facts->memory_error != NULL) {
        add(health, EP_HEALTH_MEMORY, "memory for frames is %s", facts->memory_error);
    }
    if (facts->table == NULL && health->nodes_seen < cluster->min_nodes) {
        add(health, EP_HEALTH_MIN_NODES,
            "there is no routing table yet: %u of min_nodes %u nodes are here", health->nodes_seen,
            cluster->min_nodes);
    } else if (facts->table == NULL) {
        add(health, EP_HEALTH_NO_TABLE, "there is no routing table yet, although %u nodes are here",
            health->nodes_seen);
    } else if (!serves_some(facts->table)) {
        add(health, EP_HEALTH_NOTHING_SERVED,
            "no expert is served: %u nodes take part%s, min_nodes is %u", health->nodes_seen,
            health->nodes_seen > 0 ? " and none has loaded what it was given" : "",
            cluster->min_nodes);
    }
    if (cluster->placement_error[0] != '\0') {
        add(health, EP_HEALTH_PLACEMENT, "placement: %s", cluster->placement_error);
    }
    if (cluster->store_error[0] != '\0') {
        add(health, EP_HEALTH_STORE,
            "the newest state is not written, an older table is served: %s", cluster->store_error);
    }
    judge_tls("the coordinator", facts->tls_expiry, facts->tls_error, facts->unix_now, health);
    if (cluster->copy_error[0] != '\0') {
        add(health, EP_HEALTH_COPY_DIFFERS, "%s", cluster->copy_error);
    }
}

void ep_health_judge(const ep_health_facts *facts, ep_health *out_health)
{
    const Expertd__V1__ClusterStatusReply *cluster = facts->cluster;
    *out_health = (ep_health){.speed_min = 1};
    for (size_t i = 0; i < cluster->n_nodes; i++) {
        judge_node(cluster->nodes[i], facts->unix_now, out_health);
    }
    /* an operator has emptied them, so they are not missed */
    size_t emptied = cluster->n_nodes - out_health->nodes_expected;
    if (out_health->nodes_expected + emptied < cluster->min_nodes) {
        out_health->nodes_expected = (uint32_t)(cluster->min_nodes - emptied);
    }
    judge_service(facts, out_health);
    for (uint32_t m = 0; facts->table != NULL && m < facts->table->models_count; m++) {
        const bool is_mapped = strcmp(cluster->policy, "static") == 0;
        judge_copies(facts, m, is_mapped, out_health);
        if (!is_mapped) { /* with a map the author decides where copies are */
            judge_hosts(facts->table, m, out_health);
        }
        judge_model(facts->table, m, out_health);
    }
}

const ep_health_problem *ep_health_end_of_service(const ep_health *health)
{
    bool ends =
        health->problems_count > 0 && ep_health_rules[health->problems[0].code].ends_service;
    return ends ? &health->problems[0] : NULL; /* codes that end service come first */
}

uint32_t ep_health_count(const ep_health *health, bool errors)
{
    uint32_t count = 0;
    for (int code = 0; code < EP_HEALTH_CODES; code++) {
        count += ep_health_rules[code].is_error == errors ? health->counts[code] : 0;
    }
    return count;
}
