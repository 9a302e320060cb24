/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a plan for reading one expert from tensor names, types and shapes. */
#include "model/expert_plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "model/tensor_check.h"
#include "moe/convert.h"

/* Returns the run's index; the same slab of the same tensor is a single run. */
static int add_run(ep_expert_plan *plan, const ep_checkpoint_entry *entry, size_t offset,
                   size_t bytes)
{
    for (int i = 0; i < plan->runs_count; i++) {
        if (plan->runs[i].entry == entry && plan->runs[i].offset == offset) {
            return i;
        }
    }
    EP_ASSERT(plan->runs_count < EP_PLAN_RUNS_MAX);
    plan->runs[plan->runs_count] = (ep_plan_run){entry, offset, bytes};
    return plan->runs_count++;
}

static int add_whole(ep_expert_plan *plan, const ep_checkpoint_entry *entry)
{
    return add_run(plan, entry, 0, ep_safetensors_tensor_bytes(entry->tensor));
}

/* The names of one expert's tensors: "<stem>.<part>". */
typedef struct naming {
    const ep_checkpoint *self;
    const ep_layer_shape *shape;
    uint32_t index;
    uint32_t spelling; /* for a shared expert */
} naming;

/* Adds an expert's slab of a stacked tensor, whose first dimension has been checked. */
static int add_slab(ep_expert_plan *plan, const ep_checkpoint_entry *entry, const naming *n)
{
    const size_t slab = ep_safetensors_tensor_bytes(entry->tensor) / n->shape->experts;
    return add_run(plan, entry, n->index * slab, slab);
}

static const ep_checkpoint_entry *find_part(const naming *n, ep_matrix m, const char *part,
                                            char name[EP_TENSOR_NAME_BYTES])
{
    if (n->index < n->shape->experts) {
        ep_tensor_name_expert(&n->self->names, n->shape->layer, n->index, m, part, name);
    } else if (!ep_tensor_name_shared(&n->self->names, n->spelling, n->shape->layer, m, part,
                                      name)) {
        snprintf(name, EP_TENSOR_NAME_BYTES, "%slayers.%u (a shared expert's %s)",
                 n->self->names.prefix, n->shape->layer, part);
        /* the family has no names for them; a checkpoint with such a layer is refused at open */
        return NULL;
    }
    return ep_checkpoint_entry_find(n->self, name);
}

/* Finds the first part that exists; if there is none, name is that of the first part. */
static const ep_checkpoint_entry *find_any(const naming *n, ep_matrix m, const char *const *parts,
                                           char name[EP_TENSOR_NAME_BYTES])
{
    for (size_t i = 0; parts[i] != NULL; i++) {
        const ep_checkpoint_entry *entry = find_part(n, m, parts[i], name);
        if (entry != NULL) {
            return entry;
        }
    }
    (void)find_part(n, m, parts[0], name);
    return NULL;
}

static const char *const value_parts[] = {"weight", "weight_packed", "qweight", NULL};
static const char *const scale_parts[] = {"weight_scale_inv", "weight_scale", "scale", "scales",
                                          NULL};
static const char *const zero_parts[] = {"weight_zero_point", "qzeros", NULL};
static const char *const order_parts[] = {"weight_g_idx", "g_idx", NULL};
static const char *const dividing_parts[] = {"weight_global_scale", NULL};
static const char *const multiplying_parts[] = {"weight_scale_2", NULL};

/* The first of the spellings with the most matrices. */
static uint32_t shared_spelling(naming n)
{
    char name[EP_TENSOR_NAME_BYTES];
    uint32_t best = 0;
    uint32_t best_found = 0;
    for (n.spelling = 0; ep_tensor_name_shared(&n.self->names, n.spelling, n.shape->layer,
                                               EP_MATRIX_GATE, "weight", name);
         n.spelling++) {
        uint32_t found = 0;
        for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
            found += find_any(&n, m, value_parts, name) != NULL;
        }
        best = found > best_found ? n.spelling : best;
        best_found = found > best_found ? found : best_found;
    }
    return best;
}

