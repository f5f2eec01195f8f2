# SPDX-License-Identifier: MIT
# Builds and runs tests/build/consumer against an installed Bellows or with add_subdirectory.
#   cmake -DMODE=install|subdirectory -DSOURCE=... -DBUILD=... -DWORK=... -DOPTIONS=... -P ...
cmake_minimum_required(VERSION 3.25)

function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output
        ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "failed (${status}): ${ARGN}\n${output}")
    endif()
    set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK}")
set(consumer "${SOURCE}/tests/build/consumer")
if(MODE STREQUAL "install")
    run(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${WORK}/prefix")
    # Headers must stand in the prefix alone: what is found there does not point to the sources.
    file(GLOB_RECURSE configs "${WORK}/prefix/*.cmake")
    foreach(config IN LISTS configs)
        file(READ "${config}" text)
        string(FIND "${text}" "${SOURCE}/" found)
        if(NOT found EQUAL -1)
            message(FATAL_ERROR "${config} names the source tree")
        endif()
    endforeach()
    run(${CMAKE_COMMAND} -S "${consumer}" -B "${WORK}/build" -G Ninja
        "-DCMAKE_PREFIX_PATH=${WORK}/prefix" ${OPTIONS})
else()
    run(${CMAKE_COMMAND} -S "${consumer}" -B "${WORK}/build" -G Ninja
        "-DCONSUMER_BELLOWS_SOURCE=${SOURCE}" ${OPTIONS})
endif()
run(${CMAKE_COMMAND} --build "${WORK}/build")
run("${WORK}/build/consumer")
message("${output}")
if(NOT output MATCHES "one MoE layer, 64 tokens, 8 experts")
    message(FATAL_ERROR "the consumer did not say what it should")
endif()
file(REMOVE_RECURSE "${WORK}")
