/* SPDX-License-Identifier: Apache-2.0 */
/* Which libraries and symbols are taken, over libraries that are lists of names. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/ascend/acl_symbols.h"
#include "base/check.h"
#include "support/expect.h"

static ep_error error; /* of the last call */

typedef struct fake {
    const char *libraries; /* " name name " of those that are there */
    const char *lacking;   /* the same of symbols no library has */
    char asked[512];       /* libraries in the order they were asked for */
    int symbol_at;         /* what a symbol's address leads to */
} fake;

static bool has(const char *list, const char *name)
{
    char word[128];
    snprintf(word, sizeof(word), " %s ", name);
    return list != NULL && strstr(list, word) != NULL;
}

static void *fake_open(void *arg, const char *library, char text[EP_ERROR_TEXT_BYTES])
{
    fake *f = arg;
    strncat(f->asked, library, sizeof(f->asked) - strlen(f->asked) - 2);
    strcat(f->asked, " ");
    if (!has(f->libraries, library)) {
        snprintf(text, EP_ERROR_TEXT_BYTES, "no file %s", library);
        return NULL;
    }
    return (void *)(uintptr_t)library;
}

static void *fake_symbol(void *arg, void *handle, const char *name)
{
    fake *f = arg;
    cr_assert_not_null(handle);
    return has(f->lacking, name) ? NULL : &f->symbol_at;
}

#define NEW_SET " libacl_rt.so libnnopbase.so libopapi_nn.so libopapi_transformer.so "
#define OLD_SET " libascendcl.so libnnopbase.so libopapi.so "

static ep_err load(fake *f, ep_acl_symbols *out, ep_error *out_error)
{
    const ep_acl_opener opener = {.open = fake_open, .symbol = fake_symbol, .arg = f};
    return ep_acl_symbols_load(&opener, out, out_error);
}

Test(acl_symbols, takes_the_per_domain_libraries_and_v5_when_all_are_there)
{
    fake f = {.libraries = NEW_SET "libascendcl.so libopapi.so "};
    ep_acl_symbols s;
    ASSERT_OK(load(&f, &s, &error), error);
    cr_assert_str_eq(f.asked,
                     "libacl_rt.so libnnopbase.so libopapi_nn.so libopapi_transformer.so ");
    cr_assert_str_eq(s.libraries[EP_ACL_LIBRARY_TRANSFORMER], "libopapi_transformer.so");
    cr_assert_not_null(s.aclnnGroupedMatmulV5);
    cr_assert_not_null(s.aclInit);
}

Test(acl_symbols, an_older_release_is_taken_wholly)
{
    fake f = {.libraries = OLD_SET};
    ep_acl_symbols s;
    ASSERT_OK(load(&f, &s, &error), error);
    cr_assert_str_eq(s.libraries[EP_ACL_LIBRARY_RUNTIME], "libascendcl.so");
    cr_assert_str_eq(s.libraries[EP_ACL_LIBRARY_NN], "libopapi.so");
    cr_assert_str_eq(s.libraries[EP_ACL_LIBRARY_TRANSFORMER], "libopapi.so");
}

Test(acl_symbols, operators_never_come_from_both_sets)
{
    fake half = {.libraries = " libacl_rt.so libnnopbase.so libopapi_nn.so libopapi.so "};
    ep_acl_symbols s;
    cr_assert_eq(load(&half, &s, &error), EP_ERR_UNAVAILABLE);
    cr_assert_null(strstr(half.asked, "libopapi.so"), "%s", half.asked);
    cr_assert_str_eq(error.text,
                     "libopapi_transformer.so cannot be opened: no file libopapi_transformer.so");

    fake other = {.libraries = " libacl_rt.so libnnopbase.so libopapi_transformer.so libopapi.so "};
    ASSERT_OK(load(&other, &s, &error), error);
    cr_assert_null(strstr(other.asked, "libopapi_transformer.so"), "%s", other.asked);
}

