/* SPDX-License-Identifier: Apache-2.0 */
#include "fault_device.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

void fault_device_init(fault_device *device, const char *dir)
{
    char script[3 * EP_TEST_PATH_BYTES + 256];
    snprintf(device->program, sizeof(device->program), "%s/expertd-ascend", dir);
    snprintf(device->lost_file, sizeof(device->lost_file), "%s/lost", dir);
    snprintf(script, sizeof(script),
             "#!/bin/sh\nASCEND_HOME_PATH=%s EP_CANN_LOST_FILE=%s exec %s \"$@\" --backend=ascend\n",
             EP_TEST_CANN, device->lost_file, ep_test_expertd);
    EP_TEST_CHECK(ep_test_write_file(device->program, script, 0700), "%s cannot be written", device->program);
}

void fault_device_lose(const fault_device *device)
{
    const int fd = open(device->lost_file, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    EP_TEST_CHECK(fd >= 0 && close(fd) == 0, "%s cannot be made", device->lost_file);
}
