/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz_script.h"

#include <string.h>

#include "fuzz.h"

size_t fuzz_record_put(uint8_t *out, uint8_t kind, const void *rest, size_t bytes)
{
    out[0] = kind;
    out[1] = (uint8_t)bytes;
    out[2] = (uint8_t)(bytes >> 8);
    memcpy(out + 3, rest, bytes);
    return 3 + bytes;
}

bool fuzz_record_next(const uint8_t **script, size_t *bytes, fuzz_record *out_record)
{
    if (*bytes < 3) {
        return false;
    }
    size_t rest = (size_t)(*script)[1] | (size_t)(*script)[2] << 8;
    rest = rest > *bytes - 3 ? *bytes - 3 : rest;
    *out_record = (fuzz_record){(*script)[0], *script + 3, rest};
    *script += 3 + rest;
    *bytes -= 3 + rest;
    return true;
}

size_t fuzz_script_mutate(uint8_t *script, size_t bytes, size_t bytes_max, uint32_t random,
                          fuzz_change_func change)
{
    static uint8_t fresh[2 * FUZZ_BYTES_MAX];
    fuzz_record records[FUZZ_RECORDS_MAX];
    uint32_t count = 0;
    const uint8_t *at = script;
    for (size_t left = bytes;
         count < FUZZ_RECORDS_MAX && fuzz_record_next(&at, &left, &records[count]); count++) {
    }
    if (count == 0) {
        return fuzz_mutate_bytes(script, bytes, bytes_max);
    }
    fuzz_record r = records[random % count];
    uint32_t deed = random / count % 8;
    size_t before = (size_t)(r.rest - script) - 3;
    size_t after = before + 3 + r.bytes;
    size_t fresh_bytes = deed == 0 ? 0 : fuzz_record_put(fresh, r.kind, r.rest, r.bytes);
    if (deed == 1) {
        fresh_bytes += fuzz_record_put(fresh + fresh_bytes, r.kind, r.rest, r.bytes);
    } else if (deed > 1) {
        size_t rest_max =
            r.bytes + (bytes_max - bytes) < 0xffff ? r.bytes + (bytes_max - bytes) : 0xffff;
        size_t rest = change(r.kind, fresh + 3, r.bytes, rest_max, random / count / 8);
        fresh[1] = (uint8_t)rest;
        fresh[2] = (uint8_t)(rest >> 8);
        fresh_bytes = 3 + rest;
    }
    if (bytes - (after - before) + fresh_bytes > bytes_max) {
        return bytes;
    }
    memmove(script + before + fresh_bytes, script + after, bytes - after);
    memcpy(script + before, fresh, fresh_bytes);
    return bytes - (after - before) + fresh_bytes;
}

void fuzz_stay_inside(uint8_t *data, size_t bytes)
{
    for (size_t i = 0; i + 4 <= bytes; i++) {
        if (memcmp(data + i, "tcp:", 4) == 0 || memcmp(data + i, "shm:", 4) == 0) {
            data[i] = 'x';
        }
    }
}
