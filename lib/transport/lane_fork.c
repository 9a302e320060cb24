/* SPDX-License-Identifier: Apache-2.0 */
/* See lane_fork.h. */
#include "transport/lane_fork.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "transport/lane_common.h"

#define WORD_BITS 64u
#define LANES_MAX 8

static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    void (*forget[LANES_MAX + 1])(void); /* ended by NULL */
    uint64_t *open;                      /* a bit for each descriptor number */
    size_t words;
    uint32_t forks; /* atomic */
} known = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static void before_fork(void)
{
    pthread_mutex_lock(&known.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&known.lock);
}

static void after_fork_in_child(void)
{
    __atomic_fetch_add(&known.forks, 1, __ATOMIC_RELAXED);
    for (size_t word = 0; word < known.words; word++) {
        for (; known.open[word] != 0; known.open[word] &= known.open[word] - 1) {
            close((int)(word * WORD_BITS) + __builtin_ctzll(known.open[word]));
        }
    }
    ep_lane_holds_forget();
    for (size_t i = 0; known.forget[i] != NULL; i++) {
        known.forget[i]();
    }
    pthread_mutex_unlock(&known.lock);
}

static void hook(void)
{
    /* This fails only for lack of memory. A child then keeps the descriptors, as it does with nng,
     * and peers notice the parent's end by its silence. */
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void ep_lane_fork_watch(void)
{
    pthread_once(&known.once, hook);
}

void ep_lane_fork_hook(void (*forget)(void))
{
    ep_lane_fork_watch();
    pthread_mutex_lock(&known.lock);
    size_t i = 0;
    while (known.forget[i] != NULL && known.forget[i] != forget) {
        i++;
    }
    EP_ASSERT(i < LANES_MAX);
    known.forget[i] = forget;
    pthread_mutex_unlock(&known.lock);
}

uint32_t ep_lane_forks(void)
{
    return __atomic_load_n(&known.forks, __ATOMIC_RELAXED);
}

bool ep_lane_is_ours(uint32_t forks)
{
    return forks == __atomic_load_n(&known.forks, __ATOMIC_RELAXED);
}

void ep_lane_fd_begin(void)
{
    pthread_mutex_lock(&known.lock);
}

/* Lock held. Makes room for this word; false: no memory. */
static bool grow(size_t word)
{
    const size_t words = 2 * word + 16;
    uint64_t *open = realloc(known.open, words * sizeof(*open));
    if (open != NULL) {
        memset(open + known.words, 0, (words - known.words) * sizeof(*open));
        known.open = open;
        known.words = words;
    }
    return open != NULL;
}

int ep_lane_fd_end(int taken_fd)
{
    const size_t word = (size_t)taken_fd / WORD_BITS;
    if (taken_fd >= 0 && word >= known.words && !grow(word)) {
        close(taken_fd);
        errno = ENOMEM;
        taken_fd = -1;
    }
    if (taken_fd >= 0) {
        known.open[word] |= (uint64_t)1 << (size_t)taken_fd % WORD_BITS;
    }
    pthread_mutex_unlock(&known.lock);
    return taken_fd;
}

/* Lock held. False: it is not registered. */
static bool forget_fd_locked(int fd)
{
    const size_t word = (size_t)fd / WORD_BITS;
    const uint64_t bit = (uint64_t)1 << (size_t)fd % WORD_BITS;
    const bool is_known = fd >= 0 && word < known.words && (known.open[word] & bit) != 0;
    if (is_known) {
        known.open[word] &= ~bit;
    }
    return is_known;
}

void ep_lane_fd_close(int fd)
{
    pthread_mutex_lock(&known.lock);
    if (forget_fd_locked(fd)) {
        close(fd);
    }
    pthread_mutex_unlock(&known.lock);
}

void ep_lane_fd_forget(int fd)
{
    pthread_mutex_lock(&known.lock);
    (void)forget_fd_locked(fd);
    pthread_mutex_unlock(&known.lock);
}
