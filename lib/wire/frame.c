/* SPDX-License-Identifier: Apache-2.0 */
/* The fixed part of a frame: one table says which fields a kind uses, and both directions are
 * checked against it. */
#include "wire/frame.h"

#include <endian.h>
#include <isa-l/crc.h>
#include <stdbool.h>
#include <string.h>

#include "base/check.h"

#define STATUS_MAX 16u
#define CRC_PIECE_BYTES ((size_t)1 << 29) /* crc32_iscsi takes an int */

enum {
    AT_MAGIC = 0,
    AT_VERSION = 4,
    AT_KIND = 5,
    AT_FLAGS = 6,
    AT_CALL_ID = 8,
    AT_ATTEMPT = 16,
    AT_METHOD_ID = 18,
    AT_STATUS = 20,
    AT_DEADLINE_US = 24,
    AT_HEADER_BYTES = 28,
    AT_TENSOR_OFFSET = 32,
    AT_STREAM_SEQUENCE = 36,
    AT_TENSOR_BYTES = 40,
    AT_PAYLOAD_CRC = 48,
    AT_RESERVED = 52,
    AT_FIXED_CRC = 60
};

static const uint8_t magic[4] = {'E', 'P', 'D', '1'};

enum {
    USES_CALL_ID = 1 << 0,
    USES_ATTEMPT = 1 << 1,
    USES_METHOD_ID = 1 << 2,
    USES_STATUS = 1 << 3,
    USES_DEADLINE = 1 << 4,
    USES_SEQUENCE = 1 << 5,
    USES_HEADER = 1 << 6, /* and payload_crc */
    USES_TENSORS = 1 << 7
};

#define USES_CALL (USES_CALL_ID | USES_ATTEMPT | USES_METHOD_ID)
#define USES_PAYLOAD (USES_HEADER | USES_TENSORS)
#define REPLY_FLAGS (EP_FRAME_FLAG_DRAINING | EP_FRAME_FLAG_END_OF_STREAM)

static const struct kind_rule {
    const char *name;
    unsigned uses;
    uint16_t flags;
} rules[EP_FRAME_KIND_LAST + 1] = {
    [EP_FRAME_REQUEST] = {"request", USES_CALL | USES_DEADLINE | USES_PAYLOAD, 0},
    [EP_FRAME_REPLY] = {"reply", USES_CALL | USES_STATUS | USES_SEQUENCE | USES_PAYLOAD,
                        REPLY_FLAGS},
    [EP_FRAME_REPLY_MORE] = {"reply_more", USES_CALL | USES_SEQUENCE | USES_PAYLOAD, REPLY_FLAGS},
    [EP_FRAME_CANCEL] = {"cancel", USES_CALL_ID | USES_ATTEMPT, EP_FRAME_FLAG_ANSWERED},
    [EP_FRAME_PING] = {"ping", USES_CALL_ID, EP_FRAME_FLAG_DRAINING},
    [EP_FRAME_PONG] = {"pong", USES_CALL_ID, EP_FRAME_FLAG_DRAINING},
    [EP_FRAME_CREDIT] = {"credit", USES_HEADER, 0},
    [EP_FRAME_GOODBYE] = {"goodbye", USES_STATUS | USES_HEADER, EP_FRAME_FLAG_DRAINING},
};

const char *ep_frame_kind_name(ep_frame_kind kind)
{
    unsigned number = (unsigned)kind;
    return number >= 1 && number <= EP_FRAME_KIND_LAST ? rules[number].name : "unknown";
}

static void put16(uint8_t *at, uint16_t value)
{
    value = htole16(value);
    memcpy(at, &value, sizeof(value));
}

static void put32(uint8_t *at, uint32_t value)
{
    value = htole32(value);
    memcpy(at, &value, sizeof(value));
}

static void put64(uint8_t *at, uint64_t value)
{
    value = htole64(value);
    memcpy(at, &value, sizeof(value));
}

static uint16_t get16(const uint8_t *at)
{
    uint16_t value;
    memcpy(&value, at, sizeof(value));
    return le16toh(value);
}

static uint32_t get32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof(value));
    return le32toh(value);
}

static uint64_t get64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof(value));
    return le64toh(value);
}

/* Name of the first field that is set although the kind does not use it, or has an impossible
 * value; NULL when all is well. */
