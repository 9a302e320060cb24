/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LOADING_LONG_US 120000000u /* experts that still load after that are worth a look */
#define CLOCK_OFF_US 5000000u
#define NEARLY_PER_CENT 90u

const char *const ep_doctor_severity_words[] = {"info", "warning", "error"};

ep_doctor_finding *ep_doctor_add(ep_doctor_findings *findings, ep_doctor_severity severity, const char *code, const char *advice,
                                 const char *format, ...)
{
    if (findings->count == EP_DOCTOR_FINDINGS_MAX) {
        findings->dropped++;
        return NULL;
    }
    ep_doctor_finding *finding = &findings->list[findings->count++];
    finding->severity = severity;
    finding->code = code;
    va_list args;
    va_start(args, format);
    vsnprintf(finding->text, sizeof(finding->text), format, args);
    va_end(args);
    snprintf(finding->advice, sizeof(finding->advice), "%s", advice);
    return finding;
}

bool ep_doctor_is_ill(const ep_doctor_findings *findings)
{
    for (size_t i = 0; i < findings->count; i++) {
        if (findings->list[i].severity > EP_DOCTOR_INFO) {
            return true;
        }
    }
    return findings->dropped > 0;
}

static bool is_tls(const char *url)
{
    return strncmp(url, "tls+tcp://", 10) == 0;
}

static bool is_loopback(const char *url)
{
    const char *host = strstr(url, "://");
    host = host != NULL ? host + 3 : url;
    return strncmp(host, "127.", 4) == 0 || strncmp(host, "localhost:", 10) == 0 || strncmp(host, "[::1]", 5) == 0;
}

/* A peer that did not answer: what is it, and what did we do wrong? */
static void examine_silence(const ep_doctor_facts *facts, const char *url, const char *wanted, const ep_error *error,
                            ep_doctor_port port, ep_doctor_findings *out)
{
    const char *other = strcmp(wanted, "coordinator") == 0 ? "node" : "coordinator";
    if (error->code == EP_ERR_UNIMPLEMENTED) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "wrong-endpoint",
                      strcmp(other, "node") == 0 ? "give it with --node, or name the coordinator with --coordinator"
                                                 : "give it with --coordinator, or name a node with --node",
                      "%s is a %s, not a %s", url, other, wanted);
    } else if (error->code == EP_ERR_UNAUTHENTICATED && !(is_tls(url) && port == EP_DOCTOR_PORT_OTHER)) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, facts->has_token ? "token-wrong" : "token-missing",
                      facts->has_token ? "the file of --token-file must hold the first or second line of the service's token_file"
                                       : "give the service's token with --token-file",
                      "%s", error->text);
    } else if (error->code == EP_ERR_PERMISSION_DENIED) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "admin-listener",
                      "admin_listen takes operators only: give the URL of listen (rpc_url of the ports file)", "%s", error->text);
    } else if (port == EP_DOCTOR_PORT_CLOSED) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "nobody-there",
                      "start it, or look into its ports_file and the network policy for the right address", "nobody listens at %s: %s",
                      url, error->text);
    } else if (port == EP_DOCTOR_PORT_HTTP) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "probe-port", "the port of listen is meant, not that of probe_address (7410, 7420)",
                      "%s speaks HTTP: it is a probe port, not a %s's rpc port", url, wanted);
    } else if (port == EP_DOCTOR_PORT_TLS && !is_tls(url)) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "tls-needed", "use tls+tcp:// with --tls-ca and --tls-server-name",
                      "%s listens with TLS, and we spoke without", url);
    } else if (port == EP_DOCTOR_PORT_TLS) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "tls-refused",
                      "check --tls-ca, --tls-server-name against the certificate's names, and --tls-cert-key where it asks for one",
                      "%s listens with TLS, but the handshake failed: %s", url, error->text);
    } else if (is_tls(url)) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "tls-not-there", "use tcp://, or set tls_cert_key_file and a tls+tcp:// listen there",
                      "%s does not listen with TLS: %s", url, error->text);
    } else {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "no-answer", "look at the log of the program there", "%s does not answer as a %s: %s",
                      url, wanted, error->text);
    }
}

static void examine_open_door(const ep_doctor_facts *facts, const char *url, ep_doctor_findings *out)
{
    if (!is_tls(url) && !is_loopback(url) && !facts->has_token) {
        ep_doctor_add(out, EP_DOCTOR_WARN, "insecure", "set token_file and TLS there, and take insecure: true away",
                      "%s lets anybody in who reaches it: beyond loopback, without TLS and without a token", url);
    }
}

/* ---- the coordinator's word ---- */

