/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl frame decode: writes a frame's fixed part and message as JSON, its tensors as a
 * file. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmd_frame.h"
#include "message_json.h"
#include "origin.h"
#include "rpc/rpc_door.h"
#include "rpc/rpc_frame_io.h"

#define FIRST_BYTES ((size_t)1 << 20)
/* Headers and budgets of files on disk: the largest a frame may have. */
#define UNPACK_BYTES_MAX ((size_t)256 << 20)
#define SERVICE_BYTES 128

static struct {
    const char *file;
    const char *tensors_out; /* NULL none */
} wanted;

typedef struct frame_file {
    uint8_t *data;
    size_t bytes;
    ep_frame frame;
} frame_file;

const ep_rpc_method *ep_cli_frame_method;

void ep_cli_frame_take_method(struct argp_state *state, const char *option, char *text)
{
    char service[SERVICE_BYTES];
    const char *slash = strchr(text, '/');
    ep_cli_frame_method = NULL;
    if (slash != NULL && (size_t)(slash - text) < sizeof(service)) {
        snprintf(service, sizeof(service), "%.*s", (int)(slash - text), text);
        ep_cli_frame_method = ep_rpc_method_by_name(service, slash + 1);
    }
    if (ep_cli_frame_method == NULL) {
        argp_error(state, "%s is '%s', allowed: SERVICE/METHOD as in expertctl frame list",
                   ep_cli_setting_name(option, text), text);
    }
}

static void take_file(struct argp_state *state, char *text)
{
    if (wanted.file != NULL) {
        argp_error(state, "unexpected argument '%s', allowed: one FILE", text);
    }
    wanted.file = text;
}

static void check(struct argp_state *state)
{
    ep_cli_arg_required(state, "FILE", wanted.file);
}

static const ep_cli_option rows[] = {
    {"method", 0, "SERVICE/METHOD", "Whose message it is (default: by the number in the frame)", 1,
     .take = ep_cli_frame_take_method},
    {"tensors-out", 0, "FILE", "Gets the tensor section, as it is", 1, .text = &wanted.tensors_out},
};

/* ---- reading ---- */

static ep_err read_all(FILE *file, const char *name, frame_file *out, ep_error *out_error)
{
    size_t room = FIRST_BYTES;
    out->data = malloc(room);
    while (out->data != NULL) {
        out->bytes += fread(out->data + out->bytes, 1, room - out->bytes, file);
        if (out->bytes < room) {
            return ferror(file) == 0
                       ? EP_OK
                       : ep_error_set(out_error, EP_ERR_IO, "%s: %s", name, strerror(errno));
        }
        if (room > EP_FRAME_BYTES_CEILING) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s is longer than a frame can be, allowed: 64..%zu bytes", name,
                                EP_FRAME_BYTES_CEILING);
        }
        uint8_t *more = realloc(out->data, 2 * room);
        if (more == NULL) {
            break;
        }
        out->data = more;
        room *= 2;
    }
    return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for its bytes", name);
}

static ep_err check_frame(const char *name, frame_file *file, ep_error *out_error)
{
    size_t frame_bytes;
    if (file->bytes < EP_FRAME_FIXED_BYTES) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s ends at offset %zu, a frame has 64 bytes or more", name,
                            file->bytes);
    }
    ep_err err = ep_frame_decode(file->data, EP_FRAME_BYTES_CEILING, EP_FRAME_HEADER_BYTES_CEILING,
                                 &file->frame, &frame_bytes, out_error);
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "%s", name);
    }
    if (frame_bytes != file->bytes) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s has %zu bytes, its frame says %zu",
                            name, file->bytes, frame_bytes);
    }
    /* A CRC of 0 means that the sender had it off; one payload in 4 billion has this CRC and is not
     * checked. */
    err = ep_rpc_payload_check(&file->frame, file->data, file->frame.payload_crc != 0, out_error);
    return err != EP_OK ? ep_error_prefix(out_error, err, "%s", name) : EP_OK;
}

