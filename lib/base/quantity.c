/* SPDX-License-Identifier: Apache-2.0 */
#include "base/quantity.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef unsigned __int128 wide;
typedef enum kind { KIND_NUMBER, KIND_SIZE, KIND_TIME } kind;

/* worth: in bytes or microseconds. Ascending within a kind; a value's first name is the one
 * written. */
static const struct {
    const char *name;
    kind kind;
    uint64_t worth;
} suffixes[] = {
    {"B", KIND_SIZE, 1},          {"K", KIND_SIZE, 1ull << 10}, {"M", KIND_SIZE, 1ull << 20},
    {"G", KIND_SIZE, 1ull << 30}, {"T", KIND_SIZE, 1ull << 40}, {"us", KIND_TIME, 1},
    {"ms", KIND_TIME, 1000},      {"s", KIND_TIME, 1000000},    {"m", KIND_TIME, 60000000},
    {"h", KIND_TIME, 3600000000},
};
#define SUFFIXES_COUNT (sizeof(suffixes) / sizeof(suffixes[0]))

#define SIZE_HINT ", with K, M, G or T (powers of 1024); a number alone is "
#define TIME_HINT ", with us, ms, s, m or h; a number alone is "
static const struct {
    kind kind;
    uint64_t worth;
    const char *inexact;
    const char *hint;
} units[] = {
    [EP_UNIT_NONE] = {KIND_NUMBER, 1, "is not a whole number", ""},
    [EP_UNIT_BYTES] = {KIND_SIZE, 1, "is not a whole number of bytes", SIZE_HINT "bytes"},
    [EP_UNIT_KIB] = {KIND_SIZE, 1024, "is not a whole number of KiB", SIZE_HINT "KiB"},
    [EP_UNIT_US] = {KIND_TIME, 1, "is not a whole number of us", TIME_HINT "us"},
    [EP_UNIT_MS] = {KIND_TIME, 1000, "is not a whole number of ms", TIME_HINT "ms"},
    [EP_UNIT_S] = {KIND_TIME, 1000000, "is not a whole number of s", TIME_HINT "s"},
};

/* Index in suffixes; SUFFIXES_COUNT for none. "KiB" is "K". */
static size_t find_suffix(const char *text)
{
    size_t bytes = strlen(text);
    bytes -= bytes == 3 && strcmp(text + 1, "iB") == 0 && strchr("KMGT", text[0]) != NULL ? 2 : 0;
    size_t i = 0;
    while (i < SUFFIXES_COUNT &&
           (strlen(suffixes[i].name) != bytes || strncmp(suffixes[i].name, text, bytes) != 0)) {
        i++;
    }
    return i;
}

/* Splits digits and, where allowed, a point and decimals. *out_suffix: what follows. */
static bool split(const char *text, bool fraction_allowed, size_t *out_whole, size_t *out_decimals,
                  const char **out_suffix)
{
    size_t whole = strspn(text, "0123456789");
    size_t decimals = 0;
    const char *rest = text + whole;
    if (fraction_allowed && *rest == '.') {
        decimals = strspn(rest + 1, "0123456789");
        rest += 1 + decimals;
        if (decimals == 0) {
            return false;
        }
    }
    *out_whole = whole;
    *out_decimals = decimals;
    *out_suffix = rest;
    return whole > 0;
}

/* number * 10^count + digits. False: more than 64 bits. */
static bool append_digits(const char *digits, size_t count, uint64_t *number)
{
    for (size_t i = 0; i < count; i++) {
        if (__builtin_mul_overflow(*number, 10u, number) ||
            __builtin_add_overflow(*number, (uint64_t)(digits[i] - '0'), number)) {
            return false;
        }
    }
    return true;
}

const char *ep_quantity_parse(const char *text, ep_unit plain, ep_unit unit, uint64_t *out_number)
{
    static const char *const rubbish[] = {"is not a whole number", "is not a size",
                                          "is not a time"};
    static const char *const other_kind[] = {"is not a whole number", "is a time, not a size",
                                             "is a size, not a time"};
    const kind wanted = units[unit].kind;
    const char *suffix;
    size_t whole, decimals;
    uint64_t digits = 0, worth = units[plain].worth;
    if (!split(text, wanted != KIND_NUMBER, &whole, &decimals, &suffix)) {
        return rubbish[wanted];
    }
    if (*suffix != '\0') {
        const size_t i = find_suffix(suffix);
        if (i == SUFFIXES_COUNT || suffixes[i].kind != wanted) {
            return i == SUFFIXES_COUNT ? rubbish[wanted] : other_kind[wanted];
        }
        worth = suffixes[i].worth;
    }
    if (!append_digits(text, whole, &digits)) {
        return "is out of range";
    }
    const char *fraction = text + whole + 1;
    while (decimals > 0 && fraction[decimals - 1] == '0') {
        decimals--;
    }
    /* 19 decimals of 64 bits times the largest worth fit 128 bits, and so does their power of ten
     * times the largest unit. */
    if (decimals > 19 || !append_digits(fraction, decimals, &digits)) {
        return units[unit].inexact;
    }
    wide divisor = units[unit].worth;
    for (size_t i = 0; i < decimals; i++) {
        divisor *= 10;
    }
    const wide value = (wide)digits * worth;
    if (value % divisor != 0) {
        return units[unit].inexact;
    }
    if (value / divisor > UINT64_MAX) {
        return "is out of range";
    }
    *out_number = (uint64_t)(value / divisor);
    return NULL;
}

const char *ep_quantity_hint(ep_unit plain)
{
    return units[plain].hint;
}

char *ep_quantity_format(uint64_t number, ep_unit unit, char out[EP_QUANTITY_BYTES])
{
    const wide value = (wide)number * units[unit].worth;
    size_t best = SUFFIXES_COUNT;
    for (size_t i = 0; i < SUFFIXES_COUNT; i++) {
        if (suffixes[i].kind == units[unit].kind && value % suffixes[i].worth == 0) {
            best = i;
        }
    }
    /* 0 needs no unit, and bytes need none. */
    bool is_plain = number == 0 || best == SUFFIXES_COUNT || suffixes[best].name[0] == 'B';
    uint64_t shown = is_plain ? number : (uint64_t)(value / suffixes[best].worth);
    snprintf(out, EP_QUANTITY_BYTES, "%" PRIu64 "%s", shown, is_plain ? "" : suffixes[best].name);
    return out;
}
