/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 2 of three speaks by hand. As the only rank of its host it sends bad frames for the host of
 * ranks 0 and 1, where rank 1 is their gateway: both must learn what is wrong with rank 2, at once.
 * As rank 0's neighbour it is the gateway for rank 1's rows, and passes them on late, not at all,
 * or what is not its to pass on.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "case_draw.h"
#include "group/group_host_rows.h"
#include "rank_call.h"
#include "raw_rank.h"

#define RANKS 3
#define RAW 2
#define EXPERTS 6
#define ROW_BYTES 32
#define DEADLINE_US 20000000
#define NOT_ASKED ((ep_err)-1)

static const char *const apart[RANKS] = {"a", "a", "b"};    /* rank 1 takes in what rank 2 sends */
static const char *const together[RANKS] = {"a", "b", "a"}; /* rank 2 takes in what rank 1 sends */

typedef struct attack {
    const char *name;
    const char *const *hosts;
    void (*spoil)(raw_frame *f); /* the frame for the host, or what is passed on */
    ep_err expected[2];          /* of ranks 0 and 1, or NOT_ASKED */
    const char *text;
    bool late; /* passes on when rank 1 has left */
    bool straight;
    bool to_0;        /* what is for rank 1 to take in */
    bool own_host;    /* a frame for rank 0's and its own host */
    bool overtaken;   /* what it passes on comes after rank 1's next call, without rank 2 */
    const char *then; /* what the next call fails with, UNAVAILABLE */
} attack;

typedef struct scene {
    const oracle_case *c;
    const oracle_case *less; /* without rank 2 */
    const attack *attack;
    raw_place place;
    pthread_mutex_t lock; /* of group_0 */
    ep_group *group_0;
    pthread_barrier_t both;
    bool failed;
} scene;

typedef struct good_rank {
    scene *scene;
    uint32_t rank;
    pthread_t thread;
} good_rank;

/* ---- ways to be bad ---- */

static uint32_t *numbers(raw_frame *f, size_t offset)
{
    return (uint32_t *)(void *)(f->bytes + EP_GROUP_BODY_OFFSET + offset);
}

#define SPOIL(function, statement)                                                                 \
    static void function(raw_frame *f)                                                             \
    {                                                                                              \
        statement;                                                                                 \
    }
SPOIL(nothing_bad, (void)f)
SPOIL(bad_crc, f->head.flags = EP_GROUP_FRAME_FLAG_CRC; f->head.payload_crc = 1; f->keep_crc = true)
SPOIL(other_membership, f->head.membership ^= 1)
SPOIL(no_body, f->size = EP_GROUP_BODY_OFFSET)
SPOIL(no_record, f->size = EP_GROUP_FRAME_FIXED_BYTES + 8)
SPOIL(too_long, f->size += 64)
SPOIL(fields_missing, memset(f->bytes + EP_GROUP_FRAME_FIXED_BYTES, 3, 1))
SPOIL(rows_without_slots, numbers(f, 0)[3] = 1)
SPOIL(another_host, numbers(f, 64)[0] = RAW)
SPOIL(nobody, numbers(f, 64)[0] = 1000)
SPOIL(one_twice, numbers(f, 64)[3] = 0)
SPOIL(half, f->cut = true)
SPOIL(five_ahead, f->head.number += 5)
SPOIL(twice, f->twice = true)
SPOIL(long_row, numbers(f, 0)[6] = 2 * ROW_BYTES)
SPOIL(of_itself, f->head.origin = 0)
SPOIL(of_nobody, f->head.origin = 1000)
SPOIL(lost, f->head.kind = EP_GROUP_FRAME_LOST; f->size = EP_GROUP_FRAME_FIXED_BYTES)
SPOIL(failed, f->head.kind = EP_GROUP_FRAME_FAILED; f->size = EP_GROUP_FRAME_FIXED_BYTES)

#define GONE                                                                                       \
    {                                                                                              \
        EP_ERR_UNAVAILABLE, EP_ERR_UNAVAILABLE                                                     \
    }
