/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator's state: which nodes there are, what they can load, what they shall own, what
 * they own, and the routing table that follows from it. Pure: no I/O, no clock (now_ns is passed
 * in), no threads.
 *
 *   register, heartbeat, tick  ->  assignment (what each node shall own)
 *   nodes load and report      ->  routing table
 *
 * A node is `serving` while its heartbeats come and `suspect` after heartbeat_dead_count of them
 * are missing: its experts then leave the table. After restore_ms more (at once, if it was
 * draining) it is forgotten and its experts are given to others; unless it was draining or drained,
 * status names it as lost until it comes back. A table lists only what nodes report as loaded;
 * while an assignment is being loaded, copies that are to go stay listed. The last loaded copy of
 * an expert never goes: what a node fails to load is given to another one, or stays where it was.
 * The first table waits until min_nodes nodes have loaded all they were given.
 *
 * Threads    one at a time.
 */
#ifndef EP_COORDINATOR_STATE_H
#define EP_COORDINATOR_STATE_H

#include "admin.pb-c.h"
#include "coordinator.pb-c.h"
#include "moe/routing_table.h"
#include "placement/expert_map.h"

/* A table is one header of a control connection, whose limit is at least this
 * (ep_rpc_limits_raise_for_control). */
#define EP_COORDINATOR_TABLE_BYTES_MAX ((uint64_t)4 << 20)

typedef struct ep_coordinator_state ep_coordinator_state;

#define EP_POLICY_WHO_BYTES 64

/* What operators set while the service runs (policy.h). */
typedef enum ep_policy_key {
    EP_POLICY_DECODE_TOKENS_MAX,
    EP_POLICY_COPIES,
    EP_POLICY_SPARE_COPIES,
    EP_POLICY_MOVE_RATE,
    EP_POLICY_LOADING_NODES_MAX,
    EP_POLICY_HEDGE_PERMILLE,
    EP_POLICY_STEP_GROUP_US,
    EP_POLICY_DECODE_NODES_MIN,
    EP_POLICY_KEYS
} ep_policy_key;

typedef struct ep_policy_value {
    uint64_t revision; /* that set it; 0: it is not set */
    uint64_t number;
    uint64_t set_at;               /* Unix time in seconds */
    char who[EP_POLICY_WHO_BYTES]; /* never "" where it is set */
} ep_policy_value;

typedef struct ep_policy {
    uint64_t revision; /* grows with each change; 0: nothing was ever set */
    ep_policy_value values[EP_POLICY_KEYS];
} ep_policy;

/* What a node's URL may be, apart from being served by a lane. */
typedef enum ep_node_urls {
    EP_NODE_URLS_ANY,    /* everything in one process */
    EP_NODE_URLS_STREAM, /* tcp or tls+tcp */
    EP_NODE_URLS_TLS,    /* tls+tcp */
} ep_node_urls;

typedef struct ep_coordinator_state_config {
    ep_node_urls node_urls; /* judged by the service */
    /* the same: rules of hosts (transport/address.h); count 0: any */
    const char *const *advertise_allow;
    size_t advertise_allow_count;
    uint32_t copies;    /* wanted per expert, 1..64 */
    uint32_t min_nodes; /* nodes that must register before anything is placed */
    uint32_t heartbeat_ms;
    uint32_t heartbeat_dead_count;
    /* a node silent for that long after it became suspect loses its experts to others */
    uint32_t restore_ms;
    uint32_t nodes_max;
    uint32_t decode_tokens_max; /* goes into the table */
    uint64_t move_rate;         /* bytes per second (move_pace.h); 0: no limit */
    uint32_t loading_nodes_max; /* nodes that load what they were given at once; 0: no limit */
    uint64_t term;
    const ep_expert_map *expert_map; /* static placement; NULL: none. Borrowed */
    bool is_balanced;                /* placement by heat, without a map: ep_placement_balanced */
    uint32_t spare_copies;           /* the same: of each layer, beyond `copies` */
    /* static: device d is node node_order[d]; NULL: nodes in order of name */
    const char *const *node_order;
    size_t node_order_count;
} ep_coordinator_state_config;

