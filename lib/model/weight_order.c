/* SPDX-License-Identifier: Apache-2.0 */
#include "model/weight_order.h"

#include <stdlib.h>
#include <string.h>

static ep_err no_memory(size_t bytes, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                        "no memory for the order of columns (%zu bytes)", bytes);
}

static ep_err damaged(const ep_plan_run *run, const char *what, uint32_t column,
                      ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: tensor %.200s: %s at element %u",
                        ep_safetensors_name(run->entry->shard), run->entry->name, what, column);
}

/* A stable sort by group. next [groups]: scratch memory. */
static ep_err sort_columns(const ep_plan_run *run, const uint8_t *raw, uint32_t columns,
                           uint32_t group_columns, uint32_t *next, uint32_t *out_columns,
                           ep_error *out_error)
{
    const uint32_t groups = (columns - 1) / group_columns + 1;
    for (uint32_t g = 0; g < groups; g++) {
        next[g] = g * group_columns;
    }
    for (uint32_t k = 0; k < columns; k++) {
        uint32_t group;
        memcpy(&group, raw + 4 * (size_t)k, sizeof(group));
        if (group >= groups) {
            return damaged(run, "a group does not exist", k, out_error);
        }
        const uint32_t end =
            columns - group * group_columns < group_columns ? columns : (group + 1) * group_columns;
        if (next[group] == end) {
            return damaged(run, "a group has more columns than the others", k, out_error);
        }
        out_columns[next[group]++] = k;
    }
    return EP_OK;
}

static ep_err read_order(const ep_expert_plan *plan, const ep_plan_matrix *m, const uint8_t *raw,
                         uint32_t **out_columns, ep_error *out_error)
{
    const ep_plan_run *run = &plan->runs[m->order];
    const uint32_t shared = m->container.scales.columns;
    const uint32_t group_columns = shared < m->columns ? shared : m->columns;
    uint32_t *order = calloc(2 * (size_t)m->columns, sizeof(*order));
    if (order == NULL) {
        return no_memory(2 * (size_t)m->columns * sizeof(*order), out_error);
    }
    ep_err err =
        sort_columns(run, raw, m->columns, group_columns, order + m->columns, order, out_error);
    uint32_t same = 0;
    while (err == EP_OK && same < m->columns && order[same] == same) {
        same++;
    }
    if (err == EP_OK && same < m->columns && !m->is_ordered) {
        err =
            damaged(run, "groups do not follow each other, and the config's desc_act says they do,",
                    order[same], out_error);
    }
    if (err != EP_OK || same == m->columns) {
        free(order);
        return err;
    }
    *out_columns = order;
    return EP_OK;
}

/* Whether the columns of gate and up have the same order: x is reordered only once. */
static bool are_alike(const uint32_t *a, const uint32_t *b, uint32_t count)
{
    return a == b || (a != NULL && b != NULL && memcmp(a, b, count * sizeof(*a)) == 0);
}

ep_err ep_weight_orders_init(ep_weight_orders *orders, const ep_expert_plan *plan,
                             uint8_t *const *raw, ep_error *out_error)
{
    const ep_plan_matrix *gate = &plan->matrices[EP_MATRIX_GATE];
    const ep_plan_matrix *up = &plan->matrices[EP_MATRIX_UP];
    ep_err err = EP_OK;
    *orders = (ep_weight_orders){{NULL}};
    for (ep_matrix i = 0; err == EP_OK && i < EP_MATRIX_COUNT; i++) {
        const ep_plan_matrix *m = &plan->matrices[i];
        if (m->present && m->order >= 0) {
            err = read_order(plan, m, raw[m->order], &orders->columns[i], out_error);
        }
    }
    if (err == EP_OK && gate->present &&
        !are_alike(orders->columns[EP_MATRIX_GATE], orders->columns[EP_MATRIX_UP], up->columns)) {
        const ep_plan_run *run = &plan->runs[up->order >= 0 ? up->order : gate->order];
        err = ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                           "%s: tensor %.200s: gate and up have their columns in groups in unlike "
                           "orders, allowed: one for both",
                           ep_safetensors_name(run->entry->shard), run->entry->name);
    }
    return err;
}