static uint64_t parts_of(uint64_t count, uint64_t part)
{
    return (count + part - 1) / part;
}

/* A bias is a vector; all biases of an expert have one type. */
static ep_err plan_bias(const ep_checkpoint_entry *entry, uint32_t rows, ep_expert_plan *plan,
                        int *out_run, ep_error *out_error)
{
    ep_err err = ep_tensor_check_plain(entry, 0, rows, plan->bias_dtype, out_error);
    if (err == EP_OK) {
        plan->bias_dtype = entry->tensor->dtype;
        *out_run = add_whole(plan, entry);
    }
    return err;
}

static ep_err one_format(ep_expert_plan *plan, ep_weight_format format,
                         const ep_checkpoint_entry *entry, ep_error *out_error)
{
    if (plan->format != EP_WEIGHTS_NONE && plan->format != format) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: tensor %.200s: is %s, allowed %s as the expert's other matrices",
                            ep_safetensors_name(entry->shard), entry->name,
                            ep_weight_format_name(format), ep_weight_format_name(plan->format));
    }
    plan->format = format;
    return EP_OK;
}

/* gate and up must have one format; down may have another, unless the inputs are int8. */
static ep_err settle_format(ep_expert_plan *plan, ep_matrix m, ep_weight_format format,
                            const ep_checkpoint_entry *entry, ep_error *out_error)
{
    const bool rounds = format == EP_WEIGHTS_W8A8 || plan->format == EP_WEIGHTS_W8A8;
    if (m != EP_MATRIX_DOWN || rounds || plan->format == format) {
        return one_format(plan, format, entry, out_error);
    }
    plan->down_format = format;
    return EP_OK;
}

/* A shared expert whose gate and up are one tensor has gate's rows first, then up's; so has its
 * bias. */
static bool settle_fused(const naming *n, ep_matrix m, ep_plan_matrix *matrix)
{
    char gate[EP_TENSOR_NAME_BYTES], up[EP_TENSOR_NAME_BYTES];
    if (n->index < n->shape->experts || m == EP_MATRIX_DOWN ||
        !ep_activation_has_gate(n->shape->activation)) {
        return false;
    }
    (void)find_part(n, EP_MATRIX_GATE, "weight", gate);
    (void)find_part(n, EP_MATRIX_UP, "weight", up);
    if (strcmp(gate, up) != 0) {
        return false;
    }
    matrix->run_rows = 2 * matrix->rows;
    matrix->first = m == EP_MATRIX_UP ? matrix->rows : 0;
    return true;
}

static ep_weight_tensors find_tensors(const naming *n, ep_matrix m,
                                      const ep_checkpoint_entry *values)
{
    char name[EP_TENSOR_NAME_BYTES];
    (void)find_part(n, m, "qweight", name);
    const bool are_words = strcmp(values->name, name) == 0;
    ep_weight_tensors tensors = {.values = values,
                                 .are_words = are_words,
                                 .scales = find_any(n, m, scale_parts, name),
                                 .zeros = find_any(n, m, zero_parts, name),
                                 .factor = find_any(n, m, multiplying_parts, name)};
    if (tensors.factor == NULL) {
        tensors.factor = find_any(n, m, dividing_parts, name);
        tensors.factor_divides = true;
    }
    return tensors;
}

/* Plans the group of each column. GPTQ stores it even where groups are contiguous; the stored
 * groups must then be so. */
