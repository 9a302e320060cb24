/* SPDX-License-Identifier: Apache-2.0 */
/* One table of all keys that this build knows, and the few of them that are used. */
#include "model/quant_config.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "model/json_reader.h"

#define DEPTH_MAX 4 /* of keys in the table */
#define PATH_BYTES 160
#define LIST_BYTES 240

enum { FP8 = 1, MXFP4 = 2, CT = 4, W8A8 = 8, MODELOPT = 16, GPTQ = 32, AWQ = 64 };

static const struct {
    const char *name;
    unsigned keys; /* bits of the methods that have it */
} methods[] = {{"fp8", FP8},   {"mxfp4", MXFP4}, {"mxfp8", FP8},         {"compressed-tensors", CT},
               {"w8a8", W8A8}, {"ascend", W8A8}, {"modelopt", MODELOPT}, {"gptq", GPTQ},
               {"awq", AWQ}};

/*
 * Keys and their allowed values. {}: an object, whose keys have rows of their own; #: an integer;
 * []: a list of integers; -: the key begins with "-:", which excludes modules; otherwise a list of
 * words, or NULL: any value, since none changes the meaning of a weight. Null is always allowed,
 * also for unknown keys: the key then counts as absent.
 */
static const struct {
    unsigned methods;
    const char *path; /* a star stands for any key */
    const char *allowed;
} keys[] = {
    {~0u, "quant_method", NULL},
    /* which modules are quantised; their tensors show that */
    {FP8 | MXFP4 | W8A8 | AWQ | GPTQ, "modules_to_not_convert", NULL},
    {GPTQ, "dynamic", "{}"},
    {GPTQ, "dynamic.*", "-"},
    {GPTQ | AWQ, "lm_head", NULL},
    {GPTQ | AWQ, "modules_in_block_to_quantize", NULL},
    {GPTQ | AWQ, "block_name_to_quantize", NULL},
    {GPTQ | AWQ, "module_name_preceding_first_block", NULL},
    {FP8, "modules_to_convert", NULL},
    {MODELOPT, "exclude_modules", NULL},
    {FP8 | W8A8, "ignored_layers", NULL},
    {CT | MODELOPT, "ignore", NULL},
    {CT | MODELOPT, "config_groups", "{}"},
    {CT | MODELOPT, "config_groups.*", "{}"},
    {CT | MODELOPT, "config_groups.*.targets", NULL},
    /* rounding of activations and of the caller's cache */
    {FP8 | W8A8, "activation_scheme", NULL},
    {CT | MODELOPT, "config_groups.*.input_activations", NULL},
    {CT | MODELOPT, "config_groups.*.output_activations", NULL},
    {~0u, "kv_cache_scheme", NULL},
    {MODELOPT, "kv_cache_quant_algo", NULL},
    /* how weights were computed, and hints for loaders */
    {FP8 | MXFP4 | CT, "dequantize", NULL},
    {MODELOPT, "producer", NULL},
    {GPTQ | AWQ, "damp_percent", NULL},
    {GPTQ | AWQ, "damp_auto_increment", NULL},
    {GPTQ | AWQ, "true_sequential", NULL},
    {GPTQ | AWQ, "static_groups", NULL},
    {GPTQ | AWQ, "act_group_aware", NULL},
    {GPTQ | AWQ, "dataset", NULL},
    {GPTQ | AWQ, "tokenizer", NULL},
    {GPTQ | AWQ, "model_seqlen", NULL},
    {GPTQ | AWQ, "batch_size", NULL},
    {GPTQ | AWQ, "pad_token_id", NULL},
    {GPTQ | AWQ, "cache_block_outputs", NULL},
    {GPTQ | AWQ, "meta", NULL},
    {GPTQ | AWQ, "model_name_or_path", NULL},
    {GPTQ | AWQ, "model_file_base_name", NULL},
    {GPTQ | AWQ, "backend", NULL},
    {GPTQ | AWQ, "use_exllama", NULL},
    {GPTQ | AWQ, "disable_exllama", NULL},
    {GPTQ | AWQ, "exllama_config", NULL},
    {GPTQ | AWQ, "max_input_length", NULL},
    {GPTQ | AWQ, "use_cuda_fp16", NULL},
    {GPTQ | AWQ, "autoround_version", NULL},
    {GPTQ | AWQ, "provider", NULL},
    {GPTQ | AWQ, "enable_quanted_input", NULL},
    {GPTQ | AWQ, "to_quant_block_names", NULL},
    {GPTQ | AWQ, "amp", NULL},
    {GPTQ | AWQ, "gradient_accumulate_steps", NULL},
    {GPTQ | AWQ, "iters", NULL},
    {GPTQ | AWQ, "nsamples", NULL},
    {GPTQ | AWQ, "seqlen", NULL},
    {GPTQ | AWQ, "lr", NULL},
    {GPTQ | AWQ, "minmax_lr", NULL},
    {GPTQ | AWQ, "enable_minmax_tuning", NULL},
    {GPTQ | AWQ, "low_gpu_mem_usage", NULL},
    {AWQ, "do_fuse", NULL},
    {AWQ, "modules_to_fuse", NULL},
    {AWQ, "fuse_max_seq_len", NULL},
    {CT, "global_compression_ratio", NULL},
    {CT, "version", NULL},
    {CT, "run_compressed", NULL},
    {CT, "config_groups.*.weights.observer", NULL},
    {CT, "config_groups.*.weights.observer_kwargs", NULL},
    /* what types and shapes of tensors show too */
    {FP8, "scale_fmt", "float|ue8m0"},
    {FP8, "expert_dtype", "fp8|fp4"},
    {FP8, "fmt", "e4m3|float8_e4m3fn|e4m3fn"},
    {FP8, "weight_block_size", "[]"},
    {MODELOPT, "quant_algo", "NVFP4|FP8"},
    {MODELOPT | GPTQ | AWQ, "group_size", "#"},
    {GPTQ, "bits", "4|8"},
    {AWQ, "bits", "4"},
    {GPTQ, "checkpoint_format", "gptq|gptq_v2"},
    {GPTQ, "format", "gptq|gptq_v2"},
    {AWQ, "checkpoint_format", "gemm"},
    {AWQ, "format", "gemm"},
    {AWQ, "version", "gemm|GEMM"},
    {GPTQ | AWQ, "pack_dtype", "int32"},
    {GPTQ, "is_marlin_format", "false"},
    {GPTQ | AWQ, "data_type", "int"},
    {GPTQ, "sym", "true|false"},
    {GPTQ, "desc_act", "true|false"},
    {AWQ, "desc_act", "false"},
    {AWQ, "sym", NULL}, /* its presence means another method */
    {AWQ, "zero_point", "true|false"},
    {CT, "format",
     "dense|int-quantized|float-quantized|naive-quantized|pack-quantized|mxfp4-pack-quantized|"
     "mxfp8-quantized|"
     "nvfp4-pack-quantized|mixed-precision"},
    {CT, "config_groups.*.format",
     "dense|int-quantized|float-quantized|naive-quantized|pack-quantized|mxfp4-pack-quantized|"
     "mxfp8-quantized|nvfp4-pack-quantized"},
    {CT, "quantization_status", "compressed"},
    {CT, "sparsity_config", "{}"},
    {CT, "sparsity_config.format", "dense"},
    {CT, "sparsity_config.global_sparsity", NULL},
    {CT, "sparsity_config.ignore", NULL},
    {CT, "sparsity_config.registry_requires_subclass", NULL},
    {CT, "sparsity_config.sparsity_structure", NULL},
    {CT, "sparsity_config.targets", NULL},
    {CT, "transform_config", "{}"},
    {CT, "transform_config.config_groups", "{}"},
    {CT | MODELOPT, "config_groups.*.weights", "{}"},
    {CT | MODELOPT, "config_groups.*.weights.num_bits", "4|8"},
    {CT | MODELOPT, "config_groups.*.weights.type", "int|float"},
    {CT, "config_groups.*.weights.symmetric", "true|false"},
    {CT, "config_groups.*.weights.strategy", "tensor|channel|group|block|tensor_group"},
    {CT | MODELOPT, "config_groups.*.weights.group_size", "#"},
    {CT, "config_groups.*.weights.block_structure", "[]"},
    {CT | MODELOPT, "config_groups.*.weights.dynamic", "false"},
    {CT, "config_groups.*.weights.actorder", "false|true|weight|static|group|dynamic"},
    {CT, "config_groups.*.weights.scale_dtype", NULL},
    {CT, "config_groups.*.weights.zp_dtype", NULL},
};

