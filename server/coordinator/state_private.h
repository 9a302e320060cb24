/* SPDX-License-Identifier: Apache-2.0 */
/* Data shared by the state's files: state.c (membership), state_placement.c (assignments),
 * state_table.c (the routing table) and others. */
#ifndef EP_COORDINATOR_STATE_PRIVATE_H
#define EP_COORDINATOR_STATE_PRIVATE_H

#include "coordinator/state.h"
#include "placement/move_pace.h"

typedef enum node_state {
    NODE_STARTING,
    NODE_SERVING,
    NODE_DRAINING,
    NODE_DEGRADED,
    NODE_SUSPECT
} node_state;

#define EP_NODE_SECRET_BYTES 65

/* Bit sets of a layer's experts at a node. */
typedef struct node_layer {
    uint64_t *assigned;
    uint64_t *held;  /* reported as loaded */
    uint64_t *owned; /* the held copies that are used (ep_state_judge_copies) */
    /* this incarnation could not load the expert, or loaded other weights than those in force */
    uint64_t *failed;
    /* [experts] digests of what this incarnation has loaded, even if dropped since; 0: not known.
     * NULL: none */
    uint32_t *digests;
    bool offered; /* the node can load this layer */
    /* the newest assignment covers this node: copies it holds beyond assigned are given up */
    bool is_placed;
} node_layer;

/* How fast this incarnation computes (state_speed.c). */
typedef struct node_speed {
    uint64_t busy_us; /* reported, when rate was last taken; busy_work too */
    uint64_t busy_work;
    double rate;            /* work per microsecond, smoothed; 0: not known */
    double against_median;  /* rate / median rate; 0: not known */
    double placed;          /* the value that placement uses, seldom changed; 0 means 1 */
    uint64_t slow_since_ns; /* 0: not slow */
} node_speed;

typedef struct cluster_node {
    uint32_t node_id;
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
    char host[EP_HOST_BYTES]; /* "": not known */
    node_state state;
    bool is_drained; /* by an operator: its name is in cluster->drained */
    /* this incarnation asks to be emptied: placed like a drained node, never stored */
    bool is_leaving;
    bool is_out; /* emptied, and others have loaded all: later assignments do not list it again */
    /* from the store and not heard since: stays in the table with the copies it held */
    bool is_restored;
    uint64_t incarnation;
    /* this incarnation's; never sent, logged or stored; "": an older version has none */
    char secret[EP_NODE_SECRET_BYTES];
    uint64_t last_seen_ns;
    uint64_t current_ns; /* when it last had the newest assignment loaded, or registered */
    uint64_t turn_ns;    /* in a turn: when it last loaded an expert or began; 0: no turn */
    uint64_t turn_given; /* number of its last turn, kept over restarts of the node */
    bool waits_turn;
    uint32_t left_to_load;  /* as reported */
    uint64_t loaded_number; /* newest assignment that it has finished; owned says what has loaded */
    uint64_t capacity_bytes; /* memory for weights; 0: no limit */
    /* what its heartbeats report; ep_coordinator_state_node adds the rest */
    Expertd__V1__NodeEntry told;
    char tls_error[EP_ERROR_TEXT_BYTES];
    node_speed speed;
    node_layer *layers;                  /* [cluster->layers_count] */
    char (*numerics)[EP_NUMERICS_BYTES]; /* [cluster->models_count]; "": not served */
} cluster_node;

typedef struct cluster_model {
    char name[EP_MODEL_NAME_BYTES];
    char version[EP_VERSION_BYTES];
    bool is_default;         /* at most one version of a name */
    uint32_t copies_waiting; /* further copies that move_rate did not allow */
} cluster_model;

typedef struct cluster_layer {
    uint32_t model_index;
    ep_layer_shape shape;
    uint32_t *digests;      /* [experts] in force; 0: not known */
    uint64_t expert_bytes;  /* memory of the largest expert; 0: not reported */
    double *heat;           /* [E] recent work, in slots; NULL: none yet */
    uint64_t *counted;      /* [E] work already in heat */
    uint64_t slots_counted; /* sum of slots already in heat */
    uint64_t heat_number;   /* how often heat was taken */
    uint64_t judged_heat;   /* heat_number and table of balance; 0: to be computed anew */
    uint64_t judged_table;
    ep_coordinator_balance balance; /* both 0: an expert has no copy */
} cluster_layer;

/* The vote of a forgotten node for a model's numerics id. It counts, since the node may come
 * back. */
typedef struct former_vote {
    char node[EP_NODE_NAME_BYTES];
    cluster_model model;
    char numerics[EP_NUMERICS_BYTES];
    uint64_t until_ns;
} former_vote;

