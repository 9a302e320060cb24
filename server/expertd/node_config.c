/* SPDX-License-Identifier: Apache-2.0 */
/* The node's options and the rules between them. */
#include "expertd/node_config.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/printable.h"
#include "base/check.h"
#include "base/cpu_features.h"
#include "base/host.h"
#include "base/log.h"
#include "expertd/batch_policy.h"
#include "expertd/weight_cache.h"
#include "expertd/weight_serve.h"
#include "model/mirror.h"
#include "model/model.h"

static const ep_option model_fields[] = {
    {.name = "name",
     .type = EP_OPTION_STRING,
     .min = 1,
     .max = EP_MODEL_NAME_BYTES - 1,
     .help = "the name callers use"},
    {.name = "path",
     .type = EP_OPTION_PATH,
     .min = 1,
     .help = "checkpoint directory: config.json and safetensors files, or a .gguf file"},
    {.name = "experts",
     .type = EP_OPTION_STRING,
     .min = 1,
     .max = 2048,
     .default_text = "auto",
     .help = "auto, all, assigned, or indexes like 0-3,5"},
    {.name = "weights_from",
     .type = EP_OPTION_ENUM,
     .allowed = "files|nodes|storage|nodes,storage|storage,nodes",
     .default_text = "files",
     .help = "else than files: path is a directory, empty at first, that is filled as it is "
             "needed: from nodes that "
             "serve the model, from storage_path, or from one where the other fails"},
    {.name = "storage_path",
     .type = EP_OPTION_PATH,
     .default_text = "",
     .help = "weights_from: storage: the checkpoint that path is filled from, on storage that "
             "nodes share"},
    {.name = "version",
     .type = EP_OPTION_STRING,
     .max = 16,
     .default_text = "",
     .help = "the version that the files must be; empty: whichever they are"},
    {.name = "weight_quant",
     .type = EP_OPTION_ENUM,
     .allowed = EP_WEIGHT_QUANT_WORDS,
     .default_text = EP_WEIGHT_QUANT_NONE,
     .help = "else than none: experts in bf16, f16 or f32 are put into this format while they are "
             "loaded, and take .53 (int8-g32), .28 (int4-g32), .27 (mxfp4) or .30 (q4_k) of the "
             "memory of bf16. They are a version of the model of their own"},
};

static const ep_option tenant_fields[] = {
    {.name = "name",
     .type = EP_OPTION_STRING,
     .min = 1,
     .max = 127,
     .help = "what callers give as their tenant; *: each of the others"},
    {.name = "weight",
     .type = EP_OPTION_INT,
     .min = 1,
     .max = EP_BATCH_WEIGHT_MAX,
     .default_text = "1",
     .help = "part of the backend's time, against the weights of the others"},
    {.name = "inflight_tokens",
     .type = EP_OPTION_INT,
     .unit = "tokens",
     .max = 1u << 24,
     .default_text = "0",
     .help = "token rows in work at once; 0: no limit of its own"},
    {.name = "tokens_per_s",
     .type = EP_OPTION_INT,
     .unit = "tokens",
     .max = 1u << 30,
     .default_text = "0",
     .help = "token rows per second; 0: no limit"},
};

