/* SPDX-License-Identifier: Apache-2.0 */
/* Every rule of the policy, with a clock that says what the test wants. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "expertd/batcher.h"

#define WORKS 4096
#define MS 1000000ull

static ep_batch_policy policy;
static ep_work works[WORKS];
static ep_work_queue queues[64];
static ep_job_row rows[EP_BATCH_JOB_ROWS_MAX];
static uint32_t works_count;

static void begin(ep_batch_policy_config config)
{
    config.jobs_max = config.jobs_max != 0 ? config.jobs_max : 1;
    config.tenants_count = config.tenants_count != 0 ? config.tenants_count : 1;
    ep_batch_policy_init(&policy, &config);
    memset(works, 0, sizeof(works));
    memset(queues, 0, sizeof(queues));
    works_count = 0;
}

/* One work more; its number. */
static uint32_t add_for(uint32_t tenant, ep_work_class work_class, uint32_t queue,
                        uint32_t rows_count, const ep_batch_step *step, uint64_t now_ns)
{
    ep_work *work = &works[works_count];
    *work =
        (ep_work){.job = {.rows = rows, .rows_count = rows_count},
                  .place = {.queue = &queues[queue], .work_class = work_class, .tenant = tenant}};
    ep_batch_policy_add(&policy, work, step, now_ns);
    return works_count++;
}

static uint32_t add(ep_work_class work_class, uint32_t queue, uint32_t rows_count, uint64_t now_ns)
{
    return add_for(0, work_class, queue, rows_count, NULL, now_ns);
}

/* "0 1 " of the next job, "" when nothing may start. */
static const char *take(uint64_t now_ns, ep_batch_pick *out_pick)
{
    static char text[8][256];
    static uint32_t turn;
    char *out = text[turn++ % 8];
    size_t n = 0;
    out[0] = 0;
    if (!ep_batch_policy_take(&policy, now_ns, out_pick)) {
        return out;
    }
    uint32_t count = 0, rows_count = 0;
    for (const ep_work *work = out_pick->works; work != NULL; work = work->place.next) {
        n += (size_t)snprintf(out + n, 256 - n, "%td ", work - works);
        count++;
        rows_count += work->job.rows_count;
    }
    cr_assert_eq(count, out_pick->works_count);
    cr_assert_eq(rows_count, out_pick->rows);
    return out;
}

/* Takes a job and ends it at once. */
static const char *run(uint64_t now_ns)
{
    ep_batch_pick pick;
    const char *text = take(now_ns, &pick);
    if (text[0] != 0) {
        ep_batch_policy_done(&policy, &pick);
    }
    return text;
}

Test(batch_policy, works_of_one_queue_ride_one_job)
{
    begin((ep_batch_policy_config){0});
    add(EP_WORK_DECODE, 0, 1, 0);
    add(EP_WORK_DECODE, 1, 1, 0);
    add(EP_WORK_DECODE, 0, 2, 0);
    add(EP_WORK_DECODE, 0, 3, 0);
    cr_expect_str_eq(run(0), "0 2 3 ");
    cr_expect_str_eq(run(0), "1 ");
    cr_expect_str_eq(run(0), "");
}

Test(batch_policy, merging_can_be_off)
{
    begin((ep_batch_policy_config){.no_merging = true});
    add(EP_WORK_DECODE, 0, 1, 0);
    add(EP_WORK_DECODE, 0, 1, 0);
    cr_expect_str_eq(run(0), "0 ");
    cr_expect_str_eq(run(0), "1 ");
}

Test(batch_policy, only_what_fits_together_is_merged)
{
    static char other_weights;
    begin((ep_batch_policy_config){0});
    for (int i = 0; i < 5; i++) {
        works[i] =
            (ep_work){.job = {.rows = rows, .rows_count = 1}, .place = {.queue = &queues[0]}};
    }
    works[1].job.x_dtype = EP_DTYPE_F32;
    works[2].job.out_dtype = EP_DTYPE_F32;
    works[3].job.weight_on_input = true;
    works[4].job.weights = (ep_backend_weights *)(void *)&other_weights;
    for (int i = 0; i < 5; i++) {
        ep_batch_policy_add(&policy, &works[i], NULL, 0);
    }
    cr_expect_str_eq(run(0), "0 ");
    cr_expect_str_eq(run(0), "1 ");
    cr_expect_str_eq(run(0), "2 ");
    cr_expect_str_eq(run(0), "3 ");
    cr_expect_str_eq(run(0), "4 ");
}

