/* SPDX-License-Identifier: Apache-2.0 */
/* Data shared by state.c (membership), state_placement.c (who shall own what) and state_table.c
 * (what clients see). */
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

/* Experts of one layer, a bit each. */
typedef struct node_layer {
    uint64_t *assigned;
    uint64_t *held;  /* loaded, by the node's word */
    uint64_t *owned; /* of these, the copies that are used (ep_state_judge_copies) */
    /* given to this incarnation, which could not load it, or loaded other weights than are in
     * force */
    uint64_t *failed;
    /* [experts] of what this incarnation has loaded, also if it dropped it since; 0: not known.
     * NULL: none */
    uint32_t *digests;
    bool offered; /* the node can load this layer */
    /* the newest assignment decided about this node: what it holds beyond assigned is given up */
    bool is_placed;
} node_layer;

/* How quick this incarnation computes (state_speed.c). */
typedef struct node_speed {
    uint64_t busy_us; /* told, up to where rate was taken */
    uint64_t busy_work;
    double rate;            /* work in a microsecond, smoothed; 0 not known */
    double against_median;  /* of the rates; 0 not known */
    double placed;          /* the same, for placement: seldom changed; 0: 1 */
    uint64_t slow_since_ns; /* 0: it is not */
} node_speed;

typedef struct cluster_node {
    uint32_t node_id;
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
    char host[EP_HOST_BYTES]; /* "" not known */
    node_state state;
    bool is_drained; /* by an operator: stands in cluster->drained */
    /* by its own word, while this incarnation says so: placed like a drained one, never kept */
    bool is_leaving;
    bool is_out; /* emptied, and others have loaded all: what comes after does not list it again */
    /* from the store and not heard of since: stands in the table with what it held */
    bool is_restored;
    uint64_t incarnation;
    /* of this incarnation: never told, logged or kept; "" an older version has none */
    char secret[EP_NODE_SECRET_BYTES];
    uint64_t last_seen_ns;
    uint64_t current_ns; /* when it last had loaded the newest assignment, or registered */
    uint64_t turn_ns;    /* it loads, and loaded its last expert, or began, then; 0: it does not */
    uint64_t turn_given; /* which turn its last one was; a new process changes nothing about it */
    bool waits_turn;
    uint32_t left_to_load;  /* by its word */
    uint64_t loaded_number; /* assignment it has worked through; owned says what loaded */
    uint64_t rows_served;
    uint64_t requests_failed;
    uint64_t requests_hedged;
    uint64_t requests_refused;
    uint64_t weight_bytes;
    double weight_quant_error;
    double weight_quant_output_error;
    uint64_t tls_expiry;
    uint64_t capacity_bytes; /* weights it keeps in memory; 0: no limit */
    uint32_t devices;
    uint64_t devices_lost; /* bit d: device d */
    char tls_error[EP_ERROR_TEXT_BYTES];
    node_speed speed;
    node_layer *layers;                  /* [cluster->layers_count] */
    char (*numerics)[EP_NUMERICS_BYTES]; /* [cluster->models_count]; "" not served */
} cluster_node;

typedef struct cluster_model {
    char name[EP_MODEL_NAME_BYTES];
    char version[EP_VERSION_BYTES];
    bool is_default;         /* at most one of a name */
    uint32_t copies_waiting; /* further copies that the pace did not allow */
} cluster_model;

typedef struct cluster_layer {
    uint32_t model_index;
    ep_layer_shape shape;
    uint32_t *digests;      /* [experts] in force; 0: nobody knows one */
    uint64_t expert_bytes;  /* in memory, of the largest expert; 0: nobody said */
    double *heat;           /* [E] work of late, in slots; NULL: none was taken yet */
    uint64_t *counted;      /* [E] of which these sums are taken */
    uint64_t slots_counted; /* of all experts */
    uint64_t heat_number;   /* how often */
    uint64_t judged_heat;   /* balance is of this heat, 0: to be judged anew, and of this table */
    uint64_t judged_table;
    ep_coordinator_balance balance; /* both 0: an expert has no copy */
} cluster_layer;

