/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl tune: measures from which size on prefill is faster, and suggests a value for the
 * policy. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "command_table.h"
#include "connect.h"
#include "moe/flow.h"
#include "moe/routing_table.h"
#include "placement.h"
#include "plan_machine.h"
#include "tune.h"

#define ROUNDS_DEFAULT 9
#define MEASURE_US_DEFAULT 100000u
#define MEASURE_US_MIN 1000u
#define MEASURE_US_MAX 60000000u
#define POLICY_TOKENS_MAX 65536 /* of decode_tokens_max */

static const uint32_t tokens_default[] = {1, 16, 32, 64, 128, 256, 512, 1024};
/* as ep_cli_tune_winner */
static const char *const winner_words[] = {"within noise", "decode", "prefill"};

static struct {
    ep_cli_bench_request request;
    uint32_t rounds;
    size_t count;
    ep_cli_tune_size sizes[EP_CLI_TUNE_SIZES_MAX];
    ep_cli_tune_verdict verdicts[EP_CLI_TUNE_SIZES_MAX];
    ep_plan_machine machine;
    ep_error machine_why; /* why there is no machine; code EP_OK: there is one */
} wanted = {.request = {.threads = 1, .duration_us = MEASURE_US_DEFAULT, .seed = 1},
            .rounds = ROUNDS_DEFAULT};
static bool has_layer;

/* "16,64,256" */
static void take_tokens(struct argp_state *state, const char *option, char *arg)
{
    wanted.count = 0;
    for (const char *at = arg; at != NULL;) {
        char text[16];
        const char *comma = strchr(at, ',');
        const size_t bytes = comma != NULL ? (size_t)(comma - at) : strlen(at);
        snprintf(text, sizeof(text), "%.*s",
                 bytes < sizeof(text) ? (int)bytes : (int)sizeof(text) - 1, at);
        const uint32_t tokens = (uint32_t)ep_cli_arg_whole(
            state, option, text, 1,
            EP_TOKENS_MAX < POLICY_TOKENS_MAX ? EP_TOKENS_MAX : POLICY_TOKENS_MAX);
        if (wanted.count == EP_CLI_TUNE_SIZES_MAX ||
            (wanted.count > 0 && tokens <= wanted.sizes[wanted.count - 1].tokens)) {
            wanted.count = 0;
            break;
        }
        wanted.sizes[wanted.count++].tokens = tokens;
        at = comma != NULL ? comma + 1 : NULL;
    }
    if (wanted.count < 2) {
        argp_error(state, "%s is '%s', allowed: 2..%d ascending sizes, as 16,64,256", option, arg,
                   EP_CLI_TUNE_SIZES_MAX);
    }
}

static const ep_cli_option rows[] = {
    {"model", 0, "NAME", "The model (required)", 1, .text = &wanted.request.model,
     .max = EP_MODEL_NAME_BYTES - 1, .required = true},
    {"version", 0, "V", "Version of the model (default: the service's default for it)", 1,
     .text = &wanted.request.version, .max = EP_VERSION_BYTES - 1},
    {"layer", 0, "L", "The MoE layer (required)", 1, .u32 = &wanted.request.layer,
     .max = UINT32_MAX, .given = &has_layer, .required = true},
    {"tokens", 0, "T,T...", "Sizes of a batch, ascending (default: 1,16,32,64,128,256,512,1024)", 2,
     .take = take_tokens},
    {"rounds", 0, "N", "How often each size is measured in both modes (default: 9)", 2,
     .u32 = &wanted.rounds, .min = EP_CLI_TUNE_ROUNDS_MIN, .max = EP_CLI_TUNE_ROUNDS_MAX},
    {"seconds", 0, "TIME", "How long each time (default: 100ms)", 2,
     .u64 = &wanted.request.duration_us, .unit = EP_UNIT_US, .plain = EP_UNIT_S,
     .min = MEASURE_US_MIN, .max = MEASURE_US_MAX},
    {"threads", 0, "N", "Callers at once (default: 1)", 2, .u32 = &wanted.request.threads, .min = 1,
     .max = EP_CLI_BENCH_THREADS_MAX},
    {"seed", 0, "S", "Of the random batches (default: 1)", 2, .u64 = &wanted.request.seed,
     .max = UINT64_MAX},
};

