/* SPDX-License-Identifier: Apache-2.0 */
/* Packs rows for a host, each once, and takes them apart there. */
#include "group/group_host_rows.h"

#include <string.h>

#include "base/check.h"

#define PART_ALIGN 64
#define HEAD_BYTES 64
#define RANK_BYTES 12
#define FLAG_QUANTISED 1u
#define FLAG_WEIGHTS 2u
#define NO_ROW UINT32_MAX

static size_t part_after(size_t offset, size_t count, size_t each)
{
    return ep_align_up(offset + count * each, PART_ALIGN);
}

ep_group_host_parts ep_group_host_parts_of(const ep_group_host_shape *shape)
{
    ep_group_host_parts parts;
    parts.ranks = HEAD_BYTES;
    parts.counts = part_after(parts.ranks, shape->ranks, RANK_BYTES);
    parts.row_of = part_after(parts.counts, shape->experts, sizeof(uint32_t));
    parts.slots = part_after(parts.row_of, shape->slots, sizeof(uint32_t));
    parts.weights = part_after(parts.slots, shape->slots, sizeof(uint32_t));
    parts.tokens = part_after(parts.weights, shape->weights ? shape->slots : 0, sizeof(float));
    parts.scales = part_after(parts.tokens, shape->rows, sizeof(uint32_t));
    parts.rows = part_after(parts.scales, shape->quantised ? shape->rows : 0, sizeof(float));
    parts.bytes = parts.rows + (size_t)shape->rows * shape->row_bytes;
    return parts;
}

/* ---- packing ---- */

/* Slots of a member: order[begin .. end). */
static void slots_of(const ep_group_host_sender *sender, uint32_t member, uint32_t *out_begin,
                     uint32_t *out_end)
{
    *out_begin = sender->offsets[ep_group_first_bucket(sender->layout, member)];
    *out_end = sender->offsets[ep_group_first_bucket(sender->layout, member + 1)];
}

ep_group_host_shape ep_group_host_plan(const ep_group_host_sender *sender)
{
    const ep_group_packer *packer = sender->packer;
    ep_group_host_shape shape = {.ranks = sender->count,
                                 .quantised = packer->quantise,
                                 .weights = sender->weights,
                                 .row_bytes = packer->row_bytes};
    memset(sender->row_of_token, 0xff, (size_t)packer->batch->tokens * sizeof(uint32_t));
    for (uint32_t i = 0; i < sender->count; i++) {
        uint32_t begin;
        uint32_t end;
        slots_of(sender, sender->members[i], &begin, &end);
        shape.experts += ep_group_local_experts(sender->layout, sender->members[i]);
        shape.slots += end - begin;
        for (uint32_t at = begin; at < end; at++) {
            uint32_t *row = &sender->row_of_token[sender->order[at] / packer->slots_per_token];
            if (*row == NO_ROW) {
                *row = shape.rows++;
            }
        }
    }
    return shape;
}

size_t ep_group_host_largest(const ep_group_host_sender *sender, const ep_group_host_shape *shape)
{
    size_t largest = 0;
    for (uint32_t i = 0; i < sender->count; i++) {
        uint32_t begin;
        uint32_t end;
        slots_of(sender, sender->members[i], &begin, &end);
        size_t bytes = ep_group_dispatch_parts_of(
                           ep_group_local_experts(sender->layout, sender->members[i]), end - begin,
                           shape->row_bytes, shape->quantised, shape->weights)
                           .bytes;
        largest = bytes > largest ? bytes : largest;
    }
    return largest;
}

static void put_head(const ep_group_host_shape *shape, uint8_t *body)
{
    uint32_t numbers[] = {shape->ranks,
                          shape->experts,
                          shape->slots,
                          shape->rows,
                          (shape->quantised ? FLAG_QUANTISED : 0) |
                              (shape->weights ? FLAG_WEIGHTS : 0),
                          0};
    uint64_t row_bytes = shape->row_bytes;
    memcpy(body, numbers, sizeof(numbers));
    memcpy(body + sizeof(numbers), &row_bytes, sizeof(row_bytes));
}

static void put_u32(uint8_t *array, size_t index, uint32_t value)
{
    memcpy(array + 4 * index, &value, sizeof(value));
}

