# SPDX-License-Identifier: MIT
# Builds and runs programs against an installed Bellows or with add_subdirectory.
#   cmake -DMODE=... -DSOURCE=... -DBUILD=... -DWORK=... -DPREFIX=... -DOPTIONS=... -P ...
# MODE: install       installs into PREFIX, which others use
#       examples      every example of `EXAMPLES`, each a project of its own; those that need no more
#                     run, by MPIRUN where they are for ranks
#       components    each of `COMPONENTS` alone; one that does not exist
#       pure          schedules, shapes and memory where MPI cannot be found
#       own_vma       a program with a Vulkan Memory Allocator of its own
#       pkg_config    what pkg-config says, without CMake
#       shared        all as shared libraries, installed, moved, without the folder of the build
#       subdirectory  the MoE layer's example with Bellows in its own build; some shaders by
#                     OTHER_GLSLC
cmake_minimum_required(VERSION 3.25)

# Lists come with commas, which no level between takes for its own.
string(REPLACE "," ";" examples "${EXAMPLES}")
string(REPLACE "," ";" mpirun "${MPIRUN}")

function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output
        ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "failed (${status}): ${ARGN}\n${output}")
    endif()
    set(output "${output}" PARENT_SCOPE)
endfunction()

# Configures and builds a project that finds Bellows in PREFIX. Its own headers of Vulkan are named to
# nobody: those that are installed must do.
function(build source)
    run(${CMAKE_COMMAND} -S "${source}" -B "${WORK}/build" -G Ninja
        "-DCMAKE_PREFIX_PATH=${PREFIX}" ${OPTIONS} ${ARGN})
    run(${CMAKE_COMMAND} --build "${WORK}/build")
endfunction()

