/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the one-sentence summary of a recording. */
#include <inttypes.h>
#include <stdio.h>

#include "trace/trace_report.h"

#define NUMBER_BYTES 32
#define STATUSES_SAID 3
#define LATE_SAID 0.05

/* Names of the stages in the sentence. */
static const char *const stage_words[EP_CLI_STAGES] = {"packing",
                                                       "the wire",
                                                       "queueing",
                                                       "compute",
                                                       "the nodes' own work",
                                                       "combine",
                                                       "the client's own work",
                                                       "the gateway",
                                                       "waiting for answers that were not used",
                                                       "on nodes that were not recorded"};

static const char *number(uint64_t value, char out[NUMBER_BYTES])
{
    char digits[NUMBER_BYTES];
    int count = snprintf(digits, sizeof(digits), "%" PRIu64, value);
    size_t used = 0;
    for (int i = 0; i < count; i++) {
        if (i > 0 && (count - i) % 3 == 0) {
            out[used++] = ',';
        }
        out[used++] = digits[i];
    }
    out[used] = '\0';
    return out;
}

/* Writes a duration with three digits: 9.87 ms. */
static const char *duration(int64_t ns, char out[NUMBER_BYTES])
{
    static const char *const units[] = {"ns", "µs", "ms", "s"};
    double value = (double)ns;
    size_t unit = 0;
    while (value >= 999.5 && unit < 3) { /* 999.5 would be rounded to 1000 */
        value /= 1e3;
        unit++;
    }
    int decimals = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    snprintf(out, NUMBER_BYTES, "%.*f %s", decimals, value, units[unit]);
    return out;
}

static void say_stage(const ep_cli_trace_figures *f, FILE *out)
{
    int most = 0;
    for (int stage = 1; stage < EP_CLI_STAGES; stage++) {
        most = f->stages_ns[stage] > f->stages_ns[most] ? stage : most;
    }
    if (f->requests_ns > 0) {
        fprintf(out, "; %.0f %% of a call is %s",
                100.0 * (double)f->stages_ns[most] / (double)f->requests_ns, stage_words[most]);
    }
}

static void say_slow(const ep_cli_trace_model *model, const ep_cli_trace_figures *f, FILE *out)
{
    const ep_cli_trace_slow *slow = &f->slow;
    const ep_cli_trace_peer *late = NULL;
    int64_t most_late_ns = 0;
    size_t nodes = 0;
    for (size_t i = 0; i < f->peers_count; i++) {
        const ep_cli_trace_peer *peer = &f->peers[i];
        nodes += !peer->gateway;
        if (peer->late_ns > most_late_ns &&
            (double)peer->late_ns >= LATE_SAID * (double)f->requests_ns) {
            late = peer;
            most_late_ns = peer->late_ns;
        }
    }
    if (slow->peer != EP_CLI_TRACE_NONE) {
        bool one_other = nodes == 2;
        fprintf(out, "; %s is the slowest (%s%.1fx %s)", model->names[f->peers[slow->peer].name],
                slow->p99 ? "p99 " : "", slow->times,
                one_other ? model->names[f->peers[slow->against].name] : "the other nodes");
    } else if (late != NULL) {
        fprintf(out, "; calls waited %.0f %% of their time for late answers of %s",
                100.0 * (double)late->late_ns / (double)f->requests_ns, model->names[late->name]);
    } else if (slow->compared) {
        fprintf(out, "; no node is slower than the others");
    }
}

static void say_failures(const ep_cli_trace_figures *f, FILE *out)
{
    char text[NUMBER_BYTES];
    uint64_t frames = 0;
    size_t said = 0;
    size_t statuses = 0;
    for (size_t i = 0; i < f->failures_count; i++) {
        frames += f->failures[i].frames ? f->failures[i].count : 0;
        statuses += !f->failures[i].frames;
    }
    if (f->failed == 0 && frames == 0) {
        fprintf(out, "; nothing failed");
    } else if (f->failed == 0) {
        fprintf(out, "; no call failed, %s frame%s did", number(frames, text),
                frames == 1 ? "" : "s");
    } else {
        fprintf(out, "; %s call%s failed (", number(f->failed, text), f->failed == 1 ? "" : "s");
        for (; said < statuses && said < STATUSES_SAID; said++) {
            fprintf(out, "%s%s %s", said > 0 ? ", " : "", number(f->failures[said].count, text),
                    ep_err_name(f->failures[said].status));
        }
        fprintf(out, "%s)", said < statuses ? ", ..." : "");
    }
    if (f->unused > 0) {
        fprintf(out, ", %s hedge%s", number(f->unused, text), f->unused == 1 ? "" : "s");
    }
}

void ep_cli_trace_summary(const ep_cli_trace_model *model, const ep_cli_trace_figures *figures,
                          char out_text[EP_CLI_TRACE_SUMMARY_BYTES])
{
    char text[3][NUMBER_BYTES];
    const ep_cli_trace_stat *calls = &figures->calls;
    const ep_cli_trace_stat *serves = &figures->stages[EP_CLI_SPAN_serve];
    FILE *out = fmemopen(out_text, EP_CLI_TRACE_SUMMARY_BYTES, "w");
    out_text[0] = '\0';
    if (out == NULL) {
        return;
    }
    if (calls->count > 0) {
        fprintf(out, "%s call%s, p50 %s, p99 %s", number(calls->count, text[0]),
                calls->count == 1 ? "" : "s", duration(calls->p50_ns, text[1]),
                duration(calls->p99_ns, text[2]));
        say_stage(figures, out);
        say_slow(model, figures, out);
        say_failures(figures, out);
    } else if (serves->count > 0) {
        fprintf(out, "No caller was recorded; nodes served %s frame%s, p50 %s, p99 %s",
                number(serves->count, text[0]), serves->count == 1 ? "" : "s",
                duration(serves->p50_ns, text[1]), duration(serves->p99_ns, text[2]));
    } else {
        fprintf(out, "No call was recorded");
    }
    fputc('.', out);
    fclose(out);
}
