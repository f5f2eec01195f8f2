// SPDX-License-Identifier: MIT
// What a kernel whose workgroups multiply matrices together asks of the compiler.
#extension GL_KHR_cooperative_matrix : require
#extension GL_NV_cooperative_matrix2 : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_bfloat16 : require
#pragma use_vulkan_memory_model
