/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's options and the rules between them. */
#include "coordinator/coordinator_config.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "transport/address.h"

static const ep_option name_fields[] = {
    {.name = "name",
     .type = EP_OPTION_STRING,
     .min = 1,
     .max = EP_NODE_NAME_BYTES - 1,
     .help = "node name"},
};

#define ADVERTISE_ALLOW_MAX 64
static const ep_option host_fields[] = {
    {.name = "host",
     .type = EP_OPTION_STRING,
     .min = 1,
     .max = 255,
     .help = "prefix, host name, or .domain"},
};

static const ep_option coordinator_options[] = {
    {.name = "placement",
     .type = EP_OPTION_ENUM,
     .allowed = "uniform|balanced|static",
     .default_text = "uniform",
     .help = "uniform: equal counts per node; balanced: by the load that nodes report; static: as "
             "expert_map_file says"},
    {.name = "spare_copies",
     .type = EP_OPTION_INT,
     .max = EP_EXPERTS_MAX,
     .default_text = "0",
     .help = "balanced: copies of each layer beyond `copies` of each expert, for the hottest ones"},
    {.name = "expert_map_file",
     .type = EP_OPTION_PATH,
     .min = 1,
     .help = "JSON expert map (vllm-ascend format), for placement static"},
    {.name = "node_order",
     .type = EP_OPTION_LIST,
     .max = EP_NODES_MAX,
     .fields = name_fields,
     .fields_count = 1,
     .help =
         "static: device d of the map is the d-th node named here; empty: nodes in order of name"},
    {.name = "copies",
     .type = EP_OPTION_INT,
     .min = 1,
     .max = 64,
     .default_text = "1",
     .help = "Copies wanted of each expert"},
    {.name = "min_nodes",
     .type = EP_OPTION_INT,
     .min = 1,
     .max = EP_NODES_MAX,
     .default_text = "1",
     .help = "Nodes that must have registered before experts are placed"},
    {.name = "nodes_max",
     .type = EP_OPTION_INT,
     .min = 1,
     .max = EP_NODES_MAX,
     .default_text = "1024",
     .help = "Nodes known at most"},
    {.name = "advertise_allow",
     .type = EP_OPTION_LIST,
     .max = ADVERTISE_ALLOW_MAX,
     .fields = host_fields,
     .fields_count = 1,
     .help = "Hosts that nodes may register: 10.0.0.0/8, fd00::/8, node1.example, .svc (names that "
             "end so); empty: any"},
    {.name = "heartbeat_ms",
     .type = EP_OPTION_MS,
     .min = 20,
     .max = 60000,
     .default_text = "500ms",
     .help = "How often nodes report"},
    {.name = "heartbeat_dead_count",
     .type = EP_OPTION_INT,
     .min = 1,
     .max = 100,
     .default_text = "3",
     .help = "Missing reports after which a node leaves the routing table"},
    {.name = "restore_ms",
     .type = EP_OPTION_MS,
     .max = 86400000,
     .default_text = "10s",
     .help = "How long a silent node may be away before its experts are given to others"},
    {.name = "decode_tokens_max",
     .type = EP_OPTION_INT,
     .unit = "tokens",
     .min = 1,
     .max = 65536,
     .default_text = "256",
     .help = "Mode auto: batches up to this size are decode, larger ones prefill"},
    {.name = "move_rate",
     .type = EP_OPTION_SIZE,
     .max = 1ull << 46,
     .default_text = "4G",
     .help = "Bytes of weights per second that nodes are told to load for balance, or as further "
             "copies of experts "
             "that have one; 0: no limit"},
    {.name = "loading_nodes_max",
     .type = EP_OPTION_INT,
     .max = EP_NODES_MAX,
     .default_text = "0",
     .help = "Nodes that load what they were given at once, for storage that all read from; 0: no "
             "limit"},
    {.name = "gateway",
     .type = EP_OPTION_BOOL,
     .default_text = "true",
     .help = "Serve whole batches of clients that do not route"},
    {.name = "gateway_calls_max",
     .type = EP_OPTION_INT,
     .min = 1,
     .max = 65536,
     .default_text = "256",
     .help = "Gateway calls in flight"},
    {.name = "metrics_per_expert",
     .type = EP_OPTION_BOOL,
     .default_text = "false",
     .help = "Count slots of every expert in /metrics, one series each"},
    {.name = "state_dir",
     .type = EP_OPTION_PATH,
     .min = 1,
     .help = "Existing directory for the state that survives a restart; not set: memory"},
    EP_SERVICE_OPTIONS("tcp://127.0.0.1:7410", "127.0.0.1:7411", "tcp://127.0.0.1:7412",
                       "tcp://127.0.0.1:7413"),
};

