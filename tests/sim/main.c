/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sim run SEED            one seed in this process, told step by step
 * sim range FIRST COUNT   each in a process of its own; stops at the first that breaks, and says
 *                         how to run it again
 * sim twice FIRST COUNT   each seed two times: the digests must be equal
 * sim find FIRST COUNT    for a build with a planted bug: succeeds when a seed finds it
 *
 * COUNT may be followed by a long count, taken with EP_TEST_LONG=1.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "world.h"

#define SECONDS_MAX 60 /* real ones; a seed takes a hundredth of one */

/* False when the seed breaks something. */
static bool run_child(uint64_t seed, bool quiet, sim_outcome *out_outcome)
{
    int ends[2];
    int status = 0;
    fflush(stdout);
    if (pipe(ends) != 0) {
        perror("pipe");
        exit(2);
    }
    pid_t child = fork();
    if (child == 0) {
        /* one that runs in a circle counts as broken */
        alarm(quiet ? SECONDS_MAX / 6 : SECONDS_MAX);
        if (quiet && freopen("/dev/null", "w", stderr) == NULL) {
            _Exit(2);
        }
        sim_outcome outcome = world_run(seed, false);
        bool written = write(ends[1], &outcome, sizeof(outcome)) == (ssize_t)sizeof(outcome);
        exit(written ? 0 : 2); /* not _exit: a leak checker looks */
    }
    close(ends[1]);
    bool ok = child > 0 &&
              read(ends[0], out_outcome, sizeof(*out_outcome)) == (ssize_t)sizeof(*out_outcome);
    close(ends[0]);
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0 &&
           ok;
}

static int run_seeds(const char *program, const char *mode, uint64_t first, uint64_t count)
{
    bool finds = strcmp(mode, "find") == 0;
    sim_outcome total = {0};
    for (uint64_t seed = first; seed < first + count; seed++) {
        sim_outcome one = {0};
        sim_outcome again = {0};
        bool ok = run_child(seed, finds, &one);
        if (finds && !ok) {
            printf("found by seed %" PRIu64 ", %" PRIu64 " seeds tried\n", seed, seed - first + 1);
            return 0;
        }
        if (!ok) {
            printf("seed %" PRIu64 " breaks; to see it: %s run %" PRIu64 "\n", seed, program, seed);
            return 1;
        }
        if (strcmp(mode, "twice") == 0 &&
            (!run_child(seed, false, &again) || again.hash != one.hash)) {
            printf("seed %" PRIu64 " gives %016" PRIx64 ", then %016" PRIx64 "\n", seed, one.hash,
                   again.hash);
            return 1;
        }
        total.calls_streamed += one.calls_streamed;
        total.calls_delivered += one.calls_delivered;
        total.hedged_frames += one.hedged_frames;
        total.rerouted_frames += one.rerouted_frames;
    }
    printf("%" PRIu64 " seeds from %" PRIu64 " on: %s\n", count, first,
           finds ? "the bug was not found" : "all well");
    printf("%" PRIu64 " calls told of their tokens, %" PRIu64 " of them failed later on; %" PRIu64
           " frames sent again, %" PRIu64 " hedged\n",
           total.calls_streamed, total.calls_delivered, total.rerouted_frames, total.hedged_frames);
    return finds ? 1 : 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "run") == 0) {
        uint64_t seed = strtoull(argv[2], NULL, 10);
        printf("seed %" PRIu64 "\n", seed);
        printf("digest %016" PRIx64 "\n", world_run(seed, true).hash);
        return 0;
    }
    bool known = argc >= 4 && (strcmp(argv[1], "range") == 0 || strcmp(argv[1], "twice") == 0 ||
                               strcmp(argv[1], "find") == 0);
    if (!known) {
        fprintf(stderr, "usage: %s run SEED | range|twice|find FIRST COUNT [LONG_COUNT]\n",
                argv[0]);
        return 2;
    }
    const char *is_long = getenv("EP_TEST_LONG");
    const char *count =
        argc > 4 && is_long != NULL && strcmp(is_long, "1") == 0 ? argv[4] : argv[3];
    uint64_t first = strtoull(argv[2], NULL, 10);
    printf("seeds from %" PRIu64 " on\n", first);
    return run_seeds(argv[0], argv[1], first, strtoull(count, NULL, 10));
}