typedef struct walk {
    ep_config_reader *reader;
    unsigned methods;
    const char *root; /* "quantization_config" */
    const char *at[DEPTH_MAX];
    size_t depth;
} walk;

/* Whether a row's path equals the walk's, possibly without the last key. */
static bool is_path(const walk *w, const char *path, size_t depth)
{
    for (size_t i = 0; i < depth; i++) {
        const size_t length = strcspn(path, ".");
        const bool is_any = length == 1 && path[0] == '*';
        if (length == 0 ||
            (!is_any && (strlen(w->at[i]) != length || strncmp(w->at[i], path, length) != 0))) {
            return false;
        }
        path += length + (path[length] == '.' ? 1 : 0);
    }
    return depth == w->depth ? *path == 0 : *path != 0 && strchr(path, '.') == NULL;
}

static void print_path(const walk *w, char out[PATH_BYTES])
{
    size_t used = (size_t)snprintf(out, PATH_BYTES, "%s", w->root);
    for (size_t i = 0; i < w->depth && used < PATH_BYTES; i++) {
        char text[EP_JSON_TEXT_BYTES];
        used += (size_t)snprintf(out + used, PATH_BYTES - used, ".%s",
                                 ep_json_printable(w->at[i], text, sizeof(text)));
    }
}

/* Refuses an unknown last key, and lists the known ones. */
static void fail_key(const walk *w)
{
    char path[PATH_BYTES];
    char others[LIST_BYTES] = "";
    size_t used = 0;
    for (size_t i = 0; i < EP_ARRAY_COUNT(keys) && used < sizeof(others); i++) {
        if ((keys[i].methods & w->methods) != 0 && is_path(w, keys[i].path, w->depth - 1)) {
            const char *dot = strrchr(keys[i].path, '.');
            const char *name = dot == NULL ? keys[i].path : dot + 1;
            used += (size_t)snprintf(others + used, sizeof(others) - used, "%s%s",
                                     used == 0 ? "" : ", ", name);
        }
    }
    print_path(w, path);
    ep_config_fail(w->reader, EP_ERR_UNIMPLEMENTED,
                   "%s: this build does not know what the key means for weights; allowed: %s", path,
                   used == 0 ? "none" : others);
}

