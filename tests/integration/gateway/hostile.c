/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that are wrong in one field each, then random ones: each gets an error that names the
 * field, nobody else notices. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/random.h"
#include "gateway_fixture.h"
#include "wire/gateway_codec.h"

typedef Expertd__V1__GatewayForwardRequest request_message;

enum { TOKENS = 4, RANDOM_CALLS = 1000 };

static void good_request(request_message *header, Expertd__V1__GateConfig *gate, bool gated)
{
    expertd__v1__gateway_forward_request__init(header);
    expertd__v1__gate_config__init(gate);
    header->model = (char *)(uintptr_t)(gated ? "deepseek" : "mixtral");
    header->layer = gated ? 1 : 0;
    header->tokens = TOKENS;
    header->hidden = GATEWAY_HIDDEN;
    header->top_k = GATEWAY_TOP_K;
    header->x_dtype = EP_DTYPE_BF16;
    header->out_dtype = EP_DTYPE_BF16;
    if (gated) {
        gate->select = EP_GATE_SIGMOID;
        gate->weight = EP_GATE_SIGMOID;
        gate->group_best = 2;
        gate->has_bias = true;
        header->gate = gate;
        header->experts = GATEWAY_EXPERTS;
    } else {
        header->ids_dtype = EP_DTYPE_I32;
        header->scales_dtype = EP_DTYPE_F32;
    }
}

typedef struct wrong_case {
    const char *what;
    bool gated;
    size_t offset; /* of a u32 field in the request, or with in_gate in the gate */
    bool in_gate;
    uint32_t value;
    const char *expected; /* in the text */
} wrong_case;

#define FIELD(name) offsetof(request_message, name)
#define GATE(name) offsetof(Expertd__V1__GateConfig, name)

