# SPDX-License-Identifier: MIT
# bellows_test, bellows_mpi_test: a GoogleTest program and its ctest entries.
#
#   bellows_test(NAME <target> SOURCES a.cpp... LIBS bellows::engine...
#                [GPU] [TIMEOUT seconds] [COST seconds] [ARGS ...] [ENVIRONMENT A=b...] [LABELS ...]
#                [NO_VALIDATION | VALIDATION_FILTER filter])
#   bellows_mpi_test(... RANKS 1 2 3 4 ... [ON_TWO_HOSTS])
#                                               main() comes from tests/support/mpi_main.cpp
#
# GPU: the program uses a Vulkan device; it is registered once per driver of BELLOWS_TEST_DRIVERS,
# as <target>.<driver>. With RANKS, once per number of ranks, as <target>[.<driver>].ranks<N>, the
# drivers in turn: what depends on the number of ranks does not on the driver.
# ON_TWO_HOSTS: once more with two ranks on each of two hosts (tests/support/two_hosts.sh), as
# <target>[.<driver>].hosts2x2.
# All of these that run on the last of the drivers, of MPI tests those of two ranks, run once more
# under the Khronos validation layer, as validation.<test>: any message fails them. Not so programs
# with the label e2e or validation, nor (NO_VALIDATION) those that take long and call nothing that
# others do not. VALIDATION_FILTER is a GTEST_FILTER for this run, where some cases record what others
# do.

set(BELLOWS_TEST_DRIVERS "system;new" CACHE STRING
    "Vulkan drivers of GPU tests: system (the distribution's lavapipe), new (the toolchain folder's), \
gpu (what the machine offers)")
set(BELLOWS_TEST_PATIENCE 1 CACHE STRING "Whole factor on the tests' time limits, for slow machines")

# Seconds that a test may take, by area: about four times what the longest of the area takes on two
# cores, so that a hang is found soon. Tests of the command have limits of their own, of 240 s for
# each command, which say more. The first run on a machine compiles all shaders, those for matrix
# units for minutes; later ones find them in the driver's cache.
set(bellows_time_limit 180)
set(bellows_time_limit_fp8 600)
set(bellows_time_limit_comm 240)
set(bellows_time_limit_e2e 420)
set(bellows_time_limit_model 200)
set(bellows_time_limit_ops 300) # 150 with the old shader compiler; else 85

# What takes long begins first, so that no core is idle at the end. Seconds, roughly, by area.
set(bellows_cost 2)
set(bellows_cost_comm 5)
set(bellows_cost_e2e 40)
set(bellows_cost_model 10)

file(GLOB BELLOWS_SYSTEM_LAVAPIPE "/usr/share/vulkan/icd.d/lvp_icd*.json")

if(BELLOWS_SYSTEM_LAVAPIPE)
    list(GET BELLOWS_SYSTEM_LAVAPIPE 0 bellows_icd)
    file(READ "${bellows_icd}" bellows_icd)
    string(JSON bellows_system_lavapipe_library GET "${bellows_icd}" ICD library_path)
endif()

# The driver's cache of compiled shaders, one for all tests: those of the command, whose other caches
# stand in the build folder, would compile everything once more.
set(bellows_driver_cache "")
if(NOT "$ENV{MESA_SHADER_CACHE_DIR}$ENV{XDG_CACHE_HOME}$ENV{HOME}" STREQUAL "")
    set(bellows_driver_cache "$ENV{HOME}/.cache")
    foreach(variable IN ITEMS XDG_CACHE_HOME MESA_SHADER_CACHE_DIR)
        if(NOT "$ENV{${variable}}" STREQUAL "")
            set(bellows_driver_cache "$ENV{${variable}}")
        endif()
    endforeach()
endif()

# Every program that runs on the newer lavapipe gets a copy in bin-new/ (see the script).
function(bellows_copy_for_new_lavapipe target)
    if(NOT PROJECT_IS_TOP_LEVEL OR NOT EXISTS "${BELLOWS_TOOLCHAIN}/loader")
        return()
    endif()
    add_custom_command(TARGET ${target} POST_BUILD
        COMMAND ${CMAKE_COMMAND} -E env "BELLOWS_TOOLCHAIN=${BELLOWS_TOOLCHAIN}"
            "${PROJECT_SOURCE_DIR}/cmake/with_new_lavapipe.sh" --copy $<TARGET_FILE:${target}>
            "${CMAKE_BINARY_DIR}/bin-new/$<TARGET_FILE_NAME:${target}>"
        VERBATIM)
