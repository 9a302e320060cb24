/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A service of real daemons computes with the numerics family it is told to, bit for bit as the
 * oracle does: bf16dp with the fastest code of this CPU and with the plain code for any, on backend
 * cpu and backend reference; auto takes the family the CPU is fastest with, also when nobody says
 * so. Its id says which. Other limits of the CPU than it has end the daemon with a reason. Of nodes
 * with unlike families only those of one hold experts, and rows of two never meet. w4a8, which only
 * experts of 4 bits have, comes when it is named, and by itself where the CPU is fastest with it.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/cpu_features.h"
#include "kernels/ffn_kernel.h"
#include "ref_format.h"
#include "support/checkpoint_fixture.h"
#include "batch.h"

enum { HIDDEN = 72, INNER = 32, EXPERTS = 8, TOP_K = 2, PATH_BYTES = EP_TEST_PATH_BYTES + 64 };

static const uint32_t token_counts[] = {1, 7, 300};

/* The checkpoint that services are started with, and what its experts are. */
static char fixture_dir[EP_TEST_PATH_BYTES];
static ep_weight_format fixture_format;

static void input_path(char out[PATH_BYTES], uint32_t tokens)
{
    snprintf(out, PATH_BYTES, "%s/in-%u.safetensors", fixture_dir, tokens);
}

static void expected_path(char out[PATH_BYTES], const char *family, uint32_t tokens)
{
    snprintf(out, PATH_BYTES, "%s/%s-%u.safetensors", fixture_dir, family, tokens);
}

static void run_oracle(const char *family, uint32_t tokens)
{
    char in[PATH_BYTES];
    char out[PATH_BYTES];
    char options[64];
    input_path(in, tokens);
    expected_path(out, family, tokens);
    snprintf(options, sizeof(options), "--wire f32 --numerics %s", family);
    batch_run_oracle(fixture_dir, 0, in, out, options);
}

/* In place of the one before. families: two, which must differ. */
static void make_fixture(ep_weight_format format, const char *first, const char *second)
{
    ep_fixture_config config = ep_fixture_default();
    fixture_format = format;
    config.expert_format = ep_weight_format_is_float(format) ? EP_WEIGHTS_NONE : format;
    config.hidden = HIDDEN;
    config.inner = INNER;
    config.experts = EXPERTS;
    config.top_k = TOP_K;
    config.layers = 1;
    ep_test_checkpoint_new(&config, fixture_dir);
    for (size_t i = 0; i < EP_ARRAY_COUNT(token_counts); i++) {
        char path[PATH_BYTES];
        char other[PATH_BYTES];
        input_path(path, token_counts[i]);
        /* wild, of f32: the families narrow it differently */
        batch_write(path, token_counts[i], HIDDEN, true, token_counts[i]);
        run_oracle(first, token_counts[i]);
        run_oracle(second, token_counts[i]);
        expected_path(path, first, token_counts[i]);
        expected_path(other, second, token_counts[i]);
        EP_TEST_CHECK(!ep_test_files_equal(path, other),
                      "the families give the same results for %u tokens", token_counts[i]);
    }
}

/* What this program, and so its daemons, may use of the CPU; NULL: all. */
static const char *level_of_test;

static void set_level(const char *level)
{
    if (level != NULL) {
        setenv(EP_CPU_FEATURES_VARIABLE, level, 1);
    } else {
        unsetenv(EP_CPU_FEATURES_VARIABLE);
    }
}

/* Batches of all sizes give what the family gives. */
static void expect_forward(ep_test_cluster *cluster, const char *family, const char *what)
{
    char out[PATH_BYTES];
    snprintf(out, sizeof(out), "%s/out.safetensors", cluster->dir);
    for (size_t i = 0; i < EP_ARRAY_COUNT(token_counts); i++) {
        char in[PATH_BYTES];
        char expected[PATH_BYTES];
        char *output = NULL;
        input_path(in, token_counts[i]);
        expected_path(expected, family, token_counts[i]);
        unlink(out);
        int code = ep_test_cluster_ctl(cluster, &output,
                                       "forward --model=demo --layer=0 --wire=f32 --in %s --out %s",
                                       in, out);
        EP_TEST_CHECK(code == 0, "%s: exit code %d: %s", what, code, output);
        EP_TEST_CHECK(ep_test_files_equal(expected, out), "%s, %u tokens: not what family %s gives",
                      what, token_counts[i], family);
        free(output);
    }
}

/* level: what the daemons may use of the CPU, NULL as this program. family: what they must compute
 * with. */
