# SPDX-License-Identifier: Apache-2.0
# Steps into the traps of the vendor's interface, planted into copies of product files; the scene over the emulated device must end
# otherwise and say TEXT. A copy is linked in front of the library, so that the file itself is not taken from there.
function(ep_add_ascend_mutant NAME)
    cmake_parse_arguments(A "OLDER" "FILE;TEXT" "REPLACE" ${ARGN})
    set(source ${PROJECT_SOURCE_DIR}/lib/backends/ascend/${A_FILE})
    ep_plant_mutant(${NAME} ${source} mutant "${A_REPLACE}")
    set(home ${EP_CANN_HOME})
    if(A_OLDER)
        set(home ${EP_CANN_OLDER_HOME})
    endif()
    ep_add_plain_test(NAME contract.backend.ascend_mutant.${NAME} SOURCES ascend_traps.c expert_fixture.c expert_bound.c ${mutant} LIBS ${libs}
        ARGS find ${home} 20 "${A_TEXT}" LABELS turns TIMEOUT 300)
    set(target contract_backend_ascend_mutant_${NAME})
    target_compile_definitions(${target} PRIVATE EP_CONTRACT_CANN="${EP_CANN_HOME}")
    target_compile_options(${target} PRIVATE -Wno-error -Wno-unused)
    add_dependencies(${target} ep_test_cann)
endfunction()

# T1: strides are in elements.
ep_add_ascend_mutant(strides_in_bytes FILE ascend_slot.c TEXT "strides and offset are in elements"
    REPLACE "strides[i] = stride" "strides[i] = 2 * stride")
# T2: addresses are aligned.
ep_add_ascend_mutant(unaligned FILE ascend_slot.c TEXT "not aligned to 32 bytes"
    REPLACE "l.gate_up + part(rows, 2 * l.inner, sizeof(uint16_t))" "l.gate_up + rows * 2 * l.inner * sizeof(uint16_t)")
# T3: an executor is for one launch.
ep_add_ascend_mutant(executor_twice FILE ascend_slot.c TEXT "for the second time"
    REPLACE "    step->executor = NULL$<SEMICOLON>\n    return" "    return")
# T4: a list's end is that of its tensors.
ep_add_ascend_mutant(member_twice FILE ascend_slot.c TEXT "none or has been destroyed"
    REPLACE "list == NULL && i < count" "i < count")
# T5: DynamicQuant and the fused operator give scales, and they are those of the inner rows.
ep_add_ascend_mutant(other_scales FILE ascend_slot.c TEXT "scene: rows"
    REPLACE "EP_ACL_FLOAT, rows, memory + l->quant_scales" "EP_ACL_FLOAT, rows, memory + l->x_scales")
# T6: a list of counts is not one of sums.
ep_add_ascend_mutant(counts_as_sums FILE ascend_slot.c TEXT "GroupedMatmul: group"
    REPLACE "EP_ACL_GROUP_LIST_COUNTS" "0")
# T7: counts are 64 bits wide.
ep_add_ascend_mutant(narrow_counts FILE ascend_slot.c TEXT "GroupedMatmul: group"
    REPLACE "const int64_t rows = job->rows_count" "const int32_t rows = (int32_t)job->rows_count")
# T8: does not apply: no status of a stream or event is asked for, the finisher waits, and acl_symbols.h has neither function.
# T9: each thread sets the device.
ep_add_ascend_mutant(launcher_without_device FILE ascend_backend.c TEXT "code 107002"
    REPLACE "ascend_backend *backend = arg$<SEMICOLON>\n    ep_host_floats_reset()$<SEMICOLON>\n    (void)ep_ascend_device_enter(&backend->device, NULL)" "ascend_backend *backend = arg")
ep_add_ascend_mutant(loader_without_device FILE ascend_backend.c TEXT "code 107002"
    REPLACE "err == EP_OK ? ep_ascend_device_enter(&backend->device, out_error) : err" "err")
