/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator's state: the nodes, what each can load, what it is assigned, what it owns, and
 * the routing table made of that. Pure: no I/O, no clock (now_ns is passed in), no threads.
 *
 *   register, heartbeat, tick  ->  assignment (what each node shall own)
 *   nodes load and report      ->  routing table
 *
 * A node is `serving` while its heartbeats come, and `suspect` after heartbeat_dead_count of them
 * are missing; its experts then leave the table. After restore_ms more (at once if it was draining)
 * it is forgotten and its experts are assigned to others. Unless it was draining or drained, status
 * names it as lost until it is back. A table lists only copies that nodes report as loaded. While
 * an assignment is being loaded, copies that are to go stay listed. The last loaded copy of an
 * expert is never given up: an expert that a node fails to load is assigned to another one, or
 * stays where it was. The first table is made when min_nodes nodes have loaded all they were
 * assigned.
 *
 * Threads    one at a time.
 */
#ifndef EP_COORDINATOR_STATE_H
#define EP_COORDINATOR_STATE_H

#include "admin.pb-c.h"
#include "coordinator.pb-c.h"
#include "moe/routing_table.h"
#include "placement/expert_map.h"

/* The largest table. It is sent as one header of a control connection, whose limit is at least this
 * (ep_rpc_limits_raise_for_control). */
#define EP_COORDINATOR_TABLE_BYTES_MAX ((uint64_t)4 << 20)

typedef struct ep_coordinator_state ep_coordinator_state;

#define EP_POLICY_WHO_BYTES 64

/* Keys that operators set while the service runs (policy.h). */
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
    uint64_t revision; /* revision that set it; 0: not set */
    uint64_t number;
    uint64_t set_at;               /* Unix time in seconds */
    char who[EP_POLICY_WHO_BYTES]; /* never "" in a set value */
} ep_policy_value;

typedef struct ep_policy {
    uint64_t revision; /* grows with each change; 0: nothing was ever set */
    ep_policy_value values[EP_POLICY_KEYS];
} ep_policy;

/* Which URLs a node may have, besides that a lane must know them. */
typedef enum ep_node_urls {
    EP_NODE_URLS_ANY,    /* any: everything runs in one process */
    EP_NODE_URLS_STREAM, /* tcp or tls+tcp */
    EP_NODE_URLS_TLS,    /* tls+tcp */
} ep_node_urls;

typedef struct ep_coordinator_state_config {
    ep_node_urls node_urls; /* checked by the service */
    /* also checked there: rules for hosts (transport/address.h); count 0: any */
    const char *const *advertise_allow;
    size_t advertise_allow_count;
    uint32_t copies;    /* wanted per expert, 1..64 */
    uint32_t min_nodes; /* nodes that must register before anything is placed */
    uint32_t heartbeat_ms;
    uint32_t heartbeat_dead_count;
    /* a suspect node's experts are assigned to others after so long */
    uint32_t restore_ms;
    uint32_t nodes_max;
    uint32_t decode_tokens_max; /* goes into the table */
    uint64_t move_rate;         /* bytes per second (move_pace.h); 0: no limit */
    uint32_t loading_nodes_max; /* the most nodes that load at the same time; 0: no limit */
    uint64_t term;
    const ep_expert_map *expert_map; /* static placement; NULL: none. Borrowed */
    bool is_balanced;                /* without a map: placement by heat (ep_placement_balanced) */
    uint32_t spare_copies;           /* with is_balanced: further copies per layer */
    /* with a map: device d is node node_order[d]; NULL: nodes by name */
    const char *const *node_order;
    size_t node_order_count;
} ep_coordinator_state_config;

ep_err ep_coordinator_state_create(const ep_coordinator_state_config *config,
                                   ep_coordinator_state **out_cluster);
void ep_coordinator_state_destroy(ep_coordinator_state *cluster);

/*
 * Registers a node, new or returning. The name of a live node is given only to a process with its
 * secret; a new process of the node waits until the former one has been silent for two heartbeats
 * or reports draining. Errors: INVALID_ARGUMENT (field named; a model whose layers differ from
 * other nodes'), RESOURCE_EXHAUSTED, ALREADY_EXISTS (try again).
 */
ep_err ep_coordinator_state_register(ep_coordinator_state *cluster, uint64_t now_ns,
                                     const Expertd__V1__RegisterRequest *request,
                                     uint32_t *out_node_id, ep_error *out_error);
/* *out_reregister: this incarnation is not known, or only from the store. */
ep_err ep_coordinator_state_heartbeat(ep_coordinator_state *cluster, uint64_t now_ns,
                                      const Expertd__V1__HeartbeatRequest *request,
                                      bool *out_reregister, ep_error *out_error);
/* The coordinator did not run for so long (stopped, starved), so this time does not count as
 * silence of nodes. Call it before the tick at now_ns. */
