/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The world's time, threads and randomness, in place of the system's: the linker (--wrap) turns the
 * product's calls to here, the product's objects stay as they are.
 *
 *   ep_clock_now_ns        virtual time
 *   ep_timer_service_*     timers are events of the host the service was created in
 *   pthread_cond_*wait     runs events until it is woken: the one thread there is does what the
 *                          others would have done
 *   ep_thread_start, pthread_join   the function runs as an event
 *   ep_random_id           from the world's seed
 *   ep_rpc_call_start, ep_combine   watched: see sim_watch_*
 */
#ifndef EP_TESTS_SIM_ENV_H
#define EP_TESTS_SIM_ENV_H

#include "moe/combine.h"
#include "rpc/rpc.h"
#include "support/sim_lane.h"

/* The network of this process. */
extern ep_sim *sim_env;

/* Called with every call that begins on a channel, before it does, and with every combine of a
 * window. */
void sim_watch_call(const ep_rpc_request *request);
void sim_watch_combine(const ep_batch *batch, uint32_t token_begin, uint32_t token_end);

#define SIM_FAIL(...) sim_fail(__FILE__, __LINE__, __VA_ARGS__)
/* Says what is broken and ends the process. */
_Noreturn void sim_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
#define SIM_CHECK(condition, ...)                                                                  \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            SIM_FAIL(__VA_ARGS__);                                                                 \
        }                                                                                          \
    } while (0)

#endif
