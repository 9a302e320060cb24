/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session daemon of the test's own: programs started with its environment are recorded by it and
 * by no other.
 *
 * root's session daemon is one for the whole machine, whatever LTTNG_HOME says. So root first goes
 * into a user namespace, in which it is somebody else.
 *
 * Threads  one at a time.
 */
#ifndef EP_TESTS_SUPPORT_LTTNG_H
#define EP_TESTS_SUPPORT_LTTNG_H

#include "support/process.h"

typedef struct ep_test_lttng {
    ep_test_process daemon;
    char dir[EP_TEST_PATH_BYTES];       /* LTTNG_HOME, and where the words of lttng go */
    char home[EP_TEST_PATH_BYTES + 16]; /* LTTNG_HOME=dir */
    const char *environment[2];         /* for ep_test_process_start of programs to record */
} ep_test_lttng;

/* Early in main, before there are threads. False: LTTng is not installed, or root without user
 * namespaces; nothing can be recorded here. */
bool ep_test_lttng_prepare(void);

/* dir exists and is this daemon's alone. Returns once the daemon answers. False: it did not start
 * (its output is on stderr). */
bool ep_test_lttng_start(ep_test_lttng *lttng, const char *dir);
/* lttng with args (NULL-terminated). False, and its words on stderr, when it fails. *out_text (may
 * be NULL): its words, malloc'ed. */
bool ep_test_lttng_run(ep_test_lttng *lttng, const char *const *args, char **out_text);
/* Begins to record all events of expertd as `expertctl trace record` does: its channel, its
 * contexts. The recording goes to out_dir. */
bool ep_test_lttng_record(ep_test_lttng *lttng, const char *out_dir);
/* Ends the daemon. Also for a zeroed or half-started one. */
void ep_test_lttng_stop(ep_test_lttng *lttng);

#endif