static ep_err plan_order(const naming *n, ep_matrix m, ep_expert_plan *plan, ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    ep_plan_matrix *matrix = &plan->matrices[m];
    const ep_quant_words words = n->self->config.quant.words;
    const ep_weight_codes codes = ep_weight_format_codes(matrix->container.format);
    const bool may_have =
        (codes == EP_CODES_INT4 || codes == EP_CODES_INT8) && words != EP_QUANT_WORDS_AWQ;
    const ep_checkpoint_entry *order = may_have ? find_any(n, m, order_parts, name) : NULL;
    if (order == NULL && may_have && n->self->config.quant.has_order &&
        matrix->container.scales.columns < matrix->columns) {
        const ep_checkpoint_entry *values = plan->runs[matrix->values].entry;
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "%s: tensor %.200s: has no order of columns, which the config says it "
                            "has: %s is missing",
                            ep_safetensors_name(values->shard), values->name,
                            words == EP_QUANT_WORDS_NONE ? order_parts[0] : order_parts[1]);
    }
    if (order == NULL) {
        return EP_OK;
    }
    ep_err err = !ep_tensor_has_type(order, "I32")
                     ? ep_tensor_type_error(order, "I32", out_error)
                     : ep_tensor_check_shape(order, EP_DIMS(matrix->columns), out_error);
    if (err == EP_OK) {
        matrix->order = add_whole(plan, order);
        matrix->is_ordered = words == EP_QUANT_WORDS_NONE || n->self->config.quant.has_order;
        plan->has_places = plan->has_places || (m != EP_MATRIX_DOWN && matrix->is_ordered);
    }
    return err;
}

/* Plans values with scales. Tensors that the container does not use are no runs, and refused
 * later. */
static ep_err plan_quantised(const naming *n, ep_matrix m, const ep_checkpoint_entry *values,
                             ep_expert_plan *plan, ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    ep_plan_matrix *matrix = &plan->matrices[m];
    const ep_weight_tensors tensors = find_tensors(n, m, values);
    ep_weight_container *c = &matrix->container;
    ep_err err = ep_weight_container_make(&n->self->config.quant, &tensors, matrix->rows,
                                          matrix->columns, c, out_error);
    if (err == EP_OK) {
        err = settle_format(plan, m, c->format, values, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    matrix->values = add_whole(plan, values);
    if (c->packing == EP_PACKING_BLOCKS) {
        return EP_OK;
    }
    matrix->scales = add_whole(plan, tensors.scales);
    matrix->zeros = c->zeros == EP_ZEROS_NONE ? -1 : add_whole(plan, tensors.zeros);
    matrix->factor = c->format == EP_WEIGHTS_NVFP4 ? add_whole(plan, tensors.factor) : -1;
    const ep_checkpoint_entry *offset =
        c->format == EP_WEIGHTS_W8A8 ? find_part(n, m, "weight_offset", name) : NULL;
    matrix->offset = offset == NULL ? -1 : add_whole(plan, offset);
    return plan_order(n, m, plan, out_error);
}

static ep_err plan_plain(const naming *n, ep_matrix m, const ep_checkpoint_entry *values,
                         ep_expert_plan *plan, ep_error *out_error)
{
    ep_plan_matrix *matrix = &plan->matrices[m];
    /* an expert has one type, also when the config states none */
    const ep_dtype dtype = plan->format != EP_WEIGHTS_NONE ? ep_weight_format_dtype(plan->format)
                                                           : n->self->config.info.dtype;
    ep_err err = ep_tensor_check_plain(values, matrix->run_rows, matrix->columns, dtype, out_error);
    if (err == EP_OK) {
        err = settle_format(plan, m, ep_weight_format_of(values->tensor->dtype), values, out_error);
    }
    if (err == EP_OK) {
        matrix->container.format = ep_weight_format_of(values->tensor->dtype);
        matrix->values = add_whole(plan, values);
    }
    return err;
}

/* Plans a matrix that has tensors of its own. */
static ep_err plan_separate(const naming *n, ep_matrix m, ep_expert_plan *plan, ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    ep_plan_matrix *matrix = &plan->matrices[m];
    const ep_checkpoint_entry *values = find_any(n, m, value_parts, name);
    if (values == NULL) {
        return ep_checkpoint_missing(n->self, name, out_error);
    }
    const bool is_fused = settle_fused(n, m, matrix); /* common scales are not supported */
    const bool is_plain = ep_dtype_is_float(values->tensor->dtype) || is_fused;
    ep_err err = (is_plain ? plan_plain : plan_quantised)(n, m, values, plan, out_error);
    if (err != EP_OK) {
        return err;
    }
    const ep_checkpoint_entry *bias = find_part(n, m, "bias", name);
    return bias == NULL ? EP_OK : plan_bias(bias, matrix->run_rows, plan, &matrix->bias, out_error);
}

/* Plans the four-bit blocks of N7. */
static ep_err plan_blocks(const naming *n, ep_matrix m, const ep_checkpoint_entry *blocks,
                          ep_expert_plan *plan, ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    ep_plan_matrix *matrix = &plan->matrices[m];
    const uint64_t experts = n->shape->experts;
    const uint64_t rows = matrix->run_rows;
    const uint64_t groups = parts_of(matrix->columns, EP_MX_GROUP);
    const ep_checkpoint_entry *scales = find_part(n, m, "scales", name);
    if (!ep_tensor_has_type(blocks, "U8")) {
        return ep_tensor_type_error(blocks, "U8", out_error);
    }
    if (matrix->columns % EP_MX_GROUP != 0) {
        return ep_error_set(
            out_error, EP_ERR_BAD_FILE, "%s: tensor %.200s: %u columns, allowed multiples of %d",
            ep_safetensors_name(blocks->shard), blocks->name, matrix->columns, EP_MX_GROUP);
    }
    ep_err err =
        ep_tensor_check_shape(blocks, EP_DIMS(experts, rows, groups, EP_MX_GROUP / 2), out_error);
    if (err != EP_OK) {
        return err;
    }
    if (scales == NULL) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "%s: tensor %.200s: has no scales: %s is missing",
                            ep_safetensors_name(blocks->shard), blocks->name, name);
    }
    if (!ep_tensor_has_type(scales, "U8") && !ep_tensor_has_type(scales, "F8_E8M0")) {
        return ep_tensor_type_error(scales, "U8, F8_E8M0", out_error);
    }
    err = ep_tensor_check_shape(scales, EP_DIMS(experts, rows, groups), out_error);
    if (err == EP_OK) {
        err = settle_format(plan, m, EP_WEIGHTS_MXFP4, blocks, out_error);
    }
    if (err == EP_OK) {
        matrix->values = add_slab(plan, blocks, n);
        matrix->scales = add_slab(plan, scales, n);
        matrix->container = (ep_weight_container){.format = EP_WEIGHTS_MXFP4,
                                                  .scales = {.kind = EP_SCALES_E8M0,
                                                             .rows = 1,
                                                             .columns = EP_MX_GROUP,
                                                             .row_step = groups,
                                                             .column_step = 1}};
    }
    return err;
}

