/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl itself without a service: help, wrong command lines with their words, exit codes. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "support/process.h"

#define TIMEOUT_MS 60000
#define TOKEN "0123456789abcdef"

static char dir[EP_TEST_PATH_BYTES];

static void make_dir(void)
{
    cr_assert(ep_test_dir_create(dir));
}

static void remove_dir(void)
{
    ep_test_dir_remove(dir);
}

TestSuite(program, .init = make_dir, .fini = remove_dir);

static int run(char **out_text, const char *line)
{
    return ep_test_process_run_line(dir, EP_EXPERTCTL, NULL, TIMEOUT_MS, out_text, "%s", line);
}

typedef struct usage_case {
    const char *line;
    int code;
    const char *text;
} usage_case;

static void expect(const char *line, int want, const char *part)
{
    char *text = NULL;
    int code = run(&text, line);
    cr_expect_eq(code, want, "%s: exit code %d, expected %d: %s", line, code, want, text);
    cr_expect_not_null(strstr(text, part), "%s: '%s' is not in: %s", line, part, text);
    cr_expect_null(strstr(text, TOKEN), "the token was printed");
    free(text);
}

static void check(const usage_case *cases, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        expect(cases[i].line, cases[i].code, cases[i].text);
    }
}

static const usage_case wrong_lines[] = {
    {"", 2, "expertctl: no command given; see expertctl --help"},
    {"fly", 2,
     "expertctl: there is no command 'fly', allowed: status table stats forward generate bench "
     "tune rpc frame trace "
     "doctor top plan drain model policy reload config context completion help"},
    {"help fly", 2, "there is no command 'fly'"},
    {"forward --model=m --layer=0 --in=x --out=y --dispatch-quant=int4", 2,
     "--dispatch-quant is 'int4', allowed: plain, int8, fp8"},
    {"forward --model=m --layer=0 --in=x --out=y --combine-quant=fp8", 2,
     "--combine-quant is 'fp8', allowed: plain, int8"},
    {"forward --model=m --layer=0 --in=x --out=y --logits=z --zero-experts=1", 2,
     "--zero-experts or --copy-experts is given with --logits"},
    {"status now", 2, "expertctl status: unexpected argument 'now', allowed: options only"},
    {"status --nope", 2, "--nope"},
    {"status -o xml", 2, "expertctl status: --output is 'xml', allowed: table, json"},
    {"status --coordinator http://h:1", 2,
     "--coordinator is 'http://h:1', allowed: tcp://host:port or tls+tcp://host:port, port "
     "1..65535, up to 255 characters"},
    {"status --node tcp://h", 2, "--node is 'tcp://h', allowed: tcp://host:port"},
    {"status --node tcp://h:", 2, "--node is 'tcp://h:', allowed"},
    {"status --node tcp://h:1 --coordinator tcp://h:2", 2,
     "--coordinator tcp://h:2 and --node tcp://h:1 are both given, allowed: one of them"},
    {"status --node tls+tcp://h:1", 2, "tls+tcp://h:1 needs --tls-ca and --tls-server-name"},
    {"status --timeout 0", 2,
     "--timeout is '0', allowed: 1ms..24h, with us, ms, s, m or h; a number alone is s"},
    {"status --timeout 25h", 2, "--timeout is '25h', allowed"},
    {"status --timeout 3M", 2, "(it is a size, not a time)"},
    {"drain n", 2, "expertctl drain: --admin is missing; it is required"},
    {"drain n m --admin tcp://h:1", 2, "unexpected argument 'm', allowed: one node"},
    {"drain --wait --undo --admin tcp://h:1", 2, "--wait and --undo are both given"},
    {"drain --timeout 2x", 2, "--timeout is '2x', allowed: 1ms..24h"},
    {"reload --admin h:1", 2, "--admin is 'h:1', allowed: tcp://host:port"},
    {"top --interval 0", 2, "--interval is '0', allowed: 100ms..1h"},
    {"top -n 65", 2, "--hottest is '65', allowed: a whole number 1..64"},
    {"doctor now", 2, "expertctl doctor: unexpected argument 'now'"},
    {"config", 2, "expertctl config: --admin is missing"},
    {"status --token-file /nonexistent", 2,
     "--token-file /nonexistent cannot be opened: No such file"},
    {"status --token-file /dev/null", 2,
     "--token-file /dev/null cannot be read, allowed: a regular file"},
    {"table --layer -1", 2, "--layer is '-1', allowed: a whole number 0..4294967295"},
    {"table --layer 1x", 2, "--layer is '1x', allowed"},
    {"forward", 2, "expertctl forward: --model is missing; it is required"},
    {"forward --model m", 2, "--layer is missing; it is required"},
    {"forward --model m --layer 0 --in i", 2, "--out is missing; it is required"},
    {"forward --model m --layer 0", 2,
     "--in and --random are both missing; one of them is required"},
    {"forward --model m --layer 0 --in i --random 4", 2,
     "--in and --random are both given, allowed: one of them"},
    {"forward --model m --layer 0 --random 4 --logits d", 2,
     "--logits and --random are both given, allowed: one of them"},
    {"forward --model m --layer 0 --in i --out o --seed 2", 2, "--seed is given without --random"},
    {"forward --random 0", 2, "--random is '0', allowed: a whole number 1..65536"},
    {"forward --mode fast", 2, "--mode is 'fast', allowed: auto, decode, prefill"},
    {"forward --wire i8", 2, "--wire is 'i8', allowed: default, bf16, f16, f32"},
    {"forward --split 1,,2", 2, "a part of --split is '', allowed: a whole number 0..65536"},
    {"forward --split 1 --split-tokens 1 --model m --layer 0 --in i --out o", 2,
     "--split and --split-tokens are both given, allowed: one of them"},
    {"forward --split-tokens 0", 2, "--split-tokens is '0', allowed: a whole number 1..65536"},
    {"generate --model m --checkpoint d", 2, "--prompt is missing; it is required"},
    {"generate --numerics ''", 2, "--numerics has 0 characters, allowed: 1..95"},
    {"generate --gateway --numerics=any --model=m --checkpoint=d --prompt=p", 2,
     "--gateway and --numerics are both given: the gateway chooses the id"},
    {"forward --gateway --numerics=any --model=m --layer=0 --random=1", 2,
     "--gateway and --numerics are both given: the gateway chooses the id"},
    {"generate --prompt ''", 2, "--prompt has 0 characters, allowed: 1..8192"},
    {"generate --temperature -1", 2, "--temperature is '-1', allowed: a number 0..1000"},
    {"generate --temperature nan", 2, "--temperature is 'nan', allowed"},
    {"generate --seed 18446744073709551616", 2,
     "--seed is '18446744073709551616', allowed: a whole number 0.."},
    {"generate --bytes +1", 2, "--bytes is '+1', allowed: a whole number 0..8192"},
    {"bench --threads 0", 2, "--threads is '0', allowed: a whole number 1..256"},
    {"bench --seconds 1e9", 2, "--seconds is '1e9', allowed: 10ms..1h"},
    {"frame encode --deadline-us 2h", 2, "--deadline-us is '2h', allowed: 0..4294967294us"},
    {"trace record --subbuf-kib 1T", 2, "--subbuf-kib is '1T', allowed: 4K..256M"},
    {"rpc", 2, "an argument is missing, allowed: list"},
    {"rpc call", 2, "unexpected argument 'call', allowed: list"},
    {"rpc list --node tcp://h:1 --node tcp://h:2", 2,
     "--node is given 2 times, allowed here: once"},
};

