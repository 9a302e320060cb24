/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl doctor: gathers facts about the service and says what is wrong and what to do. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/screen.h"
#include "command_table.h"
#include "doctor_ascend.h"
#include "doctor_config.h"
#include "observe/trace.h"
#include "origin.h"

#define FILES_MAX 16

static struct {
    const char *files[FILES_MAX];
    size_t files_count;
    const char *program; /* NULL: chosen by the file's name */
} wanted;

static void take_file(struct argp_state *state, const char *option, char *text)
{
    if (wanted.files_count == FILES_MAX) {
        argp_error(state, "%s is given more than %d times, allowed: 1..%d", option, FILES_MAX,
                   FILES_MAX);
    }
    wanted.files[wanted.files_count++] = text;
}

static const ep_cli_option rows[] = {
    {"config", 0, "FILE",
     "Also check this configuration file of a daemon on this host, and open the checkpoints it "
     "names; may be repeated",
     1, .take = take_file},
    {"program", 0, "PATH",
     "The daemon whose file it is (default: expertd-coordinator for files named coordinator*, else "
     "expertd)",
     1, .text = &wanted.program},
};

typedef struct gathered {
    ep_doctor_facts facts;
    ProtobufCMessage *cluster;
    ep_cli_node_list nodes;
    ep_rpc_look *looks;
} gathered;

/* Whether a port that did not answer is looked at: the error does not say why. */
static bool is_open_question(const ep_error *error)
{
    return error->code != EP_ERR_UNIMPLEMENTED && error->code != EP_ERR_PERMISSION_DENIED &&
           error->code != EP_ERR_UNAUTHENTICATED;
}

static ep_err ask_coordinator(ep_cli_control *control, const ep_cli_connect *connect, gathered *g,
                              ep_error *out_error)
{
    const char *url = connect->coordinator_url;
    g->facts.coordinator_url = url;
    if (ep_cli_control_ask_one(control, url, "expertd.v1.Coordinator", "ClusterStatus", NULL,
                               &g->cluster, &g->facts.coordinator_error) != EP_OK) {
        const char *asked = is_open_question(&g->facts.coordinator_error) ? url : NULL;
        ep_cli_control_look(control, &asked, 1, &g->facts.coordinator_look);
        return EP_OK;
    }
    g->facts.cluster = (const Expertd__V1__ClusterStatusReply *)g->cluster;
    return ep_cli_node_list_from_cluster(g->facts.cluster, &g->nodes, out_error);
}

static ep_err ask_nodes(ep_cli_control *control, const ep_cli_connect *connect, gathered *g,
                        ep_error *out_error)
{
    const char **asked = calloc(g->nodes.count + 1, sizeof(*asked));
    g->looks = calloc(g->nodes.count + 1, sizeof(*g->looks));
    if (asked == NULL || g->looks == NULL) {
        free(asked);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu nodes", g->nodes.count);
    }
    ep_cli_node_list_ask(control, &g->nodes, connect->timeout_us);
    for (size_t i = 0; i < g->nodes.count; i++) {
        const ep_cli_node *node = &g->nodes.nodes[i];
        asked[i] = node->status == NULL && is_open_question(&node->error) ? node->url : NULL;
    }
    ep_cli_control_look(control, asked, g->nodes.count, g->looks);
    free(asked);
    g->facts.nodes = &g->nodes;
    g->facts.node_looks = g->looks;
    return EP_OK;
}

static bool is_on_path(const char *name)
{
    const char *path = getenv("PATH");
    char file[4096];
    while (path != NULL && *path != '\0') {
        int bytes = (int)strcspn(path, ":");
        snprintf(file, sizeof(file), "%.*s/%s", bytes, path, name);
        if (access(file, X_OK) == 0) {
            return true;
        }
        path += bytes + (path[bytes] == ':');
    }
    return false;
}

static ep_err gather(gathered *g, ep_error *out_error)
{
    ep_cli_control *control = NULL;
    const ep_cli_connect *connect = &ep_cli_peer;
    ep_error_clear(&g->facts.coordinator_error);
    g->facts.has_token = connect->token_file != NULL;
    g->facts.has_trace_library = ep_trace_load(NULL);
    g->facts.has_lttng = is_on_path("lttng-sessiond");
    ep_err err = ep_cli_control_open(connect, &control, out_error);
    if (err == EP_OK && connect->coordinator_url != NULL) {
        err = ask_coordinator(control, connect, g, out_error);
    } else if (err == EP_OK) {
        err = ep_cli_node_list_from_urls(connect->node_urls, connect->node_urls_count, &g->nodes,
                                         out_error);
    }
    err = err != EP_OK ? err : ask_nodes(control, connect, g, out_error);
    ep_cli_control_close(control);
    return err;
}

