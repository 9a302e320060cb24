/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes and times: exact, of one kind, and nothing else. */
#include "base/quantity.h"

#include <criterion/criterion.h>
#include <string.h>

typedef struct row {
    const char *text;
    ep_unit plain;
    ep_unit unit;
    uint64_t number;
    const char *wrong; /* NULL: number is right */
} row;

#define SIZE EP_UNIT_BYTES, EP_UNIT_BYTES
#define MS EP_UNIT_MS, EP_UNIT_MS
#define US EP_UNIT_US, EP_UNIT_US
#define FLAG EP_UNIT_S, EP_UNIT_US
#define NONE EP_UNIT_NONE, EP_UNIT_NONE

static const row rows[] = {
    {"0", SIZE, 0, NULL},
    {"64424509440", SIZE, 64424509440u, NULL},
    {"60G", SIZE, 64424509440u, NULL},
    {"60GiB", SIZE, 64424509440u, NULL},
    {"512M", SIZE, 536870912u, NULL},
    {"7B", SIZE, 7, NULL},
    {"1.5K", SIZE, 1536, NULL},
    {"0.5G", SIZE, 536870912u, NULL},
    {"1.50000000000000000000000000000G", SIZE, 1610612736u, NULL},
    {"2.0", SIZE, 2, NULL},
    {"00012K", SIZE, 12288, NULL},
    {"0.0009765625K", SIZE, 1, NULL},
    {"16777215.999023437500T", SIZE, 18446744072635809792u, NULL},
    {"18446744073709551615", SIZE, UINT64_MAX, NULL},
    {"16777215T", SIZE, 18446742974197923840u, NULL},
    {"16777216T", SIZE, 0, "is out of range"},
    {"18446744073709551616", SIZE, 0, "is out of range"},
    {"99999999999999999999999999999999999999999999T", SIZE, 0, "is out of range"},
    {"18446744073709551615T", SIZE, 0, "is out of range"},
    {"1.5", SIZE, 0, "is not a whole number of bytes"},
    {"0.3K", SIZE, 0, "is not a whole number of bytes"},
    {"0.00000000000000000000000000000000000001T", SIZE, 0, "is not a whole number of bytes"},
    {"18446744073709551615.5K", SIZE, 0, "is not a whole number of bytes"},
    {"250ms", SIZE, 0, "is a time, not a size"},
    {"2m", SIZE, 0, "is a time, not a size"},
    {"1h", SIZE, 0, "is a time, not a size"},
    {"3x", SIZE, 0, "is not a size"},
    {"3MB", SIZE, 0, "is not a size"},
    {"3g", SIZE, 0, "is not a size"},
    {"3 G", SIZE, 0, "is not a size"},
    {"3G ", SIZE, 0, "is not a size"},
    {" 3G", SIZE, 0, "is not a size"},
    {"3BiB", SIZE, 0, "is not a size"},
    {"3iB", SIZE, 0, "is not a size"},
    {"3Gi", SIZE, 0, "is not a size"},
    {"3GG", SIZE, 0, "is not a size"},
    {"G", SIZE, 0, "is not a size"},
    {"", SIZE, 0, "is not a size"},
    {".5G", SIZE, 0, "is not a size"},
    {"5.G", SIZE, 0, "is not a size"},
    {"1.2.3G", SIZE, 0, "is not a size"},
    {"1,5G", SIZE, 0, "is not a size"},
    {"-1", SIZE, 0, "is not a size"},
    {"+1", SIZE, 0, "is not a size"},
    {"1e3", SIZE, 0, "is not a size"},
    {"0x10", SIZE, 0, "is not a size"},
    {"inf", SIZE, 0, "is not a size"},
    {"\xd9\xa3G", SIZE, 0, "is not a size"},
    {"10s", MS, 10000, NULL},
    {"250ms", MS, 250, NULL},
    {"2m", MS, 120000, NULL},
    {"24h", MS, 86400000, NULL},
    {"5000", MS, 5000, NULL},
    {"2000us", MS, 2, NULL},
    {"0.25s", MS, 250, NULL},
    {"1.5ms", MS, 0, "is not a whole number of ms"},
    {"1500us", MS, 0, "is not a whole number of ms"},
    {"1.5ms", US, 1500, NULL},
    {"0.1us", US, 0, "is not a whole number of us"},
    {"3M", MS, 0, "is a size, not a time"},
    {"3KiB", MS, 0, "is a size, not a time"},
    {"3B", MS, 0, "is a size, not a time"},
    {"3siB", MS, 0, "is not a time"},
    {"3miB", MS, 0, "is not a time"},
    {"3miB", SIZE, 0, "is not a size"},
    {"3min", MS, 0, "is not a time"},
    {"3S", MS, 0, "is not a time"},
    {"soon", MS, 0, "is not a time"},
    {"-20", MS, 0, "is not a time"},
    {"5124095576030432h", US, 0, "is out of range"},
    {"5", FLAG, 5000000, NULL},
    {"0.1", FLAG, 100000, NULL},
    {"0.0000001", FLAG, 0, "is not a whole number of us"},
    {"64", EP_UNIT_KIB, EP_UNIT_KIB, 64, NULL},
    {"1M", EP_UNIT_KIB, EP_UNIT_KIB, 1024, NULL},
    {"1000B", EP_UNIT_KIB, EP_UNIT_KIB, 0, "is not a whole number of KiB"},
    {"12", NONE, 12, NULL},
    {"12K", NONE, 0, "is not a whole number"},
    {"12s", NONE, 0, "is not a whole number"},
    {"12.0", NONE, 0, "is not a whole number"},
    {"", NONE, 0, "is not a whole number"},
};

