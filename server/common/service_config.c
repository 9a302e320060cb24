/* SPDX-License-Identifier: Apache-2.0 */
/* Makes listeners, credentials and limits of the options; checks which listeners are allowed. */
#include "common/service_config.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "common/probes.h"
#include "common/service_tls.h"
#include "common/service_tokens.h"
#include "observe/trace.h"

const ep_option ep_listen_fields[1] = {
    {.name = "url",
     .type = EP_OPTION_STRING,
     .min = 1,
     .max = EP_ADDRESS_BYTES - 1,
     .help = "tcp://host:port or tls+tcp://host:port"},
};

bool ep_url_is_tls(const char *url)
{
    return strncmp(url, "tls+tcp://", strlen("tls+tcp://")) == 0;
}

/* What an address beyond loopback lacks: TLS or token; NULL: nothing. */
static const char *find_missing(const ep_options *options, const char *address,
                                const char *token_key)
{
    bool has_token = ep_options_text(options, token_key)[0] != 0;
    bool is_tls = ep_url_is_tls(address);
    if (address[0] == 0 || ep_address_is_loopback(address) || (is_tls && has_token)) {
        return NULL;
    }
    return !is_tls && !has_token ? "there is neither TLS nor token"
           : !is_tls             ? "there is no TLS"
                                 : "there is no token";
}

static void warn_exposed(const ep_options *options, const char *key, const char *url,
                         const char *token_key)
{
    const char *missing = find_missing(options, url, token_key);
    if (missing != NULL) {
        ep_log(EP_LOG_WARN, "insecure", EP_KV(key, key), EP_KV(url, url), EP_KV(reason, missing),
               EP_KV(effect, "other hosts reach it unprotected"),
               EP_KV(hint, "set TLS and token, and insecure no more; or bind loopback"));
    }
}

void ep_service_warn_exposed(const ep_options *options)
{
    for (size_t i = 0; i < ep_options_list_count(options, "listen"); i++) {
        warn_exposed(options, "listen", ep_options_list_text(options, "listen", i, "url"),
                     "token_file");
    }
    warn_exposed(options, "admin_listen", ep_options_text(options, "admin_listen"),
                 "admin_token_file");
    warn_exposed(options, "door_listen", ep_options_text(options, "door_listen"), "token_file");
}

/* Whether we may listen on the URL; the reason names neither key nor origin. tls_keys: what it
 * needs for TLS; others: what else the key may have. */
static ep_err check_listener(const ep_options *options, const char *url, const ep_tls_config *tls,
                             const char *tls_keys, const char *token_key, const char *others,
                             ep_error *out_why)
{
    if (ep_lane_for_url(url) == NULL) {
        return ep_error_set(out_why, EP_ERR_BAD_CONFIG,
                            "'%.120s' is no URL we can listen on; allowed: tcp://host:port, "
                            "tls+tcp://host:port%s",
                            url, others);
    }
    if (ep_url_is_tls(url) && (tls->ca_file == NULL || tls->cert_key_file == NULL)) {
        return ep_error_set(out_why, EP_ERR_BAD_CONFIG, "'%.120s' needs %s", url, tls_keys);
    }
    const char *missing = find_missing(options, url, token_key);
    if (missing != NULL && !ep_options_bool(options, "insecure")) {
        return ep_error_set(out_why, EP_ERR_BAD_CONFIG,
                            "'%.120s' is reachable from other hosts, and %s; use tls+tcp:// with "
                            "%s, a loopback address, or set insecure: true",
                            url, missing, token_key);
    }
    return EP_OK;
}

static ep_err load_listeners(const ep_options *options, ep_service_config *config,
                             ep_error *out_error)
{
    ep_error why;
    config->listen_count = ep_options_list_count(options, "listen");
    for (size_t i = 0; i < config->listen_count; i++) {
        config->listen[i] = ep_options_list_text(options, "listen", i, "url");
        if (check_listener(options, config->listen[i], &config->tls,
                           "tls_ca_file and tls_cert_key_file", "token_file", "", &why) != EP_OK) {
            return ep_options_fail_item(options, "listen", i, "url", out_error, "%s", why.text);
        }
    }
    return EP_OK;
}

