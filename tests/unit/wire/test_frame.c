/* SPDX-License-Identifier: Apache-2.0 */
/* The fixed part of a frame: every offset as documented, every rule refused when broken, and
 * CRC32C. */
#include "support/expect.h"
#include "wire/frame.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <criterion/criterion.h>
#include <string.h>

#include "base/random.h"

static ep_frame request(void)
{
    return (ep_frame){.kind = EP_FRAME_REQUEST,
                      .call_id = 0x1122334455667788ull,
                      .attempt = 0x0a0b,
                      .method_id = 0x0102,
                      .deadline_us = 0xd1d2d3d4u,
                      .header_bytes = 100,
                      .tensor_offset = 192,
                      .tensor_bytes = 0x12340ull,
                      .payload_crc = 0xc1c2c3c4u};
}

static void reseal(uint8_t fixed[64])
{
    uint32_t crc = ep_crc32c(0, fixed, 60);
    for (int i = 0; i < 4; i++) {
        fixed[60 + i] = (uint8_t)(crc >> (8 * i));
    }
}

static ep_err decode(const uint8_t fixed[64], ep_error *error)
{
    ep_frame frame;
    size_t bytes;
    return ep_frame_decode(fixed, 16u << 20, 64u << 10, &frame, &bytes, error);
}

static uint64_t read_le(const uint8_t *at, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--) {
        value = value << 8 | at[i];
    }
    return value;
}

Test(frame, crc32c_has_the_check_value)
{
    cr_assert_eq(ep_crc32c(0, "123456789", 9), 0xe3069283u);
    cr_assert_eq(ep_crc32c(0, "", 0), 0u);
}

#if defined(__x86_64__)
/* Bits 2 and 6 of XINUSE: upper halves of the ymm and zmm registers. */
static bool upper_halves_in_use(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
    return (low & ((1u << 2) | (1u << 6))) != 0;
}

static bool can_ask(void)
{
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx") && __get_cpuid_count(0xd, 1, &a, &b, &c, &d) != 0 &&
           (a & (1u << 2)) != 0;
}

Test(frame, crc32c_leaves_the_vector_registers_clean)
{
    static uint8_t data[4096];
    for (size_t bytes = 1; can_ask() && bytes <= sizeof(data); bytes *= 2) {
        ep_crc32c(0, data, bytes);
        cr_assert(!upper_halves_in_use(), "after %zu bytes", bytes);
    }
}
#endif

Test(frame, crc32c_of_parts_is_that_of_the_whole)
{
    uint8_t data[1000];
    uint64_t state = 1;
    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (uint8_t)ep_splitmix64(&state);
    }
    uint32_t whole = ep_crc32c(0, data, sizeof(data));
    for (size_t cut = 0; cut <= sizeof(data); cut += 7) {
        cr_assert_eq(ep_crc32c(ep_crc32c(0, data, cut), data + cut, sizeof(data) - cut), whole);
    }
}

Test(frame, writes_every_field_where_the_format_says)
{
    ep_frame frame = request();
    uint8_t fixed[64];
    memset(fixed, 0xee, sizeof(fixed));
    ep_frame_encode(&frame, fixed);
    cr_assert_eq(memcmp(fixed, "EPD1", 4), 0);
    cr_assert_eq(fixed[4], 1);
    cr_assert_eq(fixed[5], 1);
    cr_assert_eq(read_le(fixed + 6, 2), 0);
    cr_assert_eq(read_le(fixed + 8, 8), frame.call_id);
    cr_assert_eq(read_le(fixed + 16, 2), frame.attempt);
    cr_assert_eq(read_le(fixed + 18, 2), frame.method_id);
    cr_assert_eq(read_le(fixed + 20, 4), 0);
    cr_assert_eq(read_le(fixed + 24, 4), frame.deadline_us);
    cr_assert_eq(read_le(fixed + 28, 4), 100);
    cr_assert_eq(read_le(fixed + 32, 4), 192);
    cr_assert_eq(read_le(fixed + 36, 4), 0);
    cr_assert_eq(read_le(fixed + 40, 8), frame.tensor_bytes);
    cr_assert_eq(read_le(fixed + 48, 4), frame.payload_crc);
    cr_assert_eq(read_le(fixed + 52, 8), 0);
    cr_assert_eq(read_le(fixed + 60, 4), ep_crc32c(0, fixed, 60));
}