static const wrong_case cases[] = {
    {"more tokens than bytes", false, FIELD(tokens), false, TOKENS + 1, "tensor section has"},
    {"fewer tokens than bytes", false, FIELD(tokens), false, TOKENS - 1, "tensor section has"},
    {"tokens above the limit", false, FIELD(tokens), false, 65537,
     "tokens 65537: allowed 0..65536"},
    {"tokens 2^32-1", false, FIELD(tokens), false, UINT32_MAX, "tokens 4294967295"},
    {"hidden 0", false, FIELD(hidden), false, 0, "hidden 0: allowed 1..65536"},
    {"hidden 2^32-1", false, FIELD(hidden), false, UINT32_MAX, "hidden 4294967295"},
    {"top_k 65", false, FIELD(top_k), false, 65, "top_k 65: allowed 0..64"},
    {"x_dtype", false, FIELD(x_dtype), false, 6, "x_dtype 6"},
    {"x_dtype 2^32-1", false, FIELD(x_dtype), false, UINT32_MAX, "x_dtype 4294967295"},
    {"out_dtype 0", false, FIELD(out_dtype), false, 0, "out_dtype 0"},
    {"out_dtype i8", false, FIELD(out_dtype), false, 4, "out_dtype 4"},
    {"wire_dtype", false, FIELD(wire_dtype), false, 9, "wire_dtype 9"},
    {"ids_dtype", false, FIELD(ids_dtype), false, 3, "ids_dtype 3"},
    {"scales_dtype", false, FIELD(scales_dtype), false, 7, "scales_dtype 7"},
    {"experts without gate", false, FIELD(experts), false, 8, "experts 8: allowed 0 without gate"},
    {"weight_on", false, FIELD(weight_on), false, 2, "weight_on 2: allowed 0 (output), 1 (input)"},
    {"shared_source", false, FIELD(shared_source), false, 3,
     "shared_source 3: allowed 0 (service), 1 (caller), 2 (none)"},
    {"shared of no call", false, FIELD(shared_dtype), false, 1, "tensor section has"},
    {"shared of int8", false, FIELD(shared_dtype), false, 4,
     "shared_dtype 4: allowed 0 (none), 1 (bf16), 2 (f16), 3 (f32)"},
    {"dispatch_quant", false, FIELD(dispatch_quant), false, 1,
     "dispatch_quant 1: allowed 0 (plain), 2 (int8), 3 (fp8)"},
    {"a negative limit of x", false, FIELD(x_abs_max), false, 0xbf800000,
     "x_abs_max -1: allowed 0 (off) or more"},
    {"smooth_rows", false, FIELD(smooth_rows), false, 65536, "smooth_rows 65536: allowed 0..65535"},
    {"partial without its slots", false, FIELD(result), false, EP_MOE_PARTIAL,
     "partial_slots is missing"},
    {"half a step group", false, FIELD(step_group_size), false, 2,
     "step_group is 0, step_group_size 2"},
    {"nan_policy", false, FIELD(nan_policy), false, 4,
     "nan_policy 4: allowed 0 (pass), 1 (reject), 2 (zero), 3 (mean)"},
    {"mode", false, FIELD(mode), false, 3, "mode 3: allowed 0 (auto), 1 (decode), 2 (prefill)"},
    {"mode 2^31", false, FIELD(mode), false, 1u << 31, "mode 2147483648"},
    {"zero_experts", false, FIELD(zero_experts), false, 65536, "zero_experts 65536"},
    {"copy_experts", false, FIELD(copy_experts), false, 65536, "copy_experts 65536"},
    {"ids_dtype with gate", true, FIELD(ids_dtype), false, 6, "ids_dtype 6: allowed 0 with gate"},
    {"experts 0 with gate", true, FIELD(experts), false, 0,
     "experts 0: allowed 1..65535 with gate"},
    {"experts 2^32-1", true, FIELD(experts), false, UINT32_MAX, "experts 4294967295"},
    {"top_k 0 with gate", true, FIELD(top_k), false, 0, "top_k 0: allowed 1..64 with gate"},
    {"top_k above experts", true, FIELD(top_k), false, 9, "top_k 9"},
    {"select 0", true, GATE(select), true, 0, "gate.select 0: allowed 1..6"},
    {"select by what only weighs", true, GATE(select), true, 5, "selects by score 5"},
    {"weight 7", true, GATE(weight), true, 7, "gate.weight 7: allowed 1..6"},
    {"group_best", true, GATE(group_best), true, 3, "gate.group_best 3: allowed 0..2"},
    {"groups 257", true, GATE(groups), true, 257, "gate.groups 257"},
    {"groups that do not divide", true, GATE(groups), true, 3, "3 groups"},
    {"groups_kept", true, GATE(groups_kept), true, 9, "9 groups"},
    {"noise NaN", true, GATE(noise_temperature), true, 0x7fc00000,
     "noise temperature nan: allowed 0 (off) or 0.1..10"},
    {"dropout 1.0", true, GATE(expert_dropout), true, 0x3f800000,
     "expert dropout 1: allowed 0..0.5"},
    {"group_mask", true, GATE(group_mask), true, 2, "gate.group_mask 2: allowed 0..1"},
};

static uint8_t tensors[1 << 20];

static size_t bytes_for(const request_message *header)
{
    ep_gateway_layout layout;
    ep_error error;
    EP_TEST_CHECK(ep_gateway_layout_make(header, &layout, &error) == EP_OK, "%s", error.text);
    return layout.total_bytes;
}

static void expect(gateway_raw *raw, const char *what, const request_message *header, size_t bytes,
                   ep_err code, const char *text)
{
    ep_error error;
    gateway_raw_begin(raw, header, tensors, bytes, EP_TEST_PATIENCE_MS);
    ep_err err = gateway_raw_wait(raw, &error, NULL);
    EP_TEST_CHECK(err == code && (text == NULL || strstr(error.text, text) != NULL), "%s: %s: %s",
                  what, ep_err_name(err), error.text);
}