static void examine_node_entry(const Expertd__V1__NodeEntry *node, ep_doctor_findings *out)
{
    if (strcmp(node->state, "suspect") == 0) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "node-suspect", "is its process alive, and can it reach the coordinator?",
                      "node %s at %s has been silent for %.1f s", node->name, node->url, (double)node->last_seen_ms / 1e3);
    } else if (strcmp(node->state, "draining") == 0) {
        ep_doctor_add(out, EP_DOCTOR_WARN, "node-draining", "wait until it is drained, or expertctl drain --undo",
                      "node %s is draining: its experts are moving, or it is ending", node->name);
    } else if (strcmp(node->state, "drained") == 0) {
        ep_doctor_add(out, EP_DOCTOR_WARN, "node-drained", "expertctl drain NODE --undo when it shall take part again",
                      "node %s is drained and holds no experts", node->name);
    } else if (strcmp(node->state, "starting") == 0) {
        ep_doctor_add(out, EP_DOCTOR_WARN, "node-starting", "wait; its log shows how far loading is", "node %s is starting", node->name);
    } else if (strcmp(node->state, "degraded") == 0) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "node-degraded", "see the finding on its experts, else its log",
                      "node %s is degraded: it could not load all its experts", node->name);
    }
    if (node->host[0] == '\0') {
        ep_doctor_add(out, EP_DOCTOR_WARN, "host-unknown", "set host, or EXPERTD_BOOT_ID as the shipped unit does",
                      "node %s does not know which machine it is on: no shared memory and no comm_alg hierarchy there",
                      node->name);
    }
}

static void examine_cluster(const Expertd__V1__ClusterStatusReply *cluster, bool has_table, ep_doctor_findings *out)
{
    if (!has_table && cluster->n_nodes < cluster->min_nodes) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "min-nodes", "start the missing nodes with this coordinator_url, or lower min_nodes",
                      "there is no routing table: %zu of min_nodes %" PRIu32 " nodes are here", cluster->n_nodes, cluster->min_nodes);
    } else if (!has_table) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "no-table", "wait until the nodes have loaded; else see the other findings",
                      "there is no routing table yet, although %zu nodes are here", cluster->n_nodes);
    }
    if (cluster->placement_error[0] != '\0') {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "placement", "add a node with room, or repair what is named", "placement: %s",
                      cluster->placement_error);
    }
    if (cluster->store_error[0] != '\0') {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "store", "make room on the disk of state_dir, or repair its rights; it is tried again",
                      "the newest state is not written, an older table is served: %s", cluster->store_error);
    }
    if (cluster->copy_error[0] != '\0') {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "copy-differs", "compare the checkpoints with a good copy to know which is wrong", "%s", cluster->copy_error);
    }
    for (size_t i = 0; i < cluster->n_nodes; i++) {
        examine_node_entry(cluster->nodes[i], out);
    }
}

static void examine_copies(const ep_routing_table *table, const ep_routing_layer *layer, uint32_t copies, ep_doctor_findings *out)
{
    uint32_t none = 0;
    uint32_t fewer = 0;
    uint32_t first = UINT32_MAX;
    for (uint32_t e = 0; e < layer->shape.experts + layer->shape.shared_experts; e++) {
        uint32_t count = layer->offsets[e + 1] - layer->offsets[e];
        none += count == 0;
        fewer += count > 0 && count < copies;
        first = count == 0 && first == UINT32_MAX ? e : first;
    }
    const char *model = table->models[layer->model_index].name;
    if (none > 0) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "no-copy", "calls that need them fail: start the node that held them, or one that can",
                      "model %s, layer %" PRIu32 ": %" PRIu32 " experts have no copy, expert %" PRIu32 " first", model,
                      layer->shape.layer, none, first);
    }
    if (fewer > 0) {
        ep_doctor_add(out, EP_DOCTOR_WARN, "few-copies", "start another node, or lower copies",
                      "model %s, layer %" PRIu32 ": %" PRIu32 " experts have fewer than %" PRIu32 " copies", model, layer->shape.layer,
                      fewer, copies);
    }
}

static void examine_table(const ep_routing_table *table, uint32_t copies, ep_doctor_findings *out)
{
    bool is_mapped = strcmp(table->policy, "static") == 0;
    for (uint32_t l = 0; l < table->layers_count; l++) {
        examine_copies(table, &table->layers[l], is_mapped ? 1 : copies, out);
    }
    for (uint32_t m = 0; m < table->models_count; m++) {
        const ep_routing_model *model = &table->models[m];
        if (model->numerics_count > 1) {
            ep_doctor_add(out, EP_DOCTOR_WARN, "numerics", "give all nodes of a model the same build and the same numerics, portable where CPUs differ",
                          "model %s: its nodes compute with %" PRIu32 " different numerics ids (%s, %s%s): only those of one id hold experts",
                          model->name, model->numerics_count, model->numerics[0], model->numerics[1],
                          model->numerics_count > 2 ? ", .." : "");
        }
        for (uint32_t k = 0; k < m; k++) {
            if (strcmp(table->models[k].name, model->name) == 0) {
                ep_doctor_add(out, EP_DOCTOR_WARN, "versions", "finish the roll-out; callers must name a version until then",
                              "model %s is served in versions %s and %s", model->name, table->models[k].version, model->version);
            }
        }
    }
}

/* ---- the nodes' own word ---- */