void ep_coordinator_state_excuse(ep_coordinator_state *cluster, uint64_t now_ns, uint64_t blind_ns);
/* Detects silent nodes. Call it about every heartbeat_ms. */
void ep_coordinator_state_tick(ep_coordinator_state *cluster, uint64_t now_ns);

/*
 * Takes sums of slots and passes per routed expert of a layer. Once the increase is large enough,
 * it becomes the heat, with the former heat at half weight; a pass counts as EP_COPY_PASS_SLOTS
 * slots. So a layer without calls keeps its heat.
 */
void ep_coordinator_state_take_heat(ep_coordinator_state *cluster, const char *model,
                                    const char *version, uint32_t layer, const uint64_t *counts,
                                    const uint64_t *passes, uint32_t experts);
/* Placement `balanced` only: moves copies by heat, a few each time that all nodes have loaded what
 * they were assigned, until no move helps. */
void ep_coordinator_state_rebalance(ep_coordinator_state *cluster);

/* How even the load of the nodes is, by the newest table and the present heat. */
typedef struct ep_coordinator_balance {
    double busiest_over_mean;  /* load of the busiest node / mean load */
    double busiest_over_bound; /* load of the busiest node / lower bound for as many copies */
} ep_coordinator_balance;
/* False: not known, because there is no heat yet or an expert has no copy. Computed at the first
 * call after a change. */
bool ep_coordinator_state_balance(ep_coordinator_state *cluster, const char *model,
                                  const char *version, uint32_t layer,
                                  ep_coordinator_balance *out_balance);

/*
 * Sets a policy (ep_policy_apply). Its values override the configuration at once and go into the
 * next table; it is stored with the state. Errors: RESOURCE_EXHAUSTED if tables would become too
 * large.
 */
ep_err ep_coordinator_state_set_policy(ep_coordinator_state *cluster, const ep_policy *policy,
                                       ep_error *out_error);
const ep_policy *ep_coordinator_state_get_policy(const ep_coordinator_state *cluster);
/* The configuration with the policy's values, and as it was given. */
const ep_coordinator_state_config *
ep_coordinator_state_in_force(const ep_coordinator_state *cluster);
const ep_coordinator_state_config *
ep_coordinator_state_configured(const ep_coordinator_state *cluster);

/*
 * Plans a placement now, with as many moves for balance as help. apply: also does it; nodes then
 * load as after any change, and _rebalance keeps its pace. *out_reply:
 * expertd__v1__plan_reply__free_unpacked. Errors: UNAVAILABLE (nothing is placed yet; apply while
 * nodes still load or one is suspect), NO_MEMORY (apply has been done even so).
 */
ep_err ep_coordinator_state_plan(ep_coordinator_state *cluster, bool apply, bool with_copies,
                                 Expertd__V1__PlanReply **out_reply, ep_error *out_error);

/* "uniform", "balanced" or "static". */
const char *ep_coordinator_state_policy(const ep_coordinator_state_config *config);

/* Grows with each change that a store must keep, and when an assignment is committed. */
uint64_t ep_coordinator_state_revision(const ep_coordinator_state *cluster);

/* Number of the newest assignment; nodes report the one they have loaded. */
ep_epoch ep_coordinator_state_assignment_epoch(const ep_coordinator_state *cluster);
/* The newest assignment that every live node has loaded. Copies that it does not name may be
 * dropped once the table of that moment is out. */
ep_epoch ep_coordinator_state_committed_epoch(const ep_coordinator_state *cluster);
/*
 * Whether the node gets its assignment now. While loading_nodes_max other nodes load, a node with
 * something to load keeps its former assignment and waits for a turn. Nodes that have had no turn
 * for longest come first. A turn ends when the node has loaded the newest assignment, falls silent,
 * restarts, or has loaded no expert for a minute. So a node that hangs or keeps restarting blocks
 * nobody.
 */
bool ep_coordinator_state_take_turn(ep_coordinator_state *cluster, uint64_t now_ns,
                                    const char *node);
/* The node's assignment. Free *out_list[*out_count] with ep_coordinator_state_assignments_free. */
ep_err ep_coordinator_state_assignments(const ep_coordinator_state *cluster, const char *node,
                                        Expertd__V1__NodeAssignment ***out_list, size_t *out_count);
void ep_coordinator_state_assignments_free(Expertd__V1__NodeAssignment **list, size_t count);

/* The other nodes of the node's host in the newest table. *out_list[*out_count] is one block for
 * free(); its strings are the table's. Errors: NO_MEMORY. */
ep_err ep_coordinator_state_neighbours(const ep_coordinator_state *cluster, const char *node,
                                       Expertd__V1__Neighbour ***out_list, size_t *out_count);

typedef struct ep_coordinator_drain {
    char node[EP_NODE_NAME_BYTES];
    const char *state;       /* the node's state now; "gone": only the name is known */
    uint32_t copies_to_move; /* copies still on it in the table */
    bool is_news;            /* the order changed something */
    bool is_leaving;         /* the node itself asks to be emptied; undo does not change that */
    char note[EP_ERROR_TEXT_BYTES]; /* ep_coordinator_service_drain only: as DrainReply.note */
} ep_coordinator_drain;

