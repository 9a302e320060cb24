/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl, a real node and the oracle's programs: equal bytes. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "model/safetensors_writer.h"
#include "support/process.h"

#define DEMO EP_SOURCE_DIR "/deploy/demo-model/checkpoint"
#define TIMEOUT_MS 120000
enum {
    TOKENS_MAX = 64,
    HIDDEN = 128,
    EXPERTS = 16,
    TOP_K = 2,
    LINE_BYTES = 2048,
    STATUS_TRIES_MAX = 2000
};

/* expertctl with a line of printf's. */
#define CTL(out_text, ...)                                                                         \
    ep_test_process_run_line(dir, EP_EXPERTCTL, NULL, TIMEOUT_MS, (out_text), __VA_ARGS__)

static char dir[EP_TEST_PATH_BYTES];
static ep_test_process node;

static char *path_of(const char *name)
{
    char *path = NULL;
    cr_assert_geq(asprintf(&path, "%s/%s", dir, name), 0);
    return path;
}

/* The port is open before the weights are loaded: ask until the node says that it serves. */
static void wait_serving(const char *token_file)
{
    int code = 1;
    for (int i = 0; i < STATUS_TRIES_MAX && code != 0; i++) {
        code = CTL(NULL, "status --node %s %s%s", node.rpc_url,
                   token_file != NULL ? "--token-file " : "", token_file != NULL ? token_file : "");
    }
    cr_assert_eq(code, 0, "the node does not serve");
}

static void start_node(void)
{
    static const char *const args[] = {
        "--listen=tcp://127.0.0.1:0", "--probe-address=", "--admin-listen=",
        "--model=demo=" DEMO,         "--node-name=n1",   NULL};
    cr_assert(ep_test_dir_create(dir));
    cr_assert(ep_test_process_start(&node, dir, "node", EP_EXPERTD, args, NULL, true));
    cr_assert(ep_test_process_wait_ports(&node, TIMEOUT_MS));
    wait_serving(NULL);
}

static void stop_node(void)
{
    ep_test_process_destroy(&node);
    ep_test_dir_remove(dir);
}

static void run(const char *program, const char *line)
{
    char *text = NULL;
    int code = ep_test_process_run_line(dir, program, NULL, TIMEOUT_MS, &text, "%s", line);
    cr_assert_eq(code, 0, "%s %s: exit code %d: %s", program, line, code, text);
    free(text);
}

Test(against_reference, generated_text, .init = start_node, .fini = stop_node, .timeout = 280)
{
    static const char *const settings[][2] = {
        {"0.7", "1"}, {"0", "5"}, {"1.3", "18446744073709551615"}};
    char *ours = path_of("ours");
    char *theirs = path_of("theirs");
    char *report = path_of("report");
    for (size_t i = 0; i < 3; i++) {
        char line[LINE_BYTES];
        snprintf(line, sizeof(line),
                 "--model " DEMO " --prompt 'The file ' --bytes 40 --temperature %s --seed %s "
                 "--out %s",
                 settings[i][0], settings[i][1], theirs);
        run(EP_REF_GENERATE, line);
        snprintf(line, sizeof(line),
                 "generate --node %s --checkpoint " DEMO " --model demo --prompt 'The file ' "
                 "--bytes 40 --temperature %s --seed %s --out %s --report json --report-file %s",
                 node.rpc_url, settings[i][0], settings[i][1], ours, report);
        run(EP_EXPERTCTL, line);
        cr_assert(ep_test_files_equal(ours, theirs), "%s: not the bytes of the reference",
                  settings[i][0]);
        char *text = ep_test_read_file(report);
        cr_assert(strstr(text, "\"calls\": 40") && strstr(text, "\"answered\": true") &&
                      !strstr(text, "\"rows_served\": 0\n"),
                  "%s", text);
        free(text);
    }
    free(ours);
    free(theirs);
    free(report);
}