static void gathered_fini(gathered *g)
{
    protobuf_c_message_free_unpacked(g->cluster, NULL);
    ep_cli_node_list_free(&g->nodes);
    free(g->looks);
}

static bool print_json(const ep_doctor_findings *findings)
{
    json_t *list = json_array();
    for (size_t i = 0; i < findings->count; i++) {
        const ep_doctor_finding *finding = &findings->list[i];
        json_array_append_new(list, json_pack("{s:s, s:o, s:o, s:o}", "severity",
                                              ep_doctor_severity_words[finding->severity], "code",
                                              ep_cli_json_text(finding->code), "text",
                                              ep_cli_json_text(finding->text), "advice",
                                              ep_cli_json_text(finding->advice)));
    }
    return ep_cli_json_print(json_pack("{s:b, s:o, s:I}", "healthy", !ep_doctor_is_ill(findings),
                                       "findings", list, "dropped", (json_int_t)findings->dropped),
                             stdout);
}

/* Prints a finding in one line; on a terminal the advice gets a line of its own. */
static void print_finding(const ep_doctor_finding *finding, bool is_terminal)
{
    const char *severity = ep_doctor_severity_words[finding->severity];
    if (is_terminal && finding->advice[0] != '\0') {
        ep_cli_line(stdout, "%-7s  %s", severity, finding->text);
        ep_cli_line(stdout, "%-7s  Do: %s", "", finding->advice);
    } else {
        ep_cli_line(stdout, "%-7s  %s%s%s", severity, finding->text,
                    finding->advice[0] != '\0' ? ". Do: " : "", finding->advice);
    }
}

static bool print_lines(const ep_doctor_findings *findings)
{
    const bool is_terminal = ep_screen_of(STDOUT_FILENO).columns > 0;
    for (int severity = EP_DOCTOR_ERROR; severity >= EP_DOCTOR_INFO; severity--) {
        for (size_t i = 0; i < findings->count; i++) {
            const ep_doctor_finding *finding = &findings->list[i];
            if ((int)finding->severity == severity) {
                print_finding(finding, is_terminal);
            }
        }
    }
    if (findings->dropped > 0) {
        ep_cli_line(stdout, "%zu findings more", findings->dropped);
    }
    if (!ep_doctor_is_ill(findings)) {
        printf("healthy\n");
    }
    return ferror(stdout) == 0;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    static ep_doctor_findings findings;
    ep_doctor_ascend_facts ascend;
    gathered g = {.cluster = NULL};
    bool wants_ascend = false;
    ep_cli_settings_say(call->program, ep_cli_connect_url(&ep_cli_peer));
    for (size_t i = 0; i < wanted.files_count; i++) {
        wants_ascend |= ep_doctor_check_config(wanted.files[i], wanted.program, &findings);
    }
    ep_doctor_ascend_look("", getenv("ASCEND_HOME_PATH"), getenv("LD_LIBRARY_PATH"), &ascend);
    ep_doctor_ascend_examine(&ascend, wants_ascend, &findings);
    ep_err err = gather(&g, out_error);
    if (err == EP_OK) {
        ep_doctor_examine(&g.facts, &findings);
        bool good =
            ep_cli_output_format == EP_CLI_JSON ? print_json(&findings) : print_lines(&findings);
        call->failed = !good || ep_doctor_is_ill(&findings);
    }
    gathered_fini(&g);
    return err;
}

const ep_cli_command ep_cli_doctor = {
    .name = "doctor",
    .help = "what is wrong with the service, and what to do",
    .doc = "Looks for what is wrong with the service and says what to do, one finding a line. Exit "
           "code 0 when nothing is wrong (information may be printed), 1 when there are warnings "
           "or errors, also when nobody answers."
           "\vChecked are: that coordinator and nodes answer, and what stands there otherwise "
           "(another kind of port, TLS or not, tokens); that there is a routing table with every "
           "copy that is wanted; nodes that are silent, draining, degraded or loading for long; "
           "experts that could not be loaded; budgets that are nearly used up; versions, numerics "
           "ids, clocks and epochs that differ; doors that are open to anybody; whether token "
           "batches can be traced from this host; and, for a configuration with backend ascend, "
           "driver, device nodes, their group, and where CANN and its libraries are.\n\n"
           "Examples:\n"
           "  expertctl doctor\n"
           "  expertctl doctor --node tcp://10.0.0.7:7420 -o json\n"
           "  expertctl doctor --config /etc/expertd/expertd.yaml\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows)},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options},
    .run = run,
};
