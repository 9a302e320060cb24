/* SPDX-License-Identifier: Apache-2.0 */
/* libbabeltrace2 reads folders, not files, and one bad stream makes its folder unreadable. So
 * folders with links to the readable streams are made. */
#include "trace/trace_load.h"

#include <dirent.h>
#include <errno.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/printable.h"
#include "trace/trace_read.h"

#define METADATA "metadata"
#define FOLDERS_OPEN 16
#define PATH_BYTES 4096 /* PATH_MAX, which realpath needs */

typedef struct trace_sieve {
    char dir[512]; /* temporary folder with links to the readable streams; "": none */
    ep_cli_skipped *skipped;
    size_t skipped_count;
} trace_sieve;

typedef struct sift {
    trace_sieve *sieve;
    uint64_t events_max;
    size_t kept_count;
} sift;

/* Links from/name as to/name. */
static bool link_file(const char *from, const char *name, const char *to)
{
    char target[2 * PATH_BYTES];
    char path[2 * PATH_BYTES];
    int a = snprintf(target, sizeof(target), "%s/%s", from, name);
    int b = snprintf(path, sizeof(path), "%s/%s", to, name);
    return a < (int)sizeof(target) && b < (int)sizeof(path) && symlink(target, path) == 0;
}

/* Reads a stream alone in a folder. */
static ep_err try_stream(const sift *s, const char *trace, const char *name, ep_error *out_error)
{
    char alone[PATH_BYTES];
    char path[2 * PATH_BYTES];
    snprintf(alone, sizeof(alone), "%s/alone", s->sieve->dir);
    if (mkdir(alone, 0700) != 0 || !link_file(trace, METADATA, alone) ||
        !link_file(trace, name, alone)) {
        return ep_error_set(out_error, EP_ERR_IO, "%s: %s", alone, strerror(errno));
    }
    ep_cli_trace_model *model = ep_cli_trace_model_create(s->events_max);
    ep_err err = model != NULL ? ep_cli_trace_read_dir(model, alone, alone, out_error)
                               : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to read it");
    ep_cli_trace_model_destroy(model);
    snprintf(path, sizeof(path), "%s/%s", alone, name);
    unlink(path);
    snprintf(path, sizeof(path), "%s/%s", alone, METADATA);
    unlink(path);
    rmdir(alone);
    return err;
}

/* Removes the temporary folder's name from an error text. */
static void cut_out(char *text, const char *dir, const char *rest)
{
    char part[PATH_BYTES];
    size_t bytes = (size_t)snprintf(part, sizeof(part), "%s%s", dir, rest);
    for (char *at = strstr(text, part); at != NULL; at = strstr(at, part)) {
        memmove(at, at + bytes, strlen(at + bytes) + 1);
    }
}

static void skip(sift *s, const char *trace, const char *name, const struct stat *st,
                 const ep_error *why)
{
    trace_sieve *sieve = s->sieve;
    if (sieve->skipped == NULL) {
        sieve->skipped = calloc(EP_CLI_TRACE_SKIPPED_MAX, sizeof(*sieve->skipped));
    }
    if (sieve->skipped != NULL && sieve->skipped_count < EP_CLI_TRACE_SKIPPED_MAX) {
        ep_cli_skipped *one = &sieve->skipped[sieve->skipped_count];
        char file[2 * PATH_BYTES];
        ep_error words = *why;
        cut_out(words.text, sieve->dir, "/alone: ");
        cut_out(words.text, sieve->dir, "/alone/");
        snprintf(file, sizeof(file), "%s/%s", trace, name);
        ep_text_escape(file, one->file, sizeof(one->file));
        ep_text_escape(words.text, one->why, sizeof(one->why));
        one->bytes = (uint64_t)st->st_size;
    }
    sieve->skipped_count += sieve->skipped != NULL;
}

/* Streams are the files beside the metadata. The index folder is not linked: the library makes its
 * own index. */
static void sift_trace(sift *s, const char *trace, size_t number)
{
    char whole[PATH_BYTES];
    char kept[PATH_BYTES];
    struct dirent *entry;
    snprintf(kept, sizeof(kept), "%s/%zu", s->sieve->dir, number);
    DIR *folder = realpath(trace, whole) != NULL ? opendir(trace) : NULL;
    if (folder == NULL) {
        return;
    }
    while ((entry = readdir(folder)) != NULL) {
        struct stat st;
        ep_error why;
        if (entry->d_name[0] == '.' || strcmp(entry->d_name, METADATA) == 0 ||
            fstatat(dirfd(folder), entry->d_name, &st, 0) != 0 || !S_ISREG(st.st_mode)) {
            continue;
        }
        if (try_stream(s, whole, entry->d_name, &why) != EP_OK) {
            skip(s, trace, entry->d_name, &st, &why);
        } else if ((mkdir(kept, 0700) == 0 && link_file(whole, METADATA, kept)) ||
                   errno == EEXIST) {
            s->kept_count += link_file(whole, entry->d_name, kept);
        }
    }
    closedir(folder);
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    return remove(path);
}

