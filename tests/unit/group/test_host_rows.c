/* SPDX-License-Identifier: Apache-2.0 */
/* Hosts and gateways; a host's frame against the frames of a fullmesh, and against damage. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "group/group_host_rows.h"
#include "group/group_hosts.h"

static const char *name_of(const void *arg, uint32_t rank)
{
    return ((const char *const *)arg)[rank];
}

static void build(const char *const *names, uint32_t ranks, const uint32_t *members, uint32_t count,
                  ep_group_hosts *out)
{
    uint32_t same[EP_GROUP_WORLD_MAX];
    ep_group_hosts_match(name_of, names, ranks, same);
    ep_group_hosts_build(same, members, count, out);
}

Test(group_hosts, equal_names_share_a_host)
{
    static ep_group_hosts h;
    const char *names[] = {"a", "b", "", "a", "", "b", "a"};
    const uint32_t all[] = {0, 1, 2, 3, 4, 5, 6};
    build(names, 7, all, 7, &h);
    cr_assert_eq(h.count, 4);
    const uint32_t hosts[] = {0, 1, 2, 0, 3, 1, 0};
    for (uint32_t m = 0; m < 7; m++) {
        cr_expect_eq(h.host_of[m], hosts[m], "rank %u", m);
    }
    cr_expect(ep_group_host_ranks(&h, 0) == 3 && ep_group_host_ranks(&h, 3) == 1);
    cr_expect(h.list[0] == 0 && h.list[1] == 3 && h.list[2] == 6 && h.place_of[6] == 2);
    const uint32_t less[] = {6, 5, 0}; /* numbered anew, as elastic_info may */
    build(names, 7, less, 3, &h);
    cr_assert_eq(h.count, 2);
    cr_expect(ep_group_hosts_share(&h, 0, 2) && !ep_group_hosts_share(&h, 0, 1));
}

Test(group_hosts, gateways_are_spread)
{
    static ep_group_hosts h;
    const char *names[32];
    uint32_t all[32];
    for (uint32_t ranks_per_host = 1; ranks_per_host <= 8; ranks_per_host *= 2) {
        uint32_t took[32] = {0};
        for (uint32_t r = 0; r < 32; r++) {
            static char text[32][4];
            all[r] = r;
            text[r][0] = (char)('a' + r / ranks_per_host);
            names[r] = text[r];
        }
        build(names, 32, all, 32, &h);
        for (uint32_t s = 0; s < 32; s++) {
            for (uint32_t host = 0; host < h.count; host++) {
                uint32_t gateway = ep_group_gateway(&h, s, host);
                cr_assert_eq(h.host_of[gateway], host);
                if (host == h.host_of[s]) {
                    cr_expect_eq(gateway, s);
                } else {
                    took[gateway]++;
                }
            }
        }
        for (uint32_t r = 0; r < 32; r++) {
            cr_expect_eq(took[r], h.count - 1, "rank %u of hosts of %u takes in %u frames", r,
                         ranks_per_host, took[r]);
        }
    }
    /* One large host, and others of one rank each: they take turns. */
    const char *uneven[] = {"x", "x", "x", "x", "1", "2", "3", "4"};
    build(uneven, 8, all, 8, &h);
    uint32_t seen = 0;
    for (uint32_t s = 4; s < 8; s++) {
        seen |= 1u << ep_group_gateway(&h, s, 0);
    }
    cr_expect_eq(seen, 15);
}

/* ---- a host's frame ---- */

#define TOKENS 9
#define TOP_K 4
#define HIDDEN 5
#define EXPERTS 13
#define RANKS 4

typedef struct sent {
    float x[TOKENS * HIDDEN];
    int32_t ids[TOKENS * TOP_K];
    float weights[TOKENS * TOP_K];
    ep_batch batch;
    ep_layer_shape shape;
    ep_group_layout layout;
    ep_group_packer packer;
    uint32_t offsets[EXPERTS + 1];
    uint32_t order[TOKENS * TOP_K];
    uint32_t row_of_token[TOKENS];
    ep_group_call told;
} sent;

