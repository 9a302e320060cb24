/* SPDX-License-Identifier: Apache-2.0 */
/* Judges whether timers fire and jobs end. */
#include "expertd/liveness.h"

#include "base/clock.h"
#include "base/log.h"

const char *ep_liveness_name(ep_liveness_state state)
{
    static const char *const names[] = {"ok", "timers stuck", "compute stuck"};
    return names[state];
}

static void on_beat(ep_timer *timer, void *arg)
{
    ep_liveness *liveness = arg;
    (void)timer;
    atomic_fetch_add(&liveness->beats, 1);
}

void ep_liveness_init(ep_liveness *liveness, ep_timer_service *timers, uint64_t now_ns)
{
    *liveness = (ep_liveness){.timers = timers, .beat_ns = now_ns, .progress_ns = now_ns};
    ep_timer_init(&liveness->beat, on_beat, liveness);
}

void ep_liveness_fini(ep_liveness *liveness)
{
    if (liveness->timers != NULL) {
        ep_timer_cancel_wait(liveness->timers, &liveness->beat);
        liveness->timers = NULL;
    }
}

/* The timer is armed for the present time, so it must have fired by the next check. */
static void check_timers(ep_liveness *liveness, uint64_t now_ns)
{
    uint64_t beats = atomic_load(&liveness->beats);
    if (!liveness->is_armed || beats != liveness->beats_seen) {
        liveness->beats_seen = beats;
        liveness->beat_ns = now_ns;
        /* Out of memory: nothing is armed, and the next check tries again. */
        liveness->is_armed = ep_timer_arm(liveness->timers, &liveness->beat, now_ns) == EP_OK;
    }
}

static void log_change(const ep_liveness *liveness, ep_liveness_state before,
                       ep_liveness_state state, uint64_t stuck_ns)
{
    if (state != EP_LIVENESS_OK) {
        ep_log(EP_LOG_ERROR, "node-stuck", EP_KV(state, ep_liveness_name(state)),
               EP_KV(stuck_ms, stuck_ns / EP_NS_PER_MS),
               EP_KV(reason, "work that is there makes no progress"),
               EP_KV(effect, "the watchdog is told nothing until it goes on"));
    } else {
        ep_log(EP_LOG_WARN, "node-stuck", EP_KV(state, ep_liveness_name(state)),
               EP_KV(state_before, ep_liveness_name(before)),
               EP_KV(stuck_ms, atomic_load(&liveness->stuck_ns) / EP_NS_PER_MS),
               EP_KV(reason, "the work went on"), EP_KV(effect, "the watchdog is told again"));
    }
}

ep_liveness_state ep_liveness_check(ep_liveness *liveness, uint64_t now_ns, uint64_t jobs_done,
                                    uint64_t jobs_in_flight, uint32_t stall_ms)
{
    check_timers(liveness, now_ns);
    if (jobs_in_flight == 0 || jobs_done != liveness->jobs_done_seen) {
        liveness->jobs_done_seen = jobs_done;
        liveness->progress_ns = now_ns;
    }
    uint64_t no_beat_ns = now_ns - liveness->beat_ns;
    uint64_t no_job_ns = now_ns - liveness->progress_ns;
    ep_liveness_state state = EP_LIVENESS_OK;
    uint64_t stuck_ns = 0;
    if (no_beat_ns >= EP_LIVENESS_TIMER_STALL_MS * EP_NS_PER_MS) {
        state = EP_LIVENESS_TIMERS_STUCK;
        stuck_ns = no_beat_ns;
    } else if (stall_ms != 0 && no_job_ns >= stall_ms * EP_NS_PER_MS) {
        state = EP_LIVENESS_COMPUTE_STUCK;
        stuck_ns = no_job_ns;
    }
    ep_liveness_state before = (ep_liveness_state)atomic_load(&liveness->state);
    if (state != before) {
        log_change(liveness, before, state, stuck_ns);
    }
    atomic_store(&liveness->stuck_ns, stuck_ns);
    atomic_store(&liveness->state, (uint32_t)state);
    return state;
}

ep_liveness_state ep_liveness_read(const ep_liveness *liveness, uint64_t *out_stuck_ms)
{
    *out_stuck_ms = atomic_load(&liveness->stuck_ns) / EP_NS_PER_MS;
    return (ep_liveness_state)atomic_load(&liveness->state);
}
