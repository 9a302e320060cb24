/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl frame encode: writes a request frame to a file, from JSON and tensors or from a
 * batch. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cmd_frame.h"
#include "connect.h"
#include "origin.h"
#include "gate_options.h"
#include "gateway_call.h"
#include "layer_options.h"
#include "message_json.h"
#include "model/safetensors.h"
#include "rpc/rpc_door.h"
#include "rpc/rpc_frame_io.h"

#define METADATA_MAX 16
#define TENSORS_MAX 64

static struct {
    const char *json;
    const char *json_file;
    const char *tensors; /* NULL none */
    /* in a safetensors file; none: the file tensors is the section itself */
    const char *tensor_names[TENSORS_MAX];
    size_t tensor_names_count;
    ep_rpc_metadata metadata[METADATA_MAX + 2]; /* room for token and tenant */
    size_t metadata_count;
    char token[EP_CLI_TOKEN_BYTES_MAX + 2]; /* "" none */
    char authorization[sizeof(EP_RPC_DOOR_TOKEN_PREFIX) + EP_CLI_TOKEN_BYTES_MAX + 2];
    uint32_t deadline_us;
    uint64_t call_id;
    bool payload_crc;
    const char *out;
} wanted = {.deadline_us = EP_FRAME_DEADLINE_NONE, .call_id = 1, .payload_crc = true};

/* ---- the command line ---- */

static void take_tensor(struct argp_state *state, const char *option, char *text)
{
    if (wanted.tensor_names_count == TENSORS_MAX) {
        argp_error(state, "%s is given more than %d times", option, TENSORS_MAX);
    }
    wanted.tensor_names[wanted.tensor_names_count++] = text;
}

static void take_token(struct argp_state *state, const char *option, char *text)
{
    ep_cli_token_read(state, option, text, wanted.token);
}

static void take_metadata(struct argp_state *state, const char *option, char *text)
{
    char *equals = strchr(text, '=');
    if (equals == NULL || equals == text) {
        argp_error(state, "%s is '%s', allowed: KEY=VALUE", ep_cli_setting_name(option, text),
                   text);
    }
    if (wanted.metadata_count == METADATA_MAX) {
        argp_error(state, "%s is given more than %d times", option, METADATA_MAX);
    }
    *equals = '\0';
    wanted.metadata[wanted.metadata_count++] = (ep_rpc_metadata){text, equals + 1};
}

static void check_options(struct argp_state *state)
{
    bool from_batch = ep_cli_layer_wanted.in != NULL;
    bool batch_options = ep_cli_layer_wanted.args.model != NULL || ep_cli_layer_wanted.has_layer ||
                         ep_cli_layer_wanted.logits != NULL;
    ep_cli_arg_required(state, "--method", ep_cli_frame_method);
    ep_cli_arg_required(state, "-o", wanted.out);
    if (from_batch || batch_options) {
        if (ep_cli_frame_method != ep_rpc_method_by_name("expertd.v1.Gateway", "Forward")) {
            argp_error(state,
                       "--in, --model and --layer make requests of expertd.v1.Gateway/Forward "
                       "only, --method is %s/%s",
                       ep_cli_frame_method->service->name, ep_cli_frame_method->method->name);
        }
        ep_cli_layer_require(state);
    }
    if (ep_cli_layer_wanted.args.tenant != NULL) {
        wanted.metadata[wanted.metadata_count++] =
            (ep_rpc_metadata){"tenant", ep_cli_layer_wanted.args.tenant};
    }
    if ((wanted.json != NULL) + (wanted.json_file != NULL) + from_batch > 1) {
        argp_error(state,
                   "more than one of --json, --json-file and --in is given, allowed: one of them");
    }
    if (from_batch && wanted.tensors != NULL) {
        argp_error(state,
                   "--in and --tensors are both given: tensors of a batch come from FILE of --in");
    }
    if (wanted.tensor_names_count > 0 && wanted.tensors == NULL) {
        argp_error(state, "--tensor needs --tensors, a safetensors file");
    }
    if (wanted.token[0] != '\0') {
        snprintf(wanted.authorization, sizeof(wanted.authorization), "%s%.*s",
                 EP_RPC_DOOR_TOKEN_PREFIX, EP_CLI_TOKEN_BYTES_MAX, wanted.token);
        wanted.metadata[wanted.metadata_count++] =
            (ep_rpc_metadata){EP_RPC_DOOR_TOKEN_KEY, wanted.authorization};
    }
}

