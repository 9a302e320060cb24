/* SPDX-License-Identifier: Apache-2.0 */
/* A child process per recording reads it and sends the events through a pipe. */
#include "trace/trace_read.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/printable.h"
#include "trace/trace_source.h"

#define FOLDERS_OPEN 16

/* ---- where the traces are ---- */

static ep_cli_traces *finding; /* nftw passes no user argument */
static bool found_too_many;

static int look(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    if ((kind != FTW_F && kind != FTW_SL) || strcmp(path + where->base, "metadata") != 0) {
        return 0;
    }
    if (finding->count == EP_CLI_TRACES_MAX) {
        found_too_many = true;
        return 1;
    }
    finding->dirs[finding->count] =
        strndup(path, (size_t)where->base > 1 ? (size_t)where->base - 1 : 1);
    finding->count += finding->dirs[finding->count] != NULL;
    return 0;
}

static int compare_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

void ep_cli_traces_free(ep_cli_traces *traces)
{
    while (traces->count > 0) {
        free(traces->dirs[--traces->count]);
    }
}

ep_err ep_cli_traces_find(const char *dir, ep_cli_traces *out_traces, ep_error *out_error)
{
    out_traces->count = 0;
    finding = out_traces;
    found_too_many = false;
    if (access(dir, R_OK | X_OK) != 0) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND, "%s: %s", dir, strerror(errno));
    }
    nftw(dir, look, FOLDERS_OPEN, FTW_PHYS);
    if (found_too_many) {
        ep_cli_traces_free(out_traces);
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED, "%s: more than %d traces", dir,
                            EP_CLI_TRACES_MAX);
    }
    if (out_traces->count == 0) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "%s: no recording there (no file 'metadata' in any folder)", dir);
    }
    qsort(out_traces->dirs, out_traces->count, sizeof(*out_traces->dirs), compare_text);
    return EP_OK;
}

/* ---- the child ---- */

static bool tell(const ep_cli_trace_note *note, void *arg)
{
    return fwrite(note, sizeof(*note), 1, arg) == 1;
}

static void child(int fd, const ep_cli_traces *traces)
{
    ep_cli_trace_note note;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    FILE *out = fdopen(fd, "w");
    ep_err err = EP_OK;
    memset(&note, 0, sizeof(note));
    for (size_t i = 0; out != NULL && i < traces->count && err == EP_OK; i++) {
        err = ep_cli_trace_source_run(traces->dirs[i], tell, out, &note.u.error);
    }
    note.kind = err == EP_OK ? EP_CLI_TRACE_NOTE_DONE : EP_CLI_TRACE_NOTE_ERROR;
    _exit(out != NULL && tell(&note, out) && fclose(out) == 0 ? 0 : 1);
}

/* ---- the parent ---- */

static ep_err take(ep_cli_trace_model *model, ep_cli_trace_note *note, ep_error *out_error)
{
    ep_cli_recording *recording = &model->recordings[model->recordings_count - 1];
    switch (note->kind) {
    case EP_CLI_TRACE_NOTE_EVENT:
        note->u.event.recording = (uint32_t)model->recordings_count - 1;
        return ep_cli_trace_model_add(model, &note->u.event, out_error);
    case EP_CLI_TRACE_NOTE_DISCARDED:
        recording->discarded_events += note->u.discarded.events;
        recording->discarded_packets += note->u.discarded.packets;
        return EP_OK;
    case EP_CLI_TRACE_NOTE_HOST:
        ep_text_escape(note->u.host.name, recording->host, sizeof(recording->host));
        memcpy(recording->clock, note->u.host.clock, sizeof(recording->clock));
        recording->has_clock = note->u.host.has_clock;
        return EP_OK;
    default:
        return EP_OK;
    }
}

static ep_err listen_to(ep_cli_trace_model *model, const char *dir, FILE *in, bool *out_done,
                        ep_error *out_error)
{
    ep_cli_trace_note note;
    *out_done = false;
    while (fread(&note, sizeof(note), 1, in) == 1) {
        if (note.kind == EP_CLI_TRACE_NOTE_ERROR) {
            *out_done = true;
            return ep_error_set(out_error, note.u.error.code, "%s", note.u.error.text);
        }
        ep_err err = take(model, &note, out_error);
        if (err != EP_OK) {
            return ep_error_prefix(out_error, err, "%s", dir);
        }
        *out_done = note.kind == EP_CLI_TRACE_NOTE_DONE;
        if (model->cut) {
            *out_done = true;
            break; /* closing the pipe ends the child */
        }
    }
    return EP_OK;
}

static ep_err read_traces(ep_cli_trace_model *model, const char *dir, const ep_cli_traces *traces,
                          ep_error *out_error)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return ep_error_set(out_error, EP_ERR_IO, "%s: pipe: %s", dir, strerror(errno));
    }
    fflush(NULL); /* else the child would write buffered output again */
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        child(ends[1], traces);
    }
    close(ends[1]);
    FILE *in = pid > 0 ? fdopen(ends[0], "r") : NULL;
    if (in == NULL) {
        ep_err failed = ep_error_set(out_error, EP_ERR_IO, "%s: fork: %s", dir, strerror(errno));
        close(ends[0]);
        return failed;
    }
    bool done;
    int status = 0;
    ep_err err = listen_to(model, dir, in, &done, out_error);
    fclose(in);
    waitpid(pid, &status, 0);
    if (err == EP_OK && !done) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: libbabeltrace2 broke down on it (%s %d): damaged", dir,
                            WIFSIGNALED(status) ? "signal" : "exit code",
                            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    }
    return err;
}

ep_err ep_cli_trace_read_dir(ep_cli_trace_model *model, const char *name, const char *dir,
                             ep_error *out_error)
{
    ep_cli_traces traces;
    ep_err err = ep_cli_traces_find(dir, &traces, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_cli_trace_model_recording(model, name, out_error);
    err = err != EP_OK ? err : read_traces(model, name, &traces, out_error);
    ep_cli_traces_free(&traces);
    return err;
}
