/* SPDX-License-Identifier: Apache-2.0 */
/* Tensor names written out: fixture and reader share the tables, so only literal names can judge
 * them. */
#include <criterion/criterion.h>

#include <string.h>

#include "base/check.h"
#include "model/tensor_names.h"

static const ep_tensor_names n1 = {.family = EP_NAMES_N1, .prefix = "model."};
static const ep_tensor_names n2 = {.family = EP_NAMES_N2, .prefix = ""};

Test(tensor_names, experts_are_gate_up_down)
{
    static const char *const n1_names[] = {"model.layers.3.mlp.experts.17.gate_proj.weight",
                                           "model.layers.3.mlp.experts.17.up_proj.weight",
                                           "model.layers.3.mlp.experts.17.down_proj.weight"};
    static const char *const n2_names[] = {"layers.3.block_sparse_moe.experts.17.w1.weight",
                                           "layers.3.block_sparse_moe.experts.17.w3.weight",
                                           "layers.3.block_sparse_moe.experts.17.w2.weight"};
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        char name[EP_TENSOR_NAME_BYTES];
        ep_tensor_name_expert(&n1, 3, 17, m, "weight", name);
        cr_expect_str_eq(name, n1_names[m]);
        ep_tensor_name_expert(&n2, 3, 17, m, "weight", name);
        cr_expect_str_eq(name, n2_names[m]);
    }
}

Test(tensor_names, shared_experts_and_routers_in_every_spelling)
{
    static const struct {
        const ep_tensor_names *names;
        char kind;
        uint32_t spelling;
        const char *text; /* NULL: no more */
    } cases[] = {
        {&n1, 's', 0, "model.layers.1.mlp.shared_experts.down_proj.weight"},
        {&n1, 's', 1, "model.layers.1.mlp.shared_expert.down_proj.weight"},
        {&n1, 's', 2, "model.layers.1.mlp.shared_mlp.down_proj.weight"},
        {&n1, 's', 3, "model.layers.1.mixer.shared_experts.down_proj.weight"},
        {&n1, 's', 4, NULL},
        {&n2, 's', 0, "layers.1.block_sparse_moe.shared_experts.w2.weight"},
        {&n2, 's', 1, "layers.1.block_sparse_moe.shared_experts.down_proj.weight"},
        {&n2, 's', 2, "layers.1.shared_mlp.down_proj.weight"},
        {&n2, 's', 3, NULL},
        {&n1, 'r', 0, "model.layers.1.mlp.gate.weight"},
        {&n1, 'r', 1, "model.layers.1.mlp.gate.wg.weight"},
        {&n1, 'r', 2, "model.layers.1.mlp.router.classifier.weight"},
        {&n1, 'r', 3, "model.layers.1.mixer.gate.weight"},
        {&n1, 'r', 4, "model.layers.1.mlp.router.gate.weight"},
        {&n1, 'r', 5, "model.layers.1.feed_forward.router.weight"},
        {&n1, 'r', 6, NULL},
        {&n2, 'r', 0, "layers.1.block_sparse_moe.gate.weight"},
        {&n2, 'r', 1, "layers.1.feed_forward.gate.weight"},
        {&n2, 'r', 2, NULL},
        {&n1, 'b', 0, "model.layers.1.mlp.gate.e_score_correction_bias"},
        {&n1, 'b', 1, "model.layers.1.mlp.gate.expert_bias"},
        {&n1, 'b', 2, "model.layers.1.mlp.moe_statics.e_score_correction_bias"},
        {&n1, 'b', 3, "model.layers.1.mlp.router.e_score_correction_bias"},
        {&n1, 'b', 4, "model.layers.1.mixer.gate.e_score_correction_bias"},
        {&n1, 'b', 5, "model.layers.1.mlp.e_score_correction_bias"},
        {&n1, 'b', 6, "model.layers.1.mlp.expert_bias"},
        {&n1, 'b', 7, "model.layers.1.mlp.experts.e_score_correction_bias"},
        {&n1, 'b', 8, "model.layers.1.moe.router.expert_bias"},
        {&n1, 'b', 9, NULL},
        {&n2, 'b', 0, "layers.1.block_sparse_moe.e_score_correction_bias"},
        {&n2, 'b', 1, "layers.1.block_sparse_moe.gate.e_score_correction_bias"},
        {&n2, 'b', 2, "layers.1.feed_forward.expert_bias"},
        {&n2, 'b', 3, NULL},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        char name[EP_TENSOR_NAME_BYTES] = "";
        bool there = false;
        if (cases[i].kind == 's') {
            there = ep_tensor_name_shared(cases[i].names, cases[i].spelling, 1, EP_MATRIX_DOWN,
                                          "weight", name);
        } else if (cases[i].kind == 'r') {
            there = ep_tensor_name_router(cases[i].names, cases[i].spelling, 1, name);
        } else {
            there = ep_tensor_name_router_bias(cases[i].names, cases[i].spelling, 1, name);
        }
        cr_expect_eq(there, cases[i].text != NULL, "case %zu", i);
        cr_expect(!there || strcmp(name, cases[i].text) == 0, "%s, expected %s", name,
                  cases[i].text);
    }
    char name[EP_TENSOR_NAME_BYTES];
    ep_tensor_name_shared_gate(&n1, 1, name);
    cr_expect_str_eq(name, "model.layers.1.mlp.shared_expert_gate.weight");
}

