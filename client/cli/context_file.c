/* SPDX-License-Identifier: Apache-2.0 */
/* The file of contexts, read as a table of options with one list. */
#include "context_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "connect.h"
#include "options/options.h"
#include "output.h"
#include "usage/usage.h"

#define KEY_BYTES 64

struct ep_cli_contexts {
    char *path; /* NULL: no folder is known */
    ep_options *options;
    int lock; /* of the folder; -1 none */
};

const ep_cli_given *ep_cli_context_rows(void)
{
    static ep_cli_given rows;
    if (rows.count == 0) {
        static const ep_cli_options own = {.count = 0};
        static const struct argp none = {.parser = NULL};
        ep_cli_given_add(&rows, ep_cli_options_argp(&own, ep_cli_context_uses, &none));
    }
    return &rows;
}

static const ep_options_spec *file_spec(void)
{
    static char keys[EP_CLI_ROWS_MAX][KEY_BYTES];
    static ep_option fields[EP_CLI_ROWS_MAX + 1] = {{.name = "name",
                                                     .type = EP_OPTION_STRING,
                                                     .min = 1,
                                                     .max = EP_CLI_CONTEXT_NAME_MAX,
                                                     .help = "what --context calls it"}};
    static ep_option options[] = {{.name = "current",
                                   .type = EP_OPTION_STRING,
                                   .max = EP_CLI_CONTEXT_NAME_MAX,
                                   .default_text = ""},
                                  {.name = "contexts", .type = EP_OPTION_LIST, .fields = fields}};
    static const ep_options_spec spec = {
        .program = "expertctl", .env_prefix = "", .options = options, .options_count = 2};
    const ep_cli_given *rows = ep_cli_context_rows();
    for (size_t i = 0; i < rows->count && options[1].fields_count == 0; i++) {
        ep_cli_key_of(rows->rows[i]->name, keys[i], KEY_BYTES);
        fields[i + 1] =
            (ep_option){.name = keys[i],
                        .type = rows->rows[i]->arg == NULL ? EP_OPTION_BOOL : EP_OPTION_STRING,
                        .max = EP_CLI_VALUE_BYTES_MAX,
                        .default_text = rows->rows[i]->arg == NULL ? "false" : ""};
    }
    options[1].fields_count = rows->count + 1;
    return &spec;
}

/* *out_path NULL: the environment has no folder. */
static ep_err find_path(char **out_path, ep_error *out_error)
{
    const char *base = getenv("XDG_CONFIG_HOME");
    const char *home = getenv("HOME");
    int made = 0;
    *out_path = NULL;
    if (base != NULL && base[0] == '/') { /* the specification ignores relative paths */
        made = asprintf(out_path, "%s/expertctl/contexts.yaml", base);
    } else if (home != NULL && home[0] == '/') {
        made = asprintf(out_path, "%s/.config/expertctl/contexts.yaml", home);
    }
    return made >= 0 ? EP_OK : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for contexts");
}

/* Makes the folder and its parents, private, and locks it. */
static ep_err lock_folder(ep_cli_contexts *contexts, ep_error *out_error)
{
    if (contexts->path == NULL) {
        return ep_error_set(
            out_error, EP_ERR_NOT_FOUND,
            "there is no place for contexts: set HOME or XDG_CONFIG_HOME to an absolute path");
    }
    bool good = true;
    for (char *slash = strchr(contexts->path + 1, '/'); good && slash != NULL;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        good = mkdir(contexts->path, 0700) == 0 || errno == EEXIST;
        if (good && strchr(slash + 1, '/') == NULL) {
            contexts->lock = open(contexts->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            good = contexts->lock >= 0 && flock(contexts->lock, LOCK_EX) == 0;
        }
        if (!good) {
            return ep_error_set(out_error, EP_ERR_IO, "folder %.300s: %s", contexts->path,
                                strerror(errno));
        }
        *slash = '/';
    }
    return EP_OK;
}

bool ep_cli_context_name_is_good(const char *name)
{
    size_t bytes =
        strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");
    return bytes > 0 && bytes <= EP_CLI_CONTEXT_NAME_MAX && name[bytes] == '\0' && name[0] != '-' &&
           strcmp(name, EP_CLI_CONTEXT_NONE) != 0;
}

/* Rules beyond the table: names are valid and unique, and current is one of them. */
static ep_err check(const ep_cli_contexts *contexts, ep_error *out_error)
{
    const char *current = ep_cli_contexts_current(contexts);
    bool found = current[0] == '\0';
    for (size_t i = 0; i < ep_cli_contexts_count(contexts); i++) {
        const char *name = ep_cli_contexts_name(contexts, i);
        found = found || strcmp(name, current) == 0;
        if (!ep_cli_context_name_is_good(name)) {
            return ep_options_fail_item(contexts->options, "contexts", i, "name", out_error,
                                        "'%s' is no name, allowed: " EP_CLI_CONTEXT_NAMES, name);
        }
        for (size_t j = 0; j < i; j++) {
            if (strcmp(name, ep_cli_contexts_name(contexts, j)) == 0) {
                return ep_options_fail_item(contexts->options, "contexts", i, "name", out_error,
                                            "'%s' is given twice", name);
            }
        }
    }
    return found ? EP_OK
                 : ep_options_fail(contexts->options, "current", out_error,
                                   "there is no context '%s'", current);
}

static ep_err load(const char *path, ep_options **out_options, ep_error *out_error)
{
    char program[] = "expertctl";
    char *flag = NULL;
    if (asprintf(&flag, "--config=%s", path) < 0) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for contexts");
    }
    ep_err err = ep_options_load(file_spec(), 2, (char *[]){program, flag, NULL}, NULL, out_options,
                                 out_error);
    free(flag);
    return err;
}

