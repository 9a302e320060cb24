/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Converts any protobuf-c message to JSON and back by its descriptor. Keys are the field names of
 * the .proto file.
 *
 *     integers      numbers; 64-bit ones also as decimal text, and written so above 2^63 - 1, which
 *                   readers of JSON may not support
 *     float         numbers, "NaN", "Infinity", "-Infinity"
 *     bool, string, message, repeated     true, "text", {...}, [...]
 *
 * Enumerations, bytes and oneof occur in no message of proto/: UNIMPLEMENTED. Types must not be
 * recursive.
 *
 * Threads  pure functions.
 */
#ifndef EP_CLI_MESSAGE_JSON_H
#define EP_CLI_MESSAGE_JSON_H

#include <jansson.h>
#include <protobuf-c/protobuf-c.h>

#include "base/error.h"

/*
 * Absent keys keep their default. Free *out_message with protobuf_c_message_free_unpacked(m, NULL).
 * Errors: INVALID_ARGUMENT naming the key's path ("gate.groups"), its value and what is allowed, or
 * an unknown key and the known ones; UNIMPLEMENTED; NO_MEMORY.
 */
ep_err ep_cli_message_from_json(const ProtobufCMessageDescriptor *type, const json_t *json,
                                ProtobufCMessage **out_message, ep_error *out_error);
/* Writes every field, also with default values, but no absent messages. NULL: no memory. */
json_t *ep_cli_message_to_json(const ProtobufCMessage *message);

#endif