/* clang-format off */
static const attack attacks[] = {
    {"nothing", apart, nothing_bad, {EP_OK, EP_OK}, .text = ""},
    {"a wrong CRC", apart, bad_crc, {EP_ERR_DATA_LOSS, EP_ERR_DATA_LOSS},
     .text = "rank 2: its frame for a host came to rank 1 damaged"},
    {"another membership", apart, other_membership, {EP_ERR_DATA_LOSS, EP_ERR_DATA_LOSS},
     .text = "rank 2: "},
    {"no body", apart, no_body, {EP_ERR_PROTOCOL, EP_ERR_PROTOCOL},
     .text = "rank 2: its frame for a host is not well formed"},
    {"no record", apart, no_record, {EP_ERR_DATA_LOSS, EP_ERR_DATA_LOSS}, .text = "rank 2: "},
    {"more bytes", apart, too_long, {EP_ERR_PROTOCOL, EP_ERR_PROTOCOL},
     .text = "rank 2: its frame"},
    {"a record of 3 fields", apart, fields_missing, {EP_ERR_PROTOCOL, EP_ERR_PROTOCOL},
     .text = "parameter record"},
    {"rows without slots", apart, rows_without_slots, {EP_ERR_PROTOCOL, EP_ERR_PROTOCOL},
     .text = "rank 2: its frame"},
    {"rows for another host", apart, another_host, {EP_ERR_PROTOCOL, EP_ERR_PROTOCOL},
     .text = "has rows for rank 2"},
    {"rows for nobody", apart, nobody, {EP_ERR_PROTOCOL, EP_ERR_PROTOCOL},
     .text = "has rows for rank 1000"},
    {"a rank twice", apart, one_twice, {EP_ERR_PROTOCOL, EP_ERR_PROTOCOL},
     .text = "names rank 0 twice"},
    {"half a frame", apart, half, {EP_ERR_UNAVAILABLE, EP_ERR_UNAVAILABLE}, .text = "rank 2"},
    {"rows that go straight", apart, nothing_bad, {NOT_ASKED, EP_ERR_PROTOCOL},
     .text = "rank 2 brought the rows of rank 2", .straight = true},
    {"nothing as a gateway", together, nothing_bad, {EP_OK, EP_OK}, .text = ""},
    {"what had left before", together, nothing_bad, {EP_OK, EP_OK}, .text = "", .late = true},
    {"half of what it passes on", together, half, {EP_ERR_UNAVAILABLE, NOT_ASKED},
     .text = "rank 2 is gone"},
    {"its neighbour's own rows", together, of_itself, {EP_ERR_UNAVAILABLE, NOT_ASKED},
     .text = "it passed on rows that do not come through it"},
    {"rows of nobody", together, of_nobody, {EP_ERR_UNAVAILABLE, NOT_ASKED},
     .text = "it passed on rows that do not come through it"},
    {"a loss", together, lost, {EP_ERR_UNAVAILABLE, NOT_ASKED}, .text = "rank 1 is gone ("},
    {"a failure", together, failed, {EP_ERR_UNKNOWN, EP_OK}, .text = "rank 1: "},
    {"a number that is not its turn", apart, five_ahead, GONE, .text = "rank 2 is gone ("},
    {"a frame twice", apart, twice, {EP_OK, EP_OK}, .text = "", .then = "rank 2 is gone ("},
    {"rows for a host to the wrong rank of it", apart, nothing_bad,
     {EP_ERR_PROTOCOL, EP_ERR_PROTOCOL},
     .text = "rank 2: its frame for a host came to rank 0", .to_0 = true},
    {"a frame for a host from a neighbour", together, nothing_bad, GONE, .text = "rank 2 is gone (",
     .own_host = true},
    {"rows that are overtaken", together, nothing_bad, {EP_OK, EP_OK}, .text = "",
     .overtaken = true},
    {"half of rows that are overtaken", together, half, {EP_ERR_UNAVAILABLE, EP_OK},
     .text = "rank 2 is gone", .overtaken = true},
    {"a row longer than the call's", apart, long_row, {EP_ERR_PROTOCOL, EP_ERR_PROTOCOL},
     .text = "not its call's rows"},
    /* clang-format on */
};

/* ---- rank 2 ---- */

