/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "transport/address.h"

#define LOADING_LONG_US 120000000u /* loading for longer than this is a finding */
#define CLOCK_OFF_US 5000000u
#define NEARLY_PER_CENT 90u

const char *const ep_doctor_severity_words[] = {"info", "warning", "error"};

ep_doctor_finding *ep_doctor_add(ep_doctor_findings *findings, ep_doctor_severity severity,
                                 const char *code, const char *advice, const char *format, ...)
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

/* Explains a peer that did not answer: what is at its port, and what to change here. */
static void examine_silence(const ep_doctor_facts *facts, const char *url, const char *wanted,
                            const ep_error *error, const ep_rpc_look *look, ep_doctor_findings *out)
{
    const char *other = strcmp(wanted, "coordinator") == 0 ? "node" : "coordinator";
    if (error->code == EP_ERR_UNIMPLEMENTED) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "wrong-endpoint",
                      strcmp(other, "node") == 0
                          ? "give it with --node, or name the coordinator with --coordinator"
                          : "give it with --coordinator, or name a node with --node",
                      "%s is a %s, not a %s", url, other, wanted);
    } else if (error->code == EP_ERR_PERMISSION_DENIED) {
        ep_doctor_add(
            out, EP_DOCTOR_ERROR, "admin-listener",
            "admin_listen takes operators only: give the URL of listen (rpc_url of the ports file)",
            "%s", error->text);
    } else if (look->code != NULL) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, look->code, look->advice, "%s: %s", url, look->text);
    } else if (error->code == EP_ERR_UNAUTHENTICATED) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, facts->has_token ? "token-wrong" : "token-missing",
                      facts->has_token
                          ? "the file of --token-file must hold a token of the service's token_file"
                          : "give the service's token with --token-file",
                      "%s", error->text);
    } else {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "no-answer", "look at the log of the program there",
                      "%s does not answer as a %s: %s", url, wanted, error->text);
    }
}

static void examine_open_door(const ep_doctor_facts *facts, const char *url,
                              ep_doctor_findings *out)
{
    if (!ep_url_has_scheme(url, "tls+tcp") && !ep_address_is_loopback(url) && !facts->has_token) {
        ep_doctor_add(
            out, EP_DOCTOR_WARN, "insecure",
            "set token_file and TLS there, and take insecure: true away",
            "%s lets anybody in who reaches it: beyond loopback, without TLS and without a token",
            url);
    }
}

/* ---- the coordinator's state ---- */

static void examine_cluster(const Expertd__V1__ClusterStatusReply *cluster, ep_doctor_findings *out)
{
    if (!cluster->judged) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "coordinator-old",
                      "upgrade the coordinator, or use the expertctl of its version",
                      "the coordinator runs '%s', which does not judge the service's health yet",
                      cluster->software);
    }
    for (size_t i = 0; i < cluster->n_problems; i++) {
        const Expertd__V1__Problem *problem = cluster->problems[i];
        ep_doctor_add(out, problem->is_error ? EP_DOCTOR_ERROR : EP_DOCTOR_WARN, problem->code,
                      problem->advice, "%s", problem->text);
    }
    out->dropped += cluster->problems_dropped;
}

/* ---- the nodes' own reports ---- */

static void examine_budget(const char *node, const char *key, uint64_t used, uint64_t limit,
                           ep_doctor_findings *out)
{
    if (limit > 0 && used * 100 >= limit * NEARLY_PER_CENT) {
        char advice[160];
        snprintf(advice, sizeof(advice), "raise %s, or add nodes or copies", key);
        ep_doctor_add(out, EP_DOCTOR_WARN, "budget", advice,
                      "node %s uses %" PRIu64 " of %s %" PRIu64, node, used, key, limit);
    }
}

/* Reports lost devices with their reasons, which the coordinator does not have. True: none is
 * left. */
static bool examine_devices(const Expertd__V1__NodeStatusReply *node, ep_doctor_findings *out)
{
    size_t lost = 0;
    for (size_t d = 0; d < node->n_devices; d++) {
        const Expertd__V1__DeviceStatus *device = node->devices[d];
        if (device->lost_why[0] != '\0') {
            lost++;
            ep_doctor_add(out, EP_DOCTOR_ERROR, "device-lost",
                          "npu-smi info on its host shows the device; restart its expertd once it "
                          "is well, or without it by ASCEND_RT_VISIBLE_DEVICES",
                          "node %s has lost device %" PRIu32 ": %s", node->node, device->device,
                          device->lost_why);
        }
    }
    return lost > 0 && lost == node->n_devices;
}