Test(acl_symbols, grouped_matmul_is_probed_newest_first)
{
    fake f = {.libraries = NEW_SET, .lacking = " aclnnGroupedMatmulV5 "};
    ep_acl_symbols s;
    ASSERT_OK(load(&f, &s, &error), error);
    cr_assert_null(s.aclnnGroupedMatmulV5);
    cr_assert_null(s.aclnnGroupedMatmulV5GetWorkspaceSize); /* half of a pair is none */
    cr_assert_not_null(s.aclnnGroupedMatmulV4);

    f = (fake){.libraries = NEW_SET,
               .lacking = " aclnnClippedSwiglu aclnnDynamicQuantGetWorkspaceSize "};
    ASSERT_OK(load(&f, &s, &error), error);
    cr_assert_null(s.aclnnClippedSwigluGetWorkspaceSize);
    cr_assert_null(s.aclnnDynamicQuant);
    cr_assert_not_null(s.aclnnGeGluV3);

    f = (fake){.libraries = NEW_SET,
               .lacking = " aclnnGroupedMatmulV5GetWorkspaceSize aclnnGroupedMatmulV4 "};
    cr_assert_eq(load(&f, &s, &error), EP_ERR_UNAVAILABLE);
    cr_assert_str_eq(
        error.text,
        "libopapi_transformer.so has neither aclnnGroupedMatmulV5 nor aclnnGroupedMatmulV4");
}

Test(acl_symbols, names_what_is_missing_and_writes_nothing)
{
    fake f = {.libraries = " "};
    ep_acl_symbols s = {.libraries = {"before"}};
    cr_assert_eq(load(&f, &s, &error), EP_ERR_UNAVAILABLE);
    cr_assert_str_eq(error.text, "neither libacl_rt.so nor libascendcl.so can be opened: "
                                 "libacl_rt.so cannot be opened: no file libacl_rt.so");
    f = (fake){.libraries = OLD_SET, .lacking = " aclrtMallocHost "};
    cr_assert_eq(load(&f, &s, &error), EP_ERR_UNAVAILABLE);
    cr_assert_str_eq(
        error.text,
        "libascendcl.so has no aclrtMallocHost: a release of CANN this build does not know");
    cr_assert_str_eq(s.libraries[0], "before");
    f = (fake){.libraries = OLD_SET, .lacking = " aclnnDynamicQuant aclGetRecentErrMsg "};
    ASSERT_OK(load(&f, &s, &error), error);
    cr_assert_null(s.aclGetRecentErrMsg);
}

Test(acl_symbols, a_caller_needs_the_runtime_alone_and_more_of_it)
{
    fake f = {.libraries = OLD_SET, .lacking = " aclrtCreateNotify "};
    const ep_acl_opener opener = {.open = fake_open, .symbol = fake_symbol, .arg = &f};
    ep_acl_symbols s;
    ASSERT_OK(load(&f, &s, &error), error); /* the backend does without */
    cr_assert_eq(ep_acl_symbols_load_runtime(&opener, &s, &error), EP_ERR_UNAVAILABLE);
    cr_assert_str_eq(
        error.text,
        "libascendcl.so has no aclrtCreateNotify: a release of CANN this build does not know");
    f = (fake){.libraries = " libacl_rt.so "};
    ASSERT_OK(ep_acl_symbols_load_runtime(&opener, &s, &error), error);
    cr_assert_str_eq(f.asked, "libacl_rt.so ");
    cr_assert_not_null(s.aclrtCreateNotify);
    cr_assert_null(s.aclnnGroupedMatmulV5);
    f = (fake){.libraries = " "};
    ASSERT_FAILS(ep_acl_symbols_load_runtime(&opener, &s, &error), EP_ERR_UNAVAILABLE, error,
                 "neither libacl_rt.so nor libascendcl.so can be opened");
}

Test(acl_symbols, the_runtime_that_the_process_has_is_taken)
{
    ep_acl_symbols s;
    cr_assert_not_null(dlopen(EP_TEST_CANN_OLDER "/lib64/libascendcl.so", RTLD_NOW | RTLD_LOCAL));
    setenv("ASCEND_HOME_PATH", EP_TEST_CANN, 1); /* of the newer release */
    ASSERT_OK(ep_acl_symbols_load_runtime(ep_acl_opener_caller(), &s, &error), error);
    cr_assert_str_eq(s.libraries[EP_ACL_LIBRARY_RUNTIME], "libascendcl.so");
    ASSERT_OK(ep_acl_symbols_load_runtime(ep_acl_opener_system(), &s, &error), error);
    cr_assert_str_eq(s.libraries[EP_ACL_LIBRARY_RUNTIME], "libacl_rt.so");
}