static ep_err read_file(ep_cli_contexts *contexts, ep_error *out_error)
{
    struct stat st;
    if (contexts->path == NULL || stat(contexts->path, &st) != 0) {
        int why = contexts->path == NULL ? ENOENT : errno;
        /* HOME belongs to another user, for example after su */
        if (why == EACCES) {
            ep_cli_line(stderr,
                        "expertctl: warning: contexts are not read, %s is another user's: %s",
                        contexts->path, strerror(why));
        } else if (why != ENOENT && why != ENOTDIR) {
            return ep_error_set(out_error, EP_ERR_IO, "file %.300s: %s", contexts->path,
                                strerror(why));
        }
        return ep_options_load(file_spec(), 0, NULL, NULL, &contexts->options, out_error);
    }
    if ((st.st_mode & 022) != 0) { /* refused, since the file decides where tokens are sent */
        return ep_error_set(
            out_error, EP_ERR_BAD_CONFIG,
            "file %.300s has mode %04o, allowed: writable by its owner only (chmod 0600)",
            contexts->path, (unsigned)(st.st_mode & 07777));
    }
    ep_err err = load(contexts->path, &contexts->options, out_error);
    return err != EP_OK ? err : check(contexts, out_error);
}

ep_err ep_cli_contexts_open(bool for_change, ep_cli_contexts **out_contexts, ep_error *out_error)
{
    ep_cli_contexts *contexts = calloc(1, sizeof(*contexts));
    if (contexts == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for contexts");
    }
    contexts->lock = -1;
    ep_err err = find_path(&contexts->path, out_error);
    if (err == EP_OK && for_change) {
        err = lock_folder(contexts, out_error);
    }
    err = err != EP_OK ? err : read_file(contexts, out_error);
    if (err != EP_OK) {
        ep_cli_contexts_close(contexts);
        return err;
    }
    *out_contexts = contexts;
    return EP_OK;
}

void ep_cli_contexts_close(ep_cli_contexts *contexts)
{
    if (contexts == NULL) {
        return;
    }
    if (contexts->lock >= 0) {
        close(contexts->lock);
    }
    ep_options_free(contexts->options);
    free(contexts->path);
    free(contexts);
}

const char *ep_cli_contexts_current(const ep_cli_contexts *contexts)
{
    return ep_options_text(contexts->options, "current");
}

size_t ep_cli_contexts_count(const ep_cli_contexts *contexts)
{
    return ep_options_list_count(contexts->options, "contexts");
}

const char *ep_cli_contexts_name(const ep_cli_contexts *contexts, size_t index)
{
    return ep_options_list_text(contexts->options, "contexts", index, "name");
}