/* Whether a value's text is in a list a|b|c. */
static bool is_listed(const char *list, const json_t *value)
{
    const char *text = json_is_string(value)  ? json_string_value(value)
                       : json_is_true(value)  ? "true"
                       : json_is_false(value) ? "false"
                                              : "";
    char number[32];
    if (json_is_integer(value)) {
        snprintf(number, sizeof(number), "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        text = number;
    }
    for (size_t length = 0; *list != 0; list += length + (list[length] == '|' ? 1 : 0)) {
        length = strcspn(list, "|");
        if (strlen(text) == length && strncmp(text, list, length) == 0) {
            return true;
        }
    }
    return false;
}

static bool are_integers(const json_t *value)
{
    bool all = json_is_array(value);
    for (size_t i = 0; all && i < json_array_size(value); i++) {
        all = json_is_integer(json_array_get(value, i));
    }
    return all;
}

static void check_value(const walk *w, const char *allowed, const json_t *value)
{
    char path[PATH_BYTES];
    char text[EP_JSON_TEXT_BYTES];
    const bool wants_one = strcmp(allowed, "#") == 0;
    const bool wants_list = strcmp(allowed, "[]") == 0;
    if (strcmp(allowed, "-") == 0) {
        print_path(w, path);
        ep_config_fail(w->reader, EP_ERR_UNIMPLEMENTED,
                       "%s: says how some modules differ, allowed: keys that begin with -: and "
                       "take modules out",
                       path);
    } else if (!(wants_one    ? json_is_integer(value)
                 : wants_list ? are_integers(value)
                              : is_listed(allowed, value))) {
        print_path(w, path);
        ep_config_fail(w->reader, EP_ERR_UNIMPLEMENTED, "%s is %s, allowed %s", path,
                       ep_json_describe(value, text),
                       wants_one    ? "an integer"
                       : wants_list ? "a list of integers"
                                    : allowed);
    }
}

static void check_object(walk *w, json_t *object);

static void check_key(walk *w, json_t *value)
{
    char path[PATH_BYTES];
    char text[EP_JSON_TEXT_BYTES];
    size_t i = 0;
    while (i < EP_ARRAY_COUNT(keys) &&
           ((keys[i].methods & w->methods) == 0 || !is_path(w, keys[i].path, w->depth))) {
        i++;
    }
    if (json_is_null(value)) {
        return;
    }
    if (i == EP_ARRAY_COUNT(keys)) {
        fail_key(w);
    } else if (keys[i].allowed == NULL) {
        return;
    } else if (strcmp(keys[i].allowed, "-") == 0 && strncmp(w->at[w->depth - 1], "-:", 2) == 0) {
        return;
    } else if (strcmp(keys[i].allowed, "{}") != 0) {
        check_value(w, keys[i].allowed, value);
    } else if (json_is_object(value)) {
        check_object(w, value);
    } else {
        print_path(w, path);
        ep_config_fail(w->reader, EP_ERR_UNIMPLEMENTED, "%s is %s, allowed an object", path,
                       ep_json_describe(value, text));
    }
}

static void check_object(walk *w, json_t *object)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        EP_ASSERT(w->depth < DEPTH_MAX); /* the table has no object that is deeper */
        w->at[w->depth++] = key;
        check_key(w, value);
        w->depth--;
    }
}

