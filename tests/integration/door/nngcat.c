/* SPDX-License-Identifier: Apache-2.0 */
/* Debian's nngcat asks a real node: the right rows, bit for bit, and readable words for what is no
 * request. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "contract/rpc/door_client.h"
#include "expert.pb-c.h"
#include "rpc/rpc_frame_io.h"
#include "support/checkpoint_fixture.h"
#include "support/forward_call.h"
#include "support/process.h"

#define PATIENCE_MS 60000
#define ROWS 3
#define SLOTS 4
#define HIDDEN 32 /* of the fixture */

static char dir[EP_TEST_PATH_BYTES];
static ep_test_process node;

static void write_bytes(const char *path, bytes content)
{
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(content.data, 1, content.count, file) == content.count &&
              fclose(file) == 0,
          "%s", path);
}

static bytes read_bytes(const char *path)
{
    FILE *file = fopen(path, "rb");
    bytes content = {.data = malloc(1 << 20)};
    CHECK(file != NULL && content.data != NULL, "%s", path);
    content.count = fread(content.data, 1, 1 << 20, file);
    fclose(file);
    return content;
}

/* Runs nngcat with these options; its output goes to a file. */
static bytes nngcat(const char *options)
{
    char line[3 * EP_TEST_PATH_BYTES];
    char path[EP_TEST_PATH_BYTES + 16];
    const char *args[] = {"-c", line, NULL};
    char *output = NULL;
    snprintf(path, sizeof(path), "%s/reply", dir);
    snprintf(line, sizeof(line), "exec nngcat --req --dial %s --recv-timeout 30 %s > %s",
             node.door_url, options, path);
    int code = ep_test_process_run(dir, "nngcat", "/bin/sh", args, NULL, PATIENCE_MS, &output);
    CHECK(code == 0, "%s gave %d: %s", line, code, output);
    free(output);
    return read_bytes(path);
}

static bytes forward_request(ep_buffer_pool *pool, const ep_test_forward *f)
{
    Expertd__V1__ForwardRequest request = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_forward_layout layout;
    ep_buffer *tensors;
    ep_rpc_out *out;
    request.model = (char *)(uintptr_t) "demo";
    request.rows = f->rows;
    request.slots = f->slots;
    request.hidden = f->hidden;
    request.x_dtype = (uint32_t)f->x_dtype;
    request.reply_dtype = (uint32_t)f->reply_dtype;
    CHECK(ep_forward_layout_make(f->rows, f->slots, f->hidden, f->x_dtype, false, &layout),
          "layout");
    CHECK(ep_buffer_acquire(pool, layout.total_bytes, &tensors) == EP_OK, "no buffer");
    memset(tensors->data, 0, layout.total_bytes);
    memcpy(tensors->data + layout.x_offset, f->x,
           (size_t)f->rows * f->hidden * ep_dtype_bytes(f->x_dtype));
    memcpy(tensors->data + layout.slots_offset, f->wire_slots, f->slots * sizeof(ep_wire_slot));
    CHECK(ep_rpc_out_create_request(pool, ep_rpc_request_header_bytes(NULL, 0, &request.base), NULL,
                                    0, &request.base, tensors, &out) == EP_OK,
          "no frame");
    out->frame.kind = EP_FRAME_REQUEST;
    out->frame.method_id = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward")->id;
    out->frame.deadline_us = EP_FRAME_DEADLINE_NONE;
    ep_rpc_out_seal(out, true);
    bytes made = {.data = malloc(out->frame_bytes)};
    CHECK(made.data != NULL, "no memory");
    for (uint32_t i = 0; i < out->send.parts_count; i++) {
        memcpy(made.data + made.count, out->send.parts[i].data, out->send.parts[i].bytes);
        made.count += out->send.parts[i].bytes;
    }
    ep_rpc_out_destroy(out);
    return made;
}

static void right_rows(ep_buffer_pool *pool, const char *model)
{
    static uint16_t x[ROWS * HIDDEN], wanted[SLOTS * HIDDEN];
    static const ep_wire_slot slots[SLOTS] = {{0, 1}, {1, 7}, {2, 1}, {0, 4}};
    char path[EP_TEST_PATH_BYTES + 16], options[EP_TEST_PATH_BYTES + 64];
    ep_error error;
    reply_view view;
    ep_test_fill_rows(11, EP_DTYPE_BF16, ROWS * HIDDEN, x);
    const ep_test_forward f = {.rows = ROWS,
                               .slots = SLOTS,
                               .hidden = HIDDEN,
                               .x_dtype = EP_DTYPE_BF16,
                               .reply_dtype = EP_DTYPE_BF16,
                               .x = x,
                               .wire_slots = slots};
    CHECK(ep_test_expected_rows(model, &f, wanted, &error) == EP_OK, "%s", error.text);
    bytes request = forward_request(pool, &f);
    snprintf(path, sizeof(path), "%s/request.bin", dir);
    write_bytes(path, request);
    snprintf(options, sizeof(options), "--file %s --raw", path);
    bytes reply = nngcat(options);
    reply_read(pool, reply, &view);
    CHECK(view.status.code == EP_OK, "%s", view.status.text);
    CHECK(view.frame.tensor_bytes == sizeof(wanted), "%llu tensor bytes",
          (unsigned long long)view.frame.tensor_bytes);
    CHECK(memcmp(view.tensors, wanted, sizeof(wanted)) == 0, "other rows");
    free(request.data);
    free(reply.data);
}

static void readable_words(void)
{
    bytes reply = nngcat("--data hello --ascii");
    CHECK(memmem(reply.data, reply.count, "this is no request frame: offset 0 has 0x68", 43) !=
              NULL,
          "%.*s", (int)reply.count, (char *)reply.data);
    free(reply.data);
}

int main(void)
{
    ep_fixture_config fixture = ep_fixture_default();
    char model[EP_FIXTURE_PATH_BYTES], flag[EP_FIXTURE_PATH_BYTES + 32];
    ep_buffer_pool *pool;
    ep_error error;
    char *metrics = NULL;
    CHECK(ep_test_dir_create(dir) && ep_buffer_pool_create(0, 0, &pool) == EP_OK, "no directory");
    ep_fixture_temp_dir(model);
    CHECK(ep_fixture_write(&fixture, model, &error) == EP_OK, "%s", error.text);
    snprintf(flag, sizeof(flag), "--model=demo=%s", model);
    const char *args[] = {"--listen=tcp://127.0.0.1:0",
                          "--probe-address=127.0.0.1:0",
                          "--admin-listen=",
                          "--backend=reference",
                          flag,
                          NULL};
    CHECK(ep_test_process_start(&node, dir, "node", EP_EXPERTD_PATH, args, NULL, true) &&
              ep_test_process_wait_ports(&node, PATIENCE_MS),
          "the node did not start");
    /* until its experts are loaded */
    while (ep_test_http_get(node.probe_url, "/readyz", NULL) != 200) {
    }
    right_rows(pool, model);
    readable_words();
    CHECK(ep_test_http_get(node.probe_url, "/metrics", &metrics) == 200, "no metrics");
    CHECK(strstr(metrics, "expertd_door_refused_total{reason=\"not_a_frame\"} 1\n") != NULL, "%s",
          metrics);
    free(metrics);
    CHECK(ep_test_process_stop(&node, SIGTERM, PATIENCE_MS) == 0, "the node did not drain");
    ep_test_process_destroy(&node);
    ep_buffer_pool_destroy(pool);
    ep_fixture_remove(model);
    ep_test_dir_remove(dir);
    return 0;
}
