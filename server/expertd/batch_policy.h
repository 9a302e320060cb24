/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decides which waiting work becomes the backend's next job, and with which ep_job.priority. Works
 * wait in one queue per (layer, expert). A job takes works of one queue, of as many callers as fit,
 * so that they share one pass over the weights.
 *
 *   class     decode before prefill. The time decode takes is counted; once prefill's share of the
 *             backend is below prefill_share_percent, no decode job starts until a prefill job has
 *             ended
 *   prefill   while the backend is busy, a queue of fewer than EP_BATCH_PREFILL_FULL_ROWS rows is
 *             held back until its age limit, because more rows of the same call are on their way.
 *             An idle backend starts any queue
 *   tenant    the one with the least weighted backend time goes first (start-time fair queueing).
 *             Its job carries rows of others only as far as they cost next to nothing
 *   queue     within a tenant, queues past the age limit go first, oldest first; then the fullest.
 *             A prefill queue counts as full from EP_BATCH_PREFILL_FULL_ROWS on; equally full ones
 *             go oldest first, so that whole frames end early and replies leave steadily
 *   group     decode works of a step group wait until frames of as many callers as the group has
 *             ranks have come to this node, or until its window ends. So ranks without rows here
 *             cost at most that window. Frames of one caller count once. Groups of different
 *             tenants have nothing in common
 *
 * Backend time is counted as job rows * row_cost, plus EP_BATCH_WEIGHT_ROWS rows for reading the
 * weights. A choice looks at every queue that has work.
 *
 * Pure: no clock, no threads, no memory of its own but the struct. Works and queues are the
 * caller's, borrowed until they are handed out again.
 */
#ifndef EP_EXPERTD_BATCH_POLICY_H
#define EP_EXPERTD_BATCH_POLICY_H

#include <stdatomic.h>

#include "backends/backend.h"

/* An urgent job waits for a panel of the job on the backend. So jobs are as small as they can be at
 * no extra cost: 64, 128 and 256 rows took the same processor time per row. */
#define EP_BATCH_JOB_ROWS_MAX 128
#define EP_BATCH_PREFILL_ROWS_MAX 96
#define EP_BATCH_PREFILL_FULL_ROWS 64
#define EP_BATCH_WEIGHT_ROWS 16
#define EP_BATCH_TENANTS_MAX 256
#define EP_BATCH_GROUPS_MAX 64
#define EP_BATCH_WEIGHT_MAX 1000

typedef struct ep_work ep_work;

typedef enum ep_work_class { EP_WORK_DECODE, EP_WORK_PREFILL, EP_WORK_CLASSES } ep_work_class;

/* Waiting work of one expert. Zero it first. */
typedef struct ep_work_queue {
    _Atomic uint64_t passes; /* jobs that the batcher began from this queue */
    /* private */
    struct {
        ep_work *flows; /* first work of each tenant that waits here */
        uint32_t rows;
        struct ep_work_queue *next_ready;
        struct ep_work_queue *previous_ready;
    } classes[EP_WORK_CLASSES];
} ep_work_queue;

/* What the policy knows of a work; the first part is set by its owner. */
typedef struct ep_work_place {
    ep_work_queue *queue;
    ep_work_class work_class;
    uint32_t tenant;   /* below tenants_count */
    uint32_t row_cost; /* of one row, in any unit that all works share; 0 counts as 1 */
    /* private */
    uint64_t queued_ns;
    uint64_t step_member; /* first works of a request that waits for its group */
    ep_work *next;        /* of the same tenant; also lists of others */
    /* next_flow and flow_last: of first works only. Also lists requests that wait for a group */
    ep_work *next_flow;
    ep_work *flow_last;
} ep_work_place;

/* A group's step, as the request names it. */
typedef struct ep_batch_step {
    const void *layer; /* groups of different layers have nothing in common */
    uint64_t group;    /* 0: none */
    uint32_t size;
    uint64_t member; /* whose works these are */
} ep_batch_step;