static const ep_cli_option rows[] = {
    {"method", 0, "SERVICE/METHOD", "As in expertctl frame list (required)", 1,
     .take = ep_cli_frame_take_method},
    {"output", 'o', "FILE", "Gets the frame; - is standard output (required)", 1,
     .text = &wanted.out},
    {"json", 0, "TEXT", "The request message as JSON (default: {})", 1, .text = &wanted.json},
    {"json-file", 0, "FILE", "The same from a file", 1, .text = &wanted.json_file},
    {"tensors", 0, "FILE", "The tensor section, as it is; with --tensor a safetensors file", 1,
     .text = &wanted.tensors},
    {"tensor", 0, "NAME", "A tensor of that file; may be repeated, each at the next multiple of 64",
     1, .take = take_tensor},
    {"token-file", 0, "FILE", "File of mode 0600 with the token to show", 2, .take = take_token},
    {"metadata", 0, "KEY=VALUE", "Travels beside the message; may be repeated", 2,
     .take = take_metadata},
    {"deadline-us", 0, "TIME",
     "Time the service has, from when the frame arrives (default: no limit)", 2,
     .u32 = &wanted.deadline_us, .unit = EP_UNIT_US, .max = EP_FRAME_DEADLINE_NONE - 1},
    {"call-id", 0, "N", "Comes back in the reply (default: 1)", 2, .u64 = &wanted.call_id,
     .max = UINT64_MAX},
    {"no-payload-crc", 0, NULL, "For TLS, and for services with payload_crc: false", 2,
     .off = &wanted.payload_crc},
};

/* ---- tensors ---- */

static ep_err acquire(ep_buffer_pool *pool, size_t bytes, ep_buffer **out_tensors,
                      ep_error *out_error)
{
    if (bytes > EP_FRAME_BYTES_CEILING) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "a tensor section of %zu bytes, allowed: 0..%zu", bytes,
                            EP_FRAME_BYTES_CEILING);
    }
    ep_err err = bytes > 0 ? ep_buffer_acquire(pool, bytes, out_tensors) : EP_OK;
    return err != EP_OK ? ep_error_set(out_error, err, "no memory for %zu bytes of tensors", bytes)
                        : EP_OK;
}

static ep_err read_section(const char *path, ep_buffer_pool *pool, ep_buffer **out_tensors,
                           ep_error *out_error)
{
    struct stat st;
    FILE *file = fopen(path, "rbe");
    if (file == NULL || fstat(fileno(file), &st) != 0 || !S_ISREG(st.st_mode)) {
        ep_err err = ep_error_set(out_error, EP_ERR_IO, "%s: %s", path,
                                  file == NULL ? strerror(errno) : "no regular file");
        if (file != NULL) {
            fclose(file);
        }
        return err;
    }
    size_t bytes = (size_t)st.st_size;
    ep_err err = acquire(pool, bytes, out_tensors, out_error);
    if (err == EP_OK && bytes > 0 && fread((*out_tensors)->data, 1, bytes, file) != bytes) {
        err = ep_error_set(out_error, EP_ERR_IO, "%s: cannot read %zu bytes", path, bytes);
    }
    fclose(file);
    return err;
}

static size_t aligned(size_t offset)
{
    return (offset + EP_FRAME_ALIGN - 1) & ~(size_t)(EP_FRAME_ALIGN - 1);
}

