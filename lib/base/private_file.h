/* SPDX-License-Identifier: Apache-2.0 */
/* Which files may hold a token or a key. Daemons and command line share this rule. */
#ifndef EP_BASE_PRIVATE_FILE_H
#define EP_BASE_PRIVATE_FILE_H

#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

/* For messages: "... has mode 0644; allowed: " EP_PRIVATE_FILE_ALLOWED */
#define EP_PRIVATE_FILE_ALLOWED                                                                    \
    "0600 or 0400 (chmod 0600 makes it so); 0640 or 0440 where root owns the file"

/*
 * Others must have no access. The group may read the file when root owns it: Kubernetes (fsGroup),
 * systemd (credentials) and the package provide secrets in this way, and only root adds members to
 * that group. The rule applies to root as well, or its expertctl would refuse what the daemon
 * accepts. status: of the open file.
 */
static inline bool ep_file_is_private(const struct stat *status)
{
    mode_t shared = status->st_mode & 077;
    return shared == 0 || (shared == S_IRGRP && status->st_uid == 0);
}

#endif