static void examine_node(const ep_doctor_facts *facts, const ep_cli_node *asked,
                         ep_doctor_findings *out)
{
    const Expertd__V1__NodeStatusReply *node = asked->status;
    if (!examine_devices(node, out) && node->experts_failed > 0) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "expert-failed",
                      "repair the file or make room (weight_bytes_max), then restart the node",
                      "node %s could not load %" PRIu64 " experts: %s", node->node,
                      node->experts_failed, node->last_error);
    }
    /* otherwise the coordinator reports it */
    if (facts->cluster == NULL && node->tls_error[0] != '\0') {
        ep_doctor_add(out, EP_DOCTOR_WARN, "tls-refused",
                      "repair the file that is named before a restart, then expertctl reload",
                      "node %s: a restart would fail, its TLS files are refused and those of "
                      "before are in force: %s",
                      node->node, node->tls_error);
    }
    if (node->experts_pending > 0) {
        bool is_long = node->uptime_us > LOADING_LONG_US;
        ep_doctor_add(out, is_long ? EP_DOCTOR_WARN : EP_DOCTOR_INFO, "loading",
                      is_long ? "is its disk slow? its log shows the rate" : "",
                      "node %s still loads %" PRIu64 " experts, %.0f s after its start", node->node,
                      node->experts_pending, (double)node->uptime_us / 1e6);
    }
    examine_budget(node->node, "inflight_tokens", node->tokens_in_flight, node->inflight_tokens,
                   out);
    examine_budget(node->node, "spill_bytes", node->spill_used_bytes, node->spill_bytes, out);
    examine_budget(node->node, "connections_max", node->connections, node->connections_max, out);
    if (node->requests_refused > 0) {
        ep_doctor_add(out, EP_DOCTOR_INFO, "refused",
                      "if it grows (expertctl top): raise inflight_tokens, or add nodes or copies",
                      "node %s has refused %" PRIu64 " requests for want of room since its start",
                      node->node, node->requests_refused);
    }
    if (node->coordinator_lost) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "coordinator-lost",
                      "check its coordinator_url, token and network; it goes on trying",
                      "node %s has no connection to its coordinator%s%s", node->node,
                      node->coordinator_error[0] != '\0' ? ": " : "", node->coordinator_error);
    }
    /* the time of this node's answer, since others may have answered much later */
    const uint64_t ours_us = asked->answered_us;
    uint64_t off_us =
        node->clock_us > ours_us ? node->clock_us - ours_us : ours_us - node->clock_us;
    if (node->clock_us != 0 && off_us > CLOCK_OFF_US) {
        ep_doctor_add(
            out, EP_DOCTOR_WARN, "clock", "run NTP on all hosts: logs and traces do not line up",
            "the clock of node %s differs from ours by %.1f s", node->node, (double)off_us / 1e6);
    }
    if (facts->cluster != NULL && facts->cluster->epoch != NULL && node->epoch != NULL &&
        node->epoch->term != 0 && node->epoch->term != facts->cluster->epoch->term &&
        facts->cluster->epoch->number > 0) {
        ep_doctor_add(out, EP_DOCTOR_WARN, "epoch",
                      "give it a few heartbeats; else check which coordinator_url it has",
                      "node %s works through an assignment of term %" PRIu64
                      ", the coordinator's table has term %" PRIu64,
                      node->node, node->epoch->term, facts->cluster->epoch->term);
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
            ep_doctor_add(out, EP_DOCTOR_WARN, "software", "finish the upgrade",
                          "node %s runs '%s', %s runs '%s'", node->node, node->software, whose,
                          first);
        }
    }
}

void ep_doctor_examine(const ep_doctor_facts *facts, ep_doctor_findings *out)
{
    if (facts->coordinator_url != NULL && facts->coordinator_error.code != EP_OK) {
        examine_silence(facts, facts->coordinator_url, "coordinator", &facts->coordinator_error,
                        &facts->coordinator_look, out);
    } else if (facts->coordinator_url != NULL) {
        examine_open_door(facts, facts->coordinator_url, out);
    }
    if (facts->cluster != NULL) {
        examine_cluster(facts->cluster, out);
    }
    for (size_t i = 0; i < facts->nodes->count; i++) {
        const ep_cli_node *node = &facts->nodes->nodes[i];
        if (node->status == NULL) {
            examine_silence(facts, node->url, "node", &node->error, &facts->node_looks[i], out);
        } else {
            examine_open_door(facts, node->url, out);
            examine_node(facts, node, out);
        }
    }
    examine_software(facts, out);
    if (!facts->has_trace_library || !facts->has_lttng) {
        ep_doctor_add(out, EP_DOCTOR_INFO, "tracing",
                      "install lttng-tools and libexpertd-trace.so to use expertctl trace",
                      "nothing can be recorded here: %s",
                      facts->has_lttng ? "libexpertd-trace.so cannot be loaded"
                                       : "no lttng-sessiond");
    }
}
