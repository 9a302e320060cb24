/* SPDX-License-Identifier: Apache-2.0 */
/*
 * expertd serves checkpoints of every name family, format and activation at once; every row equals,
 * bit for bit, the row of the oracle (tests/reference), which reads the same files with its own
 * code; also where the node puts float weights into another format. What expertctl model show says
 * of the service is what it says of the files.
 */
#include <criterion/criterion.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/check.h"
#include "ref_checkpoint.h"
#include "ref_quant.h"
#include "support/expect.h"
#include "support/format_fixture.h"
#include "support/forward_call.h"
#include "support/process.h"

#define WAIT_MS 60000
#define PATH_BYTES (EP_TEST_PATH_BYTES + 64)
#define HIDDEN_MAX 512
#define INNER_MAX 512

#define MODELS_MAX 96
enum { ROWS_MAX = 13, SLOTS_MAX = 13 };

static char dir[EP_TEST_PATH_BYTES];
static ep_test_process node;

static void setup(void)
{
    node.pid_fd = -1;
    cr_assert(ep_test_dir_create(dir));
}

static void teardown(void)
{
    ep_test_process_destroy(&node);
    ep_test_dir_remove(dir);
}

TestSuite(formats_service, .init = setup, .fini = teardown, .timeout = 110);

static void write_model(const ep_format_case *form, char path[PATH_BYTES])
{
    ep_error error;
    ep_format_model *model = ep_format_model_make(form, 11);
    snprintf(path, PATH_BYTES, "%s/%s", dir, form->name);
    cr_assert_eq(mkdir(path, 0700), 0);
    ASSERT_OK(ep_format_model_write(model, path, &error), error);
    ep_format_model_free(model);
}

/* The oracle's rows for the slots of a call. */
static void oracle_rows(const char *path, enum ref_family family, enum ref_quant quant,
                        const ep_test_forward *f, float *out)
{
    static float x[HIDDEN_MAX], scratch[2 * INNER_MAX + HIDDEN_MAX];
    static struct ref_checkpoint checkpoint;
    struct ref_layer layer;
    ref_checkpoint_open(path, &checkpoint);
    ref_layer_load(&checkpoint, f->layer, &layer);
    ref_layer_set_family(&layer, family);
    ref_layer_quantize(&layer, quant, family);
    cr_assert_eq(layer.hidden, f->hidden);
    cr_assert_eq(layer.expert_count, (size_t)EP_FORMAT_EXPERTS);
    for (uint32_t s = 0; s < f->slots; s++) {
        const struct ref_expert *expert = &layer.experts[f->wire_slots[s].expert];
        cr_assert_leq(expert->inner, (size_t)INNER_MAX);
        for (uint32_t i = 0; i < f->hidden; i++) {
            x[i] = ref_load(f->x, REF_BF16, (size_t)f->wire_slots[s].row * f->hidden + i);
        }
        ref_expert_forward(expert, f->hidden, x, scratch, out + (size_t)s * f->hidden);
    }
    ref_layer_free(&layer);
    ref_checkpoint_close(&checkpoint);
}

