/* SPDX-License-Identifier: Apache-2.0 */
/* Calls Forward by hand and computes the expected reply. */
#include "support/forward_call.h"

#include <stdlib.h>
#include <string.h>

#include "backends/backend.h"
#include "base/clock.h"
#include "base/numeric.h"
#include "base/check.h"
#include "base/random.h"
#include "moe/node_sum.h"
#include "moe/quantize.h"
#include "wire/forward_codec.h"

#define READY_MS 20000
#define CALL_MS 20000

ep_err ep_test_peer_open(ep_test_peer *peer, const char *url, ep_error *out_error)
{
    memset(peer, 0, sizeof(*peer));
    ep_err err = ep_timer_service_create("ep-test", &peer->timers);
    err = err == EP_OK ? ep_buffer_pool_create(0, 64 << 20, &peer->pool) : err;
    if (err != EP_OK) {
        ep_test_peer_close(peer);
        return ep_error_set(out_error, err, "no memory for a test peer");
    }
    peer->common = (ep_rpc_common){.timers = peer->timers,
                                   .pool = peer->pool,
                                   .token = "",
                                   .node = "",
                                   .role = "client",
                                   .payload_crc = true};
    peer->common.incarnation = ep_random_id();
    ep_rpc_limits_default(&peer->common.limits);
    ep_rpc_channel_config config = {
        .common = peer->common, .address = {.url = url}, .connection_class = "decode"};
    config.reconnect = true;
    err = ep_rpc_channel_create(&config, &peer->channel, out_error);
    if (err == EP_OK) {
        err = ep_rpc_channel_wait_ready(peer->channel, ep_clock_now_ns() + READY_MS * EP_NS_PER_MS,
                                        out_error);
    }
    if (err != EP_OK) {
        ep_test_peer_close(peer);
    }
    return err;
}

void ep_test_peer_close(ep_test_peer *peer)
{
    ep_rpc_channel_destroy(peer->channel);
    ep_buffer_pool_destroy(peer->pool);
    ep_timer_service_destroy(peer->timers);
    memset(peer, 0, sizeof(*peer));
}

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    ep_test_pending *pending = arg;
    pthread_mutex_lock(&pending->lock);
    pending->result = error != NULL ? error->code : EP_OK;
    if (error != NULL) {
        pending->error = *error;
    } else {
        const Expertd__V1__ForwardReply *header = (const Expertd__V1__ForwardReply *)reply->header;
        pending->reply_bytes = reply->tensor_bytes;
        pending->queue_us = header->queue_us;
        pending->compute_us = header->compute_us;
        if (pending->out_rows != NULL && reply->tensor_bytes == pending->out_bytes &&
            pending->out_bytes > 0) {
            memcpy(pending->out_rows, reply->tensors, reply->tensor_bytes);
        }
    }
    pending->is_done = true;
    pthread_cond_signal(&pending->changed);
    pthread_mutex_unlock(&pending->lock);
}

static ep_err pack(const ep_test_peer *peer, const ep_test_forward *f, ep_buffer **out_tensors)
{
    ep_forward_layout layout;
    ep_buffer *tensors;
    const bool has_scales = f->weight_on_input || f->node_sum;
    if (!ep_forward_layout_make(f->rows, f->slots, f->hidden, f->x_dtype, has_scales, &layout) ||
        (f->node_sum && !ep_forward_layout_add_places(&layout, f->slots))) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    ep_err err = ep_buffer_acquire(peer->pool, layout.total_bytes, &tensors);
    if (err != EP_OK) {
        return err;
    }
    memset(tensors->data, 0, layout.total_bytes);
    if (f->rows > 0) {
        memcpy(tensors->data + layout.x_offset, f->x,
               (size_t)f->rows * f->hidden * ep_dtype_bytes(f->x_dtype));
    }
    if (f->x_dtype == EP_DTYPE_I8 && f->rows > 0) {
        memcpy(tensors->data + layout.row_scales_offset, f->row_scales, f->rows * sizeof(float));
    }
    if (f->slots > 0) {
        memcpy(tensors->data + layout.slots_offset, f->wire_slots, f->slots * sizeof(ep_wire_slot));
    }
    if (has_scales && f->slots > 0) {
        memcpy(tensors->data + layout.slot_scales_offset, f->slot_scales, f->slots * sizeof(float));
    }
    if (f->node_sum && f->slots > 0) {
        memcpy(tensors->data + layout.slot_places_offset, f->slot_places,
               f->slots * sizeof(uint16_t));
    }
    *out_tensors = tensors;
    return EP_OK;
}

static char *text_of(const char *text, const char *otherwise)
{
    return (char *)(uintptr_t)(text != NULL ? text : otherwise);
}

