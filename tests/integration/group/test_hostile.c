/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One of two ranks speaks the protocol badly, by hand over a socket: frames with counts beyond
 * their length, rows for slots that are not its own, damaged envelopes, frames out of order. Each
 * time the other rank's call must end with an error that names the rank, at once and without
 * reading past what came; and the group must still close.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "case_draw.h"
#include "group/group_rows.h"
#include "rank_call.h"
#include "rank_threads.h"
#include "raw_rank.h"

#define LOCAL 3 /* experts of each rank */
#define DEADLINE_US 20000000u

typedef raw_frame frame;

/* BY_INDEX: a combine with expand_idx; PAIR: the bad rank is the partner of a tensor-parallel pair
 */
typedef enum place { DISPATCH, COMBINE, BY_INDEX, PAIR } place;
static const char *const place_names[] = {"dispatch", "combine", "combine with expand_idx",
                                          "dispatch of a pair"};

typedef struct attack {
    const char *name;
    place where;
    void (*spoil)(frame *f);
    ep_err expected;
    const char *text; /* NULL: only "rank" */
} attack;

/* ---- ways to be bad; frames are valid before ---- */

static uint8_t *body(frame *f)
{
    return f->bytes + EP_GROUP_BODY_OFFSET;
}

static uint32_t *numbers(frame *f, size_t offset)
{
    return (uint32_t *)(void *)(body(f) + offset);
}

static void set_u64(uint8_t *at, uint64_t value)
{
    memcpy(at, &value, sizeof(value));
}

static uint64_t rows_back(frame *f)
{
    uint64_t rows;
    memcpy(&rows, body(f), sizeof(rows));
    return rows;
}

#define SPOIL(function, statement)                                                                 \
    static void function(frame *f)                                                                 \
    {                                                                                              \
        statement;                                                                                 \
    }
SPOIL(no_body, f->size = EP_GROUP_BODY_OFFSET)
SPOIL(no_record, f->size = EP_GROUP_FRAME_FIXED_BYTES + 8)
SPOIL(no_payload, f->size = EP_GROUP_FRAME_FIXED_BYTES)
SPOIL(count_without_rows, numbers(f, 0)[0] = 1)
SPOIL(counts_overflow, numbers(f, 0)[0] = UINT32_MAX; numbers(f, 0)[1] = 2)
SPOIL(count_is_most, numbers(f, 0)[2] = INT32_MAX)
SPOIL(too_long, f->size += 64)
SPOIL(fields_missing, set_u64(f->bytes + EP_GROUP_FRAME_FIXED_BYTES, 3))
SPOIL(fields_most, set_u64(f->bytes + EP_GROUP_FRAME_FIXED_BYTES, UINT64_MAX))
SPOIL(bad_crc, f->head.flags = EP_GROUP_FRAME_FLAG_CRC; f->head.payload_crc ^= 1;
      f->keep_crc = true)
SPOIL(other_number, f->head.number += 7)
SPOIL(other_generation, f->head.generation = UINT32_MAX; f->head.number = 0)
SPOIL(other_rank, f->head.rank = 0)
SPOIL(other_membership, f->head.membership ^= 1)
SPOIL(unknown_kind, f->head.kind = (ep_group_frame_kind)99)
SPOIL(hello_again, f->head.kind = EP_GROUP_FRAME_HELLO)
SPOIL(table_again, f->head.kind = EP_GROUP_FRAME_TABLE)
SPOIL(welcome, f->head.kind = EP_GROUP_FRAME_WELCOME)
SPOIL(failed_without_text, f->head.kind = EP_GROUP_FRAME_FAILED;
      f->size = EP_GROUP_FRAME_FIXED_BYTES)
SPOIL(failed_garbage, f->head.kind = EP_GROUP_FRAME_FAILED;
      memset(f->bytes + EP_GROUP_FRAME_FIXED_BYTES, 0xff, 900))
SPOIL(broken_garbage, f->head.kind = EP_GROUP_FRAME_BROKEN;
      memset(f->bytes + EP_GROUP_FRAME_FIXED_BYTES, 0xff, 900))