static const char *wrong_field(const ep_frame *f)
{
    const struct kind_rule *rule = &rules[f->kind];
    if ((f->flags & (uint16_t)~rule->flags) != 0) {
        return "flags";
    }
    if ((rule->uses & USES_CALL_ID) == 0 && f->call_id != 0) {
        return "call_id";
    }
    if ((rule->uses & USES_ATTEMPT) == 0 && f->attempt != 0) {
        return "attempt";
    }
    if ((rule->uses & USES_METHOD_ID) == 0 && f->method_id != 0) {
        return "method_id";
    }
    if (f->status > ((rule->uses & USES_STATUS) != 0 ? STATUS_MAX : 0)) {
        return "status";
    }
    if ((rule->uses & USES_DEADLINE) == 0 && f->deadline_us != 0) {
        return "deadline_us";
    }
    if ((rule->uses & USES_SEQUENCE) == 0 && f->stream_sequence != 0) {
        return "stream_sequence";
    }
    if ((rule->uses & USES_HEADER) == 0 && f->payload_crc != 0) {
        return "payload_crc";
    }
    if ((rule->uses & USES_HEADER) == 0 && f->header_bytes != 0) {
        return "header_bytes";
    }
    if (f->kind == EP_FRAME_CREDIT && f->header_bytes != EP_FRAME_CREDIT_BYTES) {
        return "header_bytes";
    }
    if ((rule->uses & USES_TENSORS) == 0 && f->tensor_bytes != 0) {
        return "tensor_bytes";
    }
    return NULL;
}

void ep_frame_encode(const ep_frame *frame, uint8_t out[EP_FRAME_FIXED_BYTES])
{
    EP_ASSERT(frame->kind >= 1 && frame->kind <= EP_FRAME_KIND_LAST);
    EP_ASSERT(wrong_field(frame) == NULL);
    EP_ASSERT(frame->header_bytes <= EP_FRAME_HEADER_BYTES_CEILING);
    EP_ASSERT(frame->tensor_offset == ep_frame_tensor_offset(frame->header_bytes));
    EP_ASSERT(frame->tensor_bytes <= EP_FRAME_BYTES_CEILING - frame->tensor_offset);

    memcpy(out + AT_MAGIC, magic, sizeof(magic));
    out[AT_VERSION] = EP_FRAME_VERSION;
    out[AT_KIND] = (uint8_t)frame->kind;
    put16(out + AT_FLAGS, frame->flags);
    put64(out + AT_CALL_ID, frame->call_id);
    put16(out + AT_ATTEMPT, frame->attempt);
    put16(out + AT_METHOD_ID, frame->method_id);
    put32(out + AT_STATUS, frame->status);
    put32(out + AT_DEADLINE_US, frame->deadline_us);
    put32(out + AT_HEADER_BYTES, frame->header_bytes);
    put32(out + AT_TENSOR_OFFSET, frame->tensor_offset);
    put32(out + AT_STREAM_SEQUENCE, frame->stream_sequence);
    put64(out + AT_TENSOR_BYTES, frame->tensor_bytes);
    put32(out + AT_PAYLOAD_CRC, frame->payload_crc);
    put64(out + AT_RESERVED, 0);
    put32(out + AT_FIXED_CRC, ep_crc32c(0, out, AT_FIXED_CRC));
}

/* What must hold before any other byte is believed. */
static ep_err check_identity(const uint8_t *fixed, ep_error *out_error)
{
    if (memcmp(fixed + AT_MAGIC, magic, sizeof(magic)) != 0) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "frame begins with bytes %02x %02x %02x %02x, not with magic EPD1",
                            fixed[0], fixed[1], fixed[2], fixed[3]);
    }
    if (fixed[AT_VERSION] != EP_FRAME_VERSION) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "frame has wire version %u, this build speaks %u", fixed[AT_VERSION],
                            EP_FRAME_VERSION);
    }
    uint32_t want = get32(fixed + AT_FIXED_CRC);
    uint32_t have = ep_crc32c(0, fixed, AT_FIXED_CRC);
    if (want != have) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "frame's fixed part has CRC32C %08x, its bytes give %08x", want, have);
    }
    if (fixed[AT_KIND] < 1 || fixed[AT_KIND] > EP_FRAME_KIND_LAST) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "frame kind is %u, allowed 1 to %u",
                            fixed[AT_KIND], (unsigned)EP_FRAME_KIND_LAST);
    }
    if (get64(fixed + AT_RESERVED) != 0) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "frame's reserved bytes 52 to 59 are not 0");
    }
    return EP_OK;
}

