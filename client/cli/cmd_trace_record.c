/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl trace record and expertctl trace snapshot. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "command_table.h"
#include "origin.h"
#include "trace/trace_load.h"
#include "trace/trace_session.h"

#define PATH_TEXT_BYTES 256
#define DURATION_US_MIN 1000u
#define DURATION_US_MAX 86400000000u
#define SUBBUF_KIB_MIN 4
#define SUBBUF_KIB_MAX 262144
#define SUBBUFS_MAX 4096
#define FLIGHT_RECORDER "expertctl-snapshot"

static struct {
    uint64_t duration_us;
    char dir[PATH_TEXT_BYTES];
    uint32_t subbuf_kib;
    uint32_t subbufs;
    char *const *command; /* NULL: record for duration_us */
    int verb;             /* snapshot's verb */
} wanted = {.duration_us = 5000000, .verb = -1};

static uint32_t power_of_2(struct argp_state *state, const char *option, const char *arg,
                           ep_unit unit, uint32_t min, uint32_t max)
{
    uint32_t value = (uint32_t)ep_cli_arg_quantity(state, option, arg, unit, unit, min, max);
    if ((value & (value - 1)) != 0) {
        argp_error(state, "%s is '%s', allowed: a power of 2", ep_cli_setting_name(option, arg),
                   arg);
    }
    return value;
}

static void take_dir(struct argp_state *state, const char *option, char *text)
{
    snprintf(wanted.dir, sizeof(wanted.dir), "%s",
             ep_cli_arg_text(state, option, text, sizeof(wanted.dir) - 1));
}

static void take_subbuf_kib(struct argp_state *state, const char *option, char *text)
{
    wanted.subbuf_kib =
        power_of_2(state, option, text, EP_UNIT_KIB, SUBBUF_KIB_MIN, SUBBUF_KIB_MAX);
}

static void take_subbufs(struct argp_state *state, const char *option, char *text)
{
    wanted.subbufs = power_of_2(state, option, text, EP_UNIT_NONE, 2, SUBBUFS_MAX);
}

/* ---- shared ---- */

static ep_err make_dir(ep_error *out_error)
{
    if (wanted.dir[0] == '\0') {
        time_t now = time(NULL);
        struct tm parts;
        localtime_r(&now, &parts);
        strftime(wanted.dir, sizeof(wanted.dir), "expertd-trace-%Y%m%d-%H%M%S", &parts);
    }
    if (mkdir(wanted.dir, 0700) != 0 &&
        (errno != EEXIST || (rmdir(wanted.dir) != 0 || mkdir(wanted.dir, 0700) != 0))) {
        return ep_error_set(out_error, EP_ERR_IO,
                            "--output %s: %s; allowed: an empty or new folder", wanted.dir,
                            strerror(errno));
    }
    return EP_OK;
}

static void nobody_had_events(const char *program, int providers)
{
    fprintf(stderr, "%s: no process had events. ", program);
    if (providers > 0) {
        fprintf(stderr, "%d can be traced, so none served or sent a token batch in that time.\n",
                providers);
        return;
    }
    fprintf(stderr, "None offers any: check that `tracing` is not off in its configuration, that "
                    "libexpertd-trace.so is installed, and that it runs as this user (root records "
                    "all users).\n");
}

/* Reads the recording back to say what is in it, and whether it can be read. */
static ep_err summarise(ep_cli_call *call, int providers, ep_error *out_error)
{
    const char *dir = wanted.dir;
    ep_cli_trace_model *model = NULL;
    ep_err err = ep_cli_trace_load(&dir, 1, EP_CLI_TRACE_EVENTS_MAX_DEFAULT, &model, out_error);
    if (err == EP_ERR_NOT_FOUND || (err == EP_OK && model->events_count == 0)) {
        nobody_had_events(call->program, providers);
        call->failed = true;
        err = EP_OK;
    } else if (err == EP_OK) {
        const ep_cli_recording *r = &model->recordings[0];
        ep_cli_trace_warn_skipped(call->program, model);
        printf("%s: %s%" PRIu64 " events of %zu processes\n", dir, model->cut ? "more than " : "",
               model->events_count, model->processes_count);
        if (r->discarded_events > 0 || r->discarded_packets > 0) {
            printf("discarded: %" PRIu64 " events, %" PRIu64
                   " packets; larger --subbuf-kib or --subbufs keep more\n",
                   r->discarded_events, r->discarded_packets);
        }
    }
    ep_cli_trace_model_destroy(model);
    return err;
}

/* ---- record ---- */

static const ep_cli_option record_rows[] = {
    {"duration", 'd', "TIME",
     "Record for this long: 500ms, 5s, 2m (default 5s). Not with a command", 1,
     .u64 = &wanted.duration_us, .unit = EP_UNIT_US, .plain = EP_UNIT_S, .min = DURATION_US_MIN,
     .max = DURATION_US_MAX},
    {"output", 'o', "DIR",
     "Where the recording goes: an empty or new folder (default expertd-trace-TIME)", 1,
     .take = take_dir},
    {"subbuf-kib", 'b', "SIZE",
     "Size of one sub-buffer, a power of 2, 4K..256M; a number alone is KiB (default 1M)", 2,
     .take = take_subbuf_kib},
    {"subbufs", 'n', "N", "Sub-buffers per CPU and user, a power of 2, 2..4096 (default 4)", 2,
     .take = take_subbufs},
};

/* After "--" everything belongs to the command. */
static void take_command(struct argp_state *state, char *text)
{
    if (state->quoted == 0) {
        argp_error(state, "unexpected argument '%s', allowed: options, or -- and a command", text);
    }
    wanted.command = state->argv + state->next - 1;
    state->next = state->argc;
}