/* Measures one mode at one size: the median of its calls, and the node's part of that. */
static ep_err measure(ep_client *client, const ep_layer_desc *layer, uint32_t tokens,
                      ep_moe_mode mode, double *out_us, double *out_compute_us, ep_error *out_error)
{
    ep_cli_bench_request request = wanted.request;
    ep_cli_bench_result result = {0};
    request.tokens = tokens;
    request.mode = mode;
    ep_err err = ep_cli_bench_run(client, &request, layer, &result, out_error);
    if (err == EP_OK) { /* no call takes less than a microsecond */
        const uint64_t us = ep_latency_percentile(&result.latency, 50);
        *out_us = us > 0 ? (double)us : 1;
        *out_compute_us = *out_us * (double)result.compute_us /
                          (double)(result.total_us > 0 ? result.total_us : 1);
    }
    ep_latency_fini(&result.latency);
    return err;
}

/* The mode that goes first alternates, so that warming up or slowing down affects both alike. */
static ep_err measure_all(ep_client *client, const ep_layer_desc *layer, ep_error *out_error)
{
    for (uint32_t round = 0; round < wanted.rounds; round++) {
        for (size_t s = 0; s < wanted.count; s++) {
            ep_cli_tune_size *size = &wanted.sizes[s];
            for (uint32_t turn = 0; turn < 2; turn++) {
                const bool is_decode = (round + turn) % 2 == 0;
                ep_err err = is_decode ? measure(client, layer, size->tokens, EP_MOE_DECODE,
                                                 &size->decode_us[round],
                                                 &size->decode_compute_us[round], out_error)
                                       : measure(client, layer, size->tokens, EP_MOE_PREFILL,
                                                 &size->prefill_us[round],
                                                 &size->prefill_compute_us[round], out_error);
                if (err != EP_OK) {
                    return err;
                }
            }
            size->rounds = round + 1;
        }
    }
    return EP_OK;
}

/* Computes the figures for expertctl plan --measured from the smallest and the largest size. */
static ep_err find_machine(ep_error *out_error)
{
    const ep_cli_bench_request *request = &wanted.request;
    const size_t last = wanted.count - 1;
    const ep_cli_tune_verdict *a = &wanted.verdicts[0], *b = &wanted.verdicts[last];
    const ep_plan_measured few = {wanted.sizes[0].tokens, a->decode_us / 1e6,
                                  a->decode_compute_us / 1e6};
    const bool in_decode = b->decode_us < b->prefill_us; /* take the faster mode */
    const ep_plan_measured many = {
        wanted.sizes[last].tokens, (in_decode ? b->decode_us : b->prefill_us) / 1e6,
        (in_decode ? b->decode_compute_us : b->prefill_compute_us) / 1e6};
    ep_routing_table *table = NULL;
    uint32_t model;
    ep_err err = ep_cli_placement_read(NULL, &ep_cli_peer, &table, out_error);
    if (err != EP_OK) {
        return err;
    }
    const ep_routing_layer *layer =
        ep_routing_table_find_model(table, request->model, request->version, &model) != NULL
            ? ep_routing_table_find_layer(table, model, request->layer)
            : NULL;
    err = layer != NULL ? ep_plan_machine_fit(table, layer, &few, &many, &wanted.machine, out_error)
                        : ep_cli_placement_missing(table, request->model, request->version,
                                                   request->layer, out_error);
    ep_routing_table_unref(table);
    return err;
}

static void print_machine(void)
{
    const ep_plan_machine *m = &wanted.machine;
    char memory[EP_CLI_BRIEF_BYTES], link[EP_CLI_BRIEF_BYTES];
    if (wanted.machine_why.code != EP_OK) {
        ep_cli_line(stdout, "no figures of this machine for expertctl plan: %s",
                    wanted.machine_why.text);
        return;
    }
    ep_cli_line(stdout,
                "this machine, for expertctl plan: memory %s/s, computing %.1f G/s, link %s/s, "
                "round trip %.0f us",
                ep_cli_bytes_text((uint64_t)m->memory_bytes_per_s, memory), m->compute_per_s / 1e9,
                ep_cli_bytes_text((uint64_t)m->link_bytes_per_s, link), m->round_trip_s * 1e6);
}