Test(batch_policy, a_job_has_at_most_the_rows_of_its_class)
{
    begin((ep_batch_policy_config){0});
    for (int i = 0; i < 5; i++) {
        add(EP_WORK_DECODE, 0, 60, 0);
        add(EP_WORK_PREFILL, 0, 45, 0);
    }
    cr_expect_str_eq(run(0), "0 2 ");
    cr_expect_str_eq(run(0), "4 6 ");
    cr_expect_str_eq(run(0), "8 ");
    cr_expect_str_eq(run(0), "1 3 ");
}

Test(batch_policy, the_fullest_queue_goes_first_until_another_is_too_old)
{
    begin((ep_batch_policy_config){.age_ns = 10 * MS});
    add(EP_WORK_DECODE, 0, 1, 0);
    add(EP_WORK_DECODE, 1, 5, 1 * MS);
    add(EP_WORK_DECODE, 2, 9, 2 * MS);
    cr_expect_str_eq(run(9 * MS), "2 ");
    add(EP_WORK_DECODE, 3, 120, 9 * MS);
    cr_expect_str_eq(run(10 * MS), "0 ", "waited for the limit");
    cr_expect_str_eq(run(10 * MS), "3 ");
    cr_expect_str_eq(run(10 * MS), "1 ");
}

Test(batch_policy, prefill_queues_that_are_alike_go_oldest_first)
{
    begin((ep_batch_policy_config){.age_ns = 100 * MS});
    add(EP_WORK_PREFILL, 0, 10, 0);
    add(EP_WORK_PREFILL, 1, 40, 1 * MS);
    add(EP_WORK_PREFILL, 2, EP_BATCH_PREFILL_FULL_ROWS, 2 * MS);
    add(EP_WORK_PREFILL, 3, EP_BATCH_PREFILL_FULL_ROWS + 20, 3 * MS);
    cr_expect_str_eq(run(4 * MS), "2 ");
    cr_expect_str_eq(run(4 * MS), "3 ");
    cr_expect_str_eq(run(4 * MS), "0 ");
    cr_expect_str_eq(run(4 * MS), "1 ");
}

Test(batch_policy, however_many_full_queues_come_an_old_work_starts)
{
    begin((ep_batch_policy_config){.age_ns = 5 * MS});
    uint32_t lone = add(EP_WORK_DECODE, 0, 1, 0);
    char wanted[16];
    snprintf(wanted, sizeof(wanted), "%u ", lone);
    uint32_t started_ms = 0;
    for (uint32_t ms = 0; ms < 20 && started_ms == 0; ms++) {
        add(EP_WORK_DECODE, 1 + ms % 2, 128, ms * MS);
        started_ms = strcmp(run(ms * MS), wanted) == 0 ? ms : 0;
    }
    cr_expect_eq(started_ms, 5);
}

Test(batch_policy, decode_goes_first_and_prefill_gets_its_share)
{
    begin((ep_batch_policy_config){.prefill_share_percent = 25});
    uint64_t cost[EP_WORK_CLASSES] = {0};
    ep_batch_pick pick;
    for (int i = 0; i < 400; i++) { /* both always have work; one job at a time */
        add(EP_WORK_DECODE, 0, 64, 0);
        add(EP_WORK_PREFILL, 1, 64, 0);
        cr_assert(ep_batch_policy_take(&policy, 0, &pick));
        cr_assert(i > 0 || pick.work_class == EP_WORK_DECODE);
        cost[pick.work_class] += pick.cost;
        ep_batch_policy_done(&policy, &pick);
    }
    double share =
        (double)cost[EP_WORK_PREFILL] / (double)(cost[EP_WORK_DECODE] + cost[EP_WORK_PREFILL]);
    cr_expect(share > 0.22 && share < 0.28, "%g", share);
}

Test(batch_policy, prefill_that_ran_beside_decode_is_its_share)
{
    begin((ep_batch_policy_config){.prefill_share_percent = 25});
    ep_batch_pick decode, prefill;
    /* decode has 1 job for 1 of prefill: prefill has more than its part */
    for (int i = 0; i < 50; i++) {
        add(EP_WORK_DECODE, 0, 64, 0);
        add(EP_WORK_PREFILL, 1, 64, 0);
        cr_assert(ep_batch_policy_take(&policy, 0, &decode));
        cr_assert_eq(decode.work_class, EP_WORK_DECODE);
        cr_assert(ep_batch_policy_take(&policy, 0, &prefill));
        cr_assert_eq(prefill.work_class, EP_WORK_PREFILL);
        ep_batch_policy_done(&policy, &decode);
        ep_batch_policy_done(&policy, &prefill);
    }
}

