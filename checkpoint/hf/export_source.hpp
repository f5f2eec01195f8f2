// SPDX-License-Identifier: MIT
#pragma once

// The tensors that an export writes, and where their values come from.

#include <bellows/base/mapped_file.hpp>
#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/shape/parameters.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace bellows {

struct ExportTensor {
    std::string name;
    std::vector<std::uint64_t> shape;
    ParameterInfo info;               ///< a parameter that it holds, or a part of
    std::uint64_t first_row = 0;      ///< of its rows among the parameter's, in the engine's order
    std::uint64_t head = 0;           ///< reordered_rows()
    const HfTensor* stored = nullptr; ///< in the folder that it comes from, or null
    const HfTensor* scales = nullptr; ///< of `stored`, where that has FP8 codes

    std::uint64_t columns() const { return shape.size() > 1 ? shape.back() : 1; }
    std::uint64_t rows() const;
};

class ExportSource {
public:
    virtual ~ExportSource() = default;
    const std::vector<ExportTensor>& tensors() const noexcept { return tensors_; }
    /// Rows from `first` on, as f32. Any thread may call.
    virtual void read(const ExportTensor& tensor, std::uint64_t first,
                      std::span<float> out) const = 0;

protected:
    /// Adds the embedding and the head once more for each MTP module, as DeepSeek's folders have
    /// them.
    void repeat_ends(const ModelConfig& model);

    std::vector<ExportTensor> tensors_; ///< in the order of the forward pass
};

/// The tensors of a folder under their own names.
class FolderSource : public ExportSource {
public:
    explicit FolderSource(const HfFolder& folder);
    void read(const ExportTensor& tensor, std::uint64_t first, std::span<float> out) const override;
};

/// The parameters of a model, each expert's apart. `read` is called from several threads.
class ParameterSource : public ExportSource {
public:
    using Read = std::function<void(const ParameterInfo& info, std::uint64_t first_row,
                                    std::span<float> out)>;
    ParameterSource(const ModelConfig& model, Read read);
    void read(const ExportTensor& tensor, std::uint64_t first, std::span<float> out) const override;

private:
    Read read_;
};

/// The f32 tensors of a checkpoint's model, in place. Any thread may call.
class CheckpointValues {
public:
    explicit CheckpointValues(const Checkpoint& checkpoint) : checkpoint_(&checkpoint) {}
    void read(const ParameterInfo& info, std::uint64_t first_row, std::span<float> out);

private:
    std::span<const std::byte> mapped(const std::filesystem::path& file);

    const Checkpoint* checkpoint_;
    std::mutex mutex_;
    std::map<std::string, MappedFile> maps_; ///< by path
};

} // namespace bellows
