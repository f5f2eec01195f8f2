# SPDX-License-Identifier: MIT
# How every target of the house is built, and the function that makes a folder's library.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(PROJECT_IS_TOP_LEVEL)
    include(GNUInstallDirs)
    # Shared libraries and programs find each other wherever the installed folder is moved to.
    set(CMAKE_INSTALL_RPATH "\$ORIGIN;\$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
    set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
    set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
    if(NOT CMAKE_BUILD_TYPE)
        set(CMAKE_BUILD_TYPE Release CACHE STRING "Kind of build" FORCE)
    endif()
    find_program(BELLOWS_CCACHE_PROGRAM ccache)
    mark_as_advanced(BELLOWS_CCACHE_PROGRAM)
    if(BELLOWS_CCACHE AND BELLOWS_CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
        set(CMAKE_C_COMPILER_LAUNCHER "${BELLOWS_CCACHE_PROGRAM}")
        set(CMAKE_CXX_COMPILER_LAUNCHER "${BELLOWS_CCACHE_PROGRAM}")
    endif()
endif()

# Warnings and sanitizers; for targets of the house only.
function(bellows_target_defaults target)
    # GCC 12 sees overlaps in std::string concatenation that are not there: -Wno-restrict. What other
    # releases' optimisers believe to see in the standard library warns, and is no error.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:
        -Wall -Wextra -Wpedantic -Wshadow $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
        $<$<BOOL:${BELLOWS_WERROR}>:-Werror -Wno-error=array-bounds>
        $<$<AND:$<BOOL:${BELLOWS_WERROR}>,$<CXX_COMPILER_ID:Clang>>:-Wno-error=deprecated-declarations>
        $<$<AND:$<BOOL:${BELLOWS_WERROR}>,$<CXX_COMPILER_ID:GNU>>:-Wno-error=stringop-overflow
            -Wno-error=stringop-overread -Wno-error=maybe-uninitialized
            -Wno-error=free-nonheap-object>>)
    if(BELLOWS_SANITIZE)
        target_compile_options(${target} PRIVATE -fsanitize=${BELLOWS_SANITIZE}
            -fno-omit-frame-pointer -fno-sanitize-recover=all)
        target_link_options(${target} PUBLIC -fsanitize=${BELLOWS_SANITIZE})
    endif()
    if(BELLOWS_FUZZ)
        target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
    endif()
endfunction()

# bellows_precompile(<target> [<library>...])
# A quarter of a build's time goes into headers that most sources include: those of the standard
# library and, where the target is linked with them, of GoogleTest and nlohmann-json. Targets of one
# kind and with the same libraries of these have them compiled once.
function(bellows_precompile target)
    if(NOT BELLOWS_PRECOMPILE)
        return()
    endif()
    get_target_property(kind ${target} TYPE)
    # Under one name for both: so a shared build finds what a static one has compiled in the cache.
    string(REGEX REPLACE "^(STATIC|SHARED)_" "" kind "${kind}")
    string(MAKE_C_IDENTIFIER "bellows_precompiled_${kind}_${ARGN}" precompiled)
    if(NOT TARGET ${precompiled})
        set(headers <algorithm> <array> <chrono> <cmath> <cstdint> <cstring> <filesystem> <fstream>
            <functional> <map> <memory> <mutex> <optional> <set> <sstream> <span> <string> <thread>
            <utility> <vector>)
        if(GTest::gtest IN_LIST ARGN)
            list(APPEND headers <gtest/gtest.h>)
        endif()
        if(nlohmann_json::nlohmann_json IN_LIST ARGN)
            list(APPEND headers <nlohmann/json.hpp>)
        endif()
        set(source "${PROJECT_BINARY_DIR}/${precompiled}.cpp")
        file(CONFIGURE OUTPUT "${source}" CONTENT "")
        add_library(${precompiled} OBJECT "${source}")
        bellows_target_defaults(${precompiled})
        target_link_libraries(${precompiled} PRIVATE ${ARGN} Threads::Threads)
        target_compile_features(${precompiled} PRIVATE cxx_std_20)
        if(kind STREQUAL EXECUTABLE)
            set_target_properties(${precompiled} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
            target_compile_options(${precompiled} PRIVATE ${CMAKE_CXX_COMPILE_OPTIONS_PIE})
        endif()
        target_precompile_headers(${precompiled} PRIVATE ${headers})
    endif()
    target_precompile_headers(${target} REUSE_FROM ${precompiled})
endfunction()

# Static libraries, or shared ones with BUILD_SHARED_LIBS, whose defines are the same: else they could
# not use precompiled headers together.
function(bellows_library_defaults target)
    set_target_properties(${target} PROPERTIES DEFINE_SYMBOL ""
        VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endfunction()

# bellows_library(<component> [PUBLIC libs...] [PRIVATE libs...] [WITHOUT paths...])
# Library bellows_<component>, alias bellows::<component>, of all *.cpp below the current folder,
# with the public headers in its folders named include/. WITHOUT: folders and sources that belong to
# other libraries. A folder without sources gives a library of headers only.
function(bellows_library name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "PUBLIC;PRIVATE;WITHOUT")
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.cpp")
    file(GLOB_RECURSE headers CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.hpp")
    list(FILTER headers INCLUDE REGEX "/include/bellows/")
    foreach(path IN LISTS arg_WITHOUT)
        list(FILTER sources EXCLUDE REGEX "^${CMAKE_CURRENT_SOURCE_DIR}/${path}(/|$)")
        list(FILTER headers EXCLUDE REGEX "^${CMAKE_CURRENT_SOURCE_DIR}/${path}(/|$)")
    endforeach()
    set(include_dirs "${headers}")
    list(TRANSFORM include_dirs REPLACE "/include/bellows/.*" "/include")
    list(REMOVE_DUPLICATES include_dirs)
    set(target bellows_${name})
    if(sources)
        add_library(${target} ${sources}) # static, or shared with BUILD_SHARED_LIBS
        bellows_library_defaults(${target})
        bellows_target_defaults(${target})
        bellows_precompile(${target})
        target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}"
            "${PROJECT_SOURCE_DIR}")
        target_link_libraries(${target} PRIVATE ${arg_PRIVATE})
        set(scope PUBLIC)
    else()
        add_library(${target} INTERFACE)
        set(scope INTERFACE)
    endif()
    add_library(bellows::${name} ALIAS ${target})
    set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
    target_compile_features(${target} ${scope} cxx_std_20)
    foreach(folder IN LISTS include_dirs)
        target_include_directories(${target} ${scope} $<BUILD_INTERFACE:${folder}>)
    endforeach()
    target_link_libraries(${target} ${scope} ${arg_PUBLIC})
    set_property(GLOBAL APPEND PROPERTY BELLOWS_PUBLIC_HEADERS_${name} ${headers})
    set_property(GLOBAL APPEND PROPERTY BELLOWS_LIBRARIES ${name})
    set_property(GLOBAL PROPERTY BELLOWS_INCLUDE_DIRS_${name} "${include_dirs}")
endfunction()
