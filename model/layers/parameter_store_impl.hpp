// SPDX-License-Identifier: MIT
#pragma once

// What a ParameterStore is made of. Used by parameter_store.cpp and parameter_loading.cpp.

#include "weight_copies.hpp"
#include "weight_storage.hpp"
#include "weight_upload.hpp"

#include <bellows/model/parameter_store.hpp>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace bellows {

struct ParameterStore::Impl {
    Impl(Device& on, std::vector<ParameterInfo> mine, const WeightForms& kept_in,
         MemorySource source);

    /// Elements from `first` on, whole parameters of one range.
    void write(std::uint64_t first, std::span<const float> values);
    /// The same without copies for products, and of one parameter a part where it is divisible.
    void write_part(std::uint64_t first, std::span<const float> values);
    void make_copies(std::uint64_t first, std::uint64_t count);

    /// How parameters come from where they are stored.
    enum class Passage : std::uint8_t {
        Values, ///< as f32, from which the device makes what it keeps
        Bf16,   ///< as the device keeps them
        Codes,  ///< as the device keeps them, with scales
    };
    Passage passage_of(std::size_t index, bool bf16, bool codes) const;
    /// Parameters [begin, end), which stand side by side and come alike.
    void load_values(std::size_t begin, std::size_t end, const RowSource& source,
                     const MasterSink& masters);
    void load_bf16(std::size_t begin, std::size_t end, const Bf16RowSource& source,
                   WeightUpload& upload);
    void load_codes(std::size_t begin, std::size_t end, const CodeSource& source,
                    WeightUpload& upload);
    /// A parameter of more elements than are set at once.
    void load_large(const ListedParameter& parameter, const RowSource& source,
                    const MasterSink& masters,
                    const std::function<void(std::uint64_t)>& on_progress);

    Device& device;
    WeightForms forms;
    ParameterList list;
    WeightMemory memory;
    std::vector<Parameter> parameters; ///< with views of what `storage` and `copies` hold
    WeightStorage storage;
    WeightCopies copies;
};

} // namespace bellows
