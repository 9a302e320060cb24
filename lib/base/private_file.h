/* SPDX-License-Identifier: Apache-2.0 */
/* Which files may hold a token or a key. One rule for daemons and command line. */
#ifndef EP_BASE_PRIVATE_FILE_H
#define EP_BASE_PRIVATE_FILE_H

#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

/* For messages: "... has mode 0644; allowed: " EP_PRIVATE_FILE_ALLOWED */
#define EP_PRIVATE_FILE_ALLOWED                                                                    \
    "0600 or 0400 (chmod 0600 makes it so); 0640 or 0440 where root owns the file"

/*
 * Others may do nothing with it. The group may read it when root owns it: so Kubernetes (fsGroup),
 * systemd (credentials) and the package hand secrets out, and only root put somebody into that
 * group. Root reads by the same rule, or its expertctl would refuse what the daemon takes. status
 * is of the open file.
 */
static inline bool ep_file_is_private(const struct stat *status)
{
    mode_t shared = status->st_mode & 077;
    return shared == 0 || (shared == S_IRGRP && status->st_uid == 0);
}

#endif
