# SPDX-License-Identifier: MIT
cmake_minimum_required(VERSION 3.25)
# Checks the arrows of the house: which folder includes what.  cmake -DROOT=... -P check_arrows.cmake
#   * <bellows/X/...> only from folders that may use X, and no way into another folder's private
#     headers;
#   * public headers name no third-party library, except Vulkan's types in engine and MPI's in
#     files named *_interop.hpp;
#   * pipeline/schedule is pure data: no Vulkan, no MPI, no other folder but the error type.

set(may_use_engine engine)
set(may_use_fp8 engine fp8)
set(may_use_comm engine fp8 comm)
set(may_use_pipeline engine comm pipeline)
set(may_use_model engine fp8 comm pipeline model)
set(may_use_reference model)
set(may_use_app engine fp8 comm pipeline model app)
set(folders engine fp8 comm pipeline model reference app)
set(third_party "nlohmann|CLI|toml|spdlog|volk|vk_mem_alloc|sentencepiece|vulkan/|mpi\\.h")

set(num_files 0)
set(violations "")
foreach(folder IN LISTS folders)
    file(GLOB_RECURSE files RELATIVE "${ROOT}" "${ROOT}/${folder}/*.cpp" "${ROOT}/${folder}/*.hpp")
    foreach(file IN LISTS files)
        math(EXPR num_files "${num_files} + 1")
        file(STRINGS "${ROOT}/${file}" lines REGEX "^[ \t]*#[ \t]*include")
        foreach(line IN LISTS lines)
            string(REGEX REPLACE "^[^<\"]*[<\"]([^>\"]*).*" "\\1" included "${line}")
            set(why "")
            if(included MATCHES "^bellows/([a-z0-9_]+)/")
                set(target "${CMAKE_MATCH_1}")
                if(NOT target STREQUAL "kernels" AND NOT target IN_LIST may_use_${folder})
                    set(why "${folder} may not use ${target}")
                elseif(file MATCHES "^pipeline/schedule/" AND NOT target STREQUAL "pipeline"
                    AND NOT included STREQUAL "bellows/engine/error.hpp")
                    set(why "pipeline/schedule is pure data")
                endif()
            elseif(included MATCHES "\\.\\./" )
                set(why "leaves its folder")
            elseif(folder STREQUAL "app" AND included MATCHES "^reference/")
                # the truth of the self-test, which has no public headers
            elseif(included MATCHES "^([a-z0-9]+)/" AND CMAKE_MATCH_1 IN_LIST folders
                AND NOT CMAKE_MATCH_1 STREQUAL folder)
                set(why "private header of ${CMAKE_MATCH_1}")
            elseif(included MATCHES "^(${third_party})")
                if(file MATCHES "^pipeline/schedule/")
                    set(why "pipeline/schedule is pure data")
                elseif(file MATCHES "/include/" AND NOT file MATCHES "_interop\\.hpp$")
                    set(why "third-party header in a public header")
                endif()
            endif()
            if(why)
                string(APPEND violations "  ${file}: ${included}: ${why}\n")
            endif()
        endforeach()
    endforeach()
endforeach()
if(num_files EQUAL 0)
    message(FATAL_ERROR "no sources below '${ROOT}'")
endif()
if(violations)
    message(FATAL_ERROR "includes against the arrows:\n${violations}")
endif()
message(STATUS "${num_files} files keep the arrows")
