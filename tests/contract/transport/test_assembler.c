/* SPDX-License-Identifier: Apache-2.0 */
/* A stream of frames, cut at every place a seed can choose, comes out as the frames it was made
 * of. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/random.h"
#include "lane_fixture.h"
#include "transport/lane_assembler.h"

#define FRAMES 4000
#define LIVELY_BYTES 9000

typedef struct stream {
    ep_assembler assembler;
    ep_lane_limits limits;
    uint64_t random;
    uint8_t *bytes;
    size_t count;
    size_t at;
    uint64_t frames; /* come out */
} stream;

static size_t below(stream *s, size_t limit)
{
    return (size_t)(ep_splitmix64(&s->random) % limit);
}

/* Runs of equal sizes, which are received ahead, between mixed ones. */
static void fill(stream *s)
{
    size_t size = 64;
    s->bytes = malloc((size_t)FRAMES * (LIVELY_BYTES + 64));
    cr_assert_not_null(s->bytes);
    for (uint64_t i = 0; i < FRAMES; i++) {
        if (below(s, 3) == 0) {
            size = 64 + below(s, below(s, 2) == 0 ? 200 : LIVELY_BYTES);
        }
        fixture_fill(s->bytes + s->count, i, size);
        s->count += size;
    }
}

/* One receive of a random length, as a socket gives it. */
static void receive_some(stream *s)
{
    struct iovec room[EP_ASSEMBLER_IOVS_MAX];
    unsigned count = ep_assembler_room(&s->assembler, &s->limits, room);
    size_t space = 0;
    for (unsigned i = 0; i < count; i++) {
        cr_assert_gt(room[i].iov_len, 0u);
        space += room[i].iov_len;
    }
    size_t got = below(s, 4) == 0   ? 1 + below(s, 100)
                 : below(s, 2) == 0 ? space
                                    : 1 + below(s, space);
    got = got < space ? got : space;
    got = got < s->count - s->at ? got : s->count - s->at;
    size_t left = got;
    for (unsigned i = 0; i < count && left > 0; i++) {
        size_t piece = left < room[i].iov_len ? left : room[i].iov_len;
        memcpy(room[i].iov_base, s->bytes + s->at, piece);
        s->at += piece;
        left -= piece;
    }
    ep_assembler_received(&s->assembler, got);
}

static void take_frames(stream *s)
{
    ep_error error = {.code = EP_OK};
    ep_buffer *frame = NULL;
    for (;;) {
        ep_assembler_step step =
            ep_assembler_next(&s->assembler, &s->limits, true, "peer", &frame, &error);
        if (step == EP_ASSEMBLER_MORE) {
            return;
        }
        cr_assert(step == EP_ASSEMBLER_BEGUN || step == EP_ASSEMBLER_FRAME, "after %llu frames: %s",
                  (unsigned long long)s->frames, error.text);
        if (step == EP_ASSEMBLER_FRAME) {
            const char *wrong = fixture_verify(frame, s->frames);
            cr_assert_null(wrong, "frame %llu: %s", (unsigned long long)s->frames, wrong);
            ep_buffer_unref(frame);
            s->frames++;
        }
    }
}

static void cut_at_will(bool receives_ahead, uint64_t seed)
{
    stream s = {.random = seed};
    ep_buffer_pool_stats stats;
    cr_assert_eq(ep_buffer_pool_create(0, (size_t)1 << 20, &s.limits.pool), EP_OK);
    s.limits.frame_bytes = fixture_frame_bytes;
    s.limits.prefix_bytes = EP_FRAME_PREFIX_BYTES;
    s.limits.frame_bytes_max = FRAME_BYTES_MAX;
    cr_assert_eq(ep_assembler_init(&s.assembler, receives_ahead), EP_OK);
    fill(&s);
    while (s.at < s.count) {
        receive_some(&s);
        take_frames(&s);
        if (below(&s, 3) == 0) {
            ep_assembler_rest(&s.assembler);
        }
    }
    cr_assert_eq(s.frames, (uint64_t)FRAMES);
    ep_assembler_fini(&s.assembler);
    ep_buffer_pool_read_stats(s.limits.pool, &stats);
    cr_assert_eq(stats.lent_bytes, 0u);
    ep_buffer_pool_destroy(s.limits.pool);
    free(s.bytes);
}

Test(assembler, makes_frames_of_a_stream_cut_at_will)
{
    for (uint64_t seed = 1; seed <= 10; seed++) {
        cut_at_will(false, seed);
        cut_at_will(true, seed);
    }
}