/* name: of the model at the node. is_deep: one expert gets all rows, more than two chunks. */
static void expect_exact(ep_test_peer *peer, const char *name, enum ref_family family,
                         enum ref_quant quant, const ep_format_case *form, const char *path,
                         bool is_deep)
{
    static const ep_wire_slot few[] = {{0, 0}, {2, 1}, {1, 3}, {0, 2}, {1, 1}};
    static const ep_wire_slot deep[] = {{0, 2}, {1, 2}, {2, 2}, {3, 2},  {4, 2},  {5, 2}, {6, 2},
                                        {7, 2}, {8, 2}, {9, 2}, {10, 2}, {11, 2}, {12, 2}};
    static uint16_t x[ROWS_MAX * HIDDEN_MAX];
    static float got[SLOTS_MAX * HIDDEN_MAX], wanted[SLOTS_MAX * HIDDEN_MAX];
    const uint32_t rows = is_deep ? ROWS_MAX : 3;
    const uint32_t slots = is_deep ? EP_ARRAY_COUNT(deep) : EP_ARRAY_COUNT(few);
    const uint32_t hidden = form->hidden;
    ep_error error;
    cr_assert_leq(hidden, HIDDEN_MAX);
    ep_test_fill_rows(5, EP_DTYPE_BF16, (size_t)rows * hidden, x);
    const ep_test_forward forward = {.model = name,
                                     .layer = EP_FORMAT_LAYER,
                                     .rows = rows,
                                     .slots = slots,
                                     .hidden = hidden,
                                     .x_dtype = EP_DTYPE_BF16,
                                     /* bf16 would hide what is off by an ulp of f32 */
                                     .reply_dtype = EP_DTYPE_F32,
                                     .x = x,
                                     .wire_slots = is_deep ? deep : few};
    cr_assert_eq(ep_test_forward_run(peer, &forward, got, &error), EP_OK, "%s: %s", name,
                 error.text);
    oracle_rows(path, family, quant, &forward, wanted);
    size_t i = 0;
    while (i < (size_t)slots * hidden && memcmp(&got[i], &wanted[i], sizeof(got[i])) == 0) {
        i++;
    }
    cr_expect(i == (size_t)slots * hidden, "%s: slot %zu output %zu is %a, the oracle's %a", name,
              i / hidden, i % hidden, (double)got[i], (double)wanted[i]);
}

/* A socket that plays the service manager, and the variable that leads a child to it. */
static int play_manager(char out_variable[PATH_BYTES])
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int n = snprintf(address.sun_path, sizeof(address.sun_path), "%s/notify", dir);
    cr_assert(n > 0 && n < (int)sizeof(address.sun_path));
    int manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(manager, (struct sockaddr *)&address, sizeof(address)), 0);
    snprintf(out_variable, PATH_BYTES, "NOTIFY_SOCKET=%s", address.sun_path);
    return manager;
}

static void await_ready(int manager)
{
    char message[1024] = "";
    while (strncmp(message, "READY=1", 7) != 0) {
        struct pollfd fd = {.fd = manager, .events = POLLIN};
        cr_assert_eq(poll(&fd, 1, WAIT_MS), 1, "the program never said READY=1");
        ssize_t n = recv(manager, message, sizeof(message) - 1, 0);
        message[n > 0 ? n : 0] = 0;
    }
}

/* What the oracle is told for a model: auto keeps 16 bits where the checkpoint names them. */
static enum ref_family family_of(const ep_format_case *form, enum ref_family told, bool is_auto)
{
    const bool is_wide = form->quantised != NULL && strstr(form->quantised, "A16\"") != NULL;
    return !is_auto || !is_wide    ? told
           : told == REF_W4A8      ? REF_BF16DP
           : told == REF_AUTO_VNNI ? REF_PORTABLE
                                   : told;
}

/* The models that expertctl model show prints. */
static json_t *shown(const char *from)
{
    char *text = NULL;
    const int code = ep_test_process_run_line(dir, EP_EXPERTCTL, NULL, WAIT_MS, &text,
                                              "model show -o json %s", from);
    json_t *models = json_loads(text, 0, NULL);
    cr_assert(code == 0 && json_is_array(models), "%s: %d: %s", from, code, text);
    free(text);
    return models;
}

static bool has_number(const json_t *layer, const char *name, float wanted)
{
    return (float)json_real_value(json_object_get(layer, name)) == wanted;
}

