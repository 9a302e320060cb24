/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any protobuf-c message as JSON and back, by its descriptor. Keys are the field names of the
 * .proto file.
 *
 *     integers      numbers; 64-bit ones also decimal text, and written so above 2^63 - 1, which
 *                   JSON's readers may not hold
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
 * Keys that are absent keep their default. *out_message is freed with
 * protobuf_c_message_free_unpacked(m, NULL). Errors: INVALID_ARGUMENT naming the key with its path
 * ("gate.groups"), its value and what is allowed; an unknown key with the known ones;
 * UNIMPLEMENTED; NO_MEMORY.
 */
ep_err ep_cli_message_from_json(const ProtobufCMessageDescriptor *type, const json_t *json,
                                ProtobufCMessage **out_message, ep_error *out_error);
/* Every field, also those with default values; a message that is not there is left out. NULL: no
 * memory. */
json_t *ep_cli_message_to_json(const ProtobufCMessage *message);

#endif
