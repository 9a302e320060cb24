/* SPDX-License-Identifier: Apache-2.0 */
/* Clients and their calls, each checked against an oracle that knows no network. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "call/retry_budget.h"
#include "world.h"

#define TICK_NS (1 * EP_NS_PER_MS)
#define UNTOUCHED 0xa5
#define HELLO_BUFFER_BYTES 4096ull

void client_start(world *w, uint32_t index)
{
    sim_client *c = &w->clients[index];
    char name[16];
    ep_client_config config;
    ep_error error;
    snprintf(name, sizeof(name), "client%u", index);
    c->host = ep_sim_host(sim_env, name);
    ep_sim_host_id old = ep_sim_enter(sim_env, c->host);
    ep_client_config_init(&config);
    config.coordinator_url = "sim://coordinator";
    config.prefill_window_tokens = 3;
    c->hedge_permille = 30; /* the default */
    if (world_below(w, 3) == 0) {
        c->hedge_permille = 1000;
        config.hedge_permille = c->hedge_permille;
    }
    SIM_CHECK(ep_client_create(&config, &c->client, &error) == EP_OK, "no client: %s", error.text);
    ep_sim_enter(sim_env, old);
}

void client_stop(world *w, uint32_t index)
{
    sim_client *c = &w->clients[index];
    ep_client_stats stats = {.struct_bytes = sizeof(stats)};
    ep_client_read_stats(c->client, &stats);
    /* Each connection keeps the Hello of its peer: two to each node, one to the coordinator. */
    SIM_CHECK(stats.buffer_bytes_lent <= (2 * w->nodes_count + 1) * HELLO_BUFFER_BYTES,
              "client %u holds %llu bytes of buffers after its last call", index,
              (unsigned long long)stats.buffer_bytes_lent);
    SIM_CHECK(stats.hedged_frames * 1000 <= stats.frames_sent * c->hedge_permille,
              "client %u hedged %llu of %llu frames, allowed %u of 1000", index,
              (unsigned long long)stats.hedged_frames, (unsigned long long)stats.frames_sent,
              c->hedge_permille);
    SIM_CHECK(stats.hedged_frames * EP_RETRY_COST <= stats.frames_sent + EP_RETRY_BUDGET_START,
              "client %u hedged %llu of %llu frames: more than the retry budget", index,
              (unsigned long long)stats.hedged_frames, (unsigned long long)stats.frames_sent);
    w->hedged_frames += stats.hedged_frames;
    w->rerouted_frames += stats.frames_rerouted;
    w->late_replies += stats.late_replies;
    ep_sim_host_id old = ep_sim_enter(sim_env, c->host);
    ep_client_destroy(c->client);
    ep_sim_enter(sim_env, old);
}

/* ---- what the product is seen doing ---- */

void sim_watch_call(const ep_rpc_request *request)
{
    if (strcmp(request->method->method->name, "Forward") != 0) {
        return;
    }
    const Expertd__V1__ForwardRequest *in =
        (const Expertd__V1__ForwardRequest *)(const void *)request->header;
    ep_sim_host_id host = ep_sim_current_host(sim_env);
    for (uint32_t i = 0; i < watched->clients_count; i++) {
        sim_client *c = &watched->clients[i];
        if (c->host == host && in->epoch != NULL) {
            ep_epoch epoch = {in->epoch->term, in->epoch->number};
            SIM_CHECK(!world_epoch_older(epoch, c->used),
                      "client %u sends with epoch (%llu, %llu) after it used (%llu, %llu)", i,
                      (unsigned long long)epoch.term, (unsigned long long)epoch.number,
                      (unsigned long long)c->used.term, (unsigned long long)c->used.number);
            c->used = epoch;
            return;
        }
    }
    SIM_FAIL("host %u sends a request without an epoch", host);
}

void sim_watch_combine(const ep_batch *batch, uint32_t token_begin, uint32_t token_end)
{
    for (uint32_t i = 0; i < watched->clients_count; i++) {
        for (uint32_t k = 0; k < watched->callers_count; k++) {
            sim_caller *caller = &watched->clients[i].callers[k];
            if (batch->x.data == caller->x) {
                SIM_CHECK(caller->busy, "a call is combined after its end");
                uint32_t bits = (1u << token_end) - (1u << token_begin);
                SIM_CHECK((caller->combined & bits) == 0,
                          "of tokens %u.. some are combined twice: %x", token_begin,
                          caller->combined & bits);
                caller->combined |= bits;
                return;
            }
        }
    }
}

/* ---- the oracle ---- */

static void expected_row(const world *w, const sim_caller *caller, uint32_t token, float *out)
{
    float y[HIDDEN_MAX];
    memset(out, 0, w->shape.hidden * sizeof(*out));
    for (uint32_t k = 0; k < caller->top_k; k++) {
        uint32_t at = token * caller->top_k + k;
        fake_expert((uint32_t)caller->ids[at], caller->x + token * w->shape.hidden, w->shape.hidden,
                    EP_DTYPE_F32, y);
        for (uint32_t h = 0; h < w->shape.hidden; h++) {
            float product = caller->scales[at] * y[h];
            out[h] = out[h] + product;
        }
    }
}