Test(quantity, is_read_exactly_or_refused)
{
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        uint64_t number = 77;
        const char *wrong = ep_quantity_parse(rows[i].text, rows[i].plain, rows[i].unit, &number);
        cr_expect((wrong == NULL) == (rows[i].wrong == NULL) &&
                      (wrong == NULL || strcmp(wrong, rows[i].wrong) == 0),
                  "'%s': %s", rows[i].text, wrong != NULL ? wrong : "taken");
        cr_expect_eq(number, rows[i].wrong == NULL ? rows[i].number : 77, "'%s': %lu", rows[i].text,
                     (unsigned long)number);
    }
}

Test(quantity, is_written_so_that_it_reads_the_same_again)
{
    static const struct {
        uint64_t number;
        ep_unit unit;
        const char *text;
    } written[] = {
        {0, EP_UNIT_BYTES, "0"},
        {0, EP_UNIT_MS, "0"},
        {1000, EP_UNIT_BYTES, "1000"},
        {1024, EP_UNIT_BYTES, "1K"},
        {1536, EP_UNIT_BYTES, "1536"},
        {64424509440u, EP_UNIT_BYTES, "60G"},
        {1ull << 50, EP_UNIT_BYTES, "1024T"},
        {UINT64_MAX, EP_UNIT_BYTES, "18446744073709551615"},
        {10000, EP_UNIT_MS, "10s"},
        {90000, EP_UNIT_MS, "90s"},
        {120000, EP_UNIT_MS, "2m"},
        {86400000, EP_UNIT_MS, "24h"},
        {250, EP_UNIT_MS, "250ms"},
        {200, EP_UNIT_US, "200us"},
        {20000, EP_UNIT_US, "20ms"},
        {2048, EP_UNIT_KIB, "2M"},
        {UINT64_MAX, EP_UNIT_MS, "18446744073709551615ms"},
        {5, EP_UNIT_NONE, "5"},
    };
    for (size_t i = 0; i < sizeof(written) / sizeof(written[0]); i++) {
        char text[EP_QUANTITY_BYTES];
        uint64_t again = 77;
        cr_expect_str_eq(ep_quantity_format(written[i].number, written[i].unit, text),
                         written[i].text);
        cr_expect_null(ep_quantity_parse(text, written[i].unit, written[i].unit, &again), "%s",
                       text);
        cr_expect_eq(again, written[i].number, "%s", text);
    }
}