typedef struct ep_batch_policy_config {
    bool no_merging;
    uint32_t jobs_max; /* on the backend at once, of one class, at least 1 */
    /* the same while a class counts as wide; 0: jobs_max */
    uint32_t jobs_wide_max;
    uint64_t wide_cost;             /* a class is wide with so much cost on the backend; 0: never */
    uint32_t prefill_share_percent; /* 0..90 */
    uint64_t age_ns;                /* 0: no limit */
    uint64_t group_window_ns;       /* 0: nobody waits */
    uint32_t tenants_count;         /* at least 1 */
    uint32_t weights[EP_BATCH_TENANTS_MAX];
} ep_batch_policy_config;

/* The next job: works of one queue that fit together. */
typedef struct ep_batch_pick {
    ep_work *works; /* by place.next */
    uint32_t works_count;
    uint32_t rows;
    ep_work_class work_class;
    uint32_t tenant; /* whose turn it was */
    uint64_t cost;
    uint64_t priority; /* for ep_job */
    uint64_t end_time; /* the tenant's virtual time after it */
} ep_batch_pick;

typedef struct ep_batch_group {
    ep_batch_step step; /* layer NULL: free */
    uint32_t tenant;
    uint32_t arrived; /* members */
    bool is_released;
    uint64_t end_ns; /* of the window; once released: when the entry is forgotten */
    ep_work *first;
    ep_work *last;
    ep_work *newest; /* first work of the request that came last; the others' by next_flow */
} ep_batch_group;

typedef struct ep_batch_tenant {
    /* weighted backend time so far, including its jobs on the backend */
    uint64_t virtual_time;
    uint64_t begin_time; /* virtual time at which the oldest of those jobs began */
    uint32_t waiting[EP_WORK_CLASSES];
    uint32_t jobs[EP_WORK_CLASSES]; /* on the backend */
} ep_batch_tenant;

typedef struct ep_batch_policy {
    /* private */
    ep_batch_policy_config config;
    uint32_t jobs_all_max;                 /* the most that ep_batch_policy_take lets run at once */
    ep_work_queue *ready[EP_WORK_CLASSES]; /* queues with work, the newest last */
    ep_work_queue *ready_last[EP_WORK_CLASSES];
    uint32_t jobs[EP_WORK_CLASSES];
    uint64_t costs[EP_WORK_CLASSES]; /* of the jobs on the backend */
    uint64_t waiting[EP_WORK_CLASSES];
    uint64_t virtual_time; /* at which the last job began */
    int64_t prefill_owed;  /* above 0: prefill got less than its share */
    ep_batch_tenant tenants[EP_BATCH_TENANTS_MAX];
    ep_batch_group groups[EP_BATCH_GROUPS_MAX];
    uint32_t groups_waiting; /* 0: no window runs */
} ep_batch_policy;

/* config is copied. */
void ep_batch_policy_init(ep_batch_policy *policy, const ep_batch_policy_config *config);
/* Rows a work may have at most, by class. */
extern const uint32_t ep_batch_rows_max[EP_WORK_CLASSES];

/* Adds one request's works, linked by place.next; step may be NULL. */
void ep_batch_policy_add(ep_batch_policy *policy, ep_work *works, const ep_batch_step *step,
                         uint64_t now_ns);
/* The next job; it counts as running until ep_batch_policy_done. False: nothing may start. */
bool ep_batch_policy_take(ep_batch_policy *policy, uint64_t now_ns, ep_batch_pick *out_pick);
/* The backend had no room: puts the works back where they were. */
void ep_batch_policy_put_back(ep_batch_policy *policy, const ep_batch_pick *pick);
/* A work of the pick, out of its list already, will not be computed. */
void ep_batch_policy_drop(ep_batch_policy *policy, ep_batch_pick *pick, const ep_work *work);
/* A job has ended, or never began because its works were dropped. */
void ep_batch_policy_done(ep_batch_policy *policy, const ep_batch_pick *pick);
/* Takes any waiting work, step groups included, in no order; NULL: none is left. */
ep_work *ep_batch_policy_drain(ep_batch_policy *policy);
/* Releases the step groups whose windows end by until_ns. */
void ep_batch_policy_release_groups(ep_batch_policy *policy, uint64_t until_ns, uint64_t now_ns);
/* When the next window of a step group ends; UINT64_MAX: none. */
uint64_t ep_batch_policy_window_end(const ep_batch_policy *policy);

#endif