/* x bf16 [tokens,H] with random values, distinct experts, any scales; one inactive slot. */
static void write_batch(const char *path, int tokens)
{
    static uint16_t x[TOKENS_MAX * HIDDEN];
    static int32_t ids[TOKENS_MAX * TOP_K];
    static float scales[TOKENS_MAX * TOP_K];
    uint64_t state = 11;
    ep_error error;
    for (int i = 0; i < TOKENS_MAX * HIDDEN; i++) { /* 0.25..2, either sign */
        uint64_t r = ep_splitmix64(&state);
        x[i] = (uint16_t)((r & 0x8000) | (0x3e80 + (r >> 20) % 0x180));
    }
    for (int t = 0; t < TOKENS_MAX; t++) {
        int first = (int)(ep_splitmix64(&state) % EXPERTS);
        ids[2 * t] = first;
        ids[2 * t + 1] = (first + 1 + (int)(ep_splitmix64(&state) % (EXPERTS - 1))) % EXPERTS;
        scales[2 * t] = (float)(ep_splitmix64(&state) >> 40) * 0x1p-24f;
        scales[2 * t + 1] = 1.0f - scales[2 * t];
    }
    ids[7] = -1;
    const ep_named_tensor tensors[] = {
        {"x", ep_tensor_2d(x, EP_DTYPE_BF16, tokens, HIDDEN)},
        {"expert_ids", ep_tensor_2d(ids, EP_DTYPE_I32, tokens, TOP_K)},
        {"expert_scales", ep_tensor_2d(scales, EP_DTYPE_F32, tokens, TOP_K)},
    };
    cr_assert_eq(ep_safetensors_write(path, tensors, 3, NULL, 0, &error), EP_OK, "%s", error.text);
}

typedef struct forward_case {
    int tokens;
    const char *reference; /* more of each command line */
    const char *ours;
} forward_case;

static void run_case(const forward_case *c, const char *in, const char *ours, const char *theirs)
{
    char line[LINE_BYTES];
    write_batch(in, c->tokens);
    snprintf(line, sizeof(line), "--model " DEMO " --layer 2 --in %s --out %s %s", in, theirs,
             c->reference);
    run(EP_REF_FORWARD, line);
    snprintf(line, sizeof(line), "forward --node %s --model demo --layer 2 --in %s --out %s %s",
             node.rpc_url, in, ours, c->ours);
    run(EP_EXPERTCTL, line);
    cr_assert(ep_test_files_equal(ours, theirs), "%s: not the bytes of the reference", c->ours);
}

Test(against_reference, forward_files, .init = start_node, .fini = stop_node, .timeout = 280)
{
    static const forward_case cases[] = {
        {64, "", ""},
        {64, "", "--mode prefill"},
        {64, "", "--mode decode --split 1,0,2,61"},
        {64, "", "--split-tokens 7 --mode prefill"},
        {1, "", ""},
        {0, "", ""},
        {33, "--wire f32 --out-dtype f32", "--wire f32 --out-dtype f32"},
        {33, "--uncombined", "--result uncombined --split-tokens 10"},
        {33, "--weight-on-input --wire f16", "--weight-on input --wire f16"},
    };
    char *in = path_of("in");
    char *ours = path_of("ours");
    char *theirs = path_of("theirs");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        run_case(&cases[i], in, ours, theirs);
    }
    free(in);
    free(ours);
    free(theirs);
}

Test(against_reference, the_node_says_no_by_name, .init = start_node, .fini = stop_node,
     .timeout = 280)
{
    char *in = path_of("in");
    char *out = path_of("out");
    char *text = NULL;
    write_batch(in, 5);
    cr_assert_eq(CTL(&text, "forward --node %s --model other --layer 0 --in %s --out %s",
                     node.rpc_url, in, out),
                 1, "%s", text);
    cr_assert(strstr(text, "other") && strstr(text, "demo"), "%s", text);
    free(text);
    cr_assert_eq(CTL(&text, "forward --node %s --model demo --layer 0 --in %s --out %s --split 3,4",
                     node.rpc_url, in, out),
                 2, "%s", text);
    cr_assert_not_null(strstr(text, "--split adds up to 7 tokens, allowed: 5, the tokens of x in "),
                       "%s", text);
    free(text);
    FILE *file = fopen(out, "rb");
    cr_assert_null(file, "a failed call left an output file");
    cr_assert_eq(CTL(&text, "table --node %s --layer 9", node.rpc_url), 1, "%s", text);
    cr_assert_not_null(
        strstr(text, "there is no layer 9 of model 'any'; the table has demo version "), "%s",
        text);
    free(text);
    cr_assert_eq(CTL(&text, "generate --node %s --checkpoint " DEMO " --model other --prompt p",
                     node.rpc_url),
                 1, "%s", text);
    cr_assert_not_null(strstr(text, "the service has no model 'other' of version "), "%s", text);
    free(text);
    free(in);
    free(out);
}

