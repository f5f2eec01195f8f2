// SPDX-License-Identifier: MIT
#pragma once

// The Vulkan Memory Allocator under names of our own: the generated header renames all that it
// declares, so that a program can link Bellows and an allocator of its own.

#include <bellows_vma_names.h>

#include <vk_mem_alloc.h>
