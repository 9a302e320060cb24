/* SPDX-License-Identifier: Apache-2.0 */
/* Reads token files. */
#include "common/service_tokens.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/private_file.h"

#define FILE_BYTES_MAX (EP_TOKENS_PER_ROLE * (EP_TOKEN_BYTES_MAX + 1 + EP_TOKEN_LABEL_BYTES + 1))

/* A file's text, split into lines in place. */
typedef struct token_file {
    char text[FILE_BYTES_MAX + 2];
    const char *lines[EP_TOKENS_PER_ROLE];
    const char *labels[EP_TOKENS_PER_ROLE];
} token_file;

/* Reads a file, which must be regular and readable by this user alone. */
static ep_err read_text(const ep_options *options, const char *key, const char *path,
                        token_file *file, ep_error *out_error)
{
    struct stat st;
    char why[EP_ERRNO_TEXT_BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0) {
        return ep_options_fail(options, key, out_error, "cannot open %.200s: %s", path,
                               ep_errno_text(errno, why));
    }
    bool ok_file = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    ssize_t n = ok_file ? read(fd, file->text, FILE_BYTES_MAX + 1) : -1;
    close(fd);
    if (!ok_file) {
        return ep_options_fail(options, key, out_error, "%.200s is not a regular file", path);
    }
    if (!ep_file_is_private(&st)) {
        return ep_options_fail(options, key, out_error, "%.200s has mode %04o; allowed: %s", path,
                               (unsigned)(st.st_mode & 07777), EP_PRIVATE_FILE_ALLOWED);
    }
    if (n < 0 || n > FILE_BYTES_MAX || memchr(file->text, 0, (size_t)n) != NULL) {
        return ep_options_fail(options, key, out_error, "%.200s is no text of up to %d bytes", path,
                               FILE_BYTES_MAX);
    }
    return EP_OK;
}

static ep_err split_lines(const ep_options *options, const char *key, const char *path,
                          token_file *file, ep_error *out_error)
{
    char *rest = file->text;
    for (size_t i = 0; *rest != 0; i++) {
        char *line = rest;
        size_t bytes = strcspn(line, "\n");
        rest += bytes + (line[bytes] == '\n' ? 1 : 0);
        bytes -= bytes > 0 && line[bytes - 1] == '\r' ? 1 : 0;
        line[bytes] = 0;
        char *label = memchr(line, ' ', bytes);
        if (label != NULL) {
            *label++ = 0;
            bytes = strlen(line);
        }
        if (i >= EP_TOKENS_PER_ROLE) {
            return ep_options_fail(options, key, out_error,
                                   "%.200s has more than %d lines; allowed on each: a token, "
                                   "or a token, a space and a label",
                                   path, EP_TOKENS_PER_ROLE);
        }
        if (bytes < EP_TOKEN_BYTES_MIN || bytes > EP_TOKEN_BYTES_MAX) {
            return ep_options_fail(options, key, out_error,
                                   "line %zu of %.200s has %zu characters; allowed: %d..%d", i + 1,
                                   path, bytes, EP_TOKEN_BYTES_MIN, EP_TOKEN_BYTES_MAX);
        }
        if (strspn(line, "!\"#$%&'()*+,-./"
                         "0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`"
                         "abcdefghijklmnopqrstuvwxyz{|}~") != bytes) {
            return ep_options_fail(options, key, out_error,
                                   "line %zu of %.200s has a character that is no printable ASCII",
                                   i + 1, path);
        }
        size_t label_bytes = label != NULL ? strlen(label) : 1;
        if (label_bytes < 1 || label_bytes >= EP_TOKEN_LABEL_BYTES ||
            (label != NULL &&
             strspn(label, "-+.@_0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") !=
                 label_bytes)) {
            return ep_options_fail(
                options, key, out_error,
                "the label in line %zu of %.200s is not 1..%d letters, digits or -+.@_", i + 1,
                path, EP_TOKEN_LABEL_BYTES - 1);
        }
        file->lines[i] = line;
        file->labels[i] = label;
    }
    if (file->lines[0] == NULL) {
        return ep_options_fail(options, key, out_error,
                               "%.200s is empty; allowed: a token of %d..%d characters", path,
                               EP_TOKEN_BYTES_MIN, EP_TOKEN_BYTES_MAX);
    }
    return EP_OK;
}

static ep_err read_files(const ep_options *options, token_file files[EP_ROLES_COUNT],
                         ep_error *out_error)
{
    static const char *const keys[EP_ROLES_COUNT] = {"token_file", "node_token_file",
                                                     "admin_token_file"};
    for (size_t role = 0; role < EP_ROLES_COUNT; role++) {
        const char *path = ep_options_text(options, keys[role]);
        if (path[0] == 0) {
            continue;
        }
        ep_err err = read_text(options, keys[role], path, &files[role], out_error);
        err = err == EP_OK ? split_lines(options, keys[role], path, &files[role], out_error) : err;
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

ep_err ep_service_tokens_load(const ep_options *options, ep_rpc_credentials **credentials,
                              ep_error *out_error)
{
    token_file files[EP_ROLES_COUNT];
    ep_rpc_tokens tokens = {0};
    memset(files, 0, sizeof(files));
    ep_err err = read_files(options, files, out_error);
    if (err == EP_OK) {
        for (size_t role = 0; role < EP_ROLES_COUNT; role++) {
            const token_file *from = &files[role];
            if (role == EP_ROLE_NODE && from->lines[0] == NULL) {
                from = &files[EP_ROLE_CLIENT];
            }
            memcpy(tokens.of[role], from->lines, sizeof(tokens.of[role]));
            memcpy(tokens.labels[role], from->labels, sizeof(tokens.labels[role]));
        }
        err = *credentials == NULL ? ep_rpc_credentials_create(&tokens, credentials, out_error)
                                   : ep_rpc_credentials_replace(*credentials, &tokens, out_error);
    }
    if (err == EP_OK && files[EP_ROLE_CLIENT].lines[0] != NULL &&
        files[EP_ROLE_NODE].lines[0] == NULL) {
        ep_log(EP_LOG_WARN, "node-token-missing", EP_KV(reason, "node_token_file is not set"),
               EP_KV(effect, "whoever has the token of token_file may register as a node"),
               EP_KV(hint, "give nodes a token of their own"));
    }
    explicit_bzero(files, sizeof(files));
    return err;
}

void ep_service_tokens_reload(const ep_options *options, ep_rpc_credentials *credentials)
{
    ep_error error;
    if (ep_service_tokens_load(options, &credentials, &error) == EP_OK) {
        ep_log(EP_LOG_INFO, "tokens-reload", EP_KV(outcome, "done"));
    } else {
        ep_log(EP_LOG_ERROR, "tokens-reload", EP_KV(outcome, "refused"), EP_KV(reason, error.text),
               EP_KV(effect, "the tokens stay as they are"));
    }
}
