/* SPDX-License-Identifier: Apache-2.0 */
/* What backend "ascend" says when it is not available, and what it refuses, over the emulated device. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "backends/backend.h"

static uint16_t matrix[64 * 64];

static ep_expert_source expert(uint32_t hidden, uint32_t inner)
{
    return (ep_expert_source){.hidden = hidden,
                              .inner = inner,
                              .format = EP_WEIGHTS_BF16,
                              .activation = EP_ACT_SILU,
                              .gate = matrix,
                              .up = matrix,
                              .down = matrix};
}

static ep_err open_on(const char *home, ep_numerics numerics, ep_backend **out_backend, ep_error *error)
{
    const ep_backend_config config = {.numerics = numerics};
    setenv("ASCEND_HOME_PATH", home, 1);
    return ep_backend_by_name("ascend")->open(&config, out_backend, error);
}

static ep_backend *open_emulated(void)
{
    ep_backend *backend = NULL;
    ep_error error;
    cr_assert_eq(open_on(EP_TEST_CANN, EP_NUMERICS_AUTO, &backend, &error), EP_OK, "%s", error.text);
    return backend;
}

static void expect_text(const ep_error *error, const char *part)
{
    cr_assert_not_null(strstr(error->text, part), "want '%s' in '%s'", part, error->text);
}

Test(ascend, without_libraries_it_says_which_and_what_to_do)
{
    ep_backend *backend = NULL;
    ep_error error;
    cr_assert_eq(open_on("/nonexistent", EP_NUMERICS_AUTO, &backend, &error), EP_ERR_UNAVAILABLE);
    expect_text(&error, "not available (backend: cpu computes without a device): neither libacl_rt.so nor "
                        "libascendcl.so can be opened: ");
    cr_assert_null(backend);
}

Test(ascend, without_a_device_it_says_so)
{
    ep_backend *backend = NULL;
    ep_error error;
    setenv("EP_CANN_DEVICES", "0", 1);
    cr_assert_eq(open_on(EP_TEST_CANN, EP_NUMERICS_AUTO, &backend, &error), EP_ERR_UNAVAILABLE);
    expect_text(&error, "there is no device (ACL_ERROR_RT_NO_DEVICE, code 207004) EL0004: no device");
    setenv("EP_CANN_DEVICES", "1", 1);
    backend = open_emulated(); /* nothing is left of the first try */
    backend->ops->close(backend);
}

Test(ascend, two_share_the_runtime_and_the_last_ends_it)
{
    ep_backend_weights *weights = NULL;
    ep_error error;
    const ep_expert_source source = expert(8, 8);
    ep_backend *first = open_emulated();
    ep_backend *second = open_emulated();
    first->ops->close(first);
    cr_assert_eq(second->ops->weights_load(second, &source, &weights, &error), EP_OK, "%s", error.text);
    second->ops->weights_unload(second, weights);
    second->ops->close(second);
}

Test(ascend, numerics_are_its_own)
{
    ep_backend *backend = NULL;
    ep_error error;
    char id[EP_NUMERICS_ID_BYTES];
    cr_assert_eq(open_on(EP_TEST_CANN, EP_NUMERICS_BF16DP, &backend, &error), EP_ERR_INVALID_ARGUMENT);
    expect_text(&error, "numerics must be auto");
    backend = open_emulated();
    cr_assert_eq(backend->ops->numerics_id(backend, EP_WEIGHTS_F16, 0, id), EP_OK);
    cr_assert_eq(strncmp(id, "ascend/f16/rne/", 15), 0, "%s", id);
    cr_assert_eq(backend->ops->numerics_id(backend, EP_WEIGHTS_F32, 0, id), EP_ERR_UNIMPLEMENTED);
    cr_assert_eq(backend->ops->numerics_id(backend, EP_WEIGHTS_MXFP4, 0, id), EP_ERR_UNIMPLEMENTED);
    backend->ops->close(backend);
}

static void expect_refused(ep_backend *backend, const ep_expert_source *source, const char *part)
{
    ep_backend_weights *weights = NULL;
    ep_error error;
    cr_assert_eq(backend->ops->weights_load(backend, source, &weights, &error), EP_ERR_UNIMPLEMENTED);
    expect_text(&error, part);
    expect_text(&error, "ascend");
    cr_assert_null(weights);
    cr_assert_eq(backend->ops->weights_bytes(backend, source), 0);
}

Test(ascend, refuses_what_the_operators_do_not_do)
{
    ep_backend *backend = open_emulated();
    ep_expert_source source = expert(8, 8);
    source.format = EP_WEIGHTS_F32;
    expect_refused(backend, &source, "f32 weights, allowed: bf16, f16");
    source = expert(8, 8);
    source.activation = EP_ACT_SWIGLU_OAI;
    source.numbers = (ep_activation_numbers){.alpha = 1.702f, .beta = 1.0f, .limit = 7.0f};
    expect_refused(backend, &source, "activation swiglu_oai, allowed: silu");
    source = expert(8, 8);
    source.bias_dtype = EP_DTYPE_BF16;
    source.down_bias = matrix;
    expect_refused(backend, &source, "biases");
    source = expert(8, 32768);
    expect_refused(backend, &source, "at most 65535 columns; here H is 8 and twice I is 65536");
    backend->ops->close(backend);
}

Test(ascend, a_full_device_is_refused_with_figures_and_the_key)
{
    ep_backend_weights *weights = NULL;
    const ep_expert_source source = expert(64, 64);
    ep_error error;
    setenv("EP_CANN_HBM_BYTES", "400000", 1); /* the known-answer run's buffers stay */
    ep_backend *backend = open_emulated();
    int loaded = 0;
    ep_backend_weights *all[16];
    while ((backend->ops->weights_load(backend, &source, &weights, &error)) == EP_OK) {
        cr_assert_lt(loaded, 16);
        all[loaded++] = weights;
        weights = NULL;
    }
    cr_assert_gt(loaded, 0);
    cr_assert_eq(error.code, EP_ERR_RESOURCE_EXHAUSTED);
    expect_text(&error, "an expert of 24576 bytes does not fit: ");
    expect_text(&error, "of 400000 bytes of device 0 are free");
    expect_text(&error, "lower weight_bytes_max");
    backend->ops->weights_unload(backend, all[--loaded]); /* room again */
    cr_assert_eq(backend->ops->weights_load(backend, &source, &all[loaded], &error), EP_OK, "%s", error.text);
    for (int i = 0; i <= loaded; i++) {
        backend->ops->weights_unload(backend, all[i]);
    }
    backend->ops->close(backend);
}
