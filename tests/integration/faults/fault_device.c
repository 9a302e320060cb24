/* SPDX-License-Identifier: Apache-2.0 */
#include "fault_device.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "base/numeric.h"

void fault_device_init(fault_device *device, const char *dir, const char *name, uint32_t devices,
                       uint64_t weight_bytes_max)
{
    char script[3 * EP_TEST_PATH_BYTES + 384];
    snprintf(device->program, sizeof(device->program), "%s/%s", dir, name);
    snprintf(device->lost_file, sizeof(device->lost_file), "%s-lost", device->program);
    snprintf(script, sizeof(script),
             "#!/bin/sh\nASCEND_HOME_PATH=%s EP_CANN_DEVICES=%" PRIu32
             " EP_CANN_LOST_FILE=%s exec %s \"$@\" "
             "--backend=ascend --weight-bytes-max=%" PRIu64 "\n",
             EP_TEST_CANN, devices, device->lost_file, ep_test_expertd, weight_bytes_max);
    EP_TEST_CHECK(ep_test_write_file(device->program, script, 0700), "%s cannot be written",
                  device->program);
}

void fault_device_lose(const fault_device *device, const char *which)
{
    char path[sizeof(device->lost_file) + 8];
    snprintf(path, sizeof(path), "%s%s", device->lost_file, which);
    const int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    EP_TEST_CHECK(fd >= 0 && close(fd) == 0, "%s cannot be made", path);
}

/*
 * The device rounds to bf16 (2^-8) at five steps where the oracle's sums are f32, and errors of the
 * first are carried on by the next; the whole token is looked at, so single values that cancel do
 * not count.
 */
void fault_device_expect(const ep_test_batch *batch, const uint16_t *y)
{
    for (uint32_t t = 0; t < batch->tokens; t++) {
        double error = 0.0;
        double size = 0.0;
        for (uint32_t h = 0; h < batch->hidden; h++) {
            const size_t i = (size_t)t * batch->hidden + h;
            const double want = (double)ep_bf16_to_f32(batch->expected[i]);
            const double difference = (double)ep_bf16_to_f32(y[i]) - want;
            error += difference * difference;
            size += want * want;
        }
        EP_TEST_CHECK(sqrt(error) <= 0x1p-5 * sqrt(size), "token %u is off by %g of %g", t,
                      sqrt(error), sqrt(size));
    }
}