/* The frame of nothing for some ranks; got: any rank's, for its record. */
static void host_frame(const raw_frame *got, const uint32_t *ranks, uint32_t count, raw_frame *f)
{
    ep_group_host_shape shape = {.ranks = count,
                                 .experts = count * EXPERTS / RANKS,
                                 .weights = true,
                                 .row_bytes = ROW_BYTES};
    memset(f, 0, sizeof(*f));
    memcpy(f->bytes, got->bytes, EP_GROUP_BODY_OFFSET);
    f->head = got->head;
    f->head.kind = EP_GROUP_FRAME_HOST_ROWS;
    f->head.rank = RAW;
    f->size = EP_GROUP_BODY_OFFSET + ep_group_host_parts_of(&shape).bytes;
    uint32_t head[] = {shape.ranks, shape.experts, 0, 0, 2, 0, ROW_BYTES, 0};
    memcpy(numbers(f, 0), head, sizeof(head));
    for (uint32_t i = 0; i < count; i++) {
        numbers(f, 64)[3 * i] = ranks[i];
        numbers(f, 64)[3 * i + 1] = EXPERTS / RANKS;
    }
}

static void straight_frame(const raw_frame *got, raw_frame *f)
{
    memset(f, 0, sizeof(*f));
    memcpy(f->bytes, got->bytes, EP_GROUP_BODY_OFFSET);
    f->head = got->head;
    f->head.kind = EP_GROUP_FRAME_ROWS;
    f->head.rank = RAW;
    f->size = EP_GROUP_BODY_OFFSET +
              ep_group_dispatch_parts_of(EXPERTS / RANKS, 0, ROW_BYTES, false, true).bytes;
}

static bool attack_from_afar(const int fds[2], const attack *a, const raw_frame *got)
{
    static raw_frame f;
    const uint32_t both[] = {0, 1};
    if (!a->straight) {
        host_frame(got, both, 2, &f);
        a->spoil(&f);
        return raw_write(fds[a->to_0 ? 0 : 1], &f) && (!f.twice || raw_write(fds[1], &f));
    }
    straight_frame(got, &f);
    return raw_write(fds[0], &f) && raw_write(fds[1], &f);
}

static bool read_until(int fd, ep_group_frame_kind kind, raw_frame *f)
{
    while (raw_read(fd, f)) {
        if (f->head.kind == kind) {
            return true;
        }
    }
    return false;
}

/* Rank 0 has rank 1's frame of its next call, and has had it for longer than the loss of a
 * connection needs to be noticed. */
static void wait_until_overtaken(scene *s)
{
    ep_group_traffic traffic = {0};
    while (traffic.frames_received == 0) {
        usleep(2000);
        pthread_mutex_lock(&s->lock);
        if (s->group_0 != NULL) {
            ep_group_read_traffic(s->group_0, 1, &traffic);
        }
        pthread_mutex_unlock(&s->lock);
    }
    usleep(1300000); /* right without */
}

/* Its own frames are good; what it passes on of rank 1 may not be. from_1: rank 1's frame for this
 * host. */
static bool attack_as_gateway(scene *s, const int fds[2], raw_frame *from_1)
{
    const attack *a = s->attack;
    static raw_frame f;
    static raw_frame unused;
    const uint32_t one[] = {1};
    const uint32_t near[] = {0, RAW};
    if (a->own_host) {
        host_frame(from_1, near, 2, &f);
        return raw_write(fds[0], &f);
    }
    ep_group_host_body body;
    ep_group_host_part part;
    ep_group_call told;
    straight_frame(from_1, &f);
    bool good = raw_write(fds[0], &f);
    host_frame(from_1, one, 1, &f);
    good = good && raw_write(fds[1], &f);
    good =
        good &&
        ep_group_record_decode(from_1->bytes + EP_GROUP_FRAME_FIXED_BYTES, &told, NULL) == EP_OK &&
        ep_group_host_open(&told, from_1->bytes + EP_GROUP_BODY_OFFSET,
                           from_1->size - EP_GROUP_BODY_OFFSET, &body, NULL) == EP_OK &&
        ep_group_host_next(&body, 0, &part) && part.rank == 0;
    if (!good) {
        return false;
    }
    straight_frame(from_1, &f);
    f.head.flags = EP_GROUP_FRAME_FLAG_PASSED_ON;
    f.head.origin = 1;
    f.size = EP_GROUP_BODY_OFFSET + ep_group_host_part_bytes(&body, &part);
    ep_group_host_part_fill(&body, &part, f.bytes + EP_GROUP_BODY_OFFSET);
    a->spoil(&f);
    if (a->late) {
        good = read_until(fds[1], EP_GROUP_FRAME_BYE, &unused);
        usleep(20000); /* for rank 0 to have seen it too; right without */
    }
    if (a->overtaken) {
        wait_until_overtaken(s);
    }
    return good && raw_write(fds[0], &f);
}