static const ep_option node_options[] = {
    {.name = "node_name",
     .type = EP_OPTION_STRING,
     .max = EP_NODE_NAME_BYTES - 1,
     .default_text = "",
     .help = "Name of this node in the cluster; empty: host name and port"},
    {.name = "host",
     .type = EP_OPTION_STRING,
     .max = EP_HOST_BYTES - 1,
     .default_text = "",
     .help = "The machine this node is on: rows for nodes of one host may travel there once; "
             "empty: the kernel's boot id"},
    {.name = "models",
     .type = EP_OPTION_LIST,
     .min = 1,
     .max = EP_NODE_MODELS_MAX,
     .fields = model_fields,
     .fields_count = EP_ARRAY_COUNT(model_fields),
     .flag = "model",
     .help = "Models to serve. In the file also experts: auto (all, or what the coordinator "
             "assigns), all, "
             "assigned, or 0-3,5"},
    {.name = "coordinator_url",
     .type = EP_OPTION_STRING,
     .max = EP_URL_BYTES - 1,
     .default_text = "",
     .help = "The coordinator to register with; empty: none"},
    {.name = "advertise_url",
     .type = EP_OPTION_STRING,
     .max = EP_URL_BYTES - 1,
     .default_text = "",
     .help = "Where callers reach this node; empty: the first listen URL"},
    {.name = "backend",
     .type = EP_OPTION_STRING,
     .min = 1,
     .max = 32,
     .default_text = "cpu",
     .help = "What computes: cpu, ascend (Ascend NPUs through CANN), or reference. Of several, as "
             "ascend,cpu, the first that this "
             "machine has"},
    {.name = "numerics",
     .type = EP_OPTION_ENUM,
     .allowed = "portable|bf16dp|bf16odd|w4a8|auto",
     .default_text = "auto",
     .help = "Which rules fix the bits of experts: auto (the quickest of the next ones on this "
             "CPU), portable (f32 sums, any CPU), bf16dp (sums of "
             "bf16 pairs, for AVX-512 BF16), bf16odd (the same for 64-bit Arm with BF16), w4a8 "
             "(inputs of MXFP4, int4 and q4_K experts rounded to int8, for AVX-512 VNNI and AVX2; "
             "others as in bf16dp). Only nodes of one choice share a model's experts; give unlike "
             "CPUs the same word"},
    {.name = "threads",
     .type = EP_OPTION_INT,
     .max = EP_BACKEND_THREADS_MAX,
     .default_text = "0",
     .help = "Compute threads; 0: one per usable CPU"},
    {.name = "pin_threads",
     .type = EP_OPTION_BOOL,
     .default_text = "true",
     .help = "Tie compute threads, when there is one per usable CPU, to their CPUs"},
    {.name = "weight_bytes_max",
     .type = EP_OPTION_SIZE,
     .max = 1ull << 50,
     .default_text = "0",
     .help = "Memory for packed weights, on each device; 0: no limit, or on a device nine tenths "
             "of what is free at the start. "
             "Experts beyond it are served too: each is loaded when a call needs it, in place of "
             "the one used least"},
    {.name = "weight_prefetch",
     .type = EP_OPTION_BOOL,
     .default_text = "true",
     .help = "Experts beyond weight_bytes_max that are likely to be used next are loaded ahead "
             "while no call waits for one"},
    {.name = "weight_cache_dir",
     .type = EP_OPTION_PATH,
     .default_text = "",
     .help = "Directory on local disk for packed experts: later starts read them instead of "
             "packing anew. It decides what is computed, so only "
             "this service may write it. Empty: none"},
    {.name = "weight_cache_bytes",
     .type = EP_OPTION_SIZE,
     .max = 1ull << 50,
     .default_text = "0",
     .help =
         "The most that weight_cache_dir may hold; files of other models go first. 0: no limit"},
    {.name = "weight_load_rate",
     .type = EP_OPTION_SIZE,
     .max = 1ull << 46,
     .default_text = "0",
     .help =
         "Bytes per second at which experts are read from their files while the node serves; 0: "
         "no limit"},
    {.name = "weight_serve_rate",
     .type = EP_OPTION_SIZE,
     .max = 1ull << 46,
     .default_text = "256M",
     .help = "Bytes per second of its models' files that this node gives to nodes without them "
             "(only where "
             "node_token_file tells nodes from clients), from 1M on; 0: no limit"},
    {.name = "inflight_tokens",
     .type = EP_OPTION_INT,
     .unit = "tokens",
     .min = 1,
     .max = 1u << 24,
     .default_text = "1024",
     .help = "Token rows in work at once, for each device; more wait within spill_bytes"},
    {.name = "spill_bytes",
     .type = EP_OPTION_SIZE,
     .max = 1ull << 46,
     .default_text = "256M",
     .help = "Memory for requests beyond inflight_tokens; past it callers are told to come back"},
    {.name = "merge_callers",
     .type = EP_OPTION_BOOL,
     .default_text = "true",
     .help = "Rows of different callers for one expert ride one pass over its weights"},
    {.name = "prefill_share_percent",
     .type = EP_OPTION_INT,
     .unit = "percent",
     .max = 90,
     .default_text = "25",
     .help = "Part of the backend's time that prefill gets at least while it has work; the rest "
             "goes to decode first"},
    {.name = "queue_age_us",
     .type = EP_OPTION_US,
     .max = 60000000,
     .default_text = "20ms",
     .help = "Work that waited so long goes before fuller queues of its class; 0: never"},
    {.name = "step_group_us",
     .type = EP_OPTION_US,
     .max = EP_STEP_GROUP_US_MAX,
     .default_text = "200us",
     .help =
         "How long a call of a step group waits for the other ranks of its step; 0: not at all"},
    {.name = "tenants",
     .type = EP_OPTION_LIST,
     .max = EP_TENANTS_LISTED_MAX,
     .fields = tenant_fields,
     .fields_count = EP_ARRAY_COUNT(tenant_fields),
     .flag = "tenant",
     .help = "Callers by the tenant they name: name=weight; in the file also inflight_tokens and "
             "tokens_per_s. "
             "Empty: all are alike"},
    {.name = "compute_stall_ms",
     .type = EP_OPTION_MS,
     .max = 86400000,
     .default_text = "2m",
     .reloadable = true,
     .help = "When the backend holds work and finishes none of it for so long, the node counts as "
             "hanging: /livez fails "
             "and the service manager's watchdog restarts it; 0: never"},
    {.name = "drop_grace_ms",
     .type = EP_OPTION_MS,
     .max = 3600000,
     .default_text = "10s",
     .help =
         "How long an expert that is no longer assigned still answers callers with the old table"},
    EP_NODE_SHM_OPTIONS,
    EP_SERVICE_OPTIONS("tcp://127.0.0.1:7420", "127.0.0.1:7421", "tcp://127.0.0.1:7422",
                       "tcp://127.0.0.1:7423"),
};

