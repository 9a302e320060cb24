/* SPDX-License-Identifier: Apache-2.0 */
/* Scenes of fuzz_group.c: who the rank is, and what honest ranks would send it. */
#ifndef EP_TESTS_FUZZ_GROUP_SCENE_H
#define EP_TESTS_FUZZ_GROUP_SCENE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "group/group_frame.h"

#define RANKS_MAX 3
#define LOCAL 2 /* experts of each rank */
#define ROW_BYTES 32
#define CONNECTIONS 4
#define CALLS 2
#define HEAD_BYTES 6

/* Connection in the lowest two bits. */
enum {
    RECORD_HELLO, /* changes (place 2, value 1) of a good one */
    /* kind, flags, number, generation, origin, changes of membership and rank; payload */
    RECORD_FRAME,
    RECORD_ROWS,   /* the same, but the payload's record is put before it */
    RECORD_BROKEN, /* a frame's bytes as they are */
    RECORD_CLOSE,
    RECORD_KINDS
};

/* The other ranks in ascending order have the first connections; ours dials those below it. The
 * rest are strangers. */
typedef struct group_scene {
    uint32_t world;
    uint32_t rank;
    const char *hosts[RANKS_MAX];
    bool by_host;
    bool pair; /* of tensor parallelism */
} group_scene;
#define GROUP_SCENES 6
extern const group_scene group_scenes[GROUP_SCENES];

/* What the rank itself sent in an honest run: the records of its calls, and its first rows for each
 * connection. */
typedef struct group_seen {
    uint8_t record[CALLS][EP_GROUP_RECORD_BYTES];
    uint8_t body[CONNECTIONS][4096];
    size_t body_bytes[CONNECTIONS];
} group_seen;
extern group_seen group_scenes_seen[GROUP_SCENES];

/*
 * An honest script. calls: how many the others take part in. oddity: a frame of this kind comes
 * before, with a text; one kind more: a stranger; 0: none.
 */
size_t group_script_put(size_t scene, int calls, uint8_t oddity, uint8_t *out);

#endif
