/* SPDX-License-Identifier: Apache-2.0 */
/* expertd's option table and the node's configuration made from it. */
#ifndef EP_EXPERTD_NODE_CONFIG_H
#define EP_EXPERTD_NODE_CONFIG_H

#include "backends/backend.h"
#include "options/options.h"
#include "common/service_config.h"
#include "expertd/tenants.h"
#include "expertd/node_shm.h"
#include "model/weight_quant.h"
#include "moe/routing_table.h"

#define EP_NODE_MODELS_MAX 256

/* Which experts a node holds without a coordinator's assignment. */
typedef enum ep_experts_choice {
    EP_EXPERTS_ASSIGNED, /* only what the coordinator assigns */
    EP_EXPERTS_ALL,
    EP_EXPERTS_LISTED /* ranges of table indexes, in every layer */
} ep_experts_choice;

typedef struct ep_expert_range {
    uint32_t first;
    uint32_t last;
} ep_expert_range;

#define EP_EXPERT_RANGES_MAX 256

typedef struct ep_node_model_config {
    const char *name;
    const char *path;
    const char *version; /* NULL, "" any */
    /* path is filled from storage, nodes or both; the next two say in which order */
    bool is_mirrored;
    bool is_storage_first;
    bool is_from_nodes;
    const char *storage_path;     /* "": not from storage */
    const ep_weight_quant *quant; /* NULL: experts stay in the files' formats */
    ep_experts_choice choice;
    uint32_t ranges_count;
    ep_expert_range *ranges; /* owned */
} ep_node_model_config;

typedef struct ep_node_config {
    ep_service_config service;
    char name[EP_NODE_NAME_BYTES];
    char host[EP_HOST_BYTES];
    const char *coordinator_url; /* "" none */
    const char *advertise_url;   /* "" the first listener's */
    uint32_t models_count;
    ep_node_model_config *models; /* owned array, borrowed texts */
    /* the first one that this machine has is used */
    const ep_backend_ops *backends[EP_BACKENDS_MAX];
    uint32_t backends_count;
    ep_numerics numerics;
    uint32_t threads;
    bool pins_threads;
    uint64_t weight_bytes_max;  /* 0 unlimited */
    uint64_t load_bytes_per_s;  /* 0 unlimited */
    uint64_t serve_bytes_per_s; /* of files, to other nodes; 0 unlimited */
    bool prefetches;
    const char *weight_cache_dir; /* "" none */
    uint64_t weight_cache_bytes;  /* 0 unlimited */
    uint32_t inflight_tokens;
    uint64_t spill_bytes;
    bool merges_callers;
    uint32_t prefill_share_percent;
    uint32_t queue_age_us;
    uint32_t step_group_us;
    ep_tenants tenants; /* borrowed names */
    uint32_t compute_stall_ms;
    uint32_t drop_grace_ms;
    bool shows_bar;
    ep_node_shm_config shm;
} ep_node_config;

extern const ep_options_spec ep_node_options;

/* Borrows from options. Errors: BAD_CONFIG naming origin, key, value and rule; NO_MEMORY. */
ep_err ep_node_config_load(const ep_options *options, ep_node_config *out_config,
                           ep_error *out_error);
void ep_node_config_fini(ep_node_config *config);
/* For ep_options_main. */
ep_err ep_node_config_check(const ep_options *options, ep_error *out_error);

/* Logs one line: this backend is missing, why, and what is used instead. */
void ep_node_config_say_missing(const ep_node_config *config, uint32_t index, const char *reason);

/* "0-3,5,8-9" into ascending, non-overlapping ranges; false when it is not that or has too many.
 * Pure. */
bool ep_expert_ranges_parse(const char *text, ep_expert_range out[EP_EXPERT_RANGES_MAX],
                            uint32_t *out_count);

#endif