static void run(const char *numerics, const char *backend, const char *level, const char *family)
{
    const ep_test_model model = {"demo", fixture_dir};
    const char *args[] = {numerics, backend, NULL};
    const ep_test_cluster_options options = {.nodes_count = 2,
                                             .copies = 2,
                                             .threads = 2,
                                             .models = &model,
                                             .models_count = 1,
                                             .node_args = args};
    ep_test_cluster cluster;
    char what[128];
    set_level(level != NULL ? level : level_of_test);
    ep_test_cluster_start(&cluster, &options);
    set_level(level_of_test);
    snprintf(what, sizeof(what), "%s %s, CPU level %s", numerics, backend,
             level == NULL ? "of the test" : level);
    expect_forward(&cluster, family, what);
    char *status = NULL;
    char id[64];
    snprintf(id, sizeof(id), "%s/%s/rne/", family, ep_weight_format_name(fixture_format));
    EP_TEST_CHECK(ep_test_cluster_ctl(&cluster, &status, "status --output=json") == 0 &&
                      strstr(status, id) != NULL,
                  "no id %s in %s", id, status);
    free(status);
    ep_test_cluster_stop(&cluster);
}

static void start_three(ep_test_cluster *cluster, const char *const numerics[3])
{
    const ep_test_model model = {"demo", fixture_dir};
    ep_test_cluster_start(cluster, &(ep_test_cluster_options){.nodes_count = 3,
                                                              .copies = 1,
                                                              .models = &model,
                                                              .models_count = 1,
                                                              .node_numerics = numerics});
}

/* Unlike families, the most common one last: its nodes alone serve, and a node that computes
 * otherwise is told of. */
static void run_unlike_nodes(const char *other, const char *most)
{
    const char *const numerics[] = {other, most, most};
    char what[128];
    ep_test_cluster cluster;
    start_three(&cluster, numerics);
    snprintf(what, sizeof(what), "nodes of %s, %s, %s", other, most, most);
    expect_forward(&cluster, most, what);
    for (uint32_t n = 0; n < 3; n++) {
        Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&cluster, n);
        EP_TEST_CHECK((status->rows_served == 0) == (n == 0), "node%u served %llu rows", n,
                      (unsigned long long)status->rows_served);
        expertd__v1__node_status_reply__free_unpacked(status, NULL);
    }
    char *doctor = NULL;
    (void)ep_test_cluster_ctl(&cluster, &doctor, "doctor");
    EP_TEST_CHECK(strstr(doctor, "2 different numerics ids (") != NULL, "%s", doctor);
    free(doctor);
    ep_test_cluster_stop(&cluster);
}

static bool forward_by_gateway(ep_test_cluster *cluster, const char *family, char **out_output)
{
    char in[PATH_BYTES];
    char out[PATH_BYTES];
    char expected[PATH_BYTES];
    input_path(in, token_counts[1]);
    expected_path(expected, family, token_counts[1]);
    snprintf(out, sizeof(out), "%s/out.safetensors", cluster->dir);
    unlink(out);
    return ep_test_cluster_ctl(
               cluster, out_output,
               "forward --gateway --model=demo --layer=0 --wire=f32 --in %s --out %s", in,
               out) == 0 &&
           ep_test_files_equal(expected, out);
}

/* The gateway's client has chosen the id of two nodes. When these are drained, the third one's is
 * as good to its users. */
static void run_gateway(void)
{
    static const char *const numerics[] = {"portable", "bf16dp", "bf16dp"};
    static const char *const drained[] = {"node1", "node2"};
    ep_test_cluster cluster;
    char *output = NULL;
    start_three(&cluster, numerics);
    expect_forward(&cluster, "bf16dp", "nodes of portable, bf16dp, bf16dp"); /* there is a table */
    EP_TEST_CHECK(forward_by_gateway(&cluster, "bf16dp", &output), "by the gateway: %s", output);
    free(output);
    for (size_t i = 0; i < EP_ARRAY_COUNT(drained); i++) {
        int code = ep_test_process_run_line(
            cluster.dir, ep_test_expertctl, NULL, EP_TEST_PATIENCE_MS, &output,
            "drain %s --wait --timeout=60s --admin %s", drained[i], cluster.coordinator.admin_url);
        EP_TEST_CHECK(code == 0, "drain %s: exit code %d: %s", drained[i], code, output);
        free(output);
    }
    expect_forward(&cluster, "portable", "the only node left");
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    while (!forward_by_gateway(&cluster, "portable", &output)) { /* it looks once a heartbeat */
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "by the gateway, after drains: %s", output);
        free(output);
    }
    free(output);
    ep_test_cluster_stop(&cluster);
}

static void expect_unavailable(ep_test_cluster *cluster)
{
    char in[PATH_BYTES];
    char out[PATH_BYTES];
    char *output = NULL;
    input_path(in, token_counts[2]);
    snprintf(out, sizeof(out), "%s/out.safetensors", cluster->dir);
    int code = ep_test_cluster_ctl(
        cluster, &output, "forward --model=demo --layer=0 --timeout=5s --in %s --out %s", in, out);
    EP_TEST_CHECK(code != 0 && strstr(output, "no live copy") != NULL &&
                      strstr(output, "(other numerics)") != NULL && access(out, F_OK) != 0,
                  "exit code %d: %s", code, output);
    free(output);
}