/* A node that was forgotten may come back: until then its numerics id counts for the model as if it
 * were here. */
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
    ep_coordinator_state_config config; /* in force: with what the policy sets */
    ep_coordinator_state_config configured;
    ep_policy policy;
    uint32_t next_node_id;
    size_t nodes_count;
    cluster_node **nodes;
    uint32_t models_count;
    cluster_model *models;
    uint32_t layers_count;
    cluster_layer *layers; /* in order of first sight; the table sorts */
    uint32_t likely_layer; /* index after the layer found last: nodes name layers in one order */
    uint64_t counter;      /* last number given, to assignments and tables alike */
    uint64_t assignment_number;
    uint64_t assigned_ns;      /* when it was made */
    uint64_t pause_ns;         /* copies that wait do so for that long while nodes load */
    uint64_t committed_number; /* newest assignment that every listed node had loaded */
    uint64_t turns;            /* given to nodes so far */
    bool placed_once;
    bool rebalance; /* the next placement may move copies for balance */
    bool is_pacing; /* and only a few of them */
    ep_move_pace pace;
    bool waits_moves; /* moves for balance that the pace did not allow */
    /* heat or another speed was taken, or copies moved by them, since the last look */
    bool has_news;
    uint64_t compared_ns; /* when speeds were */
    uint64_t revision;    /* grows when something worth keeping changes */
    size_t drained_count;
    /* by name: a drained node may be away for long and come back */
    char (*drained)[EP_NODE_NAME_BYTES];
    size_t lost_count;
    lost_node *lost; /* [config.nodes_max], the longest away first; NULL before the first */
    size_t former_votes_count;
    former_vote *former_votes;
    ep_routing_table *table;
    uint64_t table_checksum;
    bool is_stale; /* the table could not be made anew */
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

/* Serves on, and is to get rid of its experts. */
static inline bool node_is_emptied(const cluster_node *node)
{
    return node->is_drained || node->is_leaving;
}

/* Takes part in placement: everything but draining and drained. */
static inline bool node_can_own(const cluster_node *node)
{
    return node->state != NODE_DRAINING && !node_is_emptied(node);
}

/* All its devices are lost: it can load nothing until it is started again. */
static inline bool node_has_no_device(const cluster_node *node)
{
    return node->devices > 0 && (uint32_t)__builtin_popcountll(node->devices_lost) >= node->devices;
}

/* Stands in the table. */
static inline bool node_is_listed(const cluster_node *node)
{
    return node->is_restored || node->state == NODE_STARTING || node->state == NODE_SERVING ||
           node->state == NODE_DEGRADED;
}

static inline bool node_serves(const cluster_node *node, uint32_t model_index)
{
    return node->numerics[model_index][0] != 0;
}

/* Takes part in placing this model. */
bool ep_state_node_offers(const cluster_node *node, uint32_t model_index);
/*
 * The numerics id whose nodes get the model's experts: copies of other ids are no copies of each
 * other. Of the ids that some node offers, that of most nodes which an operator has not drained, up
 * or not; among equals the one whose nodes hold most. A static map is the operator's word, whatever
 * its nodes compute with: NULL, as when no node offers the model.
 */
const char *ep_state_placed_numerics(const ep_coordinator_state *cluster, uint32_t model_index);
/* Writes *out_note when nodes that offer the model get none of it. */
void ep_state_note_left_out(const ep_coordinator_state *cluster, uint32_t model_index,
                            ep_error *out_note);
/* The node is being forgotten: its ids count until then, or until it registers. Without memory they
 * do not. */
void ep_state_votes_keep(ep_coordinator_state *cluster, const cluster_node *node,
                         uint64_t until_ns);
void ep_state_votes_drop(ep_coordinator_state *cluster, const char *node);
/* True when votes ended. */
bool ep_state_votes_expire(ep_coordinator_state *cluster, uint64_t now_ns);

/*
 * Writes owned of all nodes, and copy_error, after nodes came, went, changed their state or said
 * what they hold. True when nodes can now be given other experts than before: ep_state_place is
 * due.
 */