ep_err ep_coordinator_state_create(const ep_coordinator_state_config *config,
                                   ep_coordinator_state **out_cluster);
void ep_coordinator_state_destroy(ep_coordinator_state *cluster);

/*
 * A node came (again). A live name is given only to who shows its secret; a new process of the node
 * waits until the one before has been silent for two heartbeats, or says that it drains. Errors:
 * INVALID_ARGUMENT (field named; a model whose layers differ from what others said),
 * RESOURCE_EXHAUSTED, ALREADY_EXISTS (try again).
 */
ep_err ep_coordinator_state_register(ep_coordinator_state *cluster, uint64_t now_ns,
                                     const Expertd__V1__RegisterRequest *request,
                                     uint32_t *out_node_id, ep_error *out_error);
/* *out_reregister: this incarnation is not known here, or only from the store. */
ep_err ep_coordinator_state_heartbeat(ep_coordinator_state *cluster, uint64_t now_ns,
                                      const Expertd__V1__HeartbeatRequest *request,
                                      bool *out_reregister, ep_error *out_error);
/* The coordinator was blind for so long (stopped, starved): it counts as nobody's silence. Before
 * the tick at now_ns. */
void ep_coordinator_state_excuse(ep_coordinator_state *cluster, uint64_t now_ns, uint64_t blind_ns);
/* Notices silence. Call every heartbeat_ms or so. */
void ep_coordinator_state_tick(ep_coordinator_state *cluster, uint64_t now_ns);

/*
 * Slots and passes per routed expert of a layer, summed since somewhere. What is more than before
 * is its heat, a pass as much as EP_COPY_PASS_SLOTS slots, once it is enough to judge by; the heat
 * of before then counts half. So a layer that nobody calls keeps its heat.
 */
void ep_coordinator_state_take_heat(ep_coordinator_state *cluster, const char *model,
                                    const char *version, uint32_t layer, const uint64_t *counts,
                                    const uint64_t *passes, uint32_t experts);
/* Moves copies by heat, a few at a time, once all nodes have loaded what they were given, until new
 * heat moves none. Placement `balanced` only. */
void ep_coordinator_state_rebalance(ep_coordinator_state *cluster);

/* How even the load is over the nodes: by the newest table, and by the heat of now. */
typedef struct ep_coordinator_balance {
    double busiest_over_mean;  /* load of the busiest node over the mean of all */
    double busiest_over_bound; /* over what no placement of as many copies can beat */
} ep_coordinator_balance;
/* False: not known, for no heat was taken yet or an expert has no copy. Worked out when it is asked
 * for after a change. */
bool ep_coordinator_state_balance(ep_coordinator_state *cluster, const char *model,
                                  const char *version, uint32_t layer,
                                  ep_coordinator_balance *out_balance);

/*
 * Another policy (ep_policy_apply): what it sets stands in for the configuration at once, and in
 * the next table. It is kept with the state. Errors: RESOURCE_EXHAUSTED when tables would grow
 * beyond what clients take.
 */
ep_err ep_coordinator_state_set_policy(ep_coordinator_state *cluster, const ep_policy *policy,
                                       ep_error *out_error);
const ep_policy *ep_coordinator_state_get_policy(const ep_coordinator_state *cluster);
/* The configuration with what the policy sets in it, and as it was given. */
const ep_coordinator_state_config *
ep_coordinator_state_in_force(const ep_coordinator_state *cluster);
const ep_coordinator_state_config *
ep_coordinator_state_configured(const ep_coordinator_state *cluster);

/*
 * What placement would do now with as many moves for balance as help, or apply: does; nodes then
 * load it as after any change, and the pace of _rebalance is as before. *out_reply:
 * expertd__v1__plan_reply__free_unpacked. Errors: UNAVAILABLE (nothing is placed yet; apply while
 * nodes still load or one is suspect), NO_MEMORY (an order is then done all the same).
 */
