/* SPDX-License-Identifier: Apache-2.0 */
/* Packed protobuf messages changed along their descriptor: fields are added, repeated, removed or
 * given edge values. */
#ifndef EP_TESTS_FUZZ_PROTO_MUTATOR_H
#define EP_TESTS_FUZZ_PROTO_MUTATOR_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>

/* Changes data in place, at most bytes_max afterwards; the new length. */
size_t proto_mutate(const ProtobufCMessageDescriptor *type, uint8_t *data, size_t bytes,
                    size_t bytes_max, uint32_t random);

#endif
