/* SPDX-License-Identifier: Apache-2.0 */
/* A counting sort by expert in two passes over the ids; the second pass copies each token's row to
 * all its places. */
#include "expertd/permute.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "moe/convert.h"
#include "moe/flow.h"
#include "moe/row_stream.h"

#define CAPACITY_MAX 65536u
#define NO_ROW (-1)
#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

static const ep_permute_config defaults = {.dtype = EP_DTYPE_BF16};

void ep_permute_config_init_sized(ep_permute_config *out_config, size_t struct_bytes)
{
    ep_struct_init(out_config, struct_bytes, &defaults, sizeof(defaults));
}

/* The end of the expert range, with its default. */
static uint32_t expert_end(const ep_permute_config *config)
{
    return config->expert_end == 0 ? config->experts : config->expert_end;
}

static uint64_t row_end(const ep_permute_config *config)
{
    uint64_t slots = (uint64_t)config->tokens * config->top_k;
    return config->row_end == 0 || config->row_end > slots ? slots : config->row_end;
}

static ep_err take_config(const ep_permute_config *given, ep_permute_config *config,
                          ep_error *out_error)
{
    *config = defaults;
    ep_err err =
        ep_struct_in("the configuration", given, EP_STRUCT_UPTO(ep_permute_config, experts), config,
                     sizeof(*config), out_error);
    if (err != EP_OK) {
        return err;
    }
    const bool pads = config->drop == EP_PERMUTE_DROP_PAD;
    const uint32_t capacity = pads ? config->capacity : 1; /* otherwise not used, like row_begin */
    const uint32_t end = expert_end(config);
    const ep_range fields[] = {
        {"tokens", config->tokens, 0, EP_TOKENS_MAX},
        {"top_k", config->top_k, 1, EP_TOP_K_MAX},
        {"hidden", config->hidden, 1, EP_HIDDEN_MAX},
        {"experts", config->experts, 1, EP_EXPERTS_MAX},
        {"expert_end", end, 1, config->experts},
        {"expert_begin", config->expert_begin, 0, (uint64_t)end - 1},
        {"capacity", capacity, 1, CAPACITY_MAX},
        {"rows of all experts", (uint64_t)(end - config->expert_begin) * capacity, 1, INT32_MAX},
        {"drop", config->drop, EP_PERMUTE_DROPLESS, EP_PERMUTE_DROP_PAD},
        {"row_begin", pads ? 0 : config->row_begin, 0, row_end(config)},
        {"counts", config->counts, 0, EP_PERMUTE_CUMULATIVE}};
    err = ep_ranges_check(fields, EP_ARRAY_COUNT(fields), out_error);
    if (err != EP_OK) {
        return err;
    }
    if (config->dtype != EP_DTYPE_I8 && !ep_dtype_is_float(config->dtype)) {
        return BAD("dtype is %s (%d): allowed bf16, f16, f32, i8", ep_dtype_name(config->dtype),
                   (int)config->dtype);
    }
    return EP_OK;
}

uint64_t ep_permute_rows_max(const ep_permute_config *given)
{
    ep_permute_config config;
    if (take_config(given, &config, NULL) != EP_OK) {
        return 0;
    }
    if (config.drop == EP_PERMUTE_DROP_PAD) {
        return (uint64_t)(expert_end(&config) - config.expert_begin) * config.capacity;
    }
    return row_end(&config) - config.row_begin;
}

size_t ep_permute_workspace_bytes(const ep_permute_config *given)
{
    ep_permute_config config;
    return take_config(given, &config, NULL) == EP_OK
               ? (size_t)(expert_end(&config) - config.expert_begin) * 2 * sizeof(uint32_t)
               : 0;
}

/* For one expert of the range: how many sorted slots are placed, and the first's position. */
typedef struct {
    uint32_t count; /* first pass: all slots; second pass: those placed so far */
    uint32_t first;
} expert_place;

_Static_assert(sizeof(expert_place) == 2 * sizeof(uint32_t), "as ep_permute_workspace_bytes says");

typedef struct {
    const ep_permute_config *config;
    const ep_permute_in *in;
    ep_permute_out *out;
    expert_place *places;
    uint32_t begin;
    uint32_t end;
    size_t row_bytes;
    bool stream;
} permutation;