static ep_cli_session_options how_to_record(const char *name, uint32_t subbuf_kib, uint32_t subbufs)
{
    return (ep_cli_session_options){.name = name,
                                    .dir = wanted.dir,
                                    .subbuf_kib =
                                        wanted.subbuf_kib > 0 ? wanted.subbuf_kib : subbuf_kib,
                                    .subbufs = wanted.subbufs > 0 ? wanted.subbufs : subbufs};
}

static ep_err run_record(ep_cli_call *call, ep_error *out_error)
{
    ep_cli_session session;
    ep_error end_error;
    int command_code = 0;
    ep_err err = make_dir(out_error);
    if (err != EP_OK) {
        return err;
    }
    const ep_cli_session_options how = how_to_record(NULL, 1024, 4);
    ep_cli_session_hold_signals();
    err = ep_cli_session_start(&session, &how, out_error);
    if (err != EP_OK) {
        rmdir(wanted.dir);
        return err;
    }
    err = ep_cli_session_wait(wanted.command, (double)wanted.duration_us / 1e6, &command_code,
                              out_error);
    int providers = ep_cli_session_providers();
    ep_err ended = ep_cli_session_end(&session, &end_error);
    if (err == EP_OK && ended != EP_OK) {
        *out_error = end_error;
        err = ended;
    }
    if (err != EP_OK) {
        return err;
    }
    call->exit_code = command_code;
    return summarise(call, wanted.command != NULL ? 0 : providers, out_error);
}

const ep_cli_command ep_cli_trace_record_command = {
    .name = "record",
    .help = "record all local processes, for a time or while a command runs",
    .args = "[-- COMMAND [ARG...]]",
    .doc = "Records every span of all processes of expertd on this host that this user may "
           "trace.\vRecords for --duration, or while COMMAND runs; ^C ends it early, with what was "
           "recorded. COMMAND's exit code becomes the exit code. A session daemon of LTTng is "
           "started when none runs, and ended afterwards. Events that find the buffers full are "
           "discarded, counted and reported.\n\n"
           "Examples:\n"
           "  expertctl trace record -d 5s -o /tmp/rec\n"
           "  expertctl trace record -o /tmp/rec -- \\\n"
           "      expertctl bench --model demo --layer 0 --tokens 8\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = record_rows, .count = EP_ARRAY_COUNT(record_rows)},
    .in_order = true,
    .take_argument = take_command,
    .run = run_record,
};

/* ---- snapshot ---- */

static void take_verb(struct argp_state *state, char *text)
{
    if (wanted.verb >= 0) {
        argp_error(state, "unexpected argument '%s', allowed: options only", text);
    }
    wanted.verb = (int)ep_cli_arg_word(state, "the verb", text, "start|take|stop");
}

static void check_verb(struct argp_state *state)
{
    if (wanted.verb < 0) {
        argp_error(state, "no verb given, allowed: start, take, stop");
    }
}

static const ep_cli_option snapshot_rows[] = {
    {"output", 'o', "DIR",
     "take: where the snapshot goes: an empty or new folder (default expertd-trace-TIME)", 1,
     .take = take_dir},
    {"subbuf-kib", 'b', "SIZE",
     "start: size of one sub-buffer, a power of 2, 4K..256M; a number alone is KiB (default 256K)",
     2, .take = take_subbuf_kib},
    {"subbufs", 'n', "N", "start: sub-buffers per CPU and user, a power of 2, 2..4096 (default 8)",
     2, .take = take_subbufs},
};

static ep_err snapshot_start(ep_error *out_error)
{
    ep_cli_session session;
    /* where a take without a folder would write; it stays empty */
    char base[] = "/tmp/expertctl-snapshot-XXXXXX";
    if (mkdtemp(base) == NULL) {
        return ep_error_set(out_error, EP_ERR_IO, "%s: %s", base, strerror(errno));
    }
    ep_cli_session_options how = how_to_record(FLIGHT_RECORDER, 256, 8);
    how.dir = base;
    how.overwrite = true;
    ep_err err = ep_cli_session_start(&session, &how, out_error);
    rmdir(base);
    if (err == EP_OK) {
        printf("flight recorder started: %" PRIu32
               " KiB per CPU and user; next: expertctl trace snapshot take\n",
               how.subbuf_kib * how.subbufs);
    }
    return err;
}

static ep_err run_snapshot(ep_cli_call *call, ep_error *out_error)
{
    if (wanted.verb == 0) {
        return snapshot_start(out_error);
    }
    if (wanted.verb == 2) {
        return ep_cli_session_drop(FLIGHT_RECORDER, out_error);
    }
    ep_err err = make_dir(out_error);
    err = err != EP_OK ? err : ep_cli_session_snapshot(FLIGHT_RECORDER, wanted.dir, out_error);
    if (err != EP_OK) {
        rmdir(wanted.dir);
        return err;
    }
    return summarise(call, ep_cli_session_providers(), out_error);
}

const ep_cli_command ep_cli_trace_snapshot_command = {
    .name = "snapshot",
    .help = "flight recorder: start, take, stop",
    .args = "start|take|stop",
    .doc = "A flight recorder: spans go round in rings in memory, and only `take` writes "
           "them.\v`start` begins and returns; the session stays when expertctl ends. `take` "
           "writes what the rings hold, as often as wanted. `stop` ends it. One ring holds KIB x N "
           "for each CPU and user.\n\n"
           "Examples:\n"
           "  expertctl trace snapshot start --subbuf-kib 1024\n"
           "  expertctl trace snapshot take -o /tmp/what-happened\n"
           "  expertctl trace report /tmp/what-happened\n"
           "  expertctl trace snapshot stop\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = snapshot_rows, .count = EP_ARRAY_COUNT(snapshot_rows), .check = check_verb},
    .take_argument = take_verb,
    .run = run_snapshot,
};