Test(program, wrong_command_lines)
{
    check(wrong_lines, sizeof(wrong_lines) / sizeof(wrong_lines[0]));
}

Test(program, files_that_are_not_there)
{
    static const usage_case cases[] = {
        {"forward --model m --layer 0 --in /nonexistent/x --out o", 1, "/nonexistent/x"},
        {"forward --model m --layer 0 --in /dev/null --out o", 1, "/dev/null"},
        {"generate --model m --checkpoint /nonexistent/d --prompt p", 1, "/nonexistent/d"},
        {"generate --model m --checkpoint " EP_SOURCE_DIR
         "/deploy/demo-model/checkpoint --prompt p --bytes 256",
         2,
         "--prompt has 1 bytes and --bytes is 256, allowed: a prompt of at least 1 byte, and 256 "
         "together"},
    };
    check(cases, sizeof(cases) / sizeof(cases[0]));
}

/* Port 1 of loopback: nobody listens there. */
Test(program, nobody_there_is_exit_code_3)
{
    static const usage_case cases[] = {
        {"status --coordinator tcp://127.0.0.1:1", 3, "expertctl status: tcp://127.0.0.1:1"},
        {"status --node tcp://127.0.0.1:1", 3, "tcp://127.0.0.1:1"},
        {"table --node tcp://127.0.0.1:1", 3, "tcp://127.0.0.1:1"},
        {"rpc list --node tcp://127.0.0.1:1", 3, "expertctl rpc: tcp://127.0.0.1:1"},
        {"bench --model m --layer 0 --node tcp://127.0.0.1:1", 3,
         "expertctl bench: tcp://127.0.0.1:1"},
    };
    check(cases, sizeof(cases) / sizeof(cases[0]));
}

