/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/ascend/acl_symbols.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

typedef struct symbol_row {
    const char *name;
    ep_acl_library library;
    enum { OPTIONAL, CALLER, REQUIRED } need;
    size_t offset; /* offset in ep_acl_symbols */
} symbol_row;

#define ROW_OF(library_name, symbol, need)                                                         \
    {#symbol, EP_ACL_LIBRARY_##library_name, need, offsetof(ep_acl_symbols, symbol)},
#define RUNTIME_ROW(name, result, parameters, need, release) ROW_OF(RUNTIME, name, need)
#define META_ROW(name, result, parameters, need, release) ROW_OF(META, name, need)
#define NN_ROW(name, result, parameters, need, release) ROW_OF(NN, name, need)
#define TRANSFORMER_ROW(name, result, parameters, need, release) ROW_OF(TRANSFORMER, name, need)

static const symbol_row rows[] = {EP_ACL_RUNTIME_SYMBOLS(RUNTIME_ROW) EP_ACL_META_SYMBOLS(
    META_ROW) EP_ACL_NN_SYMBOLS(NN_ROW) EP_ACL_TRANSFORMER_SYMBOLS(TRANSFORMER_ROW)};

static const struct {
    const char *library;
    const char *older;
} names[EP_ACL_LIBRARIES] = {
#define NAMES_ROW(name, library, older) [EP_ACL_LIBRARY_##name] = {library, older},
    EP_ACL_LIBRARY_MAP(NAMES_ROW)
#undef NAMES_ROW
};

static bool is_operators(ep_acl_library library)
{
    return library == EP_ACL_LIBRARY_NN || library == EP_ACL_LIBRARY_TRANSFORMER;
}

typedef struct opened {
    void *handles[EP_ACL_LIBRARIES];
    const char *libraries[EP_ACL_LIBRARIES];
} opened;

static ep_err open_library(const ep_acl_opener *opener, ep_acl_library which, bool older, opened *o,
                           ep_error *out_error)
{
    char text[EP_ERROR_TEXT_BYTES] = "";
    const char *library = older ? names[which].older : names[which].library;
    o->handles[which] = opener->open(opener->arg, library, text);
    if (o->handles[which] == NULL) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "%s cannot be opened: %s", library,
                            text);
    }
    o->libraries[which] = library;
    return EP_OK;
}

/* The per-domain libraries and libopapi.so are never both opened: if the first per-domain library
 * exists, all of them must. */
static ep_err open_libraries(const ep_acl_opener *opener, int count, opened *o, ep_error *out_error)
{
    bool older_operators = false;
    for (int i = 0; i < count; i++) {
        const ep_acl_library which = (ep_acl_library)i;
        const bool may_fall_back = which == EP_ACL_LIBRARY_RUNTIME || which == EP_ACL_LIBRARY_NN;
        ep_err err =
            open_library(opener, which, older_operators && is_operators(which), o, out_error);
        if (err != EP_OK && may_fall_back) {
            char first[EP_ERROR_TEXT_BYTES];
            snprintf(first, sizeof(first), "%s", out_error->text);
            older_operators = which == EP_ACL_LIBRARY_NN;
            err = open_library(opener, which, true, o, out_error);
            if (err != EP_OK) {
                err = ep_error_set(out_error, err, "neither %s nor %s can be opened: %.300s",
                                   names[which].library, names[which].older, first);
            }
        }
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

static bool is_there(const ep_acl_symbols *symbols, size_t row)
{
    void *symbol;
    memcpy(&symbol, (const uint8_t *)symbols + rows[row].offset, sizeof(symbol));
    return symbol != NULL;
}

/* Drops operators of which only one phase exists. */
static void drop_halves(ep_acl_symbols *symbols)
{
    void *const none = NULL;
    for (size_t i = 0; i + 1 < EP_ARRAY_COUNT(rows); i++) {
        const char *phase = strstr(rows[i].name, "GetWorkspaceSize");
        if (phase != NULL && is_there(symbols, i) != is_there(symbols, i + 1)) {
            EP_ASSERT(strncmp(rows[i].name, rows[i + 1].name, (size_t)(phase - rows[i].name)) == 0);
            memcpy((uint8_t *)symbols + rows[i].offset, &none, sizeof(none));
            memcpy((uint8_t *)symbols + rows[i + 1].offset, &none, sizeof(none));
        }
    }
}

/* Finds the symbols of the open libraries. A missing one whose need is above `least` is an
 * error. */
static ep_err find_symbols(const ep_acl_opener *opener, const opened *o, int least,
                           ep_acl_symbols *symbols, ep_error *out_error)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(rows); i++) {
        void *handle = o->handles[rows[i].library];
        void *symbol = handle != NULL ? opener->symbol(opener->arg, handle, rows[i].name) : NULL;
        if (handle != NULL && symbol == NULL && (int)rows[i].need > least) {
            return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                                "%s has no %s: a release of CANN this build does not know",
                                o->libraries[rows[i].library], rows[i].name);
        }
        memcpy((uint8_t *)symbols + rows[i].offset, &symbol, sizeof(symbol));
    }
    memcpy(symbols->libraries, o->libraries, sizeof(o->libraries));
    return EP_OK;
}

