/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kinds of wrong peers. Quick ones are refused at once: run returns when every connection was. Slow
 * ones are peers whose offence is silence: open leaves them waiting, all kinds on all ports
 * together, and the test waits for the last to be closed.
 */
#ifndef HOSTILE_GROUPS_H
#define HOSTILE_GROUPS_H

#include "support/load.h"

enum { HOSTILE_OPEN_MAX = 512 };

typedef struct hostile_door {
    const char *name;
    const char *url;
    bool is_http;
    bool is_coordinator;
    ep_test_load *load; /* its calls are the clock where something must last */
    size_t first;       /* of each group's list: entries first, first + step, ... */
    size_t step;
} hostile_door;

typedef struct hostile_group {
    const char *name;
    bool http; /* makes sense on an HTTP port */
    bool rpc;  /* makes sense on an RPC port */
    void (*run)(const hostile_door *door);
} hostile_group;

typedef struct hostile_slow_group {
    const char *name;
    bool http;
    bool rpc;
    /* Fills fds[HOSTILE_OPEN_MAX] and returns how many. */
    size_t (*open)(const hostile_door *door, int *fds);
} hostile_slow_group;

extern const hostile_group hostile_groups[];
extern const size_t hostile_groups_count;
extern const hostile_slow_group hostile_slow_groups[];
extern const size_t hostile_slow_groups_count;

/* Opens so many connections and drops them without a word. */
void hostile_crowd(const hostile_door *door, size_t count);
/* Peers that send their Hello a byte at a time until they are closed. */
void hostile_slow_hello(const hostile_door *door);

#endif
