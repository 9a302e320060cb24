/* SPDX-License-Identifier: Apache-2.0 */
/* JSON of messages: every field type there and back over the wire, ranges, wrong keys and values
 * with their words. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "every_type.pb-c.h"
#include "message_json.h"

static json_t *json_of(const char *text)
{
    json_error_t why;
    json_t *json = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    cr_assert_not_null(json, "%s: %s", text, why.text);
    return json;
}

static ep_err parse(const char *text, ProtobufCMessage **out_message, ep_error *out_error)
{
    json_t *json = json_of(text);
    ep_err err =
        ep_cli_message_from_json(&test__every_type__descriptor, json, out_message, out_error);
    json_decref(json);
    return err;
}

static Test__EveryType *must_parse(const char *text)
{
    ProtobufCMessage *message = NULL;
    ep_error error;
    cr_assert_eq(parse(text, &message, &error), EP_OK, "%s: %s", text, error.text);
    return (Test__EveryType *)message;
}

static void drop(Test__EveryType *message)
{
    protobuf_c_message_free_unpacked(&message->base, NULL);
}

static const char full[] =
    "{\"an_int32\":-2147483648,\"a_sint32\":-2,\"a_sfixed32\":2147483647,"
    "\"an_int64\":\"-9223372036854775808\",\"a_sint64\":-5,\"a_sfixed64\":9223372036854775807,"
    "\"a_uint32\":4294967295,\"a_fixed32\":8,\"a_uint64\":\"18446744073709551615\","
    "\"a_fixed64\":10,\"a_float\":0.5,\"a_double\":1e300,\"a_bool\":true,"
    "\"a_string\":\"gr\\u00fc\\u00df\",\"an_inner\":{\"name\":\"in\",\"numbers\":[1,2,3]},"
    "\"int32s\":[-1,0,1],\"uint64s\":[0,\"18446744073709551615\",7],\"doubles\":[0.25,-3],"
    "\"floats\":[1.5,\"NaN\",\"-Infinity\"],\"bools\":[true,false,true],\"strings\":[\"\",\"b\"],"
    "\"inners\":[{\"name\":\"x\"},{},{\"numbers\":[9]}],\"fixed32s\":[4294967295]}";

Test(message_json, every_type_survives_the_wire)
{
    Test__EveryType *m = must_parse(full);
    cr_assert_eq(m->an_int32, INT32_MIN);
    cr_assert_eq(m->a_sint32, -2);
    cr_assert_eq(m->a_sfixed32, INT32_MAX);
    cr_assert_eq(m->an_int64, INT64_MIN);
    cr_assert_eq(m->a_sint64, -5);
    cr_assert_eq(m->a_sfixed64, INT64_MAX);
    cr_assert_eq(m->a_uint32, UINT32_MAX);
    cr_assert_eq(m->a_fixed32, 8u);
    cr_assert_eq(m->a_uint64, UINT64_MAX);
    cr_assert_eq(m->a_fixed64, 10u);
    cr_assert(m->a_float == 0.5f && m->a_double == 1e300 && m->a_bool);
    cr_assert_str_eq(m->a_string, "gr\xc3\xbc\xc3\x9f");
    cr_assert(m->an_inner != NULL && m->an_inner->n_numbers == 3 && m->an_inner->numbers[2] == 3);
    cr_assert(m->n_floats == 3 && isnan(m->floats[1]) && m->floats[2] == -INFINITY);
    cr_assert(m->n_inners == 3 && m->inners[2]->n_numbers == 1 && m->inners[1]->name[0] == '\0');

    uint8_t *wire = malloc(protobuf_c_message_get_packed_size(&m->base));
    size_t bytes = protobuf_c_message_pack(&m->base, wire);
    ProtobufCMessage *back =
        protobuf_c_message_unpack(&test__every_type__descriptor, NULL, bytes, wire);
    cr_assert_not_null(back);
    json_t *first = ep_cli_message_to_json(&m->base);
    json_t *second = ep_cli_message_to_json(back);
    cr_assert(json_equal(first, second));
    json_t *wanted = json_of(full);
    const char *key;
    json_t *value;
    json_object_foreach(wanted, key, value)
    {
        json_t *got = json_object_get(second, key);
        char *got_text = json_dumps(got, JSON_ENCODE_ANY | JSON_COMPACT);
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        if (strcmp(key, "an_int64") == 0) {
            cr_expect_str_eq(got_text, "-9223372036854775808");
        } else if (strcmp(key, "doubles") == 0) {
            cr_expect_str_eq(got_text, "[0.25,-3.0]");
        } else if (strcmp(key, "inners") == 0) {
            cr_expect_str_eq(got_text, "[{\"name\":\"x\",\"numbers\":[]},{\"name\":\"\","
                                       "\"numbers\":[]},{\"name\":\"\",\"numbers\":[9]}]");
        } else {
            cr_expect_str_eq(got_text, text, "%s: %s, not %s", key, got_text, text);
        }
        free(got_text);
        free(text);
    }
    json_decref(wanted);
    json_decref(first);
    json_decref(second);
    protobuf_c_message_free_unpacked(back, NULL);
    free(wire);
    drop(m);
}

Test(message_json, defaults_are_shown_and_absent_messages_are_not)
{
    Test__EveryType *m = must_parse("{\"strings\":[]}");
    json_t *json = ep_cli_message_to_json(&m->base);
    cr_assert_eq(json_integer_value(json_object_get(json, "an_int32")), 0);
    cr_assert_not_null(json_object_get(json, "an_int32"));
    cr_assert_str_eq(json_string_value(json_object_get(json, "a_string")), "");
    cr_assert_eq(json_array_size(json_object_get(json, "strings")), 0u);
    cr_assert_null(json_object_get(json, "an_inner"));
    json_decref(json);
    drop(m);
}

typedef struct wrong_case {
    const char *json;
    const char *words;
} wrong_case;

Test(message_json, wrong_values_are_named)
{
    static const wrong_case cases[] = {
        {"[]", "the JSON is no object {...}"},
        {"{\"an_int\":1}",
         "there is no key an_int in test.EveryType, known: an_int32, a_sint32, a_sfixed32"},
        {"{\"an_inner\":{\"nome\":1}}",
         "there is no key an_inner.nome in test.Inner, known: name, numbers"},
        {"{\"inners\":[{},{\"x\":1}]}", "there is no key inners[1].x in test.Inner"},
        {"{\"an_int32\":2147483648}",
         "key an_int32 is 2147483648, allowed: a whole number -2147483648..2147483647"},
        {"{\"an_int32\":-2147483649}", "key an_int32 is -2147483649"},
        {"{\"an_int32\":1.0}", "key an_int32 is 1.0"},
        {"{\"an_int32\":\" 1\"}", "key an_int32 is \" 1\""},
        {"{\"an_int32\":\"1x\"}", "key an_int32 is \"1x\""},
        {"{\"an_int32\":\"+1\"}", "key an_int32 is \"+1\""},
        {"{\"an_int32\":\"\"}", "key an_int32 is \"\""},
        {"{\"an_int32\":null}", "key an_int32 is null"},
        {"{\"an_int32\":true}", "key an_int32 is true"},
        {"{\"an_int64\":\"9223372036854775808\"}", "-9223372036854775808..9223372036854775807"},
        {"{\"a_uint32\":-1}", "key a_uint32 is -1, allowed: a whole number 0..4294967295"},
        {"{\"a_fixed32\":4294967296}", "key a_fixed32 is 4294967296"},
        {"{\"a_uint64\":-1}", "above 9223372036854775807 as text"},
        {"{\"a_uint64\":\"-1\"}", "key a_uint64 is \"-1\""},
        {"{\"a_uint64\":\"18446744073709551616\"}", "0..18446744073709551615"},
        {"{\"a_float\":1e39}", "key a_float is"},
        {"{\"a_float\":\"nan\"}", "\"NaN\", \"Infinity\", \"-Infinity\""},
        {"{\"a_double\":true}", "key a_double is true, allowed: a number"},
        {"{\"a_bool\":1}", "key a_bool is 1, allowed: true or false"},
        {"{\"a_string\":1}", "key a_string is 1, allowed: text"},
        {"{\"an_inner\":[]}", "key an_inner is [], allowed: an object {...}"},
        {"{\"int32s\":1}", "key int32s is 1, allowed: a list"},
        {"{\"int32s\":[1,2,\"x\"]}", "key int32s[2] is \"x\""},
        {"{\"strings\":[\"a\",\"b\",3]}", "key strings[2] is 3, allowed: text"},
        {"{\"an_inner\":{\"name\":\"left behind\",\"numbers\":[1,-1]}}",
         "key an_inner.numbers[1] is -1"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ProtobufCMessage *message = NULL;
        ep_error error;
        cr_expect_eq(parse(cases[i].json, &message, &error), EP_ERR_INVALID_ARGUMENT, "%s",
                     cases[i].json);
        cr_expect(strstr(error.text, cases[i].words) != NULL, "%s: '%s' lacks '%s'", cases[i].json,
                  error.text, cases[i].words);
        cr_expect_null(message);
    }
}

Test(message_json, types_without_a_form_are_refused)
{
    static const char *const cases[] = {"{\"a_colour\":1}", "{\"some_bytes\":\"AA==\"}",
                                        "{\"left\":1}"};
    for (size_t i = 0; i < 3; i++) {
        ProtobufCMessage *message = NULL;
        ep_error error;
        cr_expect_eq(parse(cases[i], &message, &error), EP_ERR_UNIMPLEMENTED, "%s", cases[i]);
        cr_expect(strstr(error.text, "no JSON form here") != NULL, "%s", error.text);
    }
    Test__EveryType m = TEST__EVERY_TYPE__INIT;
    json_t *json = ep_cli_message_to_json(&m.base); /* reading such a message still works */
    cr_assert_str_eq(json_string_value(json_object_get(json, "some_bytes")), "(no JSON form)");
    json_decref(json);
}
