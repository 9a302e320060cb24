/* SPDX-License-Identifier: Apache-2.0 */
/* The fixed part of a frame. One table says which fields a kind uses, and both directions are
 * checked against it. */
#include "wire/frame.h"

#include <endian.h>
#include <isa-l/crc.h>
#include <string.h>

#include "base/check.h"

#define STATUS_MAX 16u
#define CRC_PIECE_BYTES ((size_t)1 << 29) /* crc32_iscsi takes an int */

/* The fixed part as in memory, numbers little endian. */
typedef struct fixed_part {
    uint8_t magic[4];
    uint8_t version;
    uint8_t kind;
    uint16_t flags;
    uint64_t call_id;
    uint16_t attempt;
    uint16_t method_id;
    uint32_t status;
    uint32_t deadline_us;
    uint32_t header_bytes;
    uint32_t tensor_offset;
    uint32_t stream_sequence;
    uint64_t tensor_bytes;
    uint32_t payload_crc;
    uint8_t reserved[8];
    uint32_t fixed_crc; /* of the bytes before it */
} fixed_part;

_Static_assert(sizeof(fixed_part) == EP_FRAME_FIXED_BYTES && offsetof(fixed_part, call_id) == 8 &&
                   offsetof(fixed_part, tensor_bytes) == 40 &&
                   offsetof(fixed_part, fixed_crc) == 60,
               "as frame.h says");

static const uint8_t magic[4] = {'E', 'P', 'D', '1'};

/* a bit for each field, in the order of `names` */
enum {
    USES_CALL_ID = 1 << 0,
    USES_ATTEMPT = 1 << 1,
    USES_METHOD_ID = 1 << 2,
    USES_STATUS = 1 << 3,
    USES_DEADLINE = 1 << 4,
    USES_SEQUENCE = 1 << 5,
    USES_CRC = 1 << 6,
    USES_HEADER = 1 << 7,
    USES_TENSORS = 1 << 8
};
static const char *const names[] = {"call_id",     "attempt",      "method_id",
                                    "status",      "deadline_us",  "stream_sequence",
                                    "payload_crc", "header_bytes", "tensor_bytes"};

#define USES_CALL (USES_CALL_ID | USES_ATTEMPT | USES_METHOD_ID)
#define USES_TEXT (USES_HEADER | USES_CRC)
#define USES_PAYLOAD (USES_TEXT | USES_TENSORS)
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
    [EP_FRAME_CREDIT] = {"credit", USES_TEXT, 0},
    [EP_FRAME_GOODBYE] = {"goodbye", USES_STATUS | USES_TEXT, EP_FRAME_FLAG_DRAINING},
};

const char *ep_frame_kind_name(ep_frame_kind kind)
{
    unsigned number = (unsigned)kind;
    return number >= 1 && number <= EP_FRAME_KIND_LAST ? rules[number].name : "unknown";
}

/* Name of the first field that is set although the kind does not use it, or has an impossible
 * value; NULL when there is none. */
static const char *wrong_field(const ep_frame *f)
{
    const struct kind_rule *rule = &rules[f->kind];
    if ((f->flags & (uint16_t)~rule->flags) != 0) {
        return "flags";
    }
    const unsigned given =
        (f->call_id != 0 ? USES_CALL_ID : 0) | (f->attempt != 0 ? USES_ATTEMPT : 0) |
        (f->method_id != 0 ? USES_METHOD_ID : 0) | (f->status != 0 ? USES_STATUS : 0) |
        (f->deadline_us != 0 ? USES_DEADLINE : 0) | (f->stream_sequence != 0 ? USES_SEQUENCE : 0) |
        (f->payload_crc != 0 ? USES_CRC : 0) | (f->header_bytes != 0 ? USES_HEADER : 0) |
        (f->tensor_bytes != 0 ? USES_TENSORS : 0);
    const unsigned wrong = given & ~rule->uses;
    if (wrong != 0) {
        return names[__builtin_ctz(wrong)];
    }
    if (f->status > STATUS_MAX) {
        return "status";
    }
    return f->kind == EP_FRAME_CREDIT && f->header_bytes != EP_FRAME_CREDIT_BYTES ? "header_bytes"
                                                                                  : NULL;
}

void ep_frame_encode(const ep_frame *frame, uint8_t out[EP_FRAME_FIXED_BYTES])
{
    EP_ASSERT(frame->kind >= 1 && frame->kind <= EP_FRAME_KIND_LAST);
    EP_ASSERT(wrong_field(frame) == NULL);
    EP_ASSERT(frame->header_bytes <= EP_FRAME_HEADER_BYTES_CEILING);
    EP_ASSERT(frame->tensor_offset == ep_frame_tensor_offset(frame->header_bytes));
    EP_ASSERT(frame->tensor_bytes <= EP_FRAME_BYTES_CEILING - frame->tensor_offset);

    fixed_part fixed = {
        .version = EP_FRAME_VERSION,
        .kind = (uint8_t)frame->kind,
        .flags = htole16(frame->flags),
        .call_id = htole64(frame->call_id),
        .attempt = htole16(frame->attempt),
        .method_id = htole16(frame->method_id),
        .status = htole32(frame->status),
        .deadline_us = htole32(frame->deadline_us),
        .header_bytes = htole32(frame->header_bytes),
        .tensor_offset = htole32(frame->tensor_offset),
        .stream_sequence = htole32(frame->stream_sequence),
        .tensor_bytes = htole64(frame->tensor_bytes),
        .payload_crc = htole32(frame->payload_crc),
    };
    memcpy(fixed.magic, magic, sizeof(magic));
    fixed.fixed_crc = htole32(ep_crc32c(0, &fixed, offsetof(fixed_part, fixed_crc)));
    memcpy(out, &fixed, sizeof(fixed));
}