static void expect_shown(const char *const *flags)
{
    char from[PATH_BYTES + 64];
    snprintf(from, sizeof(from), "--node %s", node.rpc_url);
    json_t *service = shown(from);
    cr_assert_eq(json_array_size(service), ep_format_cases_count);
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        const ep_format_case *form = &ep_format_cases[i];
        size_t m = 0;
        json_t *model = NULL;
        json_array_foreach(service, m, model)
        {
            if (strcmp(json_string_value(json_object_get(model, "model")), form->name) == 0) {
                break;
            }
        }
        cr_assert_lt(m, ep_format_cases_count, "%s is not shown", form->name);
        snprintf(from, sizeof(from), "--checkpoint %s", strchr(flags[i], '/'));
        json_t *files = shown(from);
        const json_t *file = json_array_get(files, 0);
        const json_t *layers = json_object_get(file, "layers");
        const json_t *layer = json_array_get(layers, 0);
        cr_expect(json_equal(json_object_get(file, "version"), json_object_get(model, "version")) &&
                      json_equal(layers, json_object_get(model, "layers")),
                  "%s: the service and its files are shown otherwise", form->name);
        cr_expect_str_eq(json_string_value(json_object_get(layer, "activation")),
                         ep_activation_name(form->activation));
        cr_expect(has_number(layer, "alpha", form->numbers.alpha) &&
                      has_number(layer, "beta", form->numbers.beta) &&
                      has_number(layer, "limit", form->numbers.limit),
                  "%s: other numbers", form->name);
        json_decref(files);
    }
    json_decref(service);
}

static void expect_service(enum ref_family family, bool is_auto)
{
    static char paths[MODELS_MAX][PATH_BYTES];
    static char flags[MODELS_MAX][PATH_BYTES + 64];
    char numerics[64];
    int deep_count = 0;
    const char *args[MODELS_MAX + 9] = {"--listen=tcp://127.0.0.1:0",
                                        "--admin-listen=tcp://127.0.0.1:0",
                                        "--probe-address=127.0.0.1:0", "--node-name=n1", numerics};
    char manager_variable[PATH_BYTES];
    const int manager = play_manager(manager_variable);
    const char *environment[] = {manager_variable, NULL};
    ep_test_peer peer;
    ep_error error;
    snprintf(numerics, sizeof(numerics), "--numerics=%s",
             is_auto ? "auto" : ref_family_name(family));
    cr_assert_leq(ep_format_cases_count, (size_t)MODELS_MAX);
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        write_model(&ep_format_cases[i], paths[i]);
        const bool names_file = ep_format_cases[i].names == EP_FORMAT_BLK;
        snprintf(flags[i], sizeof(flags[i]), "--model=%s=%.*s%s", ep_format_cases[i].name,
                 PATH_BYTES - 1, paths[i], names_file ? "/model.gguf" : "");
        args[5 + i] = flags[i];
    }
    cr_assert(ep_test_process_start(&node, dir, "node", EP_EXPERTD_PATH, args, environment, true));
    cr_assert(ep_test_process_wait_ports(&node, WAIT_MS));
    await_ready(manager);
    close(manager);
    ASSERT_OK(ep_test_peer_open(&peer, node.rpc_url, &error), error);
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        const ep_format_case *form = &ep_format_cases[i];
        const enum ref_family told = family_of(form, family, is_auto);
        expect_exact(&peer, form->name, told, REF_QUANT_NONE, form, paths[i], false);
        if (strcmp(form->name, "gguf-q4_k-fused") == 0 || strcmp(form->name, "gguf-q4_0") == 0) {
            expect_exact(&peer, form->name, told, REF_QUANT_NONE, form, paths[i], true);
            deep_count++;
        }
    }
    cr_expect_eq(deep_count, 2);
    ep_test_peer_close(&peer);
    if (family == REF_PORTABLE && !is_auto) {
        expect_shown(args + 5);
    }
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
}

/* Of float weights, in each format that weight_quant has; as enum ref_quant. */
static const char *const quants[] = {NULL, "int8-g32", "int4-g32", "mxfp4", "q4_k"};

