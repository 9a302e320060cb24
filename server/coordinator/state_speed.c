/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Speeds of nodes, from the busy time and work that they report, relative to the median node. See
 * lib/placement/README.md for the rules.
 */
#include <stdlib.h>

#include "base/clock.h"
#include "coordinator/state_private.h"

/* less says little, as a busy host may take a thread off its core for tens of milliseconds */
#define BUSY_US_MIN 100000
#define SLOW_BELOW (1.0 / 3)
#define SLOW_UNTIL 0.5
/* placement takes nodes for equal up to this factor */
#define EVEN_MAX 1.5
#define NEWS_FACTOR 1.25 /* placement takes a new speed once it differs by this factor */
#define PLACED_MAX 8.0

void ep_state_take_speed(cluster_node *node, const Expertd__V1__HeartbeatRequest *request)
{
    node_speed *speed = &node->speed;
    if (request->busy_us < speed->busy_us || request->busy_work < speed->busy_work) {
        return; /* an old or impossible report */
    }
    const uint64_t busy_us = request->busy_us - speed->busy_us;
    const uint64_t work = request->busy_work - speed->busy_work;
    if (busy_us < BUSY_US_MIN || work == 0) {
        return; /* counted with the next report */
    }
    const double rate = (double)work / (double)busy_us;
    speed->rate = speed->rate == 0 ? rate : speed->rate + (rate - speed->rate) / 4;
    speed->busy_us = request->busy_us;
    speed->busy_work = request->busy_work;
}

static int compare_rates(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Median rate of serving nodes, the upper of two, so at most half of the nodes are slow. 0: fewer
 * than two rates are known. */
static double median_rate(const ep_coordinator_state *cluster)
{
    size_t count = 0;
    double *rates = calloc(cluster->nodes_count + 1, sizeof(*rates));
    for (size_t n = 0; rates != NULL && n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        if (node_is_listed(node) && node->speed.rate > 0) {
            rates[count++] = node->speed.rate;
        }
    }
    if (count > 1) {
        qsort(rates, count, sizeof(*rates), compare_rates);
    }
    double median = count > 1 ? rates[count / 2] : 0;
    free(rates);
    return median;
}

/* The speed that placement uses: 1 (as 0) for nearly equal nodes, and bounded by PLACED_MAX. */
static double placed_of(double speed)
{
    if (speed == 0 || (speed <= EVEN_MAX && speed >= 1 / EVEN_MAX)) {
        return 0;
    }
    return speed > PLACED_MAX ? PLACED_MAX : speed < 1 / PLACED_MAX ? 1 / PLACED_MAX : speed;
}

static bool is_news(double before, double placed)
{
    double a = before == 0 ? 1 : before;
    double b = placed == 0 ? 1 : placed;
    return a > b * NEWS_FACTOR || b > a * NEWS_FACTOR;
}

void ep_state_compare_speeds(ep_coordinator_state *cluster, uint64_t now_ns)
{
    const double median = median_rate(cluster);
    cluster->compared_ns = now_ns;
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        node_speed *speed = &cluster->nodes[n]->speed;
        speed->against_median = median > 0 ? speed->rate / median : 0;
        const double bound = speed->slow_since_ns != 0 ? SLOW_UNTIL : SLOW_BELOW;
        if (speed->against_median == 0 || speed->against_median >= bound ||
            !node_is_listed(cluster->nodes[n])) {
            speed->slow_since_ns = 0;
        } else if (speed->slow_since_ns == 0) {
            speed->slow_since_ns = now_ns;
        }
        const double placed = placed_of(speed->against_median);
        if (is_news(speed->placed, placed)) {
            speed->placed = placed;
            cluster->has_news = true;
            ep_state_forget_balance(cluster);
        }
    }
}
