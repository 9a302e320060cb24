/* SPDX-License-Identifier: Apache-2.0 */
#include "support/slow_faults.h"

#include <pthread.h>
#include <string.h>

#include "base/random.h"

typedef struct {
    uint64_t nth; /* 0: none planned */
    ep_err err;
} fault;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fault faults[EP_SLOW_OPERATIONS][2];
static uint64_t counts[EP_SLOW_OPERATIONS];
static bool device_lost;
static uint64_t shuffle_state = 1;
static uint64_t overtakings;
static uint64_t blocks_alive; /* not reset: blocks outlive a reset */

void ep_slow_backend_reset(uint64_t seed)
{
    pthread_mutex_lock(&lock);
    memset(faults, 0, sizeof(faults));
    memset(counts, 0, sizeof(counts));
    device_lost = false;
    shuffle_state = seed;
    overtakings = 0;
    pthread_mutex_unlock(&lock);
}

void ep_slow_backend_fail(ep_slow_operation operation, ep_slow_moment moment, uint64_t nth,
                          ep_err err)
{
    pthread_mutex_lock(&lock);
    faults[operation][moment] = (fault){.nth = nth, .err = err};
    pthread_mutex_unlock(&lock);
}

void ep_slow_backend_lose_device(void)
{
    pthread_mutex_lock(&lock);
    device_lost = true;
    pthread_mutex_unlock(&lock);
}

static uint64_t read_locked(const uint64_t *value)
{
    pthread_mutex_lock(&lock);
    uint64_t copy = *value;
    pthread_mutex_unlock(&lock);
    return copy;
}

uint64_t ep_slow_backend_count(ep_slow_operation operation)
{
    return read_locked(&counts[operation]);
}

uint64_t ep_slow_backend_blocks_alive(void)
{
    return read_locked(&blocks_alive);
}

uint64_t ep_slow_backend_overtakings(void)
{
    return read_locked(&overtakings);
}

static ep_err planned(ep_slow_operation operation, ep_slow_moment moment)
{
    const fault *f = &faults[operation][moment];
    return f->nth != 0 && f->nth == counts[operation] ? f->err : EP_OK;
}

ep_err slow_faults_at_call(ep_slow_operation operation, ep_err *out_later)
{
    pthread_mutex_lock(&lock);
    counts[operation]++;
    ep_err now = device_lost ? EP_ERR_DEVICE_LOST : planned(operation, EP_SLOW_AT_CALL);
    *out_later = planned(operation, EP_SLOW_AT_DONE);
    pthread_mutex_unlock(&lock);
    return now;
}

ep_err slow_faults_at_done(ep_err planned_err)
{
    pthread_mutex_lock(&lock);
    ep_err err = device_lost ? EP_ERR_DEVICE_LOST : planned_err;
    pthread_mutex_unlock(&lock);
    return err;
}

uint64_t slow_faults_random_below(uint64_t limit)
{
    pthread_mutex_lock(&lock);
    uint64_t value = ep_splitmix64(&shuffle_state) % limit;
    pthread_mutex_unlock(&lock);
    return value;
}

void slow_faults_block_born(void)
{
    pthread_mutex_lock(&lock);
    blocks_alive++;
    pthread_mutex_unlock(&lock);
}

void slow_faults_block_died(void)
{
    pthread_mutex_lock(&lock);
    blocks_alive--;
    pthread_mutex_unlock(&lock);
}

void slow_faults_overtaken(void)
{
    pthread_mutex_lock(&lock);
    overtakings++;
    pthread_mutex_unlock(&lock);
}
