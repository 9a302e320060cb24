/* SPDX-License-Identifier: Apache-2.0 */
/* Which files may hold a token or a key. One rule for daemons and command line. */
#ifndef EP_BASE_PRIVATE_FILE_H
#define EP_BASE_PRIVATE_FILE_H

#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

/* For messages: "... has mode 0644; allowed: " EP_PRIVATE_FILE_ALLOWED */
#define EP_PRIVATE_FILE_ALLOWED "0600 or 0400; 0640 or 0440 where root owns the file and this process is not root"

/*
 * Others may do nothing with it. The group may read it when root owns it and the process is not root: so Kubernetes
 * (fsGroup) and systemd (credentials) hand secrets out, and only root put somebody into that group. status is of the open file.
 */
static inline bool ep_file_is_private(const struct stat *status, uid_t process)
{
    mode_t shared = status->st_mode & 077;
    return shared == 0 || (shared == S_IRGRP && status->st_uid == 0 && process != 0);
}

#endif