static uint32_t size_of(const json_t *value)
{
    const json_int_t number = json_is_integer(value) ? json_integer_value(value) : 0;
    return number > 0 && number <= UINT32_MAX ? (uint32_t)number : 0;
}

/* Adds a size, each once. block: [rows,columns] or NULL; then group: its columns, or a whole
 * row. */
static void add_size(const walk *w, const json_t *block, const json_t *group,
                     ep_quant_config *config)
{
    const bool is_block = json_is_array(block);
    const ep_quant_size size = {.rows = is_block ? size_of(json_array_get(block, 0)) : 1,
                                .columns = size_of(is_block ? json_array_get(block, 1) : group)};
    for (uint32_t i = 0; i < config->sizes_count; i++) {
        if (config->sizes[i].rows == size.rows && config->sizes[i].columns == size.columns) {
            return;
        }
    }
    if (is_block && (json_array_size(block) != 2 || size.rows == 0 || size.columns == 0)) {
        ep_config_fail(w->reader, EP_ERR_UNIMPLEMENTED,
                       "%s: a block size is not two numbers above 0", w->root);
    } else if (config->sizes_count == EP_QUANT_SIZES_MAX) {
        ep_config_fail(w->reader, EP_ERR_UNIMPLEMENTED,
                       "%s: more than %d sizes of groups and blocks", w->root, EP_QUANT_SIZES_MAX);
    } else {
        config->sizes[config->sizes_count++] = size;
    }
}

/* Whether a scheme, of weights or inputs, can be int8. */
static bool is_int8(const json_t *scheme)
{
    const json_t *bits = json_object_get(scheme, "num_bits");
    const char *type = json_string_value(json_object_get(scheme, "type"));
    return json_is_object(scheme) && (type == NULL || strcmp(type, "int") == 0) &&
           (bits == NULL || json_is_null(bits) || json_integer_value(bits) == 8);
}

/* Whether a group's name or its inputs say that activations have 16 bits. */
static bool names_wide_inputs(const char *name, const json_t *group)
{
    static const char bits[] = "A16";
    const char *at = strstr(name, bits);
    const json_t *inputs = json_object_get(group, "input_activations");
    return (at != NULL && !isdigit((unsigned char)at[sizeof(bits) - 1])) ||
           json_integer_value(json_object_get(inputs, "num_bits")) == 16;
}

/* Whether each row of weights has one scale. */
static bool is_by_row(const json_t *weights)
{
    return size_of(json_object_get(weights, "group_size")) == 0 &&
           !json_is_array(json_object_get(weights, "block_structure"));
}

/* Whether a group's columns are in an order of their own. */
static bool has_own_order(const json_t *weights)
{
    const json_t *order = json_object_get(weights, "actorder");
    const char *word = json_string_value(order);
    return json_is_true(order) ||
           (word != NULL && (strcmp(word, "group") == 0 || strcmp(word, "dynamic") == 0));
}