SPOIL(broken_by_another, f->head.kind = EP_GROUP_FRAME_BROKEN;
      strcpy((char *)f->bytes + EP_GROUP_FRAME_FIXED_BYTES + 4, "rank 9 is gone");
      memset(f->bytes + EP_GROUP_FRAME_FIXED_BYTES, EP_ERR_UNAVAILABLE, 1);
      memset(f->bytes + EP_GROUP_FRAME_FIXED_BYTES + 1, 0, 3);
      f->size = EP_GROUP_FRAME_FIXED_BYTES + 4 + 14)
SPOIL(bye, f->head.kind = EP_GROUP_FRAME_BYE)
SPOIL(no_magic, memset(f->bytes, 'x', EP_GROUP_FRAME_FIXED_BYTES); f->raw = true)
SPOIL(half, f->cut = true)
SPOIL(nothing, f->size = 0; f->cut = true; f->raw = true)
SPOIL(rows_most, set_u64(body(f), UINT64_MAX))
SPOIL(rows_wrap, set_u64(body(f), (uint64_t)1 << 61))
SPOIL(rows_more, set_u64(body(f), rows_back(f) + 1))

SPOIL(pair_counts_beyond, numbers(f, 64)[0] += 1000)
SPOIL(pair_counts_negative, numbers(f, 64)[0] = UINT32_MAX)
SPOIL(pair_rows_more, numbers(f, 0)[0] += 1)
SPOIL(pair_rows_most, numbers(f, 0)[0] = UINT32_MAX)
SPOIL(pair_experts, numbers(f, 0)[1] = 2)

/* A row for a token, or a slot, that cannot be. */
static void one_dispatch_row(frame *f, uint32_t token, uint32_t slot)
{
    ep_group_dispatch_parts parts = ep_group_dispatch_parts_of(LOCAL, 1, 32, false, true);
    memset(body(f), 0, parts.bytes);
    numbers(f, 0)[1] = 1;
    numbers(f, parts.tokens)[0] = token;
    numbers(f, parts.slots)[0] = slot;
    f->size = EP_GROUP_BODY_OFFSET + parts.bytes;
}
SPOIL(token_beyond, one_dispatch_row(f, 1000, 0))
SPOIL(slot_beyond, one_dispatch_row(f, 0, 1000))

/* tokens is the second last field of the record. */
static void told_tokens(frame *f, int64_t tokens)
{
    set_u64(f->bytes + EP_GROUP_FRAME_FIXED_BYTES + 8 + 8 * (size_t)EP_GROUP_CALL_COMPARED,
            (uint64_t)tokens);
    one_dispatch_row(f, UINT32_MAX, 0);
}
SPOIL(tokens_negative, told_tokens(f, -1))
SPOIL(tokens_most, told_tokens(f, INT64_MAX))

static ep_group_combine_parts back_parts(frame *f)
{
    return ep_group_combine_parts_of((uint32_t)rows_back(f), 32);
}
SPOIL(back_token_beyond, numbers(f, back_parts(f).tokens)[0] = UINT32_MAX)
SPOIL(back_slot_beyond, numbers(f, back_parts(f).slots)[0] = UINT32_MAX)
SPOIL(back_twice, numbers(f, back_parts(f).tokens)[1] = numbers(f, back_parts(f).tokens)[0];
      numbers(f, back_parts(f).slots)[1] = numbers(f, back_parts(f).slots)[0])

SPOIL(as_it_is, (void)f)
SPOIL(back_number_beyond, numbers(f, back_parts(f).tokens)[0] = 1000)

static void back_none(frame *f)
{
    memset(body(f), 0, 64);
    f->size = EP_GROUP_BODY_OFFSET + ep_group_combine_parts_of(0, 32).bytes;
}

static void of_dispatch(frame *f)
{
    f->head.number--;
}

static void announces_more(frame *f)
{
    ep_group_frame head = f->head;
    head.payload_bytes = (uint64_t)1 << 39;
    ep_group_frame_encode(&head, f->bytes);
    f->raw = true;
}