static const char *const others_variables[] = {"EXPERTD_COORDINATOR_", EP_CPU_FEATURES_VARIABLE "=",
                                               EP_BOOT_ID_VARIABLE "=", NULL};

const ep_options_spec ep_node_options = {
    .program = "expertd",
    .env_prefix = "EXPERTD_",
    .env_foreign = others_variables,
    .summary = "Serves the experts of mixture-of-experts models: takes token rows, gives back "
               "expert outputs.",
    .config_file = "/etc/expertd/expertd.yaml",
    .options = node_options,
    .options_count = EP_ARRAY_COUNT(node_options),
};

static bool parse_index(const char **text, uint32_t *out_index)
{
    uint32_t index = 0;
    const char *p = *text;
    for (; *p >= '0' && *p <= '9'; p++) {
        index = index * 10 + (uint32_t)(*p - '0');
        if (index >= EP_EXPERTS_MAX) {
            return false;
        }
    }
    if (p == *text) {
        return false;
    }
    *text = p;
    *out_index = index;
    return true;
}

bool ep_expert_ranges_parse(const char *text, ep_expert_range out[EP_EXPERT_RANGES_MAX],
                            uint32_t *out_count)
{
    uint32_t count = 0;
    const char *p = text;
    for (;;) {
        ep_expert_range range;
        if (count == EP_EXPERT_RANGES_MAX || !parse_index(&p, &range.first)) {
            return false;
        }
        range.last = range.first;
        if (*p == '-') {
            p++;
            if (!parse_index(&p, &range.last) || range.last < range.first) {
                return false;
            }
        }
        if (count > 0 && range.first <= out[count - 1].last) {
            return false;
        }
        out[count++] = range;
        if (*p == 0) {
            *out_count = count;
            return true;
        }
        if (*p++ != ',') {
            return false;
        }
    }
}

