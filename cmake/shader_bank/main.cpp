// SPDX-License-Identifier: MIT

// Generator of the shader bank, run by the build:
//   bellows_shader_bank bindings MANIFEST OUTPUT   GLSL kernel headers and C++ structs
//   bellows_shader_bank embed MANIFEST OUTPUT      bank.cpp, bank.S: checked SPIR-V, native modules

#include "manifest.hpp"

#include <exception>
#include <iostream>
#include <string>

int main(int argc, char** argv) {
    const std::string command = argc == 4 ? argv[1] : "";
    if (command != "bindings" && command != "embed") {
        std::cerr << "usage: " << argv[0] << " bindings|embed MANIFEST OUTPUT\n";
        return 2;
    }
    try {
        const auto kernels = shader_bank::read_manifest(argv[2]);
        if (command == "bindings")
            shader_bank::write_bindings(kernels, argv[3]);
        else
            shader_bank::write_bank(kernels, std::filesystem::path(argv[2]).parent_path(), argv[3]);
        return 0;
    } catch (const std::exception& error) {
        std::cerr << "shader bank: " << error.what() << "\n";
        return 1;
    }
}
