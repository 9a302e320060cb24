/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "observe/trace.h"

#define GOOD "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Test(trace, reads_and_writes_traceparent)
{
    ep_trace_id id = {0, 0};
    uint64_t span = 0;
    char text[EP_TRACEPARENT_CHARS + 1];
    cr_assert(ep_traceparent_parse(GOOD, &id, &span));
    cr_assert_eq(id.high, 0x0af7651916cd43ddull);
    cr_assert_eq(id.low, 0x8448eb211c80319cull);
    cr_assert_eq(span, 0xb7ad6b7169203331ull);
    ep_traceparent_format(id, span, text);
    cr_assert_str_eq(text, GOOD);
    cr_assert(ep_traceparent_parse("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00-later",
                                   &id, &span));
}

Test(trace, refuses_what_is_no_traceparent)
{
    static const char *const bad[] = {
        NULL,
        "",
        "00",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        GOOD "-more",
        GOOD "0",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331_01",
        "00-0af7651916cd43dd8448eb211c80319cxb7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333g-01",
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ep_trace_id id = {1, 2};
        uint64_t span = 3;
        cr_assert(!ep_traceparent_parse(bad[i], &id, &span), "%zu", i);
        cr_assert(id.high == 1 && id.low == 2 && span == 3);
    }
}

Test(trace, ids_differ_and_are_not_zero)
{
    uint64_t last = 0;
    for (int i = 0; i < 1000; i++) {
        uint64_t id = ep_trace_new_id();
        cr_assert(id != 0 && id != last);
        last = id;
    }
    const ep_trace_id trace = ep_trace_new_trace();
    cr_assert(trace.high != 0 || trace.low != 0);
}

Test(trace, is_off_until_probes_are_loaded)
{
    cr_assert(!ep_trace_loaded());
    cr_assert(!EP_TRACE_SPAN_ON(forward));
    EP_TRACE(forward_begin, NULL);
}

Test(trace, loading_never_waits_for_a_session_daemon)
{
    const char *why = NULL;
    unsetenv("LTTNG_UST_REGISTER_TIMEOUT");
    setenv("LTTNG_HOME", "/nonexistent", 1);
    if (!ep_trace_load(&why)) {
        cr_skip_test("%s", why); /* built without LTTng */
    }
    cr_assert(ep_trace_loaded());
    cr_assert_str_eq(getenv("LTTNG_UST_REGISTER_TIMEOUT"), "0");
    cr_assert(!EP_TRACE_SPAN_ON(forward));
    cr_assert(ep_trace_load(&why)); /* a second time changes nothing */
}