/* Takes a URL that has its own key; "": off. */
static ep_err load_listener(const ep_options *options, const char *key, const ep_tls_config *tls,
                            const char *tls_keys, const char *token_key, const char **out_url,
                            ep_error *out_error)
{
    ep_error why;
    *out_url = ep_options_text(options, key);
    return (*out_url)[0] == 0 || check_listener(options, *out_url, tls, tls_keys, token_key,
                                                ", empty", &why) == EP_OK
               ? EP_OK
               : ep_options_fail(options, key, out_error, "%s", why.text);
}

static ep_err load_single_listeners(const ep_options *options, ep_service_config *config,
                                    ep_error *out_error)
{
    config->door_contexts = (uint32_t)ep_options_number(options, "door_contexts");
    ep_err err = load_listener(options, "admin_listen", &config->admin_tls,
                               "admin_tls_ca_file or tls_ca_file, and tls_cert_key_file",
                               "admin_token_file", &config->admin_listen, out_error);
    return err != EP_OK ? err
                        : load_listener(options, "door_listen", &config->tls,
                                        "tls_ca_file and tls_cert_key_file", "token_file",
                                        &config->door_listen, out_error);
}

static const char *text_or_null(const ep_options *options, const char *key)
{
    const char *text = ep_options_text(options, key);
    return text[0] != 0 ? text : NULL;
}

static void load_limits(const ep_options *options, ep_service_config *config)
{
    ep_rpc_limits_default(&config->limits);
    config->limits.frame_bytes_max = ep_options_number(options, "frame_bytes_max");
    config->limits.header_bytes_max = ep_options_number(options, "header_bytes_max");
    config->limits.connections_max = (uint32_t)ep_options_number(options, "connections_max");
    config->limits.calls_per_connection_max =
        (uint32_t)ep_options_number(options, "calls_per_connection_max");
    /* A largest frame must always fit, or it could never be sent or accepted. */
    if (config->limits.credit_bytes < config->limits.frame_bytes_max * 2) {
        config->limits.credit_bytes = config->limits.frame_bytes_max * 2;
    }
    if (config->limits.send_queue_bytes_max < config->limits.frame_bytes_max * 2) {
        config->limits.send_queue_bytes_max = config->limits.frame_bytes_max * 2;
    }
    config->buffer_bytes_max = ep_options_number(options, "buffer_bytes_max");
    config->drain_ms = (uint32_t)ep_options_number(options, "drain_ms");
    config->payload_crc = ep_options_bool(options, "payload_crc");
}

static ep_err load(const ep_options *options, ep_service_config *config, ep_error *out_error)
{
    ep_error address_error;
    config->probe_address = ep_options_text(options, "probe_address");
    config->ports_file = ep_options_text(options, "ports_file");
    config->tls.ca_file = text_or_null(options, "tls_ca_file");
    config->tls.cert_key_file = text_or_null(options, "tls_cert_key_file");
    config->tls.server_name = text_or_null(options, "tls_server_name");
    config->tls.require_client_cert = ep_options_bool(options, "tls_client_certs");
    config->has_tls = config->tls.ca_file != NULL;
    config->insecure = ep_options_bool(options, "insecure");
    config->admin_tls = config->tls;
    if (text_or_null(options, "admin_tls_ca_file") != NULL) {
        config->admin_tls.ca_file = text_or_null(options, "admin_tls_ca_file");
        config->admin_tls.require_client_cert = true;
    }
    load_limits(options, config);
    if (config->limits.header_bytes_max > config->limits.frame_bytes_max) {
        return ep_options_fail(options, "header_bytes_max", out_error,
                               "%zu is above frame_bytes_max, %zu", config->limits.header_bytes_max,
                               config->limits.frame_bytes_max);
    }
    if (config->buffer_bytes_max < 2 * config->limits.frame_bytes_max) {
        return ep_options_fail(options, "buffer_bytes_max", out_error,
                               "%zu is below 2 x frame_bytes_max, %zu", config->buffer_bytes_max,
                               2 * config->limits.frame_bytes_max);
    }
    if (config->probe_address[0] != 0 &&
        ep_probes_check_address(config->probe_address, &address_error) != EP_OK) {
        return ep_options_fail(options, "probe_address", out_error, "%s", address_error.text);
    }
    ep_err err = ep_service_tls_check(options, out_error);
    err = err == EP_OK ? ep_service_tokens_load(options, &config->credentials, out_error) : err;
    err = err == EP_OK ? load_listeners(options, config, out_error) : err;
    return err == EP_OK ? load_single_listeners(options, config, out_error) : err;
}