static void read_sizes(const walk *w, const json_t *quantised, ep_quant_config *config)
{
    const char *name;
    json_t *group;
    const json_t *block = json_object_get(quantised, "weight_block_size");
    const json_t *columns = json_object_get(quantised, "group_size");
    uint32_t rounds = 0; /* inputs become int8 too, as in w8a8 */
    uint32_t rounds_not = 0;
    uint32_t ordered = 0;
    uint32_t asymmetric = 0;
    uint32_t groups = 0;
    if (json_is_array(block) || json_is_integer(columns)) {
        add_size(w, block, columns, config);
    }
    json_object_foreach(json_object_get(quantised, "config_groups"), name, group)
    {
        const json_t *weights = json_object_get(group, "weights");
        config->wide_inputs = config->wide_inputs || names_wide_inputs(name, group);
        if (json_is_object(weights)) {
            add_size(w, json_object_get(weights, "block_structure"),
                     json_object_get(weights, "group_size"), config);
            ordered += has_own_order(weights) ? 1 : 0;
            asymmetric += json_is_false(json_object_get(weights, "symmetric")) ? 1 : 0;
            groups++;
        }
        const bool may_round = json_is_object(weights) && is_by_row(weights);
        const bool has_rounded_inputs = is_int8(json_object_get(group, "input_activations"));
        rounds += may_round && has_rounded_inputs ? 1 : 0;
        rounds_not += may_round && is_int8(weights) && !has_rounded_inputs ? 1 : 0;
    }
    if (rounds > 0 && rounds_not > 0) {
        ep_config_fail(w->reader, EP_ERR_UNIMPLEMENTED,
                       "%s.config_groups: int8 rows of some groups have int8 inputs and of others "
                       "not, allowed: all or none",
                       w->root);
    }
    config->weights_only =
        json_object_size(json_object_get(quantised, "config_groups")) > 0 && rounds == 0;
    config->has_order = groups > 0 && ordered == groups;
    config->asymmetric = groups > 0 && asymmetric == groups;
}

/* What checkpoint_format or format says about the layout of words. Without them it is the first
 * version. */
static void read_words(const walk *w, const json_t *quantised, unsigned method,
                       ep_quant_config *config)
{
    const char *format = json_string_value(json_object_get(quantised, "checkpoint_format"));
    const char *also = json_string_value(json_object_get(quantised, "format"));
    if (method == GPTQ && format != NULL && also != NULL && strcmp(format, also) != 0) {
        ep_config_fail(w->reader, EP_ERR_UNIMPLEMENTED,
                       "%s.checkpoint_format is %s and format is %s, allowed the same", w->root,
                       format, also);
    }
    format = format == NULL ? also : format;
    const bool is_second = format != NULL && strcmp(format, "gptq_v2") == 0;
    config->words = method == AWQ    ? EP_QUANT_WORDS_AWQ
                    : method != GPTQ ? EP_QUANT_WORDS_NONE
                    : is_second      ? EP_QUANT_WORDS_GPTQ_V2
                                     : EP_QUANT_WORDS_GPTQ;
    config->symmetric = method == GPTQ && json_is_true(json_object_get(quantised, "sym"));
    config->has_order = config->has_order ||
                        (method == GPTQ && json_is_true(json_object_get(quantised, "desc_act")));
}

static void fail_method(const walk *w, const char *method)
{
    char text[EP_JSON_TEXT_BYTES];
    char others[LIST_BYTES] = "none";
    size_t used = strlen(others);
    for (size_t i = 0; i < EP_ARRAY_COUNT(methods) && used < sizeof(others); i++) {
        used += (size_t)snprintf(others + used, sizeof(others) - used, ", %s", methods[i].name);
    }
    ep_config_fail(w->reader, EP_ERR_UNIMPLEMENTED, "%s: quant_method is %s, allowed: %s", w->root,
                   method == NULL ? "not given" : ep_json_printable(method, text, sizeof(text)),
                   others);
}

bool ep_quant_config_read(ep_config_reader *reader, json_t *root, ep_quant_config *out_config)
{
    const char *key = "";
    const char *const *names = EP_CONFIG_KEYS("quantization_config", "compression_config");
    ep_config_reader whole = *reader;
    whole.object = root;
    whole.prefix = "";
    *out_config = (ep_quant_config){0};
    json_t *quantised = ep_config_find(reader, names, &key);
    const bool is_inner = quantised != NULL;
    quantised = is_inner ? quantised : ep_config_find(&whole, names, &key);
    for (size_t i = 0; is_inner && i < 2; i++) {
        const json_t *also = json_object_get(root, names[i]);
        if (json_is_object(also) && json_equal(also, quantised) == 0) {
            ep_config_fail(reader, EP_ERR_UNIMPLEMENTED,
                           "%s is not the %s of the whole file, allowed the same", key, names[i]);
            return true;
        }
    }
    if (quantised == NULL) {
        return false;
    }
    walk w = {.reader = reader, .root = key};
    const char *method = json_string_value(json_object_get(quantised, "quant_method"));
    for (size_t i = 0; method != NULL && i < EP_ARRAY_COUNT(methods); i++) {
        w.methods |= strcmp(method, methods[i].name) == 0 ? methods[i].keys : 0;
    }
    if (w.methods == 0) {
        fail_method(&w, method);
        return true;
    }
    check_object(&w, quantised);
    read_sizes(&w, quantised, out_config);
    read_words(&w, quantised, w.methods, out_config);
    return true;
}
