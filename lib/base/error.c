/* SPDX-License-Identifier: Apache-2.0 */
/* The error table's look-ups and ep_error_set. */
#include "base/error.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"

typedef struct {
    ep_err code;
    uint32_t grpc_code;
    ep_broke broke;
    bool other_copy;
    const char *name;
    const char *text;
} ep_err_row;

static const ep_err_row rows[] = {
#define EP_ERR_ROW(name, wire, grpc, broke, other, text)                                           \
    {EP_ERR_##name, grpc, EP_BROKE_##broke, other, #name, text},
    EP_ERR_MAP(EP_ERR_ROW)
#undef EP_ERR_ROW
};

static const ep_err_row *find_row(ep_err err)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(rows); i++) {
        if (rows[i].code == err) {
            return &rows[i];
        }
    }
    return &rows[2]; /* UNKNOWN */
}

const char *ep_err_name(ep_err err)
{
    return find_row(err)->name;
}

const char *ep_err_text(ep_err err)
{
    return find_row(err)->text;
}

uint32_t ep_err_grpc_code(ep_err err)
{
    return find_row(err)->grpc_code;
}

ep_broke ep_err_broke(ep_err err)
{
    return find_row(err)->broke;
}

bool ep_err_other_copy_may_help(ep_err err)
{
    return find_row(err)->other_copy;
}

ep_err ep_err_from_wire(uint32_t reason, uint32_t grpc_code)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(rows); i++) {
        if ((uint32_t)rows[i].code == reason && (reason != 0 || grpc_code == 0)) {
            return rows[i].code;
        }
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(rows); i++) {
        if ((uint32_t)rows[i].code == grpc_code) {
            return rows[i].code; /* canonical codes equal their gRPC numbers */
        }
    }
    return EP_ERR_UNKNOWN;
}

void ep_error_clear(ep_error *error)
{
    memset(error, 0, sizeof(*error));
    error->layer = -1;
    error->expert = -1;
    error->waited_us = -1;
}

ep_err ep_error_set(ep_error *error, ep_err code, const char *format, ...)
{
    if (error != NULL) {
        va_list args;
        ep_error_clear(error);
        error->code = code;
        va_start(args, format);
        vsnprintf(error->text, sizeof(error->text), format, args);
        va_end(args);
    }
    return code;
}

ep_err ep_error_prefix(ep_error *error, ep_err code, const char *format, ...)
{
    if (error == NULL) {
        return code;
    }
    char cause[EP_ERROR_TEXT_BYTES];
    memcpy(cause, error->text, sizeof(cause));
    va_list args;
    va_start(args, format);
    vsnprintf(error->text, sizeof(error->text), format, args);
    va_end(args);

    size_t used = strlen(error->text);
    snprintf(error->text + used, sizeof(error->text) - used, ": %s", cause);
    return error->code;
}

ep_err ep_ranges_check(const ep_range *ranges, size_t count, ep_error *out_error)
{
    for (size_t i = 0; i < count; i++) {
        const ep_range *r = &ranges[i];
        if (r->value < r->min || r->value > r->max) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "%s is %" PRIu64 ": allowed %" PRIu64 "..%" PRIu64, r->name,
                                r->value, r->min, r->max);
        }
    }
    return EP_OK;
}

const char *ep_errno_text(int number, char out[EP_ERRNO_TEXT_BYTES])
{
    char text[EP_ERRNO_TEXT_BYTES / 2];
    const char *what = strerror_r(number, text, sizeof(text));
    if (number == EACCES || number == EPERM) {
        snprintf(out, EP_ERRNO_TEXT_BYTES, "%s (this process is user %u)", what,
                 (unsigned)geteuid());
    } else if (number == ENOSPC || number == EDQUOT) {
        snprintf(out, EP_ERRNO_TEXT_BYTES, "%s: make room on that disk", what);
    } else {
        snprintf(out, EP_ERRNO_TEXT_BYTES, "%s", what);
    }
    return out;
}

_Noreturn void ep_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "expertd: internal error: %s is false at %s:%d\n", condition, file, line);
    abort();
}