ep_err ep_coordinator_state_plan(ep_coordinator_state *cluster, bool apply, bool with_copies,
                                 Expertd__V1__PlanReply **out_reply, ep_error *out_error);

/* "uniform", "balanced" or "static". */
const char *ep_coordinator_state_policy(const ep_coordinator_state_config *config);

/* Grows when something changes that a store shall keep, and when an assignment is committed. */
uint64_t ep_coordinator_state_revision(const ep_coordinator_state *cluster);

/* Number of the newest assignment; nodes report the one they have loaded. */
ep_epoch ep_coordinator_state_assignment_epoch(const ep_coordinator_state *cluster);
/* The newest assignment that every live node has loaded: what it no longer names may be dropped,
 * once the table of that moment is out. */
ep_epoch ep_coordinator_state_committed_epoch(const ep_coordinator_state *cluster);
/*
 * Whether the node is told its assignment now. Where loading_nodes_max of others load, a node that
 * has something to load waits for its turn, by what it was told before. A turn ends when the node
 * has loaded the newest assignment, when it falls silent or is started anew, or a minute after it
 * loaded its last expert, and those that had none for longer come first: one that hangs, or starts
 * again and again, stops nobody.
 */
bool ep_coordinator_state_take_turn(ep_coordinator_state *cluster, uint64_t now_ns,
                                    const char *node);
/* What the node shall own. *out_list[*out_count] is freed with
 * ep_coordinator_state_assignments_free. */
ep_err ep_coordinator_state_assignments(const ep_coordinator_state *cluster, const char *node,
                                        Expertd__V1__NodeAssignment ***out_list, size_t *out_count);
void ep_coordinator_state_assignments_free(Expertd__V1__NodeAssignment **list, size_t count);

/* The other nodes of the node's host in the newest table; *out_list[*out_count] is one block for
 * free(), its strings are the table's.
 * Errors: NO_MEMORY. */
ep_err ep_coordinator_state_neighbours(const ep_coordinator_state *cluster, const char *node,
                                       Expertd__V1__Neighbour ***out_list, size_t *out_count);

typedef struct ep_coordinator_drain {
    char node[EP_NODE_NAME_BYTES];
    const char *state;       /* the node's state now; "gone": only its name is known */
    uint32_t copies_to_move; /* copies that still stand on it in the table */
    bool is_news;            /* the order changed something */
    bool is_leaving; /* the node itself asks to be emptied: undo here does not change that */
    char note[EP_ERROR_TEXT_BYTES]; /* ep_coordinator_service_drain only: as DrainReply.note */
} ep_coordinator_drain;

/*
 * A drained node is given no experts. Its copies stay listed, and it keeps them, until each has a
 * loaded copy elsewhere; where no other node can take an expert it stays, and the placement error
 * says so. The name stays drained also while no such node is there, until undo. A node whose
 * heartbeats say "leaving" is treated the same while they do. Undo lets the node take part again,
 * and moves copies to it for balance. Errors: NOT_FOUND naming the known nodes; NO_MEMORY.
 */
ep_err ep_coordinator_state_drain(ep_coordinator_state *cluster, const char *node, bool undo,
                                  ep_coordinator_drain *out_drain, ep_error *out_error);

/* The same report of a node that asks to be emptied itself; one that is not known has nothing to
 * move. */
void ep_coordinator_state_leaving(const ep_coordinator_state *cluster, const char *name,
                                  ep_coordinator_drain *out_drain);

/*
 * Callers that name no version of a model get its default: the first version whose experts all have
 * a copy, until an operator names another one here or no node offers it any more. It stands in the
 * published table, and is kept with it. *out_before[EP_VERSION_BYTES]: the default until now, ""
 * none. Errors: NOT_FOUND naming the versions there are; UNAVAILABLE when experts of it have no
 * copy.
 */
ep_err ep_coordinator_state_set_default(ep_coordinator_state *cluster, const char *model,
                                        const char *version, char *out_before, ep_error *out_error);

