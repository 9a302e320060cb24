/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A recording with known times, as events or as CTF on disk: a client (pid 100), node0 (pid 200)
 * and node1 (pid 300). Request i begins at EP_TEST_SCENE_START + i ms and takes 100 us: plan, two
 * frames, combine. node1 answers last, so it is on the critical path; its exchange grows by 100 ns
 * with every request, up to the 50th.
 */
#ifndef EP_TESTS_SUPPORT_TRACE_SCENE_H
#define EP_TESTS_SUPPORT_TRACE_SCENE_H

#include "trace/trace_model.h"

#define EP_TEST_SCENE_START 1700000000000000000LL
#define EP_TEST_SCENE_SPANS 19 /* spans per request */
#define EP_TEST_SCENE_HEDGE_SPANS 8
#define EP_TEST_SCENE_CALL 1000
#define EP_TEST_SCENE_TRACE_HIGH 0x0af7651916cd43ddULL /* trace of request i: this, i + 1 */

typedef struct ep_test_scene {
    uint32_t requests;
    bool two_hosts; /* node1 is recording 1 */
    int64_t node1_ahead_ns;
    const char *node1;       /* its name; NULL: "node1" */
    int64_t node1_slower_ns; /* added to its job, and so to the request */
    /* so many first requests ask node0 again and use that: EP_TEST_SCENE_HEDGE_SPANS more */
    uint32_t hedged;
    bool nodes_only; /* the client was not recorded */
    /* so many last requests end at 200 us, DEADLINE_EXCEEDED: no answer of node1, no combine */
    uint32_t failed;
} ep_test_scene;

/* Returns all events by time, malloc'ed; NULL: no memory. */
ep_cli_trace_event *ep_test_scene_events(const ep_test_scene *scene, size_t *out_count);

/* Makes dir and writes the events of one recording into it as a CTF trace. clock: first byte of the
 * clock's uuid. False on failure. */
bool ep_test_scene_write(const char *dir, const ep_cli_trace_event *events, size_t count,
                         uint32_t recording, const char *host, uint8_t clock, uint64_t discarded);

#endif
