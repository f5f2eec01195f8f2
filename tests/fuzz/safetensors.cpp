// SPDX-License-Identifier: MIT
// Reads any bytes as a safetensors file, and every tensor that it claims to have.
#include "fuzz/input_file.hpp"

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <stdlib.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const bellows::fuzz::InputFile file(data, size);
    try {
        const bellows::SafetensorsReader reader(file.path());
        for (const auto& tensor : reader.tensors()) {
            if (tensor.bytes > size || tensor.offset > size - tensor.bytes)
                ::abort();
            std::vector<std::byte> bytes(tensor.bytes);
            reader.read(tensor.name, bytes);
        }
        reader.verify();
    } catch (const bellows::Error& error) {
        if (error.code() == bellows::ErrorCode::Internal)
            ::abort();
    }
    return 0;
}