static void one_wrong_field(gateway_raw *raw)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        request_message header;
        Expertd__V1__GateConfig gate;
        good_request(&header, &gate, cases[i].gated);
        size_t bytes = bytes_for(&header);
        uint8_t *base = cases[i].in_gate ? (uint8_t *)&gate : (uint8_t *)&header;
        memcpy(base + cases[i].offset, &cases[i].value, sizeof(uint32_t));
        expect(raw, cases[i].what, &header, bytes, EP_ERR_INVALID_ARGUMENT, cases[i].expected);
    }
}

/* What only the layer, the values or the table can tell. */
static void wrong_values(gateway_raw *raw)
{
    request_message header;
    Expertd__V1__GateConfig gate;
    good_request(&header, &gate, false);
    size_t bytes = bytes_for(&header);
    expect(raw, "a byte too much", &header, bytes + 1, EP_ERR_INVALID_ARGUMENT,
           "tensor section has");
    expect(raw, "no tensors", &header, 0, EP_ERR_INVALID_ARGUMENT, "tensor section has 0 bytes");
    header.has_active_mask = true;
    size_t mask_bytes = bytes_for(&header);
    tensors[mask_bytes - 1] = 2;
    expect(raw, "mask value", &header, mask_bytes, EP_ERR_INVALID_ARGUMENT,
           "token mask is 2 at token 3: allowed 0 or 1");
    tensors[mask_bytes - 1] = 0;
    good_request(&header, &gate, false);
    header.allow_duplicates = true; /* all other ids are 0 */
    int32_t *ids = (int32_t *)(tensors + 64 * ((TOKENS * GATEWAY_HIDDEN * 2 + 63) / 64));
    ids[3] = 8 + 1;
    expect(raw, "expert id", &header, bytes, EP_ERR_INVALID_ARGUMENT, "9");
    ids[3] = INT32_MIN;
    expect(raw, "negative expert id", &header, bytes, EP_ERR_INVALID_ARGUMENT, "-2147483648");
    memset(tensors, 0, sizeof(tensors));
    expect(raw, "a good request", &header, bytes, EP_OK, NULL);
    header.model = (char *)(uintptr_t) "nobody";
    expect(raw, "unknown model", &header, bytes, EP_ERR_NOT_FOUND, "nobody");
    header.model = (char *)(uintptr_t) "mixtral";
    header.layer = 7;
    expect(raw, "unknown layer", &header, bytes, EP_ERR_NOT_FOUND, "7");
    header.layer = 0;
    header.numerics = (char *)(uintptr_t) "another";
    expect(raw, "other numerics", &header, bytes, EP_ERR_UNAVAILABLE, "numerics 'another'");
    good_request(&header, &gate, true);
    bytes = bytes_for(&header);
    float nan = __builtin_nanf("");
    memcpy(tensors + bytes - sizeof(nan), &nan, sizeof(nan));
    expect(raw, "bias", &header, bytes, EP_ERR_INVALID_ARGUMENT, "bias of expert 7");
    memset(tensors, 0, sizeof(tensors));
    memcpy(tensors + TOKENS * GATEWAY_HIDDEN * 2, &nan, sizeof(nan));
    header.nan_policy = EP_MOE_NAN_REJECT;
    expect(raw, "logit", &header, bytes, EP_ERR_INVALID_ARGUMENT, "NaN at token 0, expert 0");
    header.nan_policy = EP_MOE_NAN_PASS;
    expect(raw, "a logit that passes", &header, bytes, EP_OK, NULL);
    memset(tensors, 0, sizeof(tensors));
    gate.epsilon = nan;
    expect(raw, "epsilon", &header, bytes, EP_ERR_INVALID_ARGUMENT, "epsilon");
    good_request(&header, &gate, true);
    header.experts = 4;
    expect(raw, "another E than the layer's", &header, bytes_for(&header), EP_ERR_INVALID_ARGUMENT,
           "has 8");
}

