/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of all ranks' addresses is larger than rank 0's frame_bytes_max: rank 0 and all others
 * are told so, in place of a group that is there for rank 0 alone. All ranks but rank 0 speak by
 * hand.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "expertd/group.h"
#include "group/group_frame.h"
#include "raw_rank.h"

#define RANKS 240 /* of 255 + 1 + 63 + 1 bytes: more than the least frame_bytes_max */
#define FRAME_BYTES 65536

typedef struct scene {
    raw_place place;
    ep_err err;
    ep_error error;
} scene;

static void *run_rank_0(void *arg)
{
    scene *s = arg;
    ep_group_config config;
    ep_group *group = NULL;
    raw_listen_config(&config, "table", RANKS, &s->place);
    config.deadline_us = 60000000;
    config.frame_bytes_max = FRAME_BYTES;
    config.host = "a";
    s->err = ep_group_create(&config, &group, &s->error);
    ep_group_destroy(group);
    return NULL;
}

static int join(const char *url, uint32_t rank)
{
    ep_group_hello hello = {.world_size = RANKS, .rank = rank, .name = "table"};
    memset(hello.url, 'u', sizeof(hello.url) - 1);
    memset(hello.host, 'h', sizeof(hello.host) - 1);
    return raw_join(url, &hello, 0);
}

static bool is_refused(int fd)
{
    static raw_frame f;
    return raw_read(fd, &f) && f.head.kind == EP_GROUP_FRAME_REFUSED &&
           memmem(f.bytes + EP_GROUP_FRAME_FIXED_BYTES, f.size - EP_GROUP_FRAME_FIXED_BYTES,
                  "allowed 65536", 13) != NULL;
}

int main(void)
{
    static scene s = {.place = RAW_PLACE};
    static int fds[RANKS];
    pthread_t rank_0;
    uint32_t refused = 0;
    if (pthread_create(&rank_0, NULL, run_rank_0, &s) != 0) {
        abort();
    }
    const char *url = raw_place_url(&s.place);
    for (uint32_t r = 1; r < RANKS; r++) {
        fds[r] = join(url, r);
        if (fds[r] < 0) {
            perror("join");
            return 1;
        }
    }
    for (uint32_t r = 1; r < RANKS; r++) {
        refused += is_refused(fds[r]);
        close(fds[r]);
    }
    pthread_join(rank_0, NULL);
    bool good = s.err == EP_ERR_RESOURCE_EXHAUSTED &&
                strstr(s.error.text, "the table of 240 ranks takes ") != NULL &&
                strstr(s.error.text, "allowed 65536 (frame_bytes_max") != NULL &&
                refused == RANKS - 1;
    if (!good) {
        fprintf(stderr, "%u of %u refused; rank 0: %s: %s\n", refused, RANKS - 1,
                ep_err_name(s.err), s.err == EP_OK ? "" : s.error.text);
    }
    return good ? 0 : 1;
}