/* Writes one member's slots, and the rows that no member before it needed. */
static void fill_member(const ep_group_host_sender *sender, const ep_group_host_parts *parts,
                        uint32_t member, uint8_t *body, uint32_t *slots_done, uint32_t *rows_done)
{
    const ep_group_packer *packer = sender->packer;
    uint32_t begin;
    uint32_t end;
    slots_of(sender, member, &begin, &end);
    for (uint32_t at = begin; at < end; at++, (*slots_done)++) {
        uint32_t token = sender->order[at] / packer->slots_per_token;
        uint32_t slot = sender->order[at] % packer->slots_per_token;
        uint32_t row = sender->row_of_token[token];
        put_u32(body + parts->row_of, *slots_done, row);
        put_u32(body + parts->slots, *slots_done, slot);
        if (sender->weights) {
            float weight = ep_group_slot_weight(packer->batch, token, slot);
            memcpy(body + parts->weights + 4 * (size_t)*slots_done, &weight, sizeof(weight));
        }
        if (row == *rows_done) {
            ep_group_row_out out = {.rows = body + parts->rows + (size_t)row * packer->row_bytes,
                                    .stride_bytes = (int64_t)packer->row_bytes,
                                    .scales = (float *)(void *)(body + parts->scales) + row};
            ep_group_pack(packer, 0, &sender->order[at], 1, &out);
            put_u32(body + parts->tokens, row, token);
            (*rows_done)++;
        }
    }
}

void ep_group_host_fill(const ep_group_host_sender *sender, const ep_group_host_shape *shape,
                        uint8_t *body)
{
    ep_group_host_parts parts = ep_group_host_parts_of(shape);
    uint32_t counts = 0;
    uint32_t slots = 0;
    uint32_t rows = 0;
    EP_ASSERT(!ep_batch_row_per_slot(sender->packer->batch));
    memset(body, 0, parts.rows); /* also clears the gaps between the parts */
    put_head(shape, body);
    for (uint32_t i = 0; i < sender->count; i++) {
        uint32_t member = sender->members[i];
        uint32_t first = ep_group_first_bucket(sender->layout, member);
        uint32_t local = ep_group_local_experts(sender->layout, member);
        uint8_t *at = body + parts.ranks + RANK_BYTES * (size_t)i;
        put_u32(at, 0, sender->ranks[member]);
        put_u32(at, 1, local);
        put_u32(at, 2, sender->offsets[first + local] - sender->offsets[first]);
        for (uint32_t e = 0; e < local; e++) {
            put_u32(body + parts.counts, counts++,
                    sender->offsets[first + e + 1] - sender->offsets[first + e]);
        }
        fill_member(sender, &parts, member, body, &slots, &rows);
    }
}

/* ---- taking apart ---- */

static uint32_t get_u32(const uint8_t *array, size_t index)
{
    uint32_t value;
    memcpy(&value, array + 4 * index, sizeof(value));
    return value;
}

static ep_err bad(const char *what, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_PROTOCOL, "its frame for a host is not well formed (%s)",
                        what);
}

static ep_err read_shape(const uint8_t *data, size_t bytes, ep_group_host_shape *out_shape,
                         ep_error *out_error)
{
    uint64_t row_bytes;
    if (bytes < HEAD_BYTES) {
        return bad("its length", out_error);
    }
    memcpy(&row_bytes, data + 24, sizeof(row_bytes));
    uint32_t flags = get_u32(data, 4);
    *out_shape = (ep_group_host_shape){.ranks = get_u32(data, 0),
                                       .experts = get_u32(data, 1),
                                       .slots = get_u32(data, 2),
                                       .rows = get_u32(data, 3),
                                       .quantised = (flags & FLAG_QUANTISED) != 0,
                                       .weights = (flags & FLAG_WEIGHTS) != 0,
                                       .row_bytes = (size_t)row_bytes};
    bool good = out_shape->ranks <= EP_GROUP_WORLD_MAX && out_shape->experts <= INT32_MAX &&
                out_shape->slots <= INT32_MAX && out_shape->rows <= out_shape->slots &&
                row_bytes <= (uint64_t)1 << 30;
    return good ? EP_OK : bad("its numbers", out_error);
}

/* The ranks' counts must add up to the frame's, and each rank's to its slots. */
static bool sums_fit(const ep_group_host_body *body)
{
    ep_group_host_part part;
    uint64_t experts = 0;
    uint64_t slots = 0;
    for (uint32_t i = 0; i < body->shape.ranks; i++) {
        const uint8_t *at = body->data + body->parts.ranks + RANK_BYTES * (size_t)i;
        experts += get_u32(at, 1);
        slots += get_u32(at, 2);
    }
    if (experts != body->shape.experts || slots != body->shape.slots) {
        return false;
    }
    for (uint32_t i = 0; ep_group_host_next(body, i, &part); i++) {
        uint64_t sum = 0;
        for (uint32_t e = 0; e < part.local_experts; e++) {
            sum += get_u32(body->data + body->parts.counts, (size_t)part.first_count + e);
        }
        if (sum != part.slots) {
            return false;
        }
    }
    return true;
}