static bool exists(const char *name, void *arg)
{
    return strcmp(name, arg) == 0;
}

Test(tensor_names, probe_finds_family_and_prefix_from_any_one_expert)
{
    static const struct {
        const char *only;
        ep_name_family family;
        const char *prefix;
    } cases[] = {
        {"layers.1.mlp.experts.0.gate_proj.weight", EP_NAMES_N1, ""},
        {"model.layers.1.block_sparse_moe.experts.3.w2.weight", EP_NAMES_N2, "model."},
        {"language_model.model.layers.2.mlp.experts.0.up_proj.weight", EP_NAMES_N1,
         "language_model.model."},
        {"model.language_model.layers.1.mlp.experts.3.down_proj.weight", EP_NAMES_N1,
         "model.language_model."},
        {"language_model.layers.1.block_sparse_moe.experts.0.w3.weight", EP_NAMES_N2,
         "language_model."},
    };
    ep_layer_shape shapes[2] = {{.layer = 1, .experts = 4}, {.layer = 2, .experts = 4}};
    ep_model_info info = {.moe_layers_count = 2, .moe_layers = shapes};
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        ep_tensor_names names = {0};
        ep_error error;
        ep_err err = ep_tensor_names_probe(&info, exists, (void *)(uintptr_t)cases[i].only, false,
                                           &names, &error);
        cr_assert_eq(err, EP_OK, "%s: %s", cases[i].only, error.text);
        cr_expect_eq(names.family, cases[i].family);
        cr_expect_str_eq(names.prefix, cases[i].prefix);
    }
}

Test(tensor_names, a_decoders_layers_follow_the_encoders)
{
    ep_layer_shape shapes[2] = {{.layer = 1, .experts = 4}, {.layer = 5, .experts = 4}};
    ep_model_info info = {.moe_layers_count = 2,
                          .moe_layers = shapes,
                          .first_stack_layers = 4,
                          .model_type_known = true};
    ep_tensor_names names = {0};
    char name[EP_TENSOR_NAME_BYTES];
    uint32_t layer = 0;
    ep_error error;
    const char *only = "decoder.block.1.layer.2.mlp.experts.expert_0.wi.weight";
    cr_assert_eq(
        ep_tensor_names_probe(&info, exists, (void *)(uintptr_t)only, false, &names, &error), EP_OK,
        "%s", error.text);
    ep_tensor_name_expert(&names, 5, 2, EP_MATRIX_DOWN, "weight", name);
    cr_expect_str_eq(name, "decoder.block.1.layer.2.mlp.experts.expert_2.wo.weight");
    ep_tensor_name_expert(&names, 3, 0, EP_MATRIX_UP, "weight", name);
    cr_expect_str_eq(name, "encoder.block.3.layer.1.mlp.experts.expert_0.wi.weight");
    cr_expect_eq(ep_tensor_name_role(&names, only, &layer), EP_TENSOR_EXPERT);
    cr_expect_eq(layer, 5);
}

Test(tensor_names, the_role_of_what_is_in_the_experts_block)
{
    static const struct {
        const char *name;
        ep_tensor_role role;
    } cases[] = {
        {"model.layers.3.mlp.experts.17.down_proj.weight", EP_TENSOR_EXPERT},
        {"model.layers.3.mlp.experts.17.down_proj.weight_scale_inv", EP_TENSOR_EXPERT},
        {"model.layers.3.mlp.shared_experts.up_proj.bias", EP_TENSOR_OTHER},
        {"model.layers.3.mlp.shared_expert_gate.weight", EP_TENSOR_OTHER},
        {"model.layers.3.mlp.gate.weight", EP_TENSOR_OTHER},
        {"model.layers.3.mlp.experts.e_score_correction_bias", EP_TENSOR_OTHER},
        {"model.layers.3.mlp.experts.17.norm.weight", EP_TENSOR_UNKNOWN},
        {"model.layers.3.mlp.experts.down_projection.weight", EP_TENSOR_UNKNOWN},
        {"model.layers.3.mlp.gate_proj.weight", EP_TENSOR_UNKNOWN},
        {"model.layers.3.mlp.post_norm.weight", EP_TENSOR_UNKNOWN},
        {"model.layers.3.mlp_norm.weight", EP_TENSOR_ELSEWHERE},
        {"model.layers.3.self_attn.q_proj.weight", EP_TENSOR_ELSEWHERE},
        {"model.norm.weight", EP_TENSOR_ELSEWHERE},
        {"layers.3.mlp.experts.17.down_proj.weight", EP_TENSOR_ELSEWHERE},
        {"model.layers.x.mlp.experts.17.down_proj.weight", EP_TENSOR_ELSEWHERE},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        uint32_t layer = 99;
        cr_expect_eq(ep_tensor_name_role(&n1, cases[i].name, &layer), cases[i].role, "%s",
                     cases[i].name);
        cr_expect(cases[i].role == EP_TENSOR_ELSEWHERE || layer == 3, "%s: layer %u", cases[i].name,
                  layer);
    }
    cr_expect(ep_tensor_name_has_tail(&n1, "model.layers.3.mlp.post_norm.weight", "mlp.post_norm"));
    cr_expect(
        !ep_tensor_name_has_tail(&n1, "model.layers.3.mlp.post_norm_2.weight", "mlp.post_norm"));
}