/* Reads the named tensors, each to the next multiple of 64. */
static ep_err read_named(const ep_safetensors *file, ep_buffer_pool *pool, ep_buffer **out_tensors,
                         ep_error *out_error)
{
    const ep_safetensors_tensor *tensors[TENSORS_MAX];
    size_t total = 0;
    size_t at = 0;
    for (size_t i = 0; i < wanted.tensor_names_count; i++) {
        tensors[i] = ep_safetensors_find(file, wanted.tensor_names[i]);
        if (tensors[i] == NULL) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: there is no tensor %s",
                                wanted.tensors, wanted.tensor_names[i]);
        }
        total = aligned(total) + ep_safetensors_tensor_bytes(tensors[i]);
    }
    ep_err err = acquire(pool, total, out_tensors, out_error);
    if (err != EP_OK || total == 0) {
        return err;
    }
    memset((*out_tensors)->data, 0, total);
    for (size_t i = 0; i < wanted.tensor_names_count && err == EP_OK; i++) {
        size_t bytes = ep_safetensors_tensor_bytes(tensors[i]);
        at = aligned(at);
        err = ep_safetensors_read(file, tensors[i], 0, (*out_tensors)->data + at, bytes, out_error);
        at += bytes;
    }
    return err;
}

static ep_err read_tensors(ep_buffer_pool *pool, ep_buffer **out_tensors, ep_error *out_error)
{
    ep_safetensors *file = NULL;
    if (wanted.tensors == NULL) {
        return EP_OK;
    }
    if (wanted.tensor_names_count == 0) {
        return read_section(wanted.tensors, pool, out_tensors, out_error);
    }
    ep_err err = ep_safetensors_open_path(wanted.tensors, &file, out_error);
    if (err == EP_OK) {
        err = read_named(file, pool, out_tensors, out_error);
        ep_safetensors_close(file);
    }
    return err;
}

/* ---- the frame ---- */

static ep_err write_parts(const ep_rpc_out *out, ep_error *out_error)
{
    bool to_stdout = strcmp(wanted.out, "-") == 0;
    bool secret = wanted.token[0] != '\0';
    int fd = to_stdout
                 ? -1
                 : open(wanted.out, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, secret ? 0600 : 0666);
    FILE *file = to_stdout ? stdout : fd >= 0 ? fdopen(fd, "wb") : NULL;
    bool good = file != NULL && (!secret || to_stdout || fchmod(fd, 0600) == 0);
    for (uint32_t i = 0; good && i < out->send.parts_count; i++) {
        good = fwrite(out->send.parts[i].data, 1, out->send.parts[i].bytes, file) ==
               out->send.parts[i].bytes;
    }
    good = good && fflush(file) == 0;
    int reason = errno;
    if (file != NULL && !to_stdout) {
        good = fclose(file) == 0 && good;
    } else if (fd >= 0) {
        close(fd);
    }
    return good ? EP_OK
                : ep_error_set(out_error, EP_ERR_IO, "%s cannot be written: %s", wanted.out,
                               strerror(reason));
}

/* Takes the tensors in any case. */
static ep_err write_frame(const ProtobufCMessage *message, ep_buffer_pool *pool,
                          ep_buffer *taken_tensors, ep_error *out_error)
{
    ep_rpc_out *out;
    size_t bytes = ep_rpc_request_header_bytes(wanted.metadata, wanted.metadata_count, message);
    ep_err err = ep_rpc_out_create_request(pool, bytes, wanted.metadata, wanted.metadata_count,
                                           message, taken_tensors, &out);
    if (err != EP_OK) {
        ep_buffer_unref(taken_tensors);
        return ep_error_set(out_error, err, "the message does not fit in a header of %zu bytes",
                            EP_FRAME_HEADER_BYTES_CEILING);
    }
    if (out->frame_bytes > EP_FRAME_BYTES_CEILING) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                           "a frame of %zu bytes, allowed: 64..%zu", out->frame_bytes,
                           EP_FRAME_BYTES_CEILING);
    } else {
        out->frame.kind = EP_FRAME_REQUEST;
        out->frame.call_id = wanted.call_id;
        out->frame.method_id = ep_cli_frame_method->id;
        out->frame.deadline_us = wanted.deadline_us;
        ep_rpc_out_seal(out, wanted.payload_crc);
        err = write_parts(out, out_error);
    }
    ep_rpc_out_destroy(out);
    return err;
}

