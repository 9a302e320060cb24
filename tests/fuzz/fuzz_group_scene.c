/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz_group_scene.h"

#include <stdio.h>
#include <string.h>

#include "fuzz_script.h"
#include "group/group_host_rows.h"

group_seen group_scenes_seen[GROUP_SCENES];

const group_scene group_scenes[GROUP_SCENES] = {
    {3, 0, {"", "", ""}, false, false},
    {3, 1, {"", "", ""}, false, false},
    {3, 2, {"", "", ""}, false, false},
    {3, 1, {"a", "a", "b"}, true, false}, /* it passes on what rank 2 sends */
    {3, 0, {"a", "b", "a"}, true, false}, /* rank 2 passes on what rank 1 sends */
    {2, 0, {"", "", ""}, false, true},
};

static size_t put_frame(uint8_t *out, size_t connection, int record, const uint8_t head[HEAD_BYTES],
                        const void *payload, size_t bytes)
{
    static uint8_t rest[8192];
    memcpy(rest, head, HEAD_BYTES);
    memcpy(rest + HEAD_BYTES, payload, bytes);
    return fuzz_record_put(out, (uint8_t)(record * CONNECTIONS + (int)connection), rest,
                           HEAD_BYTES + bytes);
}

static size_t put_meeting(const group_scene *s, uint8_t *out)
{
    static const uint8_t table_head[HEAD_BYTES] = {EP_GROUP_FRAME_TABLE},
                         welcome[HEAD_BYTES] = {EP_GROUP_FRAME_WELCOME};
    size_t at = 0;
    char table[256];
    char *end = table;
    for (uint32_t r = 0; r < s->world; r++) {
        end += sprintf(end, "loopback://fuzz-group-%u", r) + 1;
        end = stpcpy(end, s->hosts[r]) + 1;
    }
    for (size_t c = 0; c < s->world - 1; c++) {
        if (c >= s->rank) {
            at += fuzz_record_put(out + at, (uint8_t)(RECORD_HELLO * CONNECTIONS + c), "", 0);
        } else if (c == 0) {
            at += put_frame(out + at, c, RECORD_FRAME, table_head, table, (size_t)(end - table));
        } else {
            at += put_frame(out + at, c, RECORD_FRAME, welcome, "", 0);
        }
    }
    return at;
}

/* No rows; of a pair, what the other has too. */
static size_t put_dispatch(const group_scene *s, size_t c, uint8_t *out)
{
    static const uint8_t none[4096];
    static const uint8_t rows[HEAD_BYTES] = {EP_GROUP_FRAME_ROWS},
                         host_rows[HEAD_BYTES] = {EP_GROUP_FRAME_HOST_ROWS};
    static const uint8_t passed_on[HEAD_BYTES] = {EP_GROUP_FRAME_ROWS,
                                                  EP_GROUP_FRAME_FLAG_PASSED_ON, 0, 0, 1};
    const group_seen *seen = &group_scenes_seen[s - group_scenes];
    size_t bytes = ep_group_dispatch_parts_of(LOCAL, 0, ROW_BYTES, false, true).bytes;
    if (s->pair) {
        return put_frame(out, c, RECORD_ROWS, rows, seen->body[c], seen->body_bytes[c]);
    }
    if (s->by_host && s->rank == 1 && c == 1) {
        ep_group_host_shape shape = {
            .ranks = 2, .experts = 2 * LOCAL, .weights = true, .row_bytes = ROW_BYTES};
        uint32_t body[256] = {shape.ranks, shape.experts, 0,     0, 2, 0,     ROW_BYTES,
                              0,           [16] = 0,      LOCAL, 0, 1, LOCAL, 0};
        return put_frame(out, c, RECORD_ROWS, host_rows, body,
                         ep_group_host_parts_of(&shape).bytes);
    }
    if (s->by_host && s->rank == 0 && c == 0) { /* rank 1's way is through rank 2 */
        return put_frame(out, 1, RECORD_ROWS, passed_on, none, bytes);
    }
    return put_frame(out, c, RECORD_ROWS, rows, none, bytes);
}

/* Each row as it came. */
static size_t put_combine(const group_scene *s, size_t c, uint8_t *out)
{
    static const uint8_t head[HEAD_BYTES] = {EP_GROUP_FRAME_ROWS, 0, 1};
    static uint8_t body[4096];
    const uint8_t *got = group_scenes_seen[s - group_scenes].body[c];
    uint32_t counts[LOCAL] = {0};
    if (!s->by_host) {
        memcpy(counts, got, sizeof(counts));
    }
    uint64_t rows = counts[0] + counts[1];
    ep_group_dispatch_parts from =
        ep_group_dispatch_parts_of(LOCAL, (uint32_t)rows, ROW_BYTES, false, true);
    ep_group_combine_parts to = ep_group_combine_parts_of((uint32_t)rows, ROW_BYTES);
    memset(body, 0, sizeof(body));
    memcpy(body, &rows, sizeof(rows));
    memcpy(body + to.tokens, got + from.tokens, 4 * rows);
    memcpy(body + to.slots, got + from.slots, 4 * rows);
    memcpy(body + to.rows, got + from.rows, ROW_BYTES * rows);
    return put_frame(out, c, RECORD_ROWS, head, body, to.bytes);
}

size_t group_script_put(size_t scene, int calls, uint8_t oddity, uint8_t *out)
{
    static const char text[] = "\x0e\0\0\0rank 9 is gone";
    const group_scene *s = &group_scenes[scene];
    out[0] = (uint8_t)scene;
    size_t at = 1 + put_meeting(s, out + 1);
    if (oddity > EP_GROUP_FRAME_KIND_LAST) { /* a stranger */
        at += fuzz_record_put(out + at, RECORD_HELLO * CONNECTIONS + 3, "", 0);
        at += fuzz_record_put(out + at, RECORD_BROKEN * CONNECTIONS + 3, text, sizeof(text));
    } else if (oddity > 0) {
        const uint8_t head[HEAD_BYTES] = {oddity, EP_GROUP_FRAME_FLAG_CRC, 0, 0, 1};
        at += put_frame(out + at, s->world - 2, RECORD_FRAME, head, text, sizeof(text) - 1);
    }
    for (size_t c = 0; c < s->world - 1 && calls > 0; c++) {
        at += put_dispatch(s, c, out + at);
    }
    for (size_t c = 0; c < s->world - 1 && calls > 1 && !s->pair; c++) {
        at += put_combine(s, c, out + at);
    }
    return at;
}
