/* SPDX-License-Identifier: Apache-2.0 */
/* Which devices a node opens, which it does without, and what it says of them; and that they
 * compute the same bits. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "expertd/node_models.h"
#include "expertd/node_devices.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"

static struct {
    uint32_t count;
    uint64_t broken; /* bit d: device d cannot be opened */
    ep_err why;
    uint32_t open_count;
    uint32_t losses;
    ep_backend_config configs[EP_BACKEND_DEVICES_MAX];
} fake;
static ep_backend fakes[EP_BACKEND_DEVICES_MAX];
static ep_node_devices devices;
static ep_error error;

static ep_err fake_probe(uint32_t *out_devices, ep_error *out_error)
{
    *out_devices = fake.count;
    return fake.count > 0
               ? EP_OK
               : ep_error_set(out_error, EP_ERR_UNAVAILABLE, "the driver shows no device");
}

static const ep_backend_ops fake_ops;

static ep_err fake_open(const ep_backend_config *config, ep_backend **out_backend,
                        ep_error *out_error)
{
    if (fake.count == 0 || (fake.broken >> config->device & 1) != 0) {
        return ep_error_set(out_error, fake.why, "device %u does not answer", config->device);
    }
    fake.open_count++;
    fake.configs[config->device] = *config;
    fakes[config->device].ops = &fake_ops;
    *out_backend = &fakes[config->device];
    return EP_OK;
}

static void fake_close(ep_backend *backend)
{
    EP_ASSERT(backend != NULL);
    fake.open_count--;
}

static void fake_read(ep_backend *backend, ep_backend_device *out_device)
{
    (void)backend;
    *out_device = (ep_backend_device){.weight_bytes_max = 1 << 20};
}

/* As each device's bits are named by its place. */
static ep_err fake_numerics(ep_backend *backend, ep_weight_format format, bool wide_inputs,
                            uint32_t others, char out_id[EP_NUMERICS_ID_BYTES])
{
    (void)wide_inputs;
    (void)others;
    if (format == EP_WEIGHTS_MXFP4) { /* as a device without it */
        return EP_ERR_UNIMPLEMENTED;
    }
    snprintf(out_id, EP_NUMERICS_ID_BYTES, "fake/%s/%td", ep_weight_format_name(format),
             backend - fakes);
    return EP_OK;
}

static size_t fake_bytes(ep_backend *backend, const ep_expert_source *source)
{
    (void)backend;
    (void)source;
    return 1;
}

static const ep_backend_ops fake_ops = {.name = "fake",
                                        .probe = fake_probe,
                                        .open = fake_open,
                                        .close = fake_close,
                                        .device_read = fake_read,
                                        .numerics_id = fake_numerics,
                                        .weights_bytes = fake_bytes};

static void count_loss(void *arg)
{
    cr_assert_eq(arg, &fake);
    fake.losses++;
}

static ep_err open_fake(uint32_t count, uint64_t broken)
{
    const ep_backend_config config = {.memory_bytes = 7};
    fake.count = count;
    fake.broken = broken;
    fake.why = fake.why != EP_OK ? fake.why : EP_ERR_UNAVAILABLE;
    devices.on_lost = count_loss;
    devices.arg = &fake;
    return ep_node_devices_open(&devices, &fake_ops, &config, &error);
}

static void expect_described(const char *text)
{
    char got[EP_ERROR_TEXT_BYTES];
    ep_node_devices_describe(&devices, got, sizeof(got));
    cr_expect_str_eq(got, text);
}

Test(node_devices, all_are_opened_and_a_loss_is_told)
{
    ASSERT_OK(open_fake(3, 0), error);
    cr_assert_eq(devices.count, 3);
    cr_assert_eq(devices.backends_count, 3);
    expect_described("3 devices");
    for (uint32_t d = 0; d < 3; d++) {
        cr_expect_eq(fake.configs[d].device, d);
        cr_expect_eq(fake.configs[d].memory_bytes, 7, "the budget of each");
    }
    fake.configs[2].on_lost(fake.configs[2].arg, "no heartbeat");
    cr_expect_eq(fake.losses, 1);
    cr_expect_eq(ep_node_devices_lost(&devices), 1u << 2);
    expect_described("1 of 3 devices lost: device 2: no heartbeat");
    ep_node_devices_close(&devices);
    cr_expect_eq(fake.open_count, 0);
}

Test(node_devices, one_that_cannot_be_opened_is_lost_where_others_can)
{
    ASSERT_OK(open_fake(3, 1u << 0), error);
    cr_expect_eq(devices.backends_count, 2);
    cr_expect_eq(devices.backends[0], &fakes[1]);
    cr_expect_eq(devices.devices[1].store_index, 0);
    cr_expect_eq(devices.devices[2].store_index, 1);
    cr_expect_null(devices.devices[0].backend);
    cr_expect_eq(ep_node_devices_lost(&devices), 1u << 0);
    expect_described("1 of 3 devices lost: device 0: device 0 does not answer");
    ep_node_devices_close(&devices);
}

