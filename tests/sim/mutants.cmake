# SPDX-License-Identifier: Apache-2.0
# Bugs planted into copies of product files: the simulation must find each of them within SEEDS seeds. A copy is linked in front of
# the library, so that the file itself is not taken from there.
function(ep_add_sim_mutant NAME)
    cmake_parse_arguments(A "" "FILE;SEEDS" "REPLACE" ${ARGN})
    set(source ${PROJECT_SOURCE_DIR}/${A_FILE})
    ep_plant_mutant(${NAME} ${source} mutant "${A_REPLACE}")
    ep_add_plain_test(NAME sim.mutant.${NAME} SOURCES ${mutant} LIBS ep_sim_world ARGS find 1 ${A_SEEDS} LABELS turns TIMEOUT 300)
    get_filename_component(folder ${source} DIRECTORY)
    target_include_directories(sim_mutant_${NAME} PRIVATE ${folder})
    target_compile_options(sim_mutant_${NAME} PRIVATE -Wno-error)
endfunction()

# An older table replaces a newer one.
ep_add_sim_mutant(skip_epoch_check FILE client/cluster/cluster.c SEEDS 500
    REPLACE "ep_epoch_compare(taken_table->epoch, old->table->epoch) <= 0" "ep_epoch_compare(taken_table->epoch, old->table->epoch) == 0")
# A window is combined while a parcel is still under way.
ep_add_sim_mutant(combine_early FILE client/call/call_state.c SEEDS 50
    REPLACE "if (each->open_count > 0 ||" "if (each->open_count > 1 ||")
# A token is combined before its last row is there.
ep_add_sim_mutant(combine_token_early FILE client/call/call_finish.c SEEDS 50
    REPLACE "ready += --*left == 0" "ready += --*left <= 1" "if (call->rows_left[token] == 0) {" "if (call->rows_left[token] <= 1) {"
            "*left > 0 &&" "*left + 1 > 0 ||")
# A range of tokens begins again with the last one of the range before.
ep_add_sim_mutant(tell_token_twice FILE client/call/call_finish.c SEEDS 50
    REPLACE "result->tokens_delivered = end" "result->tokens_delivered = end - (end > first + 1 && end < call->spec.batch.tokens)")
# A token is told of that waits for one row more.
ep_add_sim_mutant(tell_token_early FILE client/call/call_finish.c SEEDS 50
    REPLACE "(call->rows_left[end] == 0 ||" "(call->rows_left[end] <= 1 ||")
# The rows of a window are given back with the other one's.
ep_add_sim_mutant(release_both_windows FILE client/call/call_finish.c SEEDS 200
    REPLACE "            parcel->window == window) {" "            parcel->window < EP_CALL_WINDOWS) {")
# Answers are not matched to calls: one that came twice or late is taken for that of whichever call is at hand.
ep_add_sim_mutant(accept_any_answer FILE lib/rpc/rpc_client_call.c SEEDS 500
    REPLACE "while (call != NULL && call->id != id) {" "while (call != NULL && id == 0) {"
            "id & (channel->buckets_count - 1)" "id & 0 & (channel->buckets_count - 1)")
# The first window is sent in place of every other one.
ep_add_sim_mutant(window_twice FILE client/call/call_send.c SEEDS 50
    REPLACE "call->tokens_sent = window->end" "call->tokens_sent = call->flow.windows_count > 1 ? 0 : window->end")
# A call lives on when its time is over.
ep_add_sim_mutant(forget_deadline FILE client/call/call_state.c SEEDS 50
    REPLACE "if (now_ns >= state->deadline_ns) {" "if (now_ns >= state->deadline_ns + 5000000000ull) {")
# Slots are sent again by the table the call began with, whatever became of its nodes.
ep_add_sim_mutant(route_to_removed_node FILE client/call/call_send.c SEEDS 500
    REPLACE "if (view == call->at.view || view == NULL) {" "if (call->at.view != NULL) {")
# A copy that failed is tried again at once, without end.
ep_add_sim_mutant(forget_attempts FILE client/call/call_state.c SEEDS 1000
    REPLACE "state->tried[i] = 1" "state->tried[i] = 0")
# What a connection lost is not sent to another copy.
ep_add_sim_mutant(no_other_copy FILE client/call/call_state.c SEEDS 200
    REPLACE "if (is_final(error->code)) {" "if (error->code != EP_OK) {")
# Damaged frames are believed.
ep_add_sim_mutant(skip_checksum FILE lib/rpc/rpc_frame_io.c SEEDS 200
    REPLACE "if (crc != frame->payload_crc) {" "if (crc + 1 == 0) {")
# A hedged frame that lost is given up before its answer, so that its place is another's when that comes.
ep_add_sim_mutant(forget_loser FILE client/call/call_state.c SEEDS 500
    REPLACE "if (p->phase == EP_PARCEL_IN_FLIGHT) {
        set_phase(state, parcel, EP_PARCEL_ZOMBIE)" "if (p->phase == EP_PARCEL_FREE) {
        set_phase(state, parcel, EP_PARCEL_ZOMBIE)")
# The answer of a frame whose hedges were first counts once more.
ep_add_sim_mutant(hedge_counts_twice FILE client/call/call_state.c SEEDS 500
    REPLACE "if (p->phase != EP_PARCEL_IN_FLIGHT) {
        actions->late = true" "if (p->phase != EP_PARCEL_IN_FLIGHT && p->hedge == EP_HEDGE_NONE) {
        actions->late = true")
# The first of several hedges stands for all of them.
ep_add_sim_mutant(combine_half_hedged FILE client/call/call_state.c SEEDS 1000
    REPLACE "if (p->hedges_open > 0 || p->hedge != EP_HEDGE_WHOLE) {" "if (p->hedge != EP_HEDGE_WHOLE) {")
# Hedges are free.
ep_add_sim_mutant(hedge_beyond_budget FILE client/call/call_state.c SEEDS 500
    REPLACE "!ep_retry_budget_take_hedge(state->budget, frames)" "frames == 0")
# A silent node is waited for.
ep_add_sim_mutant(wait_for_silent FILE client/call/call_hedge.c SEEDS 1000
    REPLACE "if (late || silent) {" "if (late) {")
# A row that came with two frames counts for two rows of its token.
ep_add_sim_mutant(hedged_row_twice FILE client/call/call_finish.c SEEDS 1000
    REPLACE "if (!has_row(call, frame, i)) {" "if (!has_row(call, frame, i) && false) {")