/* The slot's expert, counted from the range's begin; UINT32_MAX: inactive or outside. */
static uint32_t place_of(const permutation *p, size_t slot)
{
    int32_t id = p->in->ids[slot];
    bool active = p->in->mask == NULL || p->in->mask[slot] != 0;
    return active && id >= (int32_t)p->begin && id < (int32_t)p->end ? (uint32_t)id - p->begin
                                                                     : UINT32_MAX;
}

/* Checks ids also in masked slots. */
static ep_err count_slots(const permutation *p, ep_error *out_error)
{
    uint32_t experts = p->config->experts;
    size_t slots = (size_t)p->config->tokens * p->config->top_k;
    memset(p->places, 0, (p->end - p->begin) * sizeof(*p->places));
    for (size_t s = 0; s < slots; s++) {
        int32_t id = p->in->ids[s];
        if (id < -1 || id > (int32_t)experts) {
            return BAD("ids: token %zu, choice %zu is %" PRId32 ": allowed -1..%" PRIu32,
                       s / p->config->top_k, s % p->config->top_k, id, experts);
        }
        uint32_t e = place_of(p, s);
        if (e != UINT32_MAX) {
            p->places[e].count++;
        }
    }
    return EP_OK;
}

/* How many rows one expert gets for its sorted positions [first, first + count). */
static uint32_t rows_made(const permutation *p, uint32_t first, uint32_t count)
{
    if (p->config->drop == EP_PERMUTE_DROP_PAD) {
        return count < p->config->capacity ? count : p->config->capacity;
    }
    uint64_t begin = first > p->config->row_begin ? first : p->config->row_begin;
    uint64_t end =
        (uint64_t)first + count < row_end(p->config) ? (uint64_t)first + count : row_end(p->config);
    return end > begin ? (uint32_t)(end - begin) : 0;
}

static void lay_out(const permutation *p)
{
    bool sums = p->config->counts == EP_PERMUTE_CUMULATIVE;
    uint32_t first = 0;
    int64_t before = 0;
    int64_t made = 0;
    for (uint32_t e = 0; e < p->end - p->begin; e++) {
        uint32_t count = p->places[e].count;
        before = (sums ? before : 0) + count;
        made = (sums ? made : 0) + rows_made(p, first, count);
        if (p->out->counts_before != NULL) {
            p->out->counts_before[e] = before;
        }
        if (p->out->counts != NULL) {
            p->out->counts[e] = made;
        }
        p->places[e] = (expert_place){.count = 0, .first = first};
        first += count;
    }
    p->out->rows_count = p->config->drop == EP_PERMUTE_DROP_PAD ? ep_permute_rows_max(p->config)
                                                                : rows_made(p, 0, first);
}

/* Takes the next place of an expert: a row, or NO_ROW when it is dropped. */
static int32_t next_row(const permutation *p, uint32_t e)
{
    expert_place *place = &p->places[e];
    uint32_t n = place->count++;
    if (p->config->drop == EP_PERMUTE_DROP_PAD) {
        return n < p->config->capacity ? (int32_t)(e * p->config->capacity + n) : NO_ROW;
    }
    uint64_t position = (uint64_t)place->first + n;
    bool kept = position >= p->config->row_begin && position < row_end(p->config);
    return kept ? (int32_t)(position - p->config->row_begin) : NO_ROW;
}

static void write_slot(const permutation *p, uint32_t token, size_t slot, int32_t row)
{
    const ep_permute_in *in = p->in;
    ep_permute_out *out = p->out;
    if (out->slot_rows != NULL) {
        out->slot_rows[slot] = row;
    }
    if (row == NO_ROW) {
        return;
    }
    if (out->row_slots != NULL) {
        out->row_slots[row] = (int32_t)slot;
    }
    if (out->row_probs != NULL) {
        out->row_probs[row] = in->probs[slot];
    }
    if (out->row_scales != NULL) {
        out->row_scales[row] = in->x_scales[token];
    }
    if (out->rows != NULL) {
        uint8_t *to = (uint8_t *)out->rows + (size_t)row * p->row_bytes;
        const uint8_t *from = (const uint8_t *)in->x + token * p->row_bytes;
        if (p->stream) {
            ep_row_stream(to, from, p->row_bytes, from + p->row_bytes);
        } else {
            memcpy(to, from, p->row_bytes);
        }
    }
}