static void check_bits(const world *w, const sim_caller *caller, uint32_t first, uint32_t end)
{
    float row[HIDDEN_MAX];
    for (uint32_t t = first; t < end; t++) {
        expected_row(w, caller, t, row);
        SIM_CHECK(memcmp(row, caller->out + t * w->shape.hidden, w->shape.hidden * sizeof(float)) ==
                      0,
                  "client %u got wrong bits for token %u", caller->client, t);
    }
}

static bool is_typed(const sim_caller *caller, ep_err code)
{
    return code == EP_ERR_UNAVAILABLE || code == EP_ERR_DEADLINE_EXCEEDED ||
           code == EP_ERR_RESOURCE_EXHAUSTED || (code == EP_ERR_CANCELLED && caller->cancelled);
}

/* What a failed call has left: the rows it told of, and else nothing unless it streams. */
static void check_rest(world *w, const sim_caller *caller)
{
    check_bits(w, caller, 0, caller->told);
    w->calls_delivered += caller->told > 0;
    for (size_t i = 0; i < sizeof(caller->out) && !caller->streamed; i++) {
        SIM_CHECK(((const uint8_t *)caller->out)[i] == UNTOUCHED,
                  "a failed call has written its result");
    }
}

static void check_end(world *w, sim_caller *caller, const ep_moe_result *result)
{
    uint64_t now_ns = ep_sim_now_ns(sim_env);
    ep_epoch epoch = {result->epoch_term, result->epoch_number};
    SIM_CHECK(caller->busy, "a call ends a second time");
    SIM_CHECK(now_ns <= caller->deadline_ns + TICK_NS,
              "a call of client %u ends %.3f ms after its deadline", caller->client,
              (double)(now_ns - caller->deadline_ns) / 1e6);
    SIM_CHECK(!world_epoch_older(epoch, caller->begin_epoch),
              "a call ends with an epoch older than the one at its begin");
    SIM_CHECK(result->tokens_delivered == caller->told,
              "a call says that %u tokens were delivered, it told of %u", result->tokens_delivered,
              caller->told);
    uint64_t took_ns = now_ns - caller->begin_ns;
    w->took_ns_max = took_ns > w->took_ns_max ? took_ns : w->took_ns_max;
    if (result->error.code == EP_OK) {
        SIM_CHECK(caller->combined == (1u << caller->tokens) - 1,
                  "of %u tokens only %x were combined", caller->tokens, caller->combined);
        SIM_CHECK(caller->told == (caller->streamed ? caller->tokens : 0),
                  "a call of %u tokens ends and has told of %u", caller->tokens, caller->told);
        check_bits(w, caller, 0, caller->tokens);
        w->calls_ok++;
        return;
    }
    SIM_CHECK(is_typed(caller, result->error.code), "a call fails with %s: %s",
              ep_err_name(result->error.code), result->error.text);
    SIM_CHECK(!caller->must_succeed, "a call of client %u that has to succeed fails with %s: %s",
              caller->client, ep_err_name(result->error.code), result->error.text);
    check_rest(w, caller);
    w->calls_failed++;
}

static void on_tokens(void *arg, ep_call *call, uint32_t first, uint32_t count)
{
    sim_caller *caller = arg;
    uint32_t words[] = {caller->client, caller->left, first, count};
    SIM_CHECK(caller->busy && !caller->cancelled, "a call tells of tokens after its end");
    SIM_CHECK(first == caller->told && count > 0 && count <= caller->tokens - first,
              "a call of %u tokens that told of %u tells of %u from %u on", caller->tokens,
              caller->told, count, first);
    check_bits(caller->world, caller, first, first + count);
    ep_sim_trace(sim_env, words, sizeof(words));
    caller->told += count;
    caller->world->ranges++;
    if (caller->told >= caller->cancel_at) {
        caller->cancelled = true;
        ep_call_cancel(call);
    }
}

/* ---- callers ---- */

static void next_later(sim_caller *caller)
{
    world *w = caller->world;
    if (caller->left > 0) {
        ep_sim_post(sim_env, &caller->event,
                    ep_sim_now_ns(sim_env) +
                        world_between(w, EP_NS_PER_US, w->busy ? 10 * MS : 300 * MS));
    } else {
        w->busy_callers--;
    }
}

static void on_done(void *arg, const ep_moe_result *result)
{
    sim_caller *caller = arg;
    uint32_t words[] = {caller->client, caller->left, (uint32_t)result->error.code};
    check_end(caller->world, caller, result);
    ep_sim_trace(sim_env, words, sizeof(words));
    world_say(caller->world, "client %u: a call ends with %s %s", caller->client,
              ep_err_name(result->error.code), result->error.text);
    memcpy(caller->after, caller->out, sizeof(caller->out));
    caller->has_after = true;
    caller->busy = false;
    next_later(caller);
}

static float draw_value(world *w)
{
    return (float)((int64_t)world_below(w, 2001) - 1000) / 512.0f;
}