static ep_err plan_stacked_bias(const naming *n, ep_matrix m, ep_expert_plan *plan,
                                ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    ep_plan_matrix *matrix = &plan->matrices[m];
    const ep_checkpoint_entry *bias = find_part(n, m, "bias", name);
    if (bias == NULL) {
        return EP_OK;
    }
    ep_err err = ep_tensor_check_float(bias, plan->bias_dtype, out_error);
    if (err == EP_OK) {
        err = ep_tensor_check_shape(
            bias, EP_DIMS((uint64_t)n->shape->experts, (uint64_t)matrix->run_rows), out_error);
    }
    if (err == EP_OK) {
        plan->bias_dtype = bias->tensor->dtype;
        matrix->bias = add_slab(plan, bias, n);
    }
    return err;
}

/* Checks type and shape of a stacked tensor of plain values, and sets whether it is transposed:
 * [E,rows,columns], or [E,columns,rows] where the names allow that; flat [E rows,columns], and down
 * [E columns,rows]. */
static ep_err settle_plain(const naming *n, ep_matrix m, const ep_checkpoint_entry *values,
                           ep_plan_matrix *matrix, ep_error *out_error)
{
    const ep_tensor_names *names = &n->self->names;
    const uint64_t experts = n->shape->experts, rows = matrix->rows, columns = matrix->columns;
    if (!ep_dtype_is_float(values->tensor->dtype)) {
        return ep_tensor_type_error(
            values,
            names->family == EP_NAMES_GGUF ? "BF16, F16, F32, " EP_BLOCK_TYPES : "BF16, F16, F32",
            out_error);
    }
    matrix->container.format = ep_weight_format_of(values->tensor->dtype);
    if (ep_tensor_names_flat(names)) {
        matrix->transposed = m == EP_MATRIX_DOWN;
        return matrix->transposed
                   ? ep_tensor_check_shape(values, EP_DIMS(experts * columns, rows), out_error)
                   : ep_tensor_check_shape(values, EP_DIMS(experts * rows, columns), out_error);
    }
    matrix->transposed = ep_tensor_names_may_transpose(names) &&
                         ep_tensor_has_shape(values, EP_DIMS(experts, columns, matrix->run_rows));
    return matrix->transposed ? EP_OK
                              : ep_tensor_check_shape(
                                    values, EP_DIMS(experts, matrix->run_rows, columns), out_error);
}

