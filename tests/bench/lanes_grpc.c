/* SPDX-License-Identifier: Apache-2.0 */
/* gRPC C++ runs in two processes of its own program, since it and our libraries want different
 * worlds; we tell it what to do. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/lanes_form.h"

#ifdef EP_GRPC_ECHO_PROGRAM

typedef struct grpc_state {
    FILE *commands; /* "bytes count depth" */
    FILE *answers;  /* "seconds", then count lines of microseconds; first of all the server's pid */
} grpc_state;

static double grpc_run(lanes_form *form, size_t bytes, int count, int depth, double *out_us)
{
    grpc_state *s = form->state;
    double seconds;
    fprintf(s->commands, "%zu %d %d\n", bytes, count, depth);
    fflush(s->commands);
    if (fscanf(s->answers, "%lf", &seconds) != 1) {
        lanes_fail("gRPC echo", "its program ended");
    }
    for (int i = 0; i < count; i++) {
        if (fscanf(s->answers, "%lf", &out_us[i]) != 1) {
            lanes_fail("gRPC echo", "its program ended");
        }
    }
    return seconds;
}

static void grpc_close(lanes_form *form)
{
    grpc_state *s = form->state;
    fclose(s->commands); /* its end */
    fclose(s->answers);
    waitpid(form->client, NULL, 0);
    free(s);
}

bool lanes_grpc_open(lanes_form *form)
{
    grpc_state *s = calloc(1, sizeof(*s));
    int commands[2], answers[2], server;
    if (s == NULL || pipe(commands) != 0 || pipe(answers) != 0) {
        lanes_fail("gRPC echo", "no memory");
    }
    form->client = fork();
    if (form->client == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(commands[0], 0);
        dup2(answers[1], 1);
        close(commands[1]);
        close(answers[0]);
        execl(EP_GRPC_ECHO_PROGRAM, EP_GRPC_ECHO_PROGRAM, (char *)NULL);
        _exit(127);
    }
    close(commands[0]);
    close(answers[1]);
    s->commands = fdopen(commands[1], "w");
    s->answers = fdopen(answers[0], "r");
    if (s->commands == NULL || s->answers == NULL || fscanf(s->answers, "%d", &server) != 1) {
        lanes_fail("gRPC echo", "its program does not start");
    }
    form->server = server;
    form->state = s;
    form->run = grpc_run;
    form->close = grpc_close;
    return true;
}

#else

bool lanes_grpc_open(lanes_form *form)
{
    (void)form;
    return false;
}

#endif