ep_err ep_test_forward_begin(ep_test_peer *peer, const ep_test_forward *f, void *out_rows,
                             ep_test_pending *pending, ep_error *out_error)
{
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    ep_buffer *tensors = NULL;
    ep_err err = pack(peer, f, &tensors);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "the test's request cannot be packed");
    }
    memset(pending, 0, sizeof(*pending));
    pthread_mutex_init(&pending->lock, NULL);
    pthread_cond_init(&pending->changed, NULL);
    ep_error_clear(&pending->error);
    pending->out_rows = out_rows;
    ep_reply_layout reply;
    ep_reply_layout_make(f->node_sum ? f->rows : f->slots, f->hidden, f->reply_dtype,
                         f->reply_quant, &reply);
    pending->out_bytes = reply.total_bytes;
    epoch.term = f->epoch.term;
    epoch.number = f->epoch.number;
    header.model = text_of(f->model, "demo");
    header.version = text_of(f->version, "");
    header.numerics = text_of(f->numerics, "");
    header.layer = f->layer;
    header.epoch = f->epoch.term != 0 || f->epoch.number != 0 ? &epoch : NULL;
    header.rows = f->rows;
    header.slots = f->slots;
    header.hidden = f->hidden;
    header.x_dtype = (uint32_t)f->x_dtype;
    header.reply_dtype = (uint32_t)f->reply_dtype;
    header.weight_on_input = f->weight_on_input;
    header.prefill = f->prefill;
    header.want_timing = f->want_timing;
    header.reply_quant = (uint32_t)f->reply_quant;
    header.node_sum = f->node_sum;
    header.step_group = f->step_group;
    header.step_group_size = f->step_group_size;
    const ep_rpc_metadata tenant = {"tenant", f->tenant};
    header.relay = f->relay;
    header.n_relay = f->relay_count;
    ep_rpc_request request = {
        .method = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward"),
        .header = &header.base,
        .tensors = tensors,
        .metadata = &tenant,
        .metadata_count = f->tenant != NULL ? 1 : 0,
        .deadline_ns =
            ep_clock_now_ns() + (f->timeout_ms != 0 ? f->timeout_ms : CALL_MS) * EP_NS_PER_MS,
    };
    err = ep_rpc_call_start(peer->channel, &request, on_reply, pending, &pending->id, out_error);
    ep_buffer_unref(tensors);
    return err;
}

bool ep_test_forward_is_done(ep_test_pending *pending)
{
    pthread_mutex_lock(&pending->lock);
    bool is_done = pending->is_done;
    pthread_mutex_unlock(&pending->lock);
    return is_done;
}

ep_err ep_test_forward_wait(ep_test_pending *pending, ep_error *out_error)
{
    pthread_mutex_lock(&pending->lock);
    while (!pending->is_done) {
        pthread_cond_wait(&pending->changed, &pending->lock);
    }
    pthread_mutex_unlock(&pending->lock);
    if (out_error != NULL) {
        *out_error = pending->error;
    }
    pthread_mutex_destroy(&pending->lock);
    pthread_cond_destroy(&pending->changed);
    return pending->result;
}

