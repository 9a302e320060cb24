/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/rank_board.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/bench_report.h"

#define WATCH_US 200000

/* Shared, but for what the parent alone uses. */
struct rank_board {
    pthread_barrier_t begin;
    pthread_barrier_t end;
    pthread_barrier_t among; /* the ranks alone */
    int step;
    uint32_t ranks;
    pid_t pids[RANK_BOARD_RANKS_MAX];
    int ending; /* atomic */
    pthread_t watcher;
};

void *rank_board_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        fprintf(stderr, "rank_board: no memory\n");
        exit(1);
    }
    return memory;
}

rank_board *rank_board_create(uint32_t ranks)
{
    pthread_barrierattr_t shared;
    rank_board *board = rank_board_memory(sizeof(*board));
    board->ranks = ranks;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&board->begin, &shared, ranks + 1);
    pthread_barrier_init(&board->end, &shared, ranks + 1);
    pthread_barrier_init(&board->among, &shared, ranks);
    pthread_barrierattr_destroy(&shared);
    return board;
}

static void *watch(void *arg)
{
    rank_board *board = arg;
    while (!__atomic_load_n(&board->ending, __ATOMIC_ACQUIRE)) {
        for (uint32_t i = 0; i < board->ranks; i++) {
            siginfo_t ended = {0};
            if (waitid(P_PID, (id_t)board->pids[i], &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
                ended.si_pid != 0 && !__atomic_load_n(&board->ending, __ATOMIC_ACQUIRE)) {
                fprintf(stderr, "rank_board: rank %u has ended, status %d\n", i, ended.si_status);
                exit(1);
            }
        }
        usleep(WATCH_US);
    }
    return NULL;
}

void rank_board_fork(rank_board *board, void (*rank_main)(uint32_t rank, void *arg), void *arg)
{
    for (uint32_t i = 0; i < board->ranks; i++) {
        pid_t pid = fork();
        if (pid < 0) {
            fprintf(stderr, "rank_board: cannot fork\n");
            exit(1);
        }
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            rank_main(i, arg);
            _exit(0);
        }
        board->pids[i] = pid;
    }
    if (pthread_create(&board->watcher, NULL, watch, board) != 0) {
        fprintf(stderr, "rank_board: no thread\n");
        exit(1);
    }
}

double rank_board_time(rank_board *board, int step)
{
    board->step = step;
    pthread_barrier_wait(&board->begin);
    double begin = bench_now_us();
    pthread_barrier_wait(&board->end);
    return bench_now_us() - begin;
}

void rank_board_end(rank_board *board)
{
    __atomic_store_n(&board->ending, 1, __ATOMIC_RELEASE);
    rank_board_time(board, RANK_BOARD_END);
    pthread_join(board->watcher, NULL);
    for (uint32_t i = 0; i < board->ranks; i++) {
        waitpid(board->pids[i], NULL, 0);
    }
    munmap(board, sizeof(*board));
}

int rank_board_next(rank_board *board)
{
    pthread_barrier_wait(&board->begin);
    return board->step;
}

void rank_board_done(rank_board *board)
{
    pthread_barrier_wait(&board->end);
}

void rank_board_meet(rank_board *board)
{
    pthread_barrier_wait(&board->among);
}
