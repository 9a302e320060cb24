/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A private LTTng session daemon: it alone records programs started with its environment.
 *
 * root has one session daemon for the whole machine, whatever LTTNG_HOME says. So a test of root's
 * first enters a user namespace, where it is another user.
 *
 * Threads  one at a time.
 */
#ifndef EP_TESTS_SUPPORT_LTTNG_H
#define EP_TESTS_SUPPORT_LTTNG_H

#include "support/process.h"

typedef struct ep_test_lttng {
    ep_test_process daemon;
    char dir[EP_TEST_PATH_BYTES];       /* LTTNG_HOME; also holds the output of lttng */
    char home[EP_TEST_PATH_BYTES + 16]; /* LTTNG_HOME=dir */
    const char *environment[2];         /* for ep_test_process_start of programs to record */
} ep_test_lttng;

/* Call it early in main, before there are threads. False: no recording is possible here, since
 * LTTng is not installed, or for root without user namespaces. */
bool ep_test_lttng_prepare(void);

/* dir must exist and be used by this daemon only. Returns once the daemon answers. False: it did
 * not start; its output is on stderr. */
bool ep_test_lttng_start(ep_test_lttng *lttng, const char *dir);
/* Runs lttng with args (NULL-terminated). False: it failed; its output is on stderr. *out_text (may
 * be NULL): its output, malloc'ed. */
bool ep_test_lttng_run(ep_test_lttng *lttng, const char *const *args, char **out_text);
/* Begins to record all events of expertd into out_dir, with the channel and contexts of `expertctl
 * trace record`. */
bool ep_test_lttng_record(ep_test_lttng *lttng, const char *out_dir);
/* Ends the daemon. Also for a zeroed or half-started one. */
void ep_test_lttng_stop(ep_test_lttng *lttng);

#endif
