# SPDX-License-Identifier: MIT
# The size functions of engine, fp8 and comm, and what they are asked for, as one library that needs
# neither Vulkan nor MPI: whoever plans a run links it, and so do the rooms themselves. The sources
# stand in their rooms.
add_library(bellows_sizes engine/ops/sizes.cpp fp8/format.cpp fp8/sizes.cpp
    comm/world/topology.cpp comm/exchange/exchange_sizes.cpp)
add_library(bellows::sizes ALIAS bellows_sizes)
set_target_properties(bellows_sizes PROPERTIES EXPORT_NAME sizes)
bellows_library_defaults(bellows_sizes)
bellows_target_defaults(bellows_sizes)
bellows_precompile(bellows_sizes)
target_compile_features(bellows_sizes PUBLIC cxx_std_20)
foreach(folder IN ITEMS engine/ops fp8 comm)
    target_include_directories(bellows_sizes
        PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/${folder}/include>)
endforeach()
target_link_libraries(bellows_sizes PUBLIC bellows_base)
