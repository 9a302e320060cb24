/* SPDX-License-Identifier: Apache-2.0 */
/*
 * This version beside the one before it, which knows a Hello field less: every mix of node,
 * coordinator and client gives exact results. A peer of a later version is simulated by hand:
 * fields and optional features that this version does not know are passed over, a required one is
 * refused with UNIMPLEMENTED.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "hostile_peer.h"
#include "model/safetensors_writer.h"
#include "ref_checkpoint.h"
#include "support/cluster.h"
#include "support/load.h"

enum { BATCHES = 4, TOKENS = 40, PATH_BYTES = EP_TEST_PATH_BYTES + 64, GRPC_UNIMPLEMENTED = 12 };

static char model_path[EP_TEST_PATH_BYTES];
static ep_test_batch batches[BATCHES];

static void make_model(void)
{
    ep_fixture_config config = ep_fixture_default();
    ep_test_checkpoint_new(&config, model_path);
    ep_test_batches_init(batches, BATCHES, model_path, "demo", TOKENS, 0, 2, 0);
}

/* ---- what a Hello says and gets ---- */

typedef struct hello_answer {
    uint32_t status;
    char text[EP_ERROR_TEXT_BYTES]; /* of a refusal */
    char host[64];                  /* of the reply */
} hello_answer;

static hello_answer say_hello(const char *url, const Expertd__V1__Hello *hello, const char *more,
                              size_t more_bytes)
{
    static hostile_frame frame;
    uint8_t header[4096] = {0}; /* begins with the length of an empty CallHeader */
    ep_frame reply;
    const uint8_t *reply_header;
    hello_answer answer = {0};
    size_t bytes = 4 + protobuf_c_message_pack(&hello->base, header + 4);
    memcpy(header + bytes, more, more_bytes);
    const ep_frame fixed = {
        .kind = EP_FRAME_REQUEST, .call_id = 1, .deadline_us = EP_FRAME_DEADLINE_NONE};
    hostile_frame_make(&frame, fixed, header, bytes + more_bytes, NULL, 0);
    int fd = hostile_connect(url);
    hostile_send(fd, frame.data, frame.bytes);
    EP_TEST_CHECK(hostile_receive_reply(fd, &reply, &reply_header, "Hello"),
                  "%s: Hello was not answered", url);
    close(fd);
    answer.status = reply.status;
    if (reply.status != 0) {
        Expertd__V1__Status *status =
            expertd__v1__status__unpack(NULL, reply.header_bytes, reply_header);
        EP_TEST_CHECK(status != NULL, "no Status");
        snprintf(answer.text, sizeof(answer.text), "%s", status->text);
        expertd__v1__status__free_unpacked(status, NULL);
    } else {
        Expertd__V1__Hello *theirs =
            expertd__v1__hello__unpack(NULL, reply.header_bytes, reply_header);
        EP_TEST_CHECK(theirs != NULL, "no Hello");
        snprintf(answer.host, sizeof(answer.host), "%s", theirs->host);
        expertd__v1__hello__free_unpacked(theirs, NULL);
    }
    return answer;
}

/* The test would be empty if "older" were the same. */
static void expect_host(const char *url, bool older)
{
    Expertd__V1__Hello hello;
    hostile_hello_init(&hello, "client");
    hello_answer answer = say_hello(url, &hello, "", 0);
    EP_TEST_CHECK(answer.status == 0 && (answer.host[0] == 0) == older, "%s: status %u, host '%s'",
                  url, answer.status, answer.host);
}

static void expect_later_peers(const char *url)
{
    static const char unknown_fields[] =
        "\xf8\x06\x2a\x82\x07\x05later"; /* field 111: 42; field 112: "later" */
    char *features[] = {"from-the-future"};
    Expertd__V1__Hello hello;
    hostile_hello_init(&hello, "client");
    hello_answer answer = say_hello(url, &hello, unknown_fields, sizeof(unknown_fields) - 1);
    EP_TEST_CHECK(answer.status == 0, "unknown fields: %s", answer.text);

    hello.optional_features = features;
    hello.n_optional_features = 1;
    hello.protocol_max = 7;
    answer = say_hello(url, &hello, "", 0);
    EP_TEST_CHECK(answer.status == 0, "an unknown optional feature: %s", answer.text);

    hello.required_features = features;
    hello.n_required_features = 1;
    answer = say_hello(url, &hello, "", 0);
    EP_TEST_CHECK(answer.status == GRPC_UNIMPLEMENTED &&
                      strstr(answer.text, "from-the-future") != NULL,
                  "an unknown required feature: status %u: %s", answer.status, answer.text);

    hostile_hello_init(&hello, "client");
    hello.protocol_min = 2;
    hello.protocol_max = 3;
    answer = say_hello(url, &hello, "", 0);
    EP_TEST_CHECK(answer.status == GRPC_UNIMPLEMENTED && strstr(answer.text, "2 to 3") != NULL,
                  "protocols 2 to 3: status %u: %s", answer.status, answer.text);
}