static void write_slots(const permutation *p)
{
    size_t slot = 0;
    for (uint32_t t = 0; t < p->config->tokens; t++) {
        for (uint32_t k = 0; k < p->config->top_k; k++, slot++) {
            uint32_t e = place_of(p, slot);
            write_slot(p, t, slot, e == UINT32_MAX ? NO_ROW : next_row(p, e));
        }
    }
}

static void write_padding(const permutation *p)
{
    ep_permute_out *out = p->out;
    uint32_t capacity = p->config->drop == EP_PERMUTE_DROP_PAD ? p->config->capacity : 0;
    for (uint32_t e = 0; e < p->end - p->begin; e++) {
        for (uint32_t n = p->places[e].count; n < capacity; n++) {
            size_t row = (size_t)e * capacity + n;
            if (out->rows != NULL) {
                memset((uint8_t *)out->rows + row * p->row_bytes, 0, p->row_bytes);
            }
            if (out->row_slots != NULL) {
                out->row_slots[row] = NO_ROW;
            }
            if (out->row_probs != NULL) {
                out->row_probs[row] = 0.0f;
            }
            if (out->row_scales != NULL) {
                out->row_scales[row] = 0.0f;
            }
        }
    }
}

static ep_err check_inputs(const ep_permute_config *config, const ep_permute_in *in,
                           const ep_permute_out *out, ep_error *out_error)
{
    const char *missing = NULL;
    if (config->tokens > 0) {
        missing = in->ids == NULL                                   ? "ids"
                  : in->x == NULL && out->rows != NULL              ? "x"
                  : in->x_scales == NULL && out->row_scales != NULL ? "x_scales"
                  : in->probs == NULL && out->row_probs != NULL     ? "probs"
                                                                    : NULL;
    }
    return missing == NULL ? EP_OK : BAD("%s is NULL, and what it gives is asked for", missing);
}

static ep_err permute(const ep_permute_config *config, const ep_permute_in *in, void *workspace,
                      size_t workspace_bytes, ep_permute_out *out, ep_error *out_error)
{
    size_t needed = ep_permute_workspace_bytes(config);
    if (workspace == NULL || workspace_bytes < needed) {
        return BAD("workspace has %zu bytes: %zu are needed (8 per expert of the range)",
                   workspace == NULL ? 0 : workspace_bytes, needed);
    }
    permutation p = {.config = config,
                     .in = in,
                     .out = out,
                     .places = workspace,
                     .begin = config->expert_begin,
                     .end = expert_end(config),
                     .row_bytes = config->hidden * ep_dtype_bytes(config->dtype)};
    ep_err err = count_slots(&p, out_error);
    if (err != EP_OK) {
        return err;
    }
    lay_out(&p);
    p.stream = out->rows_count * p.row_bytes >= EP_ROW_STREAM_BYTES_MIN;
    write_slots(&p);
    write_padding(&p);
    if (p.stream) {
        ep_row_stream_end();
    }
    return EP_OK;
}

ep_err ep_moe_permute(const ep_permute_config *given_config, const ep_permute_in *given_in,
                      void *workspace, size_t workspace_bytes, ep_permute_out *out,
                      ep_error *out_error)
{
    ep_permute_config config;
    ep_permute_in in = {0};
    ep_permute_out taken = {0};
    ep_err err = take_config(given_config, &config, out_error);
    if (err == EP_OK) {
        err = ep_struct_in("the inputs", given_in, EP_STRUCT_UPTO(ep_permute_in, ids), &in,
                           sizeof(in), out_error);
    }
    if (err == EP_OK) {
        err = ep_struct_in("the outputs", out, EP_STRUCT_UPTO(ep_permute_out, rows), &taken,
                           sizeof(taken), out_error);
    }
    if (err == EP_OK) {
        err = check_inputs(&config, &in, &taken, out_error);
    }
    if (err == EP_OK) {
        err = permute(&config, &in, workspace, workspace_bytes, &taken, out_error);
    }
    if (err == EP_OK) {
        ep_struct_out(out, &taken, sizeof(taken));
    }
    return err;
}
