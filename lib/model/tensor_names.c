/* SPDX-License-Identifier: Apache-2.0 */
/* The name tables of all families, and the search for the one a checkpoint uses. */
#include "model/tensor_names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

static const ep_layer_place places[] = {
    {"", "layers", ""},
    {"model.", "layers", ""},
    {"language_model.model.", "layers", ""},
    {"model.language_model.", "layers", ""},
    {"language_model.", "layers", ""},
    {"backbone.", "layers", ""},
    {"model.decoder.", "layers", ""},
    {"model.llm.", "layers", ""},
    {"thinker.model.", "layers", ""},
    {"transformer.", "blocks", ""},
    {"", "blk", ""},
};
/* Places of an encoder's layers and a decoder's. */
static const ep_layer_place pairs[][2] = {
    {{"model.encoder.", "layers", ""}, {"model.decoder.", "layers", ""}},
    {{"encoder.", "block", "layer.1."}, {"decoder.", "block", "layer.2."}},
};

typedef const char *const matrix_words[EP_MATRIX_COUNT];
static matrix_words projections = {"gate_proj", "up_proj", "down_proj"};
static matrix_words numbered = {"w1", "w3", "w2"};
static matrix_words linear_gated = {"linear_gate", "up_proj", "down_proj"};
/* gate's rows, then up's */
static matrix_words fused_linears = {"input_linear", "input_linear", "output_linear"};
static matrix_words fully_connected = {NULL, "fc1", "fc2"};
static matrix_words in_out = {NULL, "wi", "wo"};
static matrix_words gguf_shared = {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"};

#define SPELLINGS_MAX 5
#define OTHERS_MAX 10

/* "<stem>.<word>.<part>"; an empty stem has no dot */
typedef struct shared_spelling {
    const char *stem;
    const char *const *words;
} shared_spelling;

/* "<block>.<index><E>.<word>.<part>". Without a block: tensors of a layer, named by <words>.
 * "<word><end>" are their plain values; for other parts, a dot and the part replace the end. */
typedef struct expert_spelling {
    const char *block;
    const char *index;
    const char *const *words;
    const char *end;
    bool alternates;
} expert_spelling;

typedef struct family_names {
    ep_name_family family;
    expert_spelling experts[SPELLINGS_MAX]; /* terminated by NULL words */
    bool may_transpose;
    bool flat;
    shared_spelling shared[SPELLINGS_MAX]; /* terminated by a NULL stem */
    const char *shared_gate;
    const char *routers[OTHERS_MAX];       /* terminated by NULL */
    const char *router_biases[OTHERS_MAX]; /* terminated by NULL */
    const char *router_factors;
    const char *router_table;
    /* text that names of the experts' block contain; NULL: they begin as those of up, up to a
     * dot */
    const char *mark;
} family_names;

#define STACKED(gate, up, down, ...)                                                               \
    {                                                                                              \
        .words = (matrix_words){gate, up, down}, .end = "", __VA_ARGS__                            \
    }
#define FUSED(block, both, down, ...)                                                              \
    STACKED(block "." both, block "." both, block "." down, __VA_ARGS__)

static const family_names families[] = {
    {
        .family = EP_NAMES_N1,
        .experts = {{"mlp.experts", "", projections},
                    {"mixer.experts", "", projections},
                    {"feed_forward.experts", "", projections}},
        .shared = {{"mlp.shared_experts", projections},
                   {"mlp.shared_expert", projections},
                   {"mlp.shared_mlp", projections},
                   {"mixer.shared_experts", projections}},
        .shared_gate = "mlp.shared_expert_gate.weight",
        .routers = {"mlp.gate.weight", "mlp.gate.wg.weight", "mlp.router.classifier.weight",
                    "mixer.gate.weight", "mlp.router.gate.weight", "feed_forward.router.weight"},
        .router_biases = {"mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias",
                          "mlp.moe_statics.e_score_correction_bias",
                          "mlp.router.e_score_correction_bias",
                          "mixer.gate.e_score_correction_bias", "mlp.e_score_correction_bias",
                          "mlp.expert_bias", "mlp.experts.e_score_correction_bias",
                          "moe.router.expert_bias"},
    },
    {
        .family = EP_NAMES_N2,
        .experts = {{"block_sparse_moe.experts", "", numbered},
                    {"feed_forward.experts", "", numbered}},
        .shared = {{"block_sparse_moe.shared_experts", numbered},
                   {"block_sparse_moe.shared_experts", projections},
                   {"shared_mlp", projections}},
        .shared_gate = "block_sparse_moe.shared_expert_gate.weight",
        .routers = {"block_sparse_moe.gate.weight", "feed_forward.gate.weight"},
        .router_biases = {"block_sparse_moe.e_score_correction_bias",
                          "block_sparse_moe.gate.e_score_correction_bias",
                          "feed_forward.expert_bias"},
    },
    {
        .family = EP_NAMES_N4,
        .experts = {{"ffn.experts", "", numbered}},
        .shared = {{"ffn.shared_experts", numbered}},
        .shared_gate = "ffn.shared_expert_gate.weight",
        .routers = {"ffn.gate.weight"},
        .router_biases = {"ffn.gate.bias"},
        .router_table = "ffn.gate.tid2eid",
    },
    {
        .family = EP_NAMES_N2M,
        .experts = {{"experts", "", numbered}},
        .shared = {{"shared_experts", numbered}},
        .shared_gate = "shared_expert_gate.weight",
        .routers = {"gate.weight"},
        .router_biases = {"gate.e_score_correction_bias"},
    },
    {
        .family = EP_NAMES_N3,
        .experts = {FUSED("mlp.experts", "gate_up_proj", "down_proj"),
                    FUSED("experts", "gate_up_proj", "down_proj"),
                    FUSED("block_sparse_moe.experts", "gate_up_proj", "down_proj"),
                    FUSED("mlp.experts", "w13_weight", "w2_weight", .alternates = true),
                    {.words =
                         (matrix_words){"mlp.experts.fc1", "mlp.experts.fc1", "mlp.experts.fc2"},
                     .end = ".weight"}},
        .may_transpose = true,
        .shared = {{"mlp.shared_experts", projections},
                   {"mlp.shared_expert", projections},
                   {"mlp.shared_experts", linear_gated},
                   {"shared_mlp", fused_linears}},
        .shared_gate = "mlp.shared_expert_gate.weight",
        .routers = {"mlp.gate.weight", "router.proj.weight", "block_sparse_moe.router.weight",
                    "mlp.router.weight"},
        .router_biases = {"mlp.gate.e_score_correction_bias", "mlp.gate.bias",
                          "mlp.gate.balancing_biases"},
        .router_factors = "router.per_expert_scale",
    },
    {
        .family = EP_NAMES_N7, /* differs from N3 by its blocks or biases */
        .experts = {FUSED("mlp.experts", "gate_up_proj", "down_proj")},
        .may_transpose = true,
        .shared_gate = "mlp.shared_expert_gate.weight",
        .routers = {"mlp.router.weight"},
        .router_biases = {"mlp.router.bias"},
    },
    {
        .family = EP_NAMES_N8,
        .experts = {FUSED("feed_forward.experts", "gate_up_proj", "down_proj")},
        .may_transpose = true,
        .shared = {{"feed_forward.shared_expert", projections}},
        .shared_gate = "feed_forward.shared_expert_gate.weight",
        .routers = {"feed_forward.router.weight"},
    },
    {
        .family = EP_NAMES_N9,
        .experts = {{.words = (matrix_words){"block_sparse_moe.input_linear",
                                             "block_sparse_moe.input_linear",
                                             "block_sparse_moe.output_linear"},
                     .end = ".weight"},
                    {.words = (matrix_words){"mlp.input_linear", "mlp.input_linear",
                                             "mlp.output_linear"},
                     .end = ".weight"}},
        .shared = {{"block_sparse_moe.shared_experts", projections}, {"shared_mlp", fused_linears}},
        .shared_gate = "block_sparse_moe.shared_expert_gate.weight",
        .routers = {"block_sparse_moe.router.layer.weight", "mlp.router.layer.weight"},
    },
    {
        .family = EP_NAMES_N10,
        .experts = {STACKED("ffn.experts.mlp.w1", "ffn.experts.mlp.v1", "ffn.experts.mlp.w2")},
        .flat = true,
        .shared_gate = "ffn.shared_expert_gate.weight",
        .routers = {"ffn.router.layer.weight"},
    },
    {
        .family = EP_NAMES_N11,
        .experts = {{.words = (matrix_words){"moe.gate_proj", "moe.up_proj", "moe.down_proj"},
                     .end = ".weight"}},
        .shared = {{"share_expert", projections}},
        .shared_gate = "moe.shared_expert_gate.weight",
        .routers = {"moe.gate.weight"},
        .router_biases = {"moe.router_bias"},
    },
    {
        .family = EP_NAMES_N13,
        .experts = {{"ffn.experts", "expert_", fully_connected},
                    {"mlp.experts", "expert_", in_out}},
        .shared_gate = "mlp.shared_expert_gate.weight",
        .routers = {"ffn.router.classifier.weight", "mlp.router.classifier.weight"},
    },
    {
        .family = EP_NAMES_N14,
        .experts = {{.words = (matrix_words){NULL, "mlp.down_embed", "mlp.up_embed"},
                     .end = ".weight"}},
        .flat = true,
        .shared_gate = "mlp.shared_expert_gate.weight",
    },
    {
        .family = EP_NAMES_GGUF,
        .experts = {{.words = (matrix_words){"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
                     .end = ".weight"},
                    {.words =
                         (matrix_words){"ffn_gate_up_exps", "ffn_gate_up_exps", "ffn_down_exps"},
                     .end = ".weight"}},
        .shared = {{"", gguf_shared}},
        .shared_gate = "ffn_gate_inp_shexp.weight",
        .routers = {"ffn_gate_inp.weight"},
        .router_biases = {"exp_probs_b.bias", "ffn_gate_inp.bias"},
        .mark = "exp",
    },
};

static const family_names *table(const ep_tensor_names *names)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(families); i++) {
        if (families[i].family == names->family) {
            return &families[i];
        }
    }
    EP_ASSERT(false);
    return NULL;
}

