/* SPDX-License-Identifier: Apache-2.0 */
/* Process-wide settings of our programs. */
#include "common/process_setup.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define MMAP_THRESHOLD_BYTES (1 << 30)
#define TOP_PAD_BYTES (64 << 20)

/* Opens descriptors 0 to 2 if they are closed, or a socket would get the number and stray
 * prints. */
static void hold_standard_descriptors(void)
{
    int fd;
    do {
        fd = open("/dev/null", O_RDWR);
    } while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd > STDERR_FILENO) {
        close(fd);
    }
}

void ep_process_setup(void)
{
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    mallopt(M_TOP_PAD, TOP_PAD_BYTES);
    hold_standard_descriptors();
    signal(SIGPIPE, SIG_IGN);
    /* exceeding a file size limit fails the write instead of ending the process */
    signal(SIGXFSZ, SIG_IGN);
    umask(027);
}

void ep_process_trim(void)
{
    malloc_trim(0);
}

uint64_t ep_process_raise_fd_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return 0;
    }
    rlim_t before = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max;
    if (before != limit.rlim_max && setrlimit(RLIMIT_NOFILE, &limit) != 0) {
        limit.rlim_cur = before;
    }
    return limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : (uint64_t)limit.rlim_cur;
}

static uint64_t lesser(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* The least limit of a group and its parents. A group that is not visible has none. */
static uint64_t read_group_limits(const char *root, const char *controller, char *group,
                                  const char *file)
{
    uint64_t least = UINT64_MAX;
    for (;;) {
        char path[PATH_MAX];
        uint64_t limit;
        const int n =
            snprintf(path, sizeof(path), "%s/sys/fs/cgroup%s%s/%s", root, controller, group, file);
        FILE *f = n < (int)sizeof(path) ? fopen(path, "re") : NULL;
        if (f != NULL) {
            /* otherwise it is "max" */
            least = fscanf(f, "%" SCNu64, &limit) == 1 ? lesser(least, limit) : least;
            fclose(f);
        }
        char *last = strrchr(group, '/');
        if (last == NULL) {
            return least;
        }
        *last = 0;
    }
}

/* Reads lines of /proc/self/cgroup, number:controllers:group. */
static uint64_t read_cgroup_limit(const char *root)
{
    char path[PATH_MAX], line[PATH_MAX];
    uint64_t least = UINT64_MAX;
    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        if (controllers[1] == 0) {
            least = lesser(least, read_group_limits(root, "", group, "memory.max"));
        } else if (strcmp(controllers + 1, "memory") == 0) {
            least =
                lesser(least, read_group_limits(root, "/memory", group, "memory.limit_in_bytes"));
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return least;
}

uint64_t ep_process_memory_limit(const char *root)
{
    struct rlimit limit;
    uint64_t least = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        least = lesser(least, limit.rlim_cur);
    }
    return lesser(least, read_cgroup_limit(root));
}