Test(frame, reads_back_every_kind)
{
    ep_frame frames[] = {
        request(),
        {.kind = EP_FRAME_REPLY,
         .flags = 3,
         .call_id = 1,
         .attempt = 2,
         .method_id = 3,
         .status = 16,
         .stream_sequence = 9,
         .header_bytes = 1,
         .tensor_offset = 128,
         .tensor_bytes = 1,
         .payload_crc = 5},
        {.kind = EP_FRAME_REPLY_MORE,
         .call_id = 1,
         .stream_sequence = 7,
         .tensor_offset = 64,
         .tensor_bytes = 64},
        {.kind = EP_FRAME_CANCEL, .call_id = 1, .attempt = 4, .tensor_offset = 64},
        {.kind = EP_FRAME_CANCEL,
         .flags = EP_FRAME_FLAG_ANSWERED,
         .call_id = 1,
         .tensor_offset = 64},
        {.kind = EP_FRAME_PING, .call_id = 11, .tensor_offset = 64},
        {.kind = EP_FRAME_PONG,
         .flags = EP_FRAME_FLAG_DRAINING,
         .call_id = 11,
         .tensor_offset = 64},
        {.kind = EP_FRAME_CREDIT, .header_bytes = 16, .tensor_offset = 128, .payload_crc = 8},
        {.kind = EP_FRAME_GOODBYE, .status = 14, .header_bytes = 20, .tensor_offset = 128},
    };
    for (size_t i = 0; i < sizeof(frames) / sizeof(frames[0]); i++) {
        uint8_t fixed[64], again[64];
        ep_frame back;
        size_t bytes = 0;
        ep_error error;
        memset(&back, 0, sizeof(back));
        ep_frame_encode(&frames[i], fixed);
        ASSERT_OK(ep_frame_decode(fixed, 16u << 20, 64u << 10, &back, &bytes, &error), error);
        cr_assert_eq(bytes, frames[i].tensor_offset + frames[i].tensor_bytes);
        const ep_frame read = ep_frame_read(fixed);
        ep_frame_encode(&read, again);
        cr_assert_arr_eq(again, fixed, sizeof(fixed));
        cr_assert_eq(ep_frame_check_header_bytes(&read, read.header_bytes, NULL), EP_OK);
        cr_assert(read.header_bytes == 0 ||
                  ep_frame_check_header_bytes(&read, read.header_bytes - 1, NULL) ==
                      EP_ERR_RESOURCE_EXHAUSTED);
        cr_assert_eq(back.kind, frames[i].kind);
        cr_assert_eq(back.flags, frames[i].flags);
        cr_assert_eq(back.call_id, frames[i].call_id);
        cr_assert_eq(back.attempt, frames[i].attempt);
        cr_assert_eq(back.method_id, frames[i].method_id);
        cr_assert_eq(back.status, frames[i].status);
        cr_assert_eq(back.deadline_us, frames[i].deadline_us);
        cr_assert_eq(back.header_bytes, frames[i].header_bytes);
        cr_assert_eq(back.tensor_offset, frames[i].tensor_offset);
        cr_assert_eq(back.stream_sequence, frames[i].stream_sequence);
        cr_assert_eq(back.tensor_bytes, frames[i].tensor_bytes);
        cr_assert_eq(back.payload_crc, frames[i].payload_crc);
    }
}