Test(acl_symbols, the_system_opener_says_what_the_loader_said)
{
    char text[EP_ERROR_TEXT_BYTES] = "";
    setenv("ASCEND_HOME_PATH", "/nonexistent", 1);
    cr_assert_null(ep_acl_opener_system()->open(NULL, "libacl_rt.so", text));
    cr_assert_not_null(strstr(text, "/nonexistent/lib64/libacl_rt.so"), "%s", text);
    void *libc = ep_acl_opener_system()->open(NULL, "libc.so.6", text);
    cr_assert_not_null(libc);
    cr_assert_not_null(ep_acl_opener_system()->symbol(NULL, libc, "malloc"));
    cr_assert_null(ep_acl_opener_system()->symbol(NULL, libc, "aclInit"));
}

Test(acl_symbols, each_code_has_one_meaning)
{
    cr_assert_eq(ep_acl_code_err(0), EP_OK);
    cr_assert_eq(ep_acl_code_err(507010), EP_ERR_DEVICE_LOST);
    cr_assert_eq(ep_acl_code_err(507999), EP_ERR_DEVICE_LOST);
    cr_assert_eq(ep_acl_code_err(508000), EP_ERR_INTERNAL);
    cr_assert_eq(ep_acl_code_err(207001), EP_ERR_NO_MEMORY);
    cr_assert_eq(ep_acl_code_err(207004), EP_ERR_UNAVAILABLE);
    cr_assert_str_eq(ep_acl_code_name(107002), "ACL_ERROR_RT_CONTEXT_NULL");
    cr_assert_str_eq(ep_acl_code_text(-3), "no text for this code");
    const ep_acl_code all[] = {
#define CODE(name, code, err, text) code,
        EP_ACL_CODE_MAP(CODE) EP_ACL_OPERATOR_CODE_MAP(CODE)};
    for (size_t i = 0; i < EP_ARRAY_COUNT(all); i++) {
        for (size_t j = 0; j < i; j++) {
            cr_assert_neq(all[i], all[j], "%d is there twice", all[i]);
        }
        cr_assert_neq(ep_acl_code_err(all[i]), EP_OK);
    }
}

#define NAME(name, result, parameters, need, release) #name,

Test(acl_symbols, the_readme_says_what_happens_without_each)
{
    static const char *const symbols[] = {EP_ACL_RUNTIME_SYMBOLS(NAME) EP_ACL_META_SYMBOLS(
        NAME) EP_ACL_NN_SYMBOLS(NAME) EP_ACL_TRANSFORMER_SYMBOLS(NAME)};
    bool found[EP_ARRAY_COUNT(symbols)] = {false};
    char line[2048];
    FILE *file = fopen(EP_SOURCE_DIR "/lib/backends/ascend/README.md", "r");
    cr_assert_not_null(file);
    while (fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, "| `acl", 6) != 0) {
            continue;
        }
        char *rest = line;
        char *cell = strtok_r(line, "|", &rest);
        const char *otherwise = strtok_r(NULL, "|", &rest);
        cr_expect(otherwise != NULL && strlen(otherwise) > 2,
                  "README.md does not say what happens without%s", cell);
        for (char *name = strtok_r(cell, " `", &rest); name != NULL;
             name = strtok_r(NULL, " `", &rest)) {
            size_t i = 0;
            while (i < EP_ARRAY_COUNT(symbols) && strcmp(symbols[i], name) != 0) {
                i++;
            }
            cr_assert_lt(i, EP_ARRAY_COUNT(symbols), "README.md has %s, which is not asked for",
                         name);
            found[i] = true;
        }
    }
    cr_assert_eq(fclose(file), 0);
    for (size_t i = 0; i < EP_ARRAY_COUNT(symbols); i++) {
        cr_expect(found[i], "README.md has no %s", symbols[i]);
    }
}