const ep_options_spec ep_coordinator_options = {
    .program = "expertd-coordinator",
    .env_prefix = "EXPERTD_COORDINATOR_",
    .summary =
        "Keeps membership and placement: which node holds which expert. It is off the token path.",
    .config_file = "/etc/expertd/coordinator.yaml",
    .options = coordinator_options,
    .options_count = EP_ARRAY_COUNT(coordinator_options),
};

static uint32_t number(const ep_options *options, const char *key)
{
    return (uint32_t)ep_options_number(options, key);
}

/* An allocated array of borrowed texts; NULL: no memory. */
static const char **list_texts(const ep_options *options, const char *key, const char *field)
{
    size_t count = ep_options_list_count(options, key);
    const char **texts = calloc(count + 1, sizeof(*texts));
    for (size_t i = 0; texts != NULL && i < count; i++) {
        texts[i] = ep_options_list_text(options, key, i, field);
    }
    return texts;
}

static ep_err load_advertise_allow(const ep_options *options, ep_coordinator_config *config,
                                   ep_error *out_error)
{
    size_t count = ep_options_list_count(options, "advertise_allow");
    config->advertise_allow = list_texts(options, "advertise_allow", "host");
    if (config->advertise_allow == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the configuration");
    }
    for (size_t i = 0; i < count; i++) {
        if (!ep_address_rule_is_good(config->advertise_allow[i])) {
            return ep_options_fail_item(options, "advertise_allow", i, "host", out_error,
                                        "'%.120s' is neither a prefix nor a name; allowed: "
                                        "10.0.0.0/8, fd00::/8, node1.example, .svc",
                                        config->advertise_allow[i]);
        }
    }
    config->cluster.advertise_allow = config->advertise_allow;
    config->cluster.advertise_allow_count = count;
    return EP_OK;
}

static ep_err load_map(const ep_options *options, ep_coordinator_config *config,
                       ep_error *out_error)
{
    bool is_static = strcmp(ep_options_text(options, "placement"), "static") == 0;
    if (is_static != ep_options_is_set(options, "expert_map_file")) {
        return is_static ? ep_options_fail(options, "placement", out_error,
                                           "'static' needs expert_map_file")
                         : ep_options_fail(options, "expert_map_file", out_error,
                                           "is only used with placement: static");
    }
    config->cluster.is_balanced = strcmp(ep_options_text(options, "placement"), "balanced") == 0;
    config->cluster.spare_copies = number(options, "spare_copies");
    if (config->cluster.spare_copies > 0 && !config->cluster.is_balanced) {
        return ep_options_fail(options, "spare_copies", out_error,
                               "is only used with placement: balanced");
    }
    size_t count = ep_options_list_count(options, "node_order");
    if (!is_static) {
        return count == 0 ? EP_OK
                          : ep_options_fail(options, "node_order", out_error,
                                            "is only used with placement: static");
    }
    config->node_order = list_texts(options, "node_order", "name");
    if (config->node_order == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the configuration");
    }
    config->cluster.node_order = config->node_order;
    config->cluster.node_order_count = count;
    ep_error why;
    if (ep_expert_map_read_file(ep_options_text(options, "expert_map_file"), &config->expert_map,
                                &why) != EP_OK) {
        return ep_options_fail(options, "expert_map_file", out_error, "%s", why.text);
    }
    uint32_t devices = ep_expert_map_devices_max(config->expert_map);
    if (count != 0 && count < devices) {
        return ep_options_fail(options, "node_order", out_error,
                               "names %zu nodes, the expert map %s has %u devices", count,
                               config->expert_map->file, devices);
    }
    config->cluster.expert_map = config->expert_map;
    return EP_OK;
}

