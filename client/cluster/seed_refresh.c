/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster/seed_refresh.h"

#include <stdlib.h>

#include "base/clock.h"

#define REFRESH_NS (500 * EP_NS_PER_MS)
#define ANSWER_NS (5 * EP_NS_PER_S)

typedef struct question {
    ep_seed_refresh *refresh;
    ep_peer *seed;
    bool asked; /* atomic: no answer yet */
} question;

struct ep_seed_refresh {
    ep_seed_refresh_config config;
    ep_timer timer;
    bool stopped; /* atomic */
    const ep_rpc_method *method;
    question questions[];
};

static void on_answer(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    question *q = arg;
    const ep_seed_refresh_config *config = &q->refresh->config;
    if (error == NULL && reply->header != NULL) {
        config->on_models(config->arg, q->seed, (const Expertd__V1__DescribeReply *)reply->header);
    }
    __atomic_store_n(&q->asked, false, __ATOMIC_RELEASE);
}

static void ask(question *q)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    ep_rpc_request request = {.method = q->refresh->method,
                              .header = &empty.base,
                              .deadline_ns = ep_clock_now_ns() + ANSWER_NS};
    ep_rpc_channel *channel;
    ep_rpc_call_id id;
    ep_peer_link *link = &q->seed->links[EP_PEER_DECODE];
    if (!ep_peer_link_is_ready(link) || __atomic_exchange_n(&q->asked, true, __ATOMIC_ACQ_REL)) {
        return;
    }
    if (ep_peer_link_call(link, &request, on_answer, q, &channel, &id, NULL) != EP_OK) {
        __atomic_store_n(&q->asked, false, __ATOMIC_RELEASE);
    }
}

static void on_timer(ep_timer *timer, void *arg)
{
    ep_seed_refresh *refresh = arg;
    for (size_t i = 0; i < refresh->config.seeds_count; i++) {
        ask(&refresh->questions[i]);
    }
    if (!__atomic_load_n(&refresh->stopped, __ATOMIC_ACQUIRE)) {
        ep_timer_arm(refresh->config.timers, timer, ep_clock_now_ns() + REFRESH_NS);
    }
}

ep_err ep_seed_refresh_create(const ep_seed_refresh_config *config, ep_seed_refresh **out_refresh)
{
    ep_seed_refresh *refresh = calloc(1, sizeof(*refresh) + config->seeds_count * sizeof(question));
    if (refresh == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    refresh->config = *config;
    refresh->method = ep_rpc_method_by_name("expertd.v1.ExpertService", "Describe");
    for (size_t i = 0; i < config->seeds_count; i++) {
        refresh->questions[i] = (question){.refresh = refresh, .seed = config->seeds[i]};
    }
    ep_timer_init(&refresh->timer, on_timer, refresh);
    ep_err err = ep_timer_arm(config->timers, &refresh->timer, ep_clock_now_ns() + REFRESH_NS);
    if (err != EP_OK) {
        free(refresh);
        return err;
    }
    *out_refresh = refresh;
    return EP_OK;
}

void ep_seed_refresh_stop(ep_seed_refresh *refresh)
{
    if (refresh != NULL) {
        __atomic_store_n(&refresh->stopped, true, __ATOMIC_RELEASE);
        ep_timer_cancel_wait(refresh->config.timers, &refresh->timer);
    }
}

void ep_seed_refresh_destroy(ep_seed_refresh *refresh)
{
    ep_seed_refresh_stop(refresh);
    free(refresh);
}