/* A node that fell silent and was forgotten. */
typedef struct lost_node {
    uint32_t node_id;
    uint64_t incarnation;
    uint64_t last_seen_ns;
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
} lost_node;

struct ep_coordinator_state {
    ep_coordinator_state_config config; /* in force, with the policy's values */
    ep_coordinator_state_config configured;
    ep_policy policy;
    uint32_t next_node_id;
    size_t nodes_count;
    cluster_node **nodes;
    uint32_t models_count;
    cluster_model *models;
    uint32_t layers_count;
    cluster_layer *layers; /* in order of first sight; the table sorts */
    /* index after the layer found last, since nodes name layers in one order */
    uint32_t likely_layer;
    uint64_t counter; /* last number given to an assignment or a table */
    uint64_t assignment_number;
    uint64_t assigned_ns;      /* when it was made */
    uint64_t pause_ns;         /* pause of waiting copies while nodes load */
    uint64_t committed_number; /* newest assignment that every listed node had loaded */
    uint64_t turns;            /* number of turns given so far */
    bool placed_once;
    bool rebalance; /* the next placement may move copies for balance */
    bool is_pacing; /* but only a few */
    ep_move_pace pace;
    bool waits_moves; /* move_rate did not allow all moves for balance */
    /* new heat or speeds, or copies moved by them, since the last rebalance */
    bool has_news;
    uint64_t compared_ns; /* when speeds were last compared */
    uint64_t revision;    /* grows with changes to be stored */
    size_t drained_count;
    /* names, since a drained node may be away for long */
    char (*drained)[EP_NODE_NAME_BYTES];
    size_t lost_count;
    lost_node *lost; /* [config.nodes_max], the longest away first; NULL before the first */
    size_t former_votes_count;
    former_vote *former_votes;
    ep_routing_table *table;
    uint64_t table_checksum;
    bool is_stale; /* making a new table has failed */
    ep_error placement_error;
    ep_error table_error; /* the newest table is too large for clients; code EP_OK: it is not */
    ep_error left_out;    /* nodes whose numerics id gets no experts; code EP_OK: none */
    ep_error copy_error;  /* nodes whose copies differ from the ones in force; code EP_OK: none */
};

static inline uint32_t layer_experts(const cluster_layer *layer)
{
    return layer->shape.experts + layer->shape.shared_experts;
}

static inline size_t layer_words(const cluster_layer *layer)
{
    return (layer_experts(layer) + 63u) / 64u;
}

static inline bool bit_get(const uint64_t *bits, uint32_t index)
{
    return (bits[index / 64] >> (index % 64)) & 1u;
}

static inline void bit_set(uint64_t *bits, uint32_t index)
{
    bits[index / 64] |= 1ull << (index % 64);
}

static inline void bit_clear(uint64_t *bits, uint32_t index)
{
    bits[index / 64] &= ~(1ull << (index % 64));
}

/* It keeps serving, and its experts move away. */
static inline bool node_is_emptied(const cluster_node *node)
{
    return node->is_drained || node->is_leaving;
}

/* It takes part in placement. */
static inline bool node_can_own(const cluster_node *node)
{
    return node->state != NODE_DRAINING && !node_is_emptied(node);
}

/* All its devices are lost, so it can load nothing until it is restarted. */
static inline bool node_has_no_device(const cluster_node *node)
{
    return node->told.devices > 0 &&
           (uint32_t)__builtin_popcountll(node->told.devices_lost) >= node->told.devices;
}

/* Its copies are listed in the table. */
static inline bool node_is_listed(const cluster_node *node)
{
    return node->is_restored || node->state == NODE_STARTING || node->state == NODE_SERVING ||
           node->state == NODE_DEGRADED;
}

static inline bool node_serves(const cluster_node *node, uint32_t model_index)
{
    return node->numerics[model_index][0] != 0;
}

/* It takes part in placing this model. */
bool ep_state_node_offers(const cluster_node *node, uint32_t model_index);
/*
 * The numerics id whose nodes get the model's experts, since copies must have one id. Among ids
 * that some node offers it is the one of most nodes, up or not, that an operator has not drained;
 * on a tie the one whose nodes hold most copies. NULL when no node offers the model, and with a
 * static map, which an operator has made for any id.
 */
const char *ep_state_placed_numerics(const ep_coordinator_state *cluster, uint32_t model_index);
/* Writes *out_note if nodes that offer the model get no experts of it. */
void ep_state_note_left_out(const ep_coordinator_state *cluster, uint32_t model_index,
                            ep_error *out_note);
