/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/shaped_net.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BURST_BYTES 65536     /* at most; slow links let 2 ms of their rate through at once */
#define BURST_BYTES_MIN 24576 /* more than a packet of the loopback */
#define QUEUE_BYTES 1048576   /* what all ranks send to one at once */

static struct {
    uint32_t hosts;
    int owner;
    char names[SHAPED_NET_HOSTS_MAX + 1][32]; /* the last used one is the bridge's */
    char addresses[SHAPED_NET_HOSTS_MAX][16];
} net;

static bool run(bool quiet, const char *format, ...)
{
    char command[512];
    size_t used;
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof(command) - 16, format, args);
    va_end(args);
    used = strlen(command);
    snprintf(command + used, sizeof(command) - used, "%s", quiet ? " 2>/dev/null" : "");
    int status = system(command);
    if (status != 0 && !quiet) {
        fprintf(stderr, "shaped_net: `%s` failed\n", command);
    }
    return status == 0;
}

void shaped_net_destroy(void)
{
    if (net.owner != getpid()) {
        return;
    }
    for (uint32_t i = 0; i <= net.hosts; i++) {
        run(true, "ip netns del %s", net.names[i]);
    }
    net.owner = 0;
}

static bool add_host(uint32_t host)
{
    const char *name = net.names[host];
    const char *hub = net.names[net.hosts];
    return run(false, "ip netns add %s", name) &&
           run(false, "ip link add eth0 netns %s type veth peer name h%u netns %s", name, host,
               hub) &&
           run(false, "ip -n %s addr add %s/24 dev eth0", name, net.addresses[host]) &&
           run(false, "ip -n %s link set lo up", name) &&
           run(false, "ip -n %s link set eth0 up", name) &&
           run(false, "ip -n %s link set h%u master br0", hub, host) &&
           run(false, "ip -n %s link set h%u up", hub, host);
}

bool shaped_net_create(uint32_t hosts)
{
    net.hosts = hosts;
    net.owner = getpid();
    for (uint32_t i = 0; i <= hosts; i++) {
        snprintf(net.names[i], sizeof(net.names[i]), "epb%dn%u", getpid(), i);
        if (i < hosts) {
            snprintf(net.addresses[i], sizeof(net.addresses[i]), "10.77.0.%u", (i + 1) % 255);
        }
    }
    atexit(shaped_net_destroy);
    const char *hub = net.names[hosts];
    if (!run(false, "ip netns add %s", hub) ||
        !run(false, "ip -n %s link add br0 type bridge", hub) ||
        !run(false, "ip -n %s link set br0 up", hub)) {
        return false;
    }
    for (uint32_t i = 0; i < hosts; i++) {
        if (!add_host(i)) {
            return false;
        }
    }
    return true;
}

static bool shape(const char *name, const char *device, double bytes_per_s)
{
    if (bytes_per_s <= 0) {
        run(true, "tc -n %s qdisc del dev %s root", name, device);
        return true;
    }
    const double burst = fmin(fmax(bytes_per_s * 2e-3, BURST_BYTES_MIN), BURST_BYTES);
    return run(false, "tc -n %s qdisc replace dev %s root tbf rate %.0fbit burst %.0f limit %d",
               name, device, bytes_per_s * 8, burst, QUEUE_BYTES);
}

bool shaped_net_set_rate(double bytes_per_s)
{
    bool ok = true;
    for (uint32_t i = 0; i < net.hosts; i++) {
        char device[16];
        snprintf(device, sizeof(device), "h%u", i % SHAPED_NET_HOSTS_MAX);
        ok = shape(net.names[i], "eth0", bytes_per_s) &&
             shape(net.names[net.hosts], device, bytes_per_s) && ok;
    }
    return ok;
}

bool shaped_net_set_loopback(double bytes_per_s)
{
    bool ok = true;
    for (uint32_t i = 0; i < net.hosts; i++) { /* a packet must fit into the burst */
        ok = run(false, "ip -n %s link set lo mtu %d", net.names[i], BURST_BYTES / 4) &&
             shape(net.names[i], "lo", bytes_per_s) && ok;
    }
    return ok;
}

const char *shaped_net_name(uint32_t host)
{
    return net.names[host];
}

const char *shaped_net_address(uint32_t host)
{
    return net.addresses[host];
}

bool shaped_net_enter(uint32_t host)
{
    char path[64];
    snprintf(path, sizeof(path), "/run/netns/%s", net.names[host]);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool ok = fd >= 0 && setns(fd, CLONE_NEWNET) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return ok;
}

static bool is_compute(const char *task_path)
{
    char path[400], name[32] = "";
    snprintf(path, sizeof(path), "%s/comm", task_path);
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        if (fgets(name, sizeof(name), file) == NULL) {
            name[0] = 0;
        }
        fclose(file);
    }
    return strncmp(name, "ep-cpu-", 7) == 0;
}

bool shaped_net_pin(int pid)
{
    char dir_path[64];
    bool ok = true;
    snprintf(dir_path, sizeof(dir_path), "/proc/%d/task", pid);
    DIR *dir = opendir(dir_path);
    if (dir == NULL) {
        return false;
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        char path[320];
        cpu_set_t cpus;
        if (entry->d_name[0] == '.') {
            continue;
        }
        snprintf(path, sizeof(path), "%s/%s", dir_path, entry->d_name);
        CPU_ZERO(&cpus);
        CPU_SET(is_compute(path) ? 1 : 0, &cpus);
        ok = sched_setaffinity(atoi(entry->d_name), sizeof(cpus), &cpus) == 0 && ok;
    }
    closedir(dir);
    return ok;
}
