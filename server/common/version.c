/* SPDX-License-Identifier: Apache-2.0 */
/* Version texts; the build system defines EP_BUILD_*. */
#include "common/version.h"

#include <jansson.h>
#include <microhttpd.h>
#include <protobuf-c/protobuf-c.h>
#include <uv.h>
#include <yaml.h>

#include "wire/frame.h"

const char *ep_version_text(void)
{
    return EP_BUILD_VERSION;
}

const char *ep_version_build(void)
{
    return EP_BUILD_REVISION;
}

const char *ep_version_isa(void)
{
    return EP_BUILD_PROCESSOR;
}

const char *ep_version_software(void)
{
    return "expertd " EP_BUILD_VERSION " (" EP_BUILD_REVISION ")";
}

void ep_version_print(const char *program, bool json, FILE *out)
{
    if (!json) {
        fprintf(out, "%s %s (%s, %s, wire version %d)\n", program, ep_version_text(),
                ep_version_build(), ep_version_isa(), EP_FRAME_VERSION);
        return;
    }
    json_t *object = json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:{s:s, s:s, s:s, s:s, s:s, s:s}}", "program", program,
        "version", ep_version_text(), "revision", ep_version_build(), "processor", ep_version_isa(),
        "compiler", __VERSION__, "build_type", EP_BUILD_TYPE, "wire_version", EP_FRAME_VERSION,
        "libraries", "nng", EP_BUILD_NNG_VERSION, "libuv", uv_version_string(), "protobuf-c",
        protobuf_c_version(), "libmicrohttpd", MHD_get_version(), "libyaml",
        yaml_get_version_string(), "jansson", JANSSON_VERSION);
    if (object != NULL) {
        json_dumpf(object, out, JSON_INDENT(2));
        fputc('\n', out);
        json_decref(object);
    }
}
