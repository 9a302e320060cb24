/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Variables and contexts of expertctl itself, without a service: whom a call wants to reach is in
 * its error, since nobody listens on the ports 1 to 9 of loopback.
 */
#include <criterion/criterion.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/process.h"

#define TIMEOUT_MS 60000
#define ANY_CODE (-100) /* a coordinator may run where the default is */
#define TO(port) "tcp://127.0.0.1:" #port

static char dir[EP_TEST_PATH_BYTES];
static char file[EP_TEST_PATH_BYTES + 64];
static char config_home[EP_TEST_PATH_BYTES + 32];

static void setup(void)
{
    cr_assert(ep_test_dir_create(dir));
    cr_assert_eq(chdir(dir), 0);
    snprintf(config_home, sizeof(config_home), "XDG_CONFIG_HOME=%s/config", dir);
    snprintf(file, sizeof(file), "%s/config/expertctl/contexts.yaml", dir);
}

static void teardown(void)
{
    cr_assert_eq(chdir("/"), 0);
    ep_test_dir_remove(dir);
}

TestSuite(context, .init = setup, .fini = teardown, .timeout = 120);

/* environment: variables parted by blanks. Returns the exit code; *out_text: what was printed. */
static int run(const char *environment, const char *args, char **out_text)
{
    const char *variables[16] = {config_home, "EXPERTCTL_CONTEXT="};
    size_t count = 2;
    char *copy = strdup(environment);
    for (char *rest = copy, *word; (word = strsep(&rest, " ")) != NULL;) {
        if (strncmp(word, "EXPERTCTL_CONTEXT=", 18) == 0) {
            variables[1] = word;
        } else if (word[0] != 0) {
            variables[count++] = word;
        }
    }
    int code =
        ep_test_process_run_line(dir, EP_EXPERTCTL, variables, TIMEOUT_MS, out_text, "%s", args);
    free(copy);
    return code;
}

static void expect(const char *environment, const char *args, int code, const char *part)
{
    char *text = NULL;
    int got = run(environment, args, &text);
    cr_expect(got == code || code == ANY_CODE, "%s expertctl %s: exit code %d, expected %d: %s",
              environment, args, got, code, text);
    cr_expect(strstr(text, part) != NULL, "%s expertctl %s: no '%s' in: %s", environment, args,
              part, text);
    free(text);
}

static void expect_without(const char *environment, const char *args, const char *part)
{
    char *text = NULL;
    run(environment, args, &text);
    cr_expect(strstr(text, part) == NULL, "%s expertctl %s: '%s' is in: %s", environment, args,
              part, text);
    free(text);
}

static char *file_text(void)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *in = fopen(file, "r");
    cr_assert_not_null(in, "%s", file);
    cr_assert_geq(getdelim(&text, &bytes, '\0', in), 0);
    fclose(in);
    return text;
}

static void write_contexts(const char *text)
{
    char folder[sizeof(file)];
    snprintf(folder, sizeof(folder), "%s/config", dir);
    mkdir(folder, 0700);
    snprintf(folder, sizeof(folder), "%s/config/expertctl", dir);
    mkdir(folder, 0700);
    cr_assert(ep_test_write_file(file, text, 0600));
}

