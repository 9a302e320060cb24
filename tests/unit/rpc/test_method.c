/* SPDX-License-Identifier: Apache-2.0 */
/* methods.def against what protoc says of the same .proto files. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "descriptor_subset.pb-c.h"
#include "rpc/rpc.h"

#define TYPE_BYTES 12
#define DEPTH_MAX 16

static Subset__FileSet *load(void)
{
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(EP_BINARY_DIR "/proto/generated/expertd.descriptors", "rb");
    cr_assert_not_null(file, "expertd.descriptors is missing");
    size_t count = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    Subset__FileSet *set = subset__file_set__unpack(NULL, count, bytes);
    cr_assert_not_null(set);
    return set;
}

Test(rpc_method, every_rpc_of_the_proto_files_has_one_row_that_agrees)
{
    Subset__FileSet *set = load();
    size_t rows;
    size_t seen = 0;
    const ep_rpc_method *all = ep_rpc_methods(&rows);
    cr_assert_not_null(all);
    for (size_t f = 0; f < set->n_file; f++) {
        for (size_t s = 0; s < set->file[f]->n_service; s++) {
            const Subset__Service *service = set->file[f]->service[s];
            char name[128];
            snprintf(name, sizeof(name), "%s.%s", set->file[f]->package, service->name);
            for (size_t m = 0; m < service->n_method; m++, seen++) {
                const Subset__Method *want = service->method[m];
                const ep_rpc_method *have = ep_rpc_method_by_name(name, want->name);
                cr_assert_not_null(have, "%s.%s is not in methods.def", name, want->name);
                cr_assert_str_eq(have->method->input->name,
                                 want->input_type + 1); /* protoc writes a leading dot */
                cr_assert_str_eq(have->method->output->name, want->output_type + 1);
                cr_assert_eq(have->stream == EP_RPC_SERVER_STREAM, want->server_streaming != 0,
                             "%s.%s", name, want->name);
                cr_assert_not(want->client_streaming, "%s.%s: callers do not stream here", name,
                              want->name);
                cr_assert_eq(&have->service->methods[have->method_index], have->method);
            }
        }
    }
    cr_assert_eq(seen, rows, "methods.def has %zu rows, the proto files %zu methods", rows, seen);
    subset__file_set__free_unpacked(set, NULL);
}

/* What a policy or a plan does depends on what was done before: the second time is another
 * order. */
Test(rpc_method, orders_that_build_on_others_are_never_sent_again)
{
    cr_assert_not(ep_rpc_method_by_name("expertd.v1.Admin", "Policy")->idempotent);
    cr_assert_not(ep_rpc_method_by_name("expertd.v1.Admin", "PlanPlacement")->idempotent);
}

Test(rpc_method, ids_are_unique_never_hello_and_found_again)
{
    size_t rows;
    const ep_rpc_method *all = ep_rpc_methods(&rows);
    for (size_t i = 0; i < rows; i++) {
        cr_assert_neq(all[i].id, 0);
        cr_assert_eq(ep_rpc_method_by_id(all[i].id), &all[i], "id 0x%04x stands twice", all[i].id);
    }
    cr_assert_null(ep_rpc_method_by_id(0));
    cr_assert_null(ep_rpc_method_by_id(0xffff));
    cr_assert_null(ep_rpc_method_by_name("expertd.v1.ExpertService", "forward"));
    cr_assert_null(ep_rpc_method_by_name("ExpertService", "Forward"));
}

/* Numbers on the wire never change. */
Test(rpc_method, numbers_are_the_published_ones)
{
    cr_assert_eq(ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward")->id, 0x0101);
    cr_assert_eq(ep_rpc_method_by_name("expertd.v1.ExpertService", "Describe")->id, 0x0102);
    cr_assert_eq(ep_rpc_method_by_name("expertd.v1.NodeInfo", "NodeStatus")->id, 0x0201);
    cr_assert_eq(ep_rpc_method_by_name("expertd.v1.Coordinator", "WatchPlacement")->id, 0x0303);
    cr_assert_eq(ep_rpc_method_by_name("expertd.v1.Health", "Check")->id, 0x0401);
    cr_assert_eq(ep_rpc_method_by_name("expertd.v1.Reflection", "ListServices")->id, 0x0501);
    cr_assert_eq(ep_rpc_method_by_name("expertd.v1.Coordinator", "RegisterNode")->role,
                 EP_ROLE_NODE);
}

static const Subset__Message *find_message(const Subset__FileSet *set, const char *type_name)
{
    for (size_t f = 0; f < set->n_file; f++) {
        for (size_t m = 0; m < set->file[f]->n_message_type; m++) {
            char name[256];
            snprintf(name, sizeof(name), ".%s.%s", set->file[f]->package,
                     set->file[f]->message_type[m]->name);
            if (strcmp(name, type_name) == 0) {
                return set->file[f]->message_type[m];
            }
        }
    }
    return NULL;
}

static void walk(const Subset__FileSet *set, const Subset__Message *message, int depth)
{
    cr_assert_lt(depth, DEPTH_MAX, "%s contains itself", message->name);
    for (size_t i = 0; i < message->n_field; i++) {
        const Subset__Field *field = message->field[i];
        cr_assert_neq(field->type, TYPE_BYTES,
                      "%s.%s is bytes; tensors follow the header, they do not stand in it",
                      message->name, field->name);
        const Subset__Message *inner =
            field->type_name[0] != 0 ? find_message(set, field->type_name) : NULL;
        if (inner != NULL) {
            walk(set, inner, depth + 1);
        }
    }
}

/* A recursive message overflows the stack of protobuf-c's unpacking. */
Test(rpc_method, no_message_is_recursive_or_holds_bytes)
{
    Subset__FileSet *set = load();
    for (size_t f = 0; f < set->n_file; f++) {
        for (size_t m = 0; m < set->file[f]->n_message_type; m++) {
            walk(set, set->file[f]->message_type[m], 0);
        }
    }
    subset__file_set__free_unpacked(set, NULL);
}
