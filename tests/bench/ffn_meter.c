/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_meter.h"

#include "bench/bench_report.h"

static void take_limit(ffn_meter *m, size_t at)
{
    m->reads[at] = ffn_limit_read_us(m->team, m->segments, m->segments_count) / m->experts;
    const double peak = ffn_limit_peak(m->team, m->peak);
    m->computes[at] = peak > 0 ? m->operations / peak / m->experts : 0;
    if (m->f32_operations > 0 && peak > 0) {
        m->computes[at] += m->f32_operations / ffn_limit_peak(m->team, FFN_PEAK_F32) / m->experts;
    }
}

bool ffn_meter_take(ffn_meter *m)
{
    if (m->count + 2 > FFN_METER_SAMPLES_MAX) {
        return false;
    }
    take_limit(m, m->count);
    m->times[m->count] = m->run(m->arg) / m->experts;
    m->times[m->count + 1] = m->run(m->arg) / m->experts;
    take_limit(m, m->count + 1);
    m->count += 2;
    return true;
}

double ffn_meter_share(const ffn_meter *m, size_t i)
{
    return (m->reads[i] > m->computes[i] ? m->reads[i] : m->computes[i]) / m->times[i];
}

static double median(double *values, size_t count)
{
    return bench_quantile(values, count, 0.5);
}

ffn_figures ffn_meter_figures(const ffn_meter *m)
{
    static double times[FFN_METER_SAMPLES_MAX], limits[FFN_METER_SAMPLES_MAX],
        shares[FFN_METER_SAMPLES_MAX], sums[FFN_METER_SAMPLES_MAX];
    static double reads[FFN_METER_SAMPLES_MAX], computes[FFN_METER_SAMPLES_MAX];
    double bytes = 0;
    for (size_t s = 0; s < m->segments_count; s++) {
        bytes += (double)m->segments[s].bytes;
    }
    for (size_t i = 0; i < m->count; i++) {
        times[i] = m->times[i];
        reads[i] = m->reads[i];
        computes[i] = m->computes[i];
        limits[i] = reads[i] > computes[i] ? reads[i] : computes[i];
        shares[i] = ffn_meter_share(m, i);
        sums[i] = (reads[i] + computes[i]) / times[i];
    }
    const double read_us = median(reads, m->count);
    const double compute_us = median(computes, m->count);
    return (ffn_figures){.us = median(times, m->count),
                         .limit_us = median(limits, m->count),
                         .share = median(shares, m->count),
                         .sum_share = median(sums, m->count),
                         .memory_binds = read_us > compute_us,
                         .read_gbs = bytes / m->experts / read_us * 1e-3,
                         .peak_gops =
                             compute_us > 0 ? m->operations / m->experts / compute_us * 1e-3 : 0};
}
