/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_team.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t begin;
    pthread_cond_t end;
    uint64_t round;
    uint32_t running;
    int stopping;
    void (*task)(void *arg, uint32_t index);
    void *arg;
    struct {
        void *crew;
        uint32_t index;
        pthread_t thread;
    } member[FFN_TEAM_THREADS_MAX];
    uint32_t threads;
} crew;

static void pin(uint32_t index)
{
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return;
    }
    index %= (uint32_t)CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && index-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            (void)pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
            return;
        }
    }
}

static void *member_main(void *arg)
{
    __typeof__(&((crew *)NULL)->member[0]) self = arg;
    crew *c = self->crew;
    uint64_t seen = 0;
    pin(self->index);
    pthread_mutex_lock(&c->lock);
    for (;;) {
        while (c->round == seen && !c->stopping) {
            pthread_cond_wait(&c->begin, &c->lock);
        }
        if (c->stopping) {
            break;
        }
        seen = c->round;
        pthread_mutex_unlock(&c->lock);
        c->task(c->arg, self->index);
        pthread_mutex_lock(&c->lock);
        if (--c->running == 0) {
            pthread_cond_signal(&c->end);
        }
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

static void crew_run(ffn_team *team, void (*task)(void *arg, uint32_t index), void *arg)
{
    crew *c = team->threads_of;
    pthread_mutex_lock(&c->lock);
    c->task = task;
    c->arg = arg;
    c->running = c->threads;
    c->round++;
    pthread_cond_broadcast(&c->begin);
    while (c->running > 0) {
        pthread_cond_wait(&c->end, &c->lock);
    }
    pthread_mutex_unlock(&c->lock);
}

void ffn_team_start(ffn_team *team, uint32_t threads)
{
    crew *c = calloc(1, sizeof(*c));
    if (c == NULL || threads > FFN_TEAM_THREADS_MAX) {
        abort();
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->begin, NULL);
    pthread_cond_init(&c->end, NULL);
    c->threads = threads;
    for (uint32_t i = 0; i < threads; i++) {
        c->member[i].crew = c;
        c->member[i].index = i;
        if (pthread_create(&c->member[i].thread, NULL, member_main, &c->member[i]) != 0) {
            abort();
        }
    }
    *team = (ffn_team){.threads = threads, .run = crew_run, .threads_of = c};
}

void ffn_team_stop(ffn_team *team)
{
    crew *c = team->threads_of;
    pthread_mutex_lock(&c->lock);
    c->stopping = 1;
    pthread_cond_broadcast(&c->begin);
    pthread_mutex_unlock(&c->lock);
    for (uint32_t i = 0; i < c->threads; i++) {
        pthread_join(c->member[i].thread, NULL);
    }
    free(c);
}