Test(context, every_flag_has_a_variable_and_the_flag_beats_it)
{
    expect("EXPERTCTL_COORDINATOR=" TO(2), "status", 3, TO(2));
    expect("EXPERTCTL_COORDINATOR=", "status", ANY_CODE, TO(7410));
    expect("EXPERTCTL_COORDINATOR=" TO(2), "status --coordinator " TO(3), 3, TO(3));
    expect("EXPERTCTL_COORDINATOR=" TO(2), "status --coord=" TO(3), 3, TO(3));
    expect("EXPERTCTL_ADMIN=" TO(4), "drain n", 3, "expertctl drain: " TO(4));
    expect("EXPERTCTL_ADMIN=" TO(4), "model default m 2", 3, TO(4));
    expect("EXPERTCTL_NODE=" TO(5) "," TO(6), "rpc list", 2, "--node is given 2 times");
    expect("EXPERTCTL_NODE=" TO(5) "," TO(6), "rpc list --node " TO(7), 3, TO(7));
    expect("EXPERTCTL_NODE=" TO(5), "status --coordinator " TO(3), 3, TO(3));
    expect("EXPERTCTL_COORDINATOR=" TO(2), "status --node " TO(5), 3, TO(5));
    expect("EXPERTCTL_WAIT=true EXPERTCTL_UNDO=true", "drain n --admin " TO(4), 2,
           "--wait and --undo are both given");
    expect("EXPERTCTL_WAIT=false EXPERTCTL_UNDO=true", "drain n --admin " TO(4), 3, TO(4));
    expect("EXPERTCTL_MODEL=m EXPERTCTL_LAYER=0 EXPERTCTL_IN=/nope", "forward --out o", 1, "/nope");
    expect("EXPERTCTL_OUTPUT=json", "context list", 0, "[]");
    expect("EXPERTCTL_OUTPUT=json", "context list -o table", 0, "SERVICE");
    /* A file is no form of output. */
    expect("EXPERTCTL_OUTPUT=json", "trace export /nope --format html", 2, "--output is missing");
    /* A flag that is given makes its variable's value not matter. */
    expect("EXPERTCTL_TIMEOUT=soon", "status --timeout 1s --coordinator " TO(3), 3, TO(3));
}