/*
 * The time in microseconds, so that it grows with each restart, even one of less than a second.
 * With a store it is only a lower bound of the next term, above terms that the store does not know
 * of because it is a backup or was not in use for a while. If the clock was set back, the stored
 * term + 1 is higher.
 */
static uint64_t new_term(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

/* The directory must exist: with a misspelt path the coordinator would otherwise start without
 * state and move experts for no visible reason. */
static ep_err check_state_dir(const ep_options *options, ep_coordinator_config *config,
                              ep_error *out_error)
{
    struct stat status;
    char why[EP_ERRNO_TEXT_BYTES];
    if (!ep_options_is_set(options, "state_dir")) {
        return EP_OK;
    }
    const char *path = ep_options_text(options, "state_dir");
    if (stat(path, &status) != 0) {
        return ep_options_fail(options, "state_dir", out_error, "%s: %s; make the directory first",
                               path, ep_errno_text(errno, why));
    }
    if (!S_ISDIR(status.st_mode)) {
        return ep_options_fail(options, "state_dir", out_error, "%s is not a directory", path);
    }
    if (access(path, R_OK | W_OK | X_OK) != 0) {
        return ep_options_fail(options, "state_dir", out_error,
                               "%s: %s; the coordinator must be able to write there", path,
                               ep_errno_text(errno, why));
    }
    config->state_dir = path;
    return EP_OK;
}

static bool listens_with_tls(const ep_service_config *service)
{
    for (size_t i = 0; i < service->listen_count; i++) {
        if (ep_url_is_tls(service->listen[i])) {
            return true;
        }
    }
    return false;
}

static ep_err load(const ep_options *options, ep_coordinator_config *config, ep_error *out_error)
{
    ep_err err = ep_service_config_load(options, &config->service, out_error);
    if (err != EP_OK) {
        return err;
    }
    config->cluster = (ep_coordinator_state_config){
        .node_urls = listens_with_tls(&config->service) ? EP_NODE_URLS_TLS : EP_NODE_URLS_STREAM,
        .copies = number(options, "copies"),
        .min_nodes = number(options, "min_nodes"),
        .heartbeat_ms = number(options, "heartbeat_ms"),
        .heartbeat_dead_count = number(options, "heartbeat_dead_count"),
        .restore_ms = number(options, "restore_ms"),
        .nodes_max = number(options, "nodes_max"),
        .decode_tokens_max = number(options, "decode_tokens_max"),
        .move_rate = ep_options_number(options, "move_rate"),
        .loading_nodes_max = number(options, "loading_nodes_max"),
        .term = new_term(),
    };
    if (config->cluster.min_nodes > config->cluster.nodes_max) {
        return ep_options_fail(options, "min_nodes", out_error,
                               "%u is above nodes_max, which is %u", config->cluster.min_nodes,
                               config->cluster.nodes_max);
    }
    config->metrics_per_expert = ep_options_bool(options, "metrics_per_expert");
    config->gateway = ep_options_bool(options, "gateway");
    config->gateway_calls_max = number(options, "gateway_calls_max");
    err = check_state_dir(options, config, out_error);
    err = err != EP_OK ? err : load_advertise_allow(options, config, out_error);
    return err != EP_OK ? err : load_map(options, config, out_error);
}

ep_err ep_coordinator_config_load(const ep_options *options, ep_coordinator_config *out_config,
                                  ep_error *out_error)
{
    ep_coordinator_config config = {0};
    ep_err err = load(options, &config, out_error);
    if (err != EP_OK) {
        ep_coordinator_config_fini(&config);
        return err;
    }
    *out_config = config;
    return EP_OK;
}

void ep_coordinator_config_fini(ep_coordinator_config *config)
{
    ep_expert_map_destroy(config->expert_map);
    free(config->node_order);
    free(config->advertise_allow);
    config->expert_map = NULL;
    config->node_order = NULL;
    config->advertise_allow = NULL;
    ep_service_config_fini(&config->service);
}

ep_err ep_coordinator_config_check(const ep_options *options, ep_error *out_error)
{
    ep_coordinator_config config;
    ep_err err = ep_coordinator_config_load(options, &config, out_error);
    if (err == EP_OK) {
        ep_coordinator_config_fini(&config);
    }
    return err;
}
