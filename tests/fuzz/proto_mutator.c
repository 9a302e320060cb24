/* SPDX-License-Identifier: Apache-2.0 */
#include "proto_mutator.h"

#include <stdbool.h>
#include <string.h>

#define DEPTH_MAX 4
#define FIELD_BYTES_MAX 2048

typedef struct writer {
    uint8_t *at;
    uint8_t *end;
    uint32_t random;
} writer;

static uint32_t next_random(uint32_t *random)
{
    *random = *random * 1664525u + 1013904223u;
    return *random >> 8;
}

static void put_byte(writer *w, uint8_t byte)
{
    if (w->at < w->end) {
        *w->at++ = byte;
    }
}

static void put_varint(writer *w, uint64_t value)
{
    for (; value > 0x7f; value >>= 7) {
        put_byte(w, (uint8_t)(value | 0x80));
    }
    put_byte(w, (uint8_t)value);
}

static uint64_t edge_value(writer *w)
{
    /* clang-format off */
    static const uint64_t edges[] = {
        0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 63, 64, 255, 256, 65535, 65536,
        0x7fffffff, 1u << 31, 0xffffffff, 1ull << 32, 1ull << 63, UINT64_MAX, UINT64_MAX - 1,
    };
    /* clang-format on */
    uint32_t pick = next_random(&w->random);
    return pick % 3 == 0 ? pick / 3 % 300 : edges[pick / 3 % (sizeof(edges) / sizeof(edges[0]))];
}

static void put_field(writer *w, const ProtobufCMessageDescriptor *type, int depth);

static void put_text(writer *w)
{
    static const char *const texts[] = {
        "", "demo", "a", "portable", "tcp://127.0.0.1:1", "uniform", "\xff\xfe", "serving"};
    const char *text = texts[next_random(&w->random) % (sizeof(texts) / sizeof(texts[0]))];
    size_t bytes = strlen(text);
    put_varint(w, bytes);
    for (size_t i = 0; i < bytes; i++) {
        put_byte(w, (uint8_t)text[i]);
    }
}

static void put_block(writer *w, const uint8_t *data, size_t bytes)
{
    put_varint(w, bytes);
    for (size_t i = 0; i < bytes; i++) {
        put_byte(w, data[i]);
    }
}

static void put_inner(writer *w, const ProtobufCMessageDescriptor *type, int depth)
{
    uint8_t inner[FIELD_BYTES_MAX];
    writer in = {inner, inner + sizeof(inner), w->random};
    uint32_t fields = next_random(&in.random) % 8;
    for (uint32_t i = 0; i < fields && depth < DEPTH_MAX; i++) {
        put_field(&in, type, depth + 1);
    }
    w->random = in.random;
    put_block(w, inner, (size_t)(in.at - inner));
}

static void put_packed(writer *w)
{
    uint8_t inner[FIELD_BYTES_MAX];
    writer in = {inner, inner + sizeof(inner), w->random};
    uint32_t values = next_random(&in.random) % 20;
    for (uint32_t i = 0; i < values; i++) {
        put_varint(&in, next_random(&in.random) % 4 == 0 ? edge_value(&in) : i);
    }
    w->random = in.random;
    put_block(w, inner, (size_t)(in.at - inner));
}

static void put_fixed(writer *w, int bytes)
{
    uint64_t value = edge_value(w);
    for (int i = 0; i < bytes; i++) {
        put_byte(w, (uint8_t)(value >> (8 * i)));
    }
}

/* One field of type with a value of the right form. */
static void put_field(writer *w, const ProtobufCMessageDescriptor *type, int depth)
{
    if (type->n_fields == 0) {
        return;
    }
    const ProtobufCFieldDescriptor *field = &type->fields[next_random(&w->random) % type->n_fields];
    bool is_packed = field->label == PROTOBUF_C_LABEL_REPEATED &&
                     field->type != PROTOBUF_C_TYPE_STRING &&
                     field->type != PROTOBUF_C_TYPE_MESSAGE;
    switch (field->type) {
    case PROTOBUF_C_TYPE_MESSAGE:
        put_varint(w, (uint64_t)field->id << 3 | 2);
        put_inner(w, field->descriptor, depth);
        break;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
        put_varint(w, (uint64_t)field->id << 3 | 2);
        put_text(w);
        break;
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        put_varint(w, (uint64_t)field->id << 3 | 1);
        put_fixed(w, 8);
        break;
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
        put_varint(w, (uint64_t)field->id << 3 | 5);
        put_fixed(w, 4);
        break;
    default:
        put_varint(w, (uint64_t)field->id << 3 | (is_packed ? 2 : 0));
        if (is_packed) {
            put_packed(w);
        } else {
            put_varint(w, edge_value(w));
        }
        break;
    }
}

/* Length of the field at data, 0 when it is not whole. */
static size_t field_bytes(const uint8_t *data, size_t bytes)
{
    uint64_t value = 0;
    size_t at = 0;
    for (int pass = 0; pass < 2; pass++) {
        uint64_t varint = 0;
        int shift = 0;
        while (at < bytes && shift < 64) {
            varint |= (uint64_t)(data[at] & 0x7f) << shift;
            shift += 7;
            if (!(data[at++] & 0x80)) {
                break;
            }
        }
        if (pass == 0) {
            value = varint;
            if ((value & 7) == 1 || (value & 7) == 5) {
                at += (value & 7) == 1 ? 8 : 4;
                return at <= bytes ? at : 0;
            }
            if ((value & 7) != 0 && (value & 7) != 2) {
                return 0;
            }
        } else if ((value & 7) == 2) {
            return varint <= bytes - at ? at + (size_t)varint : 0;
        }
    }
    return at;
}

/* Where a field begins: one of those of data, or its end. */
static size_t pick_place(const uint8_t *data, size_t bytes, uint32_t *random)
{
    size_t at = 0, step;
    while (at < bytes && next_random(random) % 8 != 0 &&
           (step = field_bytes(data + at, bytes - at)) > 0) {
        at += step;
    }
    return at;
}

size_t proto_mutate(const ProtobufCMessageDescriptor *type, uint8_t *data, size_t bytes,
                    size_t bytes_max, uint32_t random)
{
    uint8_t fresh[FIELD_BYTES_MAX * 2];
    size_t place = pick_place(data, bytes, &random);
    size_t old = place < bytes ? field_bytes(data + place, bytes - place) : 0;
    uint32_t kind = next_random(&random) % 8;
    writer w = {fresh, fresh + sizeof(fresh), random};
    if (kind < 6) {
        put_field(&w, type, 0);
    }
    if (kind < 3) {
        old = 0; /* added; else it replaces the field, or removes it */
    }
    size_t count = (size_t)(w.at - fresh);
    if (bytes - old + count > bytes_max) {
        return bytes;
    }
    memmove(data + place + count, data + place + old, bytes - place - old);
    memcpy(data + place, fresh, count);
    return bytes - old + count;
}
