/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device as a calling program uses it: streams, buffers, and copies that wait for
 * nothing. Failures end the process. */
#ifndef EP_TESTS_SUPPORT_CALLER_DEVICE_H
#define EP_TESTS_SUPPORT_CALLER_DEVICE_H

#include "backends/ascend/acl_symbols.h"
#include "expertd/tensor.h"

enum { DEVICE_STREAMS = 3 };

extern ep_acl_symbols device_acl;
extern ep_acl_stream device_streams[DEVICE_STREAMS];

/* Failures are planned: the first one is noted, and nothing is done after it. */
extern bool device_tolerates;
extern bool device_failed;

#define DEVICE_MUST(call) device_must(call, #call)
void device_must(ep_acl_code code, const char *call);

/* With the libraries below home; the calling thread works on the device then. */
void device_open(const char *home, uint64_t seed, const char *delay_us);
/* Frees everything that was made by these functions and ends the runtime, which finds what somebody
 * else left. */
void device_close(void);

void *device_alloc(size_t bytes);
/* Enqueues the copy of what from holds now to the device. */
void device_put(ep_acl_stream stream, void *to, const void *from, size_t bytes);
/* Enqueues the copy to the host; *the result* is there when the stream has passed it. */
const void *device_get(ep_acl_stream stream, const void *from, size_t bytes);
/* A gate that a stream waits at until it is opened by another stream. */
void device_close_gate(ep_acl_stream stream);
void device_open_gate(ep_acl_stream stream);
void device_sync(ep_acl_stream stream);
/* Whether the stream has passed what it holds now, seen after it. */
ep_acl_event device_mark(ep_acl_stream stream);
bool device_has_passed(ep_acl_event mark);
/* stream goes on when other has passed what it holds now. */
void device_order(ep_acl_stream stream, ep_acl_stream other);
/* The same tensor with its bytes on the device. */
ep_tensor device_tensor(const ep_tensor *host, void *memory, ep_acl_stream sync);

#endif