static ep_err plan_values(const naming *n, ep_matrix m, ep_expert_plan *plan, ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    ep_plan_matrix *matrix = &plan->matrices[m];
    const ep_checkpoint_entry *values = find_part(n, m, "weight", name);
    if (values == NULL) {
        return ep_checkpoint_missing(n->self, name, out_error);
    }
    ep_err err =
        ep_weight_container_of_blocks(values, &matrix->container)
            ? ep_tensor_check_shape(
                  values, EP_DIMS(n->shape->experts, matrix->run_rows, matrix->columns), out_error)
            : settle_plain(n, m, values, matrix, out_error);
    if (err == EP_OK) {
        err = settle_format(plan, m, matrix->container.format, values, out_error);
    }
    if (err == EP_OK) {
        matrix->values = add_slab(plan, values, n);
    }
    return err;
}

/* Plans a matrix in a tensor that stacks all experts of the layer. */
static ep_err plan_stacked(const naming *n, ep_matrix m, ep_expert_plan *plan, ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    ep_plan_matrix *matrix = &plan->matrices[m];
    const bool alternates = n->self->names.alternates;
    if (m != EP_MATRIX_DOWN && plan->matrices[EP_MATRIX_GATE].present &&
        ep_tensor_names_fused(&n->self->names)) { /* gate and up in one tensor */
        matrix->run_rows = 2 * matrix->rows;
        matrix->step = alternates ? 2 : 1;
        matrix->first = m == EP_MATRIX_GATE ? 0 : alternates ? 1 : matrix->rows;
    }
    const ep_checkpoint_entry *blocks = find_part(n, m, "blocks", name);
    const ep_err err = blocks != NULL ? plan_blocks(n, m, blocks, plan, out_error)
                                      : plan_values(n, m, plan, out_error);
    return err == EP_OK ? plan_stacked_bias(n, m, plan, out_error) : err;
}

/*
 * gate_up and down are both transposed or neither is. So even with H == I or H == 2 I one of the
 * two shapes decides: [2I,H] and [H,2I] are equal only where H == 2 I, [H,I] and [I,H] only where H
 * == I.
 */
static ep_err settle_transposed(const naming *n, ep_expert_plan *plan, ep_error *out_error)
{
    const ep_plan_matrix *up = &plan->matrices[EP_MATRIX_UP];
    ep_plan_matrix *down = &plan->matrices[EP_MATRIX_DOWN];
    bool up_either = up->run_rows == up->columns;
    bool down_either = down->run_rows == down->columns;
    if (up->transposed != down->transposed && !up_either && !down_either) {
        char name[EP_TENSOR_NAME_BYTES];
        const ep_checkpoint_entry *entry = find_part(n, EP_MATRIX_DOWN, "weight", name);
        return ep_error_set(
            out_error, EP_ERR_BAD_FILE, "%s: tensor %.200s: is %s, the layer's gate and up are %s",
            ep_safetensors_name(entry->shard), entry->name,
            down->transposed ? "[E,I,H]" : "[E,H,I]", up->transposed ? "[E,H,2I]" : "[E,2I,H]");
    }
    if (up_either && down_either) {
        return ep_error_set(
            out_error, EP_ERR_BAD_FILE,
            "layer %u: shapes of its stacked experts do not tell rows from columns (H %u, I %u)",
            n->shape->layer, n->shape->hidden, plan->inner);
    }
    bool transposed = up_either ? down->transposed : up->transposed;
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        plan->matrices[m].transposed = transposed;
    }
    return EP_OK;
}

