/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the library with the probes and points the call sites at it; ids and traceparent. */
#include "observe/trace.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/random.h"
#include "base/thread.h"
#include "observe/trace_provider.h"

#define LIBRARY "libexpertd-trace.so.0"
#define TIMEOUT_ENV "LTTNG_UST_REGISTER_TIMEOUT"
#define ASIDE_TIMEOUT_MS "2000"
#define WHY_BYTES 512

static const int never = 0;
static const ep_trace_provider *provider;

#define EP_TRACE_SPAN(name, step, on, what) &never, &never,
const int *ep_trace_states[EP_TRACE_EVENTS] = {
#include "observe/trace_spans.def"
};
#undef EP_TRACE_SPAN

void ep_trace_emit(ep_trace_event event, const ep_trace_fields *fields)
{
    /* the provider was set before the state that was found on */
    __atomic_load_n(&provider, __ATOMIC_RELAXED)->emit[event](fields);
}

/* table: what dlsym found, or NULL. */
static bool use_provider(const ep_trace_provider *const *table)
{
    const ep_trace_provider *candidate = table != NULL ? *table : NULL;
    if (candidate == NULL || candidate->fields_bytes != sizeof(ep_trace_fields) ||
        strcmp(candidate->spans, ep_trace_spans_text) != 0) {
        return false;
    }
    __atomic_store_n(&provider, candidate, __ATOMIC_RELAXED);
    for (int i = 0; i < EP_TRACE_EVENTS; i++) {
        __atomic_store_n(&ep_trace_states[i], candidate->states[i], __ATOMIC_RELEASE);
    }
    return true;
}

/* A preloaded library's data is initialised before any constructor runs. */
__attribute__((constructor)) static void use_preloaded(void)
{
    use_provider(dlsym(RTLD_DEFAULT, EP_TRACE_PROVIDER_NAME));
}

bool ep_trace_loaded(void)
{
    return __atomic_load_n(&provider, __ATOMIC_RELAXED) != NULL;
}

/* Opens the library beside the installed program, so that a prefix other than the system's needs no
 * loader setting. */
static void *open_beside_program(void)
{
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    if (n <= 0) {
        return NULL;
    }
    path[n] = 0;
    char *slash = strrchr(path, '/');
    size_t room = sizeof(path) - (size_t)(slash + 1 - path);
    int wanted = snprintf(slash + 1, room, "%s/%s", EP_TRACE_LIBDIR_FROM_BINDIR, LIBRARY);
    return wanted > 0 && (size_t)wanted < room ? dlopen(path, RTLD_NOW | RTLD_NODELETE) : NULL;
}

static bool load(char *why, size_t bytes)
{
    snprintf(why, bytes, "probes loaded");
    if (ep_trace_loaded()) {
        return true;
    }
    void *library = open_beside_program();
    if (library == NULL) {
        library = dlopen(LIBRARY, RTLD_NOW | RTLD_NODELETE);
    }
    if (library == NULL) {
        snprintf(why, bytes, "%s", dlerror());
        return false;
    }
    if (!use_provider(dlsym(library, EP_TRACE_PROVIDER_NAME))) {
        snprintf(why, bytes, "%s is of another version", LIBRARY);
        return false;
    }
    return true;
}

bool ep_trace_load(const char **out_why)
{
    static char why[WHY_BYTES];
    setenv(TIMEOUT_ENV, "0", 0);
    if (out_why != NULL) {
        *out_why = why;
    }
    return load(why, sizeof(why));
}

static void *load_aside(void *arg)
{
    ep_trace_loaded_func done = *(ep_trace_loaded_func *)arg;
    char why[WHY_BYTES];
    bool loaded = load(why, sizeof(why));
    done(loaded, why);
    return NULL;
}

void ep_trace_load_aside(ep_trace_loaded_func done)
{
    static ep_trace_loaded_func kept;
    pthread_t thread;
    kept = done;
    setenv(TIMEOUT_ENV, ASIDE_TIMEOUT_MS, 0);
    if (ep_thread_start("expertd-trace", load_aside, &kept, &thread) == EP_OK) {
        pthread_detach(thread);
    } else {
        done(false, strerror(errno));
    }
}

static char process_name[64];

void ep_trace_set_process(const char *name)
{
    snprintf(process_name, sizeof(process_name), "%s", name);
}

const char *ep_trace_process(void)
{
    return process_name;
}

/* ---- ids ---- */

uint64_t ep_trace_new_id(void)
{
    static uint64_t state; /* 0: not seeded */
    if (__atomic_load_n(&state, __ATOMIC_RELAXED) == 0) {
        uint64_t none = 0;
        __atomic_compare_exchange_n(&state, &none, ep_random_id(), false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED);
    }
    uint64_t id;
    do {
        uint64_t at = __atomic_fetch_add(&state, 0x9e3779b97f4a7c15ull, __ATOMIC_RELAXED);
        id = ep_splitmix64(&at);
    } while (id == 0);
    return id;
}

ep_trace_id ep_trace_new_trace(void)
{
    return (ep_trace_id){.high = ep_trace_new_id(), .low = ep_trace_new_id()};
}

/* ---- traceparent ---- */

#define VERSION_CHARS 2
#define TRACE_AT 3
#define SPAN_AT 36
#define FLAGS_AT 53

static bool parse_hex(const char *text, size_t chars, uint64_t *out_value)
{
    uint64_t value = 0;
    for (size_t i = 0; i < chars; i++) {
        char c = text[i];
        unsigned digit = c >= '0' && c <= '9' ? (unsigned)(c - '0') : (unsigned)(c - 'a') + 10;
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) {
            return false;
        }
        value = value << 4 | digit;
    }
    *out_value = value;
    return true;
}

bool ep_traceparent_parse(const char *text, ep_trace_id *out_trace, uint64_t *out_span)
{
    uint64_t version, high, low, span, flags;
    size_t chars = text != NULL ? strnlen(text, EP_TRACEPARENT_CHARS + 1) : 0;
    if (chars < EP_TRACEPARENT_CHARS || text[VERSION_CHARS] != '-' || text[SPAN_AT - 1] != '-' ||
        text[FLAGS_AT - 1] != '-' || !parse_hex(text, VERSION_CHARS, &version) ||
        !parse_hex(text + TRACE_AT, 16, &high) || !parse_hex(text + TRACE_AT + 16, 16, &low) ||
        !parse_hex(text + SPAN_AT, 16, &span) || !parse_hex(text + FLAGS_AT, 2, &flags)) {
        return false;
    }
    /* a later version may continue after another dash */
    bool more = text[EP_TRACEPARENT_CHARS] != 0;
    if (version == 0xff || (more && (version == 0 || text[EP_TRACEPARENT_CHARS] != '-')) ||
        (high == 0 && low == 0) || span == 0) {
        return false;
    }
    *out_trace = (ep_trace_id){high, low};
    *out_span = span;
    return true;
}

static char *format_hex(char *out, uint64_t value)
{
    for (int shift = 60; shift >= 0; shift -= 4) {
        *out++ = "0123456789abcdef"[value >> shift & 15];
    }
    return out;
}

void ep_traceparent_format(ep_trace_id trace, uint64_t span,
                           char out_text[EP_TRACEPARENT_CHARS + 1])
{
    memcpy(out_text, "00-", 3);
    char *end = format_hex(out_text + TRACE_AT, trace.high);
    end = format_hex(end, trace.low);
    *end++ = '-';
    end = format_hex(end, span);
    memcpy(end, "-01", 4);
}
