# SPDX-License-Identifier: MIT
# Shaders: manifest -> probe of the compiler's extensions -> per variant: compile, spirv-val,
# spirv-opt, spirv-val -> bank of embedded SPIR-V with typed C++ structs.

# --- tools ----------------------------------------------------------------------------------------
find_program(BELLOWS_FOUND_GLSLC NAMES glslc glslangValidator
    PATHS "${BELLOWS_TOOLCHAIN}/bin" NO_DEFAULT_PATH)
find_program(BELLOWS_FOUND_GLSLC NAMES glslc glslangValidator)
foreach(tool val opt)
    string(TOUPPER ${tool} upper)
    find_program(BELLOWS_SPIRV_${upper} spirv-${tool}
        PATHS "${BELLOWS_TOOLCHAIN}/bin" NO_DEFAULT_PATH)
    find_program(BELLOWS_SPIRV_${upper} spirv-${tool})
    mark_as_advanced(BELLOWS_SPIRV_${upper})
    if(NOT BELLOWS_SPIRV_${upper})
        message(FATAL_ERROR "Bellows needs 'spirv-${tool}' (package spirv-tools)")
    endif()
endforeach()
mark_as_advanced(BELLOWS_FOUND_GLSLC)
set(bellows_glslc "${BELLOWS_GLSLC}")
if(NOT bellows_glslc)
    set(bellows_glslc "${BELLOWS_FOUND_GLSLC}")
endif()
if(NOT bellows_glslc)
    message(FATAL_ERROR "Bellows needs a GLSL compiler: 'glslc' or 'glslangValidator'. "
        "Run cmake/toolchain.sh, or set BELLOWS_GLSLC.")
endif()
execute_process(COMMAND "${bellows_glslc}" --version OUTPUT_VARIABLE bellows_glslc_version
    RESULT_VARIABLE result ERROR_VARIABLE error)
if(NOT result EQUAL 0)
    message(FATAL_ERROR "the GLSL compiler '${bellows_glslc}' does not run: ${result} ${error}")
endif()
get_filename_component(name "${bellows_glslc}" NAME)
if(name MATCHES "^glslang")
    set(bellows_glslc_is_glslang ON)
else()
    set(bellows_glslc_is_glslang OFF)
endif()
string(REGEX REPLACE "\n.*" "" bellows_glslc_version_line "${bellows_glslc_version}")
message(STATUS "GLSL compiler: ${bellows_glslc} (${bellows_glslc_version_line})")

execute_process(COMMAND "${BELLOWS_SPIRV_OPT}" --version
    OUTPUT_VARIABLE bellows_spirv_opt_version ERROR_VARIABLE bellows_spirv_opt_version)
string(SHA256 bellows_shader_tools "${bellows_glslc_version}${bellows_spirv_opt_version}")

# Sets <result> to the compiler's command line up to the defines.
function(bellows_glslc_command result source output depfile)
    if(bellows_glslc_is_glslang)
        set(command "${bellows_glslc}" -V --quiet --target-env vulkan1.3 -S comp "${source}"
            -o "${output}")
        if(depfile)
            list(APPEND command --depfile "${depfile}")
        endif()
    else()
        set(command "${bellows_glslc}" --target-env=vulkan1.3 -std=460 -fshader-stage=comp
            "${source}" -o "${output}")
        if(depfile)
            list(APPEND command -MD -MF "${depfile}" -MT "${output}")
        endif()
    endif()
    set(${result} "${command}" PARENT_SCOPE)
endfunction()