ep_err ep_cli_contexts_find(const ep_cli_contexts *contexts, const char *name, size_t *out_index,
                            ep_error *out_error)
{
    char names[EP_ERROR_TEXT_BYTES / 2] = "";
    size_t used = 0;
    for (size_t i = 0; i < ep_cli_contexts_count(contexts); i++) {
        if (strcmp(ep_cli_contexts_name(contexts, i), name) == 0) {
            *out_index = i;
            return EP_OK;
        }
        if (used < sizeof(names)) {
            used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", i > 0 ? ", " : "",
                                     ep_cli_contexts_name(contexts, i));
        }
    }
    return ep_error_set(out_error, EP_ERR_NOT_FOUND, "there is no context '%.80s', there are: %s",
                        name, used > 0 ? names : "none; see expertctl context add --help");
}

const char *ep_cli_contexts_value(const ep_cli_contexts *contexts, size_t index, const char *flag,
                                  const char **out_origin)
{
    char key[KEY_BYTES];
    ep_cli_key_of(flag, key, sizeof(key));
    const char *text = ep_options_list_text(contexts->options, "contexts", index, key);
    if (out_origin != NULL) {
        *out_origin = ep_options_list_origin(contexts->options, "contexts", index, key);
    }
    return ep_cli_given_row(ep_cli_context_rows(), flag)->arg == NULL && strcmp(text, "false") == 0
               ? ""
               : text;
}

/* ---- writing ---- */

static void put_line(const char *before, const char *flag, const char *text, FILE *out)
{
    char key[KEY_BYTES];
    ep_cli_key_of(flag, key, sizeof(key));
    if (text != NULL && text[0] != '\0') {
        fprintf(out, "%s%s: ", before, key);
        ep_options_print_text(text, out);
        fputc('\n', out);
    }
}

static void put_file(const ep_cli_contexts *contexts, const char *current, size_t removed,
                     const char *name, const ep_cli_given *added, FILE *out)
{
    const ep_cli_given *rows = ep_cli_context_rows();
    fputs("# Written by expertctl context, which keeps no comments.\n", out);
    put_line("", "current", current, out);
    fputs("contexts:\n", out);
    size_t left = 0;
    for (size_t i = 0; i < ep_cli_contexts_count(contexts); i++) {
        if (i == removed) {
            continue;
        }
        left++;
        put_line("  - ", "name", ep_cli_contexts_name(contexts, i), out);
        for (size_t r = 0; r < rows->count; r++) {
            put_line("    ", rows->rows[r]->name,
                     ep_cli_contexts_value(contexts, i, rows->rows[r]->name, NULL), out);
        }
    }
    if (added != NULL) {
        put_line("  - ", "name", name, out);
        for (size_t r = 0; r < rows->count; r++) {
            put_line("    ", rows->rows[r]->name, ep_cli_given_text(added, rows->rows[r]->name),
                     out);
        }
    } else if (left == 0) {
        fputs("  []\n", out);
    }
}

/* part: a template for mkostemp; the file is removed on an error. */
static ep_err write_part(const ep_cli_contexts *contexts, const char *current, size_t removed,
                         const char *name, const ep_cli_given *added, char *part,
                         ep_error *out_error)
{
    int fd = mkostemp(part, O_CLOEXEC); /* mode 0600 */
    FILE *out = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (out == NULL) {
        return ep_error_set(out_error, EP_ERR_IO, "file %.300s: %s", part, strerror(errno));
    }
    put_file(contexts, current, removed, name, added, out);
    bool good = fflush(out) == 0 && fsync(fd) == 0;
    int saved = errno;
    good = fclose(out) == 0 && good;
    ep_options *again = NULL;
    ep_err err = good
                     ? load(part, &again, out_error) /* checks that the next call can read it */
                     : ep_error_set(out_error, EP_ERR_IO, "file %.300s: %s", part, strerror(saved));
    ep_options_free(again);
    if (err != EP_OK) {
        unlink(part);
    }
    return err;
}

ep_err ep_cli_contexts_write(const ep_cli_contexts *contexts, const char *current, size_t removed,
                             const char *name, const ep_cli_given *added, ep_error *out_error)
{
    char *real = realpath(contexts->path, NULL); /* a symbolic link is kept */
    const char *path = real != NULL ? real : contexts->path;
    char *part = NULL;
    if (asprintf(&part, "%s.XXXXXX", path) < 0) {
        free(real);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for contexts");
    }
    ep_err err = write_part(contexts, current, removed, name, added, part, out_error);
    if (err == EP_OK && rename(part, path) != 0) {
        err = ep_error_set(out_error, EP_ERR_IO, "file %.300s: %s", path, strerror(errno));
        unlink(part);
    }
    free(part);
    free(real);
    return err;
}