/* The backend lets decode overtake: prefill there gets on only when decode stops coming. */
Test(batch_policy, prefill_stuck_on_the_backend_stops_decode)
{
    begin((ep_batch_policy_config){.prefill_share_percent = 25});
    ep_batch_pick decode, prefill;
    add(EP_WORK_PREFILL, 1, 64, 0);
    cr_assert(ep_batch_policy_take(&policy, 0, &prefill));
    int decode_jobs = 0;
    for (;; decode_jobs++) {
        cr_assert(decode_jobs < 1000, "prefill starves");
        add(EP_WORK_DECODE, 0, 64, 0);
        if (!ep_batch_policy_take(&policy, 0, &decode)) {
            break;
        }
        cr_assert_eq(decode.work_class, EP_WORK_DECODE);
        ep_batch_policy_done(&policy, &decode);
    }
    cr_expect(decode_jobs > 0);
    ep_batch_policy_done(&policy, &prefill);
    cr_expect(ep_batch_policy_take(&policy, 0, &decode));
    cr_expect_eq(decode.work_class, EP_WORK_DECODE);
}

Test(batch_policy, prefill_gathers_64_rows_while_the_backend_is_busy)
{
    begin((ep_batch_policy_config){.jobs_max = 2, .age_ns = 10 * MS});
    ep_batch_pick busy, other;
    add(EP_WORK_PREFILL, 0, 1, 0);
    cr_expect_str_eq(take(0, &busy), "0 ", "an idle backend starts anything");
    add(EP_WORK_PREFILL, 1, 60, 0);
    cr_expect_str_eq(run(0), "");
    add(EP_WORK_PREFILL, 1, 4, 0);
    cr_expect_str_eq(run(0), "1 2 ");
    add(EP_WORK_PREFILL, 2, 1, 1 * MS);
    cr_expect_str_eq(run(10 * MS), "");
    cr_expect_str_eq(run(11 * MS), "3 ", "the age limit");
    add(EP_WORK_PREFILL, 3, 1, 11 * MS);
    cr_expect_str_eq(take(11 * MS, &other), "");
    ep_batch_policy_done(&policy, &busy);
    cr_expect_str_eq(run(11 * MS), "4 ", "idle again");
}

Test(batch_policy, tenants_get_the_backend_by_weight)
{
    begin((ep_batch_policy_config){.tenants_count = 3, .weights = {1, 1, 3}});
    uint64_t cost[3] = {0};
    ep_batch_pick pick;
    for (uint32_t i = 0; i < 16; i++) {
        for (uint32_t t = 1; t < 3; t++) {
            add_for(t, EP_WORK_DECODE, 10 * t, 64, NULL, 0);
            add_for(t, EP_WORK_DECODE, 10 * t, 64, NULL, 0);
        }
    }
    for (int i = 0; i < 400; i++) {
        for (uint32_t t = 1; t < 3; t++) {
            add_for(t, EP_WORK_DECODE, 10 * t, 128, NULL, 0);
        }
        cr_assert(ep_batch_policy_take(&policy, 0, &pick));
        cost[pick.tenant] += pick.cost;
        ep_batch_policy_done(&policy, &pick);
    }
    double ratio = (double)cost[2] / (double)cost[1];
    cr_expect(ratio > 2.8 && ratio < 3.2, "%g", ratio);
}

Test(batch_policy, a_tenant_that_comes_late_waits_for_one_job_of_the_others_at_most)
{
    begin((ep_batch_policy_config){
        .jobs_max = 2, .tenants_count = 3, .weights = {1, 1, 1}, .age_ns = 1 * MS});
    ep_batch_pick ended, running, next, late;
    for (int i = 0; i < 500; i++) {
        add_for(1, EP_WORK_DECODE, 1 + (uint32_t)i % 20, 64, NULL, 0);
    }
    cr_assert_neq(take(500 * MS, &ended)[0], 0);
    cr_assert_neq(take(500 * MS, &running)[0], 0);
    ep_batch_policy_done(&policy, &ended);
    cr_assert_neq(take(500 * MS, &next)[0], 0);
    uint32_t number = add_for(2, EP_WORK_DECODE, 40, 1, NULL, 500 * MS);
    char wanted[16];
    snprintf(wanted, sizeof(wanted), "%u ", number);
    cr_expect_str_eq(take(500 * MS, &late), wanted,
                     "it has nothing on the backend: beyond jobs_max");
    cr_expect(late.priority < running.priority && late.priority < next.priority,
              "and may overtake there");
    for (int i = 0; i < 5; i++) { /* its next jobs too, one after the other */
        ep_batch_policy_done(&policy, &late);
        number = add_for(2, EP_WORK_DECODE, 40, 1, NULL, 500 * MS);
        snprintf(wanted, sizeof(wanted), "%u ", number);
        cr_expect_str_eq(take(500 * MS, &late), wanted);
        cr_expect(late.priority < running.priority, "job %d", i);
    }
}

