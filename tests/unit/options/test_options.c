/* SPDX-License-Identifier: Apache-2.0 */
/* The option table: precedence, strictness, and messages that say where, what and what is
 * allowed. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "options/options.h"
#include "support/expect.h"
#include "support/process.h"

static ep_error e; /* of the last call */

#define OPTION(called, kind, says, ...)                                                            \
    {                                                                                              \
        .name = (called), .type = EP_OPTION_##kind, .help = (says), __VA_ARGS__                    \
    }

static const ep_option item_fields[] = {
    OPTION("name", STRING, "a name", .min = 1, .max = 8),
    OPTION("path", PATH, "a path", .min = 1),
    OPTION("kind", ENUM, "a kind", .allowed = "all|some", .default_text = "all"),
};
static const ep_option url_fields[] = {
    OPTION("url", STRING, "a URL", .min = 1, .max = 40),
};
static const ep_option table[] = {
    OPTION("drain_ms", MS, "How long", .min = 10, .max = 1000, .default_text = "100"),
    OPTION("limit_bytes", SIZE, "How much", .min = 1, .max = 1 << 30, .default_text = "1MiB"),
    OPTION("age_us", US, "How old", .max = 60000000, .default_text = "20ms"),
    OPTION("threads", INT, "How many", .unit = "threads", .max = 10, .default_text = "2"),
    OPTION("insecure", BOOL, "Whether", .default_text = "false"),
    OPTION("log_format", ENUM, "Which", .allowed = "text|json", .default_text = "text"),
    OPTION("node_name", STRING, "Who", .max = 16, .reloadable = true),
    OPTION("models", LIST, "Models", .min = 1, .max = 3, .fields = item_fields, .fields_count = 3,
           .flag = "model"),
    OPTION("listen", LIST, "Where", .min = 1, .fields = url_fields, .fields_count = 1,
           .default_text = "tcp://a:1"),
};
static const char *const others[] = {"PROG_OTHER_", "PROG_LEVEL=", NULL};
static const ep_options_spec spec = {.program = "prog",
                                     .env_prefix = "PROG_",
                                     .env_foreign = others,
                                     .summary = "A program.",
                                     .config_file = "/etc/prog.yaml",
                                     .options = table,
                                     .options_count = sizeof(table) / sizeof(table[0])};

static char dir[EP_TEST_PATH_BYTES];
static char file_path[EP_TEST_PATH_BYTES + 16];

static void setup(void)
{
    cr_assert(ep_test_dir_create(dir));
    snprintf(file_path, sizeof(file_path), "%s/c.yaml", dir);
}
static void teardown(void)
{
    ep_test_dir_remove(dir);
}

/* file NULL: none. flags and env NULL-terminated. */
static ep_err load(const char *file, const char *const *flags, const char *const *env,
                   ep_options **out, ep_error *error)
{
    char *argv[16] = {(char *)(uintptr_t) "prog"};
    char config[EP_TEST_PATH_BYTES + 32];
    int argc = 1;
    if (file != NULL) {
        cr_assert(ep_test_write_file(file_path, file, 0600));
        snprintf(config, sizeof(config), "--config=%s", file_path);
        argv[argc++] = config;
    }
    for (; flags != NULL && *flags != NULL; flags++) {
        argv[argc++] = (char *)(uintptr_t)*flags;
    }
    return ep_options_load(&spec, argc, argv, (char *const *)(uintptr_t)env, out, error);
}

static void count_change(void *arg, const ep_option *option)
{
    strcat(arg, option->name);
    strcat(arg, option->reloadable ? "+ " : "- ");
}

TestSuite(options, .init = setup, .fini = teardown);