# T10: rows that no group has are not written.
ep_add_ascend_mutant(row_beyond_groups FILE ascend_slot.c TEXT "scene: rows"
    REPLACE "const int64_t rows = job->rows_count" "const int64_t rows = (int64_t)job->rows_count - (job->rows_count > 8)")
# T11: an inner row of zeros divides 0 by 0.
ep_add_ascend_mutant(zero_row FILE ascend_slot.c TEXT "scene: rows"
    REPLACE "!(inner_scales[place] > 0.0f)" "inner_scales[place] < 0.0f")
# T12: an operator that is not there is not called.
ep_add_ascend_mutant(newest_only OLDER FILE ascend_slot.c
    REPLACE "acl->aclnnGroupedMatmulV5 != NULL" "acl != NULL")
# T13: an older release is taken wholly.
ep_add_ascend_mutant(mixed_libraries OLDER FILE acl_symbols.c TEXT "libopapi_transformer.so cannot be opened"
    REPLACE "older_operators && is_operators(which)" "older_operators && which == EP_ACL_LIBRARY_NN")
# T14: copies that do not wait want pinned memory.
ep_add_ascend_mutant(pageable_stage FILE ascend_slot.c TEXT "pageable host memory"
    REPLACE "EP_ASCEND_CALL(device, NULL, aclrtMallocHost, &stage, need)" "((stage = malloc(need)) != NULL ? EP_OK : EP_ERR_NO_MEMORY)")
# T15, T16: do not apply: rows are gathered, weighted and added on hosts; acl_symbols.h has no operator that routes.
# T17: the gate is the first half.
ep_add_ascend_mutant(halves_swapped FILE ascend_weights.c TEXT "scene: rows"
    REPLACE "{source->gate,   source->up, source->inner" "{source->up,   source->gate, source->inner")
# T18: int8 weights of the fused operator are fractals.
ep_add_ascend_mutant(no_fractals FILE ascend_weights.c TEXT "scene: rows"
    REPLACE "to[(size_t)h * EP_ACL_NZ_COLUMNS + c]" "to[(size_t)c * source->hidden + h]")
ep_add_ascend_mutant(half_blocks FILE ascend_weights.c TEXT "no whole blocks of 32 bytes"
    REPLACE "source->inner % EP_ACL_ALIGN == 0" "2 * source->inner % EP_ACL_NZ_COLUMNS == 0")
# T19: tensors outlive the launch.
ep_add_ascend_mutant(tensors_too_early FILE ascend_slot.c TEXT "before the stream has passed"
    REPLACE "slot->result = enqueue(slot, device, streams, &l)" "slot->result = enqueue(slot, device, streams, &l), drop_objects(slot, device)")
# T20: nothing is alive when the runtime ends.
ep_add_ascend_mutant(streams_left FILE ascend_backend.c TEXT "some streams"
    REPLACE "ep_ascend_stream_destroy(device, streams[i])" "(void)streams[i]")
# Streams do not wait for one another by themselves.
ep_add_ascend_mutant(compute_too_early FILE ascend_slot.c
    REPLACE "aclrtStreamWaitEvent, s->compute, slot->ready" "aclrtStreamWaitEvent, s->compute, slot->done")
ep_add_ascend_mutant(results_too_early FILE ascend_slot.c TEXT "scene: rows"
    REPLACE "aclrtStreamWaitEvent, s->out, slot->computed" "aclrtStreamWaitEvent, s->out, slot->done")
# An event is for what its flags say.
ep_add_ascend_mutant(event_flags FILE ascend_slot.c TEXT "without ACL_EVENT_CAPTURE_STREAM_PROGRESS"
    REPLACE "EP_ACL_EVENT_SYNC | EP_ACL_EVENT_PROGRESS" "EP_ACL_EVENT_SYNC")
# Rows of several w8a8 jobs in a pass find their own scales.
ep_add_ascend_mutant(scales_of_others FILE ascend_slot.c TEXT "scene: rows"
    REPLACE "p->row_scales + r.row * sizeof(float)" "p->row_scales")