static ep_err load_experts(const ep_options *options, size_t index, bool has_coordinator,
                           ep_node_model_config *model, ep_error *out_error)
{
    ep_expert_range ranges[EP_EXPERT_RANGES_MAX];
    const char *text = ep_options_list_text(options, "models", index, "experts");
    if (strcmp(text, "auto") == 0) {
        model->choice = has_coordinator ? EP_EXPERTS_ASSIGNED : EP_EXPERTS_ALL;
        return EP_OK;
    }
    if (strcmp(text, "all") == 0) {
        model->choice = EP_EXPERTS_ALL;
        return EP_OK;
    }
    if (strcmp(text, "assigned") == 0) {
        model->choice = EP_EXPERTS_ASSIGNED;
        return has_coordinator
                   ? EP_OK
                   : ep_options_fail_item(options, "models", index, "experts", out_error,
                                          "'assigned' needs coordinator_url; allowed without it: "
                                          "auto, all, indexes like 0-3,5");
    }
    model->choice = EP_EXPERTS_LISTED;
    if (!ep_expert_ranges_parse(text, ranges, &model->ranges_count)) {
        return ep_options_fail_item(
            options, "models", index, "experts", out_error,
            "'%.80s' is not a set of experts; allowed: auto, all, assigned, or "
            "ascending indexes like 0-3,5 (at most "
            "%d ranges)",
            text, EP_EXPERT_RANGES_MAX);
    }
    size_t bytes = model->ranges_count * sizeof(ranges[0]);
    model->ranges = malloc(bytes);
    if (model->ranges == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the configuration");
    }
    memcpy(model->ranges, ranges, bytes);
    return EP_OK;
}

/* What the sources of a mirror lack; NULL: nothing. */
static const char *judge_sources(const ep_node_config *config, const ep_node_model_config *model,
                                 bool is_from_storage)
{
    struct stat st;
    if (is_from_storage != (model->storage_path[0] != 0)) {
        return is_from_storage ? "needs storage_path"
                               : "is without storage, and storage_path is set";
    }
    if (!model->is_mirrored) {
        return NULL;
    }
    if (model->is_from_nodes && config->coordinator_url[0] == 0) {
        return "needs coordinator_url, which tells what nodes there are";
    }
    if (model->is_from_nodes && !ep_rpc_credentials_prove_nodes(config->service.credentials)) {
        return "needs node_token_file, with a token that no client has: other nodes give nothing "
               "without";
    }
    if (model->choice == EP_EXPERTS_LISTED) {
        return "cannot be with listed experts; allowed: experts auto, all, assigned";
    }
    const bool is_writable =
        stat(model->path, &st) == 0 && S_ISDIR(st.st_mode) && access(model->path, W_OK | X_OK) == 0;
    return is_writable ? NULL : "needs a path that is a directory this user may write";
}

static ep_err load_source(const ep_options *options, size_t index, const ep_node_config *config,
                          ep_node_model_config *model, ep_error *out_error)
{
    const char *word = ep_options_list_text(options, "models", index, "weights_from");
    model->version = ep_options_list_text(options, "models", index, "version");
    model->storage_path = ep_options_list_text(options, "models", index, "storage_path");
    model->quant =
        ep_weight_quant_find(ep_options_list_text(options, "models", index, "weight_quant"));
    model->is_mirrored = strcmp(word, "files") != 0;
    model->is_from_nodes = strstr(word, "nodes") != NULL;
    model->is_storage_first = strncmp(word, "storage", strlen("storage")) == 0;
    const char *why = judge_sources(config, model, strstr(word, "storage") != NULL);
    if (why == NULL && model->is_mirrored && model->version[0] != 0 &&
        strspn(model->version, "0123456789abcdef") != EP_MIRROR_VERSION_BYTES - 1) {
        return ep_options_fail_item(options, "models", index, "version", out_error,
                                    "'%s', allowed: 16 hexadecimal digits (0-9, a-f)",
                                    model->version);
    }
    return why == NULL ? EP_OK
                       : ep_options_fail_item(options, "models", index, "weights_from", out_error,
                                              "'%s' %s", word, why);
}