Test(options, flag_beats_environment_beats_file_beats_default)
{
    ep_options *o = NULL;
    const char *env[] = {"PROG_DRAIN_MS=30", "PROG_LOG_FORMAT=json", NULL};
    const char *flags[] = {"--drain-ms=40", NULL};
    ASSERT_OK(load("drain_ms: 20\nlog_format: text\nlimit_bytes: 2KiB\n", flags, env, &o, &e), e);
    char line2[400];
    snprintf(line2, sizeof(line2), "file %s:3", file_path);
    cr_expect_eq(ep_options_number(o, "drain_ms"), 40);
    cr_expect_str_eq(ep_options_origin(o, "drain_ms"), "flag --drain-ms");
    cr_expect_str_eq(ep_options_text(o, "log_format"), "json");
    cr_expect_eq(ep_options_number(o, "log_format"), 1);
    cr_expect_str_eq(ep_options_origin(o, "log_format"), "environment PROG_LOG_FORMAT");
    cr_expect_eq(ep_options_number(o, "limit_bytes"), 2048);
    cr_expect_str_eq(ep_options_origin(o, "limit_bytes"), line2);
    cr_expect_str_eq(ep_options_origin(o, "insecure"), "default");
    cr_expect_not(ep_options_is_set(o, "node_name"));
    cr_expect_str_eq(ep_options_text(o, "node_name"), "");
    ep_options_free(o);
}

Test(options, lists_from_every_source)
{
    ep_options *o = NULL;
    ASSERT_OK(load("models:\n  - name: a\n    path: /x\n  - {name: b, path: /y, kind: "
                   "some}\nlisten: [tcp://1:1, tcp://2:2]\n",
                   NULL, NULL, &o, &e),
              e);
    cr_assert_eq(ep_options_list_count(o, "models"), 2);
    cr_expect_str_eq(ep_options_list_text(o, "models", 0, "kind"), "all");
    cr_expect_str_eq(ep_options_list_text(o, "models", 1, "path"), "/y");
    cr_expect_str_eq(ep_options_list_text(o, "models", 1, "kind"), "some");
    cr_expect_str_eq(ep_options_list_text(o, "listen", 1, "url"), "tcp://2:2");
    ep_options_free(o);

    /* flags replace the file's list */
    const char *flags[] = {"--model=c=/z=z", "--model", "d=/w", NULL};
    const char *env[] = {"PROG_LISTEN=tcp://3:3,tcp://4:4", NULL};
    ASSERT_OK(load("models:\n  - {name: a, path: /x}\n", flags, env, &o, &e), e);
    cr_assert_eq(ep_options_list_count(o, "models"), 2);
    cr_expect_str_eq(ep_options_list_text(o, "models", 0, "path"), "/z=z");
    cr_expect_str_eq(ep_options_list_text(o, "models", 1, "name"), "d");
    cr_assert_eq(ep_options_list_count(o, "listen"), 2);
    ep_options_free(o);
}

