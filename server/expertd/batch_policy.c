/* SPDX-License-Identifier: Apache-2.0 */
/* Queues, tenants, classes and step groups, and the choice between them. */
#include "expertd/batch_policy.h"

#include <string.h>

#include "base/check.h"
#include "expertd/batcher.h"

#define VIRTUAL_UNIT 1024 /* of virtual time per cost at weight 1 */
#define OWED_JOBS 4       /* prefill saves up credit for at most so many of its jobs */
/* for so long a rank that comes after its group was released does not wait */
#define GROUP_REMEMBERED_NS 1000000000ull

const uint32_t ep_batch_rows_max[EP_WORK_CLASSES] = {EP_BATCH_JOB_ROWS_MAX,
                                                     EP_BATCH_PREFILL_ROWS_MAX};
/* Rows of other tenants that a job carries at most: so few that they hardly make it longer. */
static const uint32_t guest_rows_max[EP_WORK_CLASSES] = {EP_BATCH_WEIGHT_ROWS,
                                                         EP_BATCH_PREFILL_FULL_ROWS};

void ep_batch_policy_init(ep_batch_policy *policy, const ep_batch_policy_config *config)
{
    EP_ASSERT(config->jobs_max > 0);
    EP_ASSERT(config->tenants_count > 0 && config->tenants_count <= EP_BATCH_TENANTS_MAX);
    EP_ASSERT(config->prefill_share_percent < 100);
    memset(policy, 0, sizeof(*policy));
    policy->config = *config;
    /* each class has its own room, and one job more for a tenant that has none on the backend */
    policy->jobs_all_max = EP_WORK_CLASSES * config->jobs_max +
                           (config->tenants_count - 1 < config->jobs_max ? config->tenants_count - 1
                                                                         : config->jobs_max);
    if (policy->config.jobs_wide_max == 0) {
        policy->config.jobs_wide_max = config->jobs_max;
    }
}

/* ---- queues ---- */

/* Where the pointer to the tenant's first work is, or the end of the list. */
static ep_work **flow_of(ep_work_queue *queue, ep_work_class c, uint32_t tenant)
{
    ep_work **at = &queue->classes[c].flows;
    while (*at != NULL && (*at)->place.tenant != tenant) {
        at = &(*at)->place.next_flow;
    }
    return at;
}

static uint32_t jobs_of(const ep_batch_tenant *tenant)
{
    return tenant->jobs[EP_WORK_DECODE] + tenant->jobs[EP_WORK_PREFILL];
}

/* The virtual time at which an idle tenant begins: that of the oldest job on the backend. So its
 * own job's time ends before theirs, and it may overtake them all. */
static uint64_t time_now(const ep_batch_policy *policy)
{
    uint64_t now = policy->virtual_time;
    for (uint32_t i = 0; i < policy->config.tenants_count; i++) {
        const ep_batch_tenant *tenant = &policy->tenants[i];
        now = jobs_of(tenant) > 0 && tenant->begin_time < now ? tenant->begin_time : now;
    }
    return now;
}

/* Counts a work that has been put into its flow. */
static void count_in(ep_batch_policy *policy, const ep_work *work)
{
    const ep_work_class c = work->place.work_class;
    ep_batch_tenant *tenant = &policy->tenants[work->place.tenant];
    ep_work_queue *queue = work->place.queue;
    if (queue->classes[c].rows == 0) { /* the queue becomes ready, as the newest */
        ep_work_queue *last = policy->ready_last[c];
        queue->classes[c].next_ready = NULL;
        queue->classes[c].previous_ready = last;
        *(last != NULL ? &last->classes[c].next_ready : &policy->ready[c]) = queue;
        policy->ready_last[c] = queue;
    }
    queue->classes[c].rows += work->job.rows_count;
    if (tenant->waiting[EP_WORK_DECODE] + tenant->waiting[EP_WORK_PREFILL] + jobs_of(tenant) == 0) {
        /* idle time is not saved up */
        uint64_t now = policy->config.tenants_count > 1 ? time_now(policy) : policy->virtual_time;
        tenant->virtual_time = tenant->virtual_time < now ? now : tenant->virtual_time;
    }
    tenant->waiting[c]++;
    policy->waiting[c]++;
}

static void enqueue(ep_batch_policy *policy, ep_work *work)
{
    ep_work **flow = flow_of(work->place.queue, work->place.work_class, work->place.tenant);
    work->place.next = NULL;
    if (*flow != NULL) {
        (*flow)->place.flow_last->place.next = work;
        (*flow)->place.flow_last = work;
    } else {
        work->place.next_flow = NULL;
        work->place.flow_last = work;
        *flow = work;
    }
    count_in(policy, work);
}