bool ep_state_judge_copies(ep_coordinator_state *cluster);

/* Recomputes assignments after a change of membership; raises assignment_number when they
 * differ. */
void ep_state_place(ep_coordinator_state *cluster);
/* Places what the pace did not allow before, when it does now. */
void ep_state_place_waiting(ep_coordinator_state *cluster);
/* A node that is silent and may be given copies of a model; NULL: none. Nothing is moved for
 * balance then. */
const cluster_node *ep_state_find_suspect(const ep_coordinator_state *cluster);
/* Commits the assignment when all have loaded it; then, from the first commit on, as
 * ep_state_republish. */
void ep_state_publish(ep_coordinator_state *cluster);
/*
 * Rebuilds the table from what nodes own; replaces it, with a new number, when its content differs.
 * False when there is none, or none that a client can take: the one before stays, and its error is
 * noted.
 */
bool ep_state_republish(ep_coordinator_state *cluster);
/* The copy stands in the table that ep_state_publish makes. */
bool ep_state_has_copy(const ep_coordinator_state *cluster, const cluster_node *node,
                       uint32_t layer_index, uint32_t expert);

/* How many of the node's copies stand in that table. */
uint32_t ep_state_copies_of(const ep_coordinator_state *cluster, const cluster_node *node);

/* A table of any choice of copies; the epoch is left 0. */
typedef bool (*cluster_copy_func)(const ep_coordinator_state *cluster, const cluster_node *node,
                                  uint32_t layer_index, uint32_t expert);
ep_err ep_state_build_table(const ep_coordinator_state *cluster, cluster_copy_func has_copy,
                            ep_routing_table **out_table);

/* The most that a table of all known layers takes with this configuration. */
uint64_t ep_state_table_bytes(const ep_coordinator_state *cluster,
                              const ep_coordinator_state_config *config);

/* Members by name; NULL or UINT32_MAX when there is none. Adding: NULL or UINT32_MAX without
 * memory. */
cluster_node *ep_state_find_node(const ep_coordinator_state *cluster, const char *name);
uint32_t ep_state_find_model(const ep_coordinator_state *cluster, const char *name,
                             const char *version);
uint32_t ep_state_find_layer(ep_coordinator_state *cluster, uint32_t model_index, uint32_t layer);
cluster_node *ep_state_add_node(ep_coordinator_state *cluster, const char *name);
uint32_t ep_state_add_model(ep_coordinator_state *cluster, const char *name, const char *version);
uint32_t ep_state_add_layer(ep_coordinator_state *cluster, uint32_t model_index,
                            const ep_layer_shape *shape);
/* With its layers, of which it has so many. */
void ep_state_node_free(cluster_node *node, uint32_t layers_count);
/* With its layers, at every node too. */
void ep_state_forget_model(ep_coordinator_state *cluster, uint32_t model_index);
/* The operator's list of drained names. */
bool ep_state_is_drained(const ep_coordinator_state *cluster, const char *name);
bool ep_state_drained_add(ep_coordinator_state *cluster, const char *name);
void ep_state_drained_remove(ep_coordinator_state *cluster, const char *name);
/* Takes what a heartbeat tells of the node's loading. */
void ep_state_take_progress(cluster_node *node, uint64_t now_ns, uint32_t left_to_load);
/* Takes what a heartbeat tells of the node's work. */
void ep_state_take_speed(cluster_node *node, const Expertd__V1__HeartbeatRequest *request);
/* Compares the nodes. Placement is due for another look where it goes by another speed then. */
void ep_state_compare_speeds(ep_coordinator_state *cluster, uint64_t now_ns);
/* What is known of balance is judged anew: speeds, or what is wanted, changed. */
void ep_state_forget_balance(ep_coordinator_state *cluster);
/* Nodes that fell silent (state_lost.c). */
bool ep_state_is_lost(const ep_coordinator_state *cluster, const char *name);
void ep_state_lost_add(ep_coordinator_state *cluster, const cluster_node *node);
void ep_state_lost_remove(ep_coordinator_state *cluster, const char *name);

#endif