Test(frame, refuses_every_single_flipped_bit)
{
    ep_frame frame = request();
    uint8_t fixed[64];
    ep_frame_encode(&frame, fixed);
    for (size_t bit = 0; bit < 512; bit++) {
        fixed[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        cr_assert_eq(decode(fixed, NULL), EP_ERR_PROTOCOL, "bit %zu", bit);
        fixed[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
    cr_assert_eq(decode(fixed, NULL), EP_OK);
}

/* One changed byte under a correct CRC, and what must come of it. */
typedef struct broken_rule {
    ep_frame_kind kind;
    int offset;
    uint8_t value;
    ep_err want;
} broken_rule;

Test(frame, refuses_each_broken_rule_under_a_good_crc)
{
    const broken_rule rules[] = {
        {EP_FRAME_REQUEST, 5, 0, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 5, 9, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 6, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 7, 0x80, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 20, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 36, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 32, 65, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 32, 128, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 33, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 52, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 59, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_REQUEST, 31, 1, EP_ERR_RESOURCE_EXHAUSTED},
        {EP_FRAME_REQUEST, 30, 1, EP_ERR_RESOURCE_EXHAUSTED},
        {EP_FRAME_REQUEST, 43, 1, EP_ERR_RESOURCE_EXHAUSTED},
        {EP_FRAME_REQUEST, 47, 0xff, EP_ERR_RESOURCE_EXHAUSTED},
        {EP_FRAME_REPLY, 20, 17, EP_ERR_PROTOCOL},
        {EP_FRAME_REPLY, 24, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_REPLY_MORE, 20, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_CANCEL, 18, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_CANCEL, 40, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_PING, 16, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_PING, 28, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_PING, 48, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_CREDIT, 28, 17, EP_ERR_PROTOCOL},
        {EP_FRAME_CREDIT, 8, 1, EP_ERR_PROTOCOL},
        {EP_FRAME_GOODBYE, 40, 1, EP_ERR_PROTOCOL},
    };
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        ep_frame frame = {.kind = rules[i].kind, .tensor_offset = 64};
        if (rules[i].kind == EP_FRAME_CREDIT || rules[i].kind == EP_FRAME_REQUEST) {
            frame.header_bytes = 16;
            frame.tensor_offset = 128;
        }
        if (rules[i].kind == EP_FRAME_REQUEST && rules[i].offset == 32 && rules[i].value == 128) {
            frame.header_bytes = 100; /* 128 would lie inside the header */
            frame.tensor_offset = 192;
        }
        uint8_t fixed[64];
        ep_frame_encode(&frame, fixed);
        fixed[rules[i].offset] = rules[i].value;
        reseal(fixed);
        ep_error error;
        ep_error_clear(&error);
        cr_assert_eq(decode(fixed, &error), rules[i].want, "case %zu: %s", i, error.text);
        cr_assert_eq(error.code, rules[i].want);
        cr_assert_gt(strlen(error.text), 10);
    }
}

Test(frame, says_version_and_magic_before_anything_else)
{
    ep_frame frame = request();
    uint8_t fixed[64];
    ep_error error;
    ep_frame_encode(&frame, fixed);
    fixed[4] = 2;
    ASSERT_FAILS(decode(fixed, &error), EP_ERR_PROTOCOL, error, "version 2");
    fixed[0] = 'G';
    ASSERT_FAILS(decode(fixed, &error), EP_ERR_PROTOCOL, error, "magic");
}

Test(frame, takes_exactly_the_limits)
{
    ep_frame frame = request();
    uint8_t fixed[64];
    frame.header_bytes = 4096;
    frame.tensor_offset = ep_frame_tensor_offset(4096);
    frame.tensor_bytes = 100000 - frame.tensor_offset;
    ep_frame_encode(&frame, fixed);
    cr_assert_eq(ep_frame_decode(fixed, 100000, 4096, NULL, NULL, NULL), EP_OK);
    cr_assert_eq(ep_frame_decode(fixed, 99999, 4096, NULL, NULL, NULL), EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_eq(ep_frame_decode(fixed, 100000, 4095, NULL, NULL, NULL), EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_eq(ep_frame_decode(fixed, 64, 4096, NULL, NULL, NULL), EP_ERR_RESOURCE_EXHAUSTED);
}

Test(frame, leaves_outputs_alone_on_error)
{
    uint8_t fixed[64] = {0};
    ep_frame frame = {.call_id = 77};
    size_t bytes = 88;
    cr_assert_eq(ep_frame_decode(fixed, 1 << 20, 1 << 10, &frame, &bytes, NULL), EP_ERR_PROTOCOL);
    cr_assert_eq(frame.call_id, 77u);
    cr_assert_eq(bytes, 88u);
}

Test(frame, survives_random_bytes_under_a_good_crc)
{
    uint64_t state = 42;
    size_t accepted = 0;
    for (int round = 0; round < 200000; round++) {
        uint8_t fixed[64];
        for (size_t i = 0; i < sizeof(fixed); i++) {
            uint64_t r = ep_splitmix64(&state);
            fixed[i] = (r & 0x300) != 0 ? 0 : (uint8_t)r;
        }
        memcpy(fixed, "EPD1\x01", 5);
        memset(fixed + 52, 0, 8);
        reseal(fixed);
        ep_frame frame;
        size_t bytes;
        if (ep_frame_decode(fixed, 1 << 20, 1 << 10, &frame, &bytes, NULL) == EP_OK) {
            uint8_t back[64];
            ep_frame_encode(&frame, back); /* asserts every rule */
            cr_assert_eq(memcmp(fixed, back, 64), 0);
            cr_assert_leq(bytes, 1u << 20);
            accepted++;
        }
    }
    cr_log_info("%zu of 200000 accepted", accepted);
}

Test(frame, credit_header_round_trips)
{
    ep_frame_credit in = {.tokens = 0x0102030405060708ull, .bytes = 0xf1f2f3f4f5f6f7f8ull};
    uint8_t header[EP_FRAME_CREDIT_BYTES];
    ep_frame_credit out;
    ep_frame_credit_encode(&in, header);
    cr_assert_eq(header[0], 0x08);
    cr_assert_eq(header[15], 0xf1);
    ep_frame_credit_decode(header, &out);
    cr_assert_eq(out.tokens, in.tokens);
    cr_assert_eq(out.bytes, in.bytes);
}

Test(frame, kinds_have_names)
{
    cr_assert_str_eq(ep_frame_kind_name(EP_FRAME_REPLY_MORE), "reply_more");
    cr_assert_str_eq(ep_frame_kind_name((ep_frame_kind)0), "unknown");
    cr_assert_str_eq(ep_frame_kind_name((ep_frame_kind)200), "unknown");
}