/* Puts a work before the other works of its tenant. */
static void enqueue_first(ep_batch_policy *policy, ep_work *work)
{
    ep_work **flow = flow_of(work->place.queue, work->place.work_class, work->place.tenant);
    ep_work *first = *flow;
    work->place.next = first;
    work->place.next_flow = first != NULL ? first->place.next_flow : NULL;
    work->place.flow_last = first != NULL ? first->place.flow_last : work;
    *flow = work;
    count_in(policy, work);
}

/* Takes the first work of a flow. */
static ep_work *dequeue(ep_batch_policy *policy, ep_work **flow)
{
    ep_work *work = *flow;
    ep_work *next = work->place.next;
    const ep_work_class c = work->place.work_class;
    if (next != NULL) {
        next->place.next_flow = work->place.next_flow;
        next->place.flow_last = work->place.flow_last;
        *flow = next;
    } else {
        *flow = work->place.next_flow;
    }
    work->place.next = NULL;
    ep_work_queue *queue = work->place.queue;
    queue->classes[c].rows -= work->job.rows_count;
    if (queue->classes[c].rows == 0) {
        ep_work_queue *after = queue->classes[c].next_ready;
        ep_work_queue *before = queue->classes[c].previous_ready;
        *(after != NULL ? &after->classes[c].previous_ready : &policy->ready_last[c]) = before;
        *(before != NULL ? &before->classes[c].next_ready : &policy->ready[c]) = after;
    }
    policy->tenants[work->place.tenant].waiting[c]--;
    policy->waiting[c]--;
    return work;
}

/* ---- step groups ---- */

static void release(ep_batch_policy *policy, ep_batch_group *group, uint64_t now_ns)
{
    ep_work *work = group->first;
    group->first = group->last = group->newest = NULL;
    group->is_released = true;
    group->end_ns = now_ns + GROUP_REMEMBERED_NS;
    policy->groups_waiting--;
    while (work != NULL) {
        ep_work *next = work->place.next;
        policy->waiting[work->place.work_class]--; /* it was counted while it waited in the group */
        enqueue(policy, work);
        work = next;
    }
}

void ep_batch_policy_release_groups(ep_batch_policy *policy, uint64_t until_ns, uint64_t now_ns)
{
    for (uint32_t i = 0; policy->groups_waiting > 0 && i < EP_BATCH_GROUPS_MAX; i++) {
        ep_batch_group *group = &policy->groups[i];
        if (group->step.layer != NULL && !group->is_released && group->end_ns <= until_ns) {
            release(policy, group, now_ns);
        }
    }
}

/* The group's entry, made when there is none. A new group takes a free entry, else the one released
 * longest ago, else the one whose window ends first, which is released. */
static ep_batch_group *find_group(ep_batch_policy *policy, const ep_batch_step *step,
                                  uint32_t tenant, uint64_t now_ns)
{
    ep_batch_group *worst = &policy->groups[0];
    for (uint32_t i = 0; i < EP_BATCH_GROUPS_MAX; i++) {
        ep_batch_group *group = &policy->groups[i];
        bool is_forgotten = group->is_released && now_ns >= group->end_ns;
        if (group->step.layer == step->layer && group->step.group == step->group &&
            group->tenant == tenant && !is_forgotten) {
            return group;
        }
        int rank = group->step.layer == NULL ? 0 : group->is_released ? 1 : 2;
        int worst_rank = worst->step.layer == NULL ? 0 : worst->is_released ? 1 : 2;
        if (rank < worst_rank || (rank == worst_rank && group->end_ns < worst->end_ns)) {
            worst = group;
        }
    }
    if (worst->step.layer != NULL && !worst->is_released) {
        release(policy, worst, now_ns);
    }
    *worst = (ep_batch_group){
        .step = *step, .tenant = tenant, .end_ns = now_ns + policy->config.group_window_ns};
    policy->groups_waiting++;
    return worst;
}

static bool has_come(const ep_batch_group *group, uint64_t member)
{
    const ep_work *work = group->newest;
    while (work != NULL && work->place.step_member != member) {
        work = work->place.next_flow;
    }
    return work != NULL;
}

