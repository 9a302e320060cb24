/* SPDX-License-Identifier: Apache-2.0 */
/* The node's shared-memory listener: its options, where its socket is, and who may use it. */
#ifndef EP_EXPERTD_NODE_SHM_H
#define EP_EXPERTD_NODE_SHM_H

#include "options/options.h"
#include "rpc/rpc.h"

typedef enum ep_node_shm_mode {
    EP_NODE_SHM_AUTO,
    EP_NODE_SHM_ON,
    EP_NODE_SHM_OFF
} ep_node_shm_mode;

typedef struct ep_node_shm_config {
    ep_node_shm_mode mode;
    /* callers must show certificates, which shared memory cannot do: auto means off */
    bool only_certificates;
    const char *dir; /* borrowed; "": the default */
    size_t ring_bytes;
    size_t total_bytes;
    size_t uids_count;
    uint32_t uids[EP_SHM_IDS_MAX];
    size_t gids_count;
    uint32_t gids[EP_SHM_IDS_MAX];
} ep_node_shm_config;

#define EP_NODE_SHM_OPTIONS                                                                        \
    {.name = "shm",                                                                                \
     .type = EP_OPTION_ENUM,                                                                       \
     .allowed = "auto|on|off",                                                                     \
     .default_text = "auto",                                                                       \
     .help = "Shared memory with callers of this host: auto (where it can be had, and not with "   \
             "tls_client_certs without token_file), on (required) or off"},                        \
        {.name = "shm_dir",                                                                        \
         .type = EP_OPTION_STRING,                                                                 \
         .max = 90,                                                                                \
         .default_text = "",                                                                       \
         .help =                                                                                   \
             "Directory of the shared-memory socket, which not everybody may write to; empty: "    \
             "$RUNTIME_DIRECTORY, or a private one under /tmp"},                                   \
        {.name = "shm_uids",                                                                       \
         .type = EP_OPTION_STRING,                                                                 \
         .max = 400,                                                                               \
         .default_text = "",                                                                       \
         .help = "User numbers that may use shared memory beside our own and root, as 1000,1001"}, \
        {.name = "shm_gids",                                                                       \
         .type = EP_OPTION_STRING,                                                                 \
         .max = 400,                                                                               \
         .default_text = "",                                                                       \
         .help = "Group numbers that may use shared memory, as 1000,1001"},                        \
        {.name = "shm_total_bytes",                                                                \
         .type = EP_OPTION_SIZE,                                                                   \
         .min = EP_SHM_RING_BYTES_MIN,                                                             \
         .max = (uint64_t)1 << 40,                                                                 \
         .default_text = "1G",                                                                     \
         .help = "Shared memory of all connections; a caller beyond it uses the network. A "       \
                 "connection takes "                                                               \
                 "two rings and a page"},                                                          \
    {                                                                                              \
        .name = "shm_ring_bytes", .type = EP_OPTION_SIZE, .min = EP_SHM_RING_BYTES_MIN,            \
        .max = EP_SHM_RING_BYTES_MAX, .default_text = "2M",                                        \
        .help =                                                                                    \
            "Shared memory of one connection and direction, a power of two; taken as it is used"   \
    }

/* Borrows texts from options. Errors: BAD_CONFIG. */
ep_err ep_node_shm_config_load(const ep_options *options, ep_node_shm_config *out_config,
                               ep_error *out_error);

/*
 * Adds a shared-memory listener with the roles of the other addresses; Hello then offers it. In
 * mode auto a failure is only logged. Errors: in mode on those of ep_rpc_server_listen.
 */
ep_err ep_node_shm_listen(const ep_node_shm_config *config, const char *node_name,
                          ep_rpc_server *server, ep_error *out_error);

#endif