static ep_err check_lengths(const ep_frame *f, size_t frame_bytes_max, size_t header_bytes_max,
                            ep_error *out_error)
{
    const char *kind = ep_frame_kind_name(f->kind);
    if (f->header_bytes > header_bytes_max || f->header_bytes > EP_FRAME_HEADER_BYTES_CEILING) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "%s frame has header_bytes %u, allowed up to header_bytes_max %zu",
                            kind, f->header_bytes, header_bytes_max);
    }
    uint32_t offset = ep_frame_tensor_offset(f->header_bytes);
    if (f->tensor_offset != offset) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "%s frame with header_bytes %u has tensor offset %u, must be %u", kind,
                            f->header_bytes, f->tensor_offset, offset);
    }
    size_t limit =
        frame_bytes_max < EP_FRAME_BYTES_CEILING ? frame_bytes_max : EP_FRAME_BYTES_CEILING;
    if (offset > limit || f->tensor_bytes > limit - offset) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "%s frame has header_bytes %u and tensor_bytes %llu, the frame may "
                            "have up to frame_bytes_max %zu",
                            kind, f->header_bytes, (unsigned long long)f->tensor_bytes, limit);
    }
    return EP_OK;
}

ep_err ep_frame_decode(const uint8_t fixed[EP_FRAME_FIXED_BYTES], size_t frame_bytes_max,
                       size_t header_bytes_max, ep_frame *out_frame, size_t *out_frame_bytes,
                       ep_error *out_error)
{
    ep_err err = check_identity(fixed, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_frame f = {
        .kind = (ep_frame_kind)fixed[AT_KIND],
        .flags = get16(fixed + AT_FLAGS),
        .call_id = get64(fixed + AT_CALL_ID),
        .attempt = get16(fixed + AT_ATTEMPT),
        .method_id = get16(fixed + AT_METHOD_ID),
        .status = get32(fixed + AT_STATUS),
        .deadline_us = get32(fixed + AT_DEADLINE_US),
        .header_bytes = get32(fixed + AT_HEADER_BYTES),
        .tensor_offset = get32(fixed + AT_TENSOR_OFFSET),
        .stream_sequence = get32(fixed + AT_STREAM_SEQUENCE),
        .tensor_bytes = get64(fixed + AT_TENSOR_BYTES),
        .payload_crc = get32(fixed + AT_PAYLOAD_CRC),
    };
    const char *wrong = wrong_field(&f);
    if (wrong != NULL) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "%s frame has a value in %s that its kind does not allow",
                            ep_frame_kind_name(f.kind), wrong);
    }
    err = check_lengths(&f, frame_bytes_max, header_bytes_max, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (out_frame != NULL) {
        *out_frame = f;
    }
    if (out_frame_bytes != NULL) {
        *out_frame_bytes = f.tensor_offset + (size_t)f.tensor_bytes;
    }
    return EP_OK;
}

ep_err ep_frame_read_bytes(const uint8_t fixed[EP_FRAME_FIXED_BYTES], size_t *out_frame_bytes,
                           ep_error *out_error)
{
    return ep_frame_decode(fixed, EP_FRAME_BYTES_CEILING, EP_FRAME_HEADER_BYTES_CEILING, NULL,
                           out_frame_bytes, out_error);
}

void ep_frame_credit_encode(const ep_frame_credit *credit, uint8_t out[EP_FRAME_CREDIT_BYTES])
{
    put64(out, credit->tokens);
    put64(out + 8, credit->bytes);
}

void ep_frame_credit_decode(const uint8_t header[EP_FRAME_CREDIT_BYTES],
                            ep_frame_credit *out_credit)
{
    *out_credit = (ep_frame_credit){.tokens = get64(header), .bytes = get64(header + 8)};
}

/*
 * ISA-L's AVX-512 form (used from 256 bytes on) returns with the upper halves of the vector
 * registers in use. From then on every SSE instruction of the thread must keep them: code that
 * mixes SSE and AVX, such as the caller's own calls into libm, was measured more than 100 times
 * slower.
 */
#if defined(__x86_64__)
__attribute__((target("avx"))) static void clean_upper_halves(void)
{
    __builtin_ia32_vzeroupper();
}

static void clean_vector_registers(void)
{
    if (__builtin_cpu_supports("avx")) {
        clean_upper_halves();
    }
}
#else
static void clean_vector_registers(void)
{
}
#endif

uint32_t ep_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    while (bytes > 0) {
        size_t piece = bytes < CRC_PIECE_BYTES ? bytes : CRC_PIECE_BYTES;
        /* the library reads only; its parameter lacks const */
        crc = ~crc32_iscsi((unsigned char *)(uintptr_t)at, (int)piece, ~crc);
        at += piece;
        bytes -= piece;
    }
    clean_vector_registers();
    return crc;
}
