/* SPDX-License-Identifier: Apache-2.0 */
/* What a heartbeat says of the load: slots and passes of those experts that have any, and nothing
 * twice. */
#include "expertd/load_report.h"

#include <criterion/criterion.h>
#include <string.h>

enum { EXPERTS = 4 };

Test(load_report, tells_slots_and_passes_of_experts_with_any_once)
{
    static ep_work_queue queues[EXPERTS];
    static _Atomic uint64_t slots[EXPERTS];
    const ep_node_model_config config = {.name = "m"};
    const ep_model_info info = {.version = "v"};
    ep_node_layer layer = {
        .shape = {.layer = 3, .experts = EXPERTS}, .queues = queues, .slots = slots};
    ep_node_model model = {.config = &config, .info = &info, .layers_count = 1, .layers = &layer};
    const ep_node_models models = {.count = 1, .models = &model};
    ep_load_report *report;
    Expertd__V1__LayerLoad **loads;
    size_t count;
    cr_assert_eq(ep_load_report_create(&models, &report), EP_OK);
    ep_load_report_make(report, 0, true, &loads, &count);
    cr_assert_eq(count, 0);
    slots[1] = 70;
    queues[1].passes = 9;
    slots[3] = 5;
    queues[3].passes = 5;
    ep_load_report_make(report, 0, true, &loads, &count);
    cr_assert_eq(count, 1);
    const Expertd__V1__LayerLoad *load = loads[0];
    cr_assert(load->layer == 3 && strcmp(load->model, "m") == 0 && strcmp(load->version, "v") == 0);
    cr_assert(load->n_experts == 2 && load->n_slots == 2 && load->n_passes == 2);
    cr_assert(load->experts[0] == 1 && load->slots[0] == 70 && load->passes[0] == 9);
    cr_assert(load->experts[1] == 3 && load->slots[1] == 5 && load->passes[1] == 5);
    ep_load_report_free(loads, count);
    ep_load_report_make(report, 0, true, &loads, &count);
    cr_assert_eq(count, 0, "nothing is new");
    ep_load_report_destroy(report);
}