static void draw_batch(world *w, sim_caller *caller)
{
    caller->tokens = (uint32_t)world_between(w, 1, TOKENS_MAX);
    caller->top_k =
        (uint32_t)world_between(w, 1, TOP_K_MAX < w->shape.experts ? TOP_K_MAX : w->shape.experts);
    for (uint32_t i = 0; i < caller->tokens * w->shape.hidden; i++) {
        caller->x[i] = draw_value(w);
    }
    for (uint32_t t = 0; t < caller->tokens; t++) {
        uint32_t first = (uint32_t)world_below(w, w->shape.experts);
        for (uint32_t k = 0; k < caller->top_k; k++) {
            caller->ids[t * caller->top_k + k] = (int32_t)((first + k) % w->shape.experts);
            caller->scales[t * caller->top_k + k] = draw_value(w);
        }
    }
    memset(caller->out, UNTOUCHED, sizeof(caller->out));
    caller->combined = 0;
    caller->told = 0;
}

/* Two of three are streamed; of these one in eight ends itself, unless it must succeed. */
static void draw_stream(world *w, sim_caller *caller, ep_moe_args *args)
{
    const uint64_t drawn = ep_splitmix64(&w->random_stream);
    caller->streamed = drawn % 3 != 0;
    caller->cancelled = false;
    caller->cancel_at = UINT32_MAX;
    if (caller->streamed) {
        args->on_tokens = on_tokens;
        args->on_tokens_arg = caller;
        w->calls_streamed++;
        if (drawn / 3 % 8 == 0 && !caller->must_succeed) {
            caller->cancel_at = 1 + (uint32_t)(drawn / 24 % caller->tokens);
        }
    }
}

static void check_after(const sim_caller *caller)
{
    SIM_CHECK(!caller->has_after || memcmp(caller->after, caller->out, sizeof(caller->out)) == 0,
              "a result of client %u was written after the end of its call", caller->client);
}

static void begin_call(ep_sim_event *event, void *arg)
{
    sim_caller *caller = arg;
    world *w = caller->world;
    sim_client *c = &w->clients[caller->client];
    ep_moe_args args;
    ep_error error;
    (void)event;
    ep_epoch epoch = {0, 0};
    if (ep_client_epoch(c->client, &epoch.term, &epoch.number) != EP_OK) { /* no table yet */
        ep_sim_post(sim_env, &caller->event, ep_sim_now_ns(sim_env) + 10 * MS);
        return;
    }
    check_after(caller);
    draw_batch(w, caller);
    uint64_t limit_us =
        world_below(w, 3) == 0 ? world_between(w, 5000, 100000) : world_between(w, 300000, 4000000);
    caller->must_succeed = caller->must_succeed || w->single_fault;
    limit_us = caller->must_succeed ? 20000000 : limit_us;
    ep_moe_args_init(&args);
    args.model = FAKE_MODEL;
    args.layer = w->shape.layer;
    args.x = ep_tensor_2d(caller->x, EP_DTYPE_F32, caller->tokens, w->shape.hidden);
    args.expert_ids = ep_tensor_2d(caller->ids, EP_DTYPE_I32, caller->tokens, caller->top_k);
    args.expert_scales = ep_tensor_2d(caller->scales, EP_DTYPE_F32, caller->tokens, caller->top_k);
    args.shared_source = EP_MOE_SHARED_NONE;
    args.wire_dtype = EP_DTYPE_F32;
    args.mode = world_below(w, 4) == 0 ? EP_MOE_PREFILL : EP_MOE_DECODE;
    args.deadline_us = limit_us;
    draw_stream(w, caller, &args);
    ep_tensor out = ep_tensor_2d(caller->out, EP_DTYPE_F32, caller->tokens, w->shape.hidden);
    caller->begin_ns = ep_sim_now_ns(sim_env);
    caller->deadline_ns = caller->begin_ns + limit_us * EP_NS_PER_US;
    caller->begin_epoch = epoch;
    caller->busy = true;
    caller->left--;
    ep_err err = ep_moe_forward_async(c->client, &args, &out, on_done, caller, NULL, &error);
    SIM_CHECK(err == EP_OK, "a call of client %u cannot begin: %s", caller->client, error.text);
}

void callers_start(world *w, uint32_t calls, bool must_succeed)
{
    for (uint32_t i = 0; i < w->clients_count; i++) {
        ep_sim_host_id old = ep_sim_enter(sim_env, w->clients[i].host);
        for (uint32_t k = 0; k < w->callers_count; k++) {
            sim_caller *caller = &w->clients[i].callers[k];
            caller->world = w;
            caller->client = i;
            caller->event = (ep_sim_event){.run = begin_call, .arg = caller};
            caller->left = calls;
            caller->must_succeed = must_succeed;
            w->busy_callers++;
            next_later(caller);
        }
        ep_sim_enter(sim_env, old);
    }
}

void callers_check_outs(world *w)
{
    for (uint32_t i = 0; i < w->clients_count; i++) {
        for (uint32_t k = 0; k < w->callers_count; k++) {
            check_after(&w->clients[i].callers[k]);
        }
    }
}
