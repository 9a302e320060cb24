/* SPDX-License-Identifier: Apache-2.0 */
/* A program that is expertd on an emulated NPU, and the loss of that NPU. */
#ifndef FAULT_DEVICE_H
#define FAULT_DEVICE_H

#include "support/cluster.h"

typedef struct fault_device {
    char program[EP_TEST_PATH_BYTES + 32]; /* for node_programs of a cluster */
    char lost_file[EP_TEST_PATH_BYTES + 32];
} fault_device;

/* In a directory of ep_test_dir_new. */
void fault_device_init(fault_device *device, const char *dir);
/* From here on the device answers nothing. */
void fault_device_lose(const fault_device *device);

#endif