/* ---- every mix works ---- */

static void expect_exact_file(ep_test_cluster *cluster, const ep_test_batch *batch)
{
    char in[PATH_BYTES];
    char out[PATH_BYTES];
    char expected[PATH_BYTES];
    char *output = NULL;
    ep_error error;
    const size_t shape[2] = {batch->tokens, batch->hidden};
    const ep_named_tensor tensors[] = {
        {"x", ep_tensor_2d(batch->x, EP_DTYPE_BF16, batch->tokens, batch->hidden)},
        {"expert_ids", ep_tensor_2d(batch->ids, EP_DTYPE_I32, batch->tokens, batch->top_k)},
        {"expert_scales", ep_tensor_2d(batch->scales, EP_DTYPE_F32, batch->tokens, batch->top_k)},
    };
    snprintf(in, sizeof(in), "%s/in.safetensors", cluster->dir);
    snprintf(out, sizeof(out), "%s/out.safetensors", cluster->dir);
    snprintf(expected, sizeof(expected), "%s/expected.safetensors", cluster->dir);
    EP_TEST_CHECK(ep_safetensors_write(in, tensors, EP_ARRAY_COUNT(tensors), NULL, 0, &error) ==
                      EP_OK,
                  "%s", error.text);
    ref_file_write(expected, "y", REF_BF16, 2, shape, batch->expected);
    int code = ep_test_cluster_ctl(cluster, &output,
                                   "forward --model=demo --layer=0 --in %s --out %s", in, out);
    EP_TEST_CHECK(code == 0, "expertctl: exit code %d: %s", code, output);
    free(output);
    EP_TEST_CHECK(ep_test_process_run_line(cluster->dir, "/usr/bin/cmp", NULL, EP_TEST_PATIENCE_MS,
                                           NULL, "-s %s %s", expected, out) == 0,
                  "%s differs from the oracle's", out);
}

static void expect_both_nodes_served(ep_test_cluster *cluster)
{
    for (uint32_t n = 0; n < cluster->options.nodes_count; n++) {
        Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(cluster, n);
        EP_TEST_CHECK(status->rows_served > 0, "node%u served nothing", n);
        protobuf_c_message_free_unpacked(&status->base, NULL);
    }
}

/* bit 0: node0 older, bit 1: node1, bit 2: coordinator, bit 3: expertctl. The client in this
 * program is the new one. */
static void run_mix(unsigned mix)
{
    const char *nodes[2] = {mix & 1 ? EXPERTD_OLDER : NULL, mix & 2 ? EXPERTD_OLDER : NULL};
    const ep_test_model model = {"demo", model_path};
    const ep_test_cluster_options options = {.nodes_count = 2,
                                             .models = &model,
                                             .models_count = 1,
                                             .node_programs = nodes,
                                             .coordinator_program =
                                                 mix & 4 ? COORDINATOR_OLDER : NULL,
                                             .ctl_program = mix & 8 ? EXPERTCTL_OLDER : NULL};
    ep_test_cluster cluster;
    ep_test_cluster_start(&cluster, &options);
    expect_host(cluster.nodes[0].rpc_url, (mix & 1) != 0);
    expect_host(cluster.nodes[1].rpc_url, (mix & 2) != 0);
    expect_host(cluster.coordinator.rpc_url, (mix & 4) != 0);
    expect_later_peers(cluster.nodes[0].rpc_url);
    expect_later_peers(cluster.coordinator.rpc_url);
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    for (uint32_t b = 0; b < BATCHES; b++) {
        ep_moe_result result;
        EP_TEST_CHECK(ep_test_batch_call(&batches[b], client, 0, &result), "mix %x: %s", mix,
                      result.error.text);
        expect_exact_file(&cluster, &batches[b]);
    }
    expect_both_nodes_served(&cluster);
    ep_client_destroy(client);
    ep_test_cluster_stop(&cluster);
}

int main(void)
{
    /* All new; an old node among new ones; all nodes old; only the coordinator old; only expertctl
     * old; all old but the client. */
    static const unsigned mixes[] = {0x0, 0x1, 0x3, 0x4, 0x8, 0xf};
    make_model();
    for (size_t i = 0; i < EP_ARRAY_COUNT(mixes); i++) {
        run_mix(mixes[i]);
    }
    for (uint32_t b = 0; b < BATCHES; b++) {
        ep_test_batch_fini(&batches[b]);
    }
    ep_test_dir_remove(model_path);
    printf("%zu mixes of two versions: results equal to the oracle's\n", EP_ARRAY_COUNT(mixes));
    return 0;
}