/* The newest table (borrowed; ref it to keep it); NULL before the first. */
ep_routing_table *ep_coordinator_state_table(const ep_coordinator_state *cluster);
/* Why placement failed last (static map that does not fit the model, no memory), or why the newest
 * table is not published (more than EP_COORDINATOR_TABLE_BYTES_MAX: the one before stays); code
 * EP_OK when neither. */
const ep_error *ep_coordinator_state_placement_error(const ep_coordinator_state *cluster);

/* Nodes that offer a model and get none of its experts, for they compute with another numerics id;
 * code EP_OK: none. */
const ep_error *ep_coordinator_state_left_out(const ep_coordinator_state *cluster);

/* Nodes whose copies of experts are not used, for their weights differ from those of most nodes,
 * and what to do; code EP_OK: none. */
const ep_error *ep_coordinator_state_copy_error(const ep_coordinator_state *cluster);

/* Routed experts of a layer that some node can load; 0: there is none. cluster is an
 * ep_coordinator_state: an ep_load_experts_func. */
uint32_t ep_coordinator_state_layer_experts(void *cluster, const char *model, const char *version,
                                            uint32_t layer);

/* For ClusterStatus: nodes by index. Strings are borrowed. False past the end. */
typedef struct ep_coordinator_state_node_view {
    uint32_t node_id;
    const char *name;
    const char *url;
    const char *host;
    const char *state;
    uint64_t incarnation;
    uint64_t rows_served;
    uint64_t requests_failed; /* as in HeartbeatRequest, as the next five */
    uint64_t requests_hedged;
    uint64_t requests_refused;
    uint64_t weight_bytes;
    double weight_quant_error;
    double weight_quant_output_error;
    uint64_t last_seen_ns;
    uint64_t behind_ns; /* for so long it has not loaded the newest assignment */
    bool waits_to_load; /* for its turn */
    uint64_t tls_expiry;
    uint32_t devices; /* as in HeartbeatRequest, as the next */
    uint64_t devices_lost;
    const char *tls_error;
    double speed; /* as in NodeEntry, as the next */
    uint64_t slow_ns;
} ep_coordinator_state_node_view;
bool ep_coordinator_state_node(const ep_coordinator_state *cluster, size_t index,
                               ep_coordinator_state_node_view *out_view);
/* Of the node at that index: copies that it was given and has not loaded, or could not; copies that
 * it has loaded and is to give up. */
void ep_coordinator_state_moves(const ep_coordinator_state *cluster, size_t index,
                                uint32_t *out_to_load, uint32_t *out_to_drop);
/* Copies beyond an expert's first that are wanted of the model and wait for move_rate; model NULL:
 * of all. */
uint32_t ep_coordinator_state_copies_waiting(const ep_coordinator_state *cluster, const char *model,
                                             const char *version);
/* Nodes that fell silent and were forgotten, the longest away first, as state EP_NODE_LOST: until
 * they register again or are drained by name. Not kept over a restart of the coordinator; at most
 * nodes_max. False past the end. */
#define EP_NODE_LOST "lost"
bool ep_coordinator_state_lost(const ep_coordinator_state *cluster, size_t index,
                               ep_coordinator_state_node_view *out_view);

#define EP_COORDINATOR_MOVES_MAX 4096
typedef struct ep_coordinator_copies {
    size_t count; /* of all; the list has up to EP_COORDINATOR_MOVES_MAX */
    struct {
        uint32_t expert;
        uint32_t node_id;
    } list[EP_COORDINATOR_MOVES_MAX];
} ep_coordinator_copies;

/* What the table does not tell of a layer. */
typedef struct ep_coordinator_layer_view {
    uint32_t heat_count;           /* E; 0: none was taken yet */
    double *heat;                  /* [heat_count]; free() it */
    ep_coordinator_copies to_load; /* as ep_coordinator_state_moves, as the next */
    ep_coordinator_copies to_drop;
} ep_coordinator_layer_view;
/* Empty for a layer that is not known. False without memory. */
bool ep_coordinator_state_layer(ep_coordinator_state *cluster, const char *model,
                                const char *version, uint32_t layer,
                                ep_coordinator_layer_view *out_view);

#endif