static bool print(const char *program, uint32_t chosen, const char *why)
{
    ep_cli_table *table =
        ep_cli_table_create(">TOKENS|>DECODE US|>PREFILL US|>PREFILL/DECODE|>WINS|FASTER");
    json_t *sizes = json_array();
    for (size_t s = 0; s < wanted.count; s++) {
        const ep_cli_tune_verdict *verdict = &wanted.verdicts[s];
        json_array_append_new(
            sizes,
            json_pack("{s:I, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:s}", "tokens",
                      (json_int_t)wanted.sizes[s].tokens, "decode_us", verdict->decode_us,
                      "prefill_us", verdict->prefill_us, "decode_compute_us",
                      verdict->decode_compute_us, "prefill_compute_us", verdict->prefill_compute_us,
                      "prefill_over_decode", verdict->ratio, "decode_wins",
                      (json_int_t)verdict->decode_wins, "prefill_wins",
                      (json_int_t)verdict->prefill_wins, "faster", winner_words[verdict->winner]));
        ep_cli_table_cell(table, "%" PRIu32, wanted.sizes[s].tokens);
        ep_cli_table_cell(table, "%.0f", verdict->decode_us);
        ep_cli_table_cell(table, "%.0f", verdict->prefill_us);
        ep_cli_table_cell(table, "%.3f", verdict->ratio);
        ep_cli_table_cell(table, "%" PRIu32 ":%" PRIu32, verdict->decode_wins,
                          verdict->prefill_wins);
        ep_cli_table_cell(table, "%s", winner_words[verdict->winner]);
    }
    const bool has_machine = wanted.machine_why.code == EP_OK;
    bool good = ep_cli_output_print(
        table,
        json_pack("{s:I, s:I, s:o, s:o, s:s*, s:o, s:o*}", "rounds", (json_int_t)wanted.rounds,
                  "wins_needed", (json_int_t)ep_cli_tune_wins_needed(wanted.rounds), "sizes", sizes,
                  "decode_tokens_max", chosen != 0 ? json_integer(chosen) : json_null(), "why", why,
                  "machine", has_machine ? ep_plan_machine_json(&wanted.machine) : json_null(),
                  "machine_why", has_machine ? NULL : ep_cli_json_text(wanted.machine_why.text)));
    if (ep_cli_output_format == EP_CLI_TABLE) {
        putchar('\n');
        print_machine();
        if (chosen != 0) {
            ep_cli_line(stdout, "expertctl policy set decode_tokens_max=%" PRIu32, chosen);
        } else {
            ep_cli_line(stderr, "%s: no suggestion: %s", program, why);
        }
    }
    return good;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_client *client = NULL;
    ep_layer_desc layer;
    const char *why = NULL;
    for (size_t s = 0; wanted.count == 0 && s < EP_ARRAY_COUNT(tokens_default); s++) {
        wanted.sizes[s].tokens = tokens_default[s];
    }
    wanted.count = wanted.count > 0 ? wanted.count : EP_ARRAY_COUNT(tokens_default);
    wanted.request.deadline_us = ep_cli_peer.timeout_us;
    ep_err err = ep_cli_connect_client(&ep_cli_peer, &client, out_error);
    err = err != EP_OK ? err : ep_cli_bench_find_layer(client, &wanted.request, &layer, out_error);
    err = err != EP_OK ? err : measure_all(client, &layer, out_error);
    ep_client_destroy(client);
    if (err != EP_OK) {
        return err;
    }
    for (size_t s = 0; s < wanted.count; s++) {
        ep_cli_tune_judge(&wanted.sizes[s], &wanted.verdicts[s]);
    }
    ep_error_clear(&wanted.machine_why);
    (void)find_machine(&wanted.machine_why);
    const uint32_t chosen = ep_cli_tune_choose(wanted.sizes, wanted.verdicts, wanted.count, &why);
    call->failed = !print(call->program, chosen, why) || chosen == 0;
    return EP_OK;
}

const ep_cli_command ep_cli_tune = {
    .name = "tune",
    .help = "measures where prefill is the faster mode, and suggests a policy",
    .args = "--model NAME --layer L",
    .doc = "Measures at which size of a batch prefill becomes the faster mode, and suggests "
           "decode_tokens_max for the service's policy."
           "\vBoth modes are measured in turn, round by round. WINS are the rounds that decode and "
           "prefill won; one of them is called the faster only where equal modes would not look so "
           "in 19 of 20 times, and by more than 2 %. The suggestion is the largest size measured "
           "at which prefill does not win. Where the figures do not tell, there is none, and the "
           "exit code is 1. Nothing is changed.\n\n"
           "From the smallest and the largest size it also works out the figures of the machine "
           "for expertctl plan --measured. The layer must be on one node then, and the sizes go "
           "from 1 to 32 tokens for each expert and slot.\n\n"
           "It puts load on the service, and other load is noise to it. It says nothing of "
           "hedge_permille: what hedges gain depends on nodes that are slow now and then, which a "
           "short quiet run does not show.\n\n"
           "Examples:\n"
           "  expertctl tune --model demo --layer 0\n"
           "  expertctl tune --model demo --layer 0 --tokens 64,128,256,512,1024,2048 \\\n"
           "      --seconds 500ms --threads 4\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows)},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options, &ep_cli_numerics_options},
    .run = run,
};
