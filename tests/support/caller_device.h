/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device as a calling program uses it. A failure ends the process. */
#ifndef EP_TESTS_SUPPORT_CALLER_DEVICE_H
#define EP_TESTS_SUPPORT_CALLER_DEVICE_H

#include "backends/ascend/acl_symbols.h"
#include "expertd/tensor.h"

enum { DEVICE_STREAMS = 3 };

extern ep_acl_symbols device_acl;
extern ep_acl_stream device_streams[DEVICE_STREAMS];

/* tolerates: failures are planned. The first sets device_failed; later calls do nothing. */
extern bool device_tolerates;
extern bool device_failed;

#define DEVICE_MUST(call) device_must(call, #call)
void device_must(ep_acl_code code, const char *call);

/* Loads the libraries below home and sets the device for the calling thread. */
void device_open(const char *home, uint64_t seed, const char *delay_us);
/* Frees everything these functions made and ends the runtime, which reports leaks of other code. */
void device_close(void);

void *device_alloc(size_t bytes);
/* Enqueues a copy to the device of the bytes that from holds now. */
void device_put(ep_acl_stream stream, void *to, const void *from, size_t bytes);
/* Enqueues a copy to the host; the returned bytes are valid once the stream has run it. */
const void *device_get(ep_acl_stream stream, const void *from, size_t bytes);
/* Makes stream wait at a gate until another stream opens it. */
void device_close_gate(ep_acl_stream stream);
void device_open_gate(ep_acl_stream stream);
void device_sync(ep_acl_stream stream);
/* Records an event behind the stream's present tasks; has_passed: they have run. */
ep_acl_event device_mark(ep_acl_stream stream);
bool device_has_passed(ep_acl_event mark);
/* Makes stream wait until other has run its present tasks. */
void device_order(ep_acl_stream stream, ep_acl_stream other);
/* Returns the same tensor with its bytes on the device. */
ep_tensor device_tensor(const ep_tensor *host, void *memory, ep_acl_stream sync);

#endif