static void sieve_remove(trace_sieve *sieve)
{
    if (sieve->dir[0] != '\0') {
        nftw(sieve->dir, remove_one, FOLDERS_OPEN, FTW_DEPTH | FTW_PHYS);
    }
    free(sieve->skipped);
    *sieve = (trace_sieve){0};
}

/* Reads each stream of dir alone, at most events_max events of it. False: no stream is readable,
 * and nothing is kept. */
static bool sieve_make(trace_sieve *out_sieve, const char *dir, uint64_t events_max)
{
    const char *place = getenv("TMPDIR");
    ep_cli_traces traces;
    sift s = {.sieve = out_sieve, .events_max = events_max};
    int bytes = snprintf(out_sieve->dir, sizeof(out_sieve->dir), "%s/expertctl-trace-XXXXXX",
                         place != NULL ? place : "/tmp");
    if (bytes >= (int)sizeof(out_sieve->dir) || mkdtemp(out_sieve->dir) == NULL) {
        out_sieve->dir[0] = '\0';
        return false;
    }
    if (ep_cli_traces_find(dir, &traces, NULL) == EP_OK) {
        for (size_t i = 0; i < traces.count; i++) {
            sift_trace(&s, traces.dirs[i], i);
        }
        ep_cli_traces_free(&traces);
    }
    if (s.kept_count == 0) {
        sieve_remove(out_sieve);
    }
    return s.kept_count > 0;
}

/* ---- all recordings ---- */

/* Reads a recording that has a sieve from there. *out_failed: the recording with the error. */
static ep_err load_once(const char *const *dirs, size_t dirs_count, uint64_t events_max,
                        trace_sieve *sieves, ep_cli_trace_model **out_model, size_t *out_failed,
                        ep_error *out_error)
{
    ep_cli_trace_model *model = ep_cli_trace_model_create(events_max);
    ep_err err = model != NULL
                     ? EP_OK
                     : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the spans");
    *out_failed = 0;
    for (size_t i = 0; i < dirs_count && err == EP_OK; i++) {
        bool sifted = sieves[i].dir[0] != '\0';
        *out_failed = i;
        err = ep_cli_trace_read_dir(model, dirs[i], sifted ? sieves[i].dir : dirs[i], out_error);
    }
    if (err != EP_OK) {
        ep_cli_trace_model_destroy(model);
        return err;
    }
    for (size_t i = 0; i < dirs_count; i++) {
        model->recordings[i].skipped = sieves[i].skipped;
        model->recordings[i].skipped_count = sieves[i].skipped_count;
        sieves[i].skipped = NULL;
    }
    *out_model = model;
    return EP_OK;
}

ep_err ep_cli_trace_load(const char *const *dirs, size_t dirs_count, uint64_t events_max,
                         ep_cli_trace_model **out_model, ep_error *out_error)
{
    size_t failed = 0;
    trace_sieve *sieves = calloc(dirs_count, sizeof(*sieves));
    if (sieves == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu recordings",
                            dirs_count);
    }
    ep_err err = load_once(dirs, dirs_count, events_max, sieves, out_model, &failed, out_error);
    /* Each try makes a new model: events read before an error are dropped. */
    while (err == EP_ERR_BAD_FILE && sieves[failed].dir[0] == '\0' &&
           sieve_make(&sieves[failed], dirs[failed], events_max)) {
        err = load_once(dirs, dirs_count, events_max, sieves, out_model, &failed, out_error);
    }
    for (size_t i = 0; i < dirs_count; i++) {
        sieve_remove(&sieves[i]);
    }
    free(sieves);
    return err;
}

void ep_cli_trace_warn_skipped(const char *program, const ep_cli_trace_model *model)
{
    for (size_t i = 0; i < model->recordings_count; i++) {
        const ep_cli_recording *r = &model->recordings[i];
        for (size_t k = 0; k < r->skipped_count && k < EP_CLI_TRACE_SKIPPED_MAX; k++) {
            fprintf(stderr,
                    "%s: warning: %s is skipped: %s. Its %" PRIu64
                    " bytes are lost, with LTTng the events of one CPU: spans with one half there "
                    "count as unmatched or cut\n",
                    program, r->skipped[k].file, r->skipped[k].why, r->skipped[k].bytes);
        }
        if (r->skipped_count > EP_CLI_TRACE_SKIPPED_MAX) {
            fprintf(stderr, "%s: warning: %zu more streams of %s are skipped\n", program,
                    r->skipped_count - EP_CLI_TRACE_SKIPPED_MAX, r->path);
        }
    }
}
