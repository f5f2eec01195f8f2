# SPDX-License-Identifier: MIT
# `cmake --install` gives find_package(bellows COMPONENTS base engine fp8 schedule shape comm pipeline model ...).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(components base sizes engine fp8 schedule shape plan)
if(BELLOWS_MPI)
    list(APPEND components records comm pipeline model text checkpoint run train serve)
endif()
set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/bellows")
foreach(component IN LISTS components)
    get_property(include_dirs GLOBAL PROPERTY BELLOWS_INCLUDE_DIRS_${component})
    install(TARGETS bellows_${component} EXPORT bellows-${component}
        INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
    install(EXPORT bellows-${component} NAMESPACE bellows:: DESTINATION "${package_folder}")
    foreach(folder IN LISTS include_dirs)
        install(DIRECTORY "${folder}/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
            FILES_MATCHING PATTERN "*.hpp")
    endforeach()
endforeach()
get_property(bank_dir GLOBAL PROPERTY BELLOWS_BANK_DIR)
install(DIRECTORY "${bank_dir}/include/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
    FILES_MATCHING PATTERN "*.hpp")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/bellows-config.cmake.in"
    "${PROJECT_BINARY_DIR}/bellows-config.cmake" INSTALL_DESTINATION "${package_folder}"
    NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/bellows-config-version.cmake"
    COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/bellows-config.cmake"
    "${PROJECT_BINARY_DIR}/bellows-config-version.cmake" DESTINATION "${package_folder}")
