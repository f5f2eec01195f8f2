# SPDX-License-Identifier: MIT
# What the house is built with: Vulkan headers, volk, Vulkan Memory Allocator, MPI, and the rest.

find_package(Threads REQUIRED)

# Headers of the toolchain folder first, the system's where they are new enough.
find_path(BELLOWS_VULKAN_INCLUDE vulkan/vulkan_core.h
    PATHS "${BELLOWS_TOOLCHAIN}/include" NO_DEFAULT_PATH)
find_path(BELLOWS_VULKAN_INCLUDE vulkan/vulkan_core.h)
foreach(header vulkan/vulkan_core.h volk.h vk_mem_alloc.h)
    if(NOT EXISTS "${BELLOWS_VULKAN_INCLUDE}/${header}")
        message(FATAL_ERROR "Bellows needs the header <${header}>; looked in "
            "${BELLOWS_TOOLCHAIN}/include and the system's folders. Run cmake/toolchain.sh, or "
            "install Vulkan headers >= 1.4, volk and Vulkan Memory Allocator.")
    endif()
endforeach()
file(STRINGS "${BELLOWS_VULKAN_INCLUDE}/vulkan/vulkan_core.h" version_line
    REGEX "define VK_HEADER_VERSION_COMPLETE")
string(REGEX MATCH "\\( *[0-9]+, *([0-9]+), *([0-9]+)" _ "${version_line}")
if("${CMAKE_MATCH_1}.${CMAKE_MATCH_2}" VERSION_LESS 1.4)
    message(FATAL_ERROR "Bellows needs Vulkan headers >= 1.4, found "
        "${CMAKE_MATCH_1}.${CMAKE_MATCH_2} in ${BELLOWS_VULKAN_INCLUDE}. Run cmake/toolchain.sh.")
endif()

# Headers only: the loader is opened at run time. VOLK_NAMESPACE keeps volk's function pointers
# from clashing with the functions of a program that links the loader itself.
add_library(bellows_vulkan INTERFACE)
target_include_directories(bellows_vulkan SYSTEM INTERFACE "${BELLOWS_VULKAN_INCLUDE}")
target_compile_definitions(bellows_vulkan INTERFACE VK_NO_PROTOTYPES VOLK_NAMESPACE)

# Vulkan Memory Allocator under names of our own (engine/runtime/vma.hpp), so that a program can link
# Bellows and an allocator of its own, of another version.
set(vma_header "${BELLOWS_VULKAN_INCLUDE}/vk_mem_alloc.h")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${vma_header}")
file(READ "${vma_header}" vma_text)
string(REGEX MATCHALL "[vV]ma[A-Z][A-Za-z0-9_]*" vma_names "${vma_text}")
list(REMOVE_DUPLICATES vma_names)
list(SORT vma_names)
list(TRANSFORM vma_names REPLACE "(.+)" "#define \\1 bellows_\\1")
list(JOIN vma_names "\n" vma_names)
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/vma/bellows_vma_names.h" CONTENT "${vma_names}\n" @ONLY)
target_include_directories(bellows_vulkan INTERFACE "${PROJECT_BINARY_DIR}/vma")

# Headers alone: an installed shape or train needs no library of toml++.
find_path(BELLOWS_TOML_INCLUDE toml++/toml.h)
mark_as_advanced(BELLOWS_TOML_INCLUDE)
if(NOT BELLOWS_TOML_INCLUDE)
    message(FATAL_ERROR "Bellows needs the header <toml++/toml.h> (package libtomlplusplus-dev)")
endif()
add_library(bellows_toml INTERFACE)
target_include_directories(bellows_toml SYSTEM INTERFACE "${BELLOWS_TOML_INCLUDE}")
target_compile_definitions(bellows_toml INTERFACE TOML_HEADER_ONLY=1)
# Its assertions hold of no hostile text ("[#"); without them it reports a syntax error.
target_compile_options(bellows_toml INTERFACE "-DTOML_ASSERT(condition)=static_cast<void>(0)")
# A header alone, too.
find_path(BELLOWS_DLPACK_INCLUDE dlpack/dlpack.h)
mark_as_advanced(BELLOWS_DLPACK_INCLUDE)
if(NOT BELLOWS_DLPACK_INCLUDE)
    message(FATAL_ERROR "Bellows needs the header <dlpack/dlpack.h> (package libdlpack-dev)")
endif()
add_library(bellows_dlpack INTERFACE)
target_include_directories(bellows_dlpack SYSTEM INTERFACE "${BELLOWS_DLPACK_INCLUDE}")
if(BELLOWS_MPI)
    find_package(MPI REQUIRED COMPONENTS C)
    # The C interface only; the C++ one that some headers still declare is gone from the libraries.
    target_compile_definitions(MPI::MPI_C INTERFACE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
    find_package(ZLIB REQUIRED)
    find_package(nlohmann_json REQUIRED)
    find_package(CLI11 REQUIRED)
endif()