ep_err ep_test_forward_run(ep_test_peer *peer, const ep_test_forward *forward, void *out_rows,
                           ep_error *out_error)
{
    ep_test_pending pending;
    ep_err err = ep_test_forward_begin(peer, forward, out_rows, &pending, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_test_forward_wait(&pending, out_error);
    if (err == EP_OK && pending.reply_bytes != pending.out_bytes) {
        return ep_error_set(out_error, EP_ERR_DATA_LOSS, "reply has %zu bytes, %zu were expected",
                            pending.reply_bytes, pending.out_bytes);
    }
    return err;
}

void ep_test_fill_rows(uint64_t seed, ep_dtype dtype, size_t count, void *out)
{
    for (size_t i = 0; i < count; i++) {
        float value = (float)((int64_t)(ep_splitmix64(&seed) >> 40) - (1 << 23)) * 0x1p-22f;
        if (dtype == EP_DTYPE_F32) {
            ((float *)out)[i] = value;
        } else {
            ((uint16_t *)out)[i] =
                dtype == EP_DTYPE_BF16 ? ep_f32_to_bf16(value) : ep_f32_to_f16(value);
        }
    }
}

typedef struct one_job {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_done;
    ep_err result;
} one_job;

static void on_job_done(ep_job *job, ep_err result)
{
    one_job *wait = job->arg;
    pthread_mutex_lock(&wait->lock);
    wait->is_done = true;
    wait->result = result;
    pthread_cond_signal(&wait->changed);
    pthread_mutex_unlock(&wait->lock);
}

static ep_err run_job(ep_backend *backend, ep_job *job)
{
    one_job wait = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    job->done = on_job_done;
    job->arg = &wait;
    ep_err err = ep_backend_run(backend, job);
    if (err != EP_OK) {
        return err;
    }
    pthread_mutex_lock(&wait.lock);
    while (!wait.is_done) {
        pthread_cond_wait(&wait.changed, &wait.lock);
    }
    pthread_mutex_unlock(&wait.lock);
    return wait.result;
}

static ep_err expect_slot(ep_backend *backend, const ep_checkpoint *checkpoint,
                          const ep_test_forward *f, uint32_t slot, void *out, ep_error *out_error)
{
    ep_expert_data data = {0};
    ep_backend_weights *weights = NULL;
    ep_wire_slot place = f->wire_slots[slot];
    ep_err err = ep_checkpoint_read_expert(checkpoint, f->layer, place.expert, &data, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = backend->ops->weights_load(backend, &data.source, &weights, out_error);
    ep_job_row row = {
        .x = (const char *)f->x + (size_t)place.row * f->hidden * ep_dtype_bytes(f->x_dtype),
        .x_scale = f->x_dtype == EP_DTYPE_I8 ? f->row_scales[place.row] : 1.0f,
        .input_weight = f->weight_on_input ? f->slot_scales[slot] : 1.0f,
        .out = out,
    };
    ep_job job = {.weights = weights,
                  .rows = &row,
                  .rows_count = 1,
                  .x_dtype = f->x_dtype,
                  .out_dtype = f->reply_dtype,
                  .weight_on_input = f->weight_on_input};
    if (err == EP_OK) {
        err = run_job(backend, &job);
    }
    backend->ops->weights_unload(backend, weights);
    ep_expert_data_free(&data);
    return err;
}

/* Returns the numerics that a node takes in this environment. */
static ep_numerics numerics_of_nodes(void)
{
    static const char *const words[] = {"portable", "bf16dp", "bf16odd"}; /* as ep_numerics */
    const char *wanted = getenv("EXPERTD_NUMERICS");
    for (int i = 0; wanted != NULL && i < 3; i++) {
        if (strcmp(wanted, words[i]) == 0) {
            return (ep_numerics)i;
        }
    }
    return EP_NUMERICS_AUTO;
}

ep_err ep_test_expected_rows(const char *checkpoint_path, const ep_test_forward *f, void *out_rows,
                             ep_error *out_error)
{
    ep_checkpoint *checkpoint = NULL;
    ep_backend *backend = NULL;
    ep_backend_config config = {.numerics = f->expected_with != NULL ? *f->expected_with
                                                                     : numerics_of_nodes(),
                                .threads = 1};
    ep_err err = ep_checkpoint_open(checkpoint_path, &checkpoint, out_error);
    err = err == EP_OK ? ep_backend_by_name("reference")->open(&config, &backend, out_error) : err;
    for (uint32_t s = 0; err == EP_OK && s < f->slots; s++) {
        err = expect_slot(backend, checkpoint, f, s,
                          (char *)out_rows + (size_t)s * f->hidden * ep_dtype_bytes(f->reply_dtype),
                          out_error);
    }
    if (backend != NULL) {
        backend->ops->close(backend);
    }
    ep_checkpoint_close(checkpoint);
    return err;
}

#define REPLY_HIDDEN_MAX 64
#define REPLY_SLOTS_MAX 16

size_t ep_test_expected_reply(const ep_test_forward *f, const uint16_t *rows, void *out_reply)
{
    uint32_t begins[REPLY_SLOTS_MAX + 1], order[REPLY_SLOTS_MAX];
    float scratch[2 * REPLY_HIDDEN_MAX];
    uint16_t sums[REPLY_SLOTS_MAX * REPLY_HIDDEN_MAX];
    uint8_t *reply = out_reply;
    ep_reply_layout layout;
    EP_ASSERT(f->hidden <= REPLY_HIDDEN_MAX && f->slots <= REPLY_SLOTS_MAX &&
              f->rows <= REPLY_SLOTS_MAX);
    EP_ASSERT(f->reply_dtype == EP_DTYPE_BF16);
    const uint32_t count = f->node_sum ? f->rows : f->slots;
    if (f->node_sum) {
        const ep_node_sum_slots slots = {.rows_count = f->rows,
                                         .slots_count = f->slots,
                                         .slot_rows = &f->wire_slots->row,
                                         .slot_stride = sizeof(*f->wire_slots) / sizeof(uint32_t),
                                         .places = f->slot_places,
                                         .scales = f->slot_scales};
        ep_node_sum_order(&slots, begins, order);
        ep_node_sum(&slots, begins, order, rows, EP_DTYPE_BF16, f->hidden, scratch, sums);
        rows = sums;
    }
    ep_reply_layout_make(count, f->hidden, EP_DTYPE_BF16, f->reply_quant, &layout);
    memset(reply, 0, layout.total_bytes);
    if (f->reply_quant == EP_COMBINE_PLAIN) {
        memcpy(reply, rows, layout.total_bytes);
        return layout.total_bytes;
    }
    for (uint32_t r = 0; r < count; r++) {
        ep_row_quantize_i8_blocks(rows + (size_t)r * f->hidden, EP_DTYPE_BF16, f->hidden,
                                  (int8_t *)reply + r * layout.row_bytes,
                                  reply + layout.scales_offset + r * layout.scale_row_bytes);
    }
    return layout.total_bytes;
}
