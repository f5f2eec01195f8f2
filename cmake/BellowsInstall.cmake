# SPDX-License-Identifier: MIT
# `cmake --install` gives find_package(bellows COMPONENTS engine ...), and files for pkg-config of the
# components that need nothing but a compiler and a loader.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# In the order in which they build on each other.
set(components base sizes engine fp8 schedule shape plan)
if(BELLOWS_MPI)
    list(APPEND components records comm pipeline model text checkpoint run train serve)
endif()
set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/bellows")

# Sets <result> to the components that a component is linked with, directly or not.
function(bellows_components_used result component)
    set(all "")
    set(linked "")
    foreach(property IN ITEMS LINK_LIBRARIES INTERFACE_LINK_LIBRARIES)
        get_target_property(libraries bellows_${component} ${property})
        if(libraries)
            list(APPEND linked ${libraries})
        endif()
    endforeach()
    list(REMOVE_DUPLICATES linked)
    foreach(library IN LISTS linked)
        if(library MATCHES "^bellows_([a-z0-9]+)$" AND CMAKE_MATCH_1 IN_LIST components)
            set(used "${CMAKE_MATCH_1}")
            bellows_components_used(more ${used})
            list(APPEND all ${more} ${used})
        endif()
    endforeach()
    list(REMOVE_DUPLICATES all)
    set(${result} "${all}" PARENT_SCOPE)
endfunction()

set(component_uses "")
foreach(component IN LISTS components)
    bellows_components_used(used ${component})
    list(JOIN used " " used_words)
    string(APPEND component_uses "set(_bellows_uses_${component} ${used_words})\n")
    get_property(include_dirs GLOBAL PROPERTY BELLOWS_INCLUDE_DIRS_${component})
    install(TARGETS bellows_${component} EXPORT bellows-${component}
        INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
    install(EXPORT bellows-${component} NAMESPACE bellows:: DESTINATION "${package_folder}")
    foreach(folder IN LISTS include_dirs)
        install(DIRECTORY "${folder}/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
            FILES_MATCHING PATTERN "*.hpp")
    endforeach()
endforeach()
# What size functions are asked for, also where the rooms around them are not built.
foreach(header IN ITEMS configuration sizes topology)
    install(FILES "${PROJECT_SOURCE_DIR}/comm/include/bellows/comm/${header}.hpp"
        DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/bellows/comm")
endforeach()
get_property(bank_dir GLOBAL PROPERTY BELLOWS_BANK_DIR)
install(DIRECTORY "${bank_dir}/include/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
    FILES_MATCHING PATTERN "*.hpp")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

# Headers of Vulkan that do not come with the system go with the library.
set(own_vulkan "${CMAKE_INSTALL_INCLUDEDIR}/bellows-vulkan")
string(FIND "${BELLOWS_VULKAN_INCLUDE}" "${BELLOWS_TOOLCHAIN}/" at)
if(at EQUAL 0)
    foreach(folder IN ITEMS vulkan vk_video)
        install(DIRECTORY "${BELLOWS_VULKAN_INCLUDE}/${folder}" DESTINATION "${own_vulkan}"
            FILES_MATCHING PATTERN "*.h")
    endforeach()
endif()

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/bellows-config.cmake.in"
    "${PROJECT_BINARY_DIR}/bellows-config.cmake" INSTALL_DESTINATION "${package_folder}"
    PATH_VARS own_vulkan NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/bellows-config-version.cmake"
    COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/bellows-config.cmake"
    "${PROJECT_BINARY_DIR}/bellows-config-version.cmake" DESTINATION "${package_folder}")

# --- pkg-config -----------------------------------------------------------------------------------
file(RELATIVE_PATH pc_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
set(pc_cflags_engine " -I\${includedir}/bellows-vulkan")
set(pc_cflags_fp8 "${pc_cflags_engine}")
set(pc_cflags_schedule "")
foreach(component IN ITEMS engine fp8 schedule)
    bellows_components_used(used ${component})
    list(REVERSE used)
    list(TRANSFORM used PREPEND "-lbellows_")
    list(JOIN used " " pc_libs)
    if(NOT component STREQUAL schedule)
        string(APPEND pc_libs " -pthread -ldl")
    endif()
    set(pc_component "${component}")
    set(pc_cflags "${pc_cflags_${component}}")
    configure_file("${PROJECT_SOURCE_DIR}/cmake/bellows.pc.in"
        "${PROJECT_BINARY_DIR}/bellows-${component}.pc" @ONLY)
    install(FILES "${PROJECT_BINARY_DIR}/bellows-${component}.pc"
        DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
endforeach()