static const expert_spelling *spelling(const ep_tensor_names *names)
{
    return &table(names)->experts[names->spelling];
}

static ep_layer_place place_of(const ep_tensor_names *names, uint32_t layer)
{
    if (names->second != NULL && layer >= names->second_from) {
        return *names->second;
    }
    return (ep_layer_place){names->prefix, names->stem == NULL ? "layers" : names->stem,
                            names->infix == NULL ? "" : names->infix};
}

static void layer_name(const ep_tensor_names *names, uint32_t layer, const char *tail,
                       char *out_name)
{
    const ep_layer_place place = place_of(names, layer);
    const uint32_t number =
        names->second != NULL && layer >= names->second_from ? layer - names->second_from : layer;
    int n = snprintf(out_name, EP_TENSOR_NAME_BYTES, "%s%s.%u.%s%s", place.prefix, place.stem,
                     number, place.infix, tail);
    EP_ASSERT(n > 0 && n < EP_TENSOR_NAME_BYTES);
}

bool ep_tensor_names_stacked(const ep_tensor_names *names)
{
    return spelling(names)->block == NULL;
}

bool ep_tensor_names_flat(const ep_tensor_names *names)
{
    return table(names)->flat;
}

bool ep_tensor_names_fused(const ep_tensor_names *names)
{
    const char *const *words = spelling(names)->words;
    return ep_tensor_names_stacked(names) && words[EP_MATRIX_GATE] != NULL &&
           strcmp(words[EP_MATRIX_GATE], words[EP_MATRIX_UP]) == 0;
}