/* "CASE.QUANT" for each, in a file that names them all. */
static void write_quantised(char names[MODELS_MAX][64], const ep_format_case *forms[MODELS_MAX],
                            char paths[MODELS_MAX][PATH_BYTES], const char *config,
                            size_t *out_count)
{
    FILE *file = fopen(config, "we");
    size_t count = 0;
    cr_assert_not_null(file);
    fprintf(file, "models:\n");
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        const ep_format_case *form = &ep_format_cases[i];
        if (!ep_weight_format_is_float(form->format) || form->down != EP_WEIGHTS_NONE) {
            continue;
        }
        for (size_t q = 1; q < EP_ARRAY_COUNT(quants); q++, count++) {
            cr_assert_lt(count, (size_t)MODELS_MAX);
            forms[count] = form;
            snprintf(names[count], sizeof(names[0]), "%s.%s", form->name, quants[q]);
            if (q == 1) {
                write_model(form, paths[count]);
            } else {
                strcpy(paths[count], paths[count - 1]);
            }
            fprintf(file, "- {name: %s, path: %s%s, weight_quant: %s}\n", names[count],
                    paths[count], form->names == EP_FORMAT_BLK ? "/model.gguf" : "", quants[q]);
        }
    }
    cr_assert_eq(fclose(file), 0);
    *out_count = count;
}

static void expect_quantised_service(enum ref_family family)
{
    static char names[MODELS_MAX][64], paths[MODELS_MAX][PATH_BYTES];
    static const ep_format_case *forms[MODELS_MAX];
    char numerics[64], config[PATH_BYTES], config_flag[PATH_BYTES + 16];
    char manager_variable[PATH_BYTES];
    const char *args[] = {config_flag,
                          numerics,
                          "--listen=tcp://127.0.0.1:0",
                          "--admin-listen=tcp://127.0.0.1:0",
                          "--probe-address=127.0.0.1:0",
                          "--node-name=n1",
                          NULL};
    const int manager = play_manager(manager_variable);
    const char *environment[] = {manager_variable, NULL};
    size_t count = 0;
    ep_test_peer peer;
    ep_error error;
    snprintf(numerics, sizeof(numerics), "--numerics=%s", ref_family_name(family));
    snprintf(config, sizeof(config), "%s/quant.yaml", dir);
    snprintf(config_flag, sizeof(config_flag), "--config=%s", config);
    write_quantised(names, forms, paths, config, &count);
    cr_assert_geq(count, 20);
    cr_assert(ep_test_process_start(&node, dir, "node", EP_EXPERTD_PATH, args, environment, true));
    cr_assert(ep_test_process_wait_ports(&node, WAIT_MS));
    await_ready(manager);
    close(manager);
    ASSERT_OK(ep_test_peer_open(&peer, node.rpc_url, &error), error);
    for (size_t i = 0; i < count; i++) {
        expect_exact(&peer, names[i], family,
                     (enum ref_quant)(1 + i % (EP_ARRAY_COUNT(quants) - 1)), forms[i], paths[i],
                     false);
    }
    ep_test_peer_close(&peer);
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
}

Test(formats_service, float_weights_in_smaller_formats_have_the_oracles_bits)
{
    expect_quantised_service(REF_PORTABLE);
}

Test(formats_service, float_weights_in_smaller_formats_have_the_oracles_bits_of_bf16dp)
{
    expect_quantised_service(REF_BF16DP);
}

Test(formats_service, float_weights_in_smaller_formats_have_the_oracles_bits_of_w4a8)
{
    expect_quantised_service(REF_W4A8);
}

Test(formats_service, one_node_serves_all_formats_with_the_oracles_bits)
{
    expect_service(REF_PORTABLE, false);
}

Test(formats_service, one_node_serves_all_formats_with_the_oracles_bits_of_bf16dp)
{
    expect_service(REF_BF16DP, false);
}

Test(formats_service, one_node_serves_all_formats_with_the_oracles_bits_of_w4a8)
{
    expect_service(REF_W4A8, false);
}

Test(formats_service, one_node_serves_all_formats_with_the_oracles_bits_of_auto)
{
    unsetenv("EXPERTD_NUMERICS");
    expect_service(ref_family_default(), true);
}
