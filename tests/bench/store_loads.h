/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a store takes until its experts are in memory, packed from the checkpoint, beside
 * reading the same file and doing nothing with it, both from the page cache: the ratio is what of
 * that time reading alone takes. And the CPU time of all threads for a gigabyte of the file.
 */
#ifndef EP_BENCH_STORE_LOADS_H
#define EP_BENCH_STORE_LOADS_H

#include "bench/bench_report.h"

/* dir: emptied for each form. Prints a line for each pair. */
void store_bench_loads(bench_report *report, const char *dir);

#endif