static ep_err read_frame(const char *name, frame_file *out_file, ep_error *out_error)
{
    bool from_stdin = strcmp(name, "-") == 0;
    FILE *file = from_stdin ? stdin : fopen(name, "rbe");
    *out_file = (frame_file){0};
    if (file == NULL) {
        return ep_error_set(out_error, errno == ENOENT ? EP_ERR_NOT_FOUND : EP_ERR_IO, "%s: %s",
                            name, strerror(errno));
    }
    ep_err err = read_all(file, name, out_file, out_error);
    if (!from_stdin) {
        fclose(file);
    }
    return err != EP_OK ? err : check_frame(name, out_file, out_error);
}

static ep_err write_tensors(const char *path, const frame_file *file, ep_error *out_error)
{
    size_t bytes = (size_t)file->frame.tensor_bytes;
    FILE *out = fopen(path, "wbe");
    bool good =
        out != NULL && fwrite(file->data + file->frame.tensor_offset, 1, bytes, out) == bytes;
    int reason = errno;
    if (out != NULL) {
        good = fclose(out) == 0 && good;
    }
    return good ? EP_OK
                : ep_error_set(out_error, EP_ERR_IO, "%s cannot be written: %s", path,
                               strerror(reason));
}

/* ---- JSON ---- */

static json_t *fixed_to_json(const frame_file *file, const ep_rpc_method *method)
{
    const ep_frame *f = &file->frame;
    json_t *flags = json_array();
    if ((f->flags & EP_FRAME_FLAG_DRAINING) != 0) {
        json_array_append_new(flags, json_string("draining"));
    }
    if ((f->flags & EP_FRAME_FLAG_END_OF_STREAM) != 0) {
        json_array_append_new(flags, json_string("end"));
    }
    json_t *name = method != NULL
                       ? json_sprintf("%s/%s", method->service->name, method->method->name)
                       : json_null();
    json_t *deadline = f->deadline_us == EP_FRAME_DEADLINE_NONE ? json_string("none")
                                                                : json_integer(f->deadline_us);
    json_t *id = f->call_id <= INT64_MAX ? json_integer((json_int_t)f->call_id)
                                         : json_sprintf("%" PRIu64, f->call_id);
    json_t *crc =
        f->payload_crc != 0 ? json_sprintf("%08" PRIx32, f->payload_crc) : json_string("off");
    return json_pack("{s:s, s:o, s:o, s:i, s:o, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:o}", "kind",
                     ep_frame_kind_name(f->kind), "flags", flags, "call_id", id, "attempt",
                     f->attempt, "method", name, "method_id", (json_int_t)f->method_id, "status",
                     (json_int_t)f->status, "deadline_us", deadline, "header_bytes",
                     (json_int_t)f->header_bytes, "tensor_offset", (json_int_t)f->tensor_offset,
                     "stream_sequence", (json_int_t)f->stream_sequence, "tensor_bytes",
                     (json_int_t)f->tensor_bytes, "payload_crc", crc);
}

static json_t *metadata_to_json(const Expertd__V1__CallHeader *header)
{
    json_t *list = json_array();
    for (size_t i = 0; i < header->n_metadata; i++) {
        const Expertd__V1__Metadata *item = header->metadata[i];
        bool secret = strcmp(item->key, EP_RPC_DOOR_TOKEN_KEY) == 0;
        json_array_append_new(
            list, json_pack("{s:o, s:o}", "key", ep_cli_json_text(item->key), "value",
                            secret ? json_string("(a token)") : ep_cli_json_text(item->value)));
    }
    return list;
}