/*
 * Drains a node: it is assigned no experts. It keeps its copies, and they stay listed, until each
 * has a loaded copy elsewhere. An expert that no other node can take stays, and the placement error
 * says so. The name stays drained until undo, even while there is no such node. A node is treated
 * the same while its heartbeats have state "leaving". After undo the node takes part again, and
 * copies move to it for balance. Errors: NOT_FOUND naming the known nodes; NO_MEMORY.
 */
ep_err ep_coordinator_state_drain(ep_coordinator_state *cluster, const char *node, bool undo,
                                  ep_coordinator_drain *out_drain, ep_error *out_error);

/* The same report for a node that asks itself to be emptied; an unknown one has nothing to move. */
void ep_coordinator_state_leaving(const ep_coordinator_state *cluster, const char *name,
                                  ep_coordinator_drain *out_drain);

/*
 * Sets a model's default version, for callers that name none. Before that it is the first version
 * whose experts all had a copy; it ends when no node offers it. It is stored with the published
 * table. *out_before[EP_VERSION_BYTES]: the former default, "": none. Errors: NOT_FOUND listing the
 * versions; UNAVAILABLE if experts of the version have no copy.
 */
ep_err ep_coordinator_state_set_default(ep_coordinator_state *cluster, const char *model,
                                        const char *version, char *out_before, ep_error *out_error);

/* The newest table, borrowed; NULL: none yet. */
ep_routing_table *ep_coordinator_state_table(const ep_coordinator_state *cluster);
/* Why the last placement failed (a map that does not fit the model, no memory), or why the newest
 * table is not published (it is above EP_COORDINATOR_TABLE_BYTES_MAX, so the former one stays).
 * Code EP_OK: neither. */
const ep_error *ep_coordinator_state_placement_error(const ep_coordinator_state *cluster);

/* Names nodes that offer a model but get none of its experts (numerics id); code EP_OK: none. */
const ep_error *ep_coordinator_state_left_out(const ep_coordinator_state *cluster);

/* Names nodes whose copies are not used because their weights differ from most nodes', and says
 * what to do; code EP_OK: none. */
const ep_error *ep_coordinator_state_copy_error(const ep_coordinator_state *cluster);

/* Number of routed experts of a layer, if some node can load it; else 0. cluster is an
 * ep_coordinator_state: an ep_load_experts_func. */
uint32_t ep_coordinator_state_layer_experts(void *cluster, const char *model, const char *version,
                                            uint32_t layer);

/* For ClusterStatus, as at now_ns: nodes by index, without their moves. Strings are borrowed, that
 * of the state is static. False past the end. */
bool ep_coordinator_state_node(const ep_coordinator_state *cluster, size_t index, uint64_t now_ns,
                               Expertd__V1__NodeEntry *out_entry);
/* For the node at that index: assigned copies that it has not loaded, or failed to load; loaded
 * copies that it is to give up. */
void ep_coordinator_state_moves(const ep_coordinator_state *cluster, size_t index,
                                uint32_t *out_to_load, uint32_t *out_to_drop);
/* Further copies (not an expert's first) of the model that wait for move_rate; model NULL: of
 * all. */
uint32_t ep_coordinator_state_copies_waiting(const ep_coordinator_state *cluster, const char *model,
                                             const char *version);
/* Nodes that were forgotten after silence, as state EP_NODE_LOST, the longest away first, until
 * they register again or are drained by name. At most nodes_max; not kept over a restart of the
 * coordinator. False past the end. */
#define EP_NODE_LOST "lost"
bool ep_coordinator_state_lost(const ep_coordinator_state *cluster, size_t index, uint64_t now_ns,
                               Expertd__V1__NodeEntry *out_entry);

#define EP_COORDINATOR_MOVES_MAX 4096
typedef struct ep_coordinator_copies {
    size_t count; /* of all; list has at most EP_COORDINATOR_MOVES_MAX */
    struct {
        uint32_t expert;
        uint32_t node_id;
    } list[EP_COORDINATOR_MOVES_MAX];
} ep_coordinator_copies;

/* What is not in the table about a layer. */
typedef struct ep_coordinator_layer_view {
    uint32_t heat_count;           /* E; 0: no heat yet */
    double *heat;                  /* [heat_count]; free() it */
    ep_coordinator_copies to_load; /* as ep_coordinator_state_moves; the next too */
    ep_coordinator_copies to_drop;
} ep_coordinator_layer_view;
/* Empty for a layer that is not known. False without memory. */
bool ep_coordinator_state_layer(ep_coordinator_state *cluster, const char *model,
                                const char *version, uint32_t layer,
                                ep_coordinator_layer_view *out_view);

#endif