static ep_err load_models(const ep_options *options, ep_node_config *config, ep_error *out_error)
{
    size_t count = ep_options_list_count(options, "models");
    if (count == 0) {
        return ep_options_fail(
            options, "models", out_error,
            "there is no model to serve; give --model name=path or models: in the file");
    }
    config->models = calloc(count, sizeof(*config->models));
    if (config->models == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the configuration");
    }
    for (size_t i = 0; i < count; i++) {
        struct stat st;
        ep_node_model_config *model = &config->models[i];
        config->models_count++;
        model->name = ep_options_list_text(options, "models", i, "name");
        model->path = ep_options_list_text(options, "models", i, "path");
        char why[EP_ERRNO_TEXT_BYTES];
        if (stat(model->path, &st) != 0) {
            return ep_options_fail_item(
                options, "models", i, "path", out_error,
                "'%.200s': %s; allowed: the directory with the model's config.json, or its "
                ".gguf file",
                model->path, ep_errno_text(errno, why));
        }
        const size_t length = strlen(model->path);
        const bool is_gguf = length > 5 && strcmp(model->path + length - 5, ".gguf") == 0;
        if (!S_ISDIR(st.st_mode) && !is_gguf) {
            return ep_options_fail_item(
                options, "models", i, "path", out_error,
                "'%.200s' is not a directory; allowed: the one with the model's config.json, or "
                "its .gguf file",
                model->path);
        }
        ep_err err = load_experts(options, i, config->coordinator_url[0] != 0, model, out_error);
        err = err == EP_OK ? load_source(options, i, config, model, out_error) : err;
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

static uint32_t tenant_number(const ep_options *options, size_t index, const char *field)
{
    return (uint32_t)strtoul(ep_options_list_text(options, "tenants", index, field), NULL, 10);
}

static ep_err load_tenants(const ep_options *options, ep_node_config *config, ep_error *out_error)
{
    ep_tenants_init(&config->tenants);
    for (size_t i = 0; i < ep_options_list_count(options, "tenants"); i++) {
        const char *name = ep_options_list_text(options, "tenants", i, "name");
        for (size_t j = 0; j < i; j++) {
            if (strcmp(name, ep_options_list_text(options, "tenants", j, "name")) == 0) {
                return ep_options_fail_item(options, "tenants", i, "name", out_error,
                                            "'%.80s' is in the list twice; allowed: each name once",
                                            name);
            }
        }
        const ep_tenant_limits limits = {.weight = tenant_number(options, i, "weight"),
                                         .inflight_tokens =
                                             tenant_number(options, i, "inflight_tokens"),
                                         .tokens_per_s = tenant_number(options, i, "tokens_per_s")};
        ep_tenants_add(&config->tenants, name, &limits);
    }
    return EP_OK;
}

static ep_err check_url(const ep_options *options, const ep_node_config *config, const char *key,
                        bool we_dial, ep_error *out_error)
{
    const char *url = ep_options_text(options, key);
    if (url[0] == 0) {
        return EP_OK;
    }
    if (ep_lane_for_url(url) == NULL) {
        return ep_options_fail(options, key, out_error,
                               "'%.120s' is no URL; allowed: tcp://host:port, tls+tcp://host:port",
                               url);
    }
    if (we_dial && ep_url_is_tls(url) &&
        (config->service.tls.ca_file == NULL || config->service.tls.server_name == NULL)) {
        return ep_options_fail(options, key, out_error,
                               "'%.120s' needs tls_ca_file and tls_server_name", url);
    }
    return EP_OK;
}

static bool is_wildcard(const char *url)
{
    return strstr(url, "://0.0.0.0:") != NULL || strstr(url, "://[::]:") != NULL ||
           strstr(url, "://*:") != NULL;
}

/* Host name and port: stable over restarts. With port 0 the process id stands in for it. */
static void make_name(const ep_node_config *config, char out[EP_NODE_NAME_BYTES])
{
    char host[EP_NODE_NAME_BYTES - 16] = "";
    const char *port = strrchr(config->service.listen[0], ':');
    if (gethostname(host, sizeof(host) - 1) != 0 || host[0] == 0) {
        snprintf(host, sizeof(host), "node");
    }
    if (port != NULL && strcmp(port, ":0") != 0) {
        snprintf(out, EP_NODE_NAME_BYTES, "%s-%.8s", host, port + 1);
    } else {
        snprintf(out, EP_NODE_NAME_BYTES, "%s-pid%d", host, (int)getpid());
    }
}

/* Names with commas between them. */
static ep_err load_backends(const ep_options *options, ep_node_config *config, ep_error *out_error)
{
    const char *text = ep_options_text(options, "backend");
    for (const char *at = text;; at++) {
        char name[64];
        at += strspn(at, " ");
        const size_t bytes = strcspn(at, " ,");
        snprintf(name, sizeof(name), "%.*s", (int)bytes, at);
        at += bytes + strspn(at + bytes, " ");
        const ep_backend_ops *backend = ep_backend_by_name(name);
        if (backend == NULL || (*at != ',' && *at != '\0')) {
            return ep_options_fail(options, "backend", out_error,
                                   "'%s' is no backend of this build; allowed: %s, or several with "
                                   "commas between them",
                                   backend == NULL ? name : text, ep_backend_names());
        }
        for (uint32_t i = 0; i < config->backends_count; i++) {
            if (config->backends[i] == backend) {
                return ep_options_fail(options, "backend", out_error, "'%s' names %s twice", text,
                                       name);
            }
        }
        config->backends[config->backends_count++] = backend;
        if (*at == '\0') {
            return EP_OK;
        }
    }
}

static ep_err load(const ep_options *options, ep_node_config *config, ep_error *out_error)
{
    ep_err err = ep_service_config_load(options, &config->service, out_error);
    if (err != EP_OK) {
        return err;
    }
    config->coordinator_url = ep_options_text(options, "coordinator_url");
    snprintf(config->host, sizeof(config->host), "%s", ep_options_text(options, "host"));
    if (config->host[0] == 0) {
        ep_host_boot_id(config->host);
    }
    config->advertise_url = ep_options_text(options, "advertise_url");
    config->numerics = (ep_numerics)ep_options_number(options, "numerics");
    config->threads = (uint32_t)ep_options_number(options, "threads");
    config->pins_threads = ep_options_bool(options, "pin_threads");
    config->weight_bytes_max = ep_options_number(options, "weight_bytes_max");
    config->load_bytes_per_s = ep_options_number(options, "weight_load_rate");
    config->serve_bytes_per_s = ep_options_number(options, "weight_serve_rate");
    if (config->serve_bytes_per_s > 0 && config->serve_bytes_per_s < EP_WEIGHT_PIECE_BYTES) {
        return ep_options_fail(options, "weight_serve_rate", out_error,
                               "%llu bytes per second, allowed: 0 (no limit), 1M..64T",
                               (unsigned long long)config->serve_bytes_per_s);
    }
    config->prefetches = ep_options_bool(options, "weight_prefetch");
    config->weight_cache_dir = ep_options_text(options, "weight_cache_dir");
    config->weight_cache_bytes = ep_options_number(options, "weight_cache_bytes");
    config->inflight_tokens = (uint32_t)ep_options_number(options, "inflight_tokens");
    config->spill_bytes = ep_options_number(options, "spill_bytes");
    config->merges_callers = ep_options_bool(options, "merge_callers");
    config->prefill_share_percent = (uint32_t)ep_options_number(options, "prefill_share_percent");
    config->queue_age_us = (uint32_t)ep_options_number(options, "queue_age_us");
    config->step_group_us = (uint32_t)ep_options_number(options, "step_group_us");
    config->compute_stall_ms = (uint32_t)ep_options_number(options, "compute_stall_ms");
    config->drop_grace_ms = (uint32_t)ep_options_number(options, "drop_grace_ms");
    uint64_t format = ep_options_number(options, "log_format");
    config->shows_bar = format < 2 && ep_options_number(options, "log_level") >= EP_LOG_INFO &&
                        getenv("JOURNAL_STREAM") == NULL;
    snprintf(config->name, sizeof(config->name), "%s", ep_options_text(options, "node_name"));
    if (config->name[0] == 0) {
        make_name(config, config->name);
    }
    if (config->name[ep_text_printable_bytes(config->name, false)] != 0) {
        return ep_options_fail(options, "node_name", out_error,
                               "'%.63s' has a blank or a control character, or is no UTF-8",
                               config->name);
    }
    if ((err = load_backends(options, config, out_error)) != EP_OK ||
        (err = check_url(options, config, "coordinator_url", true, out_error)) != EP_OK ||
        (err = check_url(options, config, "advertise_url", false, out_error)) != EP_OK) {
        return err;
    }
    if (config->coordinator_url[0] != 0 && config->advertise_url[0] == 0 &&
        is_wildcard(config->service.listen[0])) {
        return ep_options_fail(
            options, "advertise_url", out_error,
            "callers cannot reach '%s'; give the URL they shall use when coordinator_url is set",
            config->service.listen[0]);
    }
    err = load_tenants(options, config, out_error);
    err = err == EP_OK ? ep_node_shm_config_load(options, &config->shm, out_error) : err;
    return err == EP_OK ? load_models(options, config, out_error) : err;
}

ep_err ep_node_config_load(const ep_options *options, ep_node_config *out_config,
                           ep_error *out_error)
{
    ep_node_config config = {0};
    ep_err err = load(options, &config, out_error);
    if (err != EP_OK) {
        ep_node_config_fini(&config);
        return err;
    }
    *out_config = config;
    return EP_OK;
}

void ep_node_config_fini(ep_node_config *config)
{
    for (uint32_t i = 0; i < config->models_count; i++) {
        free(config->models[i].ranges);
    }
    free(config->models);
    config->models = NULL;
    config->models_count = 0;
    ep_service_config_fini(&config->service);
}

/* Listed experts must exist in the model. */
static ep_err check_listed(const ep_options *options, size_t index,
                           const ep_node_model_config *model, const ep_model_info *info,
                           ep_error *out_error)
{
    uint32_t experts_max = 0;
    for (uint32_t l = 0; l < info->moe_layers_count; l++) {
        uint32_t experts = info->moe_layers[l].experts + info->moe_layers[l].shared_experts;
        experts_max = experts > experts_max ? experts : experts_max;
    }
    const uint32_t last = model->ranges[model->ranges_count - 1].last;
    if (last < experts_max) {
        return EP_OK;
    }
    return ep_options_fail_item(
        options, "models", index, "experts", out_error,
        "expert %u is listed; allowed: 0..%u, the experts of the largest layer of model %s", last,
        experts_max - 1, model->name);
}

/* Unreadable experts are a warning, as in a running node; an error if none can be read. */
static ep_err check_readable(const ep_options *options, size_t index,
                             const ep_node_model_config *model, const ep_checkpoint *checkpoint,
                             ep_error *out_error)
{
    ep_checkpoint_survey survey;
    ep_checkpoint_survey_experts(checkpoint, &survey);
    if (survey.unreadable > 0 && survey.unreadable == survey.experts) {
        return ep_options_fail_item(options, "models", index, "path", out_error,
                                    "no expert of model %s can be read: %s (layer %d expert %d)",
                                    model->name, survey.first.text, (int)survey.first.layer,
                                    (int)survey.first.expert);
    }
    if (survey.unreadable > 0) {
        ep_log(EP_LOG_WARN, "expert-load", EP_KV(model, model->name),
               EP_KV(experts, survey.experts), EP_KV(unreadable, survey.unreadable),
               EP_KV(layer, survey.first.layer), EP_KV(expert, survey.first.expert),
               EP_KV(reason, survey.first.text));
    }
    return EP_OK;
}

/* Judges storage as a start does (weight_fetch.c): a start goes on without storage where nodes give
 * the files too, or path holds some. */
static ep_err check_storage(const ep_options *options, size_t index,
                            const ep_node_model_config *model, ep_error *out_error)
{
    char list[PATH_MAX];
    ep_checkpoint *storage = NULL;
    ep_error why;
    ep_err err = ep_checkpoint_open(model->storage_path, &storage, &why);
    const char *is = err == EP_OK ? ep_checkpoint_info(storage)->files_version : "";
    const bool is_other = err == EP_OK && model->version[0] != 0 && strcmp(model->version, is) != 0;
    if (is_other) {
        err = ep_error_set(&why, EP_ERR_BAD_CONFIG, "it has version %s, version asks for %s", is,
                           model->version);
    }
    ep_error quant_why;
    const ep_err quant_err =
        err == EP_OK ? ep_checkpoint_quantize(storage, model->quant, &quant_why) : EP_OK;
    ep_checkpoint_close(storage);
    if (quant_err != EP_OK) {
        return ep_options_fail_item(options, "models", index, "weight_quant", out_error,
                                    "model %s in %s: %s", model->name, model->storage_path,
                                    quant_why.text);
    }
    if (err == EP_OK) {
        return EP_OK;
    }
    snprintf(list, sizeof(list), "%s/" EP_MIRROR_LIST_NAME, model->path);
    if (!model->is_from_nodes && (is_other || access(list, F_OK) != 0)) {
        return ep_options_fail_item(options, "models", index, "storage_path", out_error,
                                    "model %s in %s: %s", model->name, model->storage_path,
                                    why.text);
    }
    ep_log(EP_LOG_WARN, "weights-source", EP_KV(model, model->name),
           EP_KV(storage_path, model->storage_path), EP_KV(reason, why.text),
           EP_KV(effect, model->is_from_nodes ? "nodes are asked"
                                              : "what path does not hold is not served"));
    return EP_OK;
}

/* Checks the checkpoint; its errors name file and line. A start and a reload open it later anyway,
 * so they check only listed experts here. */
static ep_err check_model(const ep_options *options, size_t index,
                          const ep_node_model_config *model, ep_error *out_error)
{
    const bool is_listed = model->choice == EP_EXPERTS_LISTED;
    const bool is_preflight = ep_options_get_action(options) == EP_ACTION_CHECK;
    ep_checkpoint *checkpoint = NULL;
    ep_error error;
    /* Which files a mirror holds, only the node that has it open can tell. */
    if (is_preflight && model->storage_path[0] != 0) {
        return check_storage(options, index, model, out_error);
    }
    if ((!is_listed && !is_preflight) || model->is_mirrored) {
        return EP_OK;
    }
    if (ep_checkpoint_open(model->path, &checkpoint, &error) != EP_OK) {
        return ep_options_fail_item(options, "models", index, "path", out_error,
                                    "model %s in %s: %s", model->name, model->path, error.text);
    }
    ep_err err = ep_checkpoint_quantize(checkpoint, model->quant, &error);
    if (err != EP_OK) {
        err = ep_options_fail_item(options, "models", index, "weight_quant", out_error,
                                   "model %s in %s: %s", model->name, model->path, error.text);
    } else if (is_listed) {
        err = check_listed(options, index, model, ep_checkpoint_info(checkpoint), out_error);
    }
    err = err == EP_OK && is_preflight
              ? check_readable(options, index, model, checkpoint, out_error)
              : err;
    ep_checkpoint_close(checkpoint);
    return err;
}

void ep_node_config_say_missing(const ep_node_config *config, uint32_t index, const char *reason)
{
    char effect[64] = "expertd does not start on this machine";
    if (index + 1 < config->backends_count) {
        snprintf(effect, sizeof(effect), "%s computes in its place",
                 config->backends[index + 1]->name);
    }
    ep_log(EP_LOG_WARN, "backend", EP_KV(backend, config->backends[index]->name),
           EP_KV(reason, reason), EP_KV(effect, effect),
           EP_KV(hint, "install driver and CANN, source its set_env.sh, or set backend: cpu; "
                       "expertctl doctor --config FILE looks for each"));
}

/* Logs missing backends. No error: a file may be checked on another machine than it is for. */
static void check_backends(const ep_node_config *config)
{
    uint32_t devices;
    ep_error error;
    for (uint32_t i = 0; i < config->backends_count; i++) {
        const ep_backend_ops *backend = config->backends[i];
        if (backend->probe == NULL || backend->probe(&devices, &error) == EP_OK) {
            return;
        }
        ep_node_config_say_missing(config, i, error.text);
    }
}

ep_err ep_node_config_check(const ep_options *options, ep_error *out_error)
{
    ep_node_config config;
    ep_err err = ep_node_config_load(options, &config, out_error);
    if (err != EP_OK) {
        return err;
    }
    for (size_t i = 0; err == EP_OK && i < config.models_count; i++) {
        err = check_model(options, i, &config.models[i], out_error);
    }
    if (err == EP_OK) {
        check_backends(&config);
    }
    if (err == EP_OK && config.weight_cache_dir[0] != 0) {
        /* no error: the node serves without a cache */
        ep_weight_cache_check_dir(config.weight_cache_dir);
    }
    ep_node_config_fini(&config);
    return err;
}
