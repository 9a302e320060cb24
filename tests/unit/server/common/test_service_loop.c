/* SPDX-License-Identifier: Apache-2.0 */
/* The event loop: tasks from other threads, timers, signals, and its end. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/service_loop.h"
#include "support/expect.h"

typedef struct probe {
    ep_service_loop *loop;
    ep_loop_task task;
    pthread_t loop_thread;
    char seen[64];
    int runs;
} probe;

static void on_stop(void *arg, const char *name)
{
    probe *p = arg;
    strcat(p->seen, name);
    ep_service_loop_quit(p->loop);
}

static void on_reload(void *arg)
{
    probe *p = arg;
    strcat(p->seen, "HUP ");
    kill(getpid(), SIGTERM);
}

static void on_task(void *arg)
{
    probe *p = arg;
    p->runs++;
    cr_expect(pthread_equal(pthread_self(), p->loop_thread));
    ep_service_loop_quit(p->loop);
}

static void *post_from_thread(void *arg)
{
    probe *p = arg;
    ep_service_loop_post(p->loop, &p->task);
    ep_service_loop_post(p->loop, &p->task);
    return NULL;
}

static void create(probe *p)
{
    ep_error e;
    ep_service_loop_handler handler = {.on_stop = on_stop, .on_reload = on_reload, .arg = p};
    *p = (probe){.loop_thread = pthread_self()};
    p->task = (ep_loop_task){.func = on_task, .arg = p};
    ASSERT_OK(ep_service_loop_create(&handler, &p->loop, &e), e);
}

Test(service_loop, tasks_run_on_the_loops_thread)
{
    probe p;
    pthread_t thread;
    create(&p);
    cr_assert_eq(pthread_create(&thread, NULL, post_from_thread, &p), 0);
    ep_service_loop_run(p.loop);
    pthread_join(thread, NULL);
    cr_expect_geq(p.runs, 1);
    ep_service_loop_destroy(p.loop);
}

static void on_other_task(void *arg)
{
    probe *p = arg;
    strcat(p->seen, "other ");
}

/* Whatever its place in the queue, and posted again afterwards. */
Test(service_loop, a_task_taken_back_does_not_run)
{
    for (int place = 0; place < 3; place++) {
        probe p;
        ep_loop_task tasks[3];
        ep_loop_task late;
        create(&p);
        for (int i = 0; i < 3; i++) {
            tasks[i] = (ep_loop_task){.func = on_other_task, .arg = &p};
            ep_service_loop_post(p.loop, &tasks[i]);
        }
        ep_service_loop_cancel(p.loop, &tasks[place]);
        ep_service_loop_cancel(p.loop, &tasks[place]);
        memset(&tasks[place], 0xee, sizeof(tasks[place])); /* freed: nothing may look at it */
        late = (ep_loop_task){.func = on_other_task, .arg = &p};
        ep_service_loop_post(p.loop, &late);
        ep_service_loop_post(p.loop, &p.task);
        ep_service_loop_run(p.loop);
        cr_expect_str_eq(p.seen, "other other other ", "place %d: %s", place, p.seen);
        cr_expect_eq(p.runs, 1);
        ep_service_loop_destroy(p.loop);
    }
}

static void on_timer(void *arg)
{
    probe *p = arg;
    if (++p->runs == 3) {
        ep_service_loop_quit(p->loop);
    }
}

Test(service_loop, timers_repeat)
{
    probe p;
    ep_loop_timer *timer;
    create(&p);
    cr_assert_eq(ep_service_loop_timer_create(p.loop, on_timer, &p, &timer), EP_OK);
    ep_loop_timer_start(timer, 1, 1);
    ep_service_loop_run(p.loop);
    cr_expect_eq(p.runs, 3);
    cr_expect_lt(ep_service_loop_idle_ms(p.loop), 60000);
    ep_service_loop_destroy(p.loop);
}

Test(service_loop, hangup_reloads_and_term_stops)
{
    probe p;
    create(&p);
    kill(getpid(), SIGHUP);
    ep_service_loop_run(p.loop);
    cr_expect_str_eq(p.seen, "HUP SIGTERM");
    ep_service_loop_destroy(p.loop);
}

static void on_stop_again(void *arg, const char *name)
{
    (void)arg;
    (void)name;
    kill(getpid(), SIGINT);
}

Test(service_loop, a_second_signal_ends_the_process_at_once, .exit_code = 128 + SIGINT)
{
    ep_service_loop *loop;
    ep_service_loop_handler handler = {.on_stop = on_stop_again};
    cr_assert_eq(ep_service_loop_create(&handler, &loop, NULL), EP_OK);
    kill(getpid(), SIGTERM);
    ep_service_loop_run(loop);
    cr_assert(false, "the loop went on");
}

/* Alive at the first look, not at the second and third, alive again at the fourth. */
static bool is_sometimes_alive(void *arg)
{
    probe *p = arg;
    p->runs++;
    if (p->runs == 4) {
        ep_service_loop_quit(p->loop);
    }
    return p->runs == 1 || p->runs >= 4;
}

Test(service_loop, the_watchdog_hears_only_of_a_live_program)
{
    probe p = {0};
    ep_error e;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char message[64];
    int told = 0;
    ep_service_loop_handler handler = {
        .on_stop = on_stop, .is_alive = is_sometimes_alive, .arg = &p};
    int manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "ep-test-loop-%d", (int)getpid());
    socklen_t bytes =
        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(address.sun_path + 1));
    cr_assert_eq(bind(manager, (struct sockaddr *)&address, bytes), 0);
    address.sun_path[0] = '@';
    setenv("NOTIFY_SOCKET", address.sun_path, 1);
    setenv("WATCHDOG_USEC", "4000", 1);
    ASSERT_OK(ep_service_loop_create(&handler, &p.loop, &e), e);
    ep_service_loop_run(p.loop);
    int looks = p.runs;
    for (ssize_t n; (n = recv(manager, message, sizeof(message) - 1, 0)) > 0; told++) {
        message[n] = 0;
        cr_expect_str_eq(message, "WATCHDOG=1");
    }
    cr_expect_eq(told, looks - 2);
    ep_service_loop_destroy(p.loop);
    close(manager);
}