/* Where rank 1 listens: the table is rank 0's URL and host, then rank 1's. */
static const char *url_of_rank_1(const raw_frame *table)
{
    const char *at = (const char *)table->bytes + EP_GROUP_FRAME_FIXED_BYTES;
    at += strlen(at) + 1;
    return at + strlen(at) + 1;
}

static bool play_badly(scene *s, int fds[2])
{
    static raw_frame table;
    static raw_frame got[2];
    ep_group_hello hello = {
        .world_size = RANKS, .rank = RAW, .name = "hostile", .url = "tcp://127.0.0.1:1"};
    snprintf(hello.host, sizeof(hello.host), "%s", s->attack->hosts[RAW]);
    fds[0] = raw_join(raw_place_url(&s->place), &hello, 0);
    if (fds[0] < 0 || !read_until(fds[0], EP_GROUP_FRAME_TABLE, &table)) {
        return false;
    }
    fds[1] = raw_join(url_of_rank_1(&table), &hello, table.head.membership);
    ep_group_frame_kind of_0 =
        s->attack->hosts == apart ? EP_GROUP_FRAME_HOST_ROWS : EP_GROUP_FRAME_ROWS;
    bool good = fds[1] >= 0 && read_until(fds[1], EP_GROUP_FRAME_HOST_ROWS, &got[1]) &&
                read_until(fds[0], of_0, &got[0]);
    return good && (s->attack->hosts == apart ? attack_from_afar(fds, s->attack, &got[1])
                                              : attack_as_gateway(s, fds, &got[1]));
}

/* ---- ranks 0 and 1 ---- */

static ep_group *create(scene *s, uint32_t rank)
{
    ep_group_config config;
    ep_group *group = NULL;
    ep_error error;
    const char *urls[1];
    raw_listen_config(&config, "hostile", RANKS, &s->place);
    if (rank > 0) {
        config.on_listening = NULL;
        config.urls = urls;
        urls[0] = raw_place_url(&s->place);
    }
    config.rank = rank;
    config.deadline_us = DEADLINE_US;
    config.host = s->attack->hosts[rank];
    if (ep_group_create(&config, &group, &error) != EP_OK) {
        fprintf(stderr, "rank %u: %s\n", rank, error.text);
        abort();
    }
    return group;
}

static void call_without_2(scene *s, uint32_t rank, ep_group *group)
{
    int32_t elastic[4 + 2 * RANKS] = {1, RANKS - 1, 0, s->less->experts, 0, 1, -1, 0, 1, -1};
    int64_t waited[RANKS] = {0};
    ep_error error = {.text = ""};
    rank_call call;
    rank_call_init_rows(&call, s->less, rank, 64);
    call.params.comm_alg = "hierarchy";
    call.params.elastic_info = ep_tensor_1d(elastic, EP_DTYPE_I32, 4 + 2 * RANKS);
    call.dispatch.performance_info = ep_tensor_1d(waited, EP_DTYPE_I64, RANKS);
    ep_err err = rank_call_dispatch(&call, group, &error);
    if (s->attack->expected[0] == EP_OK && (err != EP_OK || !rank_call_check_dispatch(&call))) {
        fprintf(stderr, "%s: rank %u without rank 2: %s: %s\n", s->attack->name, rank,
                ep_err_name(err), error.text);
        __atomic_store_n(&s->failed, true, __ATOMIC_RELAXED);
    }
    rank_call_free(&call);
}