bool ep_tensor_names_may_transpose(const ep_tensor_names *names)
{
    return table(names)->may_transpose;
}

void ep_tensor_name_expert(const ep_tensor_names *names, uint32_t layer, uint32_t expert,
                           ep_matrix matrix, const char *part, char out_name[EP_TENSOR_NAME_BYTES])
{
    const expert_spelling *s = spelling(names);
    /* experts of two matrices: no tensor has this name */
    const char *word = s->words[matrix] == NULL ? "(none)" : s->words[matrix];
    char tail[EP_TENSOR_NAME_BYTES];
    if (s->block != NULL) {
        snprintf(tail, sizeof(tail), "%s.%s%u.%s.%s", s->block, s->index, expert, word, part);
    } else if (strcmp(part, "weight") == 0) {
        snprintf(tail, sizeof(tail), "%s%s", word, s->end);
    } else {
        snprintf(tail, sizeof(tail), "%s%s%s", word, s->end[0] == '\0' ? "_" : ".", part);
    }
    layer_name(names, layer, tail, out_name);
}

bool ep_tensor_name_shared(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                           ep_matrix matrix, const char *part, char out_name[EP_TENSOR_NAME_BYTES])
{
    const family_names *t = table(names);
    char tail[EP_TENSOR_NAME_BYTES];
    if (spelling >= SPELLINGS_MAX || t->shared[spelling].stem == NULL) {
        return false;
    }
    const char *stem = t->shared[spelling].stem;
    snprintf(tail, sizeof(tail), "%s%s%s.%s", stem, stem[0] == '\0' ? "" : ".",
             t->shared[spelling].words[matrix], part);
    layer_name(names, layer, tail, out_name);
    return true;
}