static const char broken_name[] = "broken by another rank";
static const attack attacks[] = {
    {"no body", DISPATCH, no_body, EP_ERR_PROTOCOL, NULL},
    {"no record", DISPATCH, no_record, EP_ERR_DATA_LOSS, NULL},
    {"no payload", DISPATCH, no_payload, EP_ERR_DATA_LOSS, NULL},
    {"a count without rows", DISPATCH, count_without_rows, EP_ERR_PROTOCOL, NULL},
    {"counts that overflow", DISPATCH, counts_overflow, EP_ERR_PROTOCOL, NULL},
    {"the greatest count", DISPATCH, count_is_most, EP_ERR_PROTOCOL, NULL},
    {"more bytes than counts say", DISPATCH, too_long, EP_ERR_PROTOCOL, NULL},
    {"a record of 3 fields", DISPATCH, fields_missing, EP_ERR_PROTOCOL, NULL},
    {"a record of all fields", DISPATCH, fields_most, EP_ERR_PROTOCOL, NULL},
    {"a token beyond the batch", DISPATCH, token_beyond, EP_ERR_PROTOCOL, NULL},
    {"a slot beyond K", DISPATCH, slot_beyond, EP_ERR_PROTOCOL, NULL},
    {"tokens -1", DISPATCH, tokens_negative, EP_ERR_PROTOCOL, NULL},
    {"the most tokens", DISPATCH, tokens_most, EP_ERR_PROTOCOL, NULL},
    {"a wrong CRC", DISPATCH, bad_crc, EP_ERR_DATA_LOSS, NULL},
    {"another number", DISPATCH, other_number, EP_ERR_UNAVAILABLE, NULL},
    {"another generation", DISPATCH, other_generation, EP_ERR_INVALID_ARGUMENT, NULL},
    {"another rank's number", DISPATCH, other_rank, EP_ERR_UNAVAILABLE, NULL},
    {"another membership", DISPATCH, other_membership, EP_ERR_DATA_LOSS, NULL},
    {"an unknown kind", DISPATCH, unknown_kind, EP_ERR_UNAVAILABLE, NULL},
    {"a second hello", DISPATCH, hello_again, EP_ERR_UNAVAILABLE, NULL},
    {"a table", DISPATCH, table_again, EP_ERR_UNAVAILABLE, NULL},
    {"a welcome to whom it did not dial", DISPATCH, welcome, EP_ERR_UNAVAILABLE, NULL},
    {"a failure without text", DISPATCH, failed_without_text, EP_ERR_UNKNOWN, NULL},
    {"a failure of garbage", DISPATCH, failed_garbage, EP_ERR_UNKNOWN, NULL},
    {"broken with garbage", DISPATCH, broken_garbage, EP_ERR_UNKNOWN, NULL},
    {broken_name, DISPATCH, broken_by_another, EP_ERR_UNAVAILABLE, "rank 9 is gone"},
    {"bye", DISPATCH, bye, EP_ERR_UNAVAILABLE, NULL},
    {"no magic", DISPATCH, no_magic, EP_ERR_UNAVAILABLE, NULL},
    {"half a frame", DISPATCH, half, EP_ERR_UNAVAILABLE, NULL},
    {"the end", DISPATCH, nothing, EP_ERR_UNAVAILABLE, NULL},
    {"512 GiB announced", DISPATCH, announces_more, EP_ERR_UNAVAILABLE, NULL},
    {"no body", COMBINE, no_body, EP_ERR_PROTOCOL, "whose count does not fit its length"},
    {"the greatest count", COMBINE, rows_most, EP_ERR_PROTOCOL, NULL},
    {"a count that wraps", COMBINE, rows_wrap, EP_ERR_PROTOCOL, NULL},
    {"one row more than came", COMBINE, rows_more, EP_ERR_PROTOCOL, NULL},
    {"no rows", COMBINE, back_none, EP_ERR_PROTOCOL, NULL},
    {"a token beyond the batch", COMBINE, back_token_beyond, EP_ERR_PROTOCOL, NULL},
    {"a slot beyond K", COMBINE, back_slot_beyond, EP_ERR_PROTOCOL, NULL},
    {"a row twice", COMBINE, back_twice, EP_ERR_PROTOCOL, NULL},
    {"the dispatch's number", COMBINE, of_dispatch, EP_ERR_UNAVAILABLE, NULL},
    {"half a frame", COMBINE, half, EP_ERR_UNAVAILABLE, NULL},
    {"the end", COMBINE, nothing, EP_ERR_UNAVAILABLE, NULL},
    {"nothing bad", BY_INDEX, as_it_is, EP_OK, NULL},
    {"a number beyond the run", BY_INDEX, back_number_beyond, EP_ERR_INVALID_ARGUMENT, NULL},
    {"the greatest number", BY_INDEX, back_token_beyond, EP_ERR_INVALID_ARGUMENT, NULL},
    {"an expert beyond the rank's", BY_INDEX, back_slot_beyond, EP_ERR_INVALID_ARGUMENT, NULL},
    {"a row twice", BY_INDEX, back_twice, EP_ERR_PROTOCOL, NULL},
    {"no rows", BY_INDEX, back_none, EP_ERR_INVALID_ARGUMENT, "no rank sent the row"},
    {"no body", PAIR, no_body, EP_ERR_PROTOCOL, NULL},
    {"counts beyond the rows", PAIR, pair_counts_beyond, EP_ERR_PROTOCOL, NULL},
    {"a negative count", PAIR, pair_counts_negative, EP_ERR_PROTOCOL, NULL},
    {"a row more than came", PAIR, pair_rows_more, EP_ERR_PROTOCOL, NULL},
    {"the most rows", PAIR, pair_rows_most, EP_ERR_PROTOCOL, NULL},
    {"two experts", PAIR, pair_experts, EP_ERR_PROTOCOL, NULL},
    {"the end", PAIR, nothing, EP_ERR_UNAVAILABLE, NULL},
};

