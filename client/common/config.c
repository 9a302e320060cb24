/* SPDX-License-Identifier: Apache-2.0 */
#include "common/config.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/cpu_features.h"
#include "base/error.h"
#include "base/struct_size.h"
#include "moe/routing_table.h"
#include "transport/transport.h"

#define KIB ((uint64_t)1024)
#define MIB (1024 * KIB)

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

void ep_client_config_init_sized(ep_client_config *out_config, size_t struct_bytes)
{
    const ep_client_config config = {.deadline_us = 10 * 1000 * 1000,
                                     .buffer_bytes_max = 1024 * MIB,
                                     .calls_max = 1024,
                                     .chunk_bytes_max = 1 * MIB,
                                     .payload_crc = true,
                                     .hedge_permille = EP_HEDGE_BY_POLICY};
    ep_struct_init(out_config, struct_bytes, &config, sizeof(config));
}

/* Without a server name any certificate of the CA would pass for the service. */
static bool lacks_server_name(const ep_client_config *config, const char *url)
{
    return strncmp(url, "tls+tcp://", strlen("tls+tcp://")) == 0 &&
           (config->tls_ca_file == NULL || config->tls_server_name == NULL ||
            config->tls_server_name[0] == 0);
}

static ep_err check_urls(const ep_client_config *config, ep_error *out_error)
{
    bool has_nodes = config->node_urls != NULL && config->node_urls_count > 0;
    if (config->coordinator_url != NULL && has_nodes) {
        return BAD("coordinator_url and node_urls are both set: allowed one of them");
    }
    if (config->coordinator_url == NULL && !has_nodes) {
        return BAD("neither coordinator_url nor node_urls is set");
    }
    if (config->coordinator_url != NULL && lacks_server_name(config, config->coordinator_url)) {
        return BAD("coordinator_url %s needs tls_ca_file and tls_server_name",
                   config->coordinator_url);
    }
    if (has_nodes && config->node_urls_count > EP_NODES_MAX) {
        return BAD("node_urls has %zu entries: allowed 1..%d", config->node_urls_count,
                   EP_NODES_MAX);
    }
    for (size_t i = 0; has_nodes && i < config->node_urls_count; i++) {
        if (config->node_urls[i] == NULL) {
            return BAD("node_urls[%zu] is NULL", i);
        }
        ep_err err = ep_lane_check_fork(config->node_urls[i], out_error);
        if (err != EP_OK) {
            return err;
        }
        if (lacks_server_name(config, config->node_urls[i])) {
            return BAD("node_urls[%zu] %s needs tls_ca_file and tls_server_name", i,
                       config->node_urls[i]);
        }
        for (size_t j = 0; j < i; j++) {
            if (strcmp(config->node_urls[i], config->node_urls[j]) == 0) {
                return BAD("node_urls[%zu] and [%zu] are both %s", j, i, config->node_urls[i]);
            }
        }
    }
    return has_nodes ? EP_OK : ep_lane_check_fork(config->coordinator_url, out_error);
}

/* Lanes from the environment; NULL: not set. */
static const char *told_lanes(void)
{
    const char *lanes = getenv("LIBEXPERTD_LANES");
    return lanes != NULL && lanes[0] != 0 ? lanes : NULL;
}

ep_err ep_client_config_check(const ep_client_config *config, ep_error *out_error)
{
    const ep_range numbers[] = {
        {"deadline_us", config->deadline_us, 1, UINT32_MAX - 1},
        {"buffer_bytes_max", config->buffer_bytes_max, 16 * MIB, (uint64_t)1 << 40},
        {"calls_max", config->calls_max, 1, 65536},
        {"chunk_bytes_max", config->chunk_bytes_max, 16 * KIB, 16 * MIB},
        {"prefill_window_tokens", config->prefill_window_tokens, 0, EP_TOKENS_MAX},
        {"hedge_permille",
         config->hedge_permille == EP_HEDGE_BY_POLICY ? 0 : config->hedge_permille, 0,
         EP_HEDGE_PERMILLE_MAX}};
    ep_err err = check_urls(config, out_error);
    if (err == EP_OK) {
        err = ep_ranges_check(numbers, EP_ARRAY_COUNT(numbers), out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    if (config->numerics != NULL &&
        (config->numerics[0] == 0 || strlen(config->numerics) >= EP_NUMERICS_BYTES)) {
        return BAD("numerics is '%.100s': allowed NULL, \"any\", or an id of 1..%d bytes",
                   config->numerics, EP_NUMERICS_BYTES - 1);
    }
    if (config->lanes != NULL && strcmp(config->lanes, "stream") != 0) {
        return BAD("lanes is '%.40s': allowed NULL and \"stream\"", config->lanes);
    }
    if (config->lanes == NULL && told_lanes() != NULL && strcmp(told_lanes(), "stream") != 0) {
        return BAD("LIBEXPERTD_LANES is '%.40s', allowed: stream, or nothing", told_lanes());
    }
    return ep_cpu_features_check(out_error);
}

static bool copy_text(const char *text, const char **out_copy)
{
    *out_copy = text != NULL ? strdup(text) : NULL;
    return text == NULL || *out_copy != NULL;
}

ep_err ep_client_config_copy(const ep_client_config *config, ep_client_config *out_copy)
{
    *out_copy = *config;
    out_copy->node_urls = NULL;
    out_copy->node_urls_count = 0;
    bool ok = copy_text(config->coordinator_url, &out_copy->coordinator_url);
    ok = copy_text(config->token, &out_copy->token) && ok;
    ok = copy_text(config->tls_ca_file, &out_copy->tls_ca_file) && ok;
    ok = copy_text(config->tls_cert_key_file, &out_copy->tls_cert_key_file) && ok;
    ok = copy_text(config->tls_server_name, &out_copy->tls_server_name) && ok;
    ok = copy_text(config->numerics, &out_copy->numerics) && ok;
    ok = copy_text(config->lanes != NULL ? config->lanes : told_lanes(), &out_copy->lanes) && ok;
    if (config->coordinator_url == NULL) {
        const char **urls = calloc(config->node_urls_count, sizeof(*urls));
        out_copy->node_urls = urls;
        out_copy->node_urls_count = urls != NULL ? config->node_urls_count : 0;
        for (size_t i = 0; i < out_copy->node_urls_count; i++) {
            ok = copy_text(config->node_urls[i], &urls[i]) && ok;
        }
        ok = ok && urls != NULL;
    }
    return ok ? EP_OK : EP_ERR_NO_MEMORY;
}

static void free_text(const char *text)
{
    free((void *)(uintptr_t)text);
}

void ep_client_config_free(ep_client_config *config)
{
    for (size_t i = 0; i < config->node_urls_count; i++) {
        free_text(config->node_urls[i]);
    }
    free((void *)(uintptr_t)config->node_urls);
    free_text(config->coordinator_url);
    free_text(config->token);
    free_text(config->tls_ca_file);
    free_text(config->tls_cert_key_file);
    free_text(config->tls_server_name);
    free_text(config->numerics);
    free_text(config->lanes);
}
