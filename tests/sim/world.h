/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One simulated service: clients, nodes and a coordinator in one thread, each on a host of the
 * simulated network. Everything is drawn from one seed. The clients are whole ep_clients and the
 * servers ep_rpc_servers, as shipped; only what a node computes and what the coordinator decides is
 * written here.
 */
#ifndef EP_TESTS_SIM_WORLD_H
#define EP_TESTS_SIM_WORLD_H

#include "coordinator.pb-c.h"
#include "expert.pb-c.h"
#include "integration/client/fake_service.h"
#include "sim_env.h"

#define NODES_MAX 6
#define CLIENTS_MAX 3
#define EXPERTS_MAX 12
#define HIDDEN_MAX 32
#define TOKENS_MAX 12
#define TOP_K_MAX 4
#define CALLERS_MAX 3
#define EPOCHS_MAX 512
#define FAULTS_MAX 24
#define MS EP_NS_PER_MS

typedef struct world world;
typedef struct sim_node sim_node;

typedef enum node_fault {
    NODE_OK,
    NODE_FAIL_ONCE,    /* answers its next request with UNAVAILABLE */
    NODE_HANG,         /* keeps requests; connections live */
    NODE_SLOW,         /* ten times the compute time */
    NODE_REFUSE,       /* RESOURCE_EXHAUSTED with retry_after_us */
    NODE_CRASH_BEFORE, /* dies at the next request */
    NODE_CRASH_AFTER   /* dies between computing and answering the next request */
} node_fault;

typedef struct node_job {
    sim_node *node;
    ep_sim_event event;
    ep_rpc_call *call;
    const Expertd__V1__ForwardRequest *in;
    Expertd__V1__ForwardReply_Closure closure;
    struct node_job *next;
    struct node_job *previous;
} node_job;

struct sim_node {
    Expertd__V1__ExpertService_Service service; /* first */
    world *world;
    uint32_t index;
    char name[16];
    char url[32];
    ep_sim_host_id host;
    bool running;
    bool dying;   /* node_kill is at it */
    bool leaving; /* the coordinator leaves it out of tables */
    node_fault fault;
    uint32_t owned; /* bit mask of experts it serves now */
    ep_epoch epoch; /* newest table it has heard of */
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_rpc_server *server;
    node_job *jobs;
    ep_sim_event kill_event;
};

/* What a table of the world said: for checking that requests follow it. */
typedef struct sim_table {
    ep_epoch epoch;
    uint32_t owners[EXPERTS_MAX]; /* bit masks of nodes */
} sim_table;

typedef struct watcher {
    world *world;
    ep_sim_event event;
    ep_rpc_call *call;
    Expertd__V1__PlacementSnapshot_Closure closure;
    struct watcher *next;
} watcher;

typedef struct sim_coordinator {
    Expertd__V1__Coordinator_Service service; /* first */
    ep_sim_host_id host;
    bool running;
    bool dying;
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_rpc_server *server;
    watcher *watchers;
    Expertd__V1__PlacementSnapshot *snapshot;
} sim_coordinator;

/* One caller of a client: one call after the other. */
typedef struct sim_caller {
    world *world;
    uint32_t client;
    ep_sim_event event;
    bool busy;
    bool must_succeed;
    uint32_t left;
    uint64_t begin_ns;
    uint64_t deadline_ns;
    uint32_t tokens;
    uint32_t top_k;
    uint32_t combined;  /* a bit per token */
    bool streamed;      /* with on_tokens */
    uint32_t told;      /* tokens it was told of */
    uint32_t cancel_at; /* so many told, it cancels its call */
    bool cancelled;
    ep_epoch begin_epoch;
    float x[TOKENS_MAX * HIDDEN_MAX];
    int32_t ids[TOKENS_MAX * TOP_K_MAX];
    float scales[TOKENS_MAX * TOP_K_MAX];
    float out[TOKENS_MAX * HIDDEN_MAX];
    /* out at the end of the call: nobody may write it afterwards */
    float after[TOKENS_MAX * HIDDEN_MAX];
    bool has_after;
} sim_caller;