void ep_weight_orders_fini(ep_weight_orders *orders)
{
    for (ep_matrix i = 0; i < EP_MATRIX_COUNT; i++) {
        free(orders->columns[i]);
    }
    *orders = (ep_weight_orders){{NULL}};
}

/* array[i] = array[order[i]]. room: as large as array. */
static void order_rows(uint8_t *array, size_t rows, size_t row_bytes, const uint32_t *order,
                       uint8_t *room)
{
    if (array == NULL || row_bytes == 0) {
        return;
    }
    memcpy(room, array, rows * row_bytes);
    for (size_t i = 0; i < rows; i++) {
        memcpy(array + i * row_bytes, room + order[i] * row_bytes, row_bytes);
    }
}

/* The same for the columns of a row of integer codes. room: a byte per column. */
static void order_codes(ep_weight_format format, uint8_t *row, size_t columns,
                        const uint32_t *order, uint8_t *room)
{
    const bool is_nibbles = ep_weight_codes_are_nibbles(ep_weight_format_codes(format));
    for (size_t k = 0; k < columns; k++) {
        room[k] = is_nibbles ? row[k / 2] >> (4 * (k & 1u)) & 15u : row[k];
    }
    for (size_t k = 0; k < columns; k++) {
        const uint8_t code = room[order[k]];
        uint8_t *at = row + (is_nibbles ? k / 2 : k);
        *at = (uint8_t)(!is_nibbles  ? code
                        : k % 2 == 0 ? (*at & 0xf0u) | code
                                     : (*at & 0x0fu) | code << 4);
    }
}

static void order_all_rows(const ep_expert_plan *plan, const ep_plan_matrix *m,
                           const uint32_t *order, uint8_t *values, uint8_t *scales, uint8_t *bias,
                           uint8_t *room)
{
    const ep_weight_format format = m->container.format;
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, m->rows, m->columns);
    const size_t bytes[] = {arrays.scales, arrays.offsets, arrays.scale_factors,
                            arrays.offset_factors};
    order_rows(values, m->rows, ep_weight_row_bytes(format, m->columns), order, room);
    for (size_t i = 0; scales != NULL && i < sizeof(bytes) / sizeof(bytes[0]);
         scales += bytes[i++]) {
        order_rows(scales, m->rows, bytes[i] / m->rows, order, room);
    }
    order_rows(bias, m->rows, ep_dtype_bytes(plan->bias_dtype), order, room);
}

ep_err ep_weight_orders_apply(const ep_weight_orders *orders, const ep_expert_plan *plan,
                              ep_matrix which, uint8_t *values, uint8_t *scales, uint8_t *bias,
                              ep_error *out_error)
{
    const ep_plan_matrix *m = &plan->matrices[which];
    const ep_weight_format format = m->container.format;
    const uint32_t *columns = orders->columns[which];
    const uint32_t *rows = which == EP_MATRIX_DOWN ? NULL : orders->columns[EP_MATRIX_DOWN];
    const size_t row_bytes = ep_weight_row_bytes(format, m->columns);
    if (columns == NULL && rows == NULL) {
        return EP_OK;
    }
    const size_t room_bytes = m->rows * row_bytes +
                              ep_weight_scales_bytes(format, m->rows, m->columns) + m->columns +
                              4 * (size_t)m->rows;
    uint8_t *room = malloc(room_bytes);
    if (room == NULL) {
        return no_memory(room_bytes, out_error);
    }
    for (size_t n = 0; columns != NULL && n < m->rows; n++) {
        order_codes(format, values + n * row_bytes, m->columns, columns, room);
    }
    if (rows != NULL) {
        order_all_rows(plan, m, rows, values, scales, bias, room);
    }
    free(room);
    return EP_OK;
}

void ep_weight_orders_places(const ep_weight_orders *orders, uint32_t count, uint8_t *out)
{
    const uint32_t *order = orders->columns[EP_MATRIX_UP];
    for (uint32_t place = 0; place < count; place++) {
        const uint32_t input = order == NULL ? place : order[place];
        memcpy(out + sizeof(place) * (size_t)input, &place, sizeof(place));
    }
}