static void *run_good(void *arg)
{
    good_rank *g = arg;
    scene *s = g->scene;
    const attack *a = s->attack;
    ep_group *group = create(s, g->rank);
    pthread_mutex_lock(&s->lock);
    s->group_0 = g->rank == 0 ? group : s->group_0;
    pthread_mutex_unlock(&s->lock);
    ep_error error = {.text = ""};
    rank_call call;
    rank_call_init_rows(&call, s->c, g->rank, 64);
    call.params.comm_alg = "hierarchy";
    ep_err err = rank_call_dispatch(&call, group, &error);
    ep_err expected = a->expected[g->rank];
    bool good = expected == NOT_ASKED ||
                (err == expected && (err == EP_OK || strstr(error.text, a->text) != NULL));
    good = good && (expected != EP_OK || rank_call_check_dispatch(&call));
    if (!good) {
        fprintf(stderr, "%s: rank %u: %s: %s\n", a->name, g->rank, ep_err_name(err), error.text);
        __atomic_store_n(&s->failed, true, __ATOMIC_RELAXED);
    }
    if (a->overtaken && err == EP_OK) {
        call_without_2(s, g->rank, group);
    }
    err = a->then == NULL ? EP_OK : rank_call_dispatch(&call, group, &error);
    if (a->then != NULL && (err != EP_ERR_UNAVAILABLE || strstr(error.text, a->then) == NULL)) {
        fprintf(stderr, "%s: rank %u, after it: %s: %s\n", a->name, g->rank, ep_err_name(err),
                error.text);
        __atomic_store_n(&s->failed, true, __ATOMIC_RELAXED);
    }
    rank_call_free(&call);
    if (a->to_0) { /* who leaves earlier would be another error */
        pthread_barrier_wait(&s->both);
    }
    pthread_mutex_lock(&s->lock);
    s->group_0 = g->rank == 0 ? NULL : s->group_0;
    pthread_mutex_unlock(&s->lock);
    ep_group_destroy(group);
    return NULL;
}

static bool run(const oracle_case *c, const oracle_case *less, const attack *a)
{
    scene s = {
        .c = c, .less = less, .attack = a, .place = RAW_PLACE, .lock = PTHREAD_MUTEX_INITIALIZER};
    good_rank ranks[2] = {{.scene = &s, .rank = 0}, {.scene = &s, .rank = 1}};
    int fds[2] = {-1, -1};
    pthread_barrier_init(&s.both, NULL, 2);
    for (int r = 0; r < 2; r++) {
        if (pthread_create(&ranks[r].thread, NULL, run_good, &ranks[r]) != 0) {
            abort();
        }
    }
    bool played = play_badly(&s, fds);
    for (int r = 0; r < 2; r++) {
        pthread_join(ranks[r].thread, NULL);
        close(fds[r]);
    }
    pthread_barrier_destroy(&s.both);
    if (!played) {
        fprintf(stderr, "%s: rank 2 could not play its part\n", a->name);
    }
    return played && !s.failed;
}

int main(void)
{
    oracle_case c = {.ranks = RANKS,
                     .experts = EXPERTS,
                     .top_k = 3,
                     .hidden = ROW_BYTES / 2,
                     .dtype = ORACLE_BF16};
    oracle_case less = {.ranks = RANKS - 1,
                        .experts = 4,
                        .top_k = 3,
                        .hidden = ROW_BYTES / 2,
                        .dtype = ORACLE_BF16};
    uint64_t state = 5;
    for (int r = 0; r < less.ranks; r++) {
        case_draw_batch(&state, &less, 6, &less.batch[r]);
    }
    for (int r = 0; r < RANKS; r++) {
        case_draw_batch(&state, &c, r == RAW ? 0 : 6, &c.batch[r]);
    }
    bool good = true;
    for (size_t i = 0; i < sizeof(attacks) / sizeof(attacks[0]); i++) {
        good = run(&c, &less, &attacks[i]) && good;
    }
    case_free(&c);
    case_free(&less);
    return good ? 0 : 1;
}