void ep_tensor_name_shared_gate(const ep_tensor_names *names, uint32_t layer,
                                char out_name[EP_TENSOR_NAME_BYTES])
{
    layer_name(names, layer, table(names)->shared_gate, out_name);
}

/* False without a tail. */
static bool tail_name(const ep_tensor_names *names, const char *tail, uint32_t layer,
                      char *out_name)
{
    if (tail != NULL) {
        layer_name(names, layer, tail, out_name);
    }
    return tail != NULL;
}

bool ep_tensor_name_router(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                           char out_name[EP_TENSOR_NAME_BYTES])
{
    return tail_name(names, spelling < OTHERS_MAX ? table(names)->routers[spelling] : NULL, layer,
                     out_name);
}

bool ep_tensor_name_router_bias(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                                char out_name[EP_TENSOR_NAME_BYTES])
{
    return tail_name(names, spelling < OTHERS_MAX ? table(names)->router_biases[spelling] : NULL,
                     layer, out_name);
}

bool ep_tensor_name_router_factors(const ep_tensor_names *names, uint32_t layer,
                                   char out_name[EP_TENSOR_NAME_BYTES])
{
    return tail_name(names, table(names)->router_factors, layer, out_name);
}

bool ep_tensor_name_router_table(const ep_tensor_names *names, uint32_t layer,
                                 char out_name[EP_TENSOR_NAME_BYTES])
{
    return tail_name(names, table(names)->router_table, layer, out_name);
}

/* ---- the role of a tensor ---- */

/* The rest of text after start; NULL when text does not begin with it. */
static const char *after(const char *text, const char *start)
{
    const size_t length = strlen(start);
    return text != NULL && strncmp(text, start, length) == 0 ? text + length : NULL;
}

static const char *after_number(const char *text, uint32_t *out_number)
{
    char *end = NULL;
    if (text == NULL || *text < '0' || *text > '9') {
        return NULL;
    }
    const unsigned long number = strtoul(text, &end, 10);
    *out_number = number < UINT32_MAX ? (uint32_t)number : UINT32_MAX;
    return end;
}

/* The part of the name after the layer's number and infix; NULL if the place is another. */
static const char *tail_at(const ep_layer_place *place, const char *name, uint32_t *out_number)
{
    const char *at = after(after(after(name, place->prefix), place->stem), ".");
    at = after(after_number(at, out_number), ".");
    return after(at, place->infix);
}

static const char *tail_of(const ep_tensor_names *names, const char *name, uint32_t *out_layer)
{
    const ep_layer_place first = place_of(names, 0);
    const char *tail = tail_at(&first, name, out_layer);
    if (tail == NULL && names->second != NULL) {
        tail = tail_at(names->second, name, out_layer);
        *out_layer += tail != NULL && *out_layer < EP_MODEL_LAYERS_MAX ? names->second_from : 0;
    }
    return tail;
}