static void prepare(sent *s, bool quantise)
{
    memset(s, 0, sizeof(*s));
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        s->x[i] = (float)((i * 37) % 101) - 50;
    }
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        s->ids[i] = (i / TOP_K * 5 + i % TOP_K * 3) % EXPERTS;
        s->weights[i] = (float)i;
    }
    s->ids[6] = -1;
    s->shape = (ep_layer_shape){.hidden = HIDDEN, .experts = EXPERTS, .top_k = TOP_K};
    s->layout = (ep_group_layout){.ranks = RANKS, .experts = EXPERTS};
    s->batch = (ep_batch){.tokens = TOKENS,
                          .top_k = TOP_K,
                          .hidden = HIDDEN,
                          .x = {s->x, 4 * HIDDEN, EP_DTYPE_F32},
                          .ids = {s->ids, 4 * TOP_K, EP_DTYPE_I32},
                          .scales = {s->weights, 4 * TOP_K, EP_DTYPE_F32},
                          .dispatch_quant = quantise ? EP_DISPATCH_INT8 : EP_DISPATCH_PLAIN};
    s->packer = (ep_group_packer){.batch = &s->batch,
                                  .slots_per_token = TOP_K,
                                  .row_bytes = quantise ? HIDDEN : 4 * HIDDEN,
                                  .quantise = quantise};
    s->told = (ep_group_call){.hidden = HIDDEN,
                              .tokens = TOKENS,
                              .top_k = TOP_K,
                              .dtype = EP_DTYPE_F32,
                              .quant_mode = quantise ? 2 : 0};
    ep_group_sort(&s->batch, &s->shape, &s->layout, 0, s->offsets, s->order);
}

/* What a fullmesh sends to a rank. */
static uint8_t *straight(sent *s, uint32_t rank, bool weights, size_t *out_bytes)
{
    uint32_t first = ep_group_first_bucket(&s->layout, rank);
    uint32_t local = ep_group_local_experts(&s->layout, rank);
    uint32_t rows = s->offsets[first + local] - s->offsets[first];
    ep_group_dispatch_parts parts =
        ep_group_dispatch_parts_of(local, rows, s->packer.row_bytes, s->packer.quantise, weights);
    uint8_t *body = calloc(1, parts.bytes + 1);
    uint32_t done = 0;
    for (uint32_t e = 0; e < local; e++) {
        uint32_t begin = s->offsets[first + e];
        uint32_t count = s->offsets[first + e + 1] - begin;
        memcpy(body + 4 * e, &count, 4);
        ep_group_row_out out = {.rows = body + parts.rows + done * s->packer.row_bytes,
                                .stride_bytes = (int64_t)s->packer.row_bytes,
                                .scales = (float *)(void *)(body + parts.scales) + done,
                                .weights =
                                    weights ? (float *)(void *)(body + parts.weights) + done : NULL,
                                .tokens = (uint32_t *)(void *)(body + parts.tokens) + done,
                                .slots = (uint32_t *)(void *)(body + parts.slots) + done};
        ep_group_pack(&s->packer, first + e, s->order + begin, count, &out);
        done += count;
    }
    *out_bytes = parts.bytes;
    return body;
}

static uint8_t *pack(sent *s, const uint32_t *members, uint32_t count, bool weights,
                     ep_group_host_shape *out_shape, size_t *out_bytes)
{
    static const uint32_t ranks[RANKS] = {10, 11, 12, 13};
    ep_group_host_sender sender = {.packer = &s->packer,
                                   .layout = &s->layout,
                                   .offsets = s->offsets,
                                   .order = s->order,
                                   .members = members,
                                   .ranks = ranks,
                                   .count = count,
                                   .weights = weights,
                                   .row_of_token = s->row_of_token};
    s->told.has_expert_scales = weights;
    *out_shape = ep_group_host_plan(&sender);
    *out_bytes = ep_group_host_parts_of(out_shape).bytes;
    uint8_t *body = aligned_alloc(64, ep_align_up(*out_bytes + 1, 64));
    memset(body, 0xa5, *out_bytes);
    ep_group_host_fill(&sender, out_shape, body);
    return body;
}

static void compare(bool quantise, bool weights)
{
    static sent s;
    const uint32_t members[] = {3, 1};
    ep_group_host_shape shape;
    ep_group_host_body body;
    ep_group_host_part part;
    ep_error error;
    size_t bytes;
    prepare(&s, quantise);
    uint8_t *data = pack(&s, members, 2, weights, &shape, &bytes);
    cr_assert_eq(ep_group_host_open(&s.told, data, bytes, &body, &error), EP_OK, "%s", error.text);
    cr_expect(shape.rows < shape.slots, "some token has two experts there");
    for (uint32_t i = 0; i < 2; i++) {
        size_t should_bytes;
        uint8_t *should = straight(&s, members[i], weights, &should_bytes);
        cr_assert(ep_group_host_next(&body, i, &part));
        cr_expect_eq(part.rank, 10 + members[i]);
        cr_assert_eq(ep_group_host_part_bytes(&body, &part), should_bytes);
        uint8_t *is = malloc(should_bytes);
        memset(is, 0x5a, should_bytes);
        ep_group_host_part_fill(&body, &part, is);
        cr_expect_eq(memcmp(is, should, should_bytes), 0, "part %u, quantise %d, weights %d", i,
                     quantise, weights);
        free(is);
        free(should);
    }
    cr_expect(!ep_group_host_next(&body, 2, &part));
    free(data);
}