# Whether the compiler knows a GLSL extension; asked once per compiler and version.
function(bellows_probe_extension result extension)
    string(SHA256 key "${bellows_glslc}${bellows_glslc_version}")
    string(SUBSTRING "${key}" 0 12 key)
    set(variable BELLOWS_GLSL_${key}_${extension})
    if(NOT DEFINED ${variable})
        set(base "${PROJECT_BINARY_DIR}/CMakeFiles/bellows_probe/${extension}")
        file(WRITE "${base}.comp" "#version 460\n#extension ${extension} : require\n"
            "layout(local_size_x = 1) in;\nvoid main() {}\n")
        bellows_glslc_command(command "${base}.comp" "${base}.spv" "")
        execute_process(COMMAND ${command} RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
        if(status EQUAL 0)
            set(known ON)
        else()
            set(known OFF)
        endif()
        set(${variable} ${known} CACHE INTERNAL "the GLSL compiler knows ${extension}")
        message(STATUS "GLSL extension ${extension}: ${known}")
    endif()
    set(${result} ${${variable}} PARENT_SCOPE)
endfunction()

# --- the generator --------------------------------------------------------------------------------
find_package(nlohmann_json REQUIRED)
add_subdirectory("${CMAKE_CURRENT_LIST_DIR}/shader_bank" "${PROJECT_BINARY_DIR}/shader_bank")

# One custom command per variant; appends to the caller's `spirv_files` and `unbuilt`.
function(bellows_compile_variant kernel variant_json source)
    string(JSON variant GET "${variant_json}" name)
    foreach(list_name defines extensions)
        set(${list_name} "")
        string(JSON count ERROR_VARIABLE missing LENGTH "${variant_json}" ${list_name})
        if(NOT missing AND count GREATER 0)
            math(EXPR last "${count} - 1")
            foreach(i RANGE ${last})
                string(JSON item GET "${variant_json}" ${list_name} ${i})
                list(APPEND ${list_name} "${item}")
            endforeach()
        endif()
    endforeach()
    set(id "${kernel}.${variant}")
    foreach(extension IN LISTS extensions)
        bellows_probe_extension(known ${extension})
        if(NOT known)
            set(unbuilt "${unbuilt}${id} the GLSL compiler lacks ${extension}\n" PARENT_SCOPE)
            return()
        endif()
    endforeach()
    list(TRANSFORM defines PREPEND -D)
    set(raw "${output_dir}/spirv/${id}.raw.spv")
    set(final "${output_dir}/spirv/${id}.spv")
    set(script "${PROJECT_SOURCE_DIR}/cmake/compile_shader.sh")
    if(bellows_glslc_is_glslang)
        bellows_glslc_command(command "${source}" "${raw}" "${raw}.d")
        set(validate "${BELLOWS_SPIRV_VAL}" --target-env vulkan1.3 --scalar-block-layout)
        set(commands COMMAND ${command} ${defines} "-I${source_dir}/include"
                "-I${output_dir}/glsl"
            COMMAND ${validate} "${raw}"
            COMMAND "${BELLOWS_SPIRV_OPT}" --target-env=vulkan1.3 -O --preserve-interface "${raw}"
                -o "${final}"
            COMMAND ${validate} "${final}")
    else()
        set(commands COMMAND "${script}" "${raw}" "${final}" "${source_dir}" "${output_dir}/glsl"
            "${output_dir}/glsl/${kernel}.kernel.glsl" "${source}" "${bellows_shader_tools}"
            "${BELLOWS_SPIRV_VAL}" "${BELLOWS_SPIRV_OPT}" "${bellows_glslc}"
            --target-env=vulkan1.3 -std=460 -fshader-stage=comp ${defines})
    endif()
    add_custom_command(OUTPUT "${raw}" "${final}" ${commands}
        DEPENDS "${source}" "${output_dir}/glsl/${kernel}.kernel.glsl" "${script}"
        DEPFILE "${raw}.d"
        COMMENT "Shader ${id}"
        VERBATIM)
    set(spirv_files "${spirv_files};${final}" PARENT_SCOPE)
endfunction()

# bellows_shader_bank(MANIFEST file SOURCE_DIR folder OUTPUT_DIR folder)
# Leaves the bank's generated files in the global properties BELLOWS_BANK_*.
function(bellows_shader_bank)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "MANIFEST;SOURCE_DIR;OUTPUT_DIR" "")
    set(source_dir "${arg_SOURCE_DIR}")
    set(output_dir "${arg_OUTPUT_DIR}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${arg_MANIFEST}")
    set_property(GLOBAL PROPERTY BELLOWS_BANK_DIR "${output_dir}")
    file(READ "${arg_MANIFEST}" manifest)
    string(JSON num_kernels ERROR_VARIABLE error LENGTH "${manifest}" kernels)
    if(error)
        message(FATAL_ERROR "${arg_MANIFEST}: ${error}")
    endif()

    set(headers "${output_dir}/include/bellows/kernels/kernels.hpp")
    set(glsl "")
    set(spirv_files "")
    set(unbuilt "")
    set(modules "")
    math(EXPR last "${num_kernels} - 1")
    foreach(i RANGE ${last})
        string(JSON kernel GET "${manifest}" kernels ${i})
        string(JSON name GET "${kernel}" name)
        string(JSON source GET "${kernel}" source)
        string(JSON variants GET "${kernel}" variants)
        string(JSON num_variants LENGTH "${variants}")
        list(APPEND headers "${output_dir}/include/bellows/kernels/${name}.hpp")
        math(EXPR last_variant "${num_variants} - 1")
        string(JSON native ERROR_VARIABLE no_native GET "${kernel}" native)
        if(NOT no_native)
            foreach(j RANGE ${last_variant})
                string(JSON module GET "${variants}" ${j} module)
                list(APPEND modules "${source_dir}/${module}")
            endforeach()
            continue()
        endif()
        list(APPEND glsl "${output_dir}/glsl/${name}.kernel.glsl")
        foreach(j RANGE ${last_variant})
            string(JSON variant GET "${variants}" ${j})
            bellows_compile_variant(${name} "${variant}" "${source_dir}/${source}")
        endforeach()
    endforeach()
    list(REMOVE_ITEM spirv_files "")
    list(REMOVE_DUPLICATES modules)
    file(MAKE_DIRECTORY "${output_dir}/spirv")
    file(CONFIGURE OUTPUT "${output_dir}/unbuilt.txt" CONTENT "${unbuilt}" @ONLY)

    add_custom_command(OUTPUT ${headers} ${glsl}
        COMMAND bellows_shader_bank bindings "${arg_MANIFEST}" "${output_dir}"
        DEPENDS "${arg_MANIFEST}" bellows_shader_bank
        COMMENT "Shader bindings" VERBATIM)
    add_custom_command(OUTPUT "${output_dir}/bank.cpp" "${output_dir}/bank.S"
        COMMAND bellows_shader_bank embed "${arg_MANIFEST}" "${output_dir}"
        DEPENDS "${arg_MANIFEST}" bellows_shader_bank "${output_dir}/unbuilt.txt" ${spirv_files}
            ${modules}
        COMMENT "Shader bank" VERBATIM)
    add_custom_target(bellows_shaders DEPENDS ${headers} ${glsl} "${output_dir}/bank.cpp"
        "${output_dir}/bank.S")
    set_property(GLOBAL PROPERTY BELLOWS_BANK_SPIRV "${spirv_files};${modules}")
endfunction()

# Compiles the bank into `target` and gives it, and all who link it, the generated headers.
function(bellows_embed_shader_bank target)
    get_property(dir GLOBAL PROPERTY BELLOWS_BANK_DIR)
    get_property(spirv GLOBAL PROPERTY BELLOWS_BANK_SPIRV)
    # The custom commands stand in another folder, so their outputs are marked by hand here.
    set_source_files_properties("${dir}/bank.cpp" "${dir}/bank.S" PROPERTIES GENERATED ON)
    set_source_files_properties("${dir}/bank.S" PROPERTIES OBJECT_DEPENDS "${spirv}")
    target_sources(${target} PRIVATE "${dir}/bank.cpp" "${dir}/bank.S")
    add_dependencies(${target} bellows_shaders)
    target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${dir}/include>)
endfunction()