/* Checks that must pass before any other byte is believed. */
static ep_err check_identity(const fixed_part *fixed, ep_error *out_error)
{
    static const uint8_t zeros[sizeof(fixed->reserved)];
    const uint8_t *begin = fixed->magic;
    if (memcmp(begin, magic, sizeof(magic)) != 0) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "frame begins with bytes %02x %02x %02x %02x, not with magic EPD1",
                            begin[0], begin[1], begin[2], begin[3]);
    }
    if (fixed->version != EP_FRAME_VERSION) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "frame has wire version %u, this build speaks %u", fixed->version,
                            EP_FRAME_VERSION);
    }
    uint32_t want = le32toh(fixed->fixed_crc);
    uint32_t have = ep_crc32c(0, fixed, offsetof(fixed_part, fixed_crc));
    if (want != have) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "frame's fixed part has CRC32C %08x, its bytes give %08x", want, have);
    }
    if (fixed->kind < 1 || fixed->kind > EP_FRAME_KIND_LAST) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "frame kind is %u, allowed 1 to %u",
                            fixed->kind, (unsigned)EP_FRAME_KIND_LAST);
    }
    if (memcmp(fixed->reserved, zeros, sizeof(zeros)) != 0) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "frame's reserved bytes 52 to 59 are not 0");
    }
    return EP_OK;
}

ep_err ep_frame_check_header_bytes(const ep_frame *frame, size_t header_bytes_max,
                                   ep_error *out_error)
{
    if (frame->header_bytes > header_bytes_max ||
        frame->header_bytes > EP_FRAME_HEADER_BYTES_CEILING) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "%s frame has header_bytes %u, allowed up to header_bytes_max %zu",
                            rules[frame->kind].name, frame->header_bytes, header_bytes_max);
    }
    return EP_OK;
}

ep_frame ep_frame_read(const uint8_t checked[EP_FRAME_FIXED_BYTES])
{
    fixed_part fixed;
    memcpy(&fixed, checked, sizeof(fixed));
    return (ep_frame){
        .kind = (ep_frame_kind)fixed.kind,
        .flags = le16toh(fixed.flags),
        .call_id = le64toh(fixed.call_id),
        .attempt = le16toh(fixed.attempt),
        .method_id = le16toh(fixed.method_id),
        .status = le32toh(fixed.status),
        .deadline_us = le32toh(fixed.deadline_us),
        .header_bytes = le32toh(fixed.header_bytes),
        .tensor_offset = le32toh(fixed.tensor_offset),
        .stream_sequence = le32toh(fixed.stream_sequence),
        .tensor_bytes = le64toh(fixed.tensor_bytes),
        .payload_crc = le32toh(fixed.payload_crc),
    };
}

ep_err ep_frame_decode(const uint8_t bytes[EP_FRAME_FIXED_BYTES], size_t frame_bytes_max,
                       size_t header_bytes_max, ep_frame *out_frame, size_t *out_frame_bytes,
                       ep_error *out_error)
{
    fixed_part fixed;
    memcpy(&fixed, bytes, sizeof(fixed));
    ep_err err = check_identity(&fixed, out_error);
    if (err != EP_OK) {
        return err;
    }
    const ep_frame f = ep_frame_read(bytes);
    const char *wrong = wrong_field(&f);
    if (wrong != NULL) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "%s frame has a value in %s that its kind does not allow",
                            rules[f.kind].name, wrong);
    }
    err = ep_frame_check_header_bytes(&f, header_bytes_max, out_error);
    if (err != EP_OK) {
        return err;
    }
    const char *kind = rules[f.kind].name;
    const uint32_t offset = ep_frame_tensor_offset(f.header_bytes);
    if (f.tensor_offset != offset) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "%s frame with header_bytes %u has tensor offset %u, must be %u", kind,
                            f.header_bytes, f.tensor_offset, offset);
    }
    const size_t limit =
        frame_bytes_max < EP_FRAME_BYTES_CEILING ? frame_bytes_max : EP_FRAME_BYTES_CEILING;
    if (offset > limit || f.tensor_bytes > limit - offset) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "%s frame has header_bytes %u and tensor_bytes %llu, the frame may "
                            "have up to frame_bytes_max %zu",
                            kind, f.header_bytes, (unsigned long long)f.tensor_bytes, limit);
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
    const uint64_t values[] = {htole64(credit->tokens), htole64(credit->bytes)};
    memcpy(out, values, sizeof(values));
}

void ep_frame_credit_decode(const uint8_t header[EP_FRAME_CREDIT_BYTES],
                            ep_frame_credit *out_credit)
{
    uint64_t values[2];
    memcpy(values, header, sizeof(values));
    *out_credit = (ep_frame_credit){.tokens = le64toh(values[0]), .bytes = le64toh(values[1])};
}

/*
 * ISA-L's AVX-512 code (used from 256 bytes on) returns with the upper halves of the vector
 * registers in use. After that, every SSE instruction of the thread must preserve them: code that
 * mixes SSE and AVX, such as the caller's own calls of libm, was measured more than 100 times
 * slower.
 */
#if defined(__x86_64__)
__attribute__((target("avx"))) static void clean_vector_registers(void)
{
    __builtin_ia32_vzeroupper();
}
#endif

uint32_t ep_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    while (bytes > 0) {
        size_t piece = bytes < CRC_PIECE_BYTES ? bytes : CRC_PIECE_BYTES;
        /* the library only reads, but its parameter lacks const */
        crc = ~crc32_iscsi((unsigned char *)(uintptr_t)at, (int)piece, ~crc);
        at += piece;
        bytes -= piece;
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx")) {
        clean_vector_registers();
    }
#endif
    return crc;
}
