/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/node_sum.h"

#include <stdlib.h>
#include <string.h>

#include "moe/convert.h"

const char ep_row_covered[1] = {0};

/* Marks slots of the present frame until it is known which one is its token's first. */
static const char unplaced[1] = {0};

/* Only a hostile peer sends a row with more slots than a token has: it is sorted in n log n. */
#define INSERTION_SORT_MAX 128u

/* By place, then by slot index. */
static int compare_places(const void *a, const void *b, void *arg)
{
    const uint16_t *places = arg;
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    return places[x] != places[y] ? (places[x] > places[y]) - (places[x] < places[y])
                                  : (x > y) - (x < y);
}

static void sort_by_place(const uint16_t *places, uint32_t *order, uint32_t count)
{
    if (count > INSERTION_SORT_MAX) {
        qsort_r(order, count, sizeof(*order), compare_places, (void *)(uintptr_t)places);
        return;
    }
    for (uint32_t i = 1; i < count; i++) {
        uint32_t slot = order[i];
        uint32_t to = i;
        for (; to > 0 && places[order[to - 1]] > places[slot]; to--) {
            order[to] = order[to - 1];
        }
        order[to] = slot;
    }
}

void ep_node_sum_order(const ep_node_sum_slots *slots, uint32_t *row_begins, uint32_t *order)
{
    memset(row_begins, 0, ((size_t)slots->rows_count + 1) * sizeof(*row_begins));
    for (uint32_t s = 0; s < slots->slots_count; s++) {
        row_begins[slots->slot_rows[s * slots->slot_stride]]++;
    }
    uint32_t end = 0;
    /* the end of each row; it is moved down to its begin */
    for (uint32_t r = 0; r <= slots->rows_count; r++) {
        end += row_begins[r];
        row_begins[r] = end;
    }
    for (uint32_t s = slots->slots_count; s-- > 0;) {
        order[--row_begins[slots->slot_rows[s * slots->slot_stride]]] = s;
    }
    for (uint32_t r = 0; r < slots->rows_count; r++) {
        sort_by_place(slots->places, order + row_begins[r], row_begins[r + 1] - row_begins[r]);
    }
}

void ep_node_sum(const ep_node_sum_slots *slots, const uint32_t *row_begins, const uint32_t *order,
                 const void *rows, ep_dtype dtype, size_t hidden, float *scratch, void *out)
{
    size_t row_bytes = hidden * ep_dtype_bytes(dtype);
    float *acc = scratch;
    float *wide = scratch + hidden;
    for (uint32_t r = 0; r < slots->rows_count; r++) {
        memset(acc, 0, hidden * sizeof(*acc));
        for (uint32_t i = row_begins[r]; i < row_begins[r + 1]; i++) {
            const uint8_t *row = (const uint8_t *)rows + order[i] * row_bytes;
            ep_row_add_weighted(row, dtype, slots->scales[order[i]], hidden, wide, acc);
        }
        ep_row_narrow(acc, hidden, dtype, (uint8_t *)out + r * row_bytes);
    }
}

uint32_t ep_partials_place(const uint32_t *slot_numbers, uint32_t slots_count,
                           uint32_t slots_per_token, const uint8_t *partials, size_t row_bytes,
                           const void **rows)
{
    uint32_t first = UINT32_MAX;
    uint32_t last = 0;
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < slots_count; i++) {
        uint32_t token = slot_numbers[i] / slots_per_token;
        rows[slot_numbers[i]] = unplaced;
        first = token < first ? token : first;
        last = token > last ? token : last;
    }
    for (uint32_t token = first; slots_count > 0 && token <= last; token++) {
        const void *partial = partials + tokens * row_bytes;
        const void **slot = rows + (size_t)token * slots_per_token;
        for (uint32_t k = 0; k < slots_per_token; k++) {
            if (slot[k] == unplaced) {
                slot[k] = partial;
                partial = ep_row_covered;
            }
        }
        tokens += partial == ep_row_covered;
    }
    return tokens;
}
