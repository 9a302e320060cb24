/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as threads. Over shm their sockets lie in a directory of the process's own. Over tcp rank 0
 * listens on a free port and tells it to the others through a small table by group name. */
#include "rank_threads.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BOARD_ENTRIES 4096

/* Rank 0's addresses, by group name. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char name[BOARD_ENTRIES][64];
    char url[BOARD_ENTRIES][128];
    unsigned count;
    unsigned names;
} board = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* Made once, removed at the end; the lane removes its sockets itself. */
static char socket_path[] = "/tmp/ep-group-XXXXXX";
static pthread_once_t socket_once = PTHREAD_ONCE_INIT;

static void remove_socket_dir(void)
{
    rmdir(socket_path);
}

static void make_socket_dir(void)
{
    if (mkdtemp(socket_path) == NULL) {
        abort();
    }
    atexit(remove_socket_dir);
}

static const char *socket_dir(void)
{
    pthread_once(&socket_once, make_socket_dir);
    return socket_path;
}

void rank_group_name(char *out, size_t bytes)
{
    pthread_mutex_lock(&board.lock);
    snprintf(out, bytes, "group-%u", board.names++);
    pthread_mutex_unlock(&board.lock);
}

static void publish(void *arg, const char *url)
{
    pthread_mutex_lock(&board.lock);
    snprintf(board.name[board.count % BOARD_ENTRIES], 64, "%s", (const char *)arg);
    snprintf(board.url[board.count % BOARD_ENTRIES], 128, "%s", url);
    board.count++;
    pthread_cond_broadcast(&board.changed);
    pthread_mutex_unlock(&board.lock);
}

static void look_up(const char *name, char out_url[128])
{
    pthread_mutex_lock(&board.lock);
    for (;;) {
        for (unsigned i = 0; i < board.count && i < BOARD_ENTRIES; i++) {
            if (strcmp(board.name[i], name) == 0) {
                strcpy(out_url, board.url[i]);
                pthread_mutex_unlock(&board.lock);
                return;
            }
        }
        pthread_cond_wait(&board.changed, &board.lock);
    }
}

ep_group *rank_group_create(const char *scheme, const char *name, uint32_t world, uint32_t rank,
                            uint64_t deadline_us)
{
    return rank_group_create_on(scheme, NULL, name, world, rank, deadline_us);
}

ep_group *rank_group_create_on(const char *scheme, const char *host, const char *name,
                               uint32_t world, uint32_t rank, uint64_t deadline_us)
{
    ep_group_config config;
    char own[128];
    char first[128];
    bool tcp = strcmp(scheme, "tcp") == 0;
    bool shm = strcmp(scheme, "shm") == 0;
    ep_group_config_init(&config);
    if (tcp) {
        snprintf(own, sizeof(own), "tcp://127.0.0.1:0");
    } else {
        snprintf(own, sizeof(own), "%s://%s%s%s-%u", scheme, shm ? socket_dir() : "",
                 shm ? "/" : "", name, rank);
    }
    snprintf(first, sizeof(first), "%s", own);
    if (rank > 0) {
        look_up(name, first);
    } else {
        config.on_listening = publish;
        config.on_listening_arg = (void *)(uintptr_t)name;
        if (world == 1) {
            publish((void *)(uintptr_t)name, own);
        }
    }
    const char *urls[1] = {first};
    config.name = name;
    config.world_size = world;
    config.rank = rank;
    config.urls = urls;
    config.urls_count = 1;
    config.listen_url = own;
    config.deadline_us = deadline_us;
    config.host = host;
    ep_group *group = NULL;
    ep_error error;
    if (ep_group_create(&config, &group, &error) != EP_OK) {
        fprintf(stderr, "rank %u: %s: %s\n", rank, ep_err_name(error.code), error.text);
        return NULL;
    }
    return group;
}

typedef struct thread_arg {
    const char *scheme;
    const char *host;
    const char *name;
    uint32_t world;
    uint32_t rank;
    uint64_t deadline_us;
    rank_play play;
    void *arg;
    bool good;
    pthread_t thread;
} thread_arg;

static void *run_rank(void *arg)
{
    thread_arg *a = arg;
    ep_group *group =
        rank_group_create_on(a->scheme, a->host, a->name, a->world, a->rank, a->deadline_us);
    if (group == NULL) {
        _exit(1);
    }
    a->good = a->play(a->arg, a->rank, group);
    ep_group_destroy(group);
    return NULL;
}

bool rank_threads_play(const char *scheme, const char *const *hosts, uint32_t world,
                       uint64_t deadline_us, rank_play play, void *arg)
{
    thread_arg args[RANK_THREADS_MAX];
    char name[64];
    bool good = true;
    rank_group_name(name, sizeof(name));
    for (uint32_t r = 0; r < world; r++) {
        args[r] = (thread_arg){.scheme = scheme,
                               .host = hosts == NULL ? NULL : hosts[r],
                               .name = name,
                               .world = world,
                               .rank = r,
                               .deadline_us = deadline_us,
                               .play = play,
                               .arg = arg};
        if (pthread_create(&args[r].thread, NULL, run_rank, &args[r]) != 0) {
            abort();
        }
    }
    for (uint32_t r = 0; r < world; r++) {
        pthread_join(args[r].thread, NULL);
        good = good && args[r].good;
    }
    return good;
}

typedef struct silent {
    rank_func func;
    void *arg;
} silent;

static bool play_silent(void *arg, uint32_t rank, ep_group *group)
{
    const silent *s = arg;
    s->func(s->arg, rank, group);
    return true;
}

void rank_threads_run_on(const char *scheme, const char *const *hosts, uint32_t world,
                         uint64_t deadline_us, rank_func func, void *arg)
{
    silent s = {func, arg};
    rank_threads_play(scheme, hosts, world, deadline_us, play_silent, &s);
}

void rank_threads_run(const char *scheme, uint32_t world, uint64_t deadline_us, rank_func func,
                      void *arg)
{
    rank_threads_run_on(scheme, NULL, world, deadline_us, func, arg);
}