#define MAP(first, second)                                                                         \
    "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":[{" \
    "\"device_id\":0,\"device_expert\":[" first "]},{\"device_id\":1,\"device_expert\":[" second   \
    "]}]}]}"

/*
 * An operator's map places also on unlike nodes. As many of each: who holds more is pinned. A call
 * that needs experts of both fails, and says why.
 */
static void run_unlike_map(void)
{
    static const char *const numerics[] = {"portable", "bf16dp"};
    static const char *const maps[] = {MAP("", "0,1,2,3,4,5,6,7"), MAP("0,1,2,3", "4,5,6,7")};
    const ep_test_model model = {"demo", fixture_dir};
    for (size_t i = 0; i < EP_ARRAY_COUNT(maps); i++) {
        const ep_test_cluster_options options = {.nodes_count = 2,
                                                 .models = &model,
                                                 .models_count = 1,
                                                 .node_numerics = numerics,
                                                 .expert_map = maps[i]};
        ep_test_cluster cluster;
        ep_test_cluster_start(&cluster, &options);
        if (i == 0) {
            expect_forward(&cluster, "bf16dp", "all experts on the node of bf16dp");
        } else {
            expect_unavailable(&cluster);
        }
        ep_test_cluster_stop(&cluster);
    }
}

static void expect_refused_level(void)
{
    char *output = NULL;
    char model[PATH_BYTES];
    snprintf(model, sizeof(model), "--model=demo=%s", fixture_dir);
    set_level("avx1024");
    int code = ep_test_process_run_line(
        fixture_dir, ep_test_expertd, NULL, EP_TEST_PATIENCE_MS, &output,
        "%s --listen=tcp://127.0.0.1:0 --admin-listen=tcp://127.0.0.1:0", model);
    set_level(level_of_test);
    EP_TEST_CHECK(
        code != 0 &&
            strstr(output, "EXPERTD_CPU_FEATURES is 'avx1024', allowed on this CPU: portable") !=
                NULL,
        "exit code %d: %s", code, output);
    free(output);
}

int main(void)
{
    level_of_test =
        getenv(EP_CPU_FEATURES_VARIABLE) == NULL ? NULL : strdup(getenv(EP_CPU_FEATURES_VARIABLE));
    make_fixture(EP_WEIGHTS_BF16, "portable", "bf16dp");
    for (size_t i = 0; i < EP_ARRAY_COUNT(token_counts); i++) {
        run_oracle("bf16odd", token_counts[i]);
    }
    run("--numerics=bf16dp", "--backend=cpu", NULL, "bf16dp");
    run("--numerics=bf16dp", "--backend=cpu", "portable", "bf16dp");
    run("--numerics=bf16dp", "--backend=reference", NULL, "bf16dp");
    run("--numerics=bf16odd", "--backend=cpu", NULL, "bf16odd");
    run("--numerics=portable", "--backend=cpu", NULL, "portable");
    run("--numerics=auto", "--backend=cpu", NULL,
        ep_ffn_family_name(ep_ffn_family_fastest(EP_WEIGHTS_BF16, false)));
    /* nobody says */
    run("--log-level=info", "--backend=cpu", NULL,
        ref_family_name(ref_format_family(REF_FORMAT_BF16, ref_family_default())));
    run("--numerics=auto", "--backend=cpu", "portable", "portable");
    run_unlike_nodes("portable", "bf16dp");
    run_unlike_map();
    run_gateway();
    expect_refused_level();
    make_fixture(EP_WEIGHTS_MXFP4, "bf16dp", "w4a8");
    run("--numerics=w4a8", "--backend=cpu", NULL, "w4a8");
    if (level_of_test != NULL) {
        return 0; /* the rest is the same on all levels */
    }
    run("--numerics=w4a8", "--backend=reference", NULL, "w4a8");
    run_unlike_nodes("w4a8", "bf16dp");
    make_fixture(EP_WEIGHTS_INT4, "bf16dp", "w4a8");
    const char *fastest = ep_ffn_family_name(ep_ffn_family_fastest(EP_WEIGHTS_INT4, false));
    for (size_t i = 0; i < EP_ARRAY_COUNT(token_counts); i++) {
        run_oracle(fastest, token_counts[i]);
    }
    run("--numerics=auto", "--backend=cpu", NULL, fastest);
    run("--numerics=bf16dp", "--backend=cpu", NULL, "bf16dp");
    run_unlike_nodes("bf16dp", "w4a8");
    return 0;
}