file(REMOVE_RECURSE "${WORK}")
set(tests "${SOURCE}/tests/build")
if(MODE STREQUAL "install")
    file(REMOVE_RECURSE "${PREFIX}")
    run(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${PREFIX}")
    # Headers must stand in the prefix alone: what is found there does not point to the sources.
    file(GLOB_RECURSE configs "${PREFIX}/*.cmake" "${PREFIX}/*.pc")
    foreach(config IN LISTS configs)
        file(READ "${config}" text)
        string(FIND "${text}" "${SOURCE}/" found)
        if(NOT found EQUAL -1)
            message(FATAL_ERROR "${config} names the source tree")
        endif()
    endforeach()
elseif(MODE STREQUAL "examples")
    foreach(example IN LISTS examples)
        file(REMOVE_RECURSE "${WORK}/build")
        build("${SOURCE}/examples/${example}")
        set(program "${WORK}/build/${example}")
        if(example STREQUAL "expert_exchange")
            run(${mpirun} "${program}")
        else()
            run("${program}")
        endif()
        message("${example}:\n${output}")
    endforeach()
elseif(MODE STREQUAL "components")
    build("${tests}/components" "-DCOMPONENTS=${COMPONENTS}")
    execute_process(COMMAND ${CMAKE_COMMAND} -S "${tests}/components" -B "${WORK}/wrong"
        "-DCMAKE_PREFIX_PATH=${PREFIX}" -DCOMPONENTS=engnie RESULT_VARIABLE status
        OUTPUT_VARIABLE output ERROR_VARIABLE output)
    string(REGEX REPLACE "[ \n]+" " " output "${output}")
    if(status EQUAL 0 OR NOT output MATCHES "no component 'engnie' here. There are base, engine, fp8")
        message(FATAL_ERROR "a component that does not exist: ${status}\n${output}")
    endif()
elseif(MODE STREQUAL "pure")
    build("${tests}/pure" -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON
        -DCMAKE_DISABLE_FIND_PACKAGE_Threads=ON)
    run("${WORK}/build/pure")
    message("${output}")
elseif(MODE STREQUAL "own_vma")
    build("${tests}/own_vma" "-DVMA_INCLUDE=${VMA_INCLUDE}")
    run("${WORK}/build/own_vma")
elseif(MODE STREQUAL "pkg_config")
    file(GLOB_RECURSE file "${PREFIX}/*/bellows-schedule.pc")
    get_filename_component(folder "${file}" DIRECTORY)
    set(ENV{PKG_CONFIG_PATH} "${folder}")
    foreach(component IN ITEMS schedule engine fp8)
        run(pkg-config --cflags --libs bellows-${component})
        separate_arguments(flags UNIX_COMMAND "${output}")
        file(COPY "${tests}/pkg_config/${component}.cpp" DESTINATION "${WORK}")
        run(${CXX} "${WORK}/${component}.cpp" ${flags} -o "${WORK}/${component}")
        run("${WORK}/${component}")
    endforeach()
elseif(MODE STREQUAL "shared")
    run(${CMAKE_COMMAND} -S "${SOURCE}" -B "${WORK}" -G Ninja -DBUILD_SHARED_LIBS=ON -DBELLOWS_TESTS=OFF
        -DBELLOWS_BENCH=OFF ${OPTIONS} ${SHARED_OPTIONS})
    run(${CMAKE_COMMAND} --build "${WORK}")
    run(${CMAKE_COMMAND} --install "${WORK}" --prefix "${WORK}/installed")
    set(PREFIX "${WORK}-moved")
    file(REMOVE_RECURSE "${PREFIX}")
    file(RENAME "${WORK}/installed" "${PREFIX}")
    file(REMOVE_RECURSE "${WORK}")

    file(GLOB_RECURSE engine "${PREFIX}/*/libbellows_engine.so.${VERSION}")
    get_filename_component(lib "${engine}" DIRECTORY)
    string(REGEX REPLACE "[.][0-9]+$" "" so_version "${VERSION}")
    run(readelf -d "${engine}")
    if(NOT output MATCHES "SONAME.*libbellows_engine.so.${so_version}]"
            OR NOT EXISTS "${lib}/libbellows_engine.so.${so_version}")
        message(FATAL_ERROR "no libbellows_engine.so.${so_version} in ${lib}:\n${output}")
    endif()
    # A program may have these itself, in another version.
    run(nm -DC --defined-only "${engine}")
    if(output MATCHES "[0-9a-f]+ [A-Za-z] (volk|vma|Vma|vk[A-Z])[^\n]*")
        message(FATAL_ERROR "the engine offers what is not its own: ${CMAKE_MATCH_0}")
    endif()
    file(GLOB_RECURSE archives "${PREFIX}/*.a")
    if(archives)
        message(FATAL_ERROR "static libraries among the shared ones: ${archives}")
    endif()

    if(PKG_CONFIG)
        set(ENV{PKG_CONFIG_PATH} "${lib}/pkgconfig")
        run(${PKG_CONFIG} --cflags --libs bellows-fp8)
        separate_arguments(flags UNIX_COMMAND "${output}")
        run(${CXX} "${tests}/pkg_config/fp8.cpp" ${flags} "-Wl,-rpath,${lib}" -o "${PREFIX}/uses_fp8")
        run("${PREFIX}/uses_fp8")
    endif()
    set(examples schedule)
    if(MPI)
        set(examples train) # is linked with all of them
        run("${PREFIX}/bin/bellows" info --model tiny)
    endif()
    foreach(example IN LISTS examples)
        build("${SOURCE}/examples/${example}")
        run("${WORK}/build/${example}")
        message("${output}")
    endforeach()
    file(REMOVE_RECURSE "${PREFIX}")
else()
    run(${CMAKE_COMMAND} -S "${tests}/consumer" -B "${WORK}/build" -G Ninja
        "-DCONSUMER_BELLOWS_SOURCE=${SOURCE}" ${OPTIONS})
    run(${CMAKE_COMMAND} --build "${WORK}/build")
    run("${WORK}/build/example/moe_layer")
    if(NOT output MATCHES "one MoE layer, 64 tokens, 8 experts")
        message(FATAL_ERROR "the consumer did not say what it should\n${output}")
    endif()
    if(OTHER_GLSLC)
        run(${CMAKE_COMMAND} -S "${SOURCE}" -B "${WORK}/shaders" -G Ninja ${OPTIONS} -DBELLOWS_TESTS=OFF
            -DBELLOWS_BENCH=OFF "-DBELLOWS_GLSLC=${OTHER_GLSLC}")
        set(shaders fill_words.u32 gemm_nt.f32_f32_f32 gemm_nt.bf16_bf16_bf16 rmsnorm_forward.bf16
            attention_forward.f32 moe_layout.place router_forward.f32 exchange_pack.bf16
            fp8_quantize_rows.f32 grouped_gemm_coopmat_nt.f16_f32)
        list(TRANSFORM shaders PREPEND "shaders/bank/spirv/")
        list(TRANSFORM shaders APPEND ".spv")
        run(${CMAKE_COMMAND} --build "${WORK}/shaders" --target ${shaders})
    endif()
endif()
file(REMOVE_RECURSE "${WORK}")