ep_err ep_service_config_load(const ep_options *options, ep_service_config *out_config,
                              ep_error *out_error)
{
    ep_service_config config = {0};
    ep_err err = load(options, &config, out_error);
    if (err != EP_OK) {
        ep_service_config_fini(&config);
        return err;
    }
    *out_config = config;
    return EP_OK;
}

void ep_service_config_fini(ep_service_config *config)
{
    ep_rpc_credentials_destroy(config->credentials);
    config->credentials = NULL;
}

static ep_lane_address address_of(const char *url, const ep_tls_config *tls)
{
    return (ep_lane_address){.url = url, .tls = ep_url_is_tls(url) ? tls : NULL};
}

ep_err ep_service_listen(const ep_service_config *config, ep_rpc_server *server,
                         ep_error *out_error)
{
    for (size_t i = 0; i < config->listen_count; i++) {
        ep_lane_address address = address_of(config->listen[i], &config->tls);
        ep_err err = ep_rpc_server_listen(server, &address, EP_ROLES_MAIN, out_error);
        if (err != EP_OK) {
            return ep_error_prefix(out_error, err, "listen");
        }
    }
    if (config->admin_listen[0] != 0) {
        ep_lane_address address = address_of(config->admin_listen, &config->admin_tls);
        ep_err err = ep_rpc_server_listen(server, &address, EP_ROLES_ADMIN, out_error);
        if (err != EP_OK) {
            return ep_error_prefix(out_error, err, "admin_listen");
        }
    }
    if (config->door_listen[0] != 0) {
        ep_lane_address address = address_of(config->door_listen, &config->tls);
        ep_err err = ep_rpc_server_open_door(server, &address, config->door_contexts, out_error);
        if (err != EP_OK) {
            return ep_error_prefix(out_error, err, "door_listen");
        }
    }
    return EP_OK;
}

void ep_service_admin_url(const ep_service_config *config, ep_rpc_server *server, char *out_url,
                          size_t bytes)
{
    out_url[0] = '\0';
    if (config->admin_listen[0] != 0) {
        ep_rpc_server_url(server, config->listen_count, out_url, bytes);
    }
}

void ep_service_log_start(const ep_options *options)
{
    static const ep_log_format formats[] = {EP_LOG_TEXT, EP_LOG_TEXT, EP_LOG_JSON, EP_LOG_JOURNAL};
    uint64_t format = ep_options_number(options, "log_format");
    bool under_journal = format == 0 && getenv("JOURNAL_STREAM") != NULL;
    /* log_level's words are in the order of ep_log_level. */
    ep_log_start((ep_log_level)ep_options_number(options, "log_level"),
                 under_journal ? EP_LOG_JOURNAL : formats[format]);
    for (size_t i = 0; ep_options_warning(options, i) != NULL; i++) {
        ep_log(EP_LOG_WARN, "config", EP_KV(reason, ep_options_warning(options, i)));
    }
}

static void log_tracing(bool loaded, const char *why)
{
    ep_log(EP_LOG_DEBUG, "trace-start", EP_KV(loaded, loaded), EP_KV(reason, why));
}

void ep_service_trace_start(const ep_options *options)
{
    if (strcmp(ep_options_text(options, "tracing"), "off") == 0) {
        log_tracing(false, "tracing is off");
    } else {
        ep_trace_load_aside(log_tracing);
    }
}

void ep_service_lane_start(const ep_options *options)
{
    ep_error error;
    ep_err err = ep_stream_lane_choose(ep_options_text(options, "stream_lane"), &error);
    EP_ASSERT(err == EP_OK); /* the option table allows only these words */
    ep_stream_lane_set_busy_poll((uint32_t)ep_options_number(options, "busy_poll_us"));
}