Test(options, wrong_files_are_refused_with_line_key_value_and_allowed)
{
    static const struct {
        const char *file;
        const char *parts[4]; /* each must be in the message, after the file's name */
    } cases[] = {
        {"\ndrain_ms: 3x\n",
         {":2: drain_ms", "'3x'", "not a time",
          "allowed: 10ms..1s, with us, ms, s, m or h; a number alone is ms"}},
        {"drain_ms: 5\n", {":1: drain_ms", "'5'", "out of range", "10ms..1s"}},
        {"drain_ms: 2s\n", {":1: drain_ms", "'2s'", "out of range", "10ms..1s"}},
        {"drain_ms: 1M\n", {":1: drain_ms", "'1M'", "is a size, not a time", "10ms..1s"}},
        {"drain_ms: 10.5\n", {":1: drain_ms", "'10.5'", "not a whole number of ms", "10ms..1s"}},
        {"age_us: 0.5us\n", {":1: age_us", "'0.5us'", "not a whole number of us", "0..1m"}},
        {"limit_bytes: 10s\n", {":1: limit_bytes", "'10s'", "is a time, not a size", "1..1G"}},
        {"limit_bytes: 0.3K\n", {"'0.3K'", "not a whole number of bytes"}},
        {"threads: 2K\n", {":1: threads", "'2K'", "not a whole number", "0..10 threads"}},
        {"threads: 11\n", {"'11'", "out of range", "0..10 threads"}},
        {"drain_ms: -20\n", {":1: drain_ms", "'-20'", "not a time"}},
        {"drain_ms: 1e2\n", {"'1e2'", "not a time"}},
        {"drain_ms: 99999999999999999999\n", {"out of range"}},
        {"drain_ms: 99999999999999999h\n", {"out of range"}},
        {"drain_ms:\n", {":1: drain_ms", "no value"}},
        {"drain_ms: [1]\n", {":1: drain_ms", "single value"}},
        {"insecure: flase\n", {":1: insecure", "'flase'", "true, false"}},
        {"insecure: yes\n", {"'yes'", "true, false"}},
        {"limit_bytes: 3MB\n",
         {":1: limit_bytes", "'3MB'", "not a size",
          "with K, M, G or T (powers of 1024); a number alone is bytes"}},
        {"limit_bytes: 2GiB\n", {"'2GiB'", "out of range"}},
        {"limit_bytes: 99999999TiB\n", {"out of range"}},
        {"log_format: xml\n", {":1: log_format", "'xml'", "text, json"}},
        {"node_name: aaaaaaaaaaaaaaaaaaaaa\n", {"node_name", "0..16 characters"}},
        {"node_name: \"a\\nb\"\n", {"node_name", "control character"}},
        {"drian_ms: 20\n", {":1:", "unknown key 'drian_ms'", "did you mean 'drain_ms'"}},
        {"something_else: 20\n", {":1:", "unknown key 'something_else'"}},
        {"drain_ms: 20\n\ndrain_ms: 30\n", {":3:", "drain_ms", "given twice", "line 1"}},
        {"models: 5\n", {":1: models", "a list is expected"}},
        {"models:\n  - name: a\n", {":2: models[0] has no path"}},
        {"models:\n  - {name: a, path: /x}\n  - {name: a, path: /x, kind: none}\n",
         {":3: models[1].kind", "'none'", "all, some"}},
        {"models:\n  - {name: a, pth: /x}\n", {":2:", "unknown key 'pth'", "did you mean 'path'"}},
        {"models:\n  - just text\n", {":2: models[0]", "mapping"}},
        {"models: []\n", {":1: models", "0 items", "1..3 items"}},
        {"listen: [a, b, c", {"not YAML"}},
        {"- a\n- b\n", {":1:", "key: value"}},
        {"a: b: c\n", {":1:", "not YAML"}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ep_options *o = NULL;
        ep_error_clear(&e);
        cr_expect_eq(load(cases[i].file, NULL, NULL, &o, &e), EP_ERR_BAD_CONFIG, "case %zu: %s", i,
                     cases[i].file);
        cr_expect(strstr(e.text, file_path) != NULL, "case %zu: no file in: %s", i, e.text);
        for (size_t p = 0; p < 4 && cases[i].parts[p] != NULL; p++) {
            cr_expect(strstr(e.text, cases[i].parts[p]) != NULL, "case %zu: no '%s' in: %s", i,
                      cases[i].parts[p], e.text);
        }
        ep_options_free(o);
    }
}

/* Timeout: libyaml alone takes the square of the depth or of the count of anchors. A # of piece is
 * its number. */
static void expect_bounded(const char *begin, const char *piece, size_t count, const char *said)
{
    const size_t bytes = strlen(begin) + (strlen(piece) + 20) * count + 1;
    char *text = malloc(bytes);
    cr_assert_not_null(text);
    char *at = stpcpy(text, begin);
    for (size_t i = 0; i < count; i++) {
        const size_t before = strcspn(piece, "#");
        at = mempcpy(at, piece, before);
        at = piece[before] == 0 ? at : stpcpy(at + sprintf(at, "%zu", i), piece + before + 1);
    }
    *at = 0;
    ep_options *o = NULL;
    ep_error_clear(&e);
    EXPECT_FAILS(load(text, NULL, NULL, &o, &e), EP_ERR_BAD_CONFIG, e, said);
    ep_options_free(o);
    free(text);
}

Test(options, deep_nesting_and_many_anchors_are_refused_before_they_cost_time, .timeout = 20)
{
    expect_bounded("models: ", "[", 100000, "nest deeper than 16");
    expect_bounded("models:\n  ", "- ", 100000, "nest deeper than 16");
    expect_bounded("models: ", "{a: ", 100000, "nest deeper than 16");
    expect_bounded("models:\n", "- &a# x\n", 80000, "more than 256 anchors");
    expect_bounded("models:\n", "- &a# x\n", 257, "more than 256 anchors");
    expect_bounded("models:\n", "- &a# x\n", 256, "models[0]: a mapping with name is expected");
}

Test(options, wrong_flags_and_variables_name_themselves)
{
    ep_options *o = NULL;
    const char *flag[] = {"--drain-ms=soon", NULL};
    const char *pair[] = {"--model=noequals", NULL};
    const char *env[] = {"PROG_INSECURE=1", NULL};
    const char *unknown[] = {"--drain=5x", "--nonsense", NULL};
    cr_assert_eq(load(NULL, flag, NULL, &o, &e), EP_ERR_BAD_CONFIG);
    cr_expect_str_eq(e.text, "flag --drain-ms: drain_ms: 'soon' is not a time; allowed: 10ms..1s, "
                             "with us, ms, s, m or h; a number alone is ms");
    cr_assert_eq(load(NULL, pair, NULL, &o, &e), EP_ERR_BAD_CONFIG);
    cr_expect(strstr(e.text, "flag --model") != NULL && strstr(e.text, "name=path") != NULL, "%s",
              e.text);
    cr_assert_eq(load(NULL, NULL, env, &o, &e), EP_ERR_BAD_CONFIG);
    cr_expect_str_eq(
        e.text,
        "environment PROG_INSECURE: insecure: '1' is not a truth value; allowed: true, false");
    cr_assert_eq(load(NULL, unknown, NULL, &o, &e), EP_ERR_BAD_CONFIG);
}

Test(options, unknown_variables_are_warnings_and_foreign_ones_nothing)
{
    ep_options *o = NULL;
    const char *env[] = {"PROG_SERVICE_HOST=10.0.0.1",
                         "PROG_OTHER_X=1",
                         "PROG_LEVEL=low",
                         "PROG_LEVELS=2",
                         "PATH=/bin",
                         NULL};
    ASSERT_OK(load(NULL, NULL, env, &o, &e), e);
    cr_assert_not_null(ep_options_warning(o, 0));
    cr_expect_str_eq(ep_options_warning(o, 0),
                     "environment PROG_SERVICE_HOST names no option and is ignored");
    cr_assert_not_null(ep_options_warning(o, 1));
    cr_expect_str_eq(
        ep_options_warning(o, 1),
        "environment PROG_LEVELS names no option and is ignored; did you mean PROG_MODELS?");
    cr_expect_null(ep_options_warning(o, 2));
    ep_options_free(o);
}

Test(options, a_missing_file_is_not_found_and_its_variable_works)
{
    ep_options *o = NULL;
    char variable[400];
    const char *env[] = {variable, NULL};
    const char *flags[] = {"--config=/does/not/exist.yaml", NULL};
    EXPECT_FAILS(load(NULL, flags, NULL, &o, &e), EP_ERR_NOT_FOUND, e, "/does/not/exist.yaml");
    cr_assert(ep_test_write_file(file_path, "drain_ms: 77\n", 0600));
    snprintf(variable, sizeof(variable), "PROG_CONFIG=%s", file_path);
    ASSERT_OK(load(NULL, NULL, env, &o, &e), e);
    cr_expect_eq(ep_options_number(o, "drain_ms"), 77);
    ep_options_free(o);
}

Test(options, printed_values_are_a_file_again)
{
    ep_options *o = NULL, *again = NULL;
    char *text = NULL;
    size_t bytes = 0;
    const char *flags[] = {"--model=a=/x \"y\"", "--node-name=n\\1", "--insecure", NULL};
    ASSERT_OK(load("limit_bytes: 3KiB\n", flags, NULL, &o, &e), e);
    FILE *out = open_memstream(&text, &bytes);
    ep_options_print(o, out);
    fclose(out);
    cr_expect(strstr(text, "insecure: true  # flag --insecure") != NULL, "%s", text);
    cr_expect(strstr(text, "drain_ms: 100ms  # default") != NULL, "%s", text);
    cr_expect(strstr(text, ":1\n") != NULL, "%s", text);
    cr_assert_eq(load(text, NULL, NULL, &again, &e), EP_OK, "%s\n%s", e.text, text);
    cr_expect_str_eq(ep_options_list_text(again, "models", 0, "path"), "/x \"y\"");
    cr_expect_str_eq(ep_options_text(again, "node_name"), "n\\1");
    free(text);
    ep_options_free(o);
    ep_options_free(again);
}

/* The same value is the same text, whatever it was written as: readable, and good for a file
 * again. */
Test(options, sizes_and_times_are_shown_in_their_shortest_form)
{
    static const struct {
        const char *file;
        const char *shown;
    } rows[] = {
        {"limit_bytes: 536870912\n", "limit_bytes: 512M  # "},
        {"limit_bytes: 0.5GiB\n", "limit_bytes: 512M  # "},
        {"limit_bytes: 1000\n", "limit_bytes: 1000  # "},
        {"limit_bytes: 1.5K\n", "limit_bytes: 1536  # "},
        {"drain_ms: 1000\n", "drain_ms: 1s  # "},
        {"drain_ms: 0.25s\n", "drain_ms: 250ms  # "},
        {"age_us: 1500\n", "age_us: 1500us  # "},
        {"age_us: 60000000\n", "age_us: 1m  # "},
        {"age_us: 0\n", "age_us: 0  # "},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char printed[4096] = "";
        char seen[200] = "";
        ep_options *o = NULL, *again = NULL;
        const char *model[] = {"--model=a=/x", NULL};
        ASSERT_OK(load(rows[i].file, model, NULL, &o, &e), e);
        FILE *out = fmemopen(printed, sizeof(printed), "w");
        ep_options_print(o, out);
        fclose(out);
        cr_expect(strstr(printed, rows[i].shown) != NULL, "no '%s' in\n%s", rows[i].shown, printed);
        cr_assert_eq(load(printed, NULL, NULL, &again, &e), EP_OK, "%s\n%s", e.text, printed);
        ep_options_diff(o, again, count_change, seen);
        cr_expect_str_eq(seen, "");
        ep_options_free(o);
        ep_options_free(again);
    }
}

/* Variables of the environment may hold any bytes; a file may not, and printed values must be a
 * file again. */
Test(options, text_that_no_file_could_hold_is_refused)
{
    static const struct {
        const char *value;
        const char *what;
    } rows[] = {
        {"tc\x90", "is not UTF-8"},
        {"\xc0\xaf", "is not UTF-8"},
        {"\xe0\x80\xaf", "is not UTF-8"},
        {"\xed\xa0\x80", "is not UTF-8"},
        {"\xf4\x90\x80\x80", "is not UTF-8"},
        {"\xff", "is not UTF-8"},
        {"a\xe2\x82", "is not UTF-8"},
        {"\xc2\x80", "control character"},
        {"\xef\xbb\xbf", "control character"},
        {"\x7f", "control character"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char variable[64];
        ep_options *options = NULL;
        snprintf(variable, sizeof(variable), "PROG_NODE_NAME=%s", rows[i].value);
        char *const environment[] = {variable, NULL};
        cr_expect_eq(ep_options_load(&spec, 0, NULL, environment, &options, &e), EP_ERR_BAD_CONFIG,
                     "row %zu", i);
        cr_expect(strstr(e.text, rows[i].what) != NULL, "row %zu: %s", i, e.text);
    }
    char good[] = "PROG_NODE_NAME=n\xc3\xb6\xf0\x9f\x98\x80";
    char *const environment[] = {good, NULL};
    ep_options *options = NULL;
    ASSERT_OK(ep_options_load(&spec, 0, NULL, environment, &options, &e), e);
    ep_options_free(options);
}

Test(options, differences_are_reported_by_key)
{
    ep_options *a = NULL, *b = NULL;
    char seen[200] = "";
    cr_assert_eq(load("node_name: x\nmodels: [{name: a, path: /x}]\n", NULL, NULL, &a, &e), EP_OK);
    cr_assert_eq(
        load("node_name: y\nmodels: [{name: a, path: /z}]\ndrain_ms: 100\n", NULL, NULL, &b, &e),
        EP_OK);
    ep_options_diff(a, b, count_change, seen);
    cr_expect_str_eq(seen, "node_name+ models- ");
    ep_options_free(a);
    ep_options_free(b);
}

Test(options, help_lists_every_flag)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    ep_options_print_help(&spec, out);
    fclose(out);
    static const char *const wanted[] = {"--drain-ms",   "--limit-bytes",  "--insecure",
                                         "--log-format", "--model",        "--listen",
                                         "--config",     "--check-config", "--print-config",
                                         "--version",    "10ms..1s",       "PROG_DRAIN_MS"};
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        cr_expect(strstr(text, wanted[i]) != NULL, "no %s in\n%s", wanted[i], text);
    }
    free(text);
}
