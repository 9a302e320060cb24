/* SPDX-License-Identifier: Apache-2.0 */
/* A rank that speaks the group's protocol by hand over a socket, well or badly. */
#ifndef EP_TESTS_GROUP_RAW_RANK_H
#define EP_TESTS_GROUP_RAW_RANK_H

#include <pthread.h>

#include "expertd/group.h"
#include "group/group_frame.h"

#define RAW_FRAME_MAX 65536

typedef struct raw_frame {
    uint8_t bytes[RAW_FRAME_MAX];
    size_t size;
    ep_group_frame head; /* encoded anew unless raw */
    bool raw;
    bool twice;
    bool cut; /* half of it, then the end */
    bool keep_crc;
} raw_frame;

bool raw_read(int fd, raw_frame *out);
bool raw_write(int fd, raw_frame *f);
/* Connects to "tcp://127.0.0.1:port" and says hello. membership: 0 to rank 0, which tells it.
 * Returns the socket; -1. */
int raw_join(const char *url, const ep_group_hello *hello, uint64_t membership);

/* Where rank 0 listens, once it does. */
typedef struct raw_place {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char url[128];
} raw_place;
#define RAW_PLACE                                                                                  \
    {                                                                                              \
        .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER                     \
    }

/* Rank 0 of a group on a free port, which is told to place; name, world_size and urls. */
void raw_listen_config(ep_group_config *config, const char *name, uint32_t world_size,
                       raw_place *place);
/* Waits for it. */
const char *raw_place_url(raw_place *place);

#endif