/* Whether rest is empty, or goes on with a dot or underscore. */
static bool ends_word(const char *rest)
{
    return rest != NULL && (*rest == '\0' || *rest == '.' || *rest == '_');
}

static bool is_expert_tail(const expert_spelling *s, const char *tail)
{
    uint32_t expert;
    const char *at =
        s->block == NULL
            ? tail
            : after(after_number(after(after(after(tail, s->block), "."), s->index), &expert), ".");
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT && at != NULL; m++) {
        if (s->words[m] != NULL && ends_word(after(at, s->words[m]))) {
            return true;
        }
    }
    return false;
}

static bool is_shared_tail(const family_names *t, const char *tail)
{
    for (size_t i = 0; i < SPELLINGS_MAX && t->shared[i].stem != NULL; i++) {
        const char *stem = t->shared[i].stem;
        const char *at = stem[0] == '\0' ? tail : after(after(tail, stem), ".");
        for (ep_matrix m = 0; m < EP_MATRIX_COUNT && at != NULL; m++) {
            if (ends_word(after(at, t->shared[i].words[m]))) {
                return true;
            }
        }
    }
    return strcmp(tail, t->shared_gate) == 0;
}

static bool is_router_tail(const family_names *t, const char *tail)
{
    bool found = (t->router_factors != NULL && strcmp(tail, t->router_factors) == 0) ||
                 (t->router_table != NULL && strcmp(tail, t->router_table) == 0);
    for (size_t i = 0; i < OTHERS_MAX && t->routers[i] != NULL; i++) {
        found = found || strcmp(tail, t->routers[i]) == 0;
    }
    for (size_t i = 0; i < OTHERS_MAX && t->router_biases[i] != NULL; i++) {
        found = found || strcmp(tail, t->router_biases[i]) == 0;
    }
    return found;
}

static bool is_in_block(const family_names *t, const expert_spelling *s, const char *tail)
{
    const char *block = s->block != NULL ? s->block : s->words[EP_MATRIX_UP];
    const size_t length = strcspn(block, ".");
    return t->mark != NULL ? strstr(tail, t->mark) != NULL
                           : strncmp(tail, block, length) == 0 && tail[length] == '.';
}

ep_tensor_role ep_tensor_name_role(const ep_tensor_names *names, const char *name,
                                   uint32_t *out_layer)
{
    const expert_spelling *s = spelling(names);
    const char *tail = tail_of(names, name, out_layer);
    if (tail == NULL || !is_in_block(table(names), s, tail)) {
        return EP_TENSOR_ELSEWHERE;
    }
    if (is_expert_tail(s, tail)) {
        return EP_TENSOR_EXPERT;
    }
    return is_shared_tail(table(names), tail) || is_router_tail(table(names), tail)
               ? EP_TENSOR_OTHER
               : EP_TENSOR_UNKNOWN;
}

bool ep_tensor_name_has_tail(const ep_tensor_names *names, const char *name, const char *tail)
{
    uint32_t layer;
    const char *rest = after(tail_of(names, name, &layer), tail);
    return rest != NULL && (*rest == '\0' || *rest == '.');
}

/* ---- the search ---- */

static bool has_expert(const ep_tensor_names *names, uint32_t layer, uint32_t expert,
                       ep_tensor_exists_func exists, void *arg)
{
    static const char *const parts[] = {"weight", "weight_packed", "qweight", "blocks"};
    char name[EP_TENSOR_NAME_BYTES];
    /* all its spellings have the same name for down */
    const bool only_up = table(names)->mark != NULL;
    for (ep_matrix m = only_up ? EP_MATRIX_UP : 0; m < (only_up ? EP_MATRIX_DOWN : EP_MATRIX_COUNT);
         m++) {
        for (size_t p = 0; p < EP_ARRAY_COUNT(parts); p++) {
            ep_tensor_name_expert(names, layer, expert, m, parts[p], name);
            if (exists(name, arg)) {
                return true;
            }
        }
    }
    return false;
}

/* A missing expert must not hide the family: tries all experts of the first MoE layer, expert 0 of
 * others. */