/* All matrices of an expert must have biases, or none. */
static ep_err check_biases(const naming *n, const ep_expert_plan *plan, ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    for (ep_matrix m = 0; plan->bias_dtype != EP_DTYPE_NONE && m < EP_MATRIX_COUNT; m++) {
        if (plan->matrices[m].present && plan->matrices[m].bias < 0) {
            (void)find_part(n, m, "bias", name);
            return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                                "tensor %s: is missing; the expert's other matrices have a bias",
                                name);
        }
    }
    return EP_OK;
}

static ep_err plan_shared_gate(const ep_checkpoint *self, const ep_layer_shape *shape,
                               ep_expert_plan *plan, ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    ep_tensor_name_shared_gate(&self->names, shape->layer, name);
    const ep_checkpoint_entry *entry = ep_checkpoint_entry_find(self, name);
    if (entry == NULL) {
        if (self->config.shared_gate_required) {
            return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                                "tensor %s: is missing; a %s model's shared expert has a gate",
                                name, self->config.info.model_type);
        }
        return EP_OK;
    }
    ep_err err = ep_tensor_check_plain(entry, 0, shape->hidden, EP_DTYPE_NONE, out_error);
    if (err == EP_OK) {
        plan->shared_gate = add_whole(plan, entry);
        plan->shared_gate_dtype = entry->tensor->dtype;
    }
    return err;
}

/* Whether a tensor changes no weight, by the part of its name after the expert or matrix. */
static bool is_harmless(const char *name)
{
    static const char *const ends[] = {"weight_shape", "input_scale", "input_zero_point",
                                       "input_offset", "input_global_scale"};
    const size_t length = strlen(name);
    bool is_one = false;
    for (size_t i = 0; i < EP_ARRAY_COUNT(ends); i++) {
        const size_t end = strlen(ends[i]);
        const bool is_whole =
            length > end && (name[length - end - 1] == '.' || name[length - end - 1] == '_');
        is_one = is_one || (is_whole && strcmp(name + length - end, ends[i]) == 0);
    }
    return is_one;
}

static bool is_read(const ep_expert_plan *plan, const ep_checkpoint_entry *entry)
{
    for (int i = 0; i < plan->runs_count; i++) {
        if (plan->runs[i].entry == entry) {
            return true;
        }
    }
    return false;
}

/* Refuses the first tensor with this start that is neither read nor harmless: it may change the
 * weights. */
static ep_err refuse_unread(const ep_checkpoint *self, const ep_expert_plan *plan,
                            const char *start, ep_error *out_error)
{
    const size_t length = strlen(start);
    size_t low = 0;
    size_t high = self->entries_count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (strcmp(self->entries[middle].name, start) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (; low < self->entries_count && strncmp(self->entries[low].name, start, length) == 0;
         low++) {
        const ep_checkpoint_entry *entry = &self->entries[low];
        if (!is_read(plan, entry) && !is_harmless(entry->name)) {
            return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                                "%s: tensor %.200s: belongs to an expert whose other tensors are "
                                "read, and this build does not read it",
                                ep_safetensors_name(entry->shard), entry->name);
        }
    }
    return EP_OK;
}