/* What follows -- is another program's, also its --help. */
Test(program, the_environment_is_read_before_another_programs_help)
{
    static const char *const number[] = {"EXPERTCTL_SUBBUFS=3", NULL};
    char *text = NULL;
    cr_assert_eq(ep_test_process_run_line(dir, EP_EXPERTCTL, number, TIMEOUT_MS, &text,
                                          "trace record -- true --help"),
                 2, "%s", text);
    cr_assert_not_null(strstr(text, "EXPERTCTL_SUBBUFS is '3', allowed: a power of 2"), "%s", text);
    free(text);
}

Test(program, a_token_others_can_read_is_refused)
{
    char path[EP_TEST_PATH_BYTES + 16];
    char line[EP_TEST_PATH_BYTES + 64];
    snprintf(path, sizeof(path), "%s/token", dir);
    snprintf(line, sizeof(line), "status --token-file %s", path);
    cr_assert(ep_test_write_file(path, TOKEN "\n", 0644));
    expect(line, 2, "has mode 0644, allowed: 0600 or 0400");
    unlink(path);
    cr_assert(ep_test_write_file(path, "\n", 0600));
    expect(line, 2, "has 0 characters, allowed: 1..1024");
    snprintf(line, sizeof(line), "status --admin-token-file %s", path);
    expect(line, 2, "--admin-token-file");
}

Test(program, help_has_examples_and_exit_codes)
{
    static const char *const verbs[] = {"status", "table", "forward", "generate", "bench", "rpc",
                                        "doctor", "top",   "drain",   "reload",   "config"};
    char *text = NULL;
    cr_assert_eq(run(&text, "--help"), 0);
    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
        char example[64];
        char line[64];
        cr_expect_not_null(strstr(text, verbs[i]));
        snprintf(example, sizeof(example), "Examples:\n  expertctl %s", verbs[i]);
        snprintf(line, sizeof(line), "help %s", verbs[i]);
        expect(line, 0, example);
        expect(line, 0, "3 the service cannot be reached");
        snprintf(line, sizeof(line), "%s --help", verbs[i]);
        expect(line, 0, example);
    }
    free(text);
    expect("--version", 0, "expertctl ");
}

/* One table says what they take. */
Test(program, bench_and_forward_have_the_same_words)
{
    static const char *const options[] = {"--mode=", "--comm-alg=", "--combine-at="};
    char *texts[2] = {NULL, NULL};
    cr_assert_eq(run(&texts[0], "bench --help"), 0);
    cr_assert_eq(run(&texts[1], "forward --help"), 0);
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        const char *at[2] = {strstr(texts[0], options[i]), strstr(texts[1], options[i])};
        cr_assert(at[0] != NULL && at[1] != NULL, "%s is not there", options[i]);
        const size_t line = strcspn(at[0], "\n");
        cr_expect_eq(strncmp(at[0], at[1], line + 1), 0, "%.80s\n%.80s", at[0], at[1]);
    }
    free(texts[0]);
    free(texts[1]);
}