Test(context, a_wrong_variable_names_itself)
{
    static const struct {
        const char *variable;
        const char *args;
        const char *says;
    } rows[] = {
        {"EXPERTCTL_COORDINATOR=there", "status",
         "expertctl status: EXPERTCTL_COORDINATOR is 'there', allowed: tcp://host:port"},
        {"EXPERTCTL_TIMEOUT=3x", "status", "EXPERTCTL_TIMEOUT is '3x', allowed: 1ms..24h"},
        {"EXPERTCTL_OUTPUT=xml", "status", "EXPERTCTL_OUTPUT is 'xml', allowed: table, json"},
        {"EXPERTCTL_LAYER=-1", "table", "EXPERTCTL_LAYER is '-1', allowed: a whole number"},
        {"EXPERTCTL_TOKEN_FILE=/nonexistent", "status",
         "EXPERTCTL_TOKEN_FILE /nonexistent cannot be opened"},
        {"EXPERTCTL_WAIT=1", "drain n", "EXPERTCTL_WAIT is '1', allowed: true, false"},
        {"EXPERTCTL_NODE=" TO(5) ",x", "status", "EXPERTCTL_NODE is 'x', allowed"},
        {"EXPERTCTL_NODE=" TO(5) " EXPERTCTL_COORDINATOR=" TO(2), "status",
         "EXPERTCTL_COORDINATOR " TO(2) " and EXPERTCTL_NODE " TO(5) " are both given"},
        {"EXPERTCTL_ADMIN=h:1", "reload", "EXPERTCTL_ADMIN is 'h:1', allowed"},
        {"EXPERTCTL_TEMPERATURE=nan", "generate", "EXPERTCTL_TEMPERATURE is 'nan', allowed"},
        {"EXPERTCTL_CONTEXT=x", "status",
         "EXPERTCTL_CONTEXT: there is no context 'x', there are: none"},
        {"EXPERTCTL_TOKEN_FILE=\xff", "status", "environment EXPERTCTL_TOKEN_FILE: token_file: '"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        expect(rows[i].variable, rows[i].args, 2, rows[i].says);
    }
}

Test(context, a_misspelt_variable_is_warned_of)
{
    expect("EXPERTCTL_COORDINATR=" TO(2), "status --coordinator " TO(3), 3,
           "expertctl status: warning: environment EXPERTCTL_COORDINATR names no option and is "
           "ignored; did you mean EXPERTCTL_COORDINATOR?");
    /* One of another command is none. */
    expect_without("EXPERTCTL_CHECKPOINT=/c EXPERTCTL_CONFIG=/f.yaml EXPERTCTL_COORDINATOR=" TO(2),
                   "status", "warning");
    expect_without("EXPERTCTL_COORDINATR=x", "status --help", "warning");
}

Test(context, a_context_stands_below_flags_and_variables)
{
    cr_assert(ep_test_write_file("token", "0123456789abcdef\n", 0600));
    expect("",
           "context add staging --coordinator " TO(1) " --admin " TO(2) " --token-file token --use",
           0, "context staging is in use");
    expect("", "context add production --coordinator " TO(3) " --admin " TO(4) " --timeout 90s", 0,
           "is kept");
    expect("", "status", 3, "expertctl status: context staging, " TO(1) "\n");
    expect("", "status --context production", 3, "context production, " TO(3) "\n");
    expect("EXPERTCTL_CONTEXT=production", "status", 3, "context production, " TO(3) "\n");
    expect("EXPERTCTL_CONTEXT=production", "status --context staging", 3,
           "context staging, " TO(1) "\n");
    expect_without("", "status --context none", "context");
    expect_without("EXPERTCTL_CONTEXT=none", "status", TO(1));
    /* Only what is named is another's, and that is said. */
    expect("", "status --coordinator " TO(5), 3,
           "context staging, " TO(5) " (not from it: --coordinator)\n");
    expect("", "status --node " TO(5), 3, "context staging, " TO(5) " (not from it: --node)\n");
    expect("EXPERTCTL_COORDINATOR=" TO(6), "status", 3,
           "context staging, " TO(6) " (not from it: EXPERTCTL_COORDINATOR)\n");
    expect("EXPERTCTL_COORDINATOR=" TO(6), "status --context production", 3,
           "context production, " TO(6) " (not from it: EXPERTCTL_COORDINATOR)\n");
    expect("EXPERTCTL_TOKEN_FILE=token", "status --coordinator " TO(5) " --timeout 1s", 3,
           "(not from it: --coordinator, EXPERTCTL_TOKEN_FILE)\n");
    /* Who changes a cluster is told which. */
    expect("", "drain n", 3, "expertctl drain: context staging, " TO(2) "\n");
    expect("", "reload --context production", 3,
           "expertctl reload: context production, " TO(4) "\n");
    expect("", "model default m 2", 3, "expertctl model default: context staging, " TO(2) "\n");
    expect("", "config --admin " TO(7), 3, "context staging, " TO(7) " (not from it: --admin)\n");
    /* The token is the context's, read where the context was added. */
    cr_assert_eq(chdir("/"), 0);
    char token[sizeof(file)];
    snprintf(token, sizeof(token), "%s/token", dir);
    cr_assert_eq(unlink(token), 0);
    expect("", "status", 2, "token-file of context staging (file ");
    /* It is for the context's own addresses: with another one the missing file is not even read. */
    expect("", "status --coordinator " TO(1), 2, "token-file of context staging (file ");
    expect(
        "", "status --coordinator " TO(5), 3,
        "context staging does not name " TO(5) ": its token is not shown there; --token-file FILE");
    expect("EXPERTCTL_NODE=" TO(1) "," TO(6), "status", 3,
           "context staging does not name " TO(1) "," TO(6));
    expect("", "status --coordinator " TO(5) " --token-file none", 2,
           "--token-file none cannot be opened");
    expect_without("", "status --coordinator " TO(5) " --context none", "token");
    write_contexts("current: a\ncontexts:\n  - {name: a, coordinator: " TO(1) ", admin: " TO(
        2) ", admin_token_file: /none}\n");
    expect("", "drain n", 2, "admin-token-file of context a (file ");
    expect(
        "", "drain n --admin " TO(7), 3,
        "context a does not name " TO(7) ": its token is not shown there; --admin-token-file FILE");
}

Test(context, a_context_without_what_a_command_needs_is_not_filled_up)
{
    write_contexts("current: a\ncontexts:\n  - name: a\n    token_file: /t\n");
    expect("", "drain n", 2, "--admin is missing; context a names none");
    expect("", "table", 2, "context a names neither coordinator nor node");
    write_contexts("current: a\ncontexts:\n  - {name: a, coordinator: there}\n");
    expect("", "table", 2, "coordinator of context a (file ");
    expect("", "table", 2, "contexts.yaml:3) is 'there', allowed: tcp://host:port");
    expect("", "context show", 0, "contexts.yaml:3) is 'there', allowed: tcp://host:port");
    write_contexts("contexts:\n  - {name: a, node: '" TO(
        1) ",tcp://b:99999'}\n  - {name: b, coordinator: " TO(1) ", admin: x}\n");
    expect("", "context list", 0, "node of context a (file ");
    expect("", "context list", 0, "contexts.yaml:2) is 'tcp://b:99999', allowed: ");
    expect("", "context list", 0, "admin of context b (file ");
    expect_without("", "context list --names", "warning");
    expect_without("", "context list", "coordinator of context b");
}

Test(context, the_list_marks_the_one_in_use)
{
    expect("", "context list", 0, "USED  NAME  SERVICE  ADMIN\n");
    expect("", "context add a --node " TO(1) " --node " TO(2), 0,
           "context use a takes it into use");
    expect("", "context add b --coordinator " TO(3) " --no-payload-crc --use", 0,
           "context b is in use");
    expect("", "context list", 0, "\n      a     " TO(1) "," TO(2) "  -\n*     b     " TO(3));
    expect("EXPERTCTL_CONTEXT=a", "context list", 0, "\n*     a ");
    expect("EXPERTCTL_CONTEXT=none", "context list", 0, "\n      b ");
    expect("", "context list --names", 0, "a\nb\n");
    expect("", "context list -o json", 0, "\"used\": true");
    expect("", "context show", 0, "no-payload-crc  true\n");
    expect("", "context show a", 0, TO(1) "," TO(2) "\n");
    expect("", "context add twice --coordinator " TO(1) " --timeout 2s --timeout=3s", 0, "kept");
    expect("", "context show twice", 0, "timeout      3s\n");
    expect("", "context remove twice", 0, "forgotten\n");
    expect("", "context show c", 1, "there is no context 'c', there are: a, b");
    expect("", "context use c", 1, "there is no context 'c', there are: a, b");
    expect("", "status --context c", 2,
           "expertctl status: --context: there is no context 'c', there are: a, b");
    expect("EXPERTCTL_CONTEXT=b", "context use a", 0, "EXPERTCTL_CONTEXT is set and picks b");
    expect("", "context remove b", 0, "context b is forgotten\n");
    expect("", "context list --names", 0, "a\n");
    expect("", "context remove a", 0, "no context is in use: commands go to tcp://127.0.0.1:7410");
    expect("", "context show", 1, "no context is in use");
    expect_without("", "context list --names", "a\n");
}

Test(context, add_keeps_what_is_given_and_nothing_else)
{
    struct stat st;
    cr_assert(ep_test_write_file("token", "secret-0123456789\n", 0600));
    umask(0);
    expect("EXPERTCTL_TOKEN_FILE=/of/another EXPERTCTL_ADMIN=" TO(9),
           "context add a --coordinator " TO(1) " --token-file token", 0, "kept");
    cr_assert_eq(stat(file, &st), 0);
    cr_expect_eq(st.st_mode & 07777, 0600);
    char *text = file_text();
    char path[sizeof(file)];
    snprintf(path, sizeof(path), "token_file: \"%s/token\"\n", dir);
    cr_expect(strstr(text, path) != NULL, "%s", text);
    cr_expect(strstr(text, "secret") == NULL && strstr(text, "admin") == NULL, "%s", text);
    free(text);
    expect("", "context add a --coordinator " TO(2), 1,
           "context a exists; expertctl context remove a first");
    expect("", "context add", 2, "the name is missing");
    expect("", "context add b", 2, "--coordinator is missing");
    expect("", "context add none --coordinator " TO(1), 2,
           "the name is 'none', allowed: 1..63 letters");
    expect("", "context add a/b --coordinator " TO(1), 2, "the name is 'a/b'");
    expect("", "context add -x --coordinator " TO(1), 2, "invalid option");
    expect("", "context add b c --coordinator " TO(1), 2, "unexpected argument 'c'");
    expect("", "context add b --coordinator http://h", 2, "--coordinator is 'http://h', allowed");
    expect("", "context add b --coordinator tls+tcp://h:1", 2,
           "needs --tls-ca and --tls-server-name");
    expect("", "context add b --coordinator " TO(1) " --admin tls+tcp://h:1", 2,
           "needs --tls-ca and --tls-server-name");
    expect("", "context add b --coordinator " TO(1) " --token-file nope", 2, "cannot be opened");
    expect("", "context add b --coordinator " TO(1) " --tls-ca nope", 1,
           "--tls-ca nope: No such file");
    expect("", "context add b --coordinator " TO(1) " --context a", 2, "--context");
    expect("", "context add b --coordinator " TO(1) " --tls-server-name a\tb", 1,
           "has a control character");
    expect("", "context list --names", 0, "a\n");
}

/* A file that is wrong is refused with its line, by whoever reads it, and stays as it is. */
Test(context, a_damaged_file_is_refused_and_not_written_over)
{
    static const struct {
        const char *text;
        const char *says;
    } rows[] = {
        {"contexts:\n  - name: a\n    coordinatr: tcp://h:1\n",
         "contexts.yaml:3: unknown key 'coordinatr'; did you mean 'coordinator'?"},
        {"current: a\ncontexts: []\n", "contexts.yaml:1: current: there is no context 'a'"},
        {"contexts:\n  - {name: a}\n  - {name: a}\n",
         "contexts.yaml:3: contexts[1].name: 'a' is given twice"},
        {"contexts:\n  - {name: none}\n", "contexts.yaml:2: contexts[0].name: 'none' is no name"},
        {"contexts:\n  - {name: a, no_payload_crc: yes}\n",
         "contexts.yaml:2: contexts[0].no_payload_crc: 'yes' is not a truth value"},
        {"contexts:\n  - coordinator: tcp://h:1\n", "contexts.yaml:2: contexts[0] has no name"},
        {"contexts: {\n", "contexts.yaml:2: column 1: not YAML"},
        {"current: [a]\n", "contexts.yaml:1: current: a single value is expected"},
        {"\x01\x02", "contexts.yaml:1: column 1: not YAML"},
        {"{\"current\": 5}\n", "contexts.yaml:1: current: there is no context '5'"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        write_contexts(rows[i].text);
        expect("", "status", 2, rows[i].says);
        expect("", "context list", 1, rows[i].says);
        expect("", "context add b --coordinator " TO(1), 1, rows[i].says);
        expect("", "context use a", 1, rows[i].says);
        expect("", "context remove a", 1, rows[i].says);
        char *text = file_text();
        cr_expect_str_eq(text, rows[i].text, "row %zu", i);
        free(text);
        expect("", "status --help", 0, "Usage: expertctl status");
        expect("", "status --context none --coordinator " TO(2), 3, TO(2));
    }
    write_contexts("contexts: []\n");
    cr_assert_eq(chmod(file, 0620), 0);
    expect("", "status", 2, "contexts.yaml has mode 0620, allowed: writable by its owner only");
}

Test(context, a_link_stays_one_and_there_are_no_leftovers)
{
    char *text = NULL;
    struct stat st;
    write_contexts("contexts:\n  - {name: a, coordinator: \"tcp://h:1\"}\n");
    cr_assert_eq(rename(file, "real.yaml"), 0);
    cr_assert_eq(symlink("../../real.yaml", file), 0);
    expect("", "context use a", 0, "context a is in use");
    cr_assert_eq(lstat(file, &st), 0);
    cr_expect(S_ISLNK(st.st_mode));
    text = file_text();
    cr_expect(strstr(text, "current: \"a\"\n") != NULL, "%s", text);
    free(text);
    glob_t found;
    cr_expect_eq(glob("real.yaml.*", 0, NULL, &found), GLOB_NOMATCH);
}
