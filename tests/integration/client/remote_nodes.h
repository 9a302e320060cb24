/* SPDX-License-Identifier: Apache-2.0 */
/* Fake nodes in a child process, so that what the client does in its own process can be counted. */
#ifndef EP_TESTS_REMOTE_NODES_H
#define EP_TESTS_REMOTE_NODES_H

#include <sys/types.h>

#include "harness.h"

typedef struct remote_nodes {
    pid_t child;
    int control_fd; /* closing it ends the child */
    harness h;      /* shape, owners, urls; no nodes in this process */
} remote_nodes;

/* Before any thread exists. copies of each expert on nodes_count nodes, named prefix0, prefix1,
 * ... */
void remote_nodes_start(remote_nodes *r, const char *prefix, uint32_t nodes_count, uint32_t copies,
                        uint32_t hidden);
/* The node keeps its requests until released; both return when it is so. */
void remote_nodes_hang(remote_nodes *r, uint32_t node);
void remote_nodes_release(remote_nodes *r);
/* Ends the child; 0 when it ended well. */
int remote_nodes_stop(remote_nodes *r);
/* A client on them and, when not NULL, on others, ready. */
ep_client *remote_nodes_client(remote_nodes *r, remote_nodes *others);

#endif