endfunction()

# Messages fail the device; those of a device's end can only be read from the layer's output.
set(bellows_validation BELLOWS_VALIDATION=1
    "VK_LAYER_SETTINGS_PATH=${PROJECT_SOURCE_DIR}/tests/validation/vk_layer_settings.txt")

function(bellows_test_program arg_NAME)
    add_executable(${arg_NAME} ${arg_SOURCES})
    bellows_target_defaults(${arg_NAME})
    bellows_precompile(${arg_NAME} GTest::gtest)
    target_include_directories(${arg_NAME} PRIVATE "${PROJECT_SOURCE_DIR}/tests"
        "${PROJECT_SOURCE_DIR}")
    target_link_libraries(${arg_NAME} PRIVATE ${arg_LIBS} ${ARGN})
    if(arg_GPU AND new IN_LIST BELLOWS_TEST_DRIVERS)
        bellows_copy_for_new_lavapipe(${arg_NAME})
    endif()
endfunction()

# Adds one ctest per driver. `command`: what stands before the program, e.g. mpirun -n 2.
function(bellows_register_test name processors command drivers)
    if(NOT arg_GPU)
        set(drivers none)
    endif()
    list(GET BELLOWS_TEST_DRIVERS -1 validated)
    foreach(driver IN LISTS drivers)
        set(program "$<TARGET_FILE:${arg_NAME}>")
        set(labels ${arg_LABELS})
        set(environment ${bellows_test_environment} ${arg_ENVIRONMENT})
        set(test ${arg_NAME}${name})
        if(NOT driver STREQUAL none)
            set(test ${arg_NAME}.${driver}${name})
        endif()
        if(driver STREQUAL new)
            set(program "${CMAKE_BINARY_DIR}/bin-new/$<TARGET_FILE_NAME:${arg_NAME}>")
            list(APPEND labels lavapipe-new)
            list(APPEND environment "VK_DRIVER_FILES=${BELLOWS_TOOLCHAIN}/lvp_icd.json"
                "VK_ADD_LAYER_PATH=${BELLOWS_TOOLCHAIN}/layers" BELLOWS_TEST_DRIVER=new)
        elseif(driver STREQUAL system)
            list(APPEND labels lavapipe-system)
            list(APPEND environment "VK_DRIVER_FILES=${BELLOWS_SYSTEM_LAVAPIPE}"
                BELLOWS_TEST_DRIVER=system)
            if(BELLOWS_SANITIZE MATCHES "address" AND NOT arg_RANKS)
                # The loader unloads the driver, after which its own leaks have no name to be
                # suppressed by; preloaded, it stays.
                list(APPEND environment "LD_PRELOAD=${bellows_system_lavapipe_library}")
            endif()
        elseif(driver STREQUAL gpu)
            list(APPEND labels gpu)
            list(APPEND environment BELLOWS_DEVICE=gpu BELLOWS_TEST_DRIVER=gpu)
        endif()
        add_test(NAME ${test} COMMAND ${command} ${program} ${arg_ARGS})
        set_tests_properties(${test} PROPERTIES TIMEOUT ${arg_TIMEOUT} COST ${arg_COST}
            PROCESSORS ${processors} LABELS "${labels}" ENVIRONMENT "${environment}"
            WORKING_DIRECTORY "${CMAKE_BINARY_DIR}" SKIP_RETURN_CODE 77)
        if(driver STREQUAL validated AND driver MATCHES "^(system|new)$"
                AND name MATCHES "^(\\.ranks2)?$" AND NOT labels MATCHES "e2e|validation"
                AND NOT arg_NO_VALIDATION)
            # Later, when the driver's cache has the shaders.
            math(EXPR cost "${arg_COST} - 1")
            list(APPEND environment ${bellows_validation})
            if(arg_VALIDATION_FILTER)
                list(APPEND environment "GTEST_FILTER=${arg_VALIDATION_FILTER}")
            endif()
            add_test(NAME validation.${test} COMMAND ${command} ${program} ${arg_ARGS})
            set_tests_properties(validation.${test} PROPERTIES TIMEOUT ${arg_TIMEOUT}
                COST ${cost} PROCESSORS ${processors} LABELS "${labels};no-sanitizer;validation"
                ENVIRONMENT "${environment}"
                FAIL_REGULAR_EXPRESSION "VUID-;Validation (Error|Warning|Performance)"
                WORKING_DIRECTORY "${CMAKE_BINARY_DIR}")
        endif()
    endforeach()
