/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded by call_path into a program built with -finstrument-functions: which functions run, on
 * any thread, from the begin of one ep_moe_forward to the begin of the next. EP_CALL_PATH_FORWARD
 * is its offset in the program. At the end a line for each function goes to the file
 * EP_CALL_PATH_OUT: its offset, and in how many of the calls it ran.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define SLOTS 65536u

typedef struct seen_function {
    void *function;
    uint32_t call; /* the last one that it ran in */
    uint32_t calls;
} seen_function;

static seen_function table[SLOTS];
static uint32_t current_call;
static char *base, *forward;

void __cyg_profile_func_enter(void *function, void *site);
void __cyg_profile_func_exit(void *function, void *site);

static seen_function *find(void *function)
{
    for (uint32_t i = (uint32_t)(((uintptr_t)function >> 2) * 2654435761u) % SLOTS;;
         i = (i + 1) % SLOTS) {
        void *expected = NULL;
        if (__atomic_load_n(&table[i].function, __ATOMIC_RELAXED) == function ||
            __atomic_compare_exchange_n(&table[i].function, &expected, function, 0,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
            expected == function) {
            return &table[i];
        }
    }
}

void __cyg_profile_func_enter(void *function, void *site)
{
    (void)site;
    if (forward == NULL) {
        Dl_info info;
        const char *offset = getenv("EP_CALL_PATH_FORWARD");
        if (offset == NULL || dladdr(function, &info) == 0) {
            return;
        }
        base = info.dli_fbase;
        forward = base + strtoull(offset, NULL, 16);
    }
    if (function == forward) {
        __atomic_fetch_add(&current_call, 1, __ATOMIC_RELAXED);
    }
    const uint32_t call = __atomic_load_n(&current_call, __ATOMIC_RELAXED);
    seen_function *seen = find(function);
    if (call > 0 && __atomic_exchange_n(&seen->call, call, __ATOMIC_RELAXED) != call) {
        __atomic_fetch_add(&seen->calls, 1, __ATOMIC_RELAXED);
    }
}

void __cyg_profile_func_exit(void *function, void *site)
{
    (void)function;
    (void)site;
}

__attribute__((destructor)) static void write_out(void)
{
    const char *path = getenv("EP_CALL_PATH_OUT");
    FILE *file = path != NULL ? fopen(path, "w") : NULL;
    for (uint32_t i = 0; file != NULL && i < SLOTS; i++) {
        if (table[i].calls > 0) {
            fprintf(file, "%tx %u %u\n", (char *)table[i].function - base, table[i].calls,
                    current_call);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
}
