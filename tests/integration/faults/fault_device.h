/* SPDX-License-Identifier: Apache-2.0 */
/* Programs that are expertd on emulated NPUs, the loss of these, and what rows of theirs may be off
 * by. */
#ifndef FAULT_DEVICE_H
#define FAULT_DEVICE_H

#include "support/cluster.h"
#include "support/load.h"

typedef struct fault_device {
    char program[EP_TEST_PATH_BYTES + 32]; /* for node_programs of a cluster */
    char lost_file[EP_TEST_PATH_BYTES + 64];
} fault_device;

/* A program of this name with so many devices, in a directory of ep_test_dir_new. weight_bytes_max:
 * of each device; 0: no limit. */
void fault_device_init(fault_device *device, const char *dir, const char *name, uint32_t devices,
                       uint64_t weight_bytes_max);
/* From here on all its devices answer nothing (which ""), or one of them (".1"). */
void fault_device_lose(const fault_device *device, const char *which);

/* Fails the test when y is further from the oracle than the device's roundings: for
 * ep_test_load_config. */
void fault_device_expect(const ep_test_batch *batch, const uint16_t *y);

#endif