static bool has_any_expert(const ep_tensor_names *names, const ep_model_info *info,
                           ep_tensor_exists_func exists, void *arg)
{
    for (uint32_t e = 0; e < info->moe_layers[0].experts; e++) {
        if (has_expert(names, info->moe_layers[0].layer, e, exists, arg)) {
            return true;
        }
    }
    for (uint32_t i = 1; i < info->moe_layers_count; i++) {
        if (has_expert(names, info->moe_layers[i].layer, 0, exists, arg)) {
            return true;
        }
    }
    return false;
}

static ep_err nothing_found(const ep_model_info *info, ep_error *out_error)
{
    const uint32_t layer = info->moe_layers[0].layer;
    return ep_error_set(
        out_error, EP_ERR_UNIMPLEMENTED,
        "no expert tensors found: neither layers.%u.mlp.experts.0.gate_proj.weight nor "
        "layers.%u.block_sparse_moe.experts.0.w1.weight, nor any other known name, with prefix "
        "none, model., "
        "language_model.model., model.language_model., language_model. or backbone.; in GGUF not "
        "blk.%u.ffn_up_exps.weight",
        layer, layer, layer);
}

/* N3 and N7 have the same names; only N7 has blocks or biases. */
static bool has_blocks_or_biases(const ep_tensor_names *names, const ep_model_info *info,
                                 ep_tensor_exists_func exists, void *arg)
{
    static const char *const marks[] = {"blocks", "bias"};
    char name[EP_TENSOR_NAME_BYTES];
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        for (size_t p = 0; p < EP_ARRAY_COUNT(marks); p++) {
            ep_tensor_name_expert(names, info->moe_layers[i].layer, 0, EP_MATRIX_GATE, marks[p],
                                  name);
            if (exists(name, arg)) {
                return true;
            }
        }
    }
    return false;
}

/* Tries all families at this place. */
static bool probe_place(ep_tensor_names names, const ep_model_info *info,
                        ep_tensor_exists_func exists, void *arg, bool alternates,
                        ep_tensor_names *out_names)
{
    for (size_t f = 0; f < EP_ARRAY_COUNT(families); f++) {
        names.family = families[f].family;
        for (names.spelling = 0;
             names.spelling < SPELLINGS_MAX && families[f].experts[names.spelling].words != NULL;
             names.spelling++) {
            if (!has_any_expert(&names, info, exists, arg)) {
                continue;
            }
            names.alternates =
                (alternates && names.family != EP_NAMES_GGUF) || spelling(&names)->alternates;
            if (names.family == EP_NAMES_N3 && names.spelling == 0 &&
                (alternates || has_blocks_or_biases(&names, info, exists, arg))) {
                names.family = EP_NAMES_N7;
            }
            *out_names = names;
            return true;
        }
    }
    return false;
}

ep_err ep_tensor_names_probe(const ep_model_info *info, ep_tensor_exists_func exists, void *arg,
                             bool alternates, ep_tensor_names *out_names, ep_error *out_error)
{
    bool found = false;
    for (size_t p = 0; p < EP_ARRAY_COUNT(pairs) && info->first_stack_layers > 0 && !found; p++) {
        const ep_tensor_names names = {.prefix = pairs[p][0].prefix,
                                       .stem = pairs[p][0].stem,
                                       .infix = pairs[p][0].infix,
                                       .second = &pairs[p][1],
                                       .second_from = info->first_stack_layers};
        found = probe_place(names, info, exists, arg, alternates, out_names);
    }
    for (size_t p = 0; p < EP_ARRAY_COUNT(places) && !found; p++) {
        const ep_tensor_names names = {
            .prefix = places[p].prefix, .stem = places[p].stem, .infix = places[p].infix};
        found = probe_place(names, info, exists, arg, alternates, out_names);
    }
    if (!found) {
        return nothing_found(info, out_error);
    }
    if (ep_tensor_names_fused(out_names) && !info->model_type_known) {
        char name[EP_TENSOR_NAME_BYTES];
        ep_tensor_name_expert(out_names, info->moe_layers[0].layer, 0, EP_MATRIX_GATE, "weight",
                              name);
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "tensor %s has gate and up of an expert, and this build does not know "
                            "how they lie in model type '%s'",
                            name, info->model_type);
    }
    return EP_OK;
}