Test(batch_policy, a_job_carries_few_rows_of_other_tenants)
{
    begin((ep_batch_policy_config){.tenants_count = 3, .weights = {1, 1, 1}});
    for (int i = 0; i < 30; i++) {
        add_for(1, EP_WORK_DECODE, 0, 1, NULL, 0); /* 0..29 */
    }
    add_for(2, EP_WORK_DECODE, 0, 1, NULL, 0);
    ep_batch_pick pick;
    take(0, &pick); /* all of tenant 1: more than guests may ride on */
    cr_expect_eq(pick.tenant, 1);
    cr_expect_eq(pick.rows, 30);
    ep_batch_policy_done(&policy, &pick);
    for (int i = 0; i < 30; i++) {
        add_for(1, EP_WORK_DECODE, 0, 1, NULL, 0);
    }
    take(0, &pick); /* tenant 2's turn: the other's rows fill it up to where they cost nothing */
    cr_expect_eq(pick.tenant, 2);
    cr_expect_eq(pick.rows, EP_BATCH_WEIGHT_ROWS);
}

Test(batch_policy, idle_time_is_not_saved_up)
{
    begin((ep_batch_policy_config){.tenants_count = 3, .weights = {1, 1, 1}});
    for (int i = 0; i < 100; i++) {
        add_for(1, EP_WORK_DECODE, 1, 128, NULL, 0);
        cr_assert_neq(run(0)[0], 0);
    }
    uint32_t first = works_count;
    for (int i = 0; i < 20; i++) {
        add_for(1, EP_WORK_DECODE, 1, 128, NULL, 0);
        add_for(2, EP_WORK_DECODE, 2, 128, NULL, 0);
    }
    uint32_t of_2 = 0;
    ep_batch_pick pick;
    for (int i = 0; i < 20; i++) {
        cr_assert(ep_batch_policy_take(&policy, 0, &pick));
        of_2 += pick.tenant == 2;
        ep_batch_policy_done(&policy, &pick);
    }
    cr_expect(of_2 >= 9 && of_2 <= 11, "%u of 20 jobs from work %u on", of_2, first);
}

/* A work of a member of the step; its number. */
static uint32_t add_member(ep_batch_step step, uint64_t member, uint32_t queue, uint64_t now_ns)
{
    step.member = member;
    return add_for(0, EP_WORK_DECODE, queue, 1, &step, now_ns);
}

Test(batch_policy, a_step_group_is_released_when_all_came_or_its_window_ends)
{
    const ep_batch_step step = {.layer = &policy, .group = 7, .size = 3};
    const ep_batch_step next = {.layer = &policy, .group = 8, .size = 3};
    begin((ep_batch_policy_config){.group_window_ns = 2 * MS});
    add_member(step, 1, 0, 0);
    add_member(step, 2, 0, 1 * MS);
    cr_expect_str_eq(run(1 * MS), "");
    cr_expect_eq(ep_batch_policy_window_end(&policy), 2 * MS);
    add(EP_WORK_DECODE, 1, 1, 1 * MS);
    cr_expect_str_eq(run(1 * MS), "2 ", "nobody else waits for the group");
    add_member(step, 3, 0, 1 * MS);
    cr_expect_str_eq(run(1 * MS), "0 1 3 ", "all are here");
    cr_expect_eq(ep_batch_policy_window_end(&policy), UINT64_MAX);
    add_member(next, 1, 0, 10 * MS);
    cr_expect_str_eq(run(11 * MS), "");
    cr_expect_str_eq(run(12 * MS), "4 ", "the window has ended");
    add_member(next, 2, 0, 12 * MS);
    cr_expect_str_eq(run(12 * MS), "5 ", "a rank that is late does not wait");
}

Test(batch_policy, a_member_that_sends_several_frames_counts_once)
{
    const ep_batch_step step = {.layer = &policy, .group = 7, .size = 3};
    begin((ep_batch_policy_config){.group_window_ns = 10 * MS});
    add_member(step, 1, 0, 0);
    add_member(step, 2, 0, 0);
    add_member(step, 1, 0, 0);
    add_member(step, 2, 0, 0);
    add_member(step, 2, 0, 0);
    cr_expect_str_eq(run(0), "", "the third member is not here");
    add_member(step, 3, 0, 1 * MS);
    cr_expect_str_eq(run(1 * MS), "0 1 2 3 4 5 ");
}