endfunction()

macro(bellows_parse_test)
    cmake_parse_arguments(PARSE_ARGV 0 arg "GPU;ON_TWO_HOSTS;NO_VALIDATION"
        "NAME;TIMEOUT;COST;VALIDATION_FILTER" "SOURCES;LIBS;RANKS;ARGS;ENVIRONMENT;LABELS")
    get_filename_component(area "${CMAKE_CURRENT_SOURCE_DIR}" NAME)
    if(NOT arg_TIMEOUT AND DEFINED bellows_time_limit_${area})
        set(arg_TIMEOUT ${bellows_time_limit_${area}})
    elseif(NOT arg_TIMEOUT)
        set(arg_TIMEOUT ${bellows_time_limit})
    endif()
    if(NOT arg_COST AND DEFINED bellows_cost_${area})
        set(arg_COST ${bellows_cost_${area}})
    elseif(NOT arg_COST)
        set(arg_COST ${bellows_cost})
    endif()
    math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * ${BELLOWS_TEST_PATIENCE}")
    if(BELLOWS_SANITIZE)
        math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 4")
    endif()
    # Drivers, MPI and their libraries leak or race at exit; ours must not.
    set(suppressions "${PROJECT_SOURCE_DIR}/tests/sanitizers")
    set(bellows_test_environment
        "LSAN_OPTIONS=suppressions=${suppressions}/lsan.supp:print_suppressions=0"
        "TSAN_OPTIONS=suppressions=${suppressions}/tsan.supp:second_deadlock_stack=1"
        "UBSAN_OPTIONS=print_stacktrace=1"
        "ASAN_OPTIONS=detect_odr_violation=0:verify_asan_link_order=0")
    if(bellows_driver_cache)
        list(APPEND bellows_test_environment "MESA_SHADER_CACHE_DIR=${bellows_driver_cache}")
    endif()
endmacro()

function(bellows_test)
    bellows_parse_test()
    bellows_test_program(${arg_NAME} GTest::gtest GTest::gtest_main)
    # One, although lavapipe has a thread per core: a test keeps hardly more than one of them busy.
    bellows_register_test("" 1 "" "${BELLOWS_TEST_DRIVERS}")
endfunction()

function(bellows_mpi_test)
    if(NOT BELLOWS_MPI)
        return()
    endif()
    bellows_parse_test()
    list(APPEND arg_SOURCES "${PROJECT_SOURCE_DIR}/tests/support/mpi_main.cpp"
        "${PROJECT_SOURCE_DIR}/tests/support/mpi_leaks.cpp")
    bellows_test_program(${arg_NAME} GTest::gtest MPI::MPI_C bellows_comm)
    list(APPEND arg_LABELS mpi)
    # Root, more ranks than cores, idle ranks that yield, no binding of all ranks to one core: for
    # OpenMPI 4 and 5. One thread per rank for lavapipe.
    list(APPEND bellows_test_environment OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
        OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
        PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
        PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
        OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_btl_base_warn_component_unused=0
        LP_NUM_THREADS=1)
    if(BELLOWS_SANITIZE) # some, among them no power of two
        list(REMOVE_ITEM arg_RANKS 1 4 8)
    endif()
    list(LENGTH BELLOWS_TEST_DRIVERS drivers)
    foreach(ranks IN LISTS arg_RANKS)
        math(EXPR driver "(${ranks} + 1) % ${drivers}") # two ranks on the last, for validation
        list(GET BELLOWS_TEST_DRIVERS ${driver} driver)
        bellows_register_test(.ranks${ranks} ${ranks}
            "${MPIEXEC_EXECUTABLE};${MPIEXEC_NUMPROC_FLAG};${ranks}" ${driver})
    endforeach()
    if(arg_ON_TWO_HOSTS)
        bellows_register_test(.hosts2x2 4 "${PROJECT_SOURCE_DIR}/tests/support/two_hosts.sh;2"
            "${BELLOWS_TEST_DRIVERS}")
    endif()
endfunction()
