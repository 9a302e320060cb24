/* SPDX-License-Identifier: Apache-2.0 */
/* Which model, version and layer a request means, and what is said when it means none or
 * several. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "cluster/view.h"
#include "support/expect.h"

static ep_error error;
static ep_view_layer found;

/* One layer, number 4, in each of the models. */
static ep_view *make(const char *const (*models)[2], uint32_t models_count)
{
    const ep_layer_shape shape = {.layer = 4, .hidden = 8, .inner = 8, .experts = 3, .top_k = 2};
    ep_routing_table *table = NULL;
    ep_view *view = NULL;
    cr_assert_eq(ep_routing_table_create(1, models_count, models_count, &table), EP_OK);
    for (uint32_t m = 0; m < models_count; m++) {
        cr_assert_eq(ep_routing_table_model_init(table, m, models[m][0], models[m][1], 0), EP_OK);
        cr_assert_eq(ep_routing_table_layer_init(table, m, m, &shape, 0), EP_OK);
    }
    cr_assert_eq(ep_view_create(table, &view), EP_OK);
    found = (ep_view_layer){.model_index = 77};
    return view;
}

static ep_err find(ep_view *view, const char *model, const char *version, uint32_t layer_number)
{
    ep_error_clear(&error);
    return ep_view_find(view, model, version, layer_number, &found, &error);
}

static const char *const two_versions[][2] = {{"demo", "v1"}, {"other", "v9"}, {"demo", "v2"}};

Test(view, the_only_version_needs_no_name)
{
    ep_view *view = make(two_versions, 3);
    ASSERT_OK(find(view, "other", NULL, 4), error);
    cr_assert_eq(found.model_index, 1);
    cr_assert_eq(found.layer, &view->table->layers[1]);
    found.model_index = 77;
    ASSERT_OK(find(view, "other", "", 4), error);
    cr_assert_eq(found.model_index, 1);
    ep_view_unref(view);
}

Test(view, one_of_several_versions_must_be_named)
{
    ep_view *view = make(two_versions, 3);
    const char *const none[] = {NULL, ""};
    for (size_t i = 0; i < 2; i++) {
        cr_assert_eq(find(view, "demo", none[i], 4), EP_ERR_INVALID_ARGUMENT);
        cr_assert_str_eq(error.text, "model demo has several versions, none of them whole yet: v1, "
                                     "v2; name one, or set the default: "
                                     "expertctl model default demo VERSION");
        cr_assert_eq(found.model_index, 77, "written although it failed");
        cr_assert_null(found.layer);
    }
    cr_assert_eq(ep_view_find(view, "demo", NULL, 4, &found, NULL), EP_ERR_INVALID_ARGUMENT);
    ASSERT_OK(find(view, "demo", "v1", 4), error);
    cr_assert_eq(found.model_index, 0);
    ASSERT_OK(find(view, "demo", "v2", 4), error);
    cr_assert_eq(found.model_index, 2);
    ep_view_unref(view);
}

Test(view, no_version_means_the_default)
{
    const char *const none[] = {NULL, ""};
    for (uint32_t chosen = 0; chosen <= 2; chosen += 2) {
        ep_view *view = make(two_versions, 3);
        view->table->models[chosen].is_default = true;
        for (size_t i = 0; i < 2; i++) {
            ASSERT_OK(find(view, "demo", none[i], 4), error);
            cr_assert_eq(found.model_index, chosen);
            cr_assert_eq(found.layer, &view->table->layers[chosen]);
        }
        ASSERT_OK(find(view, "demo", "v1", 4), error);
        cr_assert_eq(found.model_index, 0);
        ASSERT_OK(find(view, "demo", "v2", 4), error);
        cr_assert_eq(found.model_index, 2);
        ep_view_unref(view);
    }
}

Test(view, what_is_not_there_is_named)
{
    ep_view *view = make(two_versions, 3);
    cr_assert_eq(find(view, "demo", "v3", 4), EP_ERR_NOT_FOUND);
    ASSERT_TEXT(error, "demo:v3");
    ASSERT_TEXT(error, "demo:v1, other:v9, demo:v2");
    cr_assert_eq(find(view, "nope", NULL, 4), EP_ERR_NOT_FOUND);
    cr_assert_eq(find(view, "other", NULL, 5), EP_ERR_NOT_FOUND);
    ASSERT_TEXT(error, "other:v9 has no MoE layer 5");
    ep_view_unref(view);
}

/* More versions than the text has room for: cut, marked as cut, and nothing written past its
 * end. */
Test(view, a_long_list_of_versions_is_cut)
{
    static char versions[40][EP_VERSION_BYTES];
    static const char *models[40][2];
    for (int m = 0; m < 40; m++) {
        snprintf(versions[m], sizeof(versions[m]), "version-number-%d", m);
        models[m][0] = "demo";
        models[m][1] = versions[m];
    }
    ep_view *view = make(models, 40);
    cr_assert_eq(find(view, "demo", NULL, 4), EP_ERR_INVALID_ARGUMENT);
    ASSERT_TEXT(error, "version-number-0, version-number-1, ");
    ASSERT_TEXT(error, "...; name one");
    ep_view_unref(view);
}
