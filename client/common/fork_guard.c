/* SPDX-License-Identifier: Apache-2.0 */
/* Fork detection by MADV_WIPEONFORK (Linux 4.14), else by pid. */
#include "common/fork_guard.h"

#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

void ep_fork_guard_init(ep_fork_guard *out_guard)
{
    out_guard->pid = getpid();
    out_guard->page = NULL;
    void *page =
        mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return;
    }
    if (madvise(page, page_bytes(), MADV_WIPEONFORK) != 0) {
        munmap(page, page_bytes());
        return;
    }
    out_guard->page = page;
    *out_guard->page = 1;
}

void ep_fork_guard_fini(ep_fork_guard *guard)
{
    if (guard->page != NULL) {
        munmap((void *)(uintptr_t)guard->page, page_bytes());
        guard->page = NULL;
    }
}

bool ep_fork_guard_in_child(const ep_fork_guard *guard)
{
    return guard->page != NULL ? *guard->page == 0 : guard->pid != getpid();
}
