/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <string.h>

#include "base/words.h"

Test(words, only_whole_words_are_found)
{
    uint32_t place = 7;
    cr_expect(ep_words_find("auto|decode|prefill", "auto", &place) && place == 0);
    cr_expect(ep_words_find("auto|decode|prefill", "prefill", &place) && place == 2);
    cr_expect(ep_words_find("one", "one", &place) && place == 0);
    place = 7;
    const char *const others[] = {"", "aut", "autod", "auto|decode", "prefil", "prefills", "AUTO"};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        cr_expect_not(ep_words_find("auto|decode|prefill", others[i], &place), "%s", others[i]);
    }
    cr_expect_eq(place, 7, "nothing is written without a word");
}

Test(words, are_listed_and_cut_to_what_fits)
{
    char out[16];
    ep_words_list("table|json", out, sizeof(out));
    cr_expect_str_eq(out, "table, json");
    ep_words_list("table|json|a-long-one", out, sizeof(out));
    cr_expect(strlen(out) < sizeof(out) && strncmp(out, "table, json", 11) == 0);
}
