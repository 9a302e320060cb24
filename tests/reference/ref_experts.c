/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the experts of one MoE layer by the tensor names of public checkpoints. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref_config.h"
#include "ref_matrices.h"

enum { STEM_BYTES = 224, BASE_BYTES = 64 };

typedef const char *const words[3]; /* gate, up, down */
static words projections = {"gate_proj", "up_proj", "down_proj"};
static words numbered = {"w1", "w3", "w2"};

/* <prefix><L>. */
static const char *const prefixes[] = {
    "model.layers.",    "layers.", "language_model.model.layers.", "model.language_model.layers.",
    "backbone.layers.", "blk."};

/* <prefix><L>.<block>.<E>.<word>.<part> */
static const struct {
    const char *block;
    const char *const *word;
} separate[] = {{"mlp.experts", projections},
                {"block_sparse_moe.experts", numbered},
                {"mixer.experts", projections},
                {"ffn.experts", numbered},
                {"experts", numbered}};

/* <prefix><L>.<block>.<word><end>, perhaps without a block, for all experts together; gate and up
 * may be one tensor. */
static const struct {
    const char *block;
    words word;
    const char *end;
} stacked[] = {{"mlp.experts", {"gate_up_proj", "gate_up_proj", "down_proj"}, ""},
               {"feed_forward.experts", {"gate_up_proj", "gate_up_proj", "down_proj"}, ""},
               {"block_sparse_moe", {"input_linear", "input_linear", "output_linear"}, ".weight"},
               {"moe", {"gate_proj", "up_proj", "down_proj"}, ".weight"},
               {"", {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}, ".weight"},
               {"", {"ffn_gate_up_exps", "ffn_gate_up_exps", "ffn_down_exps"}, ".weight"}};

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

/* Loads one expert from tensors of its own; false: there is none. */
static bool load_expert(const struct ref_checkpoint *checkpoint, const char *stem,
                        const char *const *word, size_t hidden, struct ref_expert *out_expert)
{
    char name[STEM_BYTES + 16];
    struct ref_expert expert = {.inner = 0};
    size_t rows;
    snprintf(name, sizeof(name), "%s%s", stem, word[1]);
    if (!ref_matrix_load(checkpoint, name, hidden, &expert.up, &expert.inner, &expert.format)) {
        return false;
    }
    snprintf(name, sizeof(name), "%s%s", stem, word[0]);
    (void)ref_matrix_load(checkpoint, name, hidden, &expert.gate, &rows, &expert.format);
    snprintf(name, sizeof(name), "%s%s", stem, word[2]);
    if (!ref_matrix_load(checkpoint, name, expert.inner, &expert.down, &rows, &expert.format) ||
        rows != hidden) {
        ref_die("%s: missing, or not as wide as x", name);
    }
    *out_expert = expert;
    return true;
}

static struct ref_expert *grow(struct ref_expert *experts, size_t count)
{
    experts = realloc(experts, (count + 1) * sizeof(*experts));
    if (experts == NULL) {
        ref_die("no memory");
    }
    return experts;
}

static size_t load_separate(const struct ref_checkpoint *checkpoint, const char *base,
                            size_t hidden, struct ref_expert **out_experts)
{
    char stem[STEM_BYTES];
    size_t count = 0;
    for (size_t s = 0; s < COUNT(separate) && count == 0; s++) {
        for (bool more = true; more; count += more ? 1 : 0) {
            snprintf(stem, sizeof(stem), "%s%s.%zu.", base, separate[s].block, count);
            *out_experts = grow(*out_experts, count);
            more = load_expert(checkpoint, stem, separate[s].word, hidden, &(*out_experts)[count]);
        }
    }
    return count;
}

static size_t inner_size(const struct ref_checkpoint *checkpoint)
{
    bool has_own = json_object_get(checkpoint->config, "moe_intermediate_size") != NULL;
    return ref_checkpoint_size(checkpoint, has_own ? "moe_intermediate_size" : "intermediate_size");
}