/* Any u32 fields and any section: an error or, by luck, a result; never an end of the process. */
static void random_requests(gateway_raw *raw)
{
    static const size_t fields[] = {FIELD(layer),
                                    FIELD(tokens),
                                    FIELD(hidden),
                                    FIELD(top_k),
                                    FIELD(x_dtype),
                                    FIELD(ids_dtype),
                                    FIELD(scales_dtype),
                                    FIELD(out_dtype),
                                    FIELD(experts),
                                    FIELD(zero_experts),
                                    FIELD(weight_on),
                                    FIELD(shared_source),
                                    FIELD(nan_policy),
                                    FIELD(mode),
                                    FIELD(wire_dtype),
                                    FIELD(const_experts),
                                    FIELD(const_rule),
                                    FIELD(result),
                                    FIELD(comm_alg),
                                    FIELD(combine_at),
                                    FIELD(dispatch_quant),
                                    FIELD(combine_quant),
                                    FIELD(shared_dtype),
                                    FIELD(smooth_rows),
                                    FIELD(const_v_dtype),
                                    FIELD(has_active_slots),
                                    FIELD(has_partial_slots)};
    static const uint32_t values[] = {0, 1,  2,  3,   4,     6,     7,        8,
                                      9, 64, 65, 255, 65535, 65536, 1u << 31, UINT32_MAX};
    uint64_t state = 42;
    uint32_t succeeded = 0;
    for (uint32_t i = 0; i < RANDOM_CALLS; i++) {
        request_message header;
        Expertd__V1__GateConfig gate;
        ep_gateway_layout layout;
        ep_error error;
        good_request(&header, &gate, ep_splitmix64(&state) % 2 == 0);
        for (uint32_t n = ep_splitmix64(&state) % 4; n > 0; n--) {
            uint32_t value = values[ep_splitmix64(&state) % EP_ARRAY_COUNT(values)];
            memcpy((uint8_t *)&header + fields[ep_splitmix64(&state) % EP_ARRAY_COUNT(fields)],
                   &value, sizeof(value));
        }
        header.allow_duplicates = ep_splitmix64(&state) % 2 == 0;
        header.has_active_mask = ep_splitmix64(&state) % 2 == 0;
        bool fits = ep_gateway_layout_make(&header, &layout, &error) == EP_OK &&
                    layout.total_bytes <= sizeof(tensors);
        size_t bytes = fits && ep_splitmix64(&state) % 4 != 0 ? layout.total_bytes
                                                              : ep_splitmix64(&state) % 4096;
        for (size_t b = 0; b < bytes; b++) {
            tensors[b] = (uint8_t)(ep_splitmix64(&state) % 8 == 0 ? ep_splitmix64(&state) : 0);
        }
        gateway_raw_begin(raw, &header, tensors, bytes, EP_TEST_PATIENCE_MS);
        ep_err err = gateway_raw_wait(raw, &error, NULL);
        EP_TEST_CHECK(err == EP_OK || err == EP_ERR_INVALID_ARGUMENT || err == EP_ERR_NOT_FOUND,
                      "call %u: %s: %s", i, ep_err_name(err), error.text);
        succeeded += err == EP_OK;
    }
    printf("%d random requests, %u of them right by chance\n", RANDOM_CALLS, succeeded);
    memset(tensors, 0, sizeof(tensors));
}

int main(void)
{
    static gateway_fixture f;
    request_message header;
    Expertd__V1__GateConfig gate;
    gateway_fixture_init(&f, 1, NULL);
    gateway_wait_table(&f);
    gateway_raw *raw = gateway_raw_open(&f);
    one_wrong_field(raw);
    wrong_values(raw);
    random_requests(raw);
    good_request(&header, &gate, true);
    expect(raw, "a good request afterwards", &header, bytes_for(&header), EP_OK, NULL);
    EP_TEST_CHECK(
        gateway_metric(&f, "expertd_gateway_requests_total{result=\"INVALID_ARGUMENT\"}") >=
            EP_ARRAY_COUNT(cases),
        "not counted");
    ep_test_cluster_expect_alive(&f.cluster);
    gateway_raw_close(raw);
    gateway_fixture_fini(&f);
    printf("%zu wrong fields, each named\n", EP_ARRAY_COUNT(cases));
    return 0;
}