/* Adds the works to their step group. True: the group still waits for others. */
static bool join_group(ep_batch_policy *policy, ep_work *works, const ep_batch_step *step,
                       uint64_t now_ns)
{
    ep_batch_group *group = find_group(policy, step, works->place.tenant, now_ns);
    if (group->is_released) {
        return false;
    }
    group->arrived += !has_come(group, step->member);
    works->place.step_member = step->member;
    works->place.next_flow = group->newest;
    group->newest = works;
    ep_work *last = works;
    for (ep_work *work = works; work != NULL; work = work->place.next) {
        work->place.queued_ns = now_ns;
        policy->waiting[work->place.work_class]++;
        last = work;
    }
    if (group->last != NULL) {
        group->last->place.next = works;
    } else {
        group->first = works;
    }
    group->last = last;
    if (group->arrived >= group->step.size) {
        release(policy, group, now_ns);
    }
    return true;
}

uint64_t ep_batch_policy_window_end(const ep_batch_policy *policy)
{
    uint64_t end_ns = UINT64_MAX;
    for (uint32_t i = 0; policy->groups_waiting > 0 && i < EP_BATCH_GROUPS_MAX; i++) {
        const ep_batch_group *group = &policy->groups[i];
        if (group->step.layer != NULL && !group->is_released && group->end_ns < end_ns) {
            end_ns = group->end_ns;
        }
    }
    return end_ns;
}

void ep_batch_policy_add(ep_batch_policy *policy, ep_work *works, const ep_batch_step *step,
                         uint64_t now_ns)
{
    const bool is_in_step = works != NULL && step != NULL && step->group != 0 && step->size > 1 &&
                            policy->config.group_window_ns != 0 &&
                            works->place.work_class == EP_WORK_DECODE;
    if (is_in_step && join_group(policy, works, step, now_ns)) {
        return;
    }
    for (ep_work *work = works, *next; work != NULL; work = next) {
        next = work->place.next;
        EP_ASSERT(work->job.rows_count > 0 &&
                  work->job.rows_count <= ep_batch_rows_max[work->place.work_class]);
        EP_ASSERT(work->place.tenant < policy->config.tenants_count);
        work->place.queued_ns = now_ns;
        enqueue(policy, work);
    }
}

/* ---- cost ---- */

static uint64_t cost_of(const ep_work *work, uint64_t rows)
{
    return rows * (work->place.row_cost != 0 ? work->place.row_cost : 1);
}

/* A tenant pays for its rows and its part of reading the weights. Below 0: a refund. */
static void charge(ep_batch_policy *policy, uint32_t tenant, int64_t cost)
{
    const int64_t weight = policy->config.weights[tenant] != 0 ? policy->config.weights[tenant] : 1;
    policy->tenants[tenant].virtual_time += (uint64_t)(cost * VIRTUAL_UNIT / weight);
}

/* ---- choosing ---- */

/* A tenant with no job on the backend may start one beyond its class's limit, to overtake there. */
static bool may_start(const ep_batch_policy *policy, ep_work_class c, uint32_t tenant)
{
    const ep_batch_policy_config *config = &policy->config;
    bool is_wide = config->wide_cost != 0 && policy->costs[c] >= config->wide_cost;
    uint32_t max = is_wide && config->jobs_wide_max < config->jobs_max ? config->jobs_wide_max
                                                                       : config->jobs_max;
    uint32_t jobs = policy->jobs[EP_WORK_DECODE] + policy->jobs[EP_WORK_PREFILL];
    return jobs < policy->jobs_all_max &&
           (policy->jobs[c] < max || policy->tenants[tenant].jobs[c] == 0);
}

/* A prefill queue that may still grow waits while the backend is busy anyway. */
static bool is_held(const ep_batch_policy *policy, const ep_work_queue *queue, const ep_work *first,
                    uint64_t now_ns)
{
    const uint64_t age_ns = policy->config.age_ns;
    return !policy->config.no_merging &&
           queue->classes[EP_WORK_PREFILL].rows < EP_BATCH_PREFILL_FULL_ROWS &&
           policy->jobs[EP_WORK_DECODE] + policy->jobs[EP_WORK_PREFILL] > 0 &&
           policy->prefill_owed <= 0 && (age_ns == 0 || now_ns - first->place.queued_ns < age_ns);
}

/* How full a queue counts. Prefill knows only full queues and those that may still grow, which only
 * an idle backend takes; among equals the oldest goes first, so that its frame ends. */
static uint32_t fullness(const ep_work_queue *queue, ep_work_class c)
{
    const uint32_t rows = queue->classes[c].rows, max = ep_batch_rows_max[c];
    return c == EP_WORK_PREFILL ? rows >= EP_BATCH_PREFILL_FULL_ROWS : rows < max ? rows : max;
}