/* Cuts a name behind dot number `parts` + 1 from its end. */
static void cut_name(char *name, int parts)
{
    for (char *end = name + strlen(name); end > name && parts >= 0; end--) {
        parts -= end[-1] == '.' ? 1 : 0;
        if (parts >= 0) {
            end[-1] = 0;
        }
    }
}

/* Checks all tensors of the expert: those below its name, or that begin like the stacked ones. */
static ep_err refuse_all_unread(const naming *n, const ep_expert_plan *plan, ep_error *out_error)
{
    static const char all[] = "experts.";
    char name[EP_TENSOR_NAME_BYTES];
    const bool is_stacked =
        n->index < n->shape->experts && ep_tensor_names_stacked(&n->self->names);
    ep_err err = EP_OK;
    for (ep_matrix m = 0; err == EP_OK && m < EP_MATRIX_COUNT; m++) {
        if (!plan->matrices[m].present) {
            continue;
        }
        (void)find_part(n, m, is_stacked ? "" : "weight", name);
        if (is_stacked) {
            char folder[EP_TENSOR_NAME_BYTES];
            memcpy(folder, name, sizeof(folder));
            cut_name(folder, 0);
            const size_t length = strlen(folder);
            const bool is_own =
                length >= strlen(all) && strcmp(folder + length - strlen(all), all) == 0;
            /* "gate_up_proj_" loses its last character, since a dot may follow instead */
            name[strlen(name) - 1] = 0;
            err = refuse_unread(n->self, plan, is_own ? folder : name, out_error);
        } else {
            cut_name(name, 1);
            err = refuse_unread(n->self, plan, name, out_error);
        }
    }
    if (err == EP_OK && plan->shared_gate >= 0) {
        ep_tensor_name_shared_gate(&n->self->names, n->shape->layer, name);
        cut_name(name, 0);
        err = refuse_unread(n->self, plan, name, out_error);
    }
    return err;
}

ep_err ep_expert_plan_make(const ep_checkpoint *checkpoint, const ep_layer_shape *shape,
                           uint32_t index, ep_expert_plan *out_plan, ep_error *out_error)
{
    const ep_model_info *info = &checkpoint->config.info;
    const bool is_shared = index >= shape->experts;
    naming n = {.self = checkpoint, .shape = shape, .index = index};
    *out_plan = (ep_expert_plan){.inner = is_shared ? info->shared_inner[shape - info->moe_layers]
                                                    : shape->inner,
                                 .shared_gate = -1};
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        bool is_down = m == EP_MATRIX_DOWN;
        out_plan->matrices[m] = (ep_plan_matrix){
            .present = m != EP_MATRIX_GATE || ep_activation_has_gate(shape->activation),
            .rows = is_down ? shape->hidden : out_plan->inner,
            .columns = is_down ? out_plan->inner : shape->hidden,
            .values = -1,
            .scales = -1,
            .factor = -1,
            .zeros = -1,
            .order = -1,
            .bias = -1,
            .offset = -1,
            .step = 1,
        };
        out_plan->matrices[m].run_rows = out_plan->matrices[m].rows;
    }
    const bool is_stacked = !is_shared && ep_tensor_names_stacked(&checkpoint->names);
    ep_err err = EP_OK;
    n.spelling = is_shared ? shared_spelling(n) : 0;
    for (ep_matrix m = 0; err == EP_OK && m < EP_MATRIX_COUNT; m++) {
        if (out_plan->matrices[m].present) {
            err = (is_stacked ? plan_stacked : plan_separate)(&n, m, out_plan, out_error);
        }
    }
    if (err == EP_OK && is_stacked && ep_weight_format_is_float(out_plan->format) &&
        ep_tensor_names_may_transpose(&checkpoint->names)) {
        err = settle_transposed(&n, out_plan, out_error);
    }
    err = err == EP_OK ? check_biases(&n, out_plan, out_error) : err;
    if (err == EP_OK && is_shared) {
        err = plan_shared_gate(checkpoint, shape, out_plan, out_error);
    }
    return err == EP_OK ? refuse_all_unread(&n, out_plan, out_error) : err;
}
