// SPDX-License-Identifier: MIT
#pragma once

// A model as Hugging Face keeps it: config.json and safetensors, in one file or in shards with an
// index. Its tensors are read in place: pages that nobody asks for are not touched. A folder of
// others is hostile input: everything but the tensors' values has been checked after construction.
// Host only; const members may be called from any thread.

#include <bellows/base/mapped_file.hpp>
#include <bellows/checkpoint/hf_config.hpp>
#include <bellows/checkpoint/safetensors.hpp>
#include <bellows/shape/parameters.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bellows {

struct StoredRows;

/// A tensor of the folder, in place.
struct HfTensor : StoredTensor {
    std::span<const std::byte> bytes; ///< need not be aligned
    std::string file;                 ///< of the folder
};

class HfFolder {
public:
    /// Whether it has a config.json and is no checkpoint of a run of Bellows.
    static bool is_one(const std::filesystem::path& folder);

    /// Opens the files and checks that they hold exactly the model of config.json. Throws
    /// Error{Io}, Error{Corrupt} for files that contradict themselves, Error{InvalidArgument} for
    /// what is not supported: both name the file and the key or tensor.
    explicit HfFolder(const std::filesystem::path& folder);

    /// model.mtp_depth is the number of MTP modules (num_nextn_predict_layers) where the files have
    /// them, and 0 where they do not, or where a module's embedding or head is not the model's.
    const HfConfig& config() const noexcept { return config_; }
    /// Absolute, without links.
    const std::filesystem::path& folder() const noexcept { return folder_; }
    /// Those of the model, scales of FP8 codes included; without what is not used of the files.
    const std::map<std::string, HfTensor, std::less<>>& tensors() const noexcept {
        return tensors_;
    }
    /// Of these tensors.
    std::uint64_t bytes() const noexcept { return bytes_; }
    /// The type that most of these bytes have.
    StoredType main_type() const;
    /// Names in the files that are not read, sorted: tables of rotary angles; what MTP modules have
    /// of the model once more; MTP modules that are not as the configuration says.
    const std::vector<std::string>& unused() const noexcept { return unused_; }

    /// The values of rows from `first_row` on of a parameter of parameters(config().model), in
    /// their order, of a gain or bias its elements; out.size() is a multiple of the row's.
    /// FP8 codes are multiplied with their scales. Throws Error{Corrupt} that names the tensor
    /// where a code or a scale is no finite number.
    void read(const ParameterInfo& info, std::uint64_t first_row, std::span<float> out) const;
    /// The same, rounded to bf16 to nearest even: bf16 stays as it is.
    void read(const ParameterInfo& info, std::uint64_t first_row,
              std::span<std::uint16_t> out) const;

    /// Whether the parameter is stored as FP8 codes whose 128 x 128 blocks are its own: a gate and
    /// an up projection, which are one parameter, must each have a multiple of 128 rows, and heads
    /// whose rows stand in another order must divide 128. Of experts all of a layer and matrix.
    bool has_codes(const ParameterInfo& info) const;
    /// The codes of rows from `first_row` on, and the scales of all blocks [ceil(rows / 128),
    /// ceil(columns / 128)], of a parameter that has_codes(). Throw as read() does.
    void read_codes(const ParameterInfo& info, std::uint64_t first_row,
                    std::span<std::uint8_t> out) const;
    void read_scales(const ParameterInfo& info, std::span<float> out) const;

private:
    /// Rows [first_row, first_row + count) of a tensor that follow each other in a parameter, too,
    /// from its row `row` on.
    struct RowRun {
        const HfTensor* tensor;
        std::uint64_t first_row, row, count;
    };
    void open_files();
    void open_file(const std::string& name);
    void check_tensors();
    void check_tensor(const std::string& name, const std::vector<std::uint64_t>& shape,
                      const ParameterInfo& info);
    void check_head();
    void find_modules();
    bool same_tensors(std::string_view one, std::string_view other) const;
    bool is_unused(std::string_view name) const;
    void find_coded_experts();
    bool blocks_line_up(const ParameterInfo& info) const;
    const HfTensor& tensor(const std::string& name) const;
    StoredRows rows_of(const HfTensor& tensor, std::uint64_t columns) const;
    std::vector<RowRun> runs_of(const ParameterInfo& info, std::uint64_t first_row,
                                std::uint64_t count) const;
    template <class Out>
    void read_as(const ParameterInfo& info, std::uint64_t first_row, std::span<Out> out) const;

    std::filesystem::path folder_;
    HfConfig config_;
    std::map<std::string, std::string, std::less<>> index_; ///< tensor → file, with an index
    std::vector<MappedFile> maps_;
    std::map<std::string, HfTensor, std::less<>> tensors_;
    std::set<std::pair<std::int64_t, std::string>> coded_experts_; ///< of these layers and matrices
    std::vector<std::string> unused_;
    std::uint64_t bytes_ = 0;
};

} // namespace bellows