typedef struct sim_client {
    ep_client *client;
    ep_sim_host_id host;
    uint32_t hedge_permille;
    ep_epoch used; /* newest epoch it sent a request with */
    sim_caller callers[CALLERS_MAX];
} sim_client;

typedef struct sim_fault {
    world *world;
    ep_sim_event event;
    uint32_t kind;
    uint32_t node;
    uint64_t lasts_ns;
    bool begun;
    bool over;
} sim_fault;

struct world {
    uint64_t seed;
    uint64_t random;
    uint64_t random_stream; /* which calls are streamed, and cancelled then */
    bool verbose;
    bool single_fault; /* two copies, one fault: no call may fail */
    bool busy;         /* many calls: enough for the clients to know what is late */
    uint32_t nodes_count;
    uint32_t copies;
    uint32_t clients_count;
    uint32_t callers_count; /* of each client */
    ep_layer_shape shape;
    ep_epoch epoch; /* newest published */
    uint32_t owners[EXPERTS_MAX];
    sim_table tables[EPOCHS_MAX];
    uint32_t tables_count;
    sim_node nodes[NODES_MAX];
    sim_coordinator coordinator;
    sim_client clients[CLIENTS_MAX];
    sim_fault faults[FAULTS_MAX];
    uint32_t faults_count;
    uint32_t busy_callers;
    uint64_t calls_ok;
    uint64_t calls_failed;
    uint64_t calls_streamed;
    uint64_t ranges;          /* that these were told of */
    uint64_t calls_delivered; /* that failed and had told of tokens */
    uint64_t requests;
    uint64_t took_ns_max;   /* of any call */
    uint64_t hedged_frames; /* of stopped clients */
    uint64_t rerouted_frames;
    uint64_t late_replies;
};

static inline bool world_epoch_older(ep_epoch a, ep_epoch b)
{
    return a.term != b.term ? a.term < b.term : a.number < b.number;
}

uint64_t world_below(world *w, uint64_t bound);
uint64_t world_between(world *w, uint64_t low, uint64_t high);
void world_say(world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* nodes.c */
void node_init(world *w, uint32_t index);
void node_start(sim_node *node);
/* As by SIGKILL: its host is dead first, then its memory is taken down. Not inside a callback of
 * the node. */
void node_kill(sim_node *node);
/* Answers what NODE_HANG kept. */
void node_release(sim_node *node);
ep_rpc_server *world_serve(const char *name, const char *role, ep_timer_service *timers,
                           ep_buffer_pool *pool, ProtobufCService *service, const char *url);

/* coordinator.c */
void coordinator_start(world *w);
void coordinator_kill(world *w);
/* Publishes w->owners under epoch; tells the nodes too. */
void coordinator_publish(world *w, ep_epoch epoch);
/* Publishes w->owners as the next number. */
void coordinator_publish_next(world *w);
/* Gives the nodes what the owners say, and takes the rest away a little later. */
void coordinator_move(world *w, uint32_t expert);

/* calls.c */
void client_start(world *w, uint32_t index);
void client_stop(world *w, uint32_t index);
/* Begins `calls` calls per caller; those of the last phase must succeed. */
void callers_start(world *w, uint32_t calls, bool must_succeed);
void callers_check_outs(world *w);

/* faults.c */
void faults_draw(world *w, uint64_t span_ns);
void faults_heal(world *w);
/* Where one fault came alone: no call took longer than it may cost. */
void faults_check_took(const world *w);
const char *fault_name(uint32_t kind);
uint32_t faults_kinds(void);

/* What became of a seed. */
typedef struct sim_outcome {
    uint64_t hash; /* of everything that happened */
    uint64_t calls_streamed;
    uint64_t calls_delivered;
    uint64_t hedged_frames;
    uint64_t rerouted_frames;
} sim_outcome;

/* The world under watch: one per process. */
extern world *watched;
/* Runs one seed. Ends the process when something is broken. */
sim_outcome world_run(uint64_t seed, bool verbose);

#endif
