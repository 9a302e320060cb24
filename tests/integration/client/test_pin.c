/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which numerics id a client without a coordinator pins while some of its nodes have not been tried
 * yet: the first node that speaks does not decide alone. Whether nodes were tried is decided here,
 * by standing in for ep_peer_was_tried.
 */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"
#include "cluster/peers.h"
#include "support/expect.h"

enum { EXPERTS = 8, NODES = 3, ALONE = 1u << 0, OTHERS = 1u << 1 | 1u << 2, WAITS_MAX = 20000 };

static harness h;
static atomic_bool holds_back;
static atomic_uint asked;

bool __real_ep_peer_was_tried(ep_peer *peer);
bool __wrap_ep_peer_was_tried(ep_peer *peer);

bool __wrap_ep_peer_was_tried(ep_peer *peer)
{
    const bool was_tried = !atomic_load(&holds_back) && __real_ep_peer_was_tried(peer);
    atomic_fetch_add(&asked, 1);
    return was_tried;
}

static const char *pinned(void)
{
    static ep_model_desc model;
    model = (ep_model_desc){.struct_bytes = sizeof(model)};
    return ep_client_model(h.client, 0, &model) == EP_OK ? model.numerics : "";
}

/* Experts below `count` are on node 0, which has an id of its own. */
static void open_with(uint32_t count)
{
    static const char *const ids[NODES] = {"fake-2", FAKE_NUMERICS, FAKE_NUMERICS};
    ep_error error;
    atomic_store(&holds_back, true);
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = NODES, .experts = EXPERTS,
                 .node_numerics = ids, .no_wait = true);
    ep_client_destroy(h.client); /* it has seen what the harness deals out */
    for (uint32_t e = 0; e < EXPERTS; e++) {
        h.owners[e] = e < count ? ALONE : 0;
    }
    harness_own(&h);
    atomic_store(&asked, 0);
    ep_client_config config;
    ep_client_config_init(&config);
    config.node_urls = h.urls;
    config.node_urls_count = NODES;
    ASSERT_OK(ep_client_create(&config, &h.client, &error), error);
    for (uint32_t waits = 0; atomic_load(&asked) == 0 && pinned()[0] == 0; waits++) {
        cr_assert_lt(waits, WAITS_MAX, "the client asks for no pin");
        usleep(1000);
    }
}

static void expect_calls_with(uint32_t experts, const char *numerics)
{
    batch b;
    ep_moe_result result;
    batch_make(&b, &h, 9, 2, 1);
    for (uint32_t i = 0; i < 9 * 2; i++) {
        b.ids[i] = (int32_t)(i % experts);
    }
    batch_expect(&b, &h);
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), result.error);
    cr_assert(batch_equal(&b));
    cr_assert_str_eq(result.numerics, numerics);
    cr_assert_str_eq(pinned(), numerics);
    batch_free(&b);
}

Test(client_pin, a_node_with_half_of_the_model_does_not_decide_before_the_others_are_tried)
{
    open_with(EXPERTS / 2);
    cr_assert_str_eq(pinned(), "");
    for (uint32_t e = 0; e < EXPERTS; e++) {
        h.owners[e] |= OTHERS;
    }
    harness_own(&h); /* the client hears of it by itself */
    expect_calls_with(EXPERTS, FAKE_NUMERICS);
    harness_close(&h);
}

Test(client_pin, a_node_with_the_whole_model_is_enough)
{
    open_with(EXPERTS);
    expect_calls_with(EXPERTS, "fake-2");
    harness_close(&h);
}

Test(client_pin, half_of_the_model_is_enough_once_all_were_tried)
{
    open_with(EXPERTS / 2);
    cr_assert_str_eq(pinned(), "");
    atomic_store(&holds_back, false);
    expect_calls_with(EXPERTS / 2, "fake-2");
    harness_close(&h);
}