static void examine_budget(const char *node, const char *key, uint64_t used, uint64_t limit, ep_doctor_findings *out)
{
    if (limit > 0 && used * 100 >= limit * NEARLY_PER_CENT) {
        char advice[160];
        snprintf(advice, sizeof(advice), "raise %s, or add nodes or copies", key);
        ep_doctor_add(out, EP_DOCTOR_WARN, "budget", advice, "node %s uses %" PRIu64 " of %s %" PRIu64, node, used, key, limit);
    }
}

static void examine_node(const ep_doctor_facts *facts, const Expertd__V1__NodeStatusReply *node, ep_doctor_findings *out)
{
    if (node->experts_failed > 0) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "expert-failed", "repair the file or make room (weight_bytes_max), then restart the node",
                      "node %s could not load %" PRIu64 " experts: %s", node->node, node->experts_failed, node->last_error);
    }
    if (node->experts_pending > 0) {
        bool is_long = node->uptime_us > LOADING_LONG_US;
        ep_doctor_add(out, is_long ? EP_DOCTOR_WARN : EP_DOCTOR_INFO, "loading", is_long ? "is its disk slow? its log shows the rate" : "",
                      "node %s still loads %" PRIu64 " experts, %.0f s after its start", node->node, node->experts_pending,
                      (double)node->uptime_us / 1e6);
    }
    examine_budget(node->node, "inflight_tokens", node->tokens_in_flight, node->inflight_tokens, out);
    examine_budget(node->node, "spill_bytes", node->spill_used_bytes, node->spill_bytes, out);
    examine_budget(node->node, "connections_max", node->connections, node->connections_max, out);
    if (node->requests_refused > 0) {
        ep_doctor_add(out, EP_DOCTOR_INFO, "refused", "if it grows (expertctl top): raise inflight_tokens, or add nodes or copies",
                      "node %s has refused %" PRIu64 " requests for want of room since its start", node->node, node->requests_refused);
    }
    if (node->coordinator_lost) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "coordinator-lost", "check its coordinator_url, token and network; it goes on trying",
                      "node %s has no connection to its coordinator", node->node);
    }
    uint64_t off_us = node->clock_us > facts->clock_us ? node->clock_us - facts->clock_us : facts->clock_us - node->clock_us;
    if (node->clock_us != 0 && off_us > CLOCK_OFF_US) {
        ep_doctor_add(out, EP_DOCTOR_WARN, "clock", "run NTP on all hosts: logs and traces do not line up",
                      "the clock of node %s differs from ours by %.1f s", node->node, (double)off_us / 1e6);
    }
    if (facts->cluster != NULL && facts->cluster->epoch != NULL && node->epoch != NULL && node->epoch->term != 0 &&
        node->epoch->term != facts->cluster->epoch->term && facts->cluster->epoch->number > 0) {
        ep_doctor_add(out, EP_DOCTOR_WARN, "epoch", "give it a few heartbeats; else check which coordinator_url it has",
                      "node %s works through an assignment of term %" PRIu64 ", the coordinator's table has term %" PRIu64, node->node,
                      node->epoch->term, facts->cluster->epoch->term);
    }
}

static void examine_software(const ep_doctor_facts *facts, ep_doctor_findings *out)
{
    const char *first = facts->cluster != NULL ? facts->cluster->software : NULL;
    const char *whose = "the coordinator";
    for (size_t i = 0; i < facts->nodes->count; i++) {
        const Expertd__V1__NodeStatusReply *node = facts->nodes->nodes[i].status;
        if (node == NULL) {
            continue;
        }
        if (first == NULL) {
            first = node->software;
            whose = node->node;
        } else if (strcmp(first, node->software) != 0) {
            ep_doctor_add(out, EP_DOCTOR_WARN, "software", "finish the upgrade", "node %s runs '%s', %s runs '%s'", node->node,
                          node->software, whose, first);
        }
    }
}

void ep_doctor_examine(const ep_doctor_facts *facts, ep_doctor_findings *out)
{
    if (facts->coordinator_url != NULL && facts->coordinator_error.code != EP_OK) {
        examine_silence(facts, facts->coordinator_url, "coordinator", &facts->coordinator_error, facts->coordinator_port, out);
    } else if (facts->coordinator_url != NULL) {
        examine_open_door(facts, facts->coordinator_url, out);
    }
    if (facts->cluster != NULL) {
        examine_cluster(facts->cluster, facts->table != NULL, out);
    }
    if (facts->table != NULL) {
        examine_table(facts->table, facts->cluster != NULL ? facts->cluster->copies : 1, out);
    }
    for (size_t i = 0; i < facts->nodes->count; i++) {
        const ep_cli_node *node = &facts->nodes->nodes[i];
        if (node->status == NULL) {
            examine_silence(facts, node->url, "node", &node->error, facts->node_ports[i], out);
        } else {
            examine_open_door(facts, node->url, out);
            examine_node(facts, node->status, out);
        }
    }
    examine_software(facts, out);
    if (!facts->has_trace_library || !facts->has_lttng) {
        ep_doctor_add(out, EP_DOCTOR_INFO, "tracing", "install lttng-tools and libexpertd-trace.so to use expertctl trace",
                      "nothing can be recorded here: %s", facts->has_lttng ? "libexpertd-trace.so cannot be loaded" : "no lttng-sessiond");
    }
}