/* Both tensors are [E,rows,columns] or both [E,columns,rows]. If the shape of one fits both (H = I
 * or H = 2 I), the other decides. */
static bool is_transposed(const struct ref_tensor *up, size_t up_rows,
                          const struct ref_tensor *down, size_t hidden, size_t inner)
{
    if (up_rows != hidden) {
        return up->shape[1] == hidden;
    }
    return down->shape[1] == inner;
}

/* Returns the rows of a tensor that belong to a matrix; gate and up in one tensor follow each
 * other, or alternate row by row. */
static struct ref_slab slab_of(int matrix, bool shares, bool take_turns, size_t hidden,
                               size_t inner)
{
    struct ref_slab slab = {
        .step = 1, .rows = matrix == 2 ? hidden : inner, .columns = matrix == 2 ? inner : hidden};
    slab.all = slab.rows;
    if (matrix < 2 && shares) {
        slab.all = 2 * inner;
        slab.step = take_turns ? 2 : 1;
        slab.first = matrix == 0 ? 0 : take_turns ? 1 : inner;
    }
    return slab;
}

/* Loads the tensors of all experts with this stem; 0: there are none. */
static size_t load_stacked_of(const struct ref_checkpoint *checkpoint, const char *base, size_t s,
                              size_t hidden, struct ref_expert **out_experts)
{
    char stems[3][STEM_BYTES];
    char name[STEM_BYTES + 16];
    struct ref_tensor up, down;
    bool has_values = true;
    bool has_block = stacked[s].block[0] != 0;
    for (int m = 0; m < 3; m++) {
        snprintf(stems[m], sizeof(stems[m]), "%s%s%s%s", base, stacked[s].block,
                 has_block ? "." : "", stacked[s].word[m]);
        snprintf(name, sizeof(name), "%s%s", stems[m], stacked[s].end);
        has_values = ref_checkpoint_find(checkpoint, name, m == 2 ? &down : &up) && has_values;
    }
    snprintf(name, sizeof(name), "%s_blocks", stems[1]);
    if (!has_values && !ref_checkpoint_find(checkpoint, name, &up)) {
        return 0;
    }
    bool shares = strcmp(stems[0], stems[1]) == 0;
    size_t inner = inner_size(checkpoint);
    const char *type = json_string_value(json_object_get(checkpoint->config, "model_type"));
    bool take_turns = has_block && type != NULL && strcmp(type, "gpt_oss") == 0;
    bool transposed = has_values && has_block &&
                      is_transposed(&up, shares ? 2 * inner : inner, &down, hidden, inner);
    size_t count = up.shape[0];
    for (size_t e = 0; e < count; e++) {
        *out_experts = grow(*out_experts, e);
        struct ref_expert *expert = &(*out_experts)[e];
        *expert = (struct ref_expert){.inner = inner};
        struct ref_matrix *matrices[3] = {&expert->gate, &expert->up, &expert->down};
        for (int m = 0; m < 3; m++) {
            struct ref_slab slab = slab_of(m, shares, take_turns, hidden, inner);
            slab.expert = e;
            slab.transposed = transposed;
            enum ref_format *format = m == 2 ? &expert->down_format : &expert->format;
            if (!ref_matrix_load_stacked(checkpoint, stems[m], stacked[s].end, &slab, matrices[m],
                                         format)) {
                ref_die("%s: missing", stems[m]);
            }
        }
        expert->down_differs = expert->down_format != expert->format;
    }
    return count;
}