/* ---- the bad rank ---- */

static int join_group(const char *url)
{
    static frame f;
    ep_group_hello hello = {
        .world_size = 2, .rank = 1, .name = "hostile", .url = "tcp://127.0.0.1:1"};
    int fd = raw_join(url, &hello, 0);
    if (fd >= 0 && (!raw_read(fd, &f) || f.head.kind != EP_GROUP_FRAME_TABLE)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Answers a dispatch with no rows of its own: the record is the other's, so both agree. */
static void answer_dispatch(const frame *got, frame *f)
{
    memcpy(f, got, sizeof(*f));
    f->head.rank = 1;
    memset(body(f), 0, 4096);
    f->size = EP_GROUP_BODY_OFFSET + ep_group_dispatch_parts_of(LOCAL, 0, 32, false, true).bytes;
}

/* Sends back every row as it came: an honest expert that changes nothing. */
static void answer_combine(frame *dispatched, const frame *got, bool by_index, frame *f)
{
    const uint32_t *counts = numbers(dispatched, 0);
    uint32_t rows = counts[0] + counts[1] + counts[2];
    ep_group_dispatch_parts from = ep_group_dispatch_parts_of(LOCAL, rows, 32, false, true);
    ep_group_combine_parts to = ep_group_combine_parts_of(rows, 32);
    memcpy(f, got, sizeof(*f));
    f->head.rank = 1;
    memset(body(f), 0, to.bytes);
    set_u64(body(f), rows);
    memcpy(body(f) + to.tokens, body(dispatched) + from.tokens, 4 * (size_t)rows);
    memcpy(body(f) + to.slots, body(dispatched) + from.slots, 4 * (size_t)rows);
    for (uint32_t e = 0, row = 0; e < LOCAL && by_index; e++) {
        for (uint32_t i = 0; i < counts[e]; i++, row++) {
            numbers(f, to.tokens)[row] = i;
            numbers(f, to.slots)[row] = e;
        }
    }
    memcpy(body(f) + to.rows, body(dispatched) + from.rows, 32 * (size_t)rows);
    f->size = EP_GROUP_BODY_OFFSET + to.bytes;
}

/* attack NULL: behaves. */
static bool play_badly(int fd, const attack *a)
{
    static frame dispatched;
    static frame got;
    static frame f;
    if (!raw_read(fd, &dispatched)) {
        return false;
    }
    if (a != NULL && a->where == PAIR) { /* what the other has is as good as anything */
        memcpy(&f, &dispatched, sizeof(f));
        f.head.rank = 1;
    } else {
        answer_dispatch(&dispatched, &f);
    }
    if (a != NULL && a->where != COMBINE && a->where != BY_INDEX) {
        a->spoil(&f);
        return raw_write(fd, &f);
    }
    if (!raw_write(fd, &f)) {
        return false;
    }
    if (!raw_read(fd, &got)) {
        return false;
    }
    answer_combine(&dispatched, &got, a != NULL && a->where == BY_INDEX, &f);
    if (a != NULL) {
        a->spoil(&f);
    }
    return raw_write(fd, &f);
}

/* ---- the good rank ---- */

typedef struct good_rank {
    const oracle_case *c;
    const attack *attack;
    raw_place place;
    bool failed;
} good_rank;

static ep_group *listen_as_rank_0(good_rank *g)
{
    ep_group_config config;
    ep_group *group = NULL;
    ep_error error;
    raw_listen_config(&config, "hostile", 2, &g->place);
    config.deadline_us = DEADLINE_US;
    if (ep_group_create(&config, &group, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        abort();
    }
    return group;
}

/* The good rank is an EP group of its own; the bad one holds the other half of its expert. */
static ep_group *join_alone(rank_call *call, ep_group *pair)
{
    static int32_t counts[2];
    static int32_t tp_counts[2];
    char name[64];
    rank_group_name(name, sizeof(name));
    call->params.group_tp = pair;
    call->params.tp_world_size = 2;
    call->dispatch.ep_recv_counts = ep_tensor_1d(counts, EP_DTYPE_I32, 2);
    call->dispatch.tp_recv_counts = ep_tensor_1d(tp_counts, EP_DTYPE_I32, 2);
    return rank_group_create("loopback", name, 1, 0, DEADLINE_US);
}

static void *run_good(void *arg)
{
    good_rank *g = arg;
    const char *name = g->attack == NULL ? "none" : g->attack->name;
    ep_err expected = g->attack == NULL ? EP_OK : g->attack->expected;
    ep_group *group = listen_as_rank_0(g);
    rank_call call;
    ep_error error = {.text = ""};
    place where = g->attack == NULL ? COMBINE : g->attack->where;
    rank_call_init_rows(&call, g->c, 0, 64);
    if (where == BY_INDEX) {
        rank_call_use_index(&call);
    }
    ep_group *alone = where == PAIR ? join_alone(&call, group) : NULL;
    ep_err err = rank_call_dispatch(&call, alone != NULL ? alone : group, &error);
    if ((where == COMBINE || where == BY_INDEX) && err == EP_OK) {
        rank_call_experts(&call);
        err = rank_call_combine(&call, group, &error);
    }
    const char *text = g->attack != NULL && g->attack->text != NULL ? g->attack->text : "rank";
    if (err != expected ||
        (err != EP_OK && err != EP_ERR_UNKNOWN && strstr(error.text, text) == NULL)) {
        fprintf(stderr, "%s in %s: %s: %s\n", name, place_names[where], ep_err_name(err),
                err == EP_OK ? "" : error.text);
        g->failed = true;
    }
    rank_call_free(&call);
    ep_group_destroy(alone);
    ep_group_destroy(group);
    return NULL;
}

/* Who leaves because of what it was told passes it on: others may hear of it from nobody else
 * first. */
static bool goodbye_says(int fd, const char *text)
{
    static frame f;
    while (raw_read(fd, &f)) {
        if (f.head.kind == EP_GROUP_FRAME_BYE) {
            f.bytes[f.size < RAW_FRAME_MAX ? f.size : RAW_FRAME_MAX - 1] = 0;
            return f.size > EP_GROUP_FRAME_FIXED_BYTES + 4 &&
                   strstr((char *)f.bytes + EP_GROUP_FRAME_FIXED_BYTES + 4, text) != NULL;
        }
    }
    return false;
}

static bool run(const oracle_case *c, const attack *a)
{
    good_rank g = {.c = c, .attack = a, .place = RAW_PLACE};
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_good, &g) != 0) {
        abort();
    }
    int fd = join_group(raw_place_url(&g.place));
    bool played = fd >= 0 && play_badly(fd, a);
    pthread_join(thread, NULL);
    if (a != NULL && a->name == broken_name && !goodbye_says(fd, a->text)) {
        fprintf(stderr, "%s: the goodbye does not say why\n", a->name);
        g.failed = true;
    }
    close(fd);
    if (!played) {
        fprintf(stderr, "%s: the bad rank could not play its part\n", a == NULL ? "none" : a->name);
    }
    return played && !g.failed;
}

/* ---- who has the token, and would have it sent to him in plain text ---- */

#define ELSEWHERE "tcp://192.0.2.1:9" /* nobody's (RFC 5737) */
#define TOKEN "0123456789abcdef"

static void join_with_url_elsewhere(void *arg, const char *url)
{
    ep_group_hello hello = {
        .world_size = 2, .rank = 1, .name = "hostile", .url = ELSEWHERE, .token = TOKEN};
    frame f;
    int fd = raw_join(url, &hello, 0);
    char *text = (char *)f.bytes + EP_GROUP_FRAME_FIXED_BYTES;
    *(bool *)arg = fd >= 0 && raw_read(fd, &f) && f.head.kind == EP_GROUP_FRAME_REFUSED &&
                   strstr(text + 4, "'" ELSEWHERE "' is not dialed") != NULL;
    close(fd);
}

/* Neither an address that a rank says, nor one of the configuration, is dialed; rank 0 says who
 * came. */
static bool shows_no_token(void)
{
    const char *urls[] = {"tcp://127.0.0.1:0", "tcp://127.0.0.1:0"};
    bool refused = false;
    ep_group_config config;
    ep_group *group = NULL;
    ep_error error;
    ep_group_config_init(&config);
    config.name = "hostile";
    config.world_size = 2;
    config.urls = urls;
    config.urls_count = 1;
    config.token = TOKEN;
    config.deadline_us = 1000000; /* nobody else will come */
    config.on_listening = join_with_url_elsewhere;
    config.on_listening_arg = &refused;
    ep_err first = ep_group_create(&config, &group, &error);
    bool good = refused && first == EP_ERR_DEADLINE_EXCEEDED &&
                strstr(error.text, "'" ELSEWHERE "' is not dialed") != NULL;
    printf("%s: url of a rank elsewhere: %s\n", good ? "ok" : "FAILED", error.text);
    urls[0] = ELSEWHERE;
    config.rank = 1;
    config.listen_url = urls[1];
    config.deadline_us = DEADLINE_US;
    config.on_listening = NULL;
    ep_err second = ep_group_create(&config, &group, &error);
    bool named = second == EP_ERR_PERMISSION_DENIED &&
                 strstr(error.text, "rank 0: '" ELSEWHERE "' is not dialed") != NULL;
    printf("%s: url of rank 0 elsewhere: %s\n", named ? "ok" : "FAILED", error.text);
    return good && named;
}

int main(void)
{
    oracle_case c = {
        .ranks = 2, .experts = 2 * LOCAL, .top_k = 3, .hidden = 16, .dtype = ORACLE_BF16};
    uint64_t state = 3;
    case_draw_batch(&state, &c, 8, &c.batch[0]);
    oracle_case alone = {.ranks = 1, .experts = 1, .top_k = 1, .hidden = 16, .dtype = ORACLE_BF16};
    case_draw_batch(&state, &alone, 8, &alone.batch[0]);
    bool good = shows_no_token();
    good = run(&c, NULL) && good;
    for (size_t i = 0; i < sizeof(attacks) / sizeof(attacks[0]); i++) {
        good = run(attacks[i].where == PAIR ? &alone : &c, &attacks[i]) && good;
    }
    case_free(&c);
    case_free(&alone);
    return good ? 0 : 1;
}