/* Keeps a forgotten node's votes until until_ns or until it registers; lost without memory. */
void ep_state_votes_keep(ep_coordinator_state *cluster, const cluster_node *node,
                         uint64_t until_ns);
void ep_state_votes_drop(ep_coordinator_state *cluster, const char *node);
/* True: some votes have expired. */
bool ep_state_votes_expire(ep_coordinator_state *cluster, uint64_t now_ns);

/*
 * Sets owned of all nodes, and copy_error. Call it when nodes came, went, changed state or reported
 * copies. True: nodes can take other experts than before, so call ep_state_place.
 */
bool ep_state_judge_copies(ep_coordinator_state *cluster);

/* Recomputes the assignments; raises assignment_number if they differ. */
void ep_state_place(ep_coordinator_state *cluster);
/* Places copies and moves that move_rate did not allow before and does now. */
void ep_state_place_waiting(ep_coordinator_state *cluster);
/* A silent node that takes part in placement, during which nothing moves for balance; NULL:
 * none. */
const cluster_node *ep_state_find_suspect(const ep_coordinator_state *cluster);
/* Commits the assignment if all nodes have loaded it. From the first commit on also does
 * ep_state_republish. */
void ep_state_publish(ep_coordinator_state *cluster);
/*
 * Rebuilds the table of owned copies and, if its content differs, replaces it under a new number.
 * False: it cannot be made or is too large for clients; the former one stays and the error is
 * noted.
 */
bool ep_state_republish(ep_coordinator_state *cluster);
/* The state that is shown of the node; static text. */
const char *ep_state_shown(const ep_coordinator_state *cluster, const cluster_node *node);
/* How many of the node's copies the table that ep_state_publish makes lists. */
uint32_t ep_state_copies_of(const ep_coordinator_state *cluster, const cluster_node *node);

/* Makes a table of the copies that has_copy selects; its epoch is 0. */
typedef bool (*cluster_copy_func)(const ep_coordinator_state *cluster, const cluster_node *node,
                                  uint32_t layer_index, uint32_t expert);
ep_err ep_state_build_table(const ep_coordinator_state *cluster, cluster_copy_func has_copy,
                            ep_routing_table **out_table);

/* The largest size of a table of all known layers with this configuration. */
uint64_t ep_state_table_bytes(const ep_coordinator_state *cluster,
                              const ep_coordinator_state_config *config);

/* Find or add members; NULL or UINT32_MAX: not found, or no memory. */
cluster_node *ep_state_find_node(const ep_coordinator_state *cluster, const char *name);
uint32_t ep_state_find_model(const ep_coordinator_state *cluster, const char *name,
                             const char *version);
/* A model that is not found has no layer. */
uint32_t ep_state_find_layer(ep_coordinator_state *cluster, uint32_t model_index, uint32_t layer);
cluster_node *ep_state_add_node(ep_coordinator_state *cluster, const char *name);
uint32_t ep_state_add_model(ep_coordinator_state *cluster, const char *name, const char *version);
uint32_t ep_state_add_layer(ep_coordinator_state *cluster, uint32_t model_index,
                            const ep_layer_shape *shape);
/* Frees a node with its layers. */
void ep_state_node_free(cluster_node *node, uint32_t layers_count);
/* Forgets a model with its layers, also at every node. */
void ep_state_forget_model(ep_coordinator_state *cluster, uint32_t model_index);
/* The operator's list of drained names. */
bool ep_state_is_drained(const ep_coordinator_state *cluster, const char *name);
bool ep_state_drained_add(ep_coordinator_state *cluster, const char *name);
void ep_state_drained_remove(ep_coordinator_state *cluster, const char *name);
/* Takes a heartbeat's progress of loading. */
void ep_state_take_progress(cluster_node *node, uint64_t now_ns, uint32_t left_to_load);
/* Takes a heartbeat's busy time and work. */
void ep_state_take_speed(cluster_node *node, const Expertd__V1__HeartbeatRequest *request);
/* Compares the nodes' speeds and sets has_news if placement is to use another one. */
void ep_state_compare_speeds(ep_coordinator_state *cluster, uint64_t now_ns);
/* Makes balance be computed anew, since speeds or wanted copies have changed. */
void ep_state_forget_balance(ep_coordinator_state *cluster);
/* Nodes that were forgotten after silence (state_lost.c). */
bool ep_state_is_lost(const ep_coordinator_state *cluster, const char *name);
void ep_state_lost_add(ep_coordinator_state *cluster, const cluster_node *node);
void ep_state_lost_remove(ep_coordinator_state *cluster, const char *name);

#endif
