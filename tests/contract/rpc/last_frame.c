/* SPDX-License-Identifier: Apache-2.0 */
/* The last frame of a connection leaves also when the connection's timer fires, for a ping, just
 * before the end begins. */
#include <semaphore.h>

#include "base/timer.h"
#include "raw_peer.h"
#include "rpc_fixture.h"
#include "support/check.h"

typedef struct ep_rpc_out ep_rpc_out;
bool __real_ep_timer_cancel(ep_timer_service *service, ep_timer *timer);
bool __wrap_ep_timer_cancel(ep_timer_service *service, ep_timer *timer);
void __real_ep_rpc_out_seal(ep_rpc_out *out, bool payload_crc);
void __wrap_ep_rpc_out_seal(ep_rpc_out *out, bool payload_crc);

static fixture f;
static sem_t has_run;
static __thread bool is_stopping;
static __thread bool has_fired;

/* Where the end begins, with the connection's lock held: lets its timer fire, which then waits for
 * this lock. */
bool __wrap_ep_timer_cancel(ep_timer_service *service, ep_timer *timer)
{
    const bool armed = __real_ep_timer_cancel(service, timer);
    if (!is_stopping || !armed || has_fired) {
        return armed;
    }
    has_fired = true;
    CHECK(ep_timer_arm(service, timer, 0) == EP_OK, "cannot arm a timer");
    return false;
}

static void tell(ep_timer *timer, void *arg)
{
    (void)timer;
    (void)arg;
    sem_post(&has_run);
}

/* Where the last frame is sent, without the lock: waits until that timer has run. Timers run one at
 * a time, in the order of their times. */
void __wrap_ep_rpc_out_seal(ep_rpc_out *out, bool payload_crc)
{
    if (has_fired) {
        ep_timer after;
        ep_timer_init(&after, tell, NULL);
        CHECK(ep_timer_arm(f.timers, &after, 1) == EP_OK, "cannot arm a timer");
        sem_wait(&has_run);
        ep_timer_cancel_wait(f.timers, &after);
    }
    __real_ep_rpc_out_seal(out, payload_crc);
}

static void pings(ep_rpc_server_config *config)
{
    config->common.limits.ping_ms = 60000;
}

int main(void)
{
    raw_peer p;
    ep_frame frame = {.kind = EP_FRAME_PING};
    sem_init(&has_run, 0, 0);
    fixture_init(&f,
                 &(fixture_options){.url = "loopback://last", .server = pings, .no_channel = true});
    raw_peer_meet(&p, f.url);
    is_stopping = true;
    fixture_server_stop(&f);
    CHECK(has_fired, "the connection had no timer");
    for (ep_buffer *buffer; frame.kind != EP_FRAME_GOODBYE; ep_buffer_unref(buffer)) {
        buffer = raw_peer_receive(&p, &frame);
        CHECK(buffer != NULL, "the connection ended without a goodbye");
    }
    raw_peer_fini(&p);
    fixture_fini(&f);
    return 0;
}