/* Adds "message", for requests "metadata", for errors "error". out_status: the service's error. */
static ep_err add_payload(const frame_file *file, const ep_rpc_method *method,
                          ep_rpc_budget *budget, json_t *json, ep_error *out_status,
                          ep_error *out_error)
{
    const uint8_t *header = file->data + EP_FRAME_FIXED_BYTES;
    ProtobufCMessage *message = NULL;
    Expertd__V1__CallHeader *call_header = NULL;
    ep_err err = EP_OK;
    bool is_error = file->frame.status != 0 || file->frame.kind == EP_FRAME_GOODBYE;
    bool has_message = is_error || file->frame.kind <= EP_FRAME_REPLY_MORE;
    if (has_message && !is_error && method == NULL) {
        return ep_error_set(
            out_error, EP_ERR_BAD_FILE,
            "the frame is of method 0x%04x, which this program does not know; see --method",
            (unsigned)file->frame.method_id);
    }
    if (is_error) {
        err = ep_rpc_unpack(budget, &expertd__v1__status__descriptor, header,
                            file->frame.header_bytes, &message, out_error);
    } else if (file->frame.kind == EP_FRAME_REQUEST) {
        err = ep_rpc_request_unpack(budget, method->method->input, header, file->frame.header_bytes,
                                    &call_header, &message, out_error);
    } else if (has_message) {
        err = ep_rpc_unpack(budget, method->method->output, header, file->frame.header_bytes,
                            &message, out_error);
    }
    if (err != EP_OK || message == NULL) {
        return err;
    }
    if (is_error) {
        const Expertd__V1__Status *status = (const Expertd__V1__Status *)(const void *)message;
        ep_err code = ep_err_from_wire(status->reason, file->frame.status);
        json_object_set_new(json, "error", json_string(ep_err_name(code)));
        ep_error_set(out_status, code, "%s: %s", ep_err_name(code),
                     status->text[0] != '\0' ? status->text : ep_err_text(code));
    }
    if (call_header != NULL) {
        json_object_set_new(json, "metadata", metadata_to_json(call_header));
    }
    json_object_set_new(json, is_error ? "status" : "message", ep_cli_message_to_json(message));
    return EP_OK;
}

static ep_err print_frame(const frame_file *file, ep_error *out_status, ep_error *out_error)
{
    const ep_rpc_method *method = ep_cli_frame_method != NULL
                                      ? ep_cli_frame_method
                                      : ep_rpc_method_by_id(file->frame.method_id);
    ep_buffer_pool *pool = NULL;
    ep_rpc_budget budget;
    if (ep_buffer_pool_create(0, 0, &pool) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory");
    }
    ep_rpc_budget_init(&budget, pool, UNPACK_BYTES_MAX);
    json_t *json = json_object();
    json_object_set_new(json, "frame", fixed_to_json(file, method));
    ep_err err = add_payload(file, method, &budget, json, out_status, out_error);
    if (err == EP_OK && !ep_cli_json_print(json_incref(json), stdout)) {
        err = ep_error_set(out_error, EP_ERR_IO, "the JSON cannot be printed");
    }
    json_decref(json);
    ep_rpc_budget_fini(&budget);
    ep_buffer_pool_destroy(pool);
    return err;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    frame_file file;
    ep_error status;
    ep_error_clear(&status);
    ep_err err = read_frame(wanted.file, &file, out_error);
    err = err != EP_OK ? err : print_frame(&file, &status, out_error);
    if (err == EP_OK && wanted.tensors_out != NULL) {
        err = write_tensors(wanted.tensors_out, &file, out_error);
    }
    free(file.data);
    if (err != EP_OK || status.code != EP_OK) {
        /* always exit code 1: a service's DEADLINE_EXCEEDED does not mean that this program's time
         * is over */
        ep_cli_fail(call->program, err != EP_OK ? out_error : &status);
        call->failed = true;
    }
    return EP_OK;
}

const ep_cli_command ep_cli_frame_decode_command = {
    .name = "decode",
    .help = "prints a frame as JSON",
    .args = "FILE",
    .doc = "Prints a frame as JSON: its fixed part, and its message by the method's descriptor. "
           "FILE - is standard input."
           "\vBoth checksums are checked. A reply that holds an error is printed too; its words go "
           "to standard error and the exit code is 1. A token in a request is not shown.\n\n"
           "Examples:\n"
           "  expertctl frame decode reply.bin\n"
           "  expertctl frame decode reply.bin --tensors-out y.raw\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows), .check = check},
    .take_argument = take_file,
    .run = run,
};
