// SPDX-License-Identifier: MIT
// What a kernel on matrix units asks of the compiler, and the barrier among a subgroup that shares
// workgroup memory.
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#pragma use_vulkan_memory_model
#if MATRIX_BF16
#extension GL_EXT_bfloat16 : require
#else
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#endif

// lavapipe takes it for the workgroup's: there all subgroups come to it equally often.
void subgroup_shared_barrier() {
    controlBarrier(gl_ScopeSubgroup, gl_ScopeSubgroup, gl_StorageSemanticsShared,
                   gl_SemanticsAcquireRelease);
}

// Calls for each index instead of a loop: sums that are indexed by the counter of a loop that a
// compiler finds too long to unroll stand in memory, at a tenth of the speed.
#define UP_TO_8(CALL) CALL(0u) CALL(1u) CALL(2u) CALL(3u) CALL(4u) CALL(5u) CALL(6u) CALL(7u)