Test(batch_policy, a_tenant_does_not_end_the_groups_of_another)
{
    const ep_batch_step step = {.layer = &policy, .group = 7, .size = 2};
    begin((ep_batch_policy_config){.group_window_ns = 10 * MS, .tenants_count = 2});
    add_member(step, 1, 0, 0);
    ep_batch_step others = {.layer = &policy, .group = 7, .size = 2, .member = 2};
    add_for(1, EP_WORK_DECODE, 1, 1, &others, 0);
    cr_expect_str_eq(run(0), "");
    others.member = 3;
    add_for(1, EP_WORK_DECODE, 1, 1, &others, 0);
    cr_expect_str_eq(run(0), "1 2 ");
    cr_expect_str_eq(run(0), "");
    add_member(step, 4, 0, 0);
    cr_expect_str_eq(run(0), "0 3 ");
}

Test(batch_policy, groups_of_other_layers_and_beyond_the_table_do_not_stall)
{
    begin((ep_batch_policy_config){.group_window_ns = 1000 * MS, .jobs_max = 4});
    char layers[2];
    for (uint32_t i = 0; i < 3 * EP_BATCH_GROUPS_MAX; i++) {
        const ep_batch_step step = {.layer = &layers[i % 2], .group = 1 + i / 2, .size = 2};
        add_member(step, i, i % 64, i);
    }
    uint32_t ran = 0;
    for (ep_batch_pick pick; ep_batch_policy_take(&policy, 3 * EP_BATCH_GROUPS_MAX, &pick);) {
        ran += pick.works_count;
        ep_batch_policy_done(&policy, &pick);
    }
    cr_expect_eq(ran, 2 * EP_BATCH_GROUPS_MAX, "%u", ran);
    uint32_t drained = 0;
    while (ep_batch_policy_drain(&policy) != NULL) {
        drained++;
    }
    cr_expect_eq(drained, EP_BATCH_GROUPS_MAX);
}

Test(batch_policy, what_the_backend_refused_is_where_it_was)
{
    begin((ep_batch_policy_config){.tenants_count = 2, .weights = {1, 1}});
    add(EP_WORK_DECODE, 0, 2, 0);
    add_for(1, EP_WORK_DECODE, 0, 1, NULL, 1);
    add(EP_WORK_DECODE, 0, 3, 2);
    ep_batch_pick pick;
    cr_expect_str_eq(take(3, &pick), "0 2 1 ");
    ep_batch_policy_put_back(&policy, &pick);
    cr_expect_str_eq(take(3, &pick), "0 2 1 ");
    ep_batch_policy_done(&policy, &pick);
    cr_expect_str_eq(run(3), "");
}

Test(batch_policy, wide_jobs_stay_in_the_queues_where_they_grow)
{
    begin((ep_batch_policy_config){.jobs_max = 8, .jobs_wide_max = 2, .wide_cost = 100});
    ep_batch_pick pick;
    for (uint32_t i = 0; i < 4; i++) {
        add(EP_WORK_DECODE, i, 64, 0);
    }
    cr_expect_str_eq(take(0, &pick), "0 ");
    cr_expect_str_eq(take(0, &pick), "1 ");
    cr_expect_str_eq(run(0), "");
    ep_batch_policy_done(&policy, &pick);
    cr_expect_str_eq(take(0, &pick), "2 ");
}

/* Prefill that was cancelled has not had its share; decode that was cancelled has not taken it. */
Test(batch_policy, dropped_work_is_nobodys_share)
{
    ep_batch_pick pick;
    begin((ep_batch_policy_config){.jobs_max = 1, .prefill_share_percent = 25});
    for (int c = 0; c < EP_WORK_CLASSES; c++) {
        add((ep_work_class)c, 1, 4, 0);
    }
    for (int turn = 0; turn < EP_WORK_CLASSES; turn++) {
        cr_assert_str_eq(take(0, &pick), turn == 0 ? "0 " : "1 ");
        ep_batch_policy_drop(&policy, &pick, pick.works);
        ep_batch_policy_done(&policy, &pick);
        cr_expect_eq(policy.prefill_owed, 0);
        cr_expect_eq(policy.costs[pick.work_class], 0);
        cr_expect_eq(policy.jobs[pick.work_class], 0);
        cr_expect_eq(policy.tenants[0].virtual_time, 0);
    }
}