static void load_shared(const struct ref_checkpoint *checkpoint, const char *base,
                        struct ref_layer *layer)
{
    static const struct {
        const char *stem;
        const char *const *word;
    } names[] = {{"mlp.shared_experts.", projections},
                 {"mlp.shared_expert.", projections},
                 {"block_sparse_moe.shared_experts.", numbered}};
    static const char *const gates[] = {"mlp.shared_expert_gate.weight",
                                        "block_sparse_moe.shared_expert_gate.weight"};
    char stem[STEM_BYTES];
    struct ref_tensor tensor;
    struct ref_expert *shared = grow(NULL, 0);
    layer->shared = shared;
    for (size_t i = 0; i < COUNT(names) && layer->shared_count == 0; i++) {
        snprintf(stem, sizeof(stem), "%s%s", base, names[i].stem);
        layer->shared_count =
            load_expert(checkpoint, stem, names[i].word, layer->hidden, shared) ? 1 : 0;
    }
    for (size_t i = 0; i < COUNT(gates) && layer->shared_count == 1 && shared->output_gate == NULL;
         i++) {
        snprintf(stem, sizeof(stem), "%s%s", base, gates[i]);
        if (ref_checkpoint_find(checkpoint, stem, &tensor)) {
            shared->output_gate = ref_checkpoint_load(checkpoint, stem, layer->hidden);
        }
    }
}

static void set_activation(struct ref_expert *experts, size_t count,
                           struct ref_activation activation)
{
    for (size_t i = 0; i < count; i++) {
        experts[i].activation = activation;
    }
}

void ref_layer_load(const struct ref_checkpoint *checkpoint, size_t layer_index,
                    struct ref_layer *out_layer)
{
    char base[BASE_BYTES];
    struct ref_layer layer = {.hidden = ref_checkpoint_size(checkpoint, "hidden_size")};
    struct ref_expert *experts = NULL;
    for (size_t p = 0; p < COUNT(prefixes) && layer.expert_count == 0; p++) {
        snprintf(base, sizeof(base), "%s%zu.", prefixes[p], layer_index);
        layer.expert_count = load_separate(checkpoint, base, layer.hidden, &experts);
        for (size_t s = 0; s < COUNT(stacked) && layer.expert_count == 0; s++) {
            layer.expert_count = load_stacked_of(checkpoint, base, s, layer.hidden, &experts);
        }
    }
    if (layer.expert_count == 0) {
        ref_die("%s: layer %zu has no experts of the known names", checkpoint->folder, layer_index);
    }
    load_shared(checkpoint, base, &layer);
    set_activation(experts, layer.expert_count,
                   ref_config_activation(checkpoint->config, layer_index, false));
    set_activation((struct ref_expert *)layer.shared, layer.shared_count,
                   ref_config_activation(checkpoint->config, layer_index, true));
    layer.experts = experts;
    ref_layer_set_family(&layer, ref_family_default());
    *out_layer = layer;
}

/* ref_layer_load allocated the experts, so casting const away is allowed. */
static void set_family(const struct ref_expert *experts, size_t count, enum ref_family family)
{
    for (size_t i = 0; i < count; i++) {
        struct ref_expert *expert = (struct ref_expert *)&experts[i];
        enum ref_format down = expert->down_differs ? expert->down_format : expert->format;
        enum ref_family wide = ref_format_family(expert->format, family);
        enum ref_family narrow = ref_format_family(down, family);
        expert->family = ref_format_family(down, wide) == wide                 ? wide
                         : ref_format_family(expert->format, narrow) == narrow ? narrow
                                                                               : REF_PORTABLE;
    }
}

void ref_layer_set_family(struct ref_layer *layer, enum ref_family family)
{
    set_family(layer->experts, layer->expert_count, family);
    set_family(layer->shared, layer->shared_count, family);
}

static void free_experts(const struct ref_expert *experts, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct ref_expert *expert = (struct ref_expert *)&experts[i];
        ref_matrix_free(&expert->gate);
        ref_matrix_free(&expert->up);
        ref_matrix_free(&expert->down);
        free((void *)expert->output_gate);
    }
    free((void *)experts);
}

void ref_layer_free(struct ref_layer *layer)
{
    free_experts(layer->experts, layer->expert_count);
    free_experts(layer->shared, layer->shared_count);
    memset(layer, 0, sizeof(*layer));
}