static ep_err encode_json(ep_buffer_pool *pool, ep_error *out_error)
{
    json_error_t why;
    const char *from = wanted.json_file != NULL ? wanted.json_file : "--json";
    json_t *json =
        wanted.json_file != NULL
            ? json_load_file(wanted.json_file, JSON_REJECT_DUPLICATES, &why)
            : json_loads(wanted.json != NULL ? wanted.json : "{}", JSON_REJECT_DUPLICATES, &why);
    ProtobufCMessage *message = NULL;
    ep_buffer *tensors = NULL;
    if (json == NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "%s: line %d: %s", from, why.line,
                            why.text);
    }
    ep_err err =
        ep_cli_message_from_json(ep_cli_frame_method->method->input, json, &message, out_error);
    json_decref(json);
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "%s", from);
    }
    err = read_tensors(pool, &tensors, out_error);
    if (err == EP_OK) {
        err = write_frame(message, pool, tensors, out_error);
    } else {
        ep_buffer_unref(tensors);
    }
    protobuf_c_message_free_unpacked(message, NULL);
    return err;
}

static ep_err encode_rows(const ep_cli_batch *batch, ep_buffer_pool *pool, ep_error *out_error)
{
    const ep_cli_layer_options *layer = &ep_cli_layer_wanted;
    const char *missing = ep_cli_layer_missing(batch);
    ep_cli_gateway_request request;
    ep_cli_gate gate = {.chosen = NULL};
    ep_gate_config config = {0};
    ep_moe_args args;
    if (missing != NULL) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: there is no tensor %s%s", layer->in,
                            missing, ep_cli_layer_missing_hint(missing));
    }
    ep_cli_layer_args(batch, 0, batch->tokens, &args);
    ep_err err = EP_OK;
    if (layer->logits != NULL) {
        err = ep_cli_gate_read(layer->logits, layer->args.layer, &gate, out_error);
        err = err == EP_OK ? ep_cli_gate_choose(&gate, layer->in, batch, out_error) : err;
        config = ep_cli_gate_config(&gate, 0, &args);
    }
    err = err != EP_OK ? err
                       : ep_cli_gateway_request_make(&args, layer->logits != NULL ? &config : NULL,
                                                     &batch->logits, ep_cli_layer_out_dtype(batch),
                                                     pool, &request, out_error);
    if (err == EP_OK) {
        err = write_frame(&request.header.base, pool, request.tensors, out_error);
    }
    ep_cli_gate_fini(&gate);
    return err;
}

static ep_err encode_batch(ep_buffer_pool *pool, ep_error *out_error)
{
    ep_cli_batch batch;
    ep_err err = ep_cli_batch_read(ep_cli_layer_wanted.in, &batch, out_error);
    if (err == EP_OK) {
        err = encode_rows(&batch, pool, out_error);
        ep_cli_batch_free(&batch);
    }
    return err;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_buffer_pool *pool = NULL;
    (void)call;
    if (ep_buffer_pool_create(0, 0, &pool) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory");
    }
    ep_err err = ep_cli_layer_wanted.in != NULL ? encode_batch(pool, out_error)
                                                : encode_json(pool, out_error);
    ep_buffer_pool_destroy(pool);
    return err;
}

const ep_cli_command ep_cli_frame_encode_command = {
    .name = "encode",
    .help = "writes a request frame to a file",
    .args = "--method SERVICE/METHOD -o FILE",
    .doc =
        "Writes a request frame: what one message to the open door (door_listen) has to hold."
        "\vA FILE that holds a token gets mode 0600.\n\n"
        "Examples:\n"
        "  expertctl frame encode --method expertd.v1.Health/Check -o request.bin\n"
        "  expertctl frame encode --method expertd.v1.Coordinator/Statistics \\\n"
        "      --json '{\"model\": \"demo\"}' -o request.bin\n"
        "  expertctl frame encode --method expertd.v1.Gateway/Forward \\\n"
        "      --in batch.safetensors --model demo --layer 0 -o request.bin\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows), .check = check_options},
    .uses = {&ep_cli_layer_of_frame_set},
    .run = run,
};
