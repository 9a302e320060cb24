/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole service for a test: one coordinator and some nodes as real processes on free loopback
 * ports, with a temporary directory.
 *
 * A failure ends the test program: ep_test_fail prints why, ends the processes, removes the
 * directory and exits with 1. Start and restart processes on the main thread only
 * (support/process.h); all other functions are for any thread. Nothing here sleeps for a fixed
 * time: a wait ends with an event, and EP_TEST_PATIENCE_MS bounds it if the event never comes.
 */
#ifndef EP_TESTS_SUPPORT_CLUSTER_H
#define EP_TESTS_SUPPORT_CLUSTER_H

#include "expert.pb-c.h"
#include "expertd/client.h"
#include "rpc/rpc.h"
#include "support/checkpoint_fixture.h"
#include "support/process.h"

#define EP_TEST_NODES_MAX 8
#define EP_TEST_PATIENCE_MS 60000
#define EP_TEST_ARGS_MAX 64

/* Cleans up all started clusters and the directories of ep_test_dir_new, and exits with 1. */
void ep_test_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* Fails the test with the condition and a text. */
#define EP_TEST_CHECK(condition, ...)                                                              \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            ep_test_fail(__VA_ARGS__);                                                             \
        }                                                                                          \
    } while (0)

/* Makes a directory that ep_test_fail removes too. */
void ep_test_dir_new(char out_path[EP_TEST_PATH_BYTES]);
/* Writes a fixture checkpoint into a directory of ep_test_dir_new. */
void ep_test_checkpoint_new(const ep_fixture_config *config, char out_path[EP_TEST_PATH_BYTES]);

/* The programs of this build. */
extern const char ep_test_expertd[];
extern const char ep_test_coordinator[];
extern const char ep_test_expertctl[];
extern const char ep_test_ref_forward[];
/* True if the programs run with a sanitizer: then memory figures mean nothing and everything is
 * slower. */
extern const bool ep_test_sanitized;

typedef struct ep_test_model {
    const char *name;
    const char *path; /* checkpoint directory */
} ep_test_model;

/* Pointers must stay valid as long as the cluster. */
typedef struct ep_test_cluster_options {
    uint32_t nodes_count;
    uint32_t copies;       /* 0: 1 */
    uint32_t threads;      /* compute threads of each node; 0: 1 */
    uint32_t heartbeat_ms; /* 0: 50 */
    /* heartbeats after which a silent node leaves the table; 0: 100 */
    uint32_t heartbeat_dead_count;
    const char *expert_map; /* JSON of a static placement; NULL: uniform */
    const ep_test_model *models;
    size_t models_count;
    const char *const *coordinator_args; /* NULL, or NULL-terminated */
    const char *const *node_args;        /* NULL, or NULL-terminated */
    const char *const *node_programs;    /* NULL, or [nodes_count]; a NULL entry is expertd */
    const char *coordinator_program;     /* NULL: expertd-coordinator */
    const char *const *coordinator_environment; /* NULL, or NULL-terminated "NAME=value" */
    const char *ctl_program;                    /* NULL: expertctl */
    /* NULL, or [nodes_count]: --numerics of each node; a NULL entry: the default */
    const char *const *node_numerics;
    const char *const *hosts; /* NULL, or [nodes_count]: --host of each node */
    /* NULL, or [nodes_count]: the URL each node advertises to clients */
    const char *const *advertise_urls;
    const char *nodes_coordinator_url; /* the coordinator's URL for nodes; NULL: where it listens */
} ep_test_cluster_options;

typedef struct ep_test_cluster {
    ep_test_cluster_options options;
    char dir[EP_TEST_PATH_BYTES]; /* the test may put files here too */
    ep_test_process coordinator;
    ep_test_process nodes[EP_TEST_NODES_MAX]; /* named node0, node1, ... */
    ep_timer_service *timers;                 /* for ep_test_cluster_call */
    ep_buffer_pool *pool;
} ep_test_cluster;

/* Returns once all processes listen; the nodes may still load. A client's wait_ready and expertctl
 * wait for the first table, which has all nodes. */
void ep_test_cluster_start(ep_test_cluster *cluster, const ep_test_cluster_options *options);
/* Sends SIGTERM to the nodes, then to the coordinator. Each process that still runs must drain and
 * exit with 0. Then does as _destroy. */
void ep_test_cluster_stop(ep_test_cluster *cluster);
/* Ends running processes and removes the directory. */
void ep_test_cluster_destroy(ep_test_cluster *cluster);
/* Starts the coordinator again on its old port; _spawn does not wait until it listens. */
void ep_test_cluster_spawn_coordinator(ep_test_cluster *cluster);
void ep_test_cluster_restart_coordinator(ep_test_cluster *cluster);

/* Starts a node again, on another port. */
void ep_test_cluster_restart_node(ep_test_cluster *cluster, uint32_t node);
/* Does so on its old port, like a service manager: the coordinator recognises it at once. */
void ep_test_cluster_return_node(ep_test_cluster *cluster, uint32_t node);
/* Starts one more node. */
void ep_test_cluster_add_node(ep_test_cluster *cluster);

/* Returns a ready client, to be destroyed by the caller. change (may be NULL) edits the
 * configuration first. */
ep_client *ep_test_cluster_client(ep_test_cluster *cluster,
                                  void (*change)(ep_client_config *config));

/* Makes a unary call to url without libexpertd, with an operator's token if service is Admin. Free
 * the reply with protobuf_c_message_free_unpacked. */
ProtobufCMessage *ep_test_cluster_call(ep_test_cluster *cluster, const char *url,
                                       const char *service, const char *method,
                                       const ProtobufCMessage *request);
/* Asks one node for its NodeStatus. */
Expertd__V1__NodeStatusReply *ep_test_cluster_node_status(ep_test_cluster *cluster, uint32_t node);
/* Polls until the node has requests in flight, and returns their number. */
uint64_t ep_test_cluster_wait_in_flight(ep_test_cluster *cluster, uint32_t node);

/* Registers a node that holds no expert and never sends a heartbeat. */
void ep_test_cluster_register(ep_test_cluster *cluster, const char *name, const char *url,
                              const char *host);

/* Runs expertctl with --coordinator and the line (ep_test_process_run_line): its exit code. */
__attribute__((format(printf, 3, 4))) int
ep_test_cluster_ctl(ep_test_cluster *cluster, char **out_output, const char *line, ...);

/* Fails the test unless all nodes and the coordinator still run. */
void ep_test_cluster_expect_alive(ep_test_cluster *cluster);

#endif
