/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes in processes of their own that are stopped or killed. What is asserted: who is named, with
 * which code, and that no call fails while another copy lives. How long it took is printed.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "base/check.h"
#include "base/clock.h"
#include "remote_nodes.h"

static ep_moe_result result;

static double ms_since(uint64_t begin_ns)
{
    return (double)(ep_clock_now_ns() - begin_ns) / 1e6;
}

static ep_err run(ep_client *client, batch *b, const char *what)
{
    uint64_t begin_ns = ep_clock_now_ns();
    ep_err err = ep_moe_forward(client, &b->args, &b->out_tensor, &result);
    printf("%-44s %-18s %9.2f ms  %s\n", what, ep_err_name(err), ms_since(begin_ns),
           result.error.text);
    fflush(stdout);
    if (err == EP_OK) {
        EP_ASSERT(batch_equal(b));
    } else {
        EP_ASSERT(ms_since(begin_ns) * 1000.0 >= (double)b->args.deadline_us);
        EP_ASSERT(result.error.layer == FAKE_LAYER && result.error.expert >= 0 &&
                  result.error.waited_us > 0);
        EP_ASSERT(result.error.node[0] == 'a');
    }
    return err;
}

/* Until it has stopped: its other threads run on for a moment after the signal is sent. */
static void stop_child(pid_t child)
{
    siginfo_t info;
    kill(child, SIGSTOP);
    while (waitid(P_PID, (id_t)child, &info, WSTOPPED) != 0 && errno == EINTR) {
    }
}

/* A stopped node is a live one until the pings have failed; a slow machine decides which comes
 * first. */
static bool is_away(ep_err err)
{
    return err == EP_ERR_DEADLINE_EXCEEDED || err == EP_ERR_UNAVAILABLE;
}

static void sole_owner(remote_nodes *a)
{
    batch b;
    ep_client *client = remote_nodes_client(a, NULL);
    batch_make(&b, &a->h, 4, 2, 1);
    EP_ASSERT(run(client, &b, "sole owner, alive") == EP_OK);
    stop_child(a->child);
    b.args.deadline_us = 300000;
    ep_err err = run(client, &b, "sole owner, stopped, 300 ms");
    EP_ASSERT(is_away(err));
    EP_ASSERT(err != EP_ERR_DEADLINE_EXCEEDED ||
              strstr(result.error.text, "no reply from node a") != NULL);
    b.args.deadline_us = 3000000;
    EP_ASSERT(is_away(run(client, &b, "sole owner, stopped, 3 s")));
    kill(a->child, SIGCONT);
    b.args.deadline_us = 20000000;
    EP_ASSERT(run(client, &b, "sole owner, continued") == EP_OK);
    kill(a->child, SIGKILL);
    b.args.deadline_us = 500000;
    EP_ASSERT(run(client, &b, "sole owner, killed, 500 ms") == EP_ERR_UNAVAILABLE);
    EP_ASSERT(strstr(result.error.text, "no live copy within ") != NULL);
    ep_client_destroy(client);
    batch_free(&b);
}

static void two_owners(remote_nodes *a, remote_nodes *b_nodes, int signal_number, const char *what)
{
    batch b;
    ep_client *client = remote_nodes_client(a, b_nodes);
    batch_make(&b, &a->h, 4, 2, 1);
    double slowest = 0;
    double usual = 0;
    for (int i = 0; i < 300; i++) {
        uint64_t begin_ns = ep_clock_now_ns();
        if (i == 100) {
            kill(a->child, signal_number);
        }
        EP_ASSERT(ep_moe_forward(client, &b.args, &b.out_tensor, &result) == EP_OK);
        EP_ASSERT(batch_equal(&b));
        double ms = ms_since(begin_ns);
        usual = i < 100 && ms > usual ? ms : usual;
        slowest = i >= 100 && ms > slowest ? ms : slowest;
    }
    printf("%s: 0 of 200 calls failed, slowest %.2f ms, before it %.2f ms\n", what, slowest, usual);
    ep_client_destroy(client);
    batch_free(&b);
}

int main(void)
{
    static remote_nodes a1, a2, a3, b2, b3;
    remote_nodes_start(&a1, "a", 2, 1, 64);
    remote_nodes_start(&a2, "a", 1, 1, 64);
    remote_nodes_start(&b2, "b", 1, 1, 64);
    remote_nodes_start(&a3, "a", 1, 1, 64);
    remote_nodes_start(&b3, "b", 1, 1, 64);
    sole_owner(&a1);
    two_owners(&a2, &b2, SIGKILL, "one of two copies killed");
    two_owners(&a3, &b3, SIGSTOP, "one of two copies stopped");
    kill(a3.child, SIGKILL);
    ep_transport_fini();
    EP_ASSERT(remote_nodes_stop(&b2) == 0 && remote_nodes_stop(&b3) == 0);
    EP_ASSERT(WIFSIGNALED(remote_nodes_stop(&a1)) && WIFSIGNALED(remote_nodes_stop(&a2)) &&
              WIFSIGNALED(remote_nodes_stop(&a3)));
    return 0;
}