/* a before b? */
static bool is_better(const ep_batch_policy *policy, const ep_work *a, const ep_work *b,
                      uint64_t now_ns)
{
    const ep_work_class c = a->place.work_class;
    const uint64_t age_ns = policy->config.age_ns;
    uint64_t a_time = policy->tenants[a->place.tenant].virtual_time;
    uint64_t b_time = policy->tenants[b->place.tenant].virtual_time;
    if (a_time != b_time) {
        return a_time < b_time;
    }
    bool a_is_old = age_ns != 0 && now_ns - a->place.queued_ns >= age_ns;
    bool b_is_old = age_ns != 0 && now_ns - b->place.queued_ns >= age_ns;
    if (a_is_old != b_is_old) {
        return a_is_old;
    }
    uint32_t a_rows = fullness(a->place.queue, c);
    uint32_t b_rows = fullness(b->place.queue, c);
    if (!a_is_old && a_rows != b_rows) {
        return a_rows > b_rows;
    }
    return a->place.queued_ns < b->place.queued_ns;
}

static ep_work *choose(const ep_batch_policy *policy, ep_work_class c, uint64_t now_ns)
{
    ep_work *best = NULL;
    for (const ep_work_queue *queue = policy->ready[c]; queue != NULL;
         queue = queue->classes[c].next_ready) {
        for (ep_work *first = queue->classes[c].flows; first != NULL;
             first = first->place.next_flow) {
            if (may_start(policy, c, first->place.tenant) &&
                !(c == EP_WORK_PREFILL && is_held(policy, queue, first, now_ns)) &&
                (best == NULL || is_better(policy, first, best, now_ns))) {
                best = first;
            }
        }
    }
    return best;
}

/* ---- forming a job ---- */

static bool fits(const ep_batch_pick *pick, const ep_work *work, uint32_t rows_max)
{
    const ep_job *a = &pick->works->job;
    const ep_job *b = &work->job;
    return pick->rows + b->rows_count <= rows_max && a->weights == b->weights &&
           a->x_dtype == b->x_dtype && a->out_dtype == b->out_dtype &&
           a->weight_on_input == b->weight_on_input;
}

/* Among the other tenants, the flow of the one with the least time whose first work fits. */
static ep_work **choose_guest(ep_batch_policy *policy, const ep_batch_pick *pick,
                              ep_work_queue *queue)
{
    ep_work **best = NULL;
    const ep_work_class c = pick->work_class;
    for (ep_work **flow = &queue->classes[c].flows; *flow != NULL;
         flow = &(*flow)->place.next_flow) {
        bool is_first = best == NULL || policy->tenants[(*flow)->place.tenant].virtual_time <
                                            policy->tenants[(*best)->place.tenant].virtual_time;
        if ((*flow)->place.tenant != pick->tenant && is_first &&
            fits(pick, *flow, guest_rows_max[c])) {
            best = flow;
        }
    }
    return best;
}

/* The flow whose first work the pick takes next: of its own tenant, then of others. */
static ep_work **next_flow(ep_batch_policy *policy, const ep_batch_pick *pick, ep_work_queue *queue)
{
    ep_work **own = flow_of(queue, pick->work_class, pick->tenant);
    if (*own != NULL && fits(pick, *own, ep_batch_rows_max[pick->work_class])) {
        return own;
    }
    return policy->config.tenants_count > 1 ? choose_guest(policy, pick, queue) : NULL;
}

static void form(ep_batch_policy *policy, ep_work *first, ep_batch_pick *out_pick)
{
    ep_work_queue *queue = first->place.queue;
    ep_batch_pick pick = {.work_class = first->place.work_class,
                          .tenant = first->place.tenant,
                          .cost = cost_of(first, EP_BATCH_WEIGHT_ROWS)};
    ep_work **end = &pick.works;
    ep_work **flow = flow_of(queue, pick.work_class, pick.tenant);
    charge(policy, pick.tenant, (int64_t)pick.cost);
    do {
        ep_work *work = dequeue(policy, flow);
        const uint64_t cost = cost_of(work, work->job.rows_count);
        *end = work;
        end = &work->place.next;
        pick.works_count++;
        pick.rows += work->job.rows_count;
        pick.cost += cost;
        charge(policy, work->place.tenant, (int64_t)cost);
    } while (!policy->config.no_merging && (flow = next_flow(policy, &pick, queue)) != NULL);
    *out_pick = pick;
}