Test(node_devices, without_any_device_or_with_a_bad_configuration_the_node_does_not_start)
{
    cr_expect_eq(open_fake(2, 3), EP_ERR_UNAVAILABLE);
    cr_expect_str_eq(error.text, "device 0 does not answer");
    cr_expect_eq(open_fake(0, 0), EP_ERR_UNAVAILABLE);
    fake.why = EP_ERR_INVALID_ARGUMENT;
    cr_expect_eq(open_fake(2, 1u << 1), EP_ERR_INVALID_ARGUMENT);
    cr_expect_eq(fake.open_count, 0, "what was open is closed");
    cr_expect_eq(open_fake(65, 0), EP_ERR_UNAVAILABLE);
    EXPECT_TEXT(error, "shows 65 devices, allowed: up to 64; ASCEND_RT_VISIBLE_DEVICES");
}

Test(node_devices, devices_that_compute_different_bits_do_not_share_a_model)
{
    char dir[EP_FIXTURE_PATH_BYTES];
    const ep_fixture_config fixture = ep_fixture_default();
    ep_node_models models;
    ep_fixture_new(&fixture, dir);
    ep_node_model_config model = {.name = "demo", .path = dir, .choice = EP_EXPERTS_ALL};
    const ep_node_config config = {.models_count = 1, .models = &model};
    cr_assert_eq(open_fake(2, 0), EP_OK);
    EXPECT_FAILS(ep_node_models_open(&models, &config, devices.backends, 2, NULL, NULL, &error),
                 EP_ERR_FAILED_PRECONDITION, error,
                 "model demo: the devices of this node compute different "
                 "bits (fake/bf16/0 and fake/bf16/1)");
    ep_node_models_close(&models);
    ep_node_devices_close(&devices);
    ep_fixture_remove(dir);
}

/* w4a8 and the like are families of CPUs. */
Test(node_devices, of_a_device_with_rules_of_its_own_no_family_is_logged)
{
    char log[4096], dir[EP_FIXTURE_PATH_BYTES];
    ep_fixture_config fixture = ep_fixture_default();
    ep_node_models models;
    int ends[2];
    ep_fixture_new(&fixture, dir);
    ep_node_model_config model = {.name = "demo", .path = dir, .choice = EP_EXPERTS_ALL};
    const ep_node_config config = {
        .models_count = 1, .models = &model, .numerics = EP_NUMERICS_W4A8};
    cr_assert_eq(open_fake(1, 0), EP_OK);
    const ep_weight_store_config store_config = {
        .backends = devices.backends, .backends_count = 1, .on_change = count_loss, .arg = &fake};
    ep_weight_store *store = NULL;
    ASSERT_OK(ep_weight_store_create(&store_config, &store, &error), error);
    cr_assert(pipe(ends) == 0 && dup2(ends[1], STDERR_FILENO) >= 0 && close(ends[1]) == 0);
    ep_log_start(EP_LOG_INFO, EP_LOG_TEXT);
    ep_log(EP_LOG_INFO, "begin", EP_KV(node, "a"));
    ASSERT_OK(ep_node_models_open(&models, &config, devices.backends, 1, store, NULL, &error),
              error);
    ep_log_start(EP_LOG_OFF, EP_LOG_TEXT);
    const ssize_t count = read(ends[0], log, sizeof(log) - 1);
    cr_assert_gt(count, 0);
    log[count] = 0;
    cr_expect(strstr(log, "event=begin") != NULL, "%s", log);
    cr_expect_null(strstr(log, "event=numerics"), "%s", log);
    ep_weight_store_destroy(store);
    ep_node_models_close(&models);
    ep_node_devices_close(&devices);
    ep_fixture_remove(dir);
}

/* What a device cannot compute with ends the start, with what to do: in whose favour depends on who
 * asked for the format. */
Test(node_devices, a_format_that_a_device_does_not_have_is_refused_with_what_to_do)
{
    char dir[2][EP_FIXTURE_PATH_BYTES];
    ep_fixture_config fixture = ep_fixture_default();
    ep_node_models models;
    ep_node_model_config model = {.name = "demo", .choice = EP_EXPERTS_ALL};
    const ep_node_config config = {.models_count = 1, .models = &model};
    ep_fixture_new(&fixture, dir[0]);
    fixture.expert_format = EP_WEIGHTS_MXFP4;
    fixture.inner = 32;
    ep_fixture_new(&fixture, dir[1]);
    cr_assert_eq(open_fake(1, 0), EP_OK);
    model.path = dir[0];
    model.quant = ep_weight_quant_find("mxfp4");
    EXPECT_FAILS(ep_node_models_open(&models, &config, devices.backends, 1, NULL, NULL, &error),
                 EP_ERR_UNIMPLEMENTED, error,
                 "model demo: backend fake cannot compute with mxfp4 weights: take weight_quant "
                 "mxfp4 out, or set backend: cpu");
    ep_node_models_close(&models);
    model.path = dir[1];
    model.quant = NULL;
    EXPECT_FAILS(ep_node_models_open(&models, &config, devices.backends, 1, NULL, NULL, &error),
                 EP_ERR_UNIMPLEMENTED, error, "with mxfp4 weights: set backend: cpu");
    ep_node_models_close(&models);
    ep_node_devices_close(&devices);
    ep_fixture_remove(dir[0]);
    ep_fixture_remove(dir[1]);
}