Test(group_host_rows, parts_are_the_frames_of_a_fullmesh)
{
    compare(false, false);
    compare(false, true);
    compare(true, false);
    compare(true, true);
}

Test(group_host_rows, nothing_for_anybody)
{
    static sent s;
    const uint32_t members[] = {2, 1, 0};
    ep_group_host_shape shape;
    ep_group_host_body body;
    ep_group_host_part part;
    size_t bytes;
    prepare(&s, true);
    s.batch.tokens = 0;
    ep_group_sort(&s.batch, &s.shape, &s.layout, 0, s.offsets, s.order);
    uint8_t *data = pack(&s, members, 3, true, &shape, &bytes);
    cr_expect(shape.rows == 0 && shape.slots == 0);
    cr_assert_eq(ep_group_host_open(&s.told, data, bytes, &body, NULL), EP_OK);
    for (uint32_t i = 0; ep_group_host_next(&body, i, &part); i++) {
        cr_expect(part.slots == 0 &&
                  part.local_experts == ep_group_local_experts(&s.layout, members[i]));
    }
    free(data);
}

/* Nothing is made of rows that the sender's call cannot have. */
Test(group_host_rows, rows_of_another_call)
{
    static sent s;
    const uint32_t members[] = {3, 1};
    ep_group_host_shape shape;
    ep_group_host_body body;
    size_t bytes;
    prepare(&s, false);
    uint8_t *data = pack(&s, members, 2, true, &shape, &bytes);
    const ep_group_call good = s.told;
    const struct {
        int64_t *field;
        int64_t value;
    } bad[] = {{&s.told.tokens, (int64_t)shape.rows - 1},
               {&s.told.tokens, -1},
               {&s.told.hidden, HIDDEN + 1},
               {&s.told.hidden, -HIDDEN},
               {&s.told.dtype, EP_DTYPE_BF16},
               {&s.told.dtype, 0},
               {&s.told.dtype, INT64_MAX},
               {&s.told.quant_mode, 2},
               {&s.told.has_expert_scales, 0},
               {&s.told.top_k, 0},
               {&s.told.top_k, INT64_MAX},
               {&s.told.shared_experts, -1}};
    cr_assert_eq(ep_group_host_open(&s.told, data, bytes, &body, NULL), EP_OK);
    for (size_t i = 0; i < EP_ARRAY_COUNT(bad); i++) {
        s.told = good;
        *bad[i].field = bad[i].value;
        cr_expect_eq(ep_group_host_open(&s.told, data, bytes, &body, NULL), EP_ERR_PROTOCOL, "%zu",
                     i);
    }
    free(data);
}

/* Whatever a word of it says, it is refused or can be taken apart; every cut is refused. */
Test(group_host_rows, damage)
{
    static const uint32_t values[] = {0, 1, 2, 3, 255, 65536, INT32_MAX, 0x80000000u, UINT32_MAX};
    static sent s;
    const uint32_t members[] = {1, 2};
    ep_group_host_shape shape;
    ep_group_host_body body;
    size_t bytes;
    uint32_t refused = 0;
    prepare(&s, true);
    uint8_t *data = pack(&s, members, 2, true, &shape, &bytes);
    size_t numbers = ep_group_host_parts_of(&shape).slots;
    for (size_t at = 0; at < numbers; at += 4) {
        for (size_t v = 0; v < EP_ARRAY_COUNT(values); v++) {
            uint32_t was;
            memcpy(&was, data + at, 4);
            memcpy(data + at, &values[v], 4);
            ep_error error = {.text = ""};
            ep_err err = ep_group_host_open(&s.told, data, bytes, &body, &error);
            ep_group_host_part part;
            cr_expect(err == EP_OK ||
                          (err == EP_ERR_PROTOCOL && strstr(error.text, "not well formed") != NULL),
                      "%s", error.text);
            refused += err != EP_OK;
            for (uint32_t i = 0; err == EP_OK && ep_group_host_next(&body, i, &part); i++) {
                size_t part_bytes = ep_group_host_part_bytes(&body, &part);
                cr_assert_leq(part_bytes, 1u << 20);
                uint8_t *out = malloc(part_bytes);
                ep_group_host_part_fill(&body, &part, out);
                free(out);
            }
            memcpy(data + at, &was, 4);
        }
    }
    cr_expect_gt(refused, 100);
    for (size_t cut = 0; cut < bytes; cut++) {
        uint8_t *less = malloc(cut + 1);
        memcpy(less, data, cut);
        cr_expect_eq(ep_group_host_open(&s.told, less, cut, &body, NULL), EP_ERR_PROTOCOL,
                     "%zu bytes", cut);
        free(less);
    }
    free(data);
}
