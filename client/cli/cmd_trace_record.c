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

#include "arguments.h"
#include "cmd_trace.h"
#include "exit_code.h"
#include "trace/trace_read.h"
#include "trace/trace_session.h"

#define PATH_TEXT_BYTES 256
#define DURATION_US_MIN 1000u
#define DURATION_US_MAX 86400000000u
#define SUBBUF_KIB_MIN 4
#define SUBBUF_KIB_MAX 262144
#define SUBBUFS_MAX 4096
#define FLIGHT_RECORDER "expertctl-snapshot"

typedef struct record_options {
    uint64_t duration_us;
    char dir[PATH_TEXT_BYTES];
    uint32_t subbuf_kib;
    uint32_t subbufs;
    char *const *command; /* NULL: for duration_us */
    int verb;             /* of snapshot */
} record_options;

static uint32_t power_of_2(struct argp_state *state, const char *option, const char *arg,
                           ep_unit unit, uint32_t min, uint32_t max)
{
    uint32_t value = (uint32_t)ep_cli_arg_quantity(state, option, arg, unit, unit, min, max);
    if ((value & (value - 1)) != 0) {
        argp_error(state, "%s is '%s', allowed: a power of 2", option, arg);
    }
    return value;
}

static error_t parse_common(int key, char *arg, struct argp_state *state)
{
    record_options *options = state->input;
    switch (key) {
    case 'o':
        snprintf(options->dir, sizeof(options->dir), "%s",
                 ep_cli_arg_text(state, "--output", arg, sizeof(options->dir) - 1));
        return 0;
    case 'b':
        options->subbuf_kib =
            power_of_2(state, "--subbuf-kib", arg, EP_UNIT_KIB, SUBBUF_KIB_MIN, SUBBUF_KIB_MAX);
        return 0;
    case 'n':
        options->subbufs = power_of_2(state, "--subbufs", arg, EP_UNIT_NONE, 2, SUBBUFS_MAX);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse_record(int key, char *arg, struct argp_state *state)
{
    record_options *options = state->input;
    switch (key) {
    case 'd':
        options->duration_us =
            ep_cli_arg_time_us(state, "--duration", arg, DURATION_US_MIN, DURATION_US_MAX);
        return 0;
    case ARGP_KEY_ARG:
        /* After "--" everything belongs to the command. */
        if (state->quoted == 0) {
            argp_error(state, "unexpected argument '%s', allowed: options, or -- and a command",
                       arg);
        }
        options->command = state->argv + state->next - 1;
        state->next = state->argc;
        return 0;
    default:
        return parse_common(key, arg, state);
    }
}

static const struct argp_option record_list[] = {
    {"duration", 'd', "TIME", 0,
     "Record for this long: 500ms, 5s, 2m (default 5s). Not with a command", 1},
    {"output", 'o', "DIR", 0,
     "Where the recording goes: an empty or new folder (default expertd-trace-TIME)", 1},
    {"subbuf-kib", 'b', "SIZE", 0,
     "Size of one sub-buffer, a power of 2, 4K..256M; a number alone is KiB (default 1M)", 2},
    {"subbufs", 'n', "N", 0, "Sub-buffers per CPU and user, a power of 2, 2..4096 (default 4)", 2},
    {0},
};
static const struct argp record_argp = {
    record_list,
    parse_record,
    "[-- COMMAND [ARG...]]",
    "Records every span of all processes of expertd on this host that this user may trace.\v"
    "Records for --duration, or while COMMAND runs; ^C ends it early, with what was recorded. "
    "COMMAND's exit code "
    "becomes the exit code. A session daemon of LTTng is started when none runs, and ended "
    "afterwards. Events that "
    "find the buffers full are discarded, counted and reported.\n\n"
    "Examples:\n"
    "  expertctl trace record -d 5s -o /tmp/rec\n"
    "  expertctl trace record -o /tmp/rec -- \\\n"
    "      expertctl bench --model demo --layer 0 --tokens 8\n\n" EP_CLI_EXIT_HELP,
    NULL,
    NULL,
    NULL};

/* ---- shared ---- */

static ep_err make_dir(record_options *options, ep_error *out_error)
{
    if (options->dir[0] == '\0') {
        time_t now = time(NULL);
        struct tm parts;
        localtime_r(&now, &parts);
        strftime(options->dir, sizeof(options->dir), "expertd-trace-%Y%m%d-%H%M%S", &parts);
    }
    if (mkdir(options->dir, 0700) != 0 &&
        (errno != EEXIST || (rmdir(options->dir) != 0 || mkdir(options->dir, 0700) != 0))) {
        return ep_error_set(out_error, EP_ERR_IO,
                            "--output %s: %s; allowed: an empty or new folder", options->dir,
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
                    "libexpertd-trace.so "
                    "is installed, and that it runs as this user (root records all users).\n");
}

/* Reads the recording back: what is in it, and whether it can be read at all. */
static int summarise(const char *program, const char *dir, int providers)
{
    ep_error error;
    ep_cli_trace_model *model = NULL;
    ep_err err = ep_cli_trace_load(&dir, 1, EP_CLI_TRACE_EVENTS_MAX_DEFAULT, &model, &error);
    int code = EP_CLI_EXIT_OK;
    if (err == EP_ERR_NOT_FOUND || (err == EP_OK && model->events_count == 0)) {
        nobody_had_events(program, providers);
        code = EP_CLI_EXIT_FAILED;
    } else if (err != EP_OK) {
        code = ep_cli_fail(program, &error);
    } else {
        const ep_cli_recording *r = &model->recordings[0];
        ep_cli_trace_warn_skipped(program, model);
        printf("%s: %s%" PRIu64 " events of %zu processes\n", dir, model->cut ? "more than " : "",
               model->events_count, model->processes_count);
        if (r->discarded_events > 0 || r->discarded_packets > 0) {
            printf("discarded: %" PRIu64 " events, %" PRIu64
                   " packets; larger --subbuf-kib or --subbufs keep more\n",
                   r->discarded_events, r->discarded_packets);
        }
    }
    ep_cli_trace_model_destroy(model);
    return code;
}

/* ---- record ---- */

static int run_record(int argc, char **argv)
{
    static record_options options = {.duration_us = 5000000, .subbuf_kib = 1024, .subbufs = 4};
    ep_cli_session session;
    ep_error error;
    ep_error end_error;
    int command_code = 0;
    bool interrupted = false;
    argp_parse(&record_argp, argc, argv, ARGP_IN_ORDER, NULL, &options);
    ep_err err = make_dir(&options, &error);
    if (err != EP_OK) {
        return ep_cli_fail(argv[0], &error);
    }
    ep_cli_session_options how = {
        .dir = options.dir, .subbuf_kib = options.subbuf_kib, .subbufs = options.subbufs};
    ep_cli_session_hold_signals();
    err = ep_cli_session_start(&session, &how, &error);
    if (err != EP_OK) {
        rmdir(options.dir);
        return ep_cli_fail(argv[0], &error);
    }
    err = ep_cli_session_wait(options.command, (double)options.duration_us / 1e6, &command_code,
                              &interrupted, &error);
    int providers = ep_cli_session_providers();
    ep_err ended = ep_cli_session_end(&session, &end_error);
    if (err != EP_OK || ended != EP_OK) {
        return ep_cli_fail(argv[0], err != EP_OK ? &error : &end_error);
    }
    int code = summarise(argv[0], options.dir, options.command != NULL ? 0 : providers);
    return command_code != 0 ? command_code : code;
}

const ep_cli_command ep_cli_trace_record_command = {
    "record", "record all local processes, for a time or while a command runs", &record_argp,
    run_record, NULL};

/* ---- snapshot ---- */

static const char *const snapshot_verbs[] = {"start", "take", "stop", NULL};

static error_t parse_snapshot(int key, char *arg, struct argp_state *state)
{
    record_options *options = state->input;
    if (key == ARGP_KEY_ARG) {
        if (options->verb >= 0) {
            return ep_cli_arg_unexpected(state, arg);
        }
        options->verb = (int)ep_cli_arg_word(state, "the verb", arg, snapshot_verbs);
        return 0;
    }
    if (key == ARGP_KEY_END && options->verb < 0) {
        argp_error(state, "no verb given, allowed: start, take, stop");
    }
    return parse_common(key, arg, state);
}

static const struct argp_option snapshot_list[] = {
    {"output", 'o', "DIR", 0,
     "take: where the snapshot goes: an empty or new folder (default expertd-trace-TIME)", 1},
    {"subbuf-kib", 'b', "SIZE", 0,
     "start: size of one sub-buffer, a power of 2, 4K..256M; a number alone is KiB (default 256K)",
     2},
    {"subbufs", 'n', "N", 0,
     "start: sub-buffers per CPU and user, a power of 2, 2..4096 (default 8)", 2},
    {0},
};
static const struct argp snapshot_argp = {
    snapshot_list,
    parse_snapshot,
    "start|take|stop",
    "A flight recorder: spans go round in rings in memory, and only `take` writes them.\v"
    "`start` begins and returns; the session stays when expertctl ends. `take` writes what the "
    "rings hold, as often "
    "as wanted. `stop` ends it. One ring holds KIB x N for each CPU and user.\n\n"
    "Examples:\n"
    "  expertctl trace snapshot start --subbuf-kib 1024\n"
    "  expertctl trace snapshot take -o /tmp/what-happened\n"
    "  expertctl trace report /tmp/what-happened\n"
    "  expertctl trace snapshot stop\n\n" EP_CLI_EXIT_HELP,
    NULL,
    NULL,
    NULL};

static ep_err snapshot_start(const record_options *options, ep_error *out_error)
{
    ep_cli_session session;
    /* where a take without a folder would write; stays empty */
    char base[] = "/tmp/expertctl-snapshot-XXXXXX";
    if (mkdtemp(base) == NULL) {
        return ep_error_set(out_error, EP_ERR_IO, "%s: %s", base, strerror(errno));
    }
    ep_cli_session_options how = {.name = FLIGHT_RECORDER,
                                  .dir = base,
                                  .overwrite = true,
                                  .subbuf_kib = options->subbuf_kib,
                                  .subbufs = options->subbufs};
    ep_err err = ep_cli_session_start(&session, &how, out_error);
    rmdir(base);
    if (err == EP_OK) {
        printf("flight recorder started: %" PRIu32
               " KiB per CPU and user; next: expertctl trace snapshot take\n",
               options->subbuf_kib * options->subbufs);
    }
    return err;
}

static int run_snapshot(int argc, char **argv)
{
    static record_options options = {.subbuf_kib = 256, .subbufs = 8, .verb = -1};
    ep_error error;
    argp_parse(&snapshot_argp, argc, argv, 0, NULL, &options);
    ep_err err;
    if (options.verb == 0) {
        err = snapshot_start(&options, &error);
    } else if (options.verb == 1) {
        err = make_dir(&options, &error);
        err = err != EP_OK ? err : ep_cli_session_snapshot(FLIGHT_RECORDER, options.dir, &error);
        if (err == EP_OK) {
            return summarise(argv[0], options.dir, ep_cli_session_providers());
        }
        rmdir(options.dir);
    } else {
        err = ep_cli_session_drop(FLIGHT_RECORDER, &error);
    }
    return err == EP_OK ? EP_CLI_EXIT_OK : ep_cli_fail(argv[0], &error);
}

const ep_cli_command ep_cli_trace_snapshot_command = {
    "snapshot", "flight recorder: start, take, stop", &snapshot_argp, run_snapshot, NULL};