/* Opens the first `count` libraries; *out_symbols changes only on success. */
static ep_err load(const ep_acl_opener *opener, int count, int least, ep_acl_symbols *out_symbols,
                   ep_error *out_error)
{
    opened o = {.handles = {NULL}};
    ep_acl_symbols symbols;
    ep_error error;
    ep_err err = open_libraries(opener, count, &o, &error);
    err = err == EP_OK ? find_symbols(opener, &o, least, &symbols, &error) : err;
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "%s", error.text);
    }
    *out_symbols = symbols;
    return EP_OK;
}

ep_err ep_acl_symbols_load(const ep_acl_opener *opener, ep_acl_symbols *out_symbols,
                           ep_error *out_error)
{
    ep_acl_symbols symbols;
    const ep_err err = load(opener, EP_ACL_LIBRARIES, CALLER, &symbols, out_error);
    if (err != EP_OK) {
        return err;
    }
    drop_halves(&symbols);
    if (symbols.aclnnGroupedMatmulV5 == NULL && symbols.aclnnGroupedMatmulV4 == NULL) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            "%s has neither aclnnGroupedMatmulV5 nor aclnnGroupedMatmulV4",
                            symbols.libraries[EP_ACL_LIBRARY_TRANSFORMER]);
    }
    *out_symbols = symbols;
    return EP_OK;
}

ep_err ep_acl_symbols_load_runtime(const ep_acl_opener *opener, ep_acl_symbols *out_symbols,
                                   ep_error *out_error)
{
    return load(opener, EP_ACL_LIBRARY_RUNTIME + 1, OPTIONAL, out_symbols, out_error);
}

static void *system_open(void *arg, const char *library, char text[EP_ERROR_TEXT_BYTES])
{
    (void)arg;
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    const char *home = getenv("ASCEND_HOME_PATH");
    /* dlerror of the first try: if the library exists, it names what that library lacks */
    if (handle == NULL) {
        const char *why = dlerror();
        snprintf(text, EP_ERROR_TEXT_BYTES, "%s", why == NULL ? "" : why);
    }
    if (handle == NULL && home != NULL && home[0] == '/') {
        char path[4096];
        const int length = snprintf(path, sizeof(path), "%s/lib64/%s", home, library);
        handle = length < (int)sizeof(path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        const char *why = handle == NULL ? dlerror() : NULL;
        if (why != NULL) {
            snprintf(text, EP_ERROR_TEXT_BYTES, "%s", why);
        }
    }
    return handle;
}

static void *caller_open(void *arg, const char *library, char text[EP_ERROR_TEXT_BYTES])
{
    const char *older = names[EP_ACL_LIBRARY_RUNTIME].older;
    const bool is_newer = strcmp(library, names[EP_ACL_LIBRARY_RUNTIME].library) == 0;
    void *loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    void *other = loaded == NULL && is_newer ? dlopen(older, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (other != NULL) {
        dlclose(other); /* the caller asks for this one next */
        snprintf(text, EP_ERROR_TEXT_BYTES, "this process has %s", older);
        return NULL;
    }
    return loaded != NULL ? loaded : system_open(arg, library, text);
}

static void *system_symbol(void *arg, void *handle, const char *name)
{
    (void)arg;
    return dlsym(handle, name);
}

const ep_acl_opener *ep_acl_opener_system(void)
{
    static const ep_acl_opener opener = {.open = system_open, .symbol = system_symbol};
    return &opener;
}

const ep_acl_opener *ep_acl_opener_caller(void)
{
    static const ep_acl_opener opener = {.open = caller_open, .symbol = system_symbol};
    return &opener;
}

typedef struct code_row {
    ep_acl_code code;
    ep_err err;
    const char *name;
    const char *text;
} code_row;

static const code_row codes[] = {
#define CODE_ROW(name, code, err, text) {code, EP_ERR_##err, #name, text},
    {EP_ACL_SUCCESS, EP_OK, "ACL_SUCCESS", "success"},
    EP_ACL_CODE_MAP(CODE_ROW) EP_ACL_OPERATOR_CODE_MAP(CODE_ROW)
#undef CODE_ROW
};

static const code_row *find_code(ep_acl_code code)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(codes); i++) {
        if (codes[i].code == code) {
            return &codes[i];
        }
    }
    return NULL;
}

ep_err ep_acl_code_err(ep_acl_code code)
{
    const code_row *row = find_code(code);
    if (row != NULL) {
        return row->err;
    }
    return code >= 507000 && code <= 507999 ? EP_ERR_DEVICE_LOST : EP_ERR_INTERNAL;
}

const char *ep_acl_code_name(ep_acl_code code)
{
    const code_row *row = find_code(code);
    return row != NULL ? row->name : "unknown code";
}

const char *ep_acl_code_text(ep_acl_code code)
{
    const code_row *row = find_code(code);
    return row != NULL ? row->text : "no text for this code";
}

ep_err ep_acl_error_set(ep_error *out_error, const ep_acl_symbols *acl, int32_t device,
                        ep_acl_code code, const char *call)
{
    const char *words = acl->aclGetRecentErrMsg != NULL ? acl->aclGetRecentErrMsg() : NULL;
    return ep_error_set(out_error, ep_acl_code_err(code), "device %d: %s: %s (%s, code %d) %.256s",
                        device, call, ep_acl_code_text(code), ep_acl_code_name(code), code,
                        words != NULL ? words : "");
}