bool ep_batch_policy_take(ep_batch_policy *policy, uint64_t now_ns, ep_batch_pick *out_pick)
{
    if (policy->groups_waiting > 0) {
        ep_batch_policy_release_groups(policy, now_ns, now_ns);
    }
    bool prefill_waits =
        policy->ready[EP_WORK_PREFILL] != NULL || policy->jobs[EP_WORK_PREFILL] > 0;
    if (!prefill_waits) {
        policy->prefill_owed = policy->prefill_owed > 0 ? 0 : policy->prefill_owed;
    }
    bool is_prefills_turn = prefill_waits && policy->prefill_owed > 0;
    ep_work *first = is_prefills_turn ? NULL : choose(policy, EP_WORK_DECODE, now_ns);
    first = first != NULL ? first : choose(policy, EP_WORK_PREFILL, now_ns);
    if (first == NULL) {
        return false;
    }
    const ep_work_class c = first->place.work_class;
    uint64_t begin = policy->tenants[first->place.tenant].virtual_time;
    policy->virtual_time = begin > policy->virtual_time ? begin : policy->virtual_time;
    form(policy, first, out_pick);
    out_pick->end_time = policy->tenants[out_pick->tenant].virtual_time;
    out_pick->priority = out_pick->end_time;
    out_pick->priority |= c == EP_WORK_PREFILL ? EP_JOB_PATIENT : 0;
    ep_batch_tenant *tenant = &policy->tenants[out_pick->tenant];
    tenant->begin_time = jobs_of(tenant) == 0 ? begin : tenant->begin_time;
    tenant->jobs[c]++;
    policy->jobs[c]++;
    policy->costs[c] += out_pick->cost;
    return true;
}

static void leave_backend(ep_batch_policy *policy, const ep_batch_pick *pick)
{
    ep_batch_tenant *tenant = &policy->tenants[pick->tenant];
    tenant->begin_time = pick->end_time > tenant->begin_time ? pick->end_time : tenant->begin_time;
    tenant->jobs[pick->work_class]--;
    policy->jobs[pick->work_class]--;
    policy->costs[pick->work_class] -= pick->cost;
}

void ep_batch_policy_put_back(ep_batch_policy *policy, const ep_batch_pick *pick)
{
    ep_work *backwards = NULL;
    leave_backend(policy, pick);
    charge(policy, pick->tenant, -(int64_t)cost_of(pick->works, EP_BATCH_WEIGHT_ROWS));
    for (ep_work *work = pick->works, *next; work != NULL; work = next) {
        next = work->place.next;
        work->place.next = backwards;
        backwards = work;
    }
    for (ep_work *work = backwards, *next; work != NULL; work = next) {
        next = work->place.next;
        charge(policy, work->place.tenant, -(int64_t)cost_of(work, work->job.rows_count));
        enqueue_first(policy, work);
    }
}

/* Work that is not computed is not charged, neither to the tenant nor to its class's share. */
void ep_batch_policy_drop(ep_batch_policy *policy, ep_batch_pick *pick, const ep_work *work)
{
    uint64_t cost = cost_of(work, work->job.rows_count);
    charge(policy, work->place.tenant, -(int64_t)cost);
    pick->works_count--;
    pick->rows -= work->job.rows_count;
    if (pick->works_count == 0) {
        charge(policy, pick->tenant, -(int64_t)cost_of(work, EP_BATCH_WEIGHT_ROWS));
        cost += cost_of(work, EP_BATCH_WEIGHT_ROWS);
    }
    pick->cost -= cost;
    policy->costs[pick->work_class] -= cost;
}

void ep_batch_policy_done(ep_batch_policy *policy, const ep_batch_pick *pick)
{
    const int64_t share = policy->config.prefill_share_percent;
    const int64_t cost = (int64_t)pick->cost;
    if (pick->works_count == 0) {
        /* it never ran */
    } else if (pick->work_class == EP_WORK_PREFILL) {
        int64_t floor = -OWED_JOBS * cost * (100 - share);
        policy->prefill_owed -= cost * (100 - share);
        policy->prefill_owed = policy->prefill_owed < floor ? floor : policy->prefill_owed;
    } else if (policy->ready[EP_WORK_PREFILL] != NULL || policy->jobs[EP_WORK_PREFILL] > 0) {
        policy->prefill_owed += cost * share;
    }
    leave_backend(policy, pick);
}

ep_work *ep_batch_policy_drain(ep_batch_policy *policy)
{
    for (int c = 0; c < EP_WORK_CLASSES; c++) {
        if (policy->ready[c] != NULL) {
            return dequeue(policy, &policy->ready[c]->classes[c].flows);
        }
    }
    if (policy->groups_waiting == 0) {
        return NULL;
    }
    ep_batch_policy_release_groups(policy, UINT64_MAX, 0);
    return ep_batch_policy_drain(policy);
}