Test(against_reference, status_table_rpc_and_bench, .init = start_node, .fini = stop_node,
     .timeout = 280)
{
    static const struct {
        const char *line;
        const char *text;
    } cases[] = {
        {"status", "\nhealthy\n"},
        {"status -o json", "\"healthy\": true"},
        {"table", "demo "},
        {"table -o json", "\"nodes_of_expert\": ["},
        {"rpc list", "NodeStatus"},
        {"rpc list -o json", "\"stream\": true"},
        {"bench --model=demo --layer=1 --tokens=3 --threads=2 --seconds=0.1", "TOKENS/S"},
        {"bench --model=demo --layer=1 --seconds=0.1 --mode=prefill -o json",
         "\"bytes_per_token\""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *text = NULL;
        int code = CTL(&text, "%s --node %s", cases[i].line, node.rpc_url);
        cr_expect_eq(code, 0, "%s: exit code %d: %s", cases[i].line, code, text);
        cr_expect_not_null(strstr(text, cases[i].text), "%s: '%s' is not in: %s", cases[i].line,
                           cases[i].text, text);
        free(text);
    }
}

static void start_guarded_node(void)
{
    char flag[EP_TEST_PATH_BYTES + 32];
    const char *const args[] = {"--listen=tcp://127.0.0.1:0",
                                "--probe-address=",
                                "--admin-listen=",
                                "--model=demo=" DEMO,
                                "--node-name=n1",
                                flag,
                                NULL};
    cr_assert(ep_test_dir_create(dir));
    char *token = path_of("token");
    char *wrong = path_of("wrong");
    snprintf(flag, sizeof(flag), "--token-file=%s", token);
    cr_assert(ep_test_write_file(token, "0123456789abcdef\n", 0600));
    cr_assert(ep_test_write_file(wrong, "fedcba9876543210\n", 0600));
    cr_assert(ep_test_process_start(&node, dir, "node", EP_EXPERTD, args, NULL, true));
    cr_assert(ep_test_process_wait_ports(&node, TIMEOUT_MS));
    wait_serving(token);
    free(token);
    free(wrong);
}

Test(against_reference, tokens, .init = start_guarded_node, .fini = stop_node, .timeout = 280)
{
    static const char *const lines[] = {"status", "bench --model=demo --layer=0 --seconds=0.05"};
    static const struct {
        const char *file; /* NULL: no token */
        int code;
        const char *text;
    } cases[] = {
        {"token", 0, ""}, {"wrong", 1, "the token is wrong"}, {NULL, 1, "the token is missing"}};
    for (size_t i = 0; i < 6; i++) {
        char *text = NULL;
        char *path = path_of(cases[i / 2].file != NULL ? cases[i / 2].file : "");
        int code = CTL(&text, "%s --node %s %s%s", lines[i % 2], node.rpc_url,
                       cases[i / 2].file != NULL ? "--token-file " : "",
                       cases[i / 2].file != NULL ? path : "");
        cr_expect_eq(code, cases[i / 2].code, "%s: exit code %d: %s", lines[i % 2], code, text);
        cr_expect_not_null(strstr(text, cases[i / 2].text), "%s: %s", lines[i % 2], text);
        cr_expect_null(strstr(text, "0123456789abcdef"), "the token was printed");
        free(text);
        free(path);
    }
}
