/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the ports file under a temporary name and renames it. */
#include "common/ports_file.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *make_text(const char *program, const ep_ports_entry *entries, size_t count)
{
    json_t *object = json_pack("{s:s, s:i}", "program", program, "pid", (int)getpid());
    bool ok = object != NULL;
    for (size_t i = 0; ok && i < count; i++) {
        ok = entries[i].value[0] == 0 ||
             json_object_set_new(object, entries[i].key, json_string(entries[i].value)) == 0;
    }
    char *text = ok ? json_dumps(object, JSON_COMPACT) : NULL;
    json_decref(object);
    return text;
}

static bool write_text(int fd, const char *text)
{
    size_t bytes = strlen(text);
    while (bytes > 0) {
        ssize_t n = write(fd, text, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        text += n;
        bytes -= (size_t)n;
    }
    return true;
}

ep_err ep_ports_file_write(const char *path, const char *program, const ep_ports_entry *entries,
                           size_t count, ep_error *out_error)
{
    char *temporary = NULL;
    char *text = make_text(program, entries, count);
    if (text == NULL || asprintf(&temporary, "%s.%d", path, (int)getpid()) < 0) {
        free(text);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the ports file");
    }
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    bool ok = fd >= 0 && write_text(fd, text) && write_text(fd, "\n");
    int saved = errno;
    if (fd >= 0 && close(fd) != 0 && ok) {
        ok = false;
        saved = errno;
    }
    if (ok && rename(temporary, path) != 0) {
        ok = false;
        saved = errno;
    }
    if (!ok) {
        char why[EP_ERRNO_TEXT_BYTES];
        unlink(temporary);
        ep_error_set(out_error, EP_ERR_IO, "cannot write ports_file %.300s: %s", path,
                     ep_errno_text(saved, why));
    }
    free(temporary);
    free(text);
    return ok ? EP_OK : EP_ERR_IO;
}

void ep_ports_file_remove(const char *path)
{
    unlink(path);
}