/* told comes from the sender, so it may contain any number. */
static bool fits_call(const ep_group_call *told, const ep_group_host_shape *shape)
{
    bool quantised = told->quant_mode == 2;
    int64_t element = quantised ? 1
                      : told->dtype > 0 && told->dtype <= UINT8_MAX
                          ? (int64_t)ep_dtype_bytes((ep_dtype)told->dtype)
                          : 0;
    return told->hidden >= 0 && told->hidden <= INT32_MAX && told->tokens >= 0 &&
           shape->rows <= (uint64_t)told->tokens && shape->quantised == quantised &&
           shape->weights == (told->has_expert_scales != 0) &&
           shape->row_bytes == (uint64_t)(told->hidden * element);
}

static bool slots_fit_call(const ep_group_call *told, const ep_group_host_body *body)
{
    ep_group_host_part part;
    bool good = told->top_k >= 0 && told->top_k <= INT32_MAX && told->shared_experts >= 0 &&
                told->shared_experts <= INT32_MAX;
    uint64_t most = good ? (uint64_t)(told->top_k + told->shared_experts) * body->shape.rows : 0;
    for (uint32_t i = 0; good && ep_group_host_next(body, i, &part); i++) {
        good = part.slots <= most;
    }
    return good;
}

ep_err ep_group_host_open(const ep_group_call *told, const uint8_t *data, size_t bytes,
                          ep_group_host_body *out_body, ep_error *out_error)
{
    ep_group_host_body *body = out_body;
    body->data = data;
    ep_err err = read_shape(data, bytes, &body->shape, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (!fits_call(told, &body->shape)) {
        return bad("not its call's rows", out_error);
    }
    body->parts = ep_group_host_parts_of(&body->shape);
    if (body->parts.bytes != bytes) {
        return bad("its length", out_error);
    }
    if (!sums_fit(body)) {
        return bad("its counts", out_error);
    }
    if (!slots_fit_call(told, body)) {
        return bad("more slots than its call has", out_error);
    }
    for (uint32_t i = 0; i < body->shape.slots; i++) {
        if (get_u32(data + body->parts.row_of, i) >= body->shape.rows) {
            return bad("a row's number", out_error);
        }
    }
    return EP_OK;
}

bool ep_group_host_next(const ep_group_host_body *body, uint32_t index,
                        ep_group_host_part *inout_part)
{
    if (index >= body->shape.ranks) {
        return false;
    }
    ep_group_host_part *part = inout_part;
    const uint8_t *at = body->data + body->parts.ranks + RANK_BYTES * (size_t)index;
    uint32_t first_count = index == 0 ? 0 : part->first_count + part->local_experts;
    uint32_t first_slot = index == 0 ? 0 : part->first_slot + part->slots;
    *part = (ep_group_host_part){get_u32(at, 0), get_u32(at, 1), get_u32(at, 2), first_count,
                                 first_slot};
    return true;
}

static ep_group_dispatch_parts parts_for(const ep_group_host_body *body,
                                         const ep_group_host_part *part)
{
    return ep_group_dispatch_parts_of(part->local_experts, part->slots, body->shape.row_bytes,
                                      body->shape.quantised, body->shape.weights);
}

size_t ep_group_host_part_bytes(const ep_group_host_body *body, const ep_group_host_part *part)
{
    return parts_for(body, part).bytes;
}

void ep_group_host_part_fill(const ep_group_host_body *body, const ep_group_host_part *part,
                             uint8_t *out)
{
    const uint8_t *data = body->data;
    const ep_group_host_parts *from = &body->parts;
    ep_group_dispatch_parts to = parts_for(body, part);
    size_t row_bytes = body->shape.row_bytes;
    memset(out, 0, to.rows);
    memcpy(out, data + from->counts + 4 * (size_t)part->first_count,
           4 * (size_t)part->local_experts);
    memcpy(out + to.slots, data + from->slots + 4 * (size_t)part->first_slot,
           4 * (size_t)part->slots);
    if (body->shape.weights) {
        memcpy(out + to.weights, data + from->weights + 4 * (size_t)part->first_slot,
               4 * (size_t)part->slots);
    }
    for (uint32_t i = 0; i < part->slots; i++) {
        size_t row = get_u32(data + from->row_of, (size_t)part->first_slot + i);
        memcpy(out + to.tokens + 4 * (size_t)i, data + from->tokens + 4 * row, 4);
        if (body->shape.quantised) {
            memcpy(out + to.scales + 4 * (size_t)i, data + from->scales + 4 * row, 4);
        }
        memcpy(out + to.rows + i * row_bytes, data + from->rows + row * row_bytes, row_bytes);
    }
}
